"""Busy shares, memory and counters out of the roles' `stats` events. Pure.

A role's counters start at zero with each of its lives; another `pid` marks another life.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dartrl.dashboard.readings import is_within
from dartrl.records import Event

BUSY = {
    "runner": "busy_seconds",
    "router": "cpu_seconds",
    "engine": "engine/busy_seconds",
    "trainer": "busy_seconds",
    "manager": "cpu_seconds",
}
"""Role -> the counter (seconds) that says it is busy; router and manager count their processor time."""

Windows = Sequence[tuple[float, float]]


def total(events: Sequence[Event], role: str, name: str, within: Windows | None = None) -> float:
    """Sum of a counter over all processes and lives of a role.

    What a process did between its last reading and a crash is not known and not counted.
    within: (start, end) in ledger seconds; only increases read inside them count.
    """
    return sum(
        increase
        for subject_role, at, increase in _increases(events, name)
        if subject_role == role and (within is None or is_within(at, within))
    )


def busy_share(events: Sequence[Event], role: str, within: Windows | None = None) -> float | None:
    """Share in [0, 1] of the role's wall time in which it was busy; None without readings."""
    wall = total(events, role, "wall_seconds", within)
    return min(1.0, total(events, role, BUSY[role], within) / wall) if wall > 0 else None


def latest(events: Sequence[Event]) -> dict[str, dict[str, Any]]:
    """Subject -> body of its last stats event."""
    return {event.subject: event.data for event in events}


def largest(events: Iterable[Event], role: str, name: str) -> float:
    """Largest reading of a name among the processes of a role; 0 without readings."""
    return max((float(event.data.get(name, 0.0)) for event in events if role_of(event.subject) == role), default=0.0)


def peak_rss_mib(events: Sequence[Event]) -> float:
    """Largest sum over all processes of their latest resident memory, in MiB."""
    present: dict[str, float] = {}
    peak = 0.0
    for event in events:
        present[event.subject] = float(event.data.get("rss_mib", 0.0))
        peak = max(peak, sum(present.values()))
    return peak


def role_of(subject: str) -> str:
    """`runner` of `runner-0`."""
    return subject.rpartition("-")[0] or subject


def _increases(events: Sequence[Event], name: str) -> list[tuple[str, float, float]]:
    """(role, ledger seconds, increase since the process's reading before) of each event."""
    last: dict[str, tuple[float, float]] = {}
    increases: list[tuple[str, float, float]] = []
    for event in events:
        life, value = float(event.data.get("pid", 0)), float(event.data.get(name, 0.0))
        life_before, value_before = last.get(event.subject, (life, 0.0))
        increase = value if life != life_before else value - value_before
        increases.append((role_of(event.subject), event.at, increase))
        last[event.subject] = (life, value)
    return increases
