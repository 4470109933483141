"""The part of the audit that follows training: one chain of steps, versions and checkpoints, and what they consumed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from dartrl.data.snapshot import Snapshot


def check_steps(snapshot: Snapshot) -> Iterator[str]:
    """Step indexes count up from 1, durable ones first; each consumed member belongs to the step it names."""
    lineage = snapshot.lineage
    indexes = [row["step_index"] for row in lineage]
    if indexes != list(range(1, len(indexes) + 1)):
        yield f"training steps are not one chain: {indexes}"
    states = [row["state"] for row in lineage]
    if states != sorted(states, key=lambda state: state != "durable"):
        yield "a durable training step follows one that is not durable"
    by_index = {row["step_index"]: row for row in lineage}
    consumed: Counter[int] = Counter()
    for member in snapshot.members:
        if member["state"] not in ("applied", "trained"):
            continue
        step = by_index.get(member["training_step"])
        if step is None or step["claim_id"] != member["claim_id"]:
            index = member["training_step"]
            yield f"membership {member['membership_id']} is {member['state']} in step {index}, which did not claim it"
            continue
        consumed[step["step_index"]] += 1
        if (member["state"] == "trained") != (step["state"] == "durable"):
            yield f"membership {member['membership_id']} is {member['state']}, but step {step['step_index']} is {step['state']}"
    rejected = {row["claim_id"]: len(row["rejected"]) for row in lineage}
    for row in lineage:
        if not consumed[row["step_index"]] and not rejected[row["claim_id"]]:
            yield f"training step {row['step_index']} consumed nothing"


def check_versions(snapshot: Snapshot) -> Iterator[str]:
    """Numbers come from the sequence; published versions descend from published ones and follow the steps."""
    known = {row["version"]: row for row in snapshot.versions}
    last = snapshot.run["last_version"]
    if sorted(known) != list(range(1, last + 1)):
        yield f"weights versions {sorted(known)} are not the numbers 1 to {last} that the ledger gave out"
    newest_step = 0
    for version, row in sorted(known.items()):
        if row["state"] != "published":
            continue
        parent = row["parent"]
        if parent is not None and (parent >= version or known.get(parent, {}).get("state") != "published"):
            yield f"weights version {version} descends from {parent}, which is not an earlier published version"
        if row["training_step"] < newest_step:
            yield f"weights version {version} is of step {row['training_step']}, but an earlier one is of step {newest_step}"
        newest_step = row["training_step"]
    if newest_step > len(snapshot.lineage):
        yield f"weights of step {newest_step} are published, but the last step is {len(snapshot.lineage)}"
    for row in snapshot.lineage:
        version = row["weights_version"]
        if version is not None and known.get(version, {}).get("training_step") != row["step_index"]:
            yield f"training step {row['step_index']} names weights version {version}, which is of another step"


def check_checkpoints(snapshot: Snapshot) -> Iterator[str]:
    """The newest resumable checkpoint holds exactly the durable steps."""
    completed = [row["training_step"] for row in snapshot.checkpoints if row["status"] == "COMPLETED"]
    durable = [row["step_index"] for row in snapshot.lineage if row["state"] == "durable"]
    if max(completed, default=0) != max(durable, default=0):
        yield f"the newest checkpoint holds step {max(completed, default=0)}, but steps up to {max(durable, default=0)} are durable"
    for row in snapshot.checkpoints:
        if row["status"] == "DEPRECATED" and row["deleted_at"] is None:
            yield f"checkpoint {row['name']} is deprecated without a time of deletion"


def check_use(snapshot: Snapshot) -> Iterator[str]:
    """`used` of a trajectory is the number of its trained memberships."""
    trained: defaultdict[str, int] = defaultdict(int)
    for member in snapshot.members:
        trained[member["trajectory_id"]] += int(member["state"] == "trained")
    for row in snapshot.trajectories:
        count = trained[row["trajectory_id"]]
        if row["used"] != count:
            yield f"trajectory {row['trajectory_id']} says used {row['used']} times, but {count} memberships are trained"
