"""All state machines of the ledger, as tables: from each state, the states that may follow.

A state without followers is final. Whoever changes a state goes through `move`, so a change that is not in the
table cannot be written; `audit` reads the same tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dartrl.data.store import Transaction, Where
from dartrl.errors import LedgerConflict
from dartrl.types import End


@dataclass(frozen=True, slots=True)
class StateMachine:
    """States of one kind of row."""

    table: str
    """Table whose rows have these states."""
    column: str
    """Column that holds the state."""
    followers: Mapping[str, tuple[str, ...]]
    """State -> states that may follow."""

    @property
    def final(self) -> frozenset[str]:
        """States that nothing follows."""
        return frozenset(state for state, after in self.followers.items() if not after)

    def check(self, before: str, after: str) -> None:
        """Raises LedgerConflict unless `after` may follow `before`."""
        allowed = self.followers.get(before, ())
        if after not in allowed:
            raise LedgerConflict(
                f"{self.table} may not go from {before!r} to {after!r}; allowed: {', '.join(allowed) or 'none, it is final'}"
            )


RUN = StateMachine(
    "run",
    "phase",
    {
        "starting": ("evaluating", "training", "draining", "finished"),
        "evaluating": ("training", "draining", "finished"),
        "training": ("evaluating", "draining", "finished"),
        "draining": ("evaluating", "training", "finished"),
        "finished": (),
    },
)

GROUP = StateMachine(
    "rollout_group",
    "state",
    {
        "open": ("ready", "rejected", "finished"),  # slots are being filled
        "ready": ("claimed", "rejected"),  # closed, trainable so far
        "claimed": ("applied", "ready", "rejected"),  # in the trainer's hands
        "applied": ("trained", "ready"),  # in a training step that a crash may still take back
        "trained": (),  # in a resumable checkpoint
        "rejected": (),  # for the reason in its row
        "finished": (),  # an evaluation's group: scored, never trained on
    },
)

SLOT = StateMachine(
    "group_slot",
    "state",
    {
        "open": ("running", "void"),
        "running": ("filled", "open", "void"),  # open again = another attempt
        "filled": (),  # by a scored trajectory
        "void": (),  # no attempt was scored
    },
)

MEMBERSHIP = StateMachine(
    "group_member",
    "state",
    {
        "ready": ("claimed", "rejected"),
        "claimed": ("applied", "ready", "rejected"),
        "applied": ("trained", "ready"),
        "trained": (),
        "rejected": (),
    },
)

TRAJECTORY = StateMachine("rollout_run", "state", {"running": tuple(str(end) for end in End), **{str(end): () for end in End}})

LEASE = StateMachine(
    "lease",
    "state",
    {
        "held": ("held", "released", "expired"),  # held again = taken over with a larger token
        "released": ("held",),
        "expired": ("held",),
    },
)

TRAINING_STEP = StateMachine(
    "training_step",
    "state",
    {
        "applied": ("durable", "rolled_back"),
        "durable": (),  # a resumable checkpoint contains it
        "rolled_back": (),  # the trainer resumed from before it
    },
)

WEIGHTS_VERSION = StateMachine(
    "weights_version",
    "state",
    {
        "reserved": ("published", "abandoned"),  # the number is given out
        "published": ("rolled_back",),
        "abandoned": (),  # the trainer ended before it published
        "rolled_back": (),
    },
)

CHECKPOINT = StateMachine(
    "checkpoint",
    "status",
    {
        "PENDING": ("RUNNING", "COMPLETED", "FAILED", "DEPRECATED"),
        "RUNNING": ("COMPLETED", "FAILED"),
        "COMPLETED": ("DEPRECATED", "FAILED"),
        "FAILED": ("DEPRECATED",),
        "DEPRECATED": (),
    },
)

MACHINES = (RUN, GROUP, SLOT, MEMBERSHIP, TRAJECTORY, LEASE, TRAINING_STEP, WEIGHTS_VERSION, CHECKPOINT)


def move(
    transaction: Transaction, machine: StateMachine, where: Where, before: str, after: str, changes: Mapping[str, Any] | None = None
) -> int:
    """Move all matching rows that are in state `before` to `after`, with further changes. Returns how many.

    Raises LedgerConflict if the table does not allow the move.
    """
    machine.check(before, after)
    return transaction.update(machine.table, {**where, machine.column: before}, {**(changes or {}), machine.column: after})


def move_one(
    transaction: Transaction, machine: StateMachine, where: Where, before: str, after: str, changes: Mapping[str, Any] | None = None
) -> None:
    """Like `move`, for a row that must be there. Raises LedgerConflict if it is in another state."""
    if move(transaction, machine, where, before, after, changes) != 1:
        raise LedgerConflict(f"{machine.table} {dict(where)} is not {before!r}; somebody else was first")
