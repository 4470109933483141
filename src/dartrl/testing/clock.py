"""A clock that stands still until a test turns it.

`ManualClock` is for unit tests on a normal event loop: nothing sleeps, `await clock.advance(5)` wakes what is due in
order. Whole systems run in virtual time instead, on the event loop of `dartrl.simulate.virtual_time`.
"""

from __future__ import annotations

import asyncio
import heapq
import types
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")

_SETTLE_ROUNDS = 64


class ManualClock:
    """Clock whose time moves only by `advance`; blocking work runs inline, at no time."""

    def __init__(self, start: float = 1_000_000.0) -> None:
        self._now = start
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._at(self._now + max(0.0, seconds), lambda: None if woken.done() else woken.set_result(None))
        await woken

    @asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncGenerator[asyncio.Timeout]:
        loop = asyncio.get_running_loop()
        is_open = True
        async with asyncio.timeout(None) as limit:
            self._at(self._now + max(0.0, seconds), lambda: limit.reschedule(loop.time()) if is_open else None)
            try:
                yield limit
            finally:
                is_open = False

    async def run_blocking(self, function: Callable[..., T], *args: Any) -> T:
        await settle(1)
        return function(*args)

    async def advance(self, seconds: float) -> None:
        """Move time on, waking sleepers in order of their due times and letting them act before time moves further."""
        end = self._now + seconds
        await settle()
        while self._timers and self._timers[0][0] <= end:
            due, _, wake = heapq.heappop(self._timers)
            self._now = max(self._now, due)
            wake()
            await settle()
        self._now = end

    def _at(self, due: float, wake: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._timers, (due, self._count, wake))


@types.coroutine
def settle(rounds: int = _SETTLE_ROUNDS) -> Generator[None]:
    """Let all other tasks of the event loop run for that many rounds."""
    for _ in range(rounds):
        yield
