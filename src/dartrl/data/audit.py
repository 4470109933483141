"""Proof, from the tables alone, that nothing was lost and nothing was counted twice.

`audit` reads one consistent state of a run and returns every contradiction it finds. A clean report says:
produced = trained + rejected + pending, each with exactly one state and reason; at most one fresh membership for a
trajectory; one chain of training steps and weights versions; replays within their cap; every blob there, with its hash.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dartrl.data.audit_training import check_checkpoints, check_steps, check_use, check_versions
from dartrl.data.curation import MAX_REPLAYS
from dartrl.data.manager import DataManager
from dartrl.data.snapshot import Snapshot, take_snapshot
from dartrl.data.states import MACHINES, TRAJECTORY
from dartrl.data.store import Row
from dartrl.errors import BlobCorrupt
from dartrl.interfaces import BlobStore
from dartrl.types import SCORED_ENDS

PENDING = ("ready", "claimed", "applied")
"""States of a membership that is not decided yet."""
MEMBERS_OF = {
    "open": ("ready",),
    "ready": ("ready",),
    "claimed": ("claimed",),
    "applied": ("applied",),
    "trained": ("trained",),
    "rejected": (),
    "finished": (),
}
"""State of a group -> states its members may have, besides rejected."""


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What the audit found."""

    lines: tuple[str, ...]
    """The sums, one a line, then the verdict."""
    problems: tuple[str, ...]
    """Contradictions; empty for a clean run."""

    @property
    def ok(self) -> bool:
        return not self.problems


def audit(ledger: DataManager) -> AuditReport:
    """Check a run, alive or finished. Reads every blob once, one at a time."""
    snapshot = take_snapshot(ledger)
    problems = [problem for check in CHECKS for problem in check(snapshot)]
    problems += check_blobs(snapshot, ledger.scope.blobs)
    lines = list(_sums(snapshot))
    lines.append("audit clean" if not problems else f"audit found {len(problems)} problem{'s' if len(problems) > 1 else ''}")
    return AuditReport(tuple(lines), tuple(problems))


def _sums(snapshot: Snapshot) -> Iterator[str]:
    ends = Counter(row["state"] for row in snapshot.trajectories)
    yield f"trajectories {len(snapshot.trajectories)} = " + _listed(ends)
    for role in ("fresh", "replay"):
        states = Counter(row["state"] for row in snapshot.members if row["role"] == role)
        pending = sum(states[state] for state in PENDING)
        total = sum(states.values())
        yield f"{role} members {total} = {states['trained']} trained + {states['rejected']} rejected + {pending} pending"
    yield "members rejected: " + _listed(Counter(row["reason"] for row in snapshot.members if row["state"] == "rejected"))
    yield _bias(snapshot)
    training = [row for row in snapshot.groups if row["purpose"] == "train"]
    yield f"training groups {len(training)} = " + _listed(Counter(row["state"] for row in training))
    yield f"training steps {len(snapshot.steps_done)} = " + _listed(Counter(row["state"] for row in snapshot.steps_done))
    yield f"weights versions {len(snapshot.versions)} = " + _listed(Counter(row["state"] for row in snapshot.versions))


def _bias(snapshot: Snapshot) -> str:
    """Whether short or quick episodes are trained on more than they are produced."""
    trained = {row["trajectory_id"] for row in snapshot.members if row["state"] == "trained"}
    ended = [row for row in snapshot.trajectories if row["ended_at"] is not None]
    training = [row for row in ended if row["purpose"] == "train" and row["state"] in SCORED_ENDS]
    kinds = {
        "generated": training,
        "trained": [row for row in training if row["trajectory_id"] in trained],
        "retried": [row for row in training if row["attempt"] > 0],
    }
    return "bias meter: " + ", ".join(f"{name} {_length(rows)}" for name, rows in kinds.items())


def _length(rows: Sequence[Row]) -> str:
    if not rows:
        return "none"
    steps = sum(row["num_chunks"] for row in rows) / len(rows)
    seconds = sum(row["finished_at"] - row["started_at"] for row in rows) / len(rows)
    return f"{len(rows)} of {steps:.2f} steps and {seconds:.2f} s"


def _listed(counts: Counter[str]) -> str:
    return " + ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"


# --------------------------------------------------------------------------- states


def check_states(snapshot: Snapshot) -> Iterator[str]:
    """Every state is in its table; what is rejected says why, and nothing else does."""
    tables = snapshot.by_table()
    for machine in MACHINES:
        for row in tables.get(machine.table, ()):
            if row[machine.column] not in machine.followers:
                yield f"{machine.table} row {row['id']} is in the unknown state {row[machine.column]!r}"
    for row in snapshot.members:
        if (row["state"] == "rejected") != bool(row["reason"]):
            yield f"membership {row['membership_id']} is {row['state']} with reason {row['reason']!r}"
    for row in snapshot.groups:
        if (row["state"] == "rejected") and not row["reason"]:
            yield f"group {row['group_id']} is rejected without a reason"


# --------------------------------------------------------------------------- trajectories


def check_trajectories(snapshot: Snapshot) -> Iterator[str]:
    """Scores fit the ends, steps fit the counts, running attempts have a lease and a slot."""
    steps: defaultdict[str, list[Row]] = defaultdict(list)
    for step in snapshot.steps:
        steps[step["trajectory_id"]].append(step)
    known = {row["trajectory_id"] for row in snapshot.trajectories}
    for name in sorted(steps.keys() - known):
        yield f"steps of {name} have no trajectory"
    versions = {row["version"] for row in snapshot.versions if row["path"]}
    for row in snapshot.trajectories:
        yield from _check_trajectory(row, sorted(step["step_index"] for step in steps[row["trajectory_id"]]))
        used = {step["weights_version"] for step in steps[row["trajectory_id"]]}
        if not used <= versions:
            yield f"trajectory {row['trajectory_id']} was sampled by unpublished versions {sorted(used - versions)}"
        if used and (row["oldest_version"], row["newest_version"]) != (min(used), max(used)):
            said = f"{row['oldest_version']} to {row['newest_version']}"
            yield f"trajectory {row['trajectory_id']} says versions {said}, its steps say {sorted(used)}"


def _check_trajectory(row: Row, indexes: list[int]) -> Iterator[str]:
    name = row["trajectory_id"]
    is_scored = row["state"] in SCORED_ENDS
    if is_scored != (row["reward"] is not None) or is_scored != (row["success"] is not None):
        yield f"trajectory {name} is {row['state']} with score {row['reward']} and success {row['success']}"
    if is_scored and not 0 <= (row["reward"] or 0) <= 1:
        yield f"trajectory {name} has score {row['reward']}, outside [0, 1]"
    if indexes != list(range(row["num_chunks"] or 0)):
        yield f"trajectory {name} says {row['num_chunks'] or 0} steps, but has steps {indexes}"
    if (row["state"] == "running") != (row["ended_at"] is None):
        yield f"trajectory {name} is {row['state']} with end {row['ended_at']}"


def check_leases(snapshot: Snapshot) -> Iterator[str]:
    """Running attempts and held leases are the same."""
    running = {row["trajectory_id"] for row in snapshot.trajectories if row["state"] == TRAJECTORY_RUNNING}
    held = {
        row["subject"].removeprefix("trajectory:")
        for row in snapshot.leases
        if row["kind"] == "trajectory" and row["state"] == "held"
    }
    for name in sorted(running - held):
        yield f"trajectory {name} runs without a lease"
    for name in sorted(held - running):
        yield f"the lease on trajectory {name} is held, but it does not run"


TRAJECTORY_RUNNING = next(iter(TRAJECTORY.followers.keys() - TRAJECTORY.final))


# --------------------------------------------------------------------------- groups and memberships


def check_slots(snapshot: Snapshot) -> Iterator[str]:
    """Slots fit their groups; a filled slot has one scored trajectory, a running slot one that runs."""
    slots: defaultdict[str, list[Row]] = defaultdict(list)
    for slot in snapshot.slots:
        slots[slot["group_id"]].append(slot)
    trajectories = {row["trajectory_id"]: row for row in snapshot.trajectories}
    for group in snapshot.groups:
        name, own = group["group_id"], slots.pop(group["group_id"], [])
        states = Counter(slot["state"] for slot in own)
        if len(own) != group["num_slots"]:
            yield f"group {name} says {group['num_slots']} slots, but has {len(own)}"
        if states["filled"] != group["num_scored"]:
            yield f"group {name} says {group['num_scored']} scored attempts, but {states['filled']} slots are filled"
        if group["state"] != "open" and states["open"] + states["running"]:
            yield f"group {name} is {group['state']}, but {states['open'] + states['running']} of its slots are not"
        for slot in own:
            yield from _check_slot(slot, trajectories.get(slot["trajectory_id"]))
    for name in sorted(slots):
        yield f"slots of {name} have no group"


def _check_slot(slot: Row, trajectory: Row | None) -> Iterator[str]:
    name = f"{slot['group_id']} slot {slot['slot']}"
    expected = {"filled": SCORED_ENDS, "running": {TRAJECTORY_RUNNING}}.get(slot["state"])
    if expected is None:
        return
    if trajectory is None:
        yield f"{name} is {slot['state']} by trajectory {slot['trajectory_id']!r}, which does not exist"
    elif trajectory["state"] not in expected:
        yield f"{name} is {slot['state']}, but its trajectory {trajectory['trajectory_id']} is {trajectory['state']}"


def check_members(snapshot: Snapshot) -> Iterator[str]:
    """Scored training attempts and fresh memberships match one to one; members are as far as their group."""
    fresh = Counter(row["trajectory_id"] for row in snapshot.members if row["role"] == "fresh")
    groups = {row["group_id"]: row for row in snapshot.groups}
    trajectories = {row["trajectory_id"]: row for row in snapshot.trajectories}
    for row in snapshot.trajectories:
        expected = int(row["purpose"] == "train" and row["state"] in SCORED_ENDS)
        if fresh[row["trajectory_id"]] != expected:
            yield (
                f"trajectory {row['trajectory_id']} ({row['purpose']}, {row['state']}) has {fresh[row['trajectory_id']]} fresh "
                f"memberships, not {expected}"
            )
    for row in snapshot.members:
        group, trajectory = groups.get(row["group_id"]), trajectories.get(row["trajectory_id"])
        if group is None or trajectory is None:
            yield f"membership {row['membership_id']} belongs to no group or trajectory"
            continue
        if row["state"] != "rejected" and row["state"] not in MEMBERS_OF.get(group["state"], ()):
            yield f"membership {row['membership_id']} is {row['state']}, but its group is {group['state']}"
        if (row["score"], bool(row["success"]), row["num_steps"]) != (
            trajectory["reward"],
            trajectory["success"],
            trajectory["num_chunks"],
        ):
            yield f"membership {row['membership_id']} disagrees with its trajectory about score, success or length"
        if trajectory["task_id"] != group["task_id"]:
            yield f"membership {row['membership_id']} is of task {trajectory['task_id']}, its group of {group['task_id']}"


def check_replays(snapshot: Snapshot) -> Iterator[str]:
    """Replays are counted, capped, at most one in a group, and successes."""
    replays = [row for row in snapshot.members if row["role"] == "replay"]
    counted = Counter(row["trajectory_id"] for row in replays)
    entries = {row["trajectory_id"]: row for row in snapshot.pool}
    for name in sorted(counted.keys() - entries.keys()):
        yield f"trajectory {name} was replayed, but is not in the pool"
    for name, entry in sorted(entries.items()):
        if entry["replays"] != counted[name]:
            yield f"the pool counts {entry['replays']} replays of {name}, memberships count {counted[name]}"
        if counted[name] > MAX_REPLAYS:
            yield f"trajectory {name} was replayed {counted[name]} times; at most {MAX_REPLAYS}"
    in_play = Counter(row["group_id"] for row in replays if row["state"] != "rejected")
    for name, count in sorted(in_play.items()):
        if count > 1:
            yield f"group {name} has {count} replays; at most 1"
    for row in replays:
        if not row["success"]:
            yield f"replay {row['membership_id']} is not a success"


def check_staleness(snapshot: Snapshot) -> Iterator[str]:
    """No claim took a group past its age."""
    for event in snapshot.claims:
        for group in event["data"]["groups"]:
            if group["staleness"] > snapshot.max_staleness:
                limit = snapshot.max_staleness
                yield f"claim {event['subject']} took {group['group']} at staleness {group['staleness']}; at most {limit}"


def check_splits(snapshot: Snapshot) -> Iterator[str]:
    """Training never touches a held-out instance."""
    splits = {row["task_id"]: row["split"] for row in snapshot.tasks}
    for row in snapshot.groups:
        if splits.get(row["task_id"]) != row["purpose"]:
            yield f"group {row['group_id']} for {row['purpose']} is of task {row['task_id']} in split {splits.get(row['task_id'])}"


# --------------------------------------------------------------------------- blobs


def check_blobs(snapshot: Snapshot, blobs: BlobStore) -> Iterator[str]:
    """Every blob that a row names is there and has its hash."""
    named: dict[str, str] = {
        row["arrays"]: f"arrays of {row['trajectory_id']}" for row in snapshot.trajectories if row["num_chunks"]
    }
    for step in snapshot.steps:
        for name in [*([step["screenshot"]] if step["screenshot"] else []), *step["image_hashes"]]:
            named.setdefault(name, f"screenshot of step {step['step_index']} of {step['trajectory_id']}")
    for name, place in named.items():
        try:
            blobs.get(name)
        except BlobCorrupt as error:
            yield f"{place}: {error}"


CHECKS: tuple[Callable[[Snapshot], Iterator[str]], ...] = (
    check_states,
    check_trajectories,
    check_leases,
    check_slots,
    check_members,
    check_replays,
    check_staleness,
    check_splits,
    check_steps,
    check_versions,
    check_checkpoints,
    check_use,
)
