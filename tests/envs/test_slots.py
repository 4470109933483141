"""Slots: which environment a slot gets, and when host or environment are replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from dartrl.envs.slots import SlotPool
from dartrl.errors import EnvironmentFault
from dartrl.testing.clock import ManualClock
from dartrl.testing.fakes import FakeEnvironment
from dartrl.types import Task

TASK = Task("press/1", "press", 1)


class HostedFake(FakeEnvironment):
    @property
    def is_healthy(self) -> bool:
        return not self.is_broken


class ScriptedHost:
    """A host that fails on cue: `start_faults` and `open_faults` are raised first, in order."""

    def __init__(self, start_faults: list[str] | None = None, open_faults: list[str] | None = None) -> None:
        self.start_faults = start_faults or []
        self.open_faults = open_faults or []
        self.is_alive = False
        self.answers = True
        self.checks = 0
        self.closes = 0
        self.environments: list[HostedFake] = []

    async def start(self) -> None:
        await asyncio.sleep(0)
        if self.start_faults:
            raise EnvironmentFault(self.start_faults.pop(0))
        self.is_alive = True

    async def check(self) -> bool:
        self.checks += 1
        return self.answers

    async def open_environment(self) -> HostedFake:
        if self.open_faults:
            raise EnvironmentFault(self.open_faults.pop(0))
        self.environments.append(HostedFake())
        return self.environments[-1]

    async def close(self) -> None:
        self.is_alive = False
        self.closes += 1


def pool_of(*hosts: ScriptedHost, size: int = 2, episodes_per_start: int = 100) -> SlotPool:
    waiting = list(hosts)
    return SlotPool(size, lambda: waiting.pop(0), episodes_per_start=episodes_per_start, clock=ManualClock())


async def acquire_all(pool: SlotPool) -> Sequence[HostedFake]:
    return await asyncio.gather(*(pool.acquire(slot, TASK) for slot in range(pool.size)))  # type: ignore[return-value]


async def test_all_slots_share_one_host_and_have_their_own_environment():
    host = ScriptedHost()
    pool = pool_of(host, size=3)
    environments = await acquire_all(pool)
    assert len(set(map(id, environments))) == 3
    assert await acquire_all(pool) == environments
    assert (pool.hosts_started, pool.environments_started, host.checks) == (1, 3, 0)


async def test_a_dead_host_is_replaced_for_every_slot():
    dead, fresh = ScriptedHost(), ScriptedHost()
    pool = pool_of(dead, fresh)
    before = await acquire_all(pool)
    dead.is_alive = False
    after = await acquire_all(pool)
    assert not set(map(id, before)) & set(map(id, after))
    assert all(environment.is_closed for environment in before)
    assert (dead.closes, pool.hosts_started, fresh.is_alive) == (1, 2, True)


async def test_a_hung_host_is_found_out_after_a_fault_and_replaced():
    hung, fresh = ScriptedHost(), ScriptedHost()
    pool = pool_of(hung, fresh)
    await acquire_all(pool)
    hung.answers = False
    assert await pool.acquire(0, TASK) in hung.environments, "without a fault nobody asks"
    await pool.discard(0)
    assert await pool.acquire(1, TASK) in fresh.environments
    assert (hung.closes, hung.checks) == (1, 1)


async def test_one_faulty_environment_does_not_cost_the_host():
    host = ScriptedHost()
    pool = pool_of(host)
    first, second = await acquire_all(pool)
    await pool.discard(0)
    assert first.is_closed
    assert await pool.acquire(0, TASK) is not first
    assert await pool.acquire(1, TASK) is second
    assert (pool.hosts_started, host.checks) == (1, 1), "checked once, then trusted again"


async def test_a_broken_environment_is_replaced_even_if_nobody_discards_it():
    pool = pool_of(ScriptedHost())
    environment = await pool.acquire(0, TASK)
    environment.is_broken = True
    assert await pool.acquire(0, TASK) is not environment
    assert environment.is_closed


async def test_an_environment_is_fresh_after_so_many_episodes():
    pool = pool_of(ScriptedHost(), episodes_per_start=3)
    environments = [await pool.acquire(0, TASK) for _ in range(7)]
    assert [environments.index(environment) for environment in environments] == [0, 0, 0, 3, 3, 3, 6]


async def test_a_host_that_opens_nothing_is_checked_and_replaced():
    useless, fresh = ScriptedHost(open_faults=["no context"]), ScriptedHost()
    useless.answers = False
    pool = pool_of(useless, fresh)
    assert await pool.acquire(0, TASK) in fresh.environments
    assert useless.closes == 1


async def test_two_failures_in_a_row_reach_the_caller():
    host = ScriptedHost(open_faults=["first", "second"])
    pool = pool_of(host)
    with pytest.raises(EnvironmentFault, match="second"):
        await pool.acquire(0, TASK)
    assert await pool.acquire(0, TASK) in host.environments, "and the slot works again later"


async def test_a_host_that_does_not_start_is_reported_and_tried_again():
    pool = pool_of(ScriptedHost(start_faults=["no browser; install it"]), ScriptedHost())
    with pytest.raises(EnvironmentFault, match="install it"):
        await pool.start()
    await pool.acquire(0, TASK)
    assert pool.hosts_started == 1


async def test_close_ends_the_host_and_may_be_called_twice():
    host = ScriptedHost()
    pool = pool_of(host)
    await acquire_all(pool)
    await pool.close()
    await pool.close()
    assert (host.closes, host.is_alive) == (1, False)
