"""The live view of a run in the terminal: what it does, how well, how fast, and who is busy.

`show` reads the ledger every second in a thread and draws; on a pipe or in a log file it writes one line every ten seconds.
It ends with `stop`, after a last look.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dartrl.dashboard import usage
from dartrl.dashboard.readings import RunReadings, training_seconds, training_windows
from dartrl.dashboard.report import EVALUATIONS, family_rates
from dartrl.dashboard.tables import share_text
from dartrl.interfaces import Clock
from dartrl.records import EpisodeSummary

DRAW_SECONDS = 1.0
"""Pause between two looks at the ledger in a terminal."""
LINE_SECONDS = 10.0
"""Pause between two lines outside a terminal."""
RECENT_SECONDS = 60.0
"""What `now` means in rates and busy shares."""
RECENT_EPISODES = 100
"""Training episodes per family in the column `now`."""


@dataclass(frozen=True, slots=True)
class LiveFigures:
    """What the view shows beside the success table."""

    actions_per_minute: float
    """Over the last minute."""
    episodes_per_minute: float
    """Over the last minute, evaluation included."""
    busy: dict[str, float]
    """Role -> busy share in [0, 1] over the last minute; roles without a reading are absent."""
    staleness: float | None
    """Largest age in versions of the last training step's rows."""
    groups_ready: int
    """Closed groups that wait for the trainer."""
    groups_open: int
    """Groups that episodes still fill."""
    training_steps: int
    """Acknowledged steps."""
    restarts: int
    """Processes that died and were started again."""


def live_figures(readings: RunReadings, now: float) -> LiveFigures:
    """The figures of a moment; `now` in ledger seconds. Pure."""
    stats = readings.of_kind("stats")
    window = [(now - RECENT_SECONDS, now)]
    shares = {role: usage.busy_share(stats, role, window) for role in usage.BUSY}
    walls = usage.total(stats, "runner", "wall_seconds", window)
    minutes = max(walls / max(1, readings.config.environment.runners), 1.0) / 60
    recent = sum(now - RECENT_SECONDS <= episode.finished_at for episode in readings.episodes)
    age = max(now - next((event.at for event in readings.events), now), 1.0)
    last = readings.steps[-1].metrics if readings.steps else {}
    return LiveFigures(
        actions_per_minute=usage.total(stats, "runner", "envs/actions", window) / minutes,
        episodes_per_minute=recent / min(RECENT_SECONDS, age) * 60,
        busy={role: share for role, share in shares.items() if share is not None},
        staleness=last.get("staleness_max"),
        groups_ready=readings.counts.get("groups_ready", 0),
        groups_open=readings.counts.get("groups_open", 0),
        training_steps=len(readings.steps),
        restarts=len(readings.of_kind("restart")),
    )


def recent_success(episodes: Sequence[EpisodeSummary], family: str) -> float | None:
    """Success rate of the family's last training episodes; None without any."""
    own = [episode.success for episode in episodes if episode.family == family and episode.purpose == "train"]
    scored = [bool(success) for success in own if success is not None][-RECENT_EPISODES:]
    return statistics.fmean(scored) if scored else None


def draw(readings: RunReadings, now: float) -> RenderableType:
    """The whole view. Pure."""
    figures = live_figures(readings, now)
    return Group(_header(readings), Text(), _success(readings), Text(), _rates(figures), Text(), _busy(figures))


def one_line(readings: RunReadings, now: float) -> str:
    """The view in one line, for logs."""
    figures = live_figures(readings, now)
    rates = [rate for family in readings.config.tasks.families if (rate := recent_success(readings.episodes, family)) is not None]
    success = f"{statistics.fmean(rates):.2f}" if rates else "-"
    busy = " ".join(f"{role}={share:.0%}" for role, share in figures.busy.items())
    return (
        f"{readings.phase} {_progress(readings)} success={success} steps={figures.training_steps} "
        f"episodes={len(readings.episodes)} actions/min={figures.actions_per_minute:.0f} ready={figures.groups_ready} busy: {busy}"
    )


async def show(
    read: Callable[[], RunReadings],
    *,
    console: Console,
    clock: Clock,
    stop: asyncio.Event,
    on_first: Callable[[], Awaitable[None]],
) -> None:
    """Draw until `stop` is set. `on_first` is awaited once, when the first view is on the screen."""
    terminal = console.is_terminal
    with Live(console=console, auto_refresh=False, transient=False) if terminal else _Plain(console) as screen:
        first = True
        while True:
            ending = stop.is_set()
            readings = await clock.run_blocking(read)
            if terminal and isinstance(screen, Live):
                screen.update(draw(readings, clock.now()), refresh=True)
            else:
                console.out(one_line(readings, clock.now()), highlight=False)
            if first:
                await on_first()
                first = False
            if ending:
                return
            await _pause(clock, stop, DRAW_SECONDS if terminal else LINE_SECONDS)


class _Plain:
    """Stands for Live where there is no terminal."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def __enter__(self) -> _Plain:
        return self

    def __exit__(self, *_: object) -> None:
        self.console.file.flush()


async def _pause(clock: Clock, stop: asyncio.Event, seconds: float) -> None:
    try:
        async with clock.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return


def _header(readings: RunReadings) -> Text:
    line = Text()
    line.append(readings.run_id, style="bold")
    line.append(f"  {readings.phase}  {_progress(readings)}", style="cyan")
    return line


def _progress(readings: RunReadings) -> str:
    if readings.phase == "evaluating":
        when = "after" if training_windows(readings.events) else "before"
        results = [result for id, result in readings.evaluations.items() if id.startswith(when)]
        return f"{when} {sum(result.finished for result in results)}/{sum(result.total for result in results)}"
    spent = training_seconds(readings.events) / 60
    if not spent and readings.phase != "training":
        return "modules are loading"
    return f"{spent:.1f}/{readings.config.training.max_minutes:g} min"


def _success(readings: RunReadings) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("success per task")
    for heading in ("guess", "sampled before", "training now", "sampled after", "greedy before", "greedy after"):
        table.add_column(heading, justify="right")
    rates = {figure: family_rates(readings.evaluations.get(evaluation)) for figure, evaluation in EVALUATIONS.items()}
    for family in readings.config.tasks.families:
        table.add_row(
            Text(family),
            share_text(readings.guess_rates.get(family)),
            share_text(rates["success_before"].get(family)),
            share_text(recent_success(readings.episodes, family)),
            share_text(rates["success_after"].get(family)),
            share_text(rates["greedy_before"].get(family)),
            share_text(rates["greedy_after"].get(family)),
        )
    return table


def _rates(figures: LiveFigures) -> Table:
    table = Table(box=None, pad_edge=False)
    staleness = "-" if figures.staleness is None else f"{figures.staleness:.0f}"
    cells = {
        "actions/min": f"{figures.actions_per_minute:.0f}",
        "episodes/min": f"{figures.episodes_per_minute:.0f}",
        "training steps": str(figures.training_steps),
        "staleness": staleness,
        "groups ready": str(figures.groups_ready),
        "groups open": str(figures.groups_open),
        "restarts": str(figures.restarts),
    }
    for heading in cells:
        table.add_column(heading, justify="right")
    table.add_row(*cells.values())
    return table


def _busy(figures: LiveFigures) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(width=30)
    table.add_column(justify="right")
    for role, share in figures.busy.items():
        table.add_row(Text(f"{role} busy"), ProgressBar(total=1.0, completed=share, width=30), Text(f"{share:.0%}"))
    return table
