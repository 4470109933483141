"""Life of a group: opened with fixed slots, filled by scored attempts, closed, judged.

All rules here run inside the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dartrl.data.curation import MemberFacts, PoolFacts, Verdict, judge_group
from dartrl.data.scope import RunScope
from dartrl.data.states import GROUP, MEMBERSHIP, SLOT, move, move_one
from dartrl.data.store import Increment, Row, Transaction


def insert_groups(scope: RunScope, transaction: Transaction, groups: Sequence[Mapping[str, Any]], *, opened_version: int) -> None:
    """Groups with all their slots open. Each mapping: group_id, task_id, family, purpose, num_slots, evaluation_id."""
    common = {"run_id": scope.run_id, "state": "open", "opened_version": opened_version, "opened_at": transaction.now}
    transaction.insert("rollout_group", [{**common, **group} for group in groups])
    slots = [
        {
            "run_id": scope.run_id,
            "group_id": group["group_id"],
            "purpose": group["purpose"],
            "evaluation_id": group["evaluation_id"],
            "slot": slot,
            "state": "open",
        }
        for group in groups
        for slot in range(group["num_slots"])
    ]
    transaction.insert("group_slot", slots)


def fill_slot(scope: RunScope, transaction: Transaction, trajectory: Row) -> None:
    """A scored trajectory (its rollout_run row) fills its slot; the last one closes the group."""
    group = _locked_group(transaction, trajectory["group_id"])
    move_one(transaction, SLOT, _slot_key(trajectory), "running", "filled")
    if trajectory["purpose"] == "train":
        transaction.insert("group_member", [_membership(scope, trajectory)])
    oldest = [version for version in (group["oldest_version"], trajectory["oldest_version"]) if version is not None]
    changes = {
        "num_done": Increment(1),
        "num_scored": Increment(1),
        "num_successes": Increment(int(bool(trajectory["success"]))),
        "oldest_version": min(oldest, default=None),
    }
    transaction.update("rollout_group", {"group_id": group["group_id"]}, changes)
    if group["num_done"] + 1 == group["num_slots"]:
        close_group(scope, transaction, group["group_id"], "complete")


def free_slot(scope: RunScope, transaction: Transaction, trajectory: Row, *, counts: bool) -> None:
    """The attempt was not scored: the slot opens for a retry, or is void after `max_attempts` that count."""
    group = _locked_group(transaction, trajectory["group_id"])
    slot = transaction.first("group_slot", _slot_key(trajectory))
    assert slot is not None
    failures = slot["failures"] + int(counts)
    if failures < scope.config.data.max_attempts:
        move_one(transaction, SLOT, _slot_key(trajectory), "running", "open", {"failures": failures, "trajectory_id": ""})
        return
    move_one(transaction, SLOT, _slot_key(trajectory), "running", "void", {"failures": failures})
    data = {"attempts": slot["attempts"], "reason": trajectory["reason"]}
    scope.log(transaction, "slot_void", f"{group['group_id']}.s{slot['slot']}", data)
    transaction.update("rollout_group", {"group_id": group["group_id"]}, {"num_done": Increment(1)})
    if group["num_done"] + 1 == group["num_slots"]:
        close_group(scope, transaction, group["group_id"], "complete")


def close_group(scope: RunScope, transaction: Transaction, group_id: str, cause: str) -> None:
    """No more slots are filled: an evaluation's group is finished, a training group is ready or rejected."""
    group = _locked_group(transaction, group_id)
    key = {"group_id": group_id}
    if group["purpose"] != "train":
        move_one(transaction, GROUP, key, "open", "finished", {"closed_at": transaction.now})
        return
    verdict, weights_version = judge(scope, transaction, group)
    transaction.update("rollout_group", key, {"closed_at": transaction.now})
    if verdict.is_trainable:
        move_one(transaction, GROUP, key, "open", "ready")
    else:
        reject_group(transaction, group_id, "open", verdict.reason)
    changes = {"groups_closed": Increment(1), "groups_trainable": Increment(int(verdict.is_trainable))}
    transaction.update("family", {"run_id": scope.run_id, "family": group["family"]}, changes)
    data = {
        "cause": cause,
        "family": group["family"],
        "scored": group["num_scored"],
        "successes": group["num_successes"],
        "slots": group["num_slots"],
        "oldest_version": group["oldest_version"],
        "trainer_version": weights_version,
        "state": "ready" if verdict.is_trainable else "rejected",
        "reason": verdict.reason,
        "seconds": transaction.now - group["opened_at"],
    }
    scope.log(transaction, "group_closed", group_id, data)


def reject_group(transaction: Transaction, group_id: str, state: str, reason: str) -> None:
    """The group and all its members that are still in play are rejected for the reason."""
    move_one(transaction, GROUP, {"group_id": group_id}, state, "rejected", {"reason": reason})
    for member_state in ("ready", "claimed"):
        move(transaction, MEMBERSHIP, {"group_id": group_id}, member_state, "rejected", {"reason": reason})


def judge(scope: RunScope, transaction: Transaction, group: Row) -> tuple[Verdict, int]:
    """What curation says about the group now, and the trainer's version it was judged by."""
    weights = scope.weights_row(transaction)
    version = weights["version"] if weights else 0
    rows = transaction.select("group_member", {"group_id": group["group_id"], "state": "ready"})
    members = [member_facts(row) for row in rows]
    pool: list[PoolFacts] = []
    if scope.rules.experience_pool and not any(member.success for member in members):
        rows = transaction.select("pool_entry", {"run_id": scope.run_id, "task_id": group["task_id"]})
        pool = [_pool_facts(row) for row in rows]
    return judge_group(members, pool, version=version, rules=scope.rules), version


def member_facts(row: Row) -> MemberFacts:
    """A group_member row as curation sees it."""
    return MemberFacts(
        membership_id=row["membership_id"],
        trajectory_id=row["trajectory_id"],
        slot=row["slot"],
        role=row["role"],
        score=row["score"],
        success=bool(row["success"]),
        num_steps=row["num_steps"],
        oldest_version=row["oldest_version"] or 0,
    )


def _pool_facts(row: Row) -> PoolFacts:
    return PoolFacts(row["id"], row["trajectory_id"], row["score"], row["num_steps"], row["oldest_version"], row["replays"])


def _membership(scope: RunScope, trajectory: Row) -> Row:
    is_empty = not trajectory["num_chunks"]
    return {
        "membership_id": f"{trajectory['trajectory_id']}.fresh",
        "run_id": scope.run_id,
        "group_id": trajectory["group_id"],
        "slot": trajectory["slot"],
        "trajectory_id": trajectory["trajectory_id"],
        "role": "fresh",
        "fresh_trajectory": trajectory["trajectory_id"],
        "state": "rejected" if is_empty else "ready",
        "reason": "empty" if is_empty else "",
        "score": trajectory["reward"],
        "success": trajectory["success"],
        "num_steps": trajectory["num_chunks"],
        "oldest_version": trajectory["oldest_version"],
    }


def _slot_key(trajectory: Row) -> Mapping[str, Any]:
    return {"group_id": trajectory["group_id"], "slot": trajectory["slot"]}


def _locked_group(transaction: Transaction, group_id: str) -> Row:
    group = transaction.first("rollout_group", {"group_id": group_id}, lock="wait")
    assert group is not None, group_id
    return group
