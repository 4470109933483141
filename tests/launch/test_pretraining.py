"""The pre-training recipe: checked before anything is collected; finished stages are found again."""

import json
from pathlib import Path

import pytest

from dartrl.agent.demonstration import SUMMARY_FILE
from dartrl.errors import ConfigError
from dartrl.launch.pretraining import is_collected, load_pretraining, train
from dartrl.policy.model import load_policy

RECIPE = Path(__file__).parents[2] / "recipes" / "pretrain-miniwob-tiny.toml"


def test_shipped_recipe_is_valid_and_leaves_tasks_undemonstrated() -> None:
    config = load_pretraining(RECIPE)
    undemonstrated = set(config.measurement.families) - set(config.collection.episodes)
    assert {"enter-text-dynamic", "login-user-popup", "focus-text", "drag-single-shape"} <= undemonstrated


def test_override_changes_one_option() -> None:
    config = load_pretraining(RECIPE, ["joint.steps=7", "collection.episodes.click-test=3"])
    assert (config.joint.steps, config.collection.episodes["click-test"]) == (7, 3)
    assert config.collection.episodes["drag-box"] == load_pretraining(RECIPE).collection.episodes["drag-box"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("joint.stepz=7", "joint.stepz is 7"),
        ("joint.steps=0", "joint.steps is 0"),
        ("collection.episodes.click-pie=3", "no scripted expert plays 'click-pie'"),
        ('measurement.families=["click-tset"]', "did you mean"),
        ("joint.steps=", "not valid TOML"),
    ],
)
def test_wrong_option_is_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_pretraining(RECIPE, [override])


def test_missing_recipe_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_pretraining(tmp_path / "none.toml")


def test_collection_counts_only_if_made_with_the_same_settings(tmp_path: Path) -> None:
    assert not is_collected(tmp_path, {"pages": 5})
    (tmp_path / SUMMARY_FILE).write_text(json.dumps({"states": 5, "settings": {"pages": 5}}))
    assert is_collected(tmp_path, {"pages": 5})
    assert not is_collected(tmp_path, {"pages": 6})


def test_trained_stage_is_not_trained_again(tmp_path: Path) -> None:
    config = load_pretraining(RECIPE, [f'work_dir="{tmp_path}"', "joint.stop_after=300"])
    config.plan.stage(300).mkdir(parents=True)
    assert train(config) == tmp_path / "stages" / "step-00300"


def test_shipped_policy_is_small_and_stock() -> None:
    folder = RECIPE.parents[1] / "models" / "tiny"
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen2_5_VLForConditionalGeneration"]
    assert not config["tie_word_embeddings"]
    assert sum(file.stat().st_size for file in folder.iterdir()) < 12_000_000
    policy = load_policy(folder)
    assert 1_000_000 < sum(value.numel() for value in policy.model.parameters()) < 6_000_000
    reply = "Thought: small box\nAction: drag(start_box='(20,72)', end_box='(104,96)')<|im_end|>"
    encoded = policy.tokenizer.backend_tokenizer.encode(reply, add_special_tokens=False)
    assert {"drag(start_box='(", ")', end_box='("} <= set(encoded.tokens)
    assert all(token in encoded.tokens for token in ("20", "72", "104", "96"))
    assert policy.tokenizer.decode(encoded.ids) == reply
