"""The report as one self-contained HTML page: figures, learning curves, and one task's trajectories before and after.

Everything that a page, a task or the policy wrote is escaped; screenshots are embedded as PNG. Pure.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from dartrl.dashboard.charts import curve_grid, curves_of
from dartrl.types import Action, Step, Trajectory

HEADLINES = (
    "success_before", "success_after", "greedy_before", "greedy_after", "episodes", "actions_per_minute", "training_steps",
    "minutes_training", "weight_syncs", "max_staleness", "staleness_limit", "longest_inference_gap_seconds", "reply_seconds_p95",
    "logprob_gap_p99_at_lag_0", "effective_sample_size", "requests_failed", "env_utilisation", "engine_utilisation",
    "trainer_utilisation", "peak_rss_mib", "disk_mib", "restarts", "audit_ok",
)  # fmt: skip
"""Figures shown on top, in order; all others are in report.json."""

MOST_STEPS = 12
"""Steps of a trajectory that are shown."""

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1f2430;max-width:1000px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}
table{border-collapse:collapse}td,th{padding:.2rem .8rem .2rem 0;text-align:right;border-bottom:1px solid #e4e7ec}
td:first-child,th:first-child{text-align:left}
.figures{columns:2;column-gap:3rem}.figures div{display:flex;justify-content:space-between;border-bottom:1px solid #e4e7ec}
.steps{display:flex;flex-wrap:wrap;gap:1rem}.step{width:190px;font-size:12px;overflow-wrap:anywhere}
.step svg{width:100%;height:auto;border:1px solid #d0d5dd;background:#fff}
.ok{color:#15803d}.bad{color:#b91c1c}code{font-size:11px}
"""


@dataclass(frozen=True, slots=True)
class Shown:
    """A trajectory with the images it needs."""

    title: str
    """Such as `Before training`."""
    trajectory: Trajectory
    """What happened."""
    screenshots: Mapping[str, bytes]
    """PNG bytes by content hash; a missing one is left out."""


def render_report(
    report: Mapping[str, Any], learned: Mapping[str, Sequence[tuple[float, float, int]]], shown: Sequence[Shown]
) -> str:
    """The page. `report` is report.json, `learned` the points of `report.learning_curve`."""
    curves = curve_grid(curves_of(learned, report["per_task"]), minutes=report["minutes_training"])
    parts = [
        f"<h1>Run {escape(str(report['run']))}</h1>",
        f'<div class="figures">{"".join(_figure(name, report.get(name)) for name in HEADLINES)}</div>',
        "<h2>Learning curve per task</h2>",
        f'<div style="overflow-x:auto">{curves}</div>',
        "<h2>Held-out success per task</h2>",
        _per_task(report["per_task"]),
        *(_trajectory(one) for one in shown),
        "<h2>Versions</h2>",
        f"<p>{escape(', '.join(f'{name} {version}' for name, version in report.get('versions', {}).items()))}</p>",
    ]
    title = escape(f"dartrl {report['run']}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style></head>'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _figure(name: str, value: Any) -> str:
    return f"<div><span>{escape(name.replace('_', ' '))}</span><b>{escape(_number(value))}</b></div>"


def _number(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _per_task(per_task: Mapping[str, Mapping[str, Any]]) -> str:
    columns = ("guess_rate", "success_before", "success_after", "greedy_before", "greedy_after", "training_episodes")
    head = "".join(f"<th>{escape(column.replace('_', ' '))}</th>" for column in columns)
    rows = "".join(
        f"<tr><td>{escape(family)}</td>{''.join(f'<td>{escape(_number(figures.get(column)))}</td>' for column in columns)}</tr>"
        for family, figures in per_task.items()
    )
    return f"<table><tr><th>task</th>{head}</tr>{rows}</table>"


def _trajectory(shown: Shown) -> str:
    trajectory = shown.trajectory
    outcome = trajectory.outcome
    kind, word = ("ok", "success") if outcome.success else ("bad", "no success")
    steps = "".join(_step(step, shown.screenshots) for step in trajectory.steps[:MOST_STEPS])
    return (
        f"<h2>{escape(shown.title)}: {escape(trajectory.task.id)}</h2><p>{escape(trajectory.instruction)}<br>"
        f'<b class="{kind}">{word}</b> ({escape(outcome.end)}: {escape(outcome.reason)}, score {_number(outcome.score)})</p>'
        f'<div class="steps">{steps}</div>'
    )


def _step(step: Step, screenshots: Mapping[str, bytes]) -> str:
    image = screenshots.get(step.screenshot or "")
    picture = _picture(step, image) if image else f"<pre>{escape(step.observation_text)}</pre>"
    problem = f'<br><span class="bad">{escape(step.parse_error.message)}</span>' if step.parse_error else ""
    reply = f"{step.index + 1}. <code>{escape(step.generation.text)}</code>{problem}<br>weights {step.generation.weights_version}"
    return f'<div class="step">{picture}{reply}</div>'


def _picture(step: Step, image: bytes) -> str:
    width, height = step.screen
    data = base64.b64encode(image).decode("ascii")
    marks = "".join(_mark(action) for action in step.actions)
    shown = f'<image href="data:image/png;base64,{data}" width="{width}" height="{height}"/>'
    return f'<svg viewBox="0 0 {width} {height}" role="img">{shown}{marks}</svg>'


def _mark(action: Action) -> str:
    if action.x is None or action.y is None:
        return ""
    point = f'<circle cx="{action.x:.1f}" cy="{action.y:.1f}" r="6" fill="none" stroke="#c2410c" stroke-width="2"/>'
    if action.to_x is None or action.to_y is None:
        return point
    ends = f'x1="{action.x:.1f}" y1="{action.y:.1f}" x2="{action.to_x:.1f}" y2="{action.to_y:.1f}"'
    return f'{point}<line {ends} stroke="#c2410c" stroke-width="2"/>'
