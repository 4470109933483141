"""Experts solve their tasks in the real browser, disturbed or not; what they show is what the page rewards."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from dartrl.agent.demonstration import SCREENS_FILE, STATES_FILE, SUMMARY_FILE, Element, ExpertAction, is_inside
from dartrl.config import parse_config
from dartrl.envs.web.demonstrations import (
    FIRST_SEED,
    CollectionWriter,
    Disturbance,
    carry_out,
    collect_demonstrations,
    collect_pages,
    disturb,
)
from dartrl.envs.web.experts import EXPERT_SCRIPT, FAMILIES, PAGE_SCRIPT, require_expert
from dartrl.envs.web.miniwob import HEIGHT, WIDTH, create_pool
from dartrl.envs.web.task_set import SEEDS, family_names
from dartrl.errors import ConfigError
from dartrl.interfaces import EnvironmentPool
from dartrl.launch.system_clock import SystemClock
from dartrl.types import ActionKind

EPISODES = 20

OVERLAPPING = {"click-test-2": 0.8, "click-button-sequence": 0.8, "click-shape": 0.5}
"""Families whose elements may lie on top of each other, so that the centre of the right one can be covered; in click-shape a
disturbance ends the episode besides."""


@pytest.fixture
async def pool() -> AsyncIterator[EnvironmentPool]:
    pool = create_pool(parse_config({"environment": {"slots": 4}}), SystemClock(), init_scripts=(EXPERT_SCRIPT, PAGE_SCRIPT))
    await pool.start()
    yield pool
    await pool.close()


def test_every_expert_plays_an_existing_family() -> None:
    assert len(FAMILIES) >= 25
    assert set(FAMILIES) <= set(family_names())
    with pytest.raises(ConfigError, match="no scripted expert plays 'click-pie'"):
        require_expert("click-pie")


def test_demonstrations_share_no_seed_with_training_or_evaluation() -> None:
    assert all(FIRST_SEED not in seeds and FIRST_SEED + 100_000 not in seeds for seeds in SEEDS.values())


def test_carried_out_clicks_stay_in_the_box_on_the_grid() -> None:
    random = np.random.default_rng(0)
    expert = ExpertAction(ActionKind.CLICK, "ok", (40.3, 60.7, 50, 22))
    points = {(action.x, action.y) for action in (carry_out(expert, random) for _ in range(200))}
    assert len(points) > 4
    assert all(x is not None and y is not None and x % 4 == 0 and y % 4 == 0 for x, y in points)
    assert expert.box is not None and all(is_inside(x or 0, y or 0, expert.box) for x, y in points)


def test_disturbances_press_no_button() -> None:
    random = np.random.default_rng(0)
    elements = (Element("Submit", (2, 60, 90, 60), "button"), Element("textbox", (2, 130, 100, 20), "input"))
    expert = ExpertAction(ActionKind.CLICK, "Submit", (2, 60, 90, 60))
    for _ in range(300):
        action = disturb(expert, elements, random)
        assert action is None or not is_inside(action.x or 0, action.y or 0, elements[0].box)


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("disturbed", [0.0, 1.0])
async def test_experts_are_rewarded(tmp_path: Path, pool: EnvironmentPool, disturbed: float) -> None:
    writer = CollectionWriter(tmp_path)
    counts = await collect_demonstrations(
        [pool], writer, {family: EPISODES for family in FAMILIES}, disturbance=Disturbance(disturbed, 0.35)
    )
    writer.close()
    shares = {family: count.kept / count.episodes for family, count in counts.items()}
    allowed = 0.95 if disturbed == 0 else 0.75  # a disturbed episode may run out of steps
    poor = {family: share for family, share in shares.items() if share < min(allowed, OVERLAPPING.get(family, 1.0))}
    assert not poor


@pytest.mark.browser
@pytest.mark.slow
async def test_collections_are_complete_and_repeatable(tmp_path: Path, pool: EnvironmentPool) -> None:
    for name in ("first", "second"):
        writer = CollectionWriter(tmp_path / name)
        await collect_demonstrations([pool], writer, {"enter-text": 3, "drag-box": 3}, disturbance=Disturbance(0.5, 0.5))
        await collect_pages([pool], writer, 10)
        writer.finish({"made": name})
    first, second = (load(tmp_path / name) for name in ("first", "second"))
    assert len(first) > 20
    assert first == second


def load(folder: Path) -> dict[tuple[str, int, int], tuple[str, bytes]]:
    """(family, seed, step) -> line and screen."""
    summary = json.loads((folder / SUMMARY_FILE).read_text())
    lines = (folder / STATES_FILE).read_text().splitlines()
    screens = np.fromfile(folder / SCREENS_FILE, dtype=np.uint8).reshape(summary["states"], HEIGHT, WIDTH, 3)
    assert len(lines) == summary["states"]
    states = [json.loads(line) for line in lines]
    return {
        (state["family"], state["seed"], state["index"]): (line, screen.tobytes())
        for state, line, screen in zip(states, lines, screens, strict=True)
    }
