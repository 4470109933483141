"""An attempt ends: its steps and outcome are written once, together, and its slot is filled or freed."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from dartrl.data.encoding import encode_step
from dartrl.data.groups import fill_slot, free_slot
from dartrl.data.leasing import check_lease, end_lease
from dartrl.data.scope import RunScope
from dartrl.data.states import TRAJECTORY, move_one
from dartrl.data.store import Row, Transaction
from dartrl.errors import BlobCorrupt, LedgerConflict
from dartrl.interfaces import BlobStore
from dartrl.records import Event, Lease
from dartrl.types import End, Outcome, Trajectory

PUBLISHED_TEXT = 1024
"""Characters of the published instruction column."""
KEY_TEXT = 191
"""Characters of published key columns."""


def check_trajectory(blobs: BlobStore, lease: Lease, trajectory: Trajectory) -> None:
    """Raises LedgerConflict or BlobCorrupt if the record cannot be stored as it is."""
    if lease.subject != f"trajectory:{trajectory.id}":
        raise LedgerConflict(f"the lease is on {lease.subject}, but the trajectory is {trajectory.id}; use its own lease")
    outcome = trajectory.outcome
    if outcome.is_scored:
        if outcome.score is None or outcome.success is None or not 0 <= outcome.score <= 1:
            raise LedgerConflict(
                f"trajectory {trajectory.id} is {outcome.end} with score {outcome.score} and success {outcome.success}; "
                "a scored end needs a score in [0, 1] and a success flag"
            )
    elif outcome.score is not None or outcome.success is not None:
        raise LedgerConflict(f"trajectory {trajectory.id} is {outcome.end} with a score; only terminated and truncated have one")
    for step in trajectory.steps:
        for name in {*step.generation.image_hashes, *([step.screenshot] if step.screenshot else [])}:
            if name not in blobs:
                raise BlobCorrupt(f"step {step.index} of {trajectory.id} names screenshot {name}, which is not stored")


def record_trajectory(scope: RunScope, transaction: Transaction, lease: Lease, trajectory: Trajectory, arrays: str) -> None:
    """Write the trajectory under its lease; `arrays` is the hash of its stored token arrays."""
    check_lease(transaction, lease)
    end_lease(transaction, lease.subject, "released")
    versions = [step.generation.weights_version for step in trajectory.steps]
    changes = _outcome_columns(trajectory.outcome) | {
        "split_dir": arrays,
        "arrays": arrays,
        "num_chunks": len(trajectory.steps),
        "model_version": scope.weights_path(transaction, min(versions))[:KEY_TEXT] if versions else None,
        "instruction": trajectory.instruction[:PUBLISHED_TEXT],
        "full_instruction": trajectory.instruction if len(trajectory.instruction) > PUBLISHED_TEXT else "",
        "oldest_version": min(versions, default=None),
        "newest_version": max(versions, default=None),
        "environment": dict(trajectory.environment),
        "started_at": trajectory.started_at,
        "finished_at": trajectory.finished_at,
        "create_at": datetime.fromtimestamp(transaction.now, UTC).replace(tzinfo=None, microsecond=0),
    }
    if trajectory.steps:
        transaction.insert("step", [encode_step(scope.run_id, trajectory.id, step) for step in trajectory.steps])
    row = end_trajectory(transaction, scope, trajectory.id, trajectory.outcome, changes)
    if trajectory.outcome.is_scored:
        if row["purpose"] == "train" and trajectory.outcome.success and versions and scope.rules.experience_pool:
            transaction.insert("pool_entry", [_pool_entry(scope, row)])
        fill_slot(scope, transaction, row)
    else:
        free_slot(scope, transaction, row, counts=trajectory.outcome.end != End.ABORTED)


def record_event(scope: RunScope, transaction: Transaction, event: Event) -> None:
    """Append to the event log; `join` and `sync` also say which version a worker answers with now."""
    row = {"run_id": scope.run_id, "kind": event.kind, "subject": event.subject, "data": event.data}
    transaction.insert("event", [{**row, "at": event.at or transaction.now}])
    if event.kind in ("join", "sync") and "worker" in event.data and "version" in event.data:
        key = {"run_id": scope.run_id, "worker": str(event.data["worker"])}
        changes = {"version": int(event.data["version"]), "updated_at": transaction.now}
        if not transaction.update("worker", key, changes):
            transaction.insert("worker", [{**key, **changes}])


def abort_trajectory(scope: RunScope, transaction: Transaction, trajectory_id: str, reason: str, detail: str) -> Row:
    """The attempt is given up by the ledger: nothing it did is kept. Returns its row."""
    end_lease(transaction, f"trajectory:{trajectory_id}", "expired")
    outcome = Outcome(End.ABORTED, reason, detail=detail)
    return end_trajectory(transaction, scope, trajectory_id, outcome, {"finished_at": transaction.now, "num_chunks": 0})


def end_trajectory(transaction: Transaction, scope: RunScope, trajectory_id: str, outcome: Outcome, changes: dict[str, Any]) -> Row:
    """Move a running trajectory to its end. Returns the row as it is now."""
    key = {"trajectory_id": trajectory_id, "run_id": scope.run_id}
    changes = _outcome_columns(outcome) | {"ended_at": transaction.now} | changes
    move_one(transaction, TRAJECTORY, key, "running", str(outcome.end), changes)
    row = transaction.first("rollout_run", key)
    assert row is not None
    return row


def _outcome_columns(outcome: Outcome) -> dict[str, Any]:
    return {
        "reward": outcome.score,
        "success": outcome.success,
        "raw": outcome.raw,
        "reason": outcome.reason,
        "detail": outcome.detail[:PUBLISHED_TEXT],
    }


def _pool_entry(scope: RunScope, trajectory: Row) -> Row:
    return {
        "run_id": scope.run_id,
        "task_id": trajectory["task_id"],
        "trajectory_id": trajectory["trajectory_id"],
        "provenance": "rollout",
        "logprob_source": "sampled",
        "oldest_version": trajectory["oldest_version"],
        "num_steps": trajectory["num_chunks"],
        "score": trajectory["reward"],
        "replays": 0,
    }
