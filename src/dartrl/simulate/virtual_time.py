"""Virtual time: an event loop that jumps to the next timer instead of waiting for it.

All of asyncio works unchanged on it (sleep, timeout, Event, TaskGroup), an hour passes as fast as the callbacks run, and
the order of callbacks depends on nothing but the program, so equal seeds give equal runs. There are no sockets and no
threads: `VirtualClock.run_blocking` calls its function in place.
"""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

T = TypeVar("T")

START = 1_700_000_000.0
"""Where virtual time begins, in seconds since the epoch."""


class Deadlock(RuntimeError):
    """Every task waits for something that nobody will do."""


class _SkippingSelector(selectors.BaseSelector):
    """Selector without files: "waiting" for a timer moves virtual time to it."""

    def __init__(self) -> None:
        self.time = 0.0
        self._map: dict[Any, selectors.SelectorKey] = {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock("all tasks wait and no timer is set: something waits without a deadline")
        self.time += max(0.0, timeout)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = selectors.SelectorKey(fileobj, fileobj if isinstance(fileobj, int) else fileobj.fileno(), events, data)
        self._map[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._map.pop(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._map


class _NumberedTask(asyncio.Task[Any]):
    """Task whose place in a set follows from its number, not from its address: task groups cancel in an equal order."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], *, number: int, **options: Any) -> None:
        self._number = number
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop in virtual time; `time()` starts at 0."""

    def __init__(self) -> None:
        self._skipping = _SkippingSelector()
        super().__init__(self._skipping)
        numbers = itertools.count()
        self.set_task_factory(
            lambda loop, coroutine, **options: _NumberedTask(coroutine, number=next(numbers), loop=loop, **options)  # type: ignore[arg-type]
        )

    def time(self) -> float:
        return self._skipping.time


class VirtualClock:
    """Clock of code that runs on a VirtualTimeLoop; it belongs to the loop on which it is first asked."""

    def __init__(self, start: float = START) -> None:
        self._start = start
        self._loop: asyncio.AbstractEventLoop | None = None

    def now(self) -> float:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._start + self._loop.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def timeout(self, seconds: float) -> AbstractAsyncContextManager[Any]:
        return asyncio.timeout(seconds)

    async def run_blocking(self, function: Callable[..., T], *args: Any) -> T:
        return function(*args)


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Result of a coroutine run to its end in virtual time. Raises Deadlock if it can never end."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
