"""Views of the ledger for reports, dashboards and the trainer; nothing here changes a row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from dartrl.data.encoding import decode_trajectory
from dartrl.data.scope import RunScope
from dartrl.data.store import Above, Row, Transaction
from dartrl.records import EpisodeSummary, Event, TrainingStep, WeightsVersion
from dartrl.types import SCORED_ENDS, Task, Trajectory

StoredTrajectory = tuple[Row, list[Row], Task]
"""rollout_run row, its step rows in order, its task; the arrays are still in their blob."""

IDS_AT_ONCE = 500
"""Ids in one query; databases limit the number of parameters."""


def stored_trajectories(scope: RunScope, transaction: Transaction, ids: Sequence[str]) -> dict[str, StoredTrajectory]:
    """Rows of the trajectories with these ids."""
    found: dict[str, StoredTrajectory] = {}
    for start in range(0, len(ids), IDS_AT_ONCE):
        part = tuple(ids[start : start + IDS_AT_ONCE])
        steps: defaultdict[str, list[Row]] = defaultdict(list)
        for row in transaction.select("step", {"trajectory_id": part}, order="step_index"):
            steps[row["trajectory_id"]].append(row)
        for row in transaction.select("rollout_run", {"run_id": scope.run_id, "trajectory_id": part}):
            found[row["trajectory_id"]] = (row, steps[row["trajectory_id"]], scope.task(transaction, row["task_id"]))
    return found


def load_trajectory(scope: RunScope, stored: StoredTrajectory) -> Trajectory:
    """The whole trajectory, its arrays read and verified; no transaction is needed. Raises BlobCorrupt."""
    row, steps, task = stored
    return decode_trajectory(row, steps, task, scope.blobs.get(row["arrays"]) if steps else None)


def newest_trajectories(
    scope: RunScope, transaction: Transaction, purpose: str, family: str | None, limit: int
) -> list[StoredTrajectory]:
    """The newest scored trajectories; `purpose` is train, evaluation or an evaluation id."""
    where: dict[str, object] = {"run_id": scope.run_id, "state": tuple(str(end) for end in SCORED_ENDS)}
    where |= {"purpose": purpose} if purpose in ("train", "evaluation") else {"evaluation_id": purpose}
    if family is not None:
        where["family"] = family
    rows = transaction.select("rollout_run", where, descending=True, limit=limit)
    stored = stored_trajectories(scope, transaction, [row["trajectory_id"] for row in rows])
    return [stored[row["trajectory_id"]] for row in rows]


def read_weights(scope: RunScope, transaction: Transaction) -> WeightsVersion | None:
    """The newest published version that is not rolled back."""
    row = scope.weights_row(transaction)
    if row is None:
        return None
    return WeightsVersion(row["version"], row["path"], row["checksum"], row["training_step"], row["parent"], row["created_at"])


def read_training_steps(scope: RunScope, transaction: Transaction) -> list[TrainingStep]:
    """Acknowledged steps of the present lineage, in order."""
    where = {"run_id": scope.run_id, "state": ("applied", "durable")}
    rows = transaction.select("training_step", where, order="step_index")
    return [TrainingStep(row["step_index"], row["claim_id"], row["metrics"], row["rejected"]) for row in rows]


def read_events(scope: RunScope, transaction: Transaction, kinds: Sequence[str], after: float) -> list[Event]:
    """Events of these kinds (all if empty) later than `after`, in order."""
    where: dict[str, object] = {"run_id": scope.run_id, "at": Above(after)}
    if kinds:
        where["kind"] = tuple(kinds)
    return [Event(row["kind"], row["subject"], row["data"], row["at"]) for row in transaction.select("event", where, order="at")]


def read_episodes(scope: RunScope, transaction: Transaction, after: float) -> list[EpisodeSummary]:
    """All attempts that ended later than `after`, in order of their end."""
    return [
        EpisodeSummary(
            row["trajectory_id"],
            row["family"],
            row["evaluation_id"] or row["purpose"],
            row["state"],
            row["success"],
            row["num_chunks"] or 0,
            row["ended_at"],
        )
        for row in transaction.select("rollout_run", {"run_id": scope.run_id, "ended_at": Above(after)}, order="ended_at")
    ]


def read_counts(scope: RunScope, transaction: Transaction) -> dict[str, int]:
    """Counters by name: groups_<state>, members_<state>, trajectories, trajectories_<end>, leases, training_steps, ..."""
    run = {"run_id": scope.run_id}
    counts: dict[str, int] = {f"groups_{state}": 0 for state in ("open", "ready", "claimed", "applied", "trained", "rejected")}
    for (purpose, state), count in transaction.tally("rollout_group", run, ("purpose", "state")).items():
        name = f"groups_{state}" if purpose == "train" else f"evaluation_groups_{state}"
        counts[name] = count
    for (state,), count in transaction.tally("group_member", run, ("state",)).items():
        counts[f"members_{state}"] = count
    for (state,), count in transaction.tally("rollout_run", run, ("state",)).items():
        counts[f"trajectories_{state}"] = count
    counts["trajectories"] = sum(count for name, count in counts.items() if name.startswith("trajectories_"))
    for (kind, state), count in transaction.tally("lease", run, ("kind", "state")).items():
        if kind == "trajectory" and state == "held":
            counts["leases"] = count
    counts.setdefault("leases", 0)
    for (state,), count in transaction.tally("training_step", run, ("state",)).items():
        counts[f"training_steps_{state}"] = count
    for (state,), count in transaction.tally("weights_version", run, ("state",)).items():
        counts[f"weights_{state}"] = count
    weights = scope.weights_row(transaction)
    counts["weights_version"] = weights["version"] if weights else 0
    return counts
