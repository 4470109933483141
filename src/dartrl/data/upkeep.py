"""Time-driven work of the manager process: leases that expired, groups past their deadline, the circuit breaker."""

from __future__ import annotations

from dartrl.data.curation import breaker_trips
from dartrl.data.groups import close_group, free_slot
from dartrl.data.leasing import check_lease
from dartrl.data.recording import abort_trajectory
from dartrl.data.scope import RunScope
from dartrl.data.states import SLOT, move
from dartrl.data.store import Above, AtMost, Row, Transaction
from dartrl.records import Lease, Phase
from dartrl.types import End

BREAKER_PAUSE_SECONDS = 30.0
"""Time without admission after the breaker opens; then the count starts afresh."""
SUBJECT_PREFIX = "trajectory:"
_PLAYED_STATES = tuple(str(end) for end in End if end is not End.ABORTED)
_ABORTED_BY_FAULT = ("lease", "crash")


def tick(scope: RunScope, transaction: Transaction, lease: Lease) -> dict[str, int]:
    """Everything that is due now; what was done, by name."""
    check_lease(transaction, lease)
    run = scope.run_row(transaction)
    done = {"leases_expired": 0, "groups_closed": 0, "breaker_opened": 0, "breaker_closed": 0}
    if run["phase"] == Phase.FINISHED:
        return done
    done["leases_expired"] = _expire_leases(scope, transaction)
    if run["phase"] == Phase.TRAINING:
        done["groups_closed"] = _close_overdue(scope, transaction)
    return done | _watch_breaker(scope, transaction, run)


def _expire_leases(scope: RunScope, transaction: Transaction) -> int:
    where = {"run_id": scope.run_id, "kind": "trajectory", "state": "held", "expires_at": AtMost(transaction.now)}
    expired = transaction.select("lease", where, lock="skip")
    for row in expired:
        trajectory_id = row["subject"].removeprefix(SUBJECT_PREFIX)
        trajectory = abort_trajectory(scope, transaction, trajectory_id, "lease", f"{row['holder']} sent no heartbeat")
        free_slot(scope, transaction, trajectory, counts=True)
        scope.log(transaction, "lease_expired", trajectory_id, {"holder": row["holder"], "expires_at": row["expires_at"]})
    return len(expired)


def _close_overdue(scope: RunScope, transaction: Transaction) -> int:
    deadline = AtMost(transaction.now - scope.config.data.group_deadline_seconds)
    where = {"run_id": scope.run_id, "purpose": "train", "state": "open", "opened_at": deadline}
    overdue = transaction.select("rollout_group", where)
    for group in overdue:
        _close_at_deadline(scope, transaction, group)
    return len(overdue)


def _close_at_deadline(scope: RunScope, transaction: Transaction, group: Row) -> None:
    """Attempts that still run are given up, their slots and the open ones become void."""
    group_id = group["group_id"]
    transaction.first("rollout_group", {"group_id": group_id}, lock="wait")
    for slot in transaction.select("group_slot", {"group_id": group_id, "state": "running"}):
        abort_trajectory(scope, transaction, slot["trajectory_id"], "deadline", "its group passed the deadline")
    void = sum(move(transaction, SLOT, {"group_id": group_id}, state, "void") for state in ("running", "open"))
    transaction.update("rollout_group", {"group_id": group_id}, {"num_done": group["num_done"] + void})
    close_group(scope, transaction, group_id, "deadline")


def _watch_breaker(scope: RunScope, transaction: Transaction, run: Row) -> dict[str, int]:
    newest = transaction.first("rollout_run", {"run_id": scope.run_id}, descending=True)
    key = {"run_id": scope.run_id}
    if run["breaker_reason"]:
        if transaction.now < run["breaker_until"]:
            return {}
        transaction.update("run", key, {"breaker_reason": "", "breaker_floor": newest["id"] if newest else 0})
        scope.log(transaction, "breaker", scope.run_id, {"state": "closed", "was": run["breaker_reason"]})
        return {"breaker_closed": 1}
    window = scope.config.data.breaker_window
    recent = _recent_ends(scope, transaction, floor=run["breaker_floor"], window=window)
    ends = [row["state"] for row in recent]
    if not breaker_trips(ends, window=window, share=scope.config.data.breaker_share):
        return {}
    reasons = sorted({f"{row['state']}:{row['reason']}" for row in recent if row["reward"] is None})
    reason = f"{sum(row['reward'] is None for row in recent)} of the last {len(recent)} episodes broke ({', '.join(reasons)})"
    transaction.update("run", key, {"breaker_reason": reason[:1024], "breaker_until": transaction.now + BREAKER_PAUSE_SECONDS})
    scope.log(transaction, "breaker", scope.run_id, {"state": "open", "reason": reason, "pause_seconds": BREAKER_PAUSE_SECONDS})
    return {"breaker_opened": 1}


def _recent_ends(scope: RunScope, transaction: Transaction, *, floor: int, window: int) -> list[Row]:
    """The last episodes that ended, newest start first; attempts that run or were handed back do not count."""
    newest: list[Row] = []
    for condition in ({"state": _PLAYED_STATES}, {"state": str(End.ABORTED), "reason": _ABORTED_BY_FAULT}):
        where = {"run_id": scope.run_id, **condition, "id": Above(floor)}
        newest += transaction.select("rollout_run", where, descending=True, limit=window)
    return sorted(newest, key=lambda row: row["id"], reverse=True)[:window]
