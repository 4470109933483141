import json

import pytest
import torch

from dartrl.errors import WeightsRejected
from dartrl.policy.model import save_policy
from dartrl.policy.probes import PROBES_NAME, check_probes, make_probes, write_probes


@pytest.fixture
def folder(tiny_policy, tmp_path):
    save_policy(tiny_policy, tmp_path / "p")
    write_probes(tiny_policy, tmp_path / "p")
    return tmp_path / "p"


def test_probes_cover_text_one_image_and_several(tiny_policy):
    images = [sum("png" in part for part in probe["turn"]) for probe in make_probes(tiny_policy)]
    assert images[:2] == [0, 1]
    assert images[2] > 1


def test_unchanged_policy_passes(tiny_policy, folder):
    assert check_probes(tiny_policy, folder, tolerance=1e-6) < 1e-6


@pytest.mark.parametrize(
    "part", ["lm_head.weight", "model.visual.blocks.0.mlp.down_proj.weight", "model.language_model.norm.weight"]
)
def test_a_change_anywhere_is_noticed(tiny_policy, folder, part):
    with torch.no_grad():
        tiny_policy.model.get_parameter(part).mul_(1.2)
    with pytest.raises(WeightsRejected, match="differs by"):
        check_probes(tiny_policy, folder, tolerance=1e-3)


def test_weights_that_are_not_finite_are_noticed(tiny_policy, folder):
    with torch.no_grad():
        tiny_policy.model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(WeightsRejected, match="differs by nan"):
        check_probes(tiny_policy, folder, tolerance=1e-3)


@pytest.mark.parametrize("damage", ["absent", "garbage", "empty", "other ids", "lengths"])
def test_damaged_probes_are_refused(tiny_policy, folder, damage):
    path = folder / PROBES_NAME
    probes = json.loads(path.read_text())
    if damage == "absent":
        path.unlink()
    elif damage == "garbage":
        path.write_text("{")
    elif damage == "empty":
        path.write_text("[]")
    elif damage == "other ids":
        probes[0]["prompt_ids"][0] += 1
        path.write_text(json.dumps(probes))
    else:
        probes[0]["logprobs"].pop()
        path.write_text(json.dumps(probes))
    with pytest.raises(WeightsRejected, match=PROBES_NAME):
        check_probes(tiny_policy, folder, tolerance=1e-3)
