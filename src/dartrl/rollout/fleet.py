"""The policy workers behind one router: which of them serves, who answers the next request, and the bounded queue.

Free of sockets: a worker is reached through a WorkerPort, which is HTTP in production and an object in simulations. A
request waits in one first-come queue until a worker has room, so that it is bound to a worker as late as possible and a
worker that is taken out of service has little to finish. Waiters are woken by a reply, by a worker that begins to serve,
or by their deadline. Answering is free of side effects and seeded, so a request whose worker died is sent to another one.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

from dartrl.errors import PolicyFault, PolicyOverloaded, PolicyUnavailable
from dartrl.interfaces import Clock
from dartrl.metrics import Meter
from dartrl.records import WeightsVersion

R = TypeVar("R")

MAX_ATTEMPTS = 3
"""Workers that may fail at one request before it fails itself; a request that kills workers stops here."""
FULL_PAUSE_SECONDS = 0.05
"""Pause of a request that a worker refused as full."""
AFFINITY_SLACK = 2
"""A request goes to the worker of its trajectory unless that one has this many more requests than the least loaded."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What a worker says about itself."""

    instance: str
    """Differs between two lives of a worker."""
    version: int | None
    """Weights version it holds; None if it holds none that was published."""
    loads_while_serving: bool = False
    """It answers requests while it loads and swaps between two replies by itself, so it need not be drained."""


class WorkerPort(Protocol):
    """How the router reaches one worker besides its requests."""

    @property
    def name(self) -> str:
        """Unique in the fleet."""
        ...

    async def status(self) -> WorkerStatus:
        """Present state. Raises PolicyUnavailable if the worker does not answer in time."""
        ...

    async def load(self, weights: WeightsVersion) -> None:
        """Return once the worker samples from these weights.

        Raises WeightsRejected if it refuses them and keeps the old ones, PolicyFault or PolicyUnavailable if nobody knows.
        """
        ...


P = TypeVar("P", bound=WorkerPort)


class WorkerState(StrEnum):
    """Only a serving worker gets requests."""

    JOINING = "joining"
    """New or restarted: must get the fleet's weights first."""
    SERVING = "serving"
    """Answers requests."""
    DRAINING = "draining"
    """Finishes its requests before a swap."""
    LOADING = "loading"
    """Changes its weights."""
    LOST = "lost"
    """Does not answer."""


class Worker(Generic[P]):
    """One worker as the router sees it; owned by the Fleet."""

    def __init__(self, port: P) -> None:
        self.port = port
        self.state = WorkerState.JOINING
        self.instance = ""
        self.version: int | None = None
        self.sending: dict[asyncio.Task[Any], None] = {}
        self.num_replies = 0
        self.num_in_flight = 0
        self.is_held = False
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def name(self) -> str:
        return self.port.name


@dataclass(eq=False, slots=True)
class _Waiter(Generic[P]):
    worker: asyncio.Future[Worker[P]]
    affinity: str
    avoid: frozenset[str]


class Fleet(Generic[P]):
    """Workers, their queue and the meters of both."""

    def __init__(self, *, clock: Clock, meter: Meter, capacity: int, max_waiting: int) -> None:
        """capacity: requests in flight per worker. max_waiting: requests in the queue before new ones are refused."""
        self.workers: dict[str, Worker[P]] = {}
        self.silence = SilenceMeter(clock.now)
        self._clock = clock
        self._meter = meter
        self._capacity = capacity
        self._max_waiting = max_waiting
        self._waiting: deque[_Waiter[P]] = deque()

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def num_in_flight(self) -> int:
        """Requests at workers."""
        return sum(worker.num_in_flight for worker in self.workers.values())

    # ------------------------------------------------------------------ requests

    async def submit(self, send: Callable[[P], Awaitable[R]], *, affinity: str = "", timeout_seconds: float) -> R:
        """The reply of whichever worker answers; `send` may be called again with another worker.

        Raises PolicyOverloaded if the queue is full, PolicyUnavailable at the deadline, or the last worker's PolicyFault.
        """
        if len(self._waiting) >= self._max_waiting:
            self._meter.add("rollout/requests_refused")
            raise PolicyOverloaded(f"{len(self._waiting)} requests wait already, the limit is rollout.max_waiting")
        started = self._clock.now()
        self.silence.begin_request()
        self._meter.add("rollout/requests")
        is_answered = False
        try:
            async with self._clock.timeout(timeout_seconds):
                reply = await self._submit(send, affinity)
            is_answered = True
            self._meter.observe("rollout/reply_seconds", self._clock.now() - started)
            return reply
        except TimeoutError:
            self._meter.add("rollout/requests_failed")
            raise PolicyUnavailable(f"no worker answered within {timeout_seconds:g} s; workers: {self._summary()}") from None
        except PolicyFault:
            self._meter.add("rollout/requests_failed")
            raise
        finally:
            self.silence.end_request(is_answered)

    async def _submit(self, send: Callable[[P], Awaitable[R]], affinity: str) -> R:
        avoid: frozenset[str] = frozenset()
        for attempt in range(1, MAX_ATTEMPTS + 1):
            while True:
                with self._meter.busy("rollout/queue_seconds"):
                    worker = await self._acquire(affinity, avoid)
                try:
                    return await self._send(worker, send)
                except PolicyOverloaded:
                    await self._clock.sleep(FULL_PAUSE_SECONDS)
                except PolicyFault as fault:
                    self._meter.add("rollout/retries")
                    avoid |= {worker.name}
                    if isinstance(fault, PolicyUnavailable):
                        self.lose(worker)
                    if attempt == MAX_ATTEMPTS:
                        raise
                    break
        raise AssertionError("the last attempt returns or raises")

    async def _send(self, worker: Worker[P], send: Callable[[P], Awaitable[R]]) -> R:
        """One attempt at one worker. Raises PolicyUnavailable if the worker is lost meanwhile."""
        task = asyncio.ensure_future(send(worker.port))
        worker.sending[task] = None
        try:
            reply = await task
            worker.num_replies += 1
            return reply
        except asyncio.CancelledError:
            if _is_being_cancelled():
                raise
            raise PolicyUnavailable(f"worker {worker.name} was lost while it worked on the request") from None
        finally:
            del worker.sending[task]
            self._release(worker)

    async def _acquire(self, affinity: str, avoid: frozenset[str]) -> Worker[P]:
        """A worker with room, one more request counted at it; in the order of asking."""
        waiter = _Waiter[P](asyncio.get_running_loop().create_future(), affinity, avoid)
        self._waiting.append(waiter)
        self._dispatch()
        try:
            return await waiter.worker
        except asyncio.CancelledError:
            if not waiter.worker.cancelled():
                self._release(waiter.worker.result())
            elif waiter in self._waiting:
                self._waiting.remove(waiter)
            raise

    def _release(self, worker: Worker[P]) -> None:
        worker.num_in_flight -= 1
        if worker.num_in_flight == 0:
            worker.idle.set()
        self._dispatch()

    def _dispatch(self) -> None:
        """Give workers to waiters, oldest first, while there is room."""
        while self._waiting:
            waiter = self._waiting[0]
            if waiter.worker.done():
                self._waiting.popleft()
                continue
            worker = self._choose(waiter)
            if worker is None:
                return
            self._waiting.popleft()
            worker.num_in_flight += 1
            worker.idle.clear()
            waiter.worker.set_result(worker)

    def _choose(self, waiter: _Waiter[P]) -> Worker[P] | None:
        """The trajectory's own worker if it is not much busier than the least loaded; None without room anywhere."""
        serving = [worker for worker in self.workers.values() if worker.state is WorkerState.SERVING]
        willing = [worker for worker in serving if worker.name not in waiter.avoid] or serving
        free = [worker for worker in willing if worker.num_in_flight < self._capacity]
        if not free:
            return None
        least = min(free, key=lambda worker: (worker.num_in_flight, worker.name))
        if not waiter.affinity or len(free) == 1:
            return least
        own = max(free, key=lambda worker: _affinity_rank(waiter.affinity, worker.name))
        return own if own.num_in_flight < least.num_in_flight + AFFINITY_SLACK else least

    # ------------------------------------------------------------------ workers

    def add(self, port: P) -> Worker[P]:
        """A worker that joins; the present one if the name is known."""
        return self.workers.setdefault(port.name, Worker(port))

    def serve(self, worker: Worker[P], version: int | None) -> None:
        """Send requests to the worker, which holds that version; one that is held stays out."""
        worker.version = version
        worker.state = WorkerState.DRAINING if worker.is_held else WorkerState.SERVING
        self._dispatch()

    async def drain(self, worker: Worker[P], timeout_seconds: float) -> bool:
        """Send nothing more and wait for the worker's last reply; False if it takes longer."""
        worker.state = WorkerState.DRAINING
        try:
            async with self._clock.timeout(timeout_seconds):
                await worker.idle.wait()
        except TimeoutError:
            return False
        return True

    def hold(self, worker: Worker[P]) -> None:
        """Keep the worker out of service until `resume`, by order of an operator."""
        worker.is_held = True
        if worker.state is WorkerState.SERVING:
            worker.state = WorkerState.DRAINING

    def resume(self, worker: Worker[P]) -> None:
        """Let a held worker join again."""
        worker.is_held = False
        if worker.state is WorkerState.DRAINING:
            worker.state = WorkerState.JOINING

    def suspend(self, worker: Worker[P]) -> None:
        """Send nothing more until the worker has the fleet's weights."""
        worker.state = WorkerState.JOINING

    def lose(self, worker: Worker[P]) -> None:
        """The worker does not answer: its requests go to others."""
        worker.state = WorkerState.LOST
        for task in list(worker.sending):
            task.cancel()

    def _summary(self) -> str:
        return ", ".join(f"{worker.name} {worker.state}" for worker in self.workers.values()) or "none"


class SilenceMeter:
    """The longest time in which somebody waited for a reply and none came.

    Time counts from the last reply, or from the request that ended a time without any.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._num_pending = 0
        self._since = 0.0
        self._longest = 0.0
        self._answered = asyncio.Event()

    def begin_request(self) -> None:
        if self._num_pending == 0:
            self._since = self._now()
        self._num_pending += 1

    def end_request(self, is_answered: bool) -> None:
        """A request ended; only an answer breaks the silence."""
        self._num_pending -= 1
        if is_answered:
            self._longest = max(self._longest, self._now() - self._since)
            self._since = self._now()
        if is_answered or self._num_pending == 0:
            self._answered.set()

    def restart(self) -> None:
        """Forget the longest silence so far; the one that lasts still counts from its beginning."""
        self._longest = 0.0

    def mark(self) -> None:
        """Let `next_answer` wait for answers from now on."""
        self._answered.clear()
        if self._num_pending == 0:
            self._answered.set()

    async def next_answer(self) -> None:
        """Return at the first answer since `mark`, at once if nobody waits for one; bounded by the caller."""
        await self._answered.wait()

    def longest(self) -> float:
        """Seconds, the silence that still lasts included."""
        lasting = self._now() - self._since if self._num_pending else 0.0
        return max(self._longest, lasting)


def _is_being_cancelled() -> bool:
    """True if somebody wants the current task to end, rather than a task that it waits for."""
    current = asyncio.current_task()
    return current is not None and current.cancelling() > 0


def _affinity_rank(affinity: str, worker: str) -> bytes:
    """Rendezvous hashing: each trajectory prefers one worker, and few change theirs when workers come and go."""
    return hashlib.blake2b(f"{affinity}\n{worker}".encode(), digest_size=8).digest()
