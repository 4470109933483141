"""What every environment and its pool must do, whatever they drive: one function per promise.

Run them over your own:

    @pytest.mark.parametrize("check", ENVIRONMENT_CHECKS, ids=lambda check: check.__name__)
    async def test_my_environment(check):
        async with open_bench(make_pool, task, other_task) as bench:
            await check(bench)

where `make_pool()` gives a fresh pool of at least two slots, and the tasks are two instances that look different.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from dartrl.interfaces import Environment, EnvironmentPool
from dartrl.types import Action, ActionKind, Observation, Task, Verdict

HARMLESS = (Action(ActionKind.MOVE, x=1.0, y=1.0),)
"""Actions that end no episode: the default of a bench."""


@dataclass(frozen=True, slots=True)
class EnvironmentBench:
    """A started pool and what may be done with it."""

    pool: EnvironmentPool
    """Started, at least two slots, closed by whoever opened the bench."""
    task: Task
    """An instance."""
    other: Task
    """Another instance; its first observation looks different."""
    actions: Sequence[Action] = HARMLESS
    """Actions that are valid in the first observation and end no episode."""

    async def environment(self, slot: int = 0) -> Environment:
        """The slot's environment for `task`."""
        return await self.pool.acquire(slot, self.task)


Check = Callable[[EnvironmentBench], Awaitable[None]]


@asynccontextmanager
async def open_bench(
    make_pool: Callable[[], EnvironmentPool], task: Task, other: Task, *, actions: Sequence[Action] = HARMLESS
) -> AsyncGenerator[EnvironmentBench]:
    """A bench whose pool is started before and closed after, whatever happens."""
    pool = make_pool()
    try:
        await pool.start()
        yield EnvironmentBench(pool, task, other, actions)
    finally:
        await pool.close()


# --------------------------------------------------------------------------- one environment


async def reset_gives_something_to_see(bench: EnvironmentBench) -> None:
    observation = await (await bench.environment()).reset(bench.task)
    _require_visible(observation)
    assert observation.instruction or bench.task.instruction, "nobody says what to do"
    assert not observation.done, "an episode begins undone"


async def equal_seeds_look_equal(bench: EnvironmentBench) -> None:
    environment = await bench.environment()
    first = await environment.reset(bench.task)
    await environment.step(bench.actions)
    await environment.reset(bench.other)
    await environment.step(bench.actions)
    _require_same(first, await environment.reset(bench.task))


async def slots_look_equal_too(bench: EnvironmentBench) -> None:
    first = await (await bench.environment(0)).reset(bench.task)
    second = await (await bench.environment(1)).reset(replace(bench.task, id=bench.task.id + "-again"))
    _require_same(first, second)


async def other_instances_look_different(bench: EnvironmentBench) -> None:
    environment = await bench.environment()
    first = await environment.reset(bench.task)
    second = await environment.reset(bench.other)
    assert (first.screenshot, first.text, first.instruction) != (second.screenshot, second.text, second.instruction)


async def steps_give_something_to_see(bench: EnvironmentBench) -> None:
    environment = await bench.environment()
    first = await environment.reset(bench.task)
    observation = await environment.step(bench.actions)
    _require_visible(observation)
    assert (observation.width, observation.height) == (first.width, first.height), "the screen changed its size"
    assert observation.settle_seconds >= 0


async def episodes_can_be_scored_at_any_time(bench: EnvironmentBench) -> None:
    environment = await bench.environment()
    await environment.reset(bench.task)
    before = await environment.evaluate()
    _require_verdict(before)
    assert not before.success, "nothing was done yet"
    await environment.step(bench.actions)
    after = await environment.evaluate()
    _require_verdict(after)
    assert await environment.evaluate() == after, "scoring changes the score"


async def versions_name_what_it_looks_like(bench: EnvironmentBench) -> None:
    versions = (await bench.environment()).versions()
    assert versions, "no version is recorded"
    assert all(isinstance(name, str) and isinstance(value, str) and value for name, value in versions.items())


async def close_may_be_called_twice(bench: EnvironmentBench) -> None:
    environment = await bench.environment()
    await environment.reset(bench.task)
    await environment.close()
    await environment.close()
    await bench.pool.discard(0)


# --------------------------------------------------------------------------- a pool


async def slots_are_independent(bench: EnvironmentBench) -> None:
    left, right = await bench.environment(0), await bench.pool.acquire(1, bench.other)
    assert left is not right
    first = await left.reset(bench.task)
    await right.reset(bench.other)
    await right.step(bench.actions)
    await bench.pool.discard(1)
    _require_visible(await left.step(bench.actions))
    _require_same(first, await left.reset(bench.task))


async def a_slot_keeps_its_environment(bench: EnvironmentBench) -> None:
    environment = await bench.environment()
    await environment.reset(bench.task)
    assert await bench.environment() is environment, "a healthy environment is used again"


async def a_discarded_slot_gets_another(bench: EnvironmentBench) -> None:
    environment = await bench.environment()
    first = await environment.reset(bench.task)
    await bench.pool.discard(0)
    fresh = await bench.environment()
    assert fresh is not environment
    _require_same(first, await fresh.reset(bench.task))


async def an_empty_slot_may_be_discarded(bench: EnvironmentBench) -> None:
    await bench.pool.discard(0)
    await bench.pool.discard(0)
    _require_visible(await (await bench.environment()).reset(bench.task))


ENVIRONMENT_CHECKS: Sequence[Check] = (
    reset_gives_something_to_see,
    equal_seeds_look_equal,
    slots_look_equal_too,
    other_instances_look_different,
    steps_give_something_to_see,
    episodes_can_be_scored_at_any_time,
    versions_name_what_it_looks_like,
    close_may_be_called_twice,
    slots_are_independent,
    a_slot_keeps_its_environment,
    a_discarded_slot_gets_another,
    an_empty_slot_may_be_discarded,
)
"""All promises; every backend runs every one."""


def png_size(data: bytes) -> tuple[int, int]:
    """(width, height) in pixels from the header of a PNG. Raises AssertionError if it is none."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n", "the screenshot is no PNG"
    return struct.unpack(">II", data[16:24])


def _require_visible(observation: Observation) -> None:
    assert observation.screenshot or observation.text, "neither a screenshot nor a text"
    if observation.screenshot:
        assert png_size(observation.screenshot) == (observation.width, observation.height), "the screenshot has another size"


def _require_same(first: Observation, second: Observation) -> None:
    assert first.instruction == second.instruction
    assert first.text == second.text
    assert first.screenshot == second.screenshot, "equal seeds gave different screenshots"


def _require_verdict(verdict: Verdict) -> None:
    assert 0.0 <= verdict.score <= 1.0
    assert verdict.success <= (verdict.score == 1.0), "a success is a full score"
