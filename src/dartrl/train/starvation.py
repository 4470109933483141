"""Notices that no groups arrive, and says why. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dartrl.records import Event

FIRST_SECONDS = 60.0
"""Time without a claim after which the trainer warns; doubles with each warning."""


class StarvationWatch:
    """Time since the last training step, and the next moment to warn."""

    def __init__(self, *, groups_per_step: int) -> None:
        self._wanted = groups_per_step
        self.since = 0.0
        self._wait = FIRST_SECONDS

    def reset(self, now: float) -> None:
        """A step was trained, or none is expected."""
        self.since = now
        self._wait = FIRST_SECONDS

    def is_due(self, now: float) -> bool:
        """True once after each doubling of the wait."""
        if now - self.since < self._wait:
            return False
        self._wait *= 2
        return True

    def explain(self, now: float, counts: Mapping[str, int], recent: Sequence[Event]) -> str:
        """One line: how long, what is missing and the likeliest cause.

        recent: breaker and alarm events since the last step; the newest one is named.
        """
        ready, opened = counts.get("groups_ready", 0), counts.get("groups_open", 0)
        running = counts.get("trajectories_running", 0)
        others = [event for event in recent if event.data.get("reason") != "starved"]
        if others:
            event = others[-1]
            cause = f"last {event.kind} by {event.subject}: {event.data.get('message') or dict(event.data)}"
        elif running == 0:
            cause = "no episode is running: look at the runners' logs, and whether policy workers have loaded weights"
        elif counts.get("groups_rejected", 0) > 0 and opened > 0:
            cause = "episodes run, but many groups are rejected: see group_rejected events (zero variance, too stale, too small)"
        else:
            cause = "episodes are running but slow to finish"
        return (
            f"no training step for {now - self.since:.0f} s: {ready} of {self._wanted} groups ready, {opened} open, "
            f"{running} episodes running; {cause}"
        )
