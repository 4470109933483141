"""Environment slots of one runner: who has which environment, when it is replaced, and what it is replaced by.

Generic over the host, the thing that environments live in: a browser, a desktop, a virtual machine. One host serves all
slots of a pool. A host that died takes its environments with it; the next `acquire` of any slot starts another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dartrl.errors import EnvironmentFault
from dartrl.interfaces import Clock, Environment
from dartrl.types import Task

logger = logging.getLogger(__name__)

ATTEMPTS = 2
"""Hosts tried by one acquire: the present one, and a fresh one if that turns out to be broken."""


class HostedEnvironment(Environment, Protocol):
    """An environment that knows whether it is still good for another episode."""

    @property
    def is_healthy(self) -> bool:
        """False after any fault."""
        ...


class Host(Protocol):
    """What the environments of a pool live in."""

    @property
    def is_alive(self) -> bool:
        """False as soon as the host is known to be dead; costs nothing."""
        ...

    async def start(self) -> None:
        """Bring it up. Raises EnvironmentFault with the remedy, and leaves nothing behind then."""
        ...

    async def check(self) -> bool:
        """True if the host answers within a few seconds."""
        ...

    async def open_environment(self) -> HostedEnvironment:
        """A fresh environment. Raises EnvironmentFault."""
        ...

    async def close(self) -> None:
        """End it with all its processes; never raises EnvironmentFault. May be called twice."""
        ...


@dataclass(slots=True)
class _Held:
    """The environment of one slot."""

    environment: HostedEnvironment
    host: Host
    episodes: int = 0


class SlotPool:
    """Implements EnvironmentPool. One task at a time per slot; slots are independent of each other."""

    def __init__(self, size: int, create_host: Callable[[], Host], *, episodes_per_start: int, clock: Clock) -> None:
        """episodes_per_start: episodes after which a slot gets a fresh environment."""
        self.size = size
        self.hosts_started = 0
        self.environments_started = 0
        self._create_host = create_host
        self._episodes_per_start = episodes_per_start
        self._clock = clock
        self._slots: list[_Held | None] = [None] * size
        self._host: Host | None = None
        self._is_suspect = False
        self._host_lock = asyncio.Lock()

    async def start(self) -> None:
        """Start the first host. Raises EnvironmentFault with the remedy."""
        await self._usable_host()

    async def acquire(self, slot: int, task: Task) -> Environment:
        """A healthy environment for the slot. Raises EnvironmentFault if two hosts in a row cannot provide one."""
        for attempt in range(ATTEMPTS):
            host = await self._usable_host()
            held = self._slots[slot]
            if held is not None and not self._is_good(held, host):
                await self._drop(slot)
                held = None
            try:
                if held is None:
                    held = _Held(await host.open_environment(), host)
                    self._slots[slot] = held
                    self.environments_started += 1
            except EnvironmentFault as error:
                self._is_suspect = True
                if attempt + 1 == ATTEMPTS:
                    raise
                logger.warning("environment did not open slot=%d task=%s, trying again: %s", slot, task.id, error)
                continue
            held.episodes += 1
            return held.environment
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def discard(self, slot: int) -> None:
        """Drop the slot's environment after a fault; the host is checked before it is used again."""
        self._is_suspect = True
        await self._drop(slot)

    async def close(self) -> None:
        """Close all environments and the host."""
        self._slots = [None] * self.size
        host, self._host = self._host, None
        if host is not None:
            await host.close()

    def _is_good(self, held: _Held, host: Host) -> bool:
        return held.host is host and held.environment.is_healthy and held.episodes < self._episodes_per_start

    async def _drop(self, slot: int) -> None:
        held, self._slots[slot] = self._slots[slot], None
        if held is not None:
            await held.environment.close()

    async def _usable_host(self) -> Host:
        async with self._host_lock:
            host = self._host
            if host is not None:
                if host.is_alive and (not self._is_suspect or await host.check()):
                    self._is_suspect = False
                    return host
                logger.warning("environment host replaced hosts_started=%d alive=%s", self.hosts_started, host.is_alive)
                self._host = None
                await host.close()
            started = self._clock.now()
            host = self._create_host()
            await host.start()
            self._host = host
            self._is_suspect = False
            self.hosts_started += 1
            logger.info("environment host started seconds=%.2f slots=%d", self._clock.now() - started, self.size)
            return host
