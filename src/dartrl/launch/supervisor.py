"""Keeps the roles of a run alive as child processes, and ends all of them together.

One task per role waits for its process (woken by its exit) or for `stop` (woken by whoever ends the run). A process that
dies is started again after a pause that doubles with each death in a row; one that cannot stay up ends the run with the
reason it left behind. Each role leads a session of its own, so that Ctrl-C reaches the supervisor alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from dartrl.errors import RoleFailed
from dartrl.interfaces import Clock
from dartrl.launch.processes import adopt_orphans, child_pids, end_orphans, kill_group
from dartrl.launch.run_folder import RunFolder
from dartrl.launch.system_clock import wait_for_event

log = logging.getLogger(__name__)

EXIT_USER_ERROR = 2
"""Exit status of a role that a restart cannot help."""


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """One role process."""

    role: str
    """engine, router, runner, trainer or manager."""
    index: int = 0
    """0-based number among the processes of this role."""

    @property
    def subject(self) -> str:
        """Name in events, logs and ports: `runner-0`."""
        return f"{self.role}-{self.index}"


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a dead role is started again, and when that is hopeless."""

    first_delay_seconds: float = 0.5
    """Pause after the first death; doubles with each further one in a row."""
    longest_delay_seconds: float = 15.0
    """Upper bound of the pause."""
    healthy_seconds: float = 60.0
    """A process that lived longer before a signal ended it starts the count anew."""
    proven_seconds: float = 600.0
    """The same for one that gave up by itself; long, because loading alone may take minutes on a busy machine."""
    most_failures: int = 5
    """Deaths in a row at which the run is given up."""

    def delay_seconds(self, failures: int) -> float:
        """Pause after so many deaths in a row (1 or more)."""
        return min(self.first_delay_seconds * 2 ** (failures - 1), self.longest_delay_seconds)

    def count_failures(self, failures: int, uptime_seconds: float, exit_status: int) -> int:
        """Deaths in a row, this one included, after a life of `uptime_seconds`; negative statuses are signals."""
        enough = self.healthy_seconds if exit_status < 0 else self.proven_seconds
        return 1 if uptime_seconds > enough else failures + 1


@dataclass(frozen=True, slots=True)
class Restart:
    """One death and what follows."""

    subject: str
    """The role process."""
    exit_status: int
    """Status of the dead process; minus the signal's number if it was killed."""
    failures: int
    """Deaths in a row."""
    delay_seconds: float
    """Pause before the next start."""
    uptime_seconds: float
    """How long it had lived."""


@dataclass(slots=True)
class Supervisor:
    """Runs role processes until told to stop; owns every process below this one."""

    folder: RunFolder
    """The run the roles work on."""
    clock: Clock
    """Real time."""
    on_restart: Callable[[Restart], Awaitable[None]]
    """Told about each death before the pause; records it in the ledger."""
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    """When to start again, when to give up."""
    grace_seconds: float = 6.0
    """Time between SIGTERM and SIGKILL at the end."""
    _processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict[str, asyncio.subprocess.Process])
    _foreign: set[int] = field(default_factory=set[int])

    async def run(self, specs: Sequence[RoleSpec], stop: asyncio.Event) -> None:
        """Keep the roles running until `stop` is set; leaves no process behind, however it ends.

        Raises RoleFailed (in an ExceptionGroup) for a role that cannot be kept running.
        """
        adopt_orphans()
        self._foreign = child_pids()
        try:
            async with asyncio.TaskGroup() as tasks:
                for spec in specs:
                    tasks.create_task(self._keep(spec, stop), name=spec.subject)
        finally:
            await self._end_everything()

    def pids(self) -> dict[str, int]:
        """Subject -> pid of the roles that run now."""
        return {subject: process.pid for subject, process in self._processes.items() if process.returncode is None}

    def kill(self) -> None:
        """End all roles at once, without grace; `run` then returns or raises."""
        for pid in self.pids().values():
            kill_group(pid)

    async def _keep(self, spec: RoleSpec, stop: asyncio.Event) -> None:
        failures = 0
        while not stop.is_set():
            self.folder.failure_file(spec.subject).unlink(missing_ok=True)
            started = self.clock.now()
            process = await self._start(spec)
            if await self._ended_before(process, stop):
                uptime = self.clock.now() - started
                failures = self.policy.count_failures(failures, uptime, process.returncode or 0)
                await self._after_death(spec, process, failures=failures, uptime=uptime)
                await wait_for_event(stop, self.policy.delay_seconds(failures))
            else:
                await self._terminate(spec.subject, process)

    async def _start(self, spec: RoleSpec) -> asyncio.subprocess.Process:
        command = [
            sys.executable, "-m", "dartrl", "role", spec.role, "--run-dir", str(self.folder.path),
            "--index", str(spec.index), "--supervisor-pid", str(os.getpid()),
        ]  # fmt: skip
        with self.folder.log_file(spec.subject).open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=role_environment(),
            )
        self._processes[spec.subject] = process
        log.info("role started subject=%s pid=%d", spec.subject, process.pid)
        return process

    async def _ended_before(self, process: asyncio.subprocess.Process, stop: asyncio.Event) -> bool:
        death = asyncio.ensure_future(process.wait())
        stopped = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({death, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            death.cancel()
        return process.returncode is not None and not stop.is_set()

    async def _after_death(self, spec: RoleSpec, process: asyncio.subprocess.Process, *, failures: int, uptime: float) -> None:
        status = process.returncode if process.returncode is not None else 0
        self._clear_remains(process.pid)
        hopeless = status == EXIT_USER_ERROR or failures >= self.policy.most_failures
        if hopeless:
            raise RoleFailed(f"{spec.subject} cannot be kept running: {self._reason(spec.subject, status)}")
        restart = Restart(spec.subject, status, failures, self.policy.delay_seconds(failures), uptime)
        log.warning("role died subject=%s status=%d uptime=%.1f pause=%.1f", spec.subject, status, uptime, restart.delay_seconds)
        await self.on_restart(restart)

    async def _terminate(self, subject: str, process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                async with self.clock.timeout(self.grace_seconds):
                    await process.wait()
            except TimeoutError:
                log.warning("role killed subject=%s grace=%.1f", subject, self.grace_seconds)
                kill_group(process.pid)
                await process.wait()
        self._clear_remains(process.pid)

    def _clear_remains(self, pid: int) -> None:
        kill_group(pid)
        end_orphans(self._foreign | {process.pid for process in self._processes.values()})

    async def _end_everything(self) -> None:
        for process in self._processes.values():
            kill_group(process.pid)
        for process in self._processes.values():
            await process.wait()
        self._processes.clear()
        end_orphans(self._foreign)

    def _reason(self, subject: str, status: int) -> str:
        path = self.folder.failure_file(subject)
        log_file = self.folder.log_file(subject)
        if path.is_file():
            return path.read_text(encoding="utf-8").strip()
        lines = log_file.read_text(encoding="utf-8", errors="replace").splitlines() if log_file.is_file() else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it left no message")
        return f"exit status {status}; last line of {log_file}: {last}"


def role_environment() -> dict[str, str]:
    """Environment of a role process: this one's, with one thread per numerical library (each role has one core at best)."""
    single = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    return {**os.environ, **single, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
