"""Exactly-once effect of training: steps, weights versions and resumable checkpoints, each in one transaction.

claimed -> applied(training step) -> trained(checkpoint). After a crash, what was applied since the newest resumable
checkpoint returns to ready, and the weights published since are rolled back; numbers are never used again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from dartrl.data.leasing import check_lease
from dartrl.data.scope import RunScope
from dartrl.data.states import CHECKPOINT, GROUP, MEMBERSHIP, TRAINING_STEP, WEIGHTS_VERSION, move, move_one
from dartrl.data.store import Above, AtMost, Increment, Row, Transaction
from dartrl.errors import LedgerConflict
from dartrl.records import Checkpoint, Claim, Lease, ResumePoint, TrainingStep, WeightsVersion

PATH_SIZE = 255
"""Characters of the published column checkpoint.path."""


def begin_training(scope: RunScope, transaction: Transaction, lease: Lease) -> ResumePoint:
    """Return claimed and applied members to ready, roll back what followed the newest checkpoint."""
    check_lease(transaction, lease)
    scope.run_row(transaction, "wait")
    run = {"run_id": scope.run_id}
    row = transaction.first("checkpoint", {**run, "status": "COMPLETED"}, order="training_step", descending=True)
    step = row["training_step"] if row else 0
    cleared = {"claim_id": "", "training_step": None}
    released = move(transaction, MEMBERSHIP, run, "claimed", "ready", cleared)
    returned = move(transaction, MEMBERSHIP, run, "applied", "ready", cleared)
    for state in ("claimed", "applied"):
        move(transaction, GROUP, {**run, "purpose": "train"}, state, "ready", cleared)
    steps = move(transaction, TRAINING_STEP, run, "applied", "rolled_back")
    versions = move(transaction, WEIGHTS_VERSION, {**run, "training_step": Above(step)}, "published", "rolled_back")
    abandoned = move(transaction, WEIGHTS_VERSION, run, "reserved", "abandoned")
    data = {
        "checkpoint": row["name"] if row else "",
        "training_step": step,
        "members_returned": returned,
        "members_released": released,
        "steps_rolled_back": steps,
        "versions_rolled_back": versions,
        "versions_abandoned": abandoned,
        "token": lease.token,
    }
    scope.log(transaction, "resume", lease.holder, data)
    return ResumePoint(_checkpoint(row) if row else None, step + 1, returned)


def next_version(scope: RunScope, transaction: Transaction, lease: Lease) -> int:
    """Reserve the next number of the run's sequence."""
    check_lease(transaction, lease)
    run = scope.run_row(transaction, "wait")
    version = run["last_version"] + 1
    transaction.update("run", {"run_id": scope.run_id}, {"last_version": version})
    row = {"run_id": scope.run_id, "version": version, "state": "reserved", "created_at": transaction.now}
    transaction.insert("weights_version", [row])
    return version


def publish(scope: RunScope, transaction: Transaction, lease: Lease, weights: WeightsVersion) -> None:
    """Make a reserved version the one that workers load."""
    check_lease(transaction, lease)
    if weights.parent is not None and not transaction.first("weights_version", {"run_id": scope.run_id, "version": weights.parent}):
        raise LedgerConflict(f"weights version {weights.version} names parent {weights.parent}, which run {scope.run_id} never had")
    newest = scope.weights_row(transaction)
    if newest and newest["version"] >= weights.version:
        raise LedgerConflict(f"weights version {weights.version} is not newer than {newest['version']}; reserve a new number")
    changes = {
        "path": weights.path,
        "checksum": weights.checksum,
        "training_step": weights.training_step,
        "parent": weights.parent,
        "created_at": weights.created_at or transaction.now,
    }
    key = {"run_id": scope.run_id, "version": weights.version}
    move_one(transaction, WEIGHTS_VERSION, key, "reserved", "published", changes)
    scope.log(transaction, "weights", str(weights.version), {"path": weights.path, "training_step": weights.training_step})


def acknowledge(
    scope: RunScope, transaction: Transaction, lease: Lease, claim: Claim, step: TrainingStep, weights: WeightsVersion | None
) -> None:
    """Members claimed -> applied or rejected, the step's row and its weights. The same call again changes nothing."""
    check_lease(transaction, lease)
    scope.run_row(transaction, "wait")
    if step.claim_id != claim.id:
        raise LedgerConflict(f"the step names claim {step.claim_id}, but the claim is {claim.id}")
    if _is_repeated(scope, transaction, lease, step):
        return
    _check_next(scope, transaction, step, weights)
    _apply_members(scope, transaction, claim, step)
    row = {
        "run_id": scope.run_id,
        "step_index": step.index,
        "claim_id": claim.id,
        "state": "applied",
        "metrics": dict(step.metrics),
        "rejected": dict(step.rejected),
        "weights_version": weights.version if weights else None,
        "trainer": lease.holder,
        "token": lease.token,
        "created_at": transaction.now,
    }
    transaction.insert("training_step", [row])
    if weights is not None:
        publish(scope, transaction, lease, weights)


def record_checkpoint(scope: RunScope, transaction: Transaction, lease: Lease, checkpoint: Checkpoint) -> None:
    """Steps up to the checkpoint's become durable, their members trained; older checkpoints are deprecated."""
    check_lease(transaction, lease)
    scope.run_row(transaction, "wait")
    run = {"run_id": scope.run_id}
    last = _last_step(scope, transaction)
    if checkpoint.training_step > last:
        raise LedgerConflict(f"checkpoint {checkpoint.name} contains step {checkpoint.training_step}, but the last one is {last}")
    if len(checkpoint.path) > PATH_SIZE:
        raise LedgerConflict(f"checkpoint path {checkpoint.path!r} is longer than {PATH_SIZE} characters; shorten runs_dir")
    up_to = AtMost(checkpoint.training_step)
    members = transaction.select("group_member", {**run, "state": "applied", "training_step": up_to})
    move(transaction, MEMBERSHIP, {**run, "training_step": up_to}, "applied", "trained")
    move(transaction, GROUP, {**run, "purpose": "train", "training_step": up_to}, "applied", "trained")
    move(transaction, TRAINING_STEP, {**run, "step_index": up_to}, "applied", "durable")
    _count_use(scope, transaction, members)
    transaction.insert("checkpoint", [_checkpoint_row(scope, transaction, checkpoint)])
    kept = transaction.select("checkpoint", {**run, "status": "COMPLETED"}, order="training_step", descending=True)
    moment = _timestamp(transaction)
    for old in kept[scope.config.training.keep_checkpoints :]:
        changes = {"deleted_at": moment, "updated_at": moment}
        move_one(transaction, CHECKPOINT, {"id": old["id"]}, "COMPLETED", "DEPRECATED", changes)
    data = {"training_step": checkpoint.training_step, "members_trained": len(members)}
    scope.log(transaction, "checkpoint", checkpoint.name, data)


def _last_step(scope: RunScope, transaction: Transaction) -> int:
    where = {"run_id": scope.run_id, "state": ("applied", "durable")}
    row = transaction.first("training_step", where, order="step_index", descending=True)
    return row["step_index"] if row else 0


def _is_repeated(scope: RunScope, transaction: Transaction, lease: Lease, step: TrainingStep) -> bool:
    row = transaction.first("training_step", {"run_id": scope.run_id, "claim_id": step.claim_id})
    if row is None:
        return False
    if row["step_index"] == step.index and row["token"] == lease.token and row["state"] != "rolled_back":
        return True
    raise LedgerConflict(f"claim {step.claim_id} was already acknowledged as step {row['step_index']} ({row['state']})")


def _check_next(scope: RunScope, transaction: Transaction, step: TrainingStep, weights: WeightsVersion | None) -> None:
    expected = _last_step(scope, transaction) + 1
    if step.index != expected:
        raise LedgerConflict(f"training step {step.index} does not follow the last one; expected {expected}")
    if weights is not None and weights.training_step != step.index:
        raise LedgerConflict(f"weights version {weights.version} says step {weights.training_step}, not {step.index}")


def _apply_members(scope: RunScope, transaction: Transaction, claim: Claim, step: TrainingStep) -> None:
    where = {"run_id": scope.run_id, "claim_id": claim.id}
    claimed = transaction.select("group_member", {**where, "state": "claimed"})
    held = {row["membership_id"] for row in claimed}
    named = {member.membership_id for group in claim.groups for member in group.members}
    if held != named or step.rejected.keys() - named:
        raise LedgerConflict(
            f"claim {claim.id} holds {len(held)} members, the trainer acknowledges {len(named)} and rejects {len(step.rejected)}; "
            "they must be the same members"
        )
    by_reason: defaultdict[str, list[str]] = defaultdict(list)
    for membership_id, reason in step.rejected.items():
        by_reason[reason].append(membership_id)
    for reason, ids in by_reason.items():
        rejected = {"reason": reason, "training_step": step.index}
        move(transaction, MEMBERSHIP, {**where, "membership_id": tuple(ids)}, "claimed", "rejected", rejected)
    move(transaction, MEMBERSHIP, where, "claimed", "applied", {"training_step": step.index})
    alive = {row["group_id"] for row in claimed if row["membership_id"] not in step.rejected}
    dead = {row["group_id"] for row in claimed} - alive
    if dead:
        move(transaction, GROUP, {**where, "group_id": tuple(sorted(dead))}, "claimed", "rejected", {"reason": "rows"})
    move(transaction, GROUP, where, "claimed", "applied", {"training_step": step.index})


def _count_use(scope: RunScope, transaction: Transaction, members: list[Row]) -> None:
    """`used` + 1 for each membership; a trajectory that took part twice counts twice."""
    uses = Counter(row["trajectory_id"] for row in members)
    by_count: defaultdict[int, list[str]] = defaultdict(list)
    for trajectory_id, count in uses.items():
        by_count[count].append(trajectory_id)
    for count, ids in by_count.items():
        transaction.update("rollout_run", {"run_id": scope.run_id, "trajectory_id": tuple(ids)}, {"used": Increment(count)})


def _checkpoint_row(scope: RunScope, transaction: Transaction, checkpoint: Checkpoint) -> Mapping[str, Any]:
    moment = _timestamp(transaction)
    return {
        "name": checkpoint.name[:50],
        "version": f"v{checkpoint.weights_version}",
        "run_id": scope.run_id,
        "status": "COMPLETED",
        "path": checkpoint.path,
        "source": "train",
        "created_at": moment,
        "updated_at": moment,
        "finished_at": moment,
        "training_step": checkpoint.training_step,
        "weights_version": checkpoint.weights_version,
        "checksum": checkpoint.checksum,
    }


def _checkpoint(row: Row) -> Checkpoint:
    return Checkpoint(row["name"], row["path"], row["training_step"], row["weights_version"], row["checksum"])


def _timestamp(transaction: Transaction) -> datetime:
    """UTC without zone, whole seconds, as the published columns hold it."""
    return datetime.fromtimestamp(transaction.now, UTC).replace(tzinfo=None, microsecond=0)
