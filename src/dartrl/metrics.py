"""Busy time, counters and process memory of one role, as plain numbers.

A role owns one Meter and sends its readings to the ledger as `stats` events; the dashboard adds them up.
Metric keys carry module and unit: `envs/reset_seconds`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator
from contextlib import contextmanager


class Meter:
    """Sums, counts and recent values by name; not thread-safe, one owner."""

    def __init__(self, now: Callable[[], float], *, window: int = 2048) -> None:
        self._now = now
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._recent: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=window))

    def add(self, name: str, amount: float = 1.0) -> None:
        """Add to a running sum."""
        self._sums[name] += amount

    def observe(self, name: str, value: float) -> None:
        """Record one value: kept for percentiles, summed and counted."""
        self._recent[name].append(value)
        self._sums[name + "_sum"] += value
        self._sums[name + "_count"] += 1

    @contextmanager
    def busy(self, name: str) -> Generator[None]:
        """Add the time spent inside to the sum `name` (seconds)."""
        started = self._now()
        try:
            yield
        finally:
            self._sums[name] += self._now() - started

    def percentile(self, name: str, share: float) -> float:
        """Nearest-rank percentile of the recent values, share in [0, 1]; 0 without values."""
        values = sorted(self._recent.get(name, ()))
        return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0

    def readings(self) -> dict[str, float]:
        """All sums so far, with p50, p95 and max of the observed names."""
        result = dict(self._sums)
        for name, values in self._recent.items():
            if values:
                result[name + "_p50"] = self.percentile(name, 0.5)
                result[name + "_p95"] = self.percentile(name, 0.95)
                result[name + "_max"] = max(values)
        return result
