from __future__ import annotations

import json

import pytest

from dartrl.config import RunConfig, parse_config
from dartrl.launch.checks import check_images


def config_with(folder, processor: dict[str, object], **agent: int) -> RunConfig:
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    return parse_config({"policy": {"path": str(folder)}, "agent": agent})


@pytest.mark.parametrize(
    "processor",
    [{"size": {"shortest_edge": 3136, "longest_edge": 313_600}}, {"min_pixels": 3136, "max_pixels": 313_600}],
)
def test_image_limits_must_equal_those_of_the_policy(tmp_path, processor):
    assert check_images(config_with(tmp_path, processor)).ok
    result = check_images(config_with(tmp_path, processor, max_pixels=12_845_056))
    assert not result.ok
    assert result.remedy == "set agent.min_pixels=3136 and agent.max_pixels=313600"


def test_without_screenshots_image_limits_do_not_matter(tmp_path):
    assert check_images(config_with(tmp_path, {}, history_images=0)).ok
