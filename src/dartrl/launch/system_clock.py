"""Real time: the one place where the process asks the machine what time it is.

Everything else receives a Clock, so that the same classes run in virtual time.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

T = TypeVar("T")


class SystemClock:
    """Clock of the machine, with a bounded pool of threads for blocking calls.

    `now` never runs backwards: it is the wall clock at construction plus the monotonic time since, so that a clock that
    is set while a run goes on moves no deadline.
    """

    def __init__(self, *, threads: int = 16) -> None:
        self._offset = time.time() - time.monotonic()
        self._threads = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="blocking")

    def now(self) -> float:
        """Seconds since the epoch."""
        return self._offset + time.monotonic()

    def stamp(self) -> str:
        """Local time as 20260131-235959, for names of folders."""
        return time.strftime("%Y%m%d-%H%M%S", time.localtime(self.now()))

    async def sleep(self, seconds: float) -> None:
        """Return after that time."""
        await asyncio.sleep(seconds)

    def timeout(self, seconds: float) -> AbstractAsyncContextManager[Any]:
        """Context that raises TimeoutError if its body takes longer."""
        return asyncio.timeout(seconds)

    async def run_blocking(self, function: Callable[..., T], *args: Any) -> T:
        """Result of a blocking call made in a thread of this clock's pool."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, functools.partial(function, *args))


async def wait_for_event(event: asyncio.Event, seconds: float) -> bool:
    """True as soon as the event is set, False after `seconds` without it."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
