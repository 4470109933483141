"""A whole run on this machine: every role as a supervised child process, the conductor and the live view in this one.

Ctrl-C (or SIGTERM) ends everything within seconds and leaves the run ready to go on; a second one kills at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import os
import platform
import signal
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from dartrl.config import RunConfig
from dartrl.dashboard.live import show
from dartrl.data.blobs import FileBlobStore
from dartrl.data.manager import DataManager, open_ledger
from dartrl.launch import plugins
from dartrl.launch.conductor import Conductor
from dartrl.launch.ports import choose_ports, with_ports
from dartrl.launch.readings import RunReader
from dartrl.launch.reporting import write_report
from dartrl.launch.role_stats import report_stats
from dartrl.launch.run_folder import RunFolder, write_ports
from dartrl.launch.supervisor import Restart, RoleSpec, Supervisor
from dartrl.launch.system_clock import SystemClock
from dartrl.metrics import Meter
from dartrl.records import Event, Run
from dartrl.types import Task

PACKAGES = ("dartrl", "torch", "transformers", "miniwob")
"""Packages whose versions are stored with the run."""


@dataclass(slots=True)
class LocalRun:
    """One run and what belongs to it in this process."""

    folder: RunFolder
    """Where it lies."""
    config: RunConfig
    """With the ports chosen."""
    clock: SystemClock
    """Real time."""
    ledger: DataManager
    """Bound to the run."""
    blobs: FileBlobStore
    """Screenshots and arrays."""
    interrupted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by Ctrl-C."""
    roles_stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the roles are to end."""


async def run_locally(folder: RunFolder, console: Console) -> dict[str, Any] | None:
    """Start the run, or go on with it; its report, or None if it was interrupted.

    Raises ConfigError for a taken port or an unusable database, and a group with RoleFailed if a role cannot be kept running.
    """
    run = open_run(folder)
    supervisor = Supervisor(folder, run.clock, _restart_recorder(run))
    _handle_signals(run, supervisor)
    await _record(run, Event("session", folder.run_id, {"pid": os.getpid()}))
    finished = await _work(run, supervisor, console)
    if not finished:
        return None
    return await run.clock.run_blocking(write_report, folder, run.config, run.ledger, run.blobs)


def open_run(folder: RunFolder) -> LocalRun:
    """The run of a folder with its ports chosen and its ledger open."""
    config = folder.config()
    ports = choose_ports(config)
    write_ports(folder, ports)
    clock = SystemClock()
    blobs = FileBlobStore(folder.blobs)
    ledger = open_ledger(folder.ledger_url(config), blobs=blobs, config=config, run_id=folder.run_id, now=clock.now)
    ledger.open_run(Run(folder.run_id, config.seed, public_config(config), versions(config)), all_tasks(config))
    return LocalRun(folder, with_ports(config, ports), clock, ledger, blobs)


def role_specs(config: RunConfig) -> list[RoleSpec]:
    """The processes of a run."""
    single = [RoleSpec("manager"), RoleSpec("trainer"), RoleSpec("router")]
    engines = [RoleSpec("engine", index) for index in range(config.rollout.workers)]
    runners = [RoleSpec("runner", index) for index in range(config.environment.runners)]
    return [*single, *engines, *runners]


def all_tasks(config: RunConfig) -> list[Task]:
    """Training and held-out instances of the run. Raises ConfigError for an unknown set or family."""
    task_set = plugins.create_task_set(config.tasks.set)
    train = task_set.tasks(config.tasks.families, "train", config.tasks.train_instances)
    return [*train, *task_set.tasks(config.tasks.families, "evaluation", config.tasks.evaluation_instances)]


def public_config(config: RunConfig) -> dict[str, Any]:
    """The configuration as JSON, without the password of a database URL."""
    tree = config.model_dump(mode="json")
    scheme, separator, rest = config.data.database.partition("://")
    credentials, at, place = rest.rpartition("@")
    if separator and at:
        tree["data"]["database"] = f"{scheme}://{credentials.partition(':')[0]}:***@{place}"
    return tree


def versions(config: RunConfig) -> dict[str, str]:
    """Versions of Python, the packages, the code and the initial policy."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found["commit"] = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        found["commit"] = "unknown"
    weights = config.policy.path / "model.safetensors"
    if weights.is_file():
        with weights.open("rb") as file:
            found["policy"] = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    return found


async def _work(run: LocalRun, supervisor: Supervisor, console: Console) -> bool:
    """True if the run reached its end, False if it was interrupted; all roles have ended when this returns."""
    view_stop = asyncio.Event()
    reader = RunReader(run.ledger, run.config, run.folder.run_id)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(supervisor.run(role_specs(run.config), run.roles_stop), name="supervisor")
        stats = report_stats(
            run.ledger, Meter(run.clock.now), subject="conductor-0", clock=run.clock, stop=run.roles_stop, with_children=False
        )
        tasks.create_task(stats, name="stats")
        view = show(reader.read, console=console, clock=run.clock, stop=view_stop, on_first=_first_view_recorder(run))
        view_task = tasks.create_task(view, name="view")
        try:
            finished = await Conductor(run.ledger, run.config, run.clock, stop=run.interrupted).run()
            view_stop.set()
            await view_task
        finally:
            run.roles_stop.set()
    return finished


def _handle_signals(run: LocalRun, supervisor: Supervisor) -> None:
    def interrupt() -> None:
        if run.interrupted.is_set():
            supervisor.kill()
        run.interrupted.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)


def _restart_recorder(run: LocalRun) -> Callable[[Restart], Awaitable[None]]:
    async def record(restart: Restart) -> None:
        data = {"exit_status": restart.exit_status, "failures": restart.failures, "uptime_seconds": restart.uptime_seconds}
        await _record(run, Event("restart", restart.subject, {**data, "delay_seconds": restart.delay_seconds}))

    return record


def _first_view_recorder(run: LocalRun) -> Callable[[], Awaitable[None]]:
    async def record() -> None:
        since_start = run.clock.now() - psutil.Process().create_time()
        await _record(run, Event("view", run.folder.run_id, {"seconds": since_start}))

    return record


async def _record(run: LocalRun, event: Event) -> None:
    await run.clock.run_blocking(run.ledger.record_event, event)
