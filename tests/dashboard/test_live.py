"""The live view: right figures, one line for logs, ends with the run."""

from __future__ import annotations

import asyncio
import io

import pytest
from rich.console import Console
from tests.dashboard.test_report import episode, readings, result, stage, stats

from dartrl.dashboard.live import LINE_SECONDS, draw, live_figures, one_line, recent_success, show
from dartrl.dashboard.readings import RunReadings
from dartrl.records import TrainingStep
from dartrl.simulate.virtual_time import START, VirtualClock, run_virtual

NOW = 100.0


def busy_run() -> RunReadings:
    return readings(
        phase="training",
        events=[
            stage(10.0, "training", "started"),
            stats(35.0, "runner-0", pid=1, wall_seconds=35, busy_seconds=30, **{"envs/actions": 400}),
            stats(38.0, "engine-0", pid=2, wall_seconds=30, **{"engine/busy_seconds": 10}),
            stage(90.0, "training", "clock", seconds=80.0),
            stats(95.0, "runner-0", pid=1, wall_seconds=95, busy_seconds=75, **{"envs/actions": 1900}),
            stats(98.0, "engine-0", pid=2, wall_seconds=90, **{"engine/busy_seconds": 58}),
        ],
        episodes=[episode(50.0), episode(90.0, success=False), episode(95.0, family="b", success=None)],
        steps=[TrainingStep(1, "c", {"staleness_max": 2.0})],
        counts={"groups_ready": 3, "groups_open": 7},
        evaluations={"before-sampled": result(a=(3, 10), b=(0, 10))},
    )


def test_rates_are_those_of_the_last_minute():
    figures = live_figures(busy_run(), NOW)
    assert figures.busy == pytest.approx({"runner": 45 / 60, "engine": 48 / 60})
    assert figures.actions_per_minute == pytest.approx(1500)
    assert (figures.staleness, figures.groups_ready, figures.groups_open, figures.training_steps) == (2.0, 3, 7, 1)


def test_only_the_familys_own_scored_training_episodes_count():
    assert recent_success(busy_run().episodes, "a") == 0.5
    assert recent_success(busy_run().episodes, "b") is None


def test_the_view_shows_every_family_and_module():
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(draw(busy_run(), NOW))
    text = console.export_text()
    for word in ("training", "1.3/15 min", "0.30", "0.50", "groups ready", "staleness", "runner busy", "engine busy"):
        assert word in text


def test_a_log_gets_one_line_at_a_time_and_the_last_one_after_the_stop():
    clock = VirtualClock()
    output = io.StringIO()
    firsts: list[float] = []

    async def note_first() -> None:
        firsts.append(clock.now() - START)

    async def main() -> None:
        stop = asyncio.Event()
        console = Console(file=output, width=200)
        showing = asyncio.ensure_future(show(busy_run, console=console, clock=clock, stop=stop, on_first=note_first))
        await clock.sleep(2.5 * LINE_SECONDS)
        stop.set()
        await showing

    run_virtual(main())
    lines = output.getvalue().splitlines()
    assert len(lines) == 4
    assert all("actions/min" in line for line in lines)
    assert firsts == [0.0]


def test_an_unstarted_run_has_a_view_as_well():
    assert "modules are loading" in one_line(readings(phase="starting"), NOW)
