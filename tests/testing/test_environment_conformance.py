"""The conformance suite holds for the fake, and finds environments that break a promise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dartrl.testing.environment_conformance import (
    ENVIRONMENT_CHECKS,
    EnvironmentBench,
    a_discarded_slot_gets_another,
    equal_seeds_look_equal,
    open_bench,
    png_size,
    steps_give_something_to_see,
)
from dartrl.testing.fakes import FakeEnvironment, FakePool
from dartrl.testing.images import flat_png
from dartrl.types import Observation, Task

TASK, OTHER = Task("press/1", "press", 1), Task("press/2", "press", 2)


@pytest.mark.parametrize("check", ENVIRONMENT_CHECKS, ids=lambda check: check.__name__)
async def test_fake_environment_keeps_every_promise(check):
    async with open_bench(lambda: FakePool(2), TASK, OTHER) as bench:
        await check(bench)


class ForgetfulEnvironment(FakeEnvironment):
    """Looks different at every reset."""

    resets = 0

    async def reset(self, task: Task) -> Observation:
        self.resets += 1
        observation = await super().reset(task)
        return replace(observation, screenshot=flat_png(observation.width, observation.height, self.resets))


class MisshapenEnvironment(FakeEnvironment):
    """Says that its picture is larger than it is."""

    async def step(self, actions):
        return replace(await super().step(actions), height=999)


class StickyPool(FakePool):
    """Never gives up an environment."""

    async def discard(self, slot: int) -> None:
        self.discarded.append(slot)


def pool_of(environment: FakeEnvironment) -> FakePool:
    pool = FakePool(2)
    pool._slots[0] = environment
    return pool


@pytest.mark.parametrize(
    ("pool", "check"),
    [
        (pool_of(ForgetfulEnvironment()), equal_seeds_look_equal),
        (pool_of(MisshapenEnvironment()), steps_give_something_to_see),
        (StickyPool(2), a_discarded_slot_gets_another),
    ],
    ids=["forgetful", "misshapen", "sticky"],
)
async def test_a_broken_promise_is_found(pool, check):
    await pool.start()
    with pytest.raises(AssertionError):
        await check(EnvironmentBench(pool, TASK, OTHER))


def test_png_size_reads_the_header():
    assert png_size(flat_png(7, 5, 1)) == (7, 5)
    with pytest.raises(AssertionError, match="no PNG"):
        png_size(b"GIF89a")
