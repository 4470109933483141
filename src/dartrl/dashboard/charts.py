"""Learning curves as self-contained SVG: one small chart per task family, without scripts or external files. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 230, 150
"""Size of one chart in pixels."""
LEFT, RIGHT, TOP, BOTTOM = 30, 10, 26, 24
"""Margins around the plotted area in pixels."""
INK, MUTED, LINE, AFTER = "#1f2430", "#8a91a0", "#2f6fdb", "#c2410c"


@dataclass(frozen=True, slots=True)
class Curve:
    """Success of one family over a run."""

    family: str
    """Title of the chart."""
    points: Sequence[tuple[float, float]]
    """(minutes of training, success rate in training)."""
    before: float | None = None
    """Held-out sampled success before training."""
    after: float | None = None
    """Held-out sampled success after training."""
    guess: float | None = None
    """Success rate of a random element of the right kind."""


def curve_grid(curves: Sequence[Curve], *, minutes: float, columns: int = 4) -> str:
    """One SVG with a chart per curve on a common time axis of `minutes`."""
    rows = -(-max(len(curves), 1) // columns)
    across = min(columns, max(len(curves), 1))
    cells = [
        f'<g transform="translate({index % columns * WIDTH},{index // columns * HEIGHT})">{_chart(curve, max(minutes, 1e-9))}</g>'
        for index, curve in enumerate(curves)
    ]
    width, height = across * WIDTH, rows * HEIGHT + 22
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="10" role="img" aria-label="Success per task over minutes of training">'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>{"".join(cells)}{_legend(rows * HEIGHT + 12)}</svg>'
    )


def _chart(curve: Curve, minutes: float) -> str:
    parts = [f'<text x="{LEFT}" y="16" fill="{INK}" font-size="12" font-weight="600">{escape(curve.family)}</text>']
    parts += [_level(value) for value in (0.0, 0.5, 1.0)]
    right = WIDTH - RIGHT
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 8}" fill="{MUTED}">0</text>')
    parts.append(f'<text x="{right}" y="{HEIGHT - 8}" fill="{MUTED}" text-anchor="end">{minutes:.0f} min</text>')
    if curve.guess is not None:
        y = _y(curve.guess)
        parts.append(f'<line x1="{LEFT}" y1="{y}" x2="{right}" y2="{y}" stroke="{MUTED}" stroke-dasharray="3 3"/>')
    if curve.points:
        path = " ".join(f"{_x(minute, minutes)},{_y(rate)}" for minute, rate in curve.points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{LINE}" stroke-width="1.6" stroke-linejoin="round"/>')
    for value, x in ((curve.before, LEFT), (curve.after, right)):
        if value is not None:
            parts.append(f'<circle cx="{x}" cy="{_y(value)}" r="4" fill="{AFTER}"/>')
    return "".join(parts)


def _level(value: float) -> str:
    y = _y(value)
    line = f'<line x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}" stroke="#e4e7ec"/>'
    return line + f'<text x="{LEFT - 5}" y="{y + 3}" fill="{MUTED}" text-anchor="end">{value:g}</text>'


def _legend(y: int) -> str:
    return (
        f'<g fill="{INK}"><polyline points="30,{y - 3} 52,{y - 3}" stroke="{LINE}" stroke-width="1.6"/>'
        f'<text x="57" y="{y}">training episodes</text><circle cx="158" cy="{y - 3}" r="4" fill="{AFTER}"/>'
        f'<text x="167" y="{y}">held out, before and after</text>'
        f'<line x1="310" y1="{y - 3}" x2="332" y2="{y - 3}" stroke="{MUTED}" stroke-dasharray="3 3"/>'
        f'<text x="337" y="{y}">guessing</text></g>'
    )


def _x(minute: float, minutes: float) -> float:
    return round(LEFT + min(max(minute / minutes, 0.0), 1.0) * (WIDTH - LEFT - RIGHT), 1)


def _y(rate: float) -> float:
    return round(TOP + (1.0 - min(max(rate, 0.0), 1.0)) * (HEIGHT - TOP - BOTTOM), 1)


def curves_of(
    learned: Mapping[str, Sequence[tuple[float, float, int]]], per_task: Mapping[str, Mapping[str, float | None]]
) -> list[Curve]:
    """A curve per family of the report's `per_task`, with the points of `report.learning_curve`."""
    return [
        Curve(
            family,
            [(minute, rate) for minute, rate, _ in learned.get(family, ())],
            before=figures.get("success_before"),
            after=figures.get("success_after"),
            guess=figures.get("guess_rate"),
        )
        for family, figures in per_task.items()
    ]
