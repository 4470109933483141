"""What the commands of the command line do, from a checked configuration to an exit status."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from dartrl.config import RunConfig
from dartrl.dashboard.report_html import HEADLINES
from dartrl.dashboard.tables import success_table, summary_table
from dartrl.data.audit import AuditReport, audit
from dartrl.data.blobs import FileBlobStore
from dartrl.data.manager import DataManager, open_ledger
from dartrl.errors import ConfigError, RoleFailed
from dartrl.launch.checks import failures, run_checks
from dartrl.launch.failures import explain, is_expected, is_user_error
from dartrl.launch.local import all_tasks, public_config, run_locally
from dartrl.launch.reporting import write_report
from dartrl.launch.run_folder import RunFolder, create_run_folder, find_run_folder
from dartrl.launch.system_clock import SystemClock
from dartrl.records import Run

INTERRUPTED = 130
"""Exit status after Ctrl-C, as a shell reports it."""


def start_run(config: RunConfig) -> int:
    """Check, then run a recipe from its beginning; the exit status. Raises ConfigError that lists every failed check."""
    problems = failures(run_checks(config))
    if problems:
        raise ConfigError(f"the run cannot start:\n{problems}")
    return _run(create_run_folder(config, stamp=SystemClock().stamp()))


def resume_run(run: str, runs_dir: Path) -> int:
    """Go on with a run that was interrupted or died; the exit status."""
    return _run(find_run_folder(run, runs_dir))


def without_training(config: RunConfig) -> RunConfig:
    """The recipe reduced to its first evaluation."""
    evaluation = config.evaluation.model_copy(update={"before": True, "after": False})
    training = config.training.model_copy(update={"max_minutes": 0.0})
    return config.model_copy(update={"name": f"{config.name[:58]}-eval", "evaluation": evaluation, "training": training})


def audit_run(run: str, runs_dir: Path) -> AuditReport:
    """The audit of a run's ledger."""
    folder = find_run_folder(run, runs_dir)
    return audit(_open(folder, folder.config()))


def write_report_of(run: str, runs_dir: Path) -> None:
    """Write the report of a run anew, whatever its phase, and print it."""
    folder = find_run_folder(run, runs_dir)
    config = folder.config()
    _print_report(Console(), folder, write_report(folder, config, _open(folder, config), FileBlobStore(folder.blobs)))


def _open(folder: RunFolder, config: RunConfig) -> DataManager:
    blobs = FileBlobStore(folder.blobs)
    now = SystemClock().now
    ledger = open_ledger(folder.ledger_url(config), blobs=blobs, config=config, run_id=folder.run_id, now=now)
    ledger.open_run(Run(folder.run_id, config.seed, public_config(config)), all_tasks(config))
    return ledger


def _run(folder: RunFolder) -> int:
    console = Console()
    _log_to(folder)
    console.print(f"run folder: {folder.path}", highlight=False, soft_wrap=True)
    try:
        report = asyncio.run(run_locally(folder, console))
    except Exception as error:  # noqa: BLE001 - top of the command line: one message instead of a traceback
        return _fail(error, folder)
    if report is None:
        console.print(f"interrupted; go on with: dartrl run --resume {folder.path}", highlight=False, soft_wrap=True)
        return INTERRUPTED
    _print_report(console, folder, report)
    return 0 if report["audit_ok"] else 1


def _fail(error: Exception, folder: RunFolder) -> int:
    message = explain(error, folder=folder.path)
    if is_user_error(error):
        raise ConfigError(message) from error
    if not is_expected(error):
        logging.getLogger(__name__).error("run failed", exc_info=error)
        message += f"; details in {folder.log_file('conductor-0')}"
    raise RoleFailed(f"{message}\nthe run can go on with: dartrl run --resume {folder.path}") from error


def _print_report(console: Console, folder: RunFolder, report: Mapping[str, Any]) -> None:
    console.print(success_table(report["per_task"]))
    console.print(summary_table(report, HEADLINES))
    console.print(f"report: {folder.path / 'report.html'}", highlight=False, soft_wrap=True)


def _log_to(folder: RunFolder) -> None:
    logging.basicConfig(
        filename=folder.log_file("conductor-0"),
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        force=True,
    )
