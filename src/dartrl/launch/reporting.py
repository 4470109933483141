"""Writes report.json and report.html of a run, each at once or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from dartrl.config import RunConfig
from dartrl.dashboard.readings import RunReadings, training_windows
from dartrl.dashboard.report import compute_report, learning_curve
from dartrl.dashboard.report_html import MOST_STEPS, Shown, render_report
from dartrl.data.audit import audit
from dartrl.data.manager import DataManager
from dartrl.errors import BlobCorrupt
from dartrl.interfaces import BlobStore, Ledger
from dartrl.launch.readings import RunReader, folder_mib
from dartrl.launch.run_folder import RunFolder, write_atomically
from dartrl.types import Trajectory

CURVE_BINS = 20
"""Points of a learning curve."""


def write_report(folder: RunFolder, config: RunConfig, ledger: DataManager, blobs: BlobStore) -> dict[str, Any]:
    """The report's figures, after both files are written. Blocking."""
    verdict = audit(ledger)
    versions = {**ledger.run().versions, **environment_versions(ledger)}
    reader = RunReader(ledger, config, folder.run_id)
    readings = reader.read(audit_ok=verdict.ok, disk_mib=folder_mib(folder.path), versions=versions)
    report = compute_report(readings)
    write_atomically(folder.path / "report.json", orjson.dumps(report, option=orjson.OPT_INDENT_2))
    page = render_report(report, curve_points(readings), shown_trajectories(ledger, blobs, report["per_task"]))
    write_atomically(folder.path / "report.html", page.encode())
    return report


def curve_points(readings: RunReadings) -> Mapping[str, list[tuple[float, float, int]]]:
    """The learning curve over the time in which the run trained."""
    windows = training_windows(readings.events)
    if not windows:
        return {}
    return learning_curve(readings.episodes, start=windows[0][0], end=windows[-1][1], bins=CURVE_BINS)


def environment_versions(ledger: Ledger) -> dict[str, str]:
    """Renderer, font and page versions of the newest episode."""
    for purpose in ("train", "evaluation"):
        for trajectory in ledger.trajectories(purpose=purpose, limit=1):
            return dict(trajectory.environment)
    return {}


def shown_trajectories(ledger: Ledger, blobs: BlobStore, per_task: Mapping[str, Mapping[str, Any]]) -> list[Shown]:
    """One instance of the family that gained most, attempted before and after training, with its screenshots."""
    family = most_improved(per_task)
    if family is None:
        return []
    for temperature in ("greedy", "sampled"):
        before = ledger.trajectories(purpose=f"before-{temperature}", family=family)
        after = ledger.trajectories(purpose=f"after-{temperature}", family=family)
        pair = choose_pair(before, after)
        if pair is not None:
            titles = (f"Before training ({temperature})", f"After training ({temperature})")
            return [Shown(title, one, screenshots(one, blobs)) for title, one in zip(titles, pair, strict=True)]
    return []


def most_improved(per_task: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The family whose held-out success rose most, sampled and greedy together; None without both evaluations."""
    gains: dict[str, float] = {}
    for family, figures in per_task.items():
        pairs = [(figures[f"{kind}_before"], figures[f"{kind}_after"]) for kind in ("success", "greedy")]
        known = [after - before for before, after in pairs if before is not None and after is not None]
        if known:
            gains[family] = sum(known)
    return max(gains, key=lambda family: gains[family], default=None)


def choose_pair(before: Sequence[Trajectory], after: Sequence[Trajectory]) -> tuple[Trajectory, Trajectory] | None:
    """Two attempts at one instance, if possible a failure that became a success of several steps; None without one in common."""
    later = {trajectory.task.id: trajectory for trajectory in after}
    pairs = [(trajectory, later[trajectory.task.id]) for trajectory in before if trajectory.task.id in later]

    def merit(pair: tuple[Trajectory, Trajectory]) -> tuple[bool, bool, int]:
        return not pair[0].outcome.success, bool(pair[1].outcome.success), len(pair[1].steps)

    return max(pairs, key=merit, default=None)


def screenshots(trajectory: Trajectory, blobs: BlobStore) -> dict[str, bytes]:
    """PNG bytes of the steps that are shown; damaged ones are left out."""
    images: dict[str, bytes] = {}
    for step in trajectory.steps[:MOST_STEPS]:
        if step.screenshot is None:
            continue
        try:
            images[step.screenshot] = blobs.get(step.screenshot)
        except BlobCorrupt:
            continue
    return images
