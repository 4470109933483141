"""DATA MANAGER: the ledger as every role sees it.

Each method is one transaction: check the lease, apply the rules (one file per part: runs, leasing, assigning,
recording, claiming, training, upkeep), write. Rules are written once and run over any store. Slow work, reading and
writing blobs, happens before or after the transaction, never inside.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from dartrl.config import RunConfig
from dartrl.data import assigning, claiming, leasing, reading, recording, runs, training, upkeep
from dartrl.data.encoding import encode_arrays
from dartrl.data.groups import insert_groups
from dartrl.data.memory_store import MemoryStore
from dartrl.data.scope import RunScope
from dartrl.data.store import Row, Store, Transaction
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

    # ------------------------------------------------------------------ run

    def open_run(self, run: Run, tasks: Sequence[Task]) -> Run:
        """The run, created or resumed. Raises ConfigError if the id exists with other tasks."""
        with self.store.transaction(durable=True) as transaction:
            return runs.open_run(self.scope, transaction, run, tasks)

    def run(self) -> Run:
        """Present state of the run."""
        with self.store.reading() as transaction:
            return runs.decode_run(self.scope.run_row(transaction))

    def set_phase(self, phase: Phase) -> None:
        """Move the run to a phase; FINISHED settles what can no longer be trained on. Raises LedgerConflict."""
        with self.store.transaction() as transaction:
            runs.set_phase(self.scope, transaction, phase)

    # ------------------------------------------------------------------ environment cluster

    def next_assignment(self, holder: str) -> Assignment | Wait:
        """The next episode for a free slot: evaluation first, then the oldest open group, then a new group if admitted."""
        with self.store.transaction() as transaction:
            return assigning.next_assignment(self.scope, transaction, holder)

    def renew(self, leases: Sequence[Lease]) -> Sequence[Lease]:
        """The leases still held, with a later expiry."""
        with self.store.transaction() as transaction:
            return leasing.renew_leases(self.scope, transaction, leases)

    def record_trajectory(self, lease: Lease, trajectory: Trajectory) -> None:
        """Store steps and outcome once; fills the slot if scored, frees it for a retry otherwise.

        Raises LeaseLost, LedgerConflict for an inconsistent record, BlobCorrupt for a screenshot that is not stored.
        """
        recording.check_trajectory(self.scope.blobs, lease, trajectory)
        arrays = self.scope.blobs.put(encode_arrays(trajectory)) if trajectory.steps else ""
        with self.store.transaction() as transaction:
            recording.record_trajectory(self.scope, transaction, lease, trajectory, arrays)

    # ------------------------------------------------------------------ evaluation

    def open_evaluation(self, evaluation: Evaluation) -> None:
        """Queue the episodes of an evaluation; idempotent by id."""
        with self.store.transaction() as transaction:
            groups = runs.open_evaluation(self.scope, transaction, evaluation)
            if groups:
                weights = self.scope.weights_row(transaction)
                insert_groups(self.scope, transaction, groups, opened_version=weights["version"] if weights else 0)
                data = {"episodes": len(groups), "temperature": evaluation.temperature}
                self.scope.log(transaction, "evaluation", evaluation.id, data)

    def evaluation_result(self, evaluation_id: str) -> EvaluationResult:
        """Scores so far."""
        with self.store.reading() as transaction:
            return runs.evaluation_result(self.scope, transaction, evaluation_id)

    # ------------------------------------------------------------------ trainer

    def acquire_trainer(self, holder: str) -> Lease | None:
        """The run's trainer lease, or None while another trainer holds it."""
        with self.store.transaction(durable=True) as transaction:
            return leasing.take_role(self.scope, transaction, kind="trainer", holder=holder)

    def begin_training(self, lease: Lease) -> ResumePoint:
        """Roll back what was applied since the newest resumable checkpoint and say where to start."""
        with self.store.transaction(durable=True) as transaction:
            return training.begin_training(self.scope, transaction, lease)

    def claim_groups(self, lease: Lease, count: int) -> Claim | None:
        """The oldest `count` trainable groups, or None while there are fewer.

        A group whose blobs turn out corrupt is rejected, and the claim is smaller by it.
        """
        with self.store.transaction(durable=True) as transaction:
            claimed = claiming.claim_groups(self.scope, transaction, lease, count)
            if claimed is None:
                return None
            claim_id, groups = claimed
            members = transaction.select("group_member", {"run_id": self.scope.run_id, "claim_id": claim_id, "state": "claimed"})
            stored = reading.stored_trajectories(self.scope, transaction, sorted({row["trajectory_id"] for row in members}))
        loaded = [self._load_group(lease, group, members, stored) for group in groups]
        complete = tuple(group for group in loaded if group is not None)
        return Claim(claim_id, complete) if complete else None

    def _load_group(
        self, lease: Lease, group: Row, members: Iterable[Row], stored: Mapping[str, reading.StoredTrajectory]
    ) -> ClaimedGroup | None:
        rows = sorted((row for row in members if row["group_id"] == group["group_id"]), key=lambda row: (row["slot"], row["id"]))
        try:
            trajectories = [reading.load_trajectory(self.scope, stored[row["trajectory_id"]]) for row in rows]
        except BlobCorrupt as error:
            logger.warning("group rejected group=%s reason=blob_corrupt detail=%s", group["group_id"], error)
            with self.store.transaction(durable=True) as transaction:
                claiming.reject_claimed(self.scope, transaction, lease, group["group_id"], "blob_corrupt")
            return None
        with self.store.reading() as transaction:
            task = self.scope.task(transaction, group["task_id"])
        loaded = [Member(row["membership_id"], each, row["role"]) for row, each in zip(rows, trajectories, strict=True)]
        return ClaimedGroup(group["group_id"], task, tuple(loaded))

    def next_weights_version(self, lease: Lease) -> int:
        """A version number that was never given out before."""
        with self.store.transaction(durable=True) as transaction:
            return training.next_version(self.scope, transaction, lease)

    def publish_weights(self, lease: Lease, weights: WeightsVersion) -> None:
        """Publish weights outside a step: the initial ones, or those of a resumed checkpoint."""
        with self.store.transaction(durable=True) as transaction:
            training.publish(self.scope, transaction, lease, weights)

    def acknowledge_step(self, lease: Lease, claim: Claim, step: TrainingStep, weights: WeightsVersion | None) -> None:
        """In one transaction: members claimed -> applied (or rejected), the step's row, and its weights version."""
        with self.store.transaction(durable=True) as transaction:
            training.acknowledge(self.scope, transaction, lease, claim, step, weights)

    def record_checkpoint(self, lease: Lease, checkpoint: Checkpoint) -> None:
        """Members applied up to the checkpoint's step become trained, each `used` + 1; its files are already durable."""
        with self.store.transaction(durable=True) as transaction:
            training.record_checkpoint(self.scope, transaction, lease, checkpoint)

    # ------------------------------------------------------------------ rollout service

    def current_weights(self) -> WeightsVersion | None:
        """The newest published version that is not rolled back."""
        with self.store.reading() as transaction:
            row = self.scope.weights_row(transaction)
            return reading.decode_weights(row) if row else None

    # ------------------------------------------------------------------ events and reading

    def record_event(self, event: Event) -> None:
        """Append to the event log; a `join` or `sync` event also says which version its worker answers with now."""
        with self.store.transaction() as transaction:
            at = event.at or transaction.now
            row = {"run_id": self.scope.run_id, "kind": event.kind, "subject": event.subject, "data": event.data, "at": at}
            transaction.insert("event", [row])
            if event.kind in ("join", "sync") and "worker" in event.data and "version" in event.data:
                self._note_worker(transaction, str(event.data["worker"]), int(event.data["version"]))

    def _note_worker(self, transaction: Transaction, worker: str, version: int) -> None:
        key = {"run_id": self.scope.run_id, "worker": worker}
        changes = {"version": version, "updated_at": transaction.now}
        if not transaction.update("worker", key, changes):
            transaction.insert("worker", [{**key, **changes}])

    def events(self, kinds: Sequence[str] = (), after: float = 0.0) -> Sequence[Event]:
        """Events of these kinds (all if empty) later than `after`, in order."""
        with self.store.reading() as transaction:
            return reading.read_events(self.scope, transaction, kinds, after)

    def counts(self) -> Mapping[str, int]:
        """Counters for views: groups_open, groups_ready, trajectories, trajectories_<end>, members_<state>, leases, ..."""
        with self.store.reading() as transaction:
            return reading.read_counts(self.scope, transaction)

    def training_steps(self) -> Sequence[TrainingStep]:
        """Acknowledged steps of the present lineage, in order."""
        with self.store.reading() as transaction:
            rows = training.lineage(self.scope, transaction)
            return [TrainingStep(row["step_index"], row["claim_id"], row["metrics"], row["rejected"]) for row in rows]

    def trajectories(self, *, purpose: str, family: str | None = None, limit: int = 100) -> Sequence[Trajectory]:
        """Newest scored trajectories with steps; `purpose` is train, evaluation or an evaluation id. Raises BlobCorrupt."""
        with self.store.reading() as transaction:
            ids = reading.newest_ids(self.scope, transaction, purpose=purpose, family=family, limit=limit)
            stored = reading.stored_trajectories(self.scope, transaction, ids)
        return [reading.load_trajectory(self.scope, stored[name]) for name in ids]

    def episodes(self, *, after: float = 0.0) -> Sequence[EpisodeSummary]:
        """All attempts that ended later than `after`, without their steps, in order of their end."""
        with self.store.reading() as transaction:
            return reading.read_episodes(self.scope, transaction, after)

    # ------------------------------------------------------------------ time-driven work

    def acquire_manager(self, holder: str) -> Lease | None:
        """The run's manager lease, or None while another process holds it."""
        with self.store.transaction() as transaction:
            return leasing.take_role(self.scope, transaction, kind="manager", holder=holder)

    def tick(self, lease: Lease) -> Mapping[str, int]:
        """Expire leases, close groups at their deadline, run the circuit breaker; what was done, by name."""
        with self.store.transaction() as transaction:
            return upkeep.tick(self.scope, transaction, lease)


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
