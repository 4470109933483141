"""All rows of one run at one moment, for the audit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dartrl.data.manager import DataManager
from dartrl.data.store import Row


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Rows of one run, each list in the order of ids."""

    run: Row
    """The run itself."""
    max_staleness: int
    """Limit that the run was configured with."""
    tasks: Sequence[Row]
    """Table task."""
    trajectories: Sequence[Row]
    """Table rollout_run."""
    steps: Sequence[Row]
    """Table step."""
    groups: Sequence[Row]
    """Table rollout_group."""
    slots: Sequence[Row]
    """Table group_slot."""
    members: Sequence[Row]
    """Table group_member."""
    pool: Sequence[Row]
    """Table pool_entry."""
    leases: Sequence[Row]
    """Table lease."""
    steps_done: Sequence[Row]
    """Table training_step."""
    versions: Sequence[Row]
    """Table weights_version."""
    checkpoints: Sequence[Row]
    """Table checkpoint."""
    claims: Sequence[Row]
    """Events of kind claim."""

    def by_table(self) -> Mapping[str, Sequence[Row]]:
        """Rows of the tables that have a state machine."""
        return {
            "run": [self.run],
            "rollout_group": self.groups,
            "group_slot": self.slots,
            "group_member": self.members,
            "rollout_run": self.trajectories,
            "lease": self.leases,
            "training_step": self.steps_done,
            "weights_version": self.versions,
            "checkpoint": self.checkpoints,
        }

    @property
    def lineage(self) -> list[Row]:
        """Training steps that were not rolled back, in the order in which they were acknowledged."""
        return [row for row in self.steps_done if row["state"] != "rolled_back"]


def take_snapshot(ledger: DataManager) -> Snapshot:
    """Read everything in one transaction."""
    scope = ledger.scope
    run = {"run_id": scope.run_id}
    with ledger.store.reading() as transaction:
        return Snapshot(
            run=scope.run_row(transaction),
            max_staleness=scope.rules.max_staleness,
            tasks=transaction.select("task", run),
            trajectories=transaction.select("rollout_run", run),
            steps=transaction.select("step", run),
            groups=transaction.select("rollout_group", run),
            slots=transaction.select("group_slot", run),
            members=transaction.select("group_member", run),
            pool=transaction.select("pool_entry", run),
            leases=transaction.select("lease", run),
            steps_done=transaction.select("training_step", run),
            versions=transaction.select("weights_version", run, order="version"),
            checkpoints=transaction.select("checkpoint", run),
            claims=transaction.select("event", {**run, "kind": "claim"}),
        )
