"""What the ledger says about a run, as plain records: the input of the live view and the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dartrl.config import RunConfig
from dartrl.records import EpisodeSummary, EvaluationResult, Event, TrainingStep


@dataclass(frozen=True, slots=True)
class RunReadings:
    """Everything that the report is computed from."""

    run_id: str
    """Id of the run."""
    config: RunConfig
    """Resolved configuration."""
    phase: str
    """What the run is doing."""
    events: Sequence[Event]
    """Events of the kinds in `REPORT_EVENTS`, in order."""
    steps: Sequence[TrainingStep]
    """Acknowledged steps of the lineage, in order."""
    episodes: Sequence[EpisodeSummary]
    """All attempts that ended, in order."""
    evaluations: Mapping[str, EvaluationResult]
    """Evaluation id -> result."""
    counts: Mapping[str, int]
    """Counters of the ledger."""
    guess_rates: Mapping[str, float]
    """Family -> success rate of a random element of the right kind; families without one are absent."""
    audit_ok: bool
    """The audit found no problem."""
    disk_mib: float
    """Size of the run's folder in MiB."""
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    """Package, renderer and font versions."""

    def of_kind(self, kind: str) -> list[Event]:
        """Events of one kind, in order."""
        return [event for event in self.events if event.kind == kind]


REPORT_EVENTS = ("stage", "session", "view", "stats", "join", "sync", "restart", "alarm", "breaker")
"""Kinds of events that views and reports read."""


def training_windows(events: Sequence[Event]) -> list[tuple[float, float]]:
    """(start, end) in ledger seconds of each stretch of training; several after a resume.

    A stretch begins with the stage's `started` event or a later session, and lasts until the last training clock reading
    in it, so that time in which nothing ran does not count.
    """
    windows: list[tuple[float, float]] = []
    start: float | None = None
    for event in events:
        if event.kind == "stage" and event.subject == "training":
            if event.data.get("state") == "started":
                start = event.at
                windows.append((start, start))
            elif start is not None:
                windows[-1] = (start, event.at)
    return windows


def is_within(at: float, windows: Sequence[tuple[float, float]]) -> bool:
    """True if the moment lies in one of the windows."""
    return any(start <= at <= end for start, end in windows)


def training_seconds(events: Sequence[Event]) -> float:
    """Last reading of the training clock in seconds; 0 before training."""
    readings = [event.data["seconds"] for event in events if event.kind == "stage" and event.data.get("state") == "clock"]
    return max((float(reading) for reading in readings), default=0.0)
