"""Builds and runs one role of a run, as a process of its own.

Each role gets its parts from the run's folder and its configuration alone: ledger, blobs, clock, meter. What a role is
made of is imported inside its own function, so that a runner never loads torch. SIGTERM and SIGINT set `stop`; the role
then finishes what it holds and returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from dartrl.config import RunConfig
from dartrl.data.blobs import FileBlobStore
from dartrl.data.manager import DataManager, open_ledger
from dartrl.launch import plugins
from dartrl.launch.failures import explain, is_expected, is_user_error
from dartrl.launch.ports import base_url, with_ports
from dartrl.launch.processes import die_with_parent, set_title
from dartrl.launch.role_stats import report_stats
from dartrl.launch.run_folder import RunFolder, read_ports
from dartrl.launch.supervisor import EXIT_USER_ERROR
from dartrl.launch.system_clock import SystemClock
from dartrl.metrics import Meter

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RoleContext:
    """What every role is built from."""

    folder: RunFolder
    """The run's folder."""
    config: RunConfig
    """Resolved configuration."""
    ports: dict[str, int]
    """Service -> port."""
    name: str
    """Subject of events and logs, such as `runner-0`."""
    holder: str
    """Name under which leases are held; differs between two lives of a role."""
    seat: str
    """Name under which the run's trainer or manager lease is held; equal in all lives under one supervisor, so that a
    restarted role takes over at once, with a larger token, instead of waiting for the lease of its dead self."""
    clock: SystemClock
    """Real time."""
    meter: Meter
    """Counters of this process."""
    blobs: FileBlobStore
    """Screenshots and arrays."""
    ledger: DataManager
    """The data manager, bound to the run."""
    stop: asyncio.Event
    """Set when the role is to end."""


def run_role(role: str, index: int, folder: RunFolder, *, supervisor_pid: int | None) -> int:
    """Run one role until it is told to stop; returns its exit status.

    supervisor_pid: the process with which this one dies; None for a role started by hand.
    """
    if supervisor_pid is not None:
        die_with_parent(supervisor_pid)
    name = f"{role}-{index}"
    set_title(f"dartrl {name}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", force=True)
    for chatty in ("httpx", "httpcore", "alembic", "uvicorn.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        asyncio.run(_run(role, name, folder, supervisor_pid or os.getpid()))
    except Exception as error:  # noqa: BLE001 - role supervision: the supervisor starts the role again
        return _give_up(folder, name, error)
    return 0


def _give_up(folder: RunFolder, name: str, error: Exception) -> int:
    reason = explain(error, folder=folder.path)
    if is_expected(error):
        log.error("role failed name=%s reason=%s", name, reason)
    else:
        log.error("role failed name=%s\n%s", name, "".join(traceback.format_exception(error)))
    with contextlib.suppress(OSError):
        folder.failure_file(name).write_text(reason, encoding="utf-8")
    return EXIT_USER_ERROR if is_user_error(error) else 1


async def _run(role: str, name: str, folder: RunFolder, owner_pid: int) -> None:
    context = build_context(name, folder, owner_pid=owner_pid)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, context.stop.set)
    log.info("role ready name=%s pid=%d", name, os.getpid())
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(
            report_stats(context.ledger, context.meter, subject=name, clock=context.clock, stop=context.stop), name="stats"
        )
        try:
            await ROLES[role](context)
        finally:
            context.stop.set()
    context.ledger.close()
    log.info("role ended name=%s", name)


def build_context(name: str, folder: RunFolder, *, owner_pid: int) -> RoleContext:
    """The parts shared by all roles. owner_pid: the supervisor, or this process itself.

    Raises ConfigError if the run's folder or database cannot be used."""
    ports = read_ports(folder)
    config = with_ports(folder.config(), ports)
    clock = SystemClock()
    blobs = FileBlobStore(folder.blobs)
    ledger = open_ledger(folder.ledger_url(config), blobs=blobs, config=config, run_id=folder.run_id, now=clock.now)
    return RoleContext(
        folder=folder,
        config=config,
        ports=ports,
        name=name,
        holder=f"{name}@{socket.gethostname()}:{os.getpid()}",
        seat=f"{name}@{socket.gethostname()}:{owner_pid}",
        clock=clock,
        meter=Meter(clock.now),
        blobs=blobs,
        ledger=ledger,
        stop=asyncio.Event(),
    )


async def _engine(context: RoleContext) -> None:
    from dartrl.rollout.embedded_engine import EmbeddedEngine
    from dartrl.rollout.server import create_worker_app
    from dartrl.rollout.serving import bind, serve

    engine = EmbeddedEngine(context.config, name=context.name, clock=context.clock, meter=context.meter)
    with contextlib.closing(bind(context.config.rollout.host, context.ports[context.name], "rollout.host")) as listener:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(engine.run(context.stop), name="engine")
            tasks.create_task(serve(create_worker_app(engine), listener, context.stop), name="http")


async def _router(context: RoleContext) -> None:
    from dartrl.rollout.router import RouterService

    host = context.config.rollout.host
    workers = [base_url(host, context.ports[f"engine-{index}"]) for index in range(context.config.rollout.workers)]
    service = RouterService(context.config, ledger=context.ledger, clock=context.clock, meter=context.meter, workers=workers)
    await service.run(context.stop)


async def _runner(context: RoleContext) -> None:
    from dartrl.rollout.client import HttpPolicyClient
    from dartrl.rollout.runner import Runner

    config = context.config
    url = base_url(config.rollout.host, context.ports["router"])
    client = HttpPolicyClient(url, timeout_seconds=config.rollout.request_timeout_seconds, clock=context.clock)
    runner = Runner(
        ledger=context.ledger,
        pool=plugins.create_pool(config, context.clock),
        client=client,
        dialect=plugins.create_dialect(config.agent),
        blobs=context.blobs,
        config=config,
        clock=context.clock,
        meter=context.meter,
        name=context.holder,
        reward=plugins.load_reward(config.environment.reward),
    )
    await runner.run(context.stop)


async def _trainer(context: RoleContext) -> None:
    from dartrl.data.curation import select_high_entropy_steps
    from dartrl.train.trainer import Trainer

    trainer = Trainer(
        ledger=context.ledger,
        blobs=context.blobs,
        config=context.config,
        run_dir=context.folder.path,
        clock=context.clock,
        meter=context.meter,
        holder=context.seat,
        select_steps=select_high_entropy_steps(context.config.curation.high_entropy_share),
    )
    await trainer.run(context.stop)


async def _manager(context: RoleContext) -> None:
    from dartrl.data.manager import run_manager

    await run_manager(context.ledger, clock=context.clock, holder=context.seat, stop=context.stop)


ROLES: dict[str, Callable[[RoleContext], Awaitable[None]]] = {
    "engine": _engine,
    "router": _router,
    "runner": _runner,
    "trainer": _trainer,
    "manager": _manager,
}
"""Role -> the coroutine function that runs it until `stop` is set."""
