"""MiniWoB++ episodes in a real browser: conformance, scores, what the agent may see, and faults."""

from __future__ import annotations

import asyncio
import io
import os
import signal

import pytest
import pytest_asyncio
from PIL import Image

from dartrl.config import RunConfig, parse_config
from dartrl.envs.slots import SlotPool
from dartrl.envs.web.miniwob import PAGES_PER_SLOT, MiniwobEnvironment, create_pool
from dartrl.envs.web.task_set import family_names
from dartrl.errors import ConfigError, EnvironmentCrashed, EnvironmentFault, EnvironmentTimeout, EvaluatorFault
from dartrl.launch.system_clock import SystemClock
from dartrl.testing.environment_conformance import ENVIRONMENT_CHECKS, EnvironmentBench
from dartrl.types import Action, ActionKind, Task

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

CLOCK = SystemClock()
WAIT_A_STEP = (Action(ActionKind.MOVE, x=80.0, y=200.0),)


def task(family: str, seed: int = 1) -> Task:
    return Task(f"{family}/{seed}", family, seed)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pool():
    opened = create_pool(RunConfig(), CLOCK)
    await opened.start()
    yield opened
    await opened.close()


@pytest_asyncio.fixture(loop_scope="module")
async def environment(pool):
    yield await pool.acquire(0, task("click-test"))


async def click(environment: MiniwobEnvironment, selector: str):
    """The observation after a click on the middle of an element."""
    middle = "(({left, top, width, height}) => [left + width / 2, top + height / 2])"
    box = await environment.evaluate_js(f"{middle}(document.querySelector({selector!r}).getBoundingClientRect())")
    return await environment.step([Action(ActionKind.CLICK, x=box[0], y=box[1])])


@pytest.mark.parametrize("check", ENVIRONMENT_CHECKS, ids=lambda check: check.__name__)
async def test_conformance(pool, check):
    await check(EnvironmentBench(pool, task("click-button", 3), task("click-button", 4), WAIT_A_STEP))


# --------------------------------------------------------------------------- scores


async def test_a_solved_task_ends_with_full_score(environment):
    await environment.reset(task("click-test"))
    observation = await click(environment, "#subbtn")
    assert observation.done
    verdict = await environment.evaluate()
    assert (verdict.score, verdict.success, verdict.raw) == (1.0, True, 1.0)


async def test_a_failed_task_scores_nothing_and_keeps_the_raw_reward(environment):
    await environment.reset(task("click-test-2"))
    assert (await click(environment, "#subbtn2")).done
    verdict = await environment.evaluate()
    assert (verdict.score, verdict.success, verdict.raw) == (0.0, False, -1.0)


async def test_an_unfinished_task_scores_nothing(environment):
    await environment.reset(task("enter-text"))
    assert not (await click(environment, "#tt")).done
    verdict = await environment.evaluate()
    assert (verdict.score, verdict.success, verdict.raw) == (0.0, False, 0.0)


async def test_a_partial_reward_is_a_score_and_no_success(environment):
    await environment.reset(task("find-greatest"))
    await environment.evaluate_js("core.endEpisode(0.4, true); 0")
    verdict = await environment.evaluate()
    assert (verdict.score, verdict.success, verdict.raw) == (0.4, False, 0.4)


async def test_a_reward_that_is_no_number_is_an_evaluator_fault(environment):
    await environment.reset(task("click-test"))
    await environment.evaluate_js("core.endEpisode(NaN); 0")
    with pytest.raises(EvaluatorFault, match="not a number"):
        await environment.evaluate()


async def test_several_steps_solve_a_typing_task(environment):
    observation = await environment.reset(task("enter-text", 5))
    wanted = observation.instruction.split('"')[1]
    await click(environment, "#tt")
    await environment.step([Action(ActionKind.TYPE, text=wanted)])
    assert (await click(environment, "#subbtn")).done
    assert (await environment.evaluate()).success


async def test_actions_after_the_end_are_left_out(environment):
    await environment.reset(task("click-test"))
    box = await environment.evaluate_js("(({left, top}) => [left + 5, top + 5])(subbtn.getBoundingClientRect())")
    await environment.evaluate_js("window.clicks = 0; onclick = () => { clicks += 1 }; 0")
    observation = await environment.step([Action(ActionKind.CLICK, x=box[0], y=box[1])] * 3)
    assert observation.done
    await environment.step([Action(ActionKind.CLICK, x=5, y=100)])
    assert await environment.evaluate_js("clicks") == 1


async def test_silent_actions_do_not_touch_the_page(environment):
    first = await environment.reset(task("click-button"))
    observation = await environment.step(
        [Action(kind, text="x") for kind in (ActionKind.FINISH, ActionKind.FAIL, ActionKind.ASK_USER)]
    )
    assert (observation.screenshot, observation.done) == (first.screenshot, False)


# --------------------------------------------------------------------------- what the agent sees


async def test_cover_canvas_and_reward_are_never_visible(environment):
    ids = "['sync-task-cover', 'click-canvas', 'reward-display']"
    hidden = f"{ids}.map((id) => getComputedStyle(document.getElementById(id)).display)"
    await environment.reset(task("click-button"))
    assert await environment.evaluate_js(hidden) == ["none"] * 3
    before = await environment.step([Action(ActionKind.CLICK, x=2, y=205)])
    await environment.evaluate_js("core.endEpisode(1); 0")
    after = await environment.step([])
    assert after.done
    assert after.screenshot == before.screenshot, "the end of an episode shows"
    assert await environment.evaluate_js(hidden) == ["none"] * 3


async def test_the_task_is_drawn_at_its_own_size_inside_a_grey_frame(environment):
    observation = await environment.reset(task("click-button"))
    picture = Image.open(io.BytesIO(observation.screenshot)).convert("RGB")
    assert picture.size == (observation.width, observation.height) == (168, 224)
    assert {picture.getpixel((x, y)) for x in range(160, 168) for y in range(224)} == {(0x55, 0x55, 0x55)}
    assert {picture.getpixel((x, 0)) for x in range(160)} == {(0xFF, 0xFF, 0)}


async def test_a_list_opens_inside_the_picture_and_is_chosen_from_by_mouse(environment):
    before = await environment.reset(task("choose-list", 2))
    after = await click(environment, "#options, #area select")
    assert after.screenshot != before.screenshot
    options = await environment.evaluate_js(
        "[...document.querySelectorAll('option')].map((o) => o.getBoundingClientRect()).map((box) => [box.left + 9, box.top + 5])"
    )
    await environment.step([Action(ActionKind.CLICK, x=options[2][0], y=options[2][1])])
    assert await environment.evaluate_js("document.querySelector('#area select').selectedIndex") == 2


async def test_a_dialog_stays_inside_the_picture(environment):
    for seed in range(5):
        await environment.reset(task("click-dialog", seed))
        assert (await click(environment, ".ui-dialog-titlebar-close")).done
        assert (await environment.evaluate()).success


async def test_an_episode_begins_on_the_same_day_and_lasts(environment):
    await environment.reset(task("click-test"))
    assert await environment.evaluate_js("new Date().toDateString()") == "Mon Jan 05 2026"
    assert await environment.evaluate_js("[Date.now() - new Date(2026, 0, 5, 12) < 60000, new Date(2017, 1, 3).getMonth()]") == [
        True,
        1,
    ]
    assert await environment.evaluate_js("core.EPISODE_MAX_TIME") == 24 * 3600 * 1000


# --------------------------------------------------------------------------- slots and faults


@pytest.mark.slow
async def test_a_slot_keeps_a_bounded_number_of_pages(pool):
    environment = await pool.acquire(1, task("click-test"))
    families = family_names()[: PAGES_PER_SLOT + 3]
    for family in families:
        await environment.reset(task(family))
    marked = "window.mark = 1"
    await environment.evaluate_js(marked)
    await environment.reset(task(families[-2]))
    await environment.reset(task(families[-1], 2))
    assert await environment.evaluate_js("window.mark") == 1, "a page in use is not loaded again"
    assert len(environment._pages) == PAGES_PER_SLOT
    await environment.reset(task(families[0]))
    assert not (await environment.step([])).done


async def test_an_unknown_family_is_refused_and_harms_nothing(environment):
    with pytest.raises(ConfigError, match="did you mean"):
        await environment.reset(task("click-tset"))
    assert environment.is_healthy
    await environment.reset(task("click-test"))


async def test_nothing_can_be_done_before_the_first_reset(pool):
    await pool.discard(2)
    with pytest.raises(EnvironmentFault, match="call reset first"):
        await (await pool.acquire(2, task("click-test"))).step([])


@pytest.mark.slow
async def test_a_killed_browser_ends_all_its_episodes_and_the_next_acquire_replaces_it():
    pool = create_pool(RunConfig(), CLOCK)
    assert isinstance(pool, SlotPool)
    await pool.start()
    environments = [await pool.acquire(slot, task("click-button")) for slot in range(3)]
    for environment in environments:
        await environment.reset(task("click-button"))
    waits = [asyncio.create_task(environment.step([Action(ActionKind.WAIT)])) for environment in environments]
    await asyncio.sleep(0.05)
    os.kill(pool._host.browser.pid, signal.SIGKILL)
    async with CLOCK.timeout(10.0):
        for result in await asyncio.gather(*waits, return_exceptions=True):
            assert isinstance(result, EnvironmentCrashed)
    for slot in range(3):
        await pool.discard(slot)
        fresh = await pool.acquire(slot, task("click-button"))
        assert (await fresh.reset(task("click-button"))).instruction
    assert pool.hosts_started == 2
    await pool.close()


@pytest.mark.slow
async def test_a_hung_browser_ends_in_timeouts_and_is_replaced():
    pool = create_pool(parse_config({"environment": {"step_timeout_seconds": 3.0}}), CLOCK)
    await pool.start()
    environment = await pool.acquire(0, task("click-button"))
    await environment.reset(task("click-button"))
    hung = pool._host.browser.pid
    os.kill(hung, signal.SIGSTOP)
    with pytest.raises(EnvironmentTimeout):
        await environment.step([Action(ActionKind.CLICK, x=5, y=100)])
    assert not environment.is_healthy
    await pool.discard(0)
    fresh = await pool.acquire(0, task("click-button"))
    assert (await fresh.reset(task("click-button"))).instruction
    with pytest.raises(ProcessLookupError):
        os.kill(hung, 0)
    await pool.close()


async def test_a_crashed_page_costs_its_slot_only(pool):
    lost, kept = await pool.acquire(0, task("click-button")), await pool.acquire(3, task("click-button"))
    await lost.reset(task("click-button"))
    await kept.reset(task("click-button"))
    started = pool.hosts_started
    lost.page.send("Page.crash")
    with pytest.raises(EnvironmentCrashed):
        for _ in range(100):
            await lost.step([Action(ActionKind.CLICK, x=5, y=100)])
    await pool.discard(0)
    await kept.step([Action(ActionKind.CLICK, x=5, y=100)])
    assert (await (await pool.acquire(0, task("click-button"))).reset(task("click-button"))).instruction
    assert pool.hosts_started == started
