"""What every rule of the data manager needs to know: which run, its settings, and things that never change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from dartrl.config import RunConfig
from dartrl.data.curation import CurationRules
from dartrl.data.encoding import decode_task
from dartrl.data.store import Lock, Row, Transaction
from dartrl.errors import ConfigError
from dartrl.interfaces import BlobStore
from dartrl.types import Task

FamilyTasks = Mapping[str, tuple[str, ...]]
"""Family -> ids of its instances, in the order of the task set."""


class RunScope:
    """One run as one process sees it; caches only rows that never change."""

    def __init__(self, run_id: str, config: RunConfig, blobs: BlobStore) -> None:
        self.run_id = run_id
        self.config = config
        self.blobs = blobs
        self.rules = CurationRules(
            max_staleness=config.curation.max_staleness,
            drop_zero_variance=config.curation.drop_zero_variance,
            experience_pool=config.curation.experience_pool,
            pool_max_age=config.curation.pool_max_age,
        )
        self._tasks: dict[str, Task] = {}
        self._families: dict[str, FamilyTasks] = {}
        self._paths: dict[int, str] = {}

    def run_row(self, transaction: Transaction, lock: Lock = "") -> Row:
        """Row of the run; with `lock` its holder decides alone. Raises ConfigError if the run was never opened."""
        row = transaction.first("run", {"run_id": self.run_id}, lock=lock)
        if row is None:
            raise ConfigError(f"run {self.run_id!r} is not in this database; open it first, or check its name and the URL")
        return row

    def task(self, transaction: Transaction, task_id: str) -> Task:
        """A task of the run."""
        if task_id not in self._tasks:
            row = transaction.first("task", {"run_id": self.run_id, "task_id": task_id})
            if row is None:
                raise ConfigError(f"task {task_id!r} is not in run {self.run_id!r}")
            self._tasks[task_id] = decode_task(row)
        return self._tasks[task_id]

    def families(self, transaction: Transaction, split: str) -> FamilyTasks:
        """Instances of a split by family."""
        if split not in self._families:
            grouped: defaultdict[str, list[str]] = defaultdict(list)
            for row in transaction.select("task", {"run_id": self.run_id, "split": split}):
                self._tasks[row["task_id"]] = decode_task(row)
                grouped[row["family"]].append(row["task_id"])
            self._families[split] = {family: tuple(ids) for family, ids in grouped.items()}
        return self._families[split]

    def weights_row(self, transaction: Transaction) -> Row | None:
        """Row of the newest published version that is not rolled back."""
        published = {"run_id": self.run_id, "state": "published"}
        return transaction.first("weights_version", published, order="version", descending=True)

    def weights_path(self, transaction: Transaction, version: int) -> str:
        """Path of a version, `` if the ledger does not know it."""
        if version not in self._paths:
            row = transaction.first("weights_version", {"run_id": self.run_id, "version": version})
            if row is None or not row["path"]:
                return ""
            self._paths[version] = row["path"]
        return self._paths[version]

    def log(self, transaction: Transaction, kind: str, subject: str, data: Mapping[str, Any]) -> None:
        """Append an event: a decision or change of state with its inputs."""
        row = {"run_id": self.run_id, "kind": kind, "subject": subject, "data": dict(data), "at": transaction.now}
        transaction.insert("event", [row])
