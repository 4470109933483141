"""Every table of the ledger: columns, keys, indexes. One definition for the memory store, SQL and migrations.

`rollout_run` and `checkpoint` keep the names, columns and keys of the schema that DART published, so that its
queries run unchanged; our own columns follow. Every table has an automatic integer key `id`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["text", "long_text", "int", "real", "flag", "json", "timestamp"]


@dataclass(frozen=True, slots=True)
class Column:
    """One column."""

    kind: Kind
    """Type; `real` holds ledger seconds as well, `timestamp` is UTC for people and published queries."""
    size: int = 191
    """Characters, for text."""
    default: Any = None
    """Value of a row that does not say; None makes the column nullable."""
    required: bool = False
    """True if a row must say."""


@dataclass(frozen=True, slots=True)
class Table:
    """One table."""

    columns: Mapping[str, Column]
    """Name -> column, without `id`."""
    unique: tuple[tuple[str, ...], ...] = ()
    """Unique keys."""
    indexes: tuple[tuple[str, ...], ...] = ()
    """Further indexes."""


KEY = Column("text", required=True)
TEXT = Column("text", default="")
LONG = Column("long_text", default="")
INT = Column("int", default=0)
MAYBE_INT = Column("int")
REAL = Column("real", default=0.0)
MAYBE_REAL = Column("real")
JSON = Column("json")
TIME = Column("timestamp")

TABLES: Mapping[str, Table] = {
    "run": Table(
        {
            "run_id": KEY,
            "seed": INT,
            "config": JSON,
            "versions": JSON,
            "phase": KEY,
            "tasks_checksum": KEY,
            "groups_opened": INT,
            "claims_made": INT,
            "last_version": INT,
            "breaker_reason": Column("text", 1024, default=""),
            "breaker_until": REAL,
            "breaker_floor": INT,
            "admission": TEXT,
            "created_at": REAL,
        },
        unique=(("run_id",),),
    ),
    "task": Table(
        {
            "run_id": KEY,
            "task_id": KEY,
            "family": KEY,
            "seed": Column("int", required=True),
            "split": KEY,
            "instruction": LONG,
            "spec": JSON,
        },
        unique=(("run_id", "task_id"),),
        indexes=(("run_id", "split"),),
    ),
    "family": Table(
        {"run_id": KEY, "family": KEY, "groups_opened": INT, "groups_closed": INT, "groups_trainable": INT},
        unique=(("run_id", "family"),),
    ),
    "evaluation": Table(
        {
            "run_id": KEY,
            "evaluation_id": KEY,
            "temperature": REAL,
            "episodes_per_task": INT,
            "total": INT,
            "opened_at": REAL,
        },
        unique=(("run_id", "evaluation_id"),),
    ),
    "rollout_group": Table(
        {
            "group_id": KEY,
            "run_id": KEY,
            "task_id": KEY,
            "family": KEY,
            "purpose": KEY,
            "evaluation_id": TEXT,
            "state": KEY,
            "reason": TEXT,
            "num_slots": INT,
            "num_done": INT,
            "num_scored": INT,
            "num_successes": INT,
            "oldest_version": MAYBE_INT,
            "opened_version": INT,
            "opened_at": REAL,
            "closed_at": MAYBE_REAL,
            "claim_id": TEXT,
            "training_step": MAYBE_INT,
        },
        unique=(("group_id",),),
        indexes=(("run_id", "purpose", "state"), ("run_id", "claim_id")),
    ),
    "group_slot": Table(
        {
            "run_id": KEY,
            "group_id": KEY,
            "purpose": KEY,
            "evaluation_id": TEXT,
            "slot": INT,
            "state": KEY,
            "attempts": INT,
            "failures": INT,
            "trajectory_id": TEXT,
        },
        unique=(("group_id", "slot"),),
        indexes=(("run_id", "purpose", "state"), ("run_id", "evaluation_id", "state")),
    ),
    "group_member": Table(
        {
            "membership_id": KEY,
            "run_id": KEY,
            "group_id": KEY,
            "slot": INT,
            "trajectory_id": KEY,
            "role": KEY,
            "fresh_trajectory": Column("text"),
            "state": KEY,
            "reason": TEXT,
            "score": REAL,
            "success": Column("flag", default=False),
            "num_steps": INT,
            "oldest_version": MAYBE_INT,
            "claim_id": TEXT,
            "training_step": MAYBE_INT,
        },
        unique=(("membership_id",), ("fresh_trajectory",)),
        indexes=(("group_id",), ("run_id", "state"), ("run_id", "claim_id")),
    ),
    "rollout_run": Table(
        {
            "run_id": Column("text"),
            "trajectory_id": Column("text"),
            "task_id": Column("text"),
            "trace_id": Column("text"),
            "split_dir": Column("text", 512),
            "reward": Column("real"),
            "num_chunks": Column("int"),
            "used": INT,
            "model_version": Column("text"),
            "instruction": Column("text", 1024),
            "create_at": TIME,
            # ours
            "family": TEXT,
            "purpose": TEXT,
            "evaluation_id": TEXT,
            "group_id": TEXT,
            "slot": INT,
            "attempt": INT,
            "state": TEXT,
            "reason": TEXT,
            "detail": Column("text", 1024, default=""),
            "success": Column("flag"),
            "raw": MAYBE_REAL,
            "arrays": TEXT,
            "oldest_version": MAYBE_INT,
            "newest_version": MAYBE_INT,
            "holder": TEXT,
            "environment": JSON,
            "full_instruction": LONG,
            "started_at": MAYBE_REAL,
            "finished_at": MAYBE_REAL,
            "ended_at": MAYBE_REAL,
        },
        unique=(("trajectory_id", "run_id"),),
        indexes=(
            ("task_id",),
            ("run_id", "purpose", "family"),
            ("run_id", "state"),
            ("run_id", "ended_at"),
            ("run_id", "evaluation_id", "family", "state", "success"),
            ("used",),
        ),
    ),
    "step": Table(
        {
            "run_id": KEY,
            "trajectory_id": KEY,
            "step_index": INT,
            "screenshot": Column("text"),
            "width": INT,
            "height": INT,
            "observation_text": LONG,
            "reply": LONG,
            "actions": JSON,
            "parse_error": JSON,
            "image_hashes": JSON,
            "image_grids": JSON,
            "banned_ids": JSON,
            "num_prompt_tokens": INT,
            "num_reply_tokens": INT,
            "has_entropies": Column("flag", default=False),
            "mean_entropy": MAYBE_REAL,
            "finish_reason": TEXT,
            "fingerprint": TEXT,
            "temperature": REAL,
            "compute_dtype": TEXT,
            "weights_version": INT,
            "worker": TEXT,
            "request_id": TEXT,
            "generation_seconds": REAL,
            "environment_seconds": REAL,
            "started_at": REAL,
        },
        unique=(("trajectory_id", "step_index"),),
        indexes=(("run_id",),),
    ),
    "pool_entry": Table(
        {
            "run_id": KEY,
            "task_id": KEY,
            "trajectory_id": KEY,
            "provenance": KEY,
            "logprob_source": KEY,
            "scored_version": MAYBE_INT,
            "oldest_version": INT,
            "num_steps": INT,
            "score": REAL,
            "replays": INT,
        },
        unique=(("run_id", "trajectory_id"),),
        indexes=(("run_id", "task_id"),),
    ),
    "training_step": Table(
        {
            "run_id": KEY,
            "step_index": INT,
            "claim_id": KEY,
            "state": KEY,
            "metrics": JSON,
            "rejected": JSON,
            "weights_version": MAYBE_INT,
            "trainer": TEXT,
            "token": INT,
            "created_at": REAL,
        },
        unique=(("run_id", "claim_id"),),
        indexes=(("run_id", "state"),),
    ),
    "weights_version": Table(
        {
            "run_id": KEY,
            "version": INT,
            "state": KEY,
            "path": Column("text", 1024, default=""),
            "checksum": TEXT,
            "training_step": INT,
            "parent": MAYBE_INT,
            "created_at": REAL,
        },
        unique=(("run_id", "version"),),
        indexes=(("run_id", "state"),),
    ),
    "checkpoint": Table(
        {
            "name": Column("text", 50, default=""),
            "version": Column("text", 50, required=True),
            "run_id": TEXT,
            "status": Column("text", 20, required=True),
            "path": Column("text", 255, required=True),
            "source": Column("text", 50),
            "operator": Column("text", 50),
            "remark": Column("text", 1024),
            "config_yaml": Column("long_text"),
            "created_at": TIME,
            "updated_at": TIME,
            "deleted_at": TIME,
            "started_at": TIME,
            "finished_at": TIME,
            # ours
            "training_step": MAYBE_INT,
            "weights_version": MAYBE_INT,
            "checksum": TEXT,
        },
        indexes=(("run_id", "status"), ("status",), ("version",), ("source",), ("created_at",), ("updated_at",)),
    ),
    "worker": Table(
        {"run_id": KEY, "worker": KEY, "version": INT, "updated_at": REAL},
        unique=(("run_id", "worker"),),
    ),
    "lease": Table(
        {
            "subject": KEY,
            "run_id": KEY,
            "kind": KEY,
            "state": KEY,
            "holder": KEY,
            "token": INT,
            "expires_at": REAL,
        },
        unique=(("subject",),),
        indexes=(("run_id", "kind", "state"),),
    ),
    "event": Table(
        {"run_id": KEY, "kind": KEY, "subject": TEXT, "data": JSON, "at": REAL},
        indexes=(("run_id", "at"), ("run_id", "kind", "at")),
    ),
}


def complete_row(table: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with defaults filled in, keys in column order. Raises KeyError for an unknown or missing column."""
    columns = TABLES[table].columns
    unknown = row.keys() - columns.keys()
    if unknown:
        raise KeyError(f"table {table} has no column {sorted(unknown)}")
    missing = [name for name, column in columns.items() if column.required and row.get(name) is None]
    if missing:
        raise KeyError(f"table {table} needs a value for {missing}")
    return {name: row.get(name, column.default) for name, column in columns.items()}
