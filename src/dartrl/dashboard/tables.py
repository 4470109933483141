"""Rich tables: checks, the live view's parts, the closing summary. Pure: data in, renderables out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text


def check_table(results: Sequence[tuple[str, bool, str, str]]) -> Table:
    """One row per check: (name, ok, what was found, remedy)."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, ok, detail, remedy in results:
        mark = Text("ok", style="green") if ok else Text("FAILED", style="bold red")
        table.add_row(Text(name), mark, Text(detail if ok else f"{detail}; {remedy}"))
    return table


def success_table(per_task: Mapping[str, Mapping[str, Any]]) -> Table:
    """Success per task: guess rate, before and after, sampled and greedy."""
    table = Table(title="Held-out success", title_justify="left", box=None, pad_edge=False)
    table.add_column("task")
    columns = ("guess_rate", "success_before", "success_after", "greedy_before", "greedy_after")
    for heading in ("guess", "sampled before", "after", "greedy before", "after"):
        table.add_column(heading, justify="right")
    for family, figures in per_task.items():
        table.add_row(Text(family), *(share_text(figures.get(column)) for column in columns))
    return table


def summary_table(report: Mapping[str, Any], names: Sequence[str]) -> Table:
    """Named figures of a report, one a row."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name in names:
        value = report.get(name)
        text = "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
        table.add_row(Text(name.replace("_", " ")), Text(text))
    return table


def share_text(value: float | None) -> Text:
    """A share in [0, 1] with two digits, or a dash."""
    return Text("-" if value is None else f"{value:.2f}")
