"""Reads a run out of its ledger, for the live view and the report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dartrl.config import RunConfig
from dartrl.dashboard.readings import REPORT_EVENTS, RunReadings
from dartrl.interfaces import Ledger
from dartrl.launch import plugins
from dartrl.launch.conductor import planned_evaluations
from dartrl.records import EpisodeSummary, EvaluationResult, Event


class RunReader:
    """Readings of one run; keeps what it has read, so that a look at a long run stays cheap. One caller at a time."""

    def __init__(self, ledger: Ledger, config: RunConfig, run_id: str) -> None:
        self._ledger = ledger
        self._config = config
        self._run_id = run_id
        self._events: list[Event] = []
        self._episodes: list[EpisodeSummary] = []
        self._guess_rates = guess_rates(config)

    def read(self, *, audit_ok: bool = False, disk_mib: float = 0.0, versions: Mapping[str, str] | None = None) -> RunReadings:
        """The present readings; the audit's verdict and the folder's size are the caller's."""
        self._events += self._ledger.events(REPORT_EVENTS, self._events[-1].at if self._events else 0.0)
        self._episodes += self._ledger.episodes(after=self._episodes[-1].finished_at if self._episodes else 0.0)
        return RunReadings(
            run_id=self._run_id,
            config=self._config,
            phase=self._ledger.run().phase,
            events=self._events,
            steps=self._ledger.training_steps(),
            episodes=self._episodes,
            evaluations=read_evaluations(self._ledger, self._config, {episode.purpose for episode in self._episodes}),
            counts=self._ledger.counts(),
            guess_rates=self._guess_rates,
            audit_ok=audit_ok,
            disk_mib=disk_mib,
            versions=versions or {},
        )


def read_evaluations(ledger: Ledger, config: RunConfig, purposes: set[str]) -> dict[str, EvaluationResult]:
    """Results of the planned evaluations that have begun, that is, occur among the purposes of finished episodes."""
    planned = [*planned_evaluations(config, "before"), *planned_evaluations(config, "after")]
    return {one.id: ledger.evaluation_result(one.id) for one in planned if one.id in purposes}


def guess_rates(config: RunConfig) -> dict[str, float]:
    """Family -> success rate of guessing, for the families whose task set knows it."""
    task_set = plugins.create_task_set(config.tasks.set)
    known: Mapping[str, float] = getattr(task_set, "guess_rates", dict)()
    return {family: known[family] for family in config.tasks.families if family in known}


def folder_mib(folder: Path) -> float:
    """Space that the files of a folder take, in MiB; files that vanish meanwhile are left out."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total / 2**20
