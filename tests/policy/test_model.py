import json
import shutil

import pytest
import torch
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from dartrl.errors import ConfigError, WeightsRejected
from dartrl.policy.model import (
    VISION_TOKENS,
    PolicyShape,
    build_policy,
    build_tokenizer,
    load_policy,
    load_weights_into,
    save_policy,
)

TEXTS = ("Click (12,87) on “ok”.", "naïve café ☕ 日本語", "  two  spaces\n\ttab", "click(start_box='(12,87)')\nAction: ", "")


def test_saved_policy_is_the_same_for_stock_code(tiny_tokenizer, tmp_path):
    policy = build_policy(tiny_tokenizer, PolicyShape(text_layers=1, vision_layers=1), seed=1)
    save_policy(policy, tmp_path / "p")
    stock = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "p", dtype=torch.float32)
    assert stock.config.tie_word_embeddings is False
    for name, value in policy.model.state_dict().items():
        assert torch.equal(value, stock.state_dict()[name]), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "p")
    for text in TEXTS:
        assert tokenizer(text)["input_ids"] == tiny_tokenizer(text)["input_ids"]
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert [tokenizer.convert_tokens_to_ids(token) for token in VISION_TOKENS] == list(policy.banned_ids)
    assert Qwen2VLImageProcessorPil.from_pretrained(tmp_path / "p").merge_size == policy.settings.merge_size


def test_load_and_save_keep_weights_and_fingerprint(tiny_policy, tiny_policy_folder, tmp_path):
    save_policy(tiny_policy, tmp_path / "p")
    save_policy(tiny_policy, tmp_path / "p")
    again = load_policy(tmp_path / "p")
    assert again.fingerprint == tiny_policy.fingerprint == load_policy(tiny_policy_folder, dtype="bfloat16").fingerprint
    assert again.banned_ids == tiny_policy.banned_ids
    assert again.end_ids == tiny_policy.end_ids
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_equal_seeds_build_equal_policies(tiny_tokenizer):
    shape = PolicyShape(text_layers=1, vision_layers=1)
    one, same, other = (build_policy(tiny_tokenizer, shape, seed=seed).model.lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_default_shape_has_between_one_and_six_million_parameters(tiny_tokenizer):
    policy = build_policy(tiny_tokenizer, PolicyShape(), seed=0)
    assert 1_000_000 < sum(parameter.numel() for parameter in policy.model.parameters()) < 6_000_000


@pytest.mark.parametrize("change", ["tokenizer", "template", "images"])
def test_fingerprint_follows_everything_that_shapes_the_input(tiny_policy, tiny_policy_folder, tmp_path, change):
    folder = tmp_path / "p"
    shutil.copytree(tiny_policy_folder, folder)
    if change == "tokenizer":
        path = folder / "tokenizer.json"
        state = json.loads(path.read_text())
        state["model"]["merges"].pop()
        path.write_text(json.dumps(state))
    elif change == "template":
        path = folder / "chat_template.jinja"
        path.write_text(path.read_text() + " ")
    else:
        path = folder / "preprocessor_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "image_std": [0.5] * 3}))
    assert load_policy(folder).fingerprint != tiny_policy.fingerprint
    with pytest.raises(WeightsRejected, match="fingerprint"):
        load_weights_into(tiny_policy, folder)


def test_loading_weights_in_place_changes_them(tiny_policy, tiny_tokenizer, tmp_path):
    other = build_policy(tiny_tokenizer, PolicyShape(text_layers=2, vision_layers=2), seed=9)
    save_policy(other, tmp_path / "p")
    parameters = list(tiny_policy.model.parameters())
    load_weights_into(tiny_policy, tmp_path / "p")
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(parameters, other.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("absent", "no config.json"),
        ("no weights", "cannot be loaded"),
        ("truncated", "cannot be loaded"),
        ("no tokenizer", "no usable tokenizer|cannot be loaded"),
        ("other layers", "exactly the weights"),
    ],
)
def test_unusable_folders_are_named(tiny_policy_folder, tmp_path, damage, message):
    folder = tmp_path / "p"
    if damage != "absent":
        shutil.copytree(tiny_policy_folder, folder)
    if damage == "no weights":
        (folder / "model.safetensors").unlink()
    elif damage == "truncated":
        (folder / "model.safetensors").write_bytes((tiny_policy_folder / "model.safetensors").read_bytes()[:5000])
    elif damage == "no tokenizer":
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).unlink()
    elif damage == "other layers":
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["num_hidden_layers"] = 3
        config["text_config"]["layer_types"] = ["full_attention"] * 3
        (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message) as caught:
        load_policy(folder)
    assert str(folder) in str(caught.value)


def test_vocabulary_too_small_for_bytes_is_refused():
    with pytest.raises(ConfigError, match="vocab_size is 100"):
        build_tokenizer(["x"], vocab_size=100)
