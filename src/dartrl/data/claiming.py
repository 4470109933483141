"""The trainer claims whole groups; curation decides at that moment who takes part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dartrl.data.curation import PoolFacts, Verdict
from dartrl.data.groups import judge, reject_group
from dartrl.data.leasing import check_lease
from dartrl.data.reading import StoredTrajectory, stored_trajectories
from dartrl.data.scope import RunScope
from dartrl.data.states import GROUP, MEMBERSHIP, move, move_one
from dartrl.data.store import Increment, Row, Transaction
from dartrl.records import Lease, Phase
from dartrl.types import Task


@dataclass(frozen=True, slots=True)
class StoredMember:
    """A claimed member whose arrays are still in their blob."""

    id: str
    """Membership id."""
    role: Literal["fresh", "replay"]
    """Replay = from the experience pool."""
    trajectory: StoredTrajectory
    """Its rows."""


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A claimed group."""

    id: str
    """Group id."""
    task: Task
    """The instance all fresh members attempted."""
    members: tuple[StoredMember, ...]
    """In slot order."""


@dataclass(frozen=True, slots=True)
class StoredClaim:
    """A claim before its blobs are read."""

    id: str
    """Claim id."""
    groups: tuple[StoredGroup, ...]
    """Oldest first."""


def claim_groups(scope: RunScope, transaction: Transaction, lease: Lease, count: int) -> StoredClaim | None:
    """A new claim of the oldest groups; None while fewer than `count` are fit to train on.

    Groups found unfit on the way are rejected for good, which frees their place in admission.
    """
    check_lease(transaction, lease)
    run = scope.run_row(transaction, "wait")
    if run["phase"] != Phase.TRAINING:
        return None
    ready = transaction.select("rollout_group", {"run_id": scope.run_id, "purpose": "train", "state": "ready"}, lock="wait")
    if len(ready) < count:
        return None
    fit: list[tuple[Row, Verdict, int]] = []
    for group in ready:
        verdict, version = judge(scope, transaction, group)
        if verdict.is_trainable:
            fit.append((group, verdict, version))
        else:
            _reject(scope, transaction, group, verdict.reason, version)
        if len(fit) == count:
            break
    if len(fit) < count:
        return None
    claim_id = f"{scope.run_id}.c{run['claims_made'] + 1:06d}"
    transaction.update("run", {"run_id": scope.run_id}, {"claims_made": Increment(1)})
    for group, verdict, _ in fit:
        _take(scope, transaction, group, verdict, claim_id)
    scope.log(transaction, "claim", claim_id, _explain(fit, ready=len(ready)))
    return _stored(scope, transaction, claim_id, [group for group, _, _ in fit])


def _stored(scope: RunScope, transaction: Transaction, claim_id: str, groups: Sequence[Row]) -> StoredClaim:
    rows = transaction.select("group_member", {"run_id": scope.run_id, "claim_id": claim_id, "state": "claimed"})
    trajectories = stored_trajectories(scope, transaction, sorted({row["trajectory_id"] for row in rows}))
    members: defaultdict[str, list[StoredMember]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row["slot"], row["id"])):
        members[row["group_id"]].append(StoredMember(row["membership_id"], row["role"], trajectories[row["trajectory_id"]]))
    return StoredClaim(
        claim_id,
        tuple(
            StoredGroup(group["group_id"], scope.task(transaction, group["task_id"]), tuple(members[group["group_id"]]))
            for group in groups
        ),
    )


def reject_claimed(scope: RunScope, transaction: Transaction, lease: Lease, group_id: str, reason: str) -> None:
    """A claimed group cannot be handed over after all, such as for a corrupt blob."""
    check_lease(transaction, lease)
    reject_group(transaction, group_id, "claimed", reason)
    scope.log(transaction, "group_rejected", group_id, {"reason": reason})


def _reject(scope: RunScope, transaction: Transaction, group: Row, reason: str, version: int) -> None:
    reject_group(transaction, group["group_id"], "ready", reason)
    data = {
        "reason": reason,
        "oldest_version": group["oldest_version"],
        "trainer_version": version,
        "max_staleness": scope.rules.max_staleness,
    }
    scope.log(transaction, "group_rejected", group["group_id"], data)


def _take(scope: RunScope, transaction: Transaction, group: Row, verdict: Verdict, claim_id: str) -> None:
    group_id = group["group_id"]
    for membership_id, reason in verdict.dropped.items():
        move_one(transaction, MEMBERSHIP, {"membership_id": membership_id}, "ready", "rejected", {"reason": reason})
    if verdict.replay is not None:
        _replay(scope, transaction, group, verdict.replay, verdict.replay_slot)
    move_one(transaction, GROUP, {"group_id": group_id}, "ready", "claimed", {"claim_id": claim_id})
    move(transaction, MEMBERSHIP, {"group_id": group_id}, "ready", "claimed", {"claim_id": claim_id})


def _replay(scope: RunScope, transaction: Transaction, group: Row, entry: PoolFacts, slot: int) -> None:
    member = {
        "membership_id": f"{group['group_id']}.{entry.trajectory_id}.replay",
        "run_id": scope.run_id,
        "group_id": group["group_id"],
        "slot": slot,
        "trajectory_id": entry.trajectory_id,
        "role": "replay",
        "state": "ready",
        "score": entry.score,
        "success": True,
        "num_steps": entry.num_steps,
        "oldest_version": entry.oldest_version,
    }
    transaction.insert("group_member", [member])
    transaction.update("pool_entry", {"id": entry.entry_id}, {"replays": Increment(1)})
    data = {"trajectory": entry.trajectory_id, "slot": slot, "replays": entry.replays + 1, "oldest_version": entry.oldest_version}
    scope.log(transaction, "pool_substitution", group["group_id"], data)


def _explain(fit: list[tuple[Row, Verdict, int]], *, ready: int) -> dict[str, Any]:
    return {
        "ready": ready,
        "trainer_version": fit[0][2],
        "groups": [
            {
                "group": group["group_id"],
                "staleness": max(version - group["oldest_version"], 0),
                "dropped": dict(verdict.dropped),
                "replay": verdict.replay.trajectory_id if verdict.replay else "",
            }
            for group, verdict, version in fit
        ],
    }
