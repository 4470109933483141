"""Training on recorded claims: resumed equals uninterrupted, bit for bit; damaged checkpoints; what stays on disk."""

from pathlib import Path

import pytest
import torch

from dartrl.config import parse_config
from dartrl.errors import CheckpointBroken
from dartrl.policy.manifest import verify_manifest
from dartrl.policy.model import load_policy, save_policy
from dartrl.train.workshop import Workshop

SCORES = [[1.0, 0.0, 1.0], [0.0, 0.5, 0.0]]


@pytest.fixture
def make_workshop(tmp_path: Path, make_policy, recorder, select_all):
    initial = tmp_path / "initial"
    save_policy(make_policy(), initial)

    def make(name: str, **training: object) -> Workshop:
        config = parse_config(
            {
                "policy": {"path": str(initial)},
                "training": {"minibatch_rows": 6, "microbatch_rows": 3, "learning_rate": 1e-3, "keep_checkpoints": 2, **training},
            }
        )
        return Workshop(config, tmp_path / name, blobs=recorder.blobs, select_steps=select_all)

    return make


@pytest.fixture
def claims(recorder):
    return [recorder.claim(f"c{n}", SCORES, seed=n) for n in range(4)]


def weights_of(workshop: Workshop) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in workshop.learner.policy.model.state_dict().items()}


def train(workshop: Workshop, claims, first_step: int) -> list[dict[str, float]]:
    return [workshop.train(claim, first_step + n, 1, False)[0] for n, claim in enumerate(claims)]


@pytest.mark.parametrize("preset", ["default", "paper"])
def test_a_resumed_training_equals_an_uninterrupted_one_bit_for_bit(make_workshop, claims, preset):
    whole = make_workshop("whole", preset=preset)
    whole.restore(None)
    metrics = train(whole, claims, 1)

    first = make_workshop("parts", preset=preset)
    first.restore(None)
    train(first, claims[:2], 1)
    checkpoint = first.save_checkpoint(2, 7)
    train(first, claims[2:3], 3)  # lost by the crash

    torch.manual_seed(12345)  # another process has another random state
    second = make_workshop("parts", preset=preset)
    assert second.restore(checkpoint) == 2
    resumed_metrics = train(second, claims[2:], 3)

    assert resumed_metrics == metrics[2:]
    expected, actual = weights_of(whole), weights_of(second)
    for name in expected:
        assert torch.equal(expected[name], actual[name]), name
    expected, actual = whole.learner.optimizer_state(), second.learner.optimizer_state()
    assert expected.keys() == actual.keys()
    for name in expected:
        assert torch.equal(expected[name], actual[name]), name


def test_the_optimizer_state_matters_to_that(make_workshop, claims):
    """The comparison above could not pass without it: weights alone give another result."""
    whole = make_workshop("whole")
    whole.restore(None)
    train(whole, claims[:3], 1)
    partial = make_workshop("partial")
    partial.restore(None)
    train(partial, claims[:2], 1)
    partial.learner.optimizer.state.clear()
    train(partial, claims[2:3], 3)
    assert any(not torch.equal(a, b) for a, b in zip(weights_of(whole).values(), weights_of(partial).values(), strict=True))


def test_the_reference_stays_the_initial_policy_after_a_resume(make_workshop, claims):
    workshop = make_workshop("run", preset="paper", minibatch_rows=100)
    workshop.restore(None)
    first = train(workshop, claims[:2], 1)
    assert first[0]["kl_to_initial"] == pytest.approx(0.0, abs=1e-6)
    assert first[1]["kl_to_initial"] > 1e-6
    resumed = make_workshop("run", preset="paper", minibatch_rows=100)
    resumed.restore(workshop.save_checkpoint(2, 3))
    assert train(resumed, claims[2:3], 3)[0]["kl_to_initial"] > 1e-6


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("optimizer.safetensors", "truncate"),
        ("policy/model.safetensors", "alter"),
        ("progress.json", "remove"),
        pytest.param("policy/model.safetensors", "truncate", marks=pytest.mark.slow),
        pytest.param("optimizer.safetensors", "remove", marks=pytest.mark.slow),
        pytest.param("manifest.json", "alter", marks=pytest.mark.slow),
    ],
)
def test_a_damaged_checkpoint_falls_back_to_the_next_older_one(make_workshop, claims, name, damage):
    workshop = make_workshop("run")
    workshop.restore(None)
    train(workshop, claims[:1], 1)
    workshop.save_checkpoint(1, 2)
    older = weights_of(workshop)
    train(workshop, claims[1:2], 2)
    newest = workshop.save_checkpoint(2, 3)
    path = Path(newest.path) / name
    data = path.read_bytes()
    if damage == "truncate":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "remove":
        path.unlink()
    else:
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    resumed = make_workshop("run")
    assert resumed.restore(newest) == 1
    for name, value in weights_of(resumed).items():
        assert torch.equal(value, older[name])


def test_without_an_intact_checkpoint_the_error_names_file_and_remedy(make_workshop, claims):
    workshop = make_workshop("run")
    workshop.restore(None)
    train(workshop, claims[:1], 1)
    only = workshop.save_checkpoint(1, 2)
    (Path(only.path) / "optimizer.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointBroken, match=r"optimizer\.safetensors.*no older checkpoint.*backup"):
        make_workshop("run").restore(only)


def test_only_the_newest_checkpoints_stay(make_workshop, claims, tmp_path: Path):
    workshop = make_workshop("run")
    workshop.restore(None)
    for step, claim in enumerate(claims, 1):
        train(workshop, [claim], step)
        workshop.save_checkpoint(step, step + 1)
        workshop.publish(step)
        workshop.clean([], step)
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-000003", "step-000004"]


def test_published_weights_are_complete_and_equal_the_learners(make_workshop, claims, tmp_path: Path):
    workshop = make_workshop("run")
    workshop.restore(None)
    train(workshop, claims[:1], 1)
    leftover = tmp_path / "run" / "weights" / ".v000003.partial"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half of a crashed publication")
    folder, checksum = workshop.publish(3)
    verify_manifest(folder, checksum)
    assert folder.name == "v000003"
    assert {"model.safetensors", "probes.json", "manifest.json", "config.json"} <= {path.name for path in folder.iterdir()}
    assert [path.name for path in folder.parent.iterdir()] == ["v000003"]
    published = load_policy(folder).model.state_dict()
    for name, value in weights_of(workshop).items():
        assert torch.equal(published[name], value)


def test_a_disk_that_refuses_leaves_no_trace(make_workshop, claims, tmp_path: Path):
    workshop = make_workshop("run")
    workshop.restore(None)
    train(workshop, claims[:1], 1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("a file where the folder belongs")
    with pytest.raises(OSError, match="checkpoints"):
        workshop.save_checkpoint(1, 2)
    (tmp_path / "run" / "checkpoints").unlink()
    assert workshop.save_checkpoint(1, 2).training_step == 1
