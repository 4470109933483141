"""DATA MANAGER: the ledger as every role sees it.

Each method is one transaction: check the lease, apply the rules (one file per part: runs, leasing, assigning,
recording, claiming, training, upkeep), write. Rules are written once and run over any store. Slow work, reading and
writing blobs, happens before or after the transaction, never inside.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, TypeVar

from dartrl.config import RunConfig
from dartrl.data import assigning, claiming, leasing, reading, recording, runs, training, upkeep
from dartrl.data.encoding import encode_arrays
from dartrl.data.memory_store import MemoryStore
from dartrl.data.scope import RunScope
from dartrl.data.store import Store, Transaction, TransactionLost
from dartrl.errors import BlobCorrupt, ConfigError, LeaseLost
from dartrl.interfaces import BlobStore, Clock
from dartrl.records import (
    Assignment,
    Checkpoint,
    Claim,
    ClaimedGroup,
    EpisodeSummary,
    Evaluation,
    EvaluationResult,
    Event,
    Lease,
    Member,
    Phase,
    ResumePoint,
    Run,
    TrainingStep,
    Wait,
    WeightsVersion,
)
from dartrl.types import Task, Trajectory

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_ATTEMPTS = 10
"""Times that a transaction is tried when the database takes it back by itself."""
TICK_SECONDS = 1.0
"""Pause between two rounds of time-driven work."""


class DataManager:
    """Ledger of one run over a store. Thread-safe; many processes may share one database."""

    def __init__(self, store: Store, *, blobs: BlobStore, config: RunConfig, run_id: str) -> None:
        self.store = store
        self.scope = RunScope(run_id, config, blobs)

    def close(self) -> None:
        """Release connections."""
        self.store.close()

    def _write(self, rule: Callable[Concatenate[RunScope, Transaction, ...], T], *inputs: Any, durable: bool = False) -> T:
        """The rule in a transaction of its own; again if the database chose it as the victim of a deadlock."""
        for attempt in range(1, MAX_ATTEMPTS):
            try:
                return self._try(rule, inputs, durable=durable)
            except TransactionLost as error:
                logger.info("transaction repeated rule=%s attempt=%d detail=%s", rule.__name__, attempt, error)
        return self._try(rule, inputs, durable=durable)

    def _try(self, rule: Callable[..., T], inputs: tuple[Any, ...], *, durable: bool) -> T:
        with self.store.transaction(durable=durable) as transaction:
            return rule(self.scope, transaction, *inputs)

    def _read(self, rule: Callable[Concatenate[RunScope, Transaction, ...], T], *inputs: Any) -> T:
        with self.store.reading() as transaction:
            return rule(self.scope, transaction, *inputs)

    # ------------------------------------------------------------------ run

    def open_run(self, run: Run, tasks: Sequence[Task]) -> Run:
        """The run, created or resumed. Raises ConfigError if the id exists with other tasks."""
        return self._write(runs.open_run, run, tasks, durable=True)

    def run(self) -> Run:
        """Present state of the run."""
        return self._read(runs.read_run)

    def set_phase(self, phase: Phase) -> None:
        """Move the run to a phase; FINISHED settles what can no longer be trained on. Raises LedgerConflict."""
        self._write(runs.set_phase, phase)

    # ------------------------------------------------------------------ environment cluster

    def next_assignment(self, holder: str) -> Assignment | Wait:
        """The next episode for a free slot: evaluation first, then the oldest open group, then a new group if admitted."""
        return self._write(assigning.next_assignment, holder)

    def renew(self, leases: Sequence[Lease]) -> Sequence[Lease]:
        """The leases still held, with a later expiry."""
        return self._write(leasing.renew_leases, leases)

    def record_trajectory(self, lease: Lease, trajectory: Trajectory) -> None:
        """Store steps and outcome once; fills the slot if scored, frees it for a retry otherwise.

        Raises LeaseLost, LedgerConflict for an inconsistent record, BlobCorrupt for a screenshot that is not stored.
        """
        recording.check_trajectory(self.scope.blobs, lease, trajectory)
        arrays = self.scope.blobs.put(encode_arrays(trajectory)) if trajectory.steps else ""
        self._write(recording.record_trajectory, lease, trajectory, arrays)

    # ------------------------------------------------------------------ evaluation

    def open_evaluation(self, evaluation: Evaluation) -> None:
        """Queue the episodes of an evaluation; idempotent by id."""
        self._write(runs.open_evaluation, evaluation)

    def evaluation_result(self, evaluation_id: str) -> EvaluationResult:
        """Scores so far."""
        return self._read(runs.evaluation_result, evaluation_id)

    # ------------------------------------------------------------------ trainer

    def acquire_trainer(self, holder: str) -> Lease | None:
        """The run's trainer lease, or None while another trainer holds it."""
        return self._write(leasing.take_role, "trainer", holder, durable=True)

    def begin_training(self, lease: Lease) -> ResumePoint:
        """Roll back what was applied since the newest resumable checkpoint and say where to start."""
        return self._write(training.begin_training, lease, durable=True)

    def claim_groups(self, lease: Lease, count: int) -> Claim | None:
        """The oldest `count` trainable groups, or None while there are fewer.

        A group whose blobs turn out corrupt is rejected, and the claim is smaller by it.
        """
        claimed = self._write(claiming.claim_groups, lease, count, durable=True)
        if claimed is None:
            return None
        loaded = [self._load_group(lease, group) for group in claimed.groups]
        complete = tuple(group for group in loaded if group is not None)
        return Claim(claimed.id, complete) if complete else None

    def _load_group(self, lease: Lease, group: claiming.StoredGroup) -> ClaimedGroup | None:
        try:
            members = tuple(
                Member(each.id, reading.load_trajectory(self.scope, each.trajectory), each.role) for each in group.members
            )
        except BlobCorrupt as error:
            logger.warning("group rejected group=%s reason=blob_corrupt detail=%s", group.id, error)
            self._write(claiming.reject_claimed, lease, group.id, "blob_corrupt", durable=True)
            return None
        return ClaimedGroup(group.id, group.task, members)

    def next_weights_version(self, lease: Lease) -> int:
        """A version number that was never given out before."""
        return self._write(training.next_version, lease, durable=True)

    def publish_weights(self, lease: Lease, weights: WeightsVersion) -> None:
        """Publish weights outside a step: the initial ones, or those of a resumed checkpoint."""
        self._write(training.publish, lease, weights, durable=True)

    def acknowledge_step(self, lease: Lease, claim: Claim, step: TrainingStep, weights: WeightsVersion | None) -> None:
        """In one transaction: members claimed -> applied (or rejected), the step's row, and its weights version."""
        self._write(training.acknowledge, lease, claim, step, weights, durable=True)

    def record_checkpoint(self, lease: Lease, checkpoint: Checkpoint) -> None:
        """Members applied up to the checkpoint's step become trained, each `used` + 1; its files are already durable."""
        self._write(training.record_checkpoint, lease, checkpoint, durable=True)

    # ------------------------------------------------------------------ rollout service

    def current_weights(self) -> WeightsVersion | None:
        """The newest published version that is not rolled back."""
        return self._read(reading.read_weights)

    # ------------------------------------------------------------------ events and reading

    def record_event(self, event: Event) -> None:
        """Append to the event log; a `join` or `sync` event also says which version its worker answers with now."""
        self._write(recording.record_event, event)

    def events(self, kinds: Sequence[str] = (), after: float = 0.0) -> Sequence[Event]:
        """Events of these kinds (all if empty) later than `after`, in order."""
        return self._read(reading.read_events, kinds, after)

    def counts(self) -> Mapping[str, int]:
        """Counters for views: groups_open, groups_ready, trajectories, trajectories_<end>, members_<state>, leases, ..."""
        return self._read(reading.read_counts)

    def training_steps(self) -> Sequence[TrainingStep]:
        """Acknowledged steps of the present lineage, in order."""
        return self._read(reading.read_training_steps)

    def trajectories(self, *, purpose: str, family: str | None = None, limit: int = 100) -> Sequence[Trajectory]:
        """Newest scored trajectories with steps; `purpose` is train, evaluation or an evaluation id. Raises BlobCorrupt."""
        return [
            reading.load_trajectory(self.scope, stored)
            for stored in self._read(reading.newest_trajectories, purpose, family, limit)
        ]

    def episodes(self, *, after: float = 0.0) -> Sequence[EpisodeSummary]:
        """All attempts that ended later than `after`, without their steps, in order of their end."""
        return self._read(reading.read_episodes, after)

    # ------------------------------------------------------------------ time-driven work

    def acquire_manager(self, holder: str) -> Lease | None:
        """The run's manager lease, or None while another process holds it."""
        return self._write(leasing.take_role, "manager", holder)

    def tick(self, lease: Lease) -> Mapping[str, int]:
        """Expire leases, close groups at their deadline, run the circuit breaker; what was done, by name."""
        return self._write(upkeep.tick, lease)


def open_ledger(url: str, *, blobs: BlobStore, config: RunConfig, run_id: str, now: Callable[[], float]) -> DataManager:
    """The ledger of a run in a database: `memory:` inside one process, else a SQLAlchemy URL.

    Tables are created or migrated as needed. Raises ConfigError for a URL that cannot be used.
    """
    if url == "memory:":
        return DataManager(MemoryStore(now), blobs=blobs, config=config, run_id=run_id)
    if not url:
        raise ConfigError("data.database is empty; give `memory:`, `sqlite:///PATH` or another SQLAlchemy URL")
    from dartrl.data.sql_store import open_sql_store  # sqlalchemy is loaded only where it is needed

    return DataManager(open_sql_store(url, now), blobs=blobs, config=config, run_id=run_id)


async def run_manager(ledger: DataManager, *, clock: Clock, holder: str, stop: asyncio.Event) -> None:
    """Do the time-driven work of a run while holding its manager lease; wakes by itself every second.

    Several may run: all but one wait for the lease.
    """
    lease: Lease | None = None
    while not stop.is_set():
        if lease is not None:
            lease = next(iter(await clock.run_blocking(ledger.renew, [lease])), None)
        if lease is None:
            lease = await clock.run_blocking(ledger.acquire_manager, holder)
        if lease is not None:
            try:
                done = await clock.run_blocking(ledger.tick, lease)
            except LeaseLost as error:
                logger.warning("manager lost its lease holder=%s detail=%s", holder, error)
                lease = None
            else:
                if any(done.values()):
                    logger.info("manager tick %s", " ".join(f"{name}={count}" for name, count in done.items() if count))
        await clock.sleep(TICK_SECONDS)
