"""The periodic `stats` event of every role: how busy it was, its counters and its memory.

Woken by its own timer; ends when `stop` is set, after one last event.
"""

from __future__ import annotations

import asyncio
import os

import psutil

from dartrl.errors import DartrlError
from dartrl.interfaces import Clock, Ledger
from dartrl.launch.system_clock import wait_for_event
from dartrl.metrics import Meter
from dartrl.records import Event

STATS_SECONDS = 5.0
"""Time between two `stats` events of one role."""


async def report_stats(
    ledger: Ledger, meter: Meter, *, subject: str, clock: Clock, stop: asyncio.Event, with_children: bool = True
) -> None:
    """Record a `stats` event every few seconds until `stop` is set, then a last one.

    with_children: memory counts the descendants as well; off for a process whose children report for themselves.
    A ledger that is briefly unreachable costs readings, never the role.
    """
    started = clock.now()
    stopping = False
    while not stopping:
        stopping = await wait_for_event(stop, STATS_SECONDS)
        event = Event("stats", subject, stats_data(meter, wall_seconds=clock.now() - started, with_children=with_children))
        try:
            await clock.run_blocking(ledger.record_event, event)
        except (DartrlError, OSError):
            continue


def stats_data(meter: Meter, *, wall_seconds: float, with_children: bool = True) -> dict[str, float]:
    """The body of a `stats` event: all readings, pid, wall and processor seconds since the start, rss_mib of the processes."""
    return {
        **meter.readings(),
        "pid": os.getpid(),
        "wall_seconds": wall_seconds,
        "cpu_seconds": cpu_seconds(),
        "rss_mib": rss_mib(with_children=with_children),
    }


def cpu_seconds() -> float:
    """Processor time of this process, all threads, without its children."""
    times = psutil.Process().cpu_times()
    return times.user + times.system


def rss_mib(*, with_children: bool) -> float:
    """Resident memory in MiB of this process, with all its descendants if asked for; shared pages count each time."""
    total = 0
    root = psutil.Process()
    members = [root, *root.children(recursive=True)] if with_children else [root]
    for member in members:
        try:
            total += member.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / 2**20
