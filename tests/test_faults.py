"""Fault drills: whole runs on real processes and a real browser, with something broken on purpose.

Slow: each drill is a short run of its own. The shipped policy plays; without it, one with random weights does.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "miniwob-tiny-ci.toml"
ROLES = ("manager", "trainer", "router", "engine", "runner")


@pytest.fixture(scope="module")
def policy(request: pytest.FixtureRequest) -> Path:
    """The shipped policy, or one with random weights."""
    shipped = ROOT / "models" / "tiny"
    return shipped if (shipped / "model.safetensors").is_file() else request.getfixturevalue("tiny_policy_folder")


class Drill:
    """One `dartrl run` below a folder of its own."""

    def __init__(self, runs: Path, policy: Path) -> None:
        self.runs = runs
        self._policy = policy
        self._output = runs.parent / "output.txt"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *overrides: str, prefix: tuple[str, ...] = ()) -> None:
        settings = (f"runs_dir={self.runs}", f"policy.path={self._policy}", "curation.drop_zero_variance=false", *overrides)
        self._launch(*prefix, *dartrl(), "run", str(RECIPE), *(part for one in settings for part in ("--set", one)))

    def resume(self, *, prefix: tuple[str, ...] = ()) -> None:
        self._launch(*prefix, *dartrl(), "run", "--resume", "latest", "--runs-dir", str(self.runs))

    def _launch(self, *command: str) -> None:
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)

    @property
    def output(self) -> str:
        return self._output.read_text(encoding="utf-8", errors="replace")

    @property
    def folder(self) -> Path:
        return self.runs / "latest"

    def report(self) -> dict[str, object]:
        return json.loads((self.folder / "report.json").read_text(encoding="utf-8"))

    def roles(self) -> dict[str, psutil.Process]:
        """Role -> its process now."""
        assert self.process is not None
        found: dict[str, psutil.Process] = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                line = child.cmdline()
            except psutil.Error:
                continue
            if "role" in line and "--run-dir" in line:
                found[line[line.index("role") + 1]] = child
        return found

    def query(self, statement: str) -> int:
        """One number from the ledger; 0 while there is no such table."""
        try:
            with sqlite3.connect(f"file:{self.folder.resolve()}/ledger.sqlite?mode=ro", uri=True, timeout=10) as database:
                row = database.execute(statement).fetchone()
        except sqlite3.OperationalError:
            return 0
        return int(row[0] or 0)

    def wait_for(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        assert self.process is not None
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.output}"
            assert time.monotonic() < deadline, f"{what} took longer than {seconds:.0f} s:\n{self.output}"
            time.sleep(0.2)

    def wait_for_training_steps(self, count: int, seconds: float = 180.0) -> None:
        self.wait_for(lambda: self.query("select count(*) from training_step") >= count, seconds, f"{count} training steps")

    def end(self, seconds: float) -> int:
        assert self.process is not None
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the run did not end within {seconds:.0f} s:\n{self.output}")

    def everybody(self) -> list[psutil.Process]:
        assert self.process is not None
        return psutil.Process(self.process.pid).children(recursive=True)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def dartrl() -> tuple[str, ...]:
    return (sys.executable, "-m", "dartrl")


def assert_all_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert [process.cmdline()[:6] for process in alive] == []


def audit(drill: Drill) -> subprocess.CompletedProcess[str]:
    command = [*dartrl(), "audit", "latest", "--runs-dir", str(drill.runs)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.fixture
def drill(tmp_path: Path, policy: Path) -> Iterator[Drill]:
    one = Drill(tmp_path / "runs", policy)
    yield one
    one.close()


def test_every_process_may_be_killed_and_the_run_ends_normally(drill: Drill):
    drill.start("training.max_minutes=1.5", "data.lease_seconds=5")
    drill.wait_for_training_steps(1)
    for role in ROLES:
        drill.wait_for(lambda role=role: role in drill.roles(), 60, f"a {role}")
        drill.roles()[role].kill()
        drill.wait_for(lambda role=role: role not in drill.roles(), 10, f"the death of the {role}")
        drill.wait_for(lambda role=role: role in drill.roles(), 60, f"a new {role}")
        time.sleep(3)  # let the others meet the loss
    everybody = drill.everybody()
    assert drill.end(400) == 0, drill.output
    assert_all_gone(everybody)
    report = drill.report()
    assert report["audit_ok"] is True
    assert report["restarts"] == len(ROLES)
    assert report["training_steps"]
    assert report["max_staleness"] is not None and report["max_staleness"] <= report["staleness_limit"]  # type: ignore[operator]
    assert audit(drill).returncode == 0


def test_an_interrupted_run_goes_on_after_a_truncated_checkpoint_was_refused(drill: Drill):
    drill.start("training.max_minutes=1", "training.checkpoint_every=1", "training.keep_checkpoints=1")
    drill.wait_for_training_steps(3)
    everybody = drill.everybody()
    assert drill.process is not None
    drill.process.send_signal(signal.SIGINT)
    asked = time.monotonic()
    assert drill.end(20) == 130, drill.output
    assert time.monotonic() - asked < 12
    assert "dartrl run --resume" in drill.output
    assert_all_gone(everybody)
    steps = drill.query("select count(*) from training_step where state = 'durable'")
    assert audit(drill).returncode == 0

    newest = max((drill.folder / "checkpoints").iterdir(), key=lambda path: path.name)
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    whole = largest.read_bytes()
    largest.write_bytes(whole[: len(whole) // 2])
    drill.resume()
    assert drill.end(240) not in (0, 130)
    assert newest.name in drill.output and "Traceback" not in drill.output

    largest.write_bytes(whole)
    drill.resume()
    assert drill.end(400) == 0, drill.output
    report = drill.report()
    assert report["audit_ok"] is True
    assert int(str(report["training_steps"])) >= steps


def test_a_killed_supervisor_leaves_nothing_behind_and_the_run_goes_on(drill: Drill):
    drill.start("training.max_minutes=0.5")
    drill.wait_for_training_steps(1)
    everybody = drill.everybody()
    assert drill.process is not None
    drill.process.kill()
    drill.process.wait()
    assert_all_gone(everybody)
    drill.resume()
    assert drill.end(400) == 0, drill.output
    assert drill.report()["audit_ok"] is True


def test_a_taken_port_is_a_clear_error(drill: Drill):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        drill.start(f"rollout.metrics_port={port}")
        assert drill.end(60) == 2
    assert f"rollout.metrics_port is {port}, which another process listens on" in drill.output
    assert "Traceback" not in drill.output


def in_mount_namespace(script: str) -> tuple[str, ...]:
    """Prefix that runs a command after `script` in a mount namespace of its own; skips where that is not allowed."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("needs root and mount namespaces")
    return ("unshare", "--mount", "--propagation", "private", "sh", "-ec", f'{script}\nexec "$@"', "sh")


def test_a_browser_that_cannot_start_is_a_clear_error(drill: Drill, tmp_path: Path):
    from dartrl.envs.web.process import find_browser

    broken = tmp_path / "broken-browser"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && { echo Chromium 1; exit 0; }\necho out of luck >&2\nexit 1\n')
    broken.chmod(0o755)
    drill.start(prefix=in_mount_namespace(f"mount --bind {broken} {find_browser()}"))
    assert drill.end(240) == 1
    assert "did not start" in drill.output and "out of luck" in drill.output
    assert "Traceback" not in drill.output


def test_a_full_disk_ends_the_run_and_loses_nothing(drill: Drill, tmp_path: Path):
    drill.runs.mkdir()
    image = tmp_path / "disk.img"
    with image.open("wb") as file:
        file.truncate(1300 * 2**20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True) if shutil.which("mkfs.ext4") else pytest.skip("needs mkfs.ext4")
    in_mount_namespace("true")
    subprocess.run(["mount", "-o", "loop", image, drill.runs], check=True)
    try:
        drill.start("training.max_minutes=1", "training.checkpoint_every=1")
        drill.wait_for_training_steps(2)
        filler = drill.runs / "filler"
        subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=1M", "status=none"], check=False, capture_output=True)
        subprocess.run(["dd", "if=/dev/zero", f"of={filler}2", "bs=1k", "status=none"], check=False, capture_output=True)
        assert drill.end(300) == 1, drill.output
        assert "is full" in drill.output and "Traceback" not in drill.output
        for path in drill.runs.glob("filler*"):
            path.unlink()
        assert audit(drill).returncode == 0
        drill.resume()
        assert drill.end(400) == 0, drill.output
        assert drill.report()["audit_ok"] is True
    finally:
        drill.close()
        subprocess.run(["umount", "-l", drill.runs], check=True)
