"""Which episode runs next: evaluation first, then the oldest open group, then a new group if admitted."""

from __future__ import annotations

from typing import Any

from dartrl.data.curation import Admission, Supply, admit_group, choose_family, derive_seed, instance_order, trainable_share
from dartrl.data.groups import insert_groups
from dartrl.data.leasing import grant_lease
from dartrl.data.scope import RunScope
from dartrl.data.states import SLOT, move_one
from dartrl.data.store import Above, Increment, Row, Transaction
from dartrl.records import Assignment, Phase, Wait

POLLS_PER_SECOND = 100
"""Questions that all slots together ask the ledger in a second while there is nothing to do."""
MIN_WAIT_SECONDS = 0.2
"""Shortest pause before a slot asks again."""
BREAKER_WAIT_SECONDS = 2.0
"""Pause while the circuit breaker is open."""


def next_assignment(scope: RunScope, transaction: Transaction, holder: str) -> Assignment | Wait:
    """The next episode, with a lease on it, or why there is none."""
    run = scope.run_row(transaction)
    if run["phase"] == Phase.FINISHED:
        return Wait(_pause(scope), "finished")
    if run["phase"] not in (Phase.EVALUATING, Phase.TRAINING):
        return Wait(_pause(scope), "phase")
    weights = scope.weights_row(transaction)
    if weights is None:
        return Wait(_pause(scope), "no_weights")
    if run["breaker_reason"]:
        return Wait(max(BREAKER_WAIT_SECONDS, _pause(scope)), "breaker")
    slot = _open_slot(scope, transaction, "evaluation")
    if slot is None and run["phase"] == Phase.TRAINING:
        slot = _open_slot(scope, transaction, "train")
        if slot is None:
            refused = _open_group(scope, transaction, weights["version"])
            if refused:
                return Wait(_pause(scope), refused)
            slot = _open_slot(scope, transaction, "train")
    if slot is None:
        return Wait(_pause(scope), "phase")
    return _start_attempt(scope, transaction, slot, holder, run["seed"])


def _pause(scope: RunScope) -> float:
    return max(MIN_WAIT_SECONDS, scope.config.environment.runners * scope.config.environment.slots / POLLS_PER_SECOND)


def _open_slot(scope: RunScope, transaction: Transaction, purpose: str) -> Row | None:
    """The open slot of the oldest group; slots are numbered in the order in which groups open."""
    return transaction.first("group_slot", {"run_id": scope.run_id, "purpose": purpose, "state": "open"}, lock="skip")


def _open_group(scope: RunScope, transaction: Transaction, version: int) -> str:
    """Open a training group; returns `` or the reason for refusing."""
    run = scope.run_row(transaction, "wait")
    supply, families = _supply(scope, transaction, run, version)
    curation = scope.config.curation
    admission = admit_group(
        supply,
        sampling=curation.sampling,
        batch=scope.config.training.groups_per_step,
        max_staleness=curation.max_staleness,
        slots=scope.config.environment.runners * scope.config.environment.slots,
        max_rollouts=curation.max_rollouts,
    )
    if admission.reason != run["admission"]:
        transaction.update("run", {"run_id": scope.run_id}, {"admission": admission.reason})
        scope.log(transaction, "admission", scope.run_id, _explain(supply, admission))
    if not admission.admitted:
        return admission.reason
    family = choose_family(families, run["seed"])
    instances = scope.families(transaction, "train")[family]
    lap, position = divmod(families[family], len(instances))
    task_id = instance_order(instances, run["seed"], family, lap)[position]
    group_id = f"{scope.run_id}.g{run['groups_opened'] + 1:06d}"
    group = {
        "group_id": group_id,
        "task_id": task_id,
        "family": family,
        "purpose": "train",
        "evaluation_id": "",
        "num_slots": curation.max_rollouts,
    }
    insert_groups(scope, transaction, [group], opened_version=version)
    transaction.update("run", {"run_id": scope.run_id}, {"groups_opened": Increment(1)})
    transaction.update("family", {"run_id": scope.run_id, "family": family}, {"groups_opened": Increment(1)})
    scope.log(transaction, "group_opened", group_id, {"task": task_id, "slots": group["num_slots"], **_explain(supply, admission)})
    return ""


def _supply(scope: RunScope, transaction: Transaction, run: Row, version: int) -> tuple[Supply, dict[str, int]]:
    """Present counts, and the number of groups opened for each family."""
    rows = transaction.select("family", {"run_id": scope.run_id})
    groups = {"run_id": scope.run_id, "purpose": "train", "state": ("open", "ready", "claimed")}
    states = transaction.tally("rollout_group", groups, ("state",))
    supply = Supply(
        open_groups=states.get(("open",), 0),
        ready_groups=states.get(("ready",), 0),
        claimed_groups=states.get(("claimed",), 0),
        groups_opened=run["groups_opened"],
        trainable_share=trainable_share(sum(row["groups_closed"] for row in rows), sum(row["groups_trainable"] for row in rows)),
        trainer_version=version,
        served_version=_served_version(scope, transaction, version),
    )
    return supply, {row["family"]: row["groups_opened"] for row in rows}


def _served_version(scope: RunScope, transaction: Transaction, version: int) -> int:
    """Oldest version that a live worker answers with; one that lags for longer than a lease is taken for dead."""
    served = version
    for worker in transaction.select("worker", {"run_id": scope.run_id}):
        if worker["version"] < served:
            newer = {"run_id": scope.run_id, "state": "published", "version": Above(worker["version"])}
            missed = transaction.first("weights_version", newer, order="version")
            if missed is not None and missed["created_at"] > transaction.now - scope.config.data.lease_seconds:
                served = worker["version"]
    return served


def _explain(supply: Supply, admission: Admission) -> dict[str, Any]:
    return {
        "reason": admission.reason,
        "expected_groups": admission.expected_groups,
        "capacity": admission.capacity,
        "open_groups": supply.open_groups,
        "ready_groups": supply.ready_groups,
        "claimed_groups": supply.claimed_groups,
        "trainable_share": supply.trainable_share,
        "trainer_version": supply.trainer_version,
        "served_version": supply.served_version,
    }


def _start_attempt(scope: RunScope, transaction: Transaction, slot: Row, holder: str, run_seed: int) -> Assignment:
    group = transaction.first("rollout_group", {"group_id": slot["group_id"]})
    assert group is not None
    task = scope.task(transaction, group["task_id"])
    attempt = slot["attempts"]
    trajectory_id = f"{slot['group_id']}.s{slot['slot']}.a{attempt}"
    key = {"group_id": slot["group_id"], "slot": slot["slot"]}
    move_one(transaction, SLOT, key, "open", "running", {"attempts": attempt + 1, "trajectory_id": trajectory_id})
    lease = grant_lease(scope, transaction, subject=f"trajectory:{trajectory_id}", kind="trajectory", holder=holder)
    trajectory = {
        "run_id": scope.run_id,
        "trajectory_id": trajectory_id,
        "trace_id": f"s{slot['slot']}.a{attempt}",
        "task_id": task.id,
        "family": task.family,
        "purpose": slot["purpose"],
        "evaluation_id": slot["evaluation_id"],
        "group_id": slot["group_id"],
        "slot": slot["slot"],
        "attempt": attempt,
        "state": "running",
        "holder": holder,
        "started_at": transaction.now,
    }
    transaction.insert("rollout_run", [trajectory])
    is_evaluation = slot["purpose"] == "evaluation"
    seed_ids = (task.id, slot["slot"], attempt) if is_evaluation else (slot["group_id"], slot["slot"], attempt)
    assignment = Assignment(
        trajectory_id=trajectory_id,
        group_id=slot["group_id"],
        slot=slot["slot"],
        attempt=attempt,
        task=task,
        max_steps=scope.config.agent.max_steps,
        temperature=_evaluation_temperature(scope, transaction, slot) if is_evaluation else scope.config.rollout.temperature,
        sampling_seed=derive_seed(run_seed, slot["purpose"], *seed_ids),
        purpose=slot["purpose"],
        lease=lease,
    )
    data = {
        "holder": holder,
        "task": task.id,
        "max_steps": assignment.max_steps,
        "temperature": assignment.temperature,
        "sampling_seed": assignment.sampling_seed,
    }
    scope.log(transaction, "assignment", trajectory_id, data)
    return assignment


def _evaluation_temperature(scope: RunScope, transaction: Transaction, slot: Row) -> float:
    row = transaction.first("evaluation", {"run_id": scope.run_id, "evaluation_id": slot["evaluation_id"]})
    assert row is not None
    return row["temperature"]
