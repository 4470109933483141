"""Brings every worker to the newest published weights, one serving worker at a time, without dropping a request.

    serving -> draining -> loading -> serving        a newer version was published; the others keep serving
    serving -> serving                               the same, for a worker that loads while it serves and swaps by itself
    joining -> loading -> serving                    the worker is new or restarted: it serves nothing before

One task follows the ledger, one watches each worker. A worker that refuses weights keeps its old ones, is readmitted with
them, and an `alarm` event says so; it is asked again after a pause that doubles. With one worker, requests wait in the
fleet's queue for the moment of the swap. Versions in replies are stamped by the worker; the router only compares them.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from dartrl.errors import DartrlError, PolicyUnavailable, WeightsRejected
from dartrl.interfaces import Clock, Ledger
from dartrl.metrics import Meter
from dartrl.records import Event, WeightsVersion
from dartrl.rollout.fleet import Fleet, Worker, WorkerPort, WorkerState, WorkerStatus

log = logging.getLogger(__name__)

P = TypeVar("P", bound=WorkerPort)

FIRST_RETRY_SECONDS = 5.0
LONGEST_RETRY_SECONDS = 300.0
"""A worker that refused a version is asked again after pauses that double from the first to the longest."""
GAP_WAIT_SECONDS = 10.0
"""How long a sync waits for the first reply after it, to measure the whole inference gap."""


@dataclass(slots=True)
class _Retry:
    """Back-off of one worker that refused one version."""

    version: int
    at: float
    pause: float


@dataclass(slots=True)
class _Watch:
    """What WeightSync remembers about one worker."""

    held: WeightsVersion | None = None
    """Weights that the worker loaded or was found with; it returns to them if it takes no others."""
    retry: _Retry | None = None
    """Set after a refusal."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is reason to look at the worker now."""


class WeightSync(Generic[P]):
    """Keeps the fleet on the ledger's current weights."""

    def __init__(
        self,
        fleet: Fleet[P],
        *,
        ledger: Ledger,
        clock: Clock,
        meter: Meter,
        poll_seconds: float,
        drain_timeout_seconds: float,
    ) -> None:
        """poll_seconds: pause between two looks at the ledger and at each worker."""
        self._fleet = fleet
        self._ledger = ledger
        self._clock = clock
        self._meter = meter
        self._poll_seconds = poll_seconds
        self._drain_timeout_seconds = drain_timeout_seconds
        self._target: WeightsVersion | None = None
        self._proven: WeightsVersion | None = None
        self._watches: dict[str, _Watch] = {}
        self._turn = asyncio.Lock()

    @property
    def target(self) -> WeightsVersion | None:
        """The version that every worker should have."""
        return self._target

    async def run(self, stop: asyncio.Event) -> None:
        """Follow ledger and workers until `stop` is set. Workers added to the fleet meanwhile are taken up."""
        async with asyncio.TaskGroup() as group:
            while not stop.is_set():
                for name, worker in self._fleet.workers.items():
                    if name not in self._watches:
                        self._watches[name] = _Watch()
                        group.create_task(self._watch(worker, stop), name=f"watch-{name}")
                await self._look_at_ledger()
                await _wait(stop, self._poll_seconds, self._clock)
            for watch in self._watches.values():
                watch.news.set()

    async def _look_at_ledger(self) -> None:
        weights = await self._clock.run_blocking(self._ledger.current_weights)
        if weights is not None and weights != self._target:
            log.info("weights published version=%d step=%d", weights.version, weights.training_step)
            self._target = weights
            for watch in self._watches.values():
                watch.news.set()

    # ------------------------------------------------------------------ one worker

    async def _watch(self, worker: Worker[P], stop: asyncio.Event) -> None:
        watch = self._watches[worker.name]
        while not stop.is_set():
            watch.news.clear()
            status = await self._status(worker)
            if status is not None:
                self._compare(worker, status)
                await self._bring_up_to_date(worker, status)
            await _wait(watch.news, self._poll_seconds, self._clock)

    async def _status(self, worker: Worker[P]) -> WorkerStatus | None:
        try:
            return await worker.port.status()
        except PolicyUnavailable as error:
            if worker.state is not WorkerState.LOST:
                log.warning("worker lost name=%s reason=%s", worker.name, error)
                self._fleet.lose(worker)
            return None

    def _compare(self, worker: Worker[P], status: WorkerStatus) -> None:
        """Take a worker out that is not the one that was admitted: restarted, or with other weights than it should have."""
        is_known = status.instance == worker.instance and status.version == worker.version
        if worker.state is WorkerState.SERVING and not is_known:
            log.warning("worker changed name=%s version=%s instead of %s", worker.name, status.version, worker.version)
            self._fleet.suspend(worker)
        if worker.state is WorkerState.LOST:
            self._fleet.suspend(worker)
        worker.instance = status.instance

    async def _bring_up_to_date(self, worker: Worker[P], status: WorkerStatus) -> None:
        if worker.state is WorkerState.SERVING:
            if self._is_due(worker):
                async with self._turn:
                    if worker.state is WorkerState.SERVING and self._is_due(worker):
                        await self._swap(worker, must_drain=not status.loads_while_serving)
            return
        if worker.is_held:
            return
        weights = self._weights_for_joining(worker)
        if weights is not None:
            await self._admit(worker, weights, status)

    def _is_due(self, worker: Worker[P]) -> bool:
        return self._target is not None and worker.version != self._target.version and not self._must_wait(worker, self._target)

    def _must_wait(self, worker: Worker[P], weights: WeightsVersion) -> bool:
        retry = self._watches[worker.name].retry
        return retry is not None and retry.version == weights.version and self._clock.now() < retry.at

    def _weights_for_joining(self, worker: Worker[P]) -> WeightsVersion | None:
        """The fleet's version, or the last proven one while the worker refuses that."""
        target = self._target
        if target is None or not self._must_wait(worker, target):
            return target
        held = self._watches[worker.name].held
        return next((old for old in (held, self._proven) if old is not None and old.version != target.version), None)

    async def _admit(self, worker: Worker[P], weights: WeightsVersion, status: WorkerStatus) -> None:
        """Let a worker in that does not serve yet."""
        started = self._clock.now()
        if status.version != weights.version:
            worker.state = WorkerState.LOADING
            try:
                await worker.port.load(weights)
            except DartrlError as error:
                self._fleet.suspend(worker)
                await self._refused(worker, weights, error)
                return
        self._accept(worker, weights)
        seconds = self._clock.now() - started
        log.info("worker joined name=%s version=%d seconds=%.2f", worker.name, weights.version, seconds)
        await self._record("join", worker, {"version": weights.version, "seconds": seconds})

    async def _swap(self, worker: Worker[P], *, must_drain: bool) -> None:
        """Change the weights of a serving worker; one at a time in the fleet."""
        started = self._clock.now()
        old = worker.version
        silence = self._fleet.silence
        silence.restart()
        if must_drain and not await self._drain(worker):
            return
        drained = self._clock.now()
        weights = self._target
        assert weights is not None, "a worker is due only if there is a version"
        worker.state = WorkerState.LOADING if must_drain else worker.state
        try:
            await worker.port.load(weights)
        except DartrlError as error:
            await self._return_to_old(worker, old)
            await self._refused(worker, weights, error)
            return
        loaded = self._clock.now()
        silence.mark()
        self._accept(worker, weights)
        await self._first_answer()
        times = {"seconds": loaded - started, "drain_seconds": drained - started, "load_seconds": loaded - drained}
        await self._note_sync(worker, times | {"version": weights.version, "previous": old, "gap_seconds": silence.longest()})

    async def _drain(self, worker: Worker[P]) -> bool:
        """True once the worker is idle; else it goes on with its old weights."""
        if await self._fleet.drain(worker, self._drain_timeout_seconds):
            return True
        self._fleet.serve(worker, worker.version)
        late = f"its requests did not end within {self._drain_timeout_seconds:g} s (rollout.drain_timeout_seconds)"
        if self._target is not None:
            await self._refused(worker, self._target, PolicyUnavailable(late))
        return False

    async def _note_sync(self, worker: Worker[P], data: dict[str, Any]) -> None:
        self._meter.add("rollout/syncs")
        self._meter.observe("rollout/sync_seconds", data["seconds"])
        self._meter.observe("rollout/sync_gap_seconds", data["gap_seconds"])
        log.info(
            "worker synced name=%s version=%d seconds=%.3f gap=%.3f",
            worker.name,
            data["version"],
            data["seconds"],
            data["gap_seconds"],
        )
        await self._record("sync", worker, data)

    async def _first_answer(self) -> None:
        try:
            async with self._clock.timeout(GAP_WAIT_SECONDS):
                await self._fleet.silence.next_answer()
        except TimeoutError:
            log.warning("no reply within %.0f s after a sync", GAP_WAIT_SECONDS)

    async def _return_to_old(self, worker: Worker[P], old: int | None) -> None:
        """Readmit a worker that refused new weights with the ones it had; leave it out if nobody knows what it has."""
        status = await self._status(worker)
        if status is not None and status.version == old and status.instance == worker.instance:
            self._fleet.serve(worker, old)
        elif status is not None:
            self._fleet.suspend(worker)

    def _accept(self, worker: Worker[P], weights: WeightsVersion) -> None:
        watch = self._watches[worker.name]
        watch.held = weights
        if self._target is not None and weights.version == self._target.version:
            watch.retry = None
        self._proven = weights
        self._fleet.serve(worker, weights.version)

    async def _refused(self, worker: Worker[P], weights: WeightsVersion, error: DartrlError) -> None:
        watch = self._watches[worker.name]
        previous = watch.retry
        is_again = previous is not None and previous.version == weights.version
        pause = min(previous.pause * 2, LONGEST_RETRY_SECONDS) if previous and is_again else FIRST_RETRY_SECONDS
        watch.retry = _Retry(weights.version, self._clock.now() + pause, pause)
        reason = "weights_rejected" if isinstance(error, WeightsRejected) else "sync_failed"
        self._meter.add("rollout/syncs_failed")
        log.error(
            "weights not loaded worker=%s version=%d reason=%s; it keeps version %s, next try in %.0f s",
            worker.name,
            weights.version,
            error,
            worker.version,
            pause,
        )
        data = {"reason": reason, "version": weights.version, "kept": worker.version, "message": str(error), "retry_seconds": pause}
        await self._record("alarm", worker, data)

    async def _record(self, kind: str, worker: Worker[P], data: dict[str, Any]) -> None:
        event = Event(kind, worker.name, {"worker": worker.name, **data}, at=self._clock.now())
        await self._clock.run_blocking(self._ledger.record_event, event)


async def _wait(event: asyncio.Event, seconds: float, clock: Clock) -> None:
    """Return when the event is set, or after that time."""
    try:
        async with clock.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
