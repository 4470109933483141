"""All 130 pages start, and look the same for the same seed, or are listed as unstable with the reason."""

from __future__ import annotations

import random

import pytest
import pytest_asyncio

from dartrl.envs.web.miniwob import MiniwobEnvironment, MiniwobHost
from dartrl.envs.web.pages import UNSTABLE_PAGES
from dartrl.envs.web.task_set import family_names
from dartrl.launch.system_clock import SystemClock
from dartrl.types import Action, ActionKind, Observation, Task

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

TARGETS = """[...document.querySelectorAll(['input', 'button', 'a', 'select', 'textarea', 'span', 'div', 'svg *', 'canvas']
.map((kind) => '#wrap ' + kind).join(', ') + ', .ui-dialog button')].map((element) => element.getBoundingClientRect())
.filter((box) => box.width && box.height && box.top > 45 && box.bottom < 220)
.map((box) => [Math.round(box.left + box.width / 2), Math.round(box.top + box.height / 2)])"""
"""Centres of everything that might react."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def host():
    running = MiniwobHost(SystemClock())
    await running.start()
    yield running
    await running.close()


def meddle(rng: random.Random, targets: list[list[int]]) -> Action:
    """An action that is likely to leave something behind."""
    x, y = rng.choice(targets) if targets and rng.random() < 0.7 else (rng.randrange(160), rng.randrange(50, 210))
    kind = rng.choices([ActionKind.CLICK, ActionKind.TYPE, ActionKind.DRAG, ActionKind.SCROLL], weights=[6, 2, 1, 1])[0]
    if kind is ActionKind.TYPE:
        return Action(kind, text=rng.choice(["ab1", "12\t", "x"]))
    if kind is ActionKind.DRAG:
        return Action(kind, x=x, y=y, to_x=rng.randrange(160), to_y=rng.randrange(50, 210))
    return Action(kind, x=x, y=y, direction=rng.choice(["up", "down"]))


async def play(environment: MiniwobEnvironment, task: Task) -> Observation:
    """The first observation of the instance, after which up to eight actions leave their marks."""
    rng = random.Random(task.id)
    first = await environment.reset(task)
    for _ in range(8):
        if (await environment.step([meddle(rng, await environment.evaluate_js(TARGETS))])).done:
            break
    return first


@pytest.mark.parametrize("family", family_names())
async def test_page_starts_and_looks_the_same_for_the_same_seed(host, family):
    tasks = [Task(f"{family}/{seed}", family, seed) for seed in (7, 1_000_007)]
    environment, other = await host.open_environment(), await host.open_environment()
    try:
        first = await play(environment, tasks[0])
        assert first.instruction and not first.done
        assert (await environment.evaluate()).score <= 1.0
        await play(environment, tasks[1])
        again = await play(environment, tasks[0])
        elsewhere = await other.reset(tasks[0])
        assert first.instruction == again.instruction == elsewhere.instruction
        page = UNSTABLE_PAGES.get(family)
        if page is None or not page.moves:
            assert first.screenshot == elsewhere.screenshot, "two slots see different pages"
            assert first.screenshot == again.screenshot, "an earlier episode shows"
            assert first.settled
    finally:
        await environment.close()
        await other.close()


@pytest.mark.parametrize("family", sorted(family for family, page in UNSTABLE_PAGES.items() if page.moves))
async def test_pages_listed_as_moving_do_move(host, family):
    """Without an action, or after one click, the picture changes by itself."""
    environment = await host.open_environment()
    try:
        await environment.reset(Task(f"{family}/3", family, 3))
        seen = set()
        for action in (ActionKind.CLICK, ActionKind.DRAG):
            x, y = (await environment.evaluate_js(TARGETS))[-1]
            await environment.step([Action(action, x=x, y=y, to_x=x + 40, to_y=y + 20)])
            for _ in range(6):
                seen.add((await environment.step([Action(ActionKind.WAIT)])).screenshot)
        assert len(seen) > 1
    finally:
        await environment.close()
