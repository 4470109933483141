"""The folder of one run: where every file of it lies, and how a run is found again.

    runs/<run id>/config.json  ports.json  ledger.sqlite  blobs/  weights/v000001/  checkpoints/  logs/  report.json  report.html
    runs/latest -> <run id>
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from dartrl.config import RunConfig, parse_config
from dartrl.errors import ConfigError

LATEST = "latest"
"""Name of the link to the newest run."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run."""

    path: Path
    """Absolute folder of the run; its name is the run's id."""

    @property
    def run_id(self) -> str:
        """Unique id of the run in its database."""
        return self.path.name

    @property
    def blobs(self) -> Path:
        """Screenshots and arrays by content hash."""
        return self.path / "blobs"

    @property
    def logs(self) -> Path:
        """One log file per role."""
        return self.path / "logs"

    @property
    def ports_file(self) -> Path:
        """The ports that the run's services listen on."""
        return self.path / "ports.json"

    def log_file(self, subject: str) -> Path:
        """Log of one role, such as `runner-0`."""
        return self.logs / f"{subject}.log"

    def failure_file(self, subject: str) -> Path:
        """Why a role gave up for good, in words for the user."""
        return self.logs / f"{subject}.failure"

    def config(self) -> RunConfig:
        """The resolved configuration. Raises ConfigError if the folder holds no run."""
        return load_config(self)

    def ledger_url(self, config: RunConfig) -> str:
        """SQLAlchemy URL of the run's ledger."""
        return config.data.database or f"sqlite:///{self.path / 'ledger.sqlite'}"


def create_run_folder(config: RunConfig, *, stamp: str) -> RunFolder:
    """A fresh folder with its config.json; `runs/latest` points to it afterwards.

    stamp: sortable time, such as 20260131-235959; a number is appended if the folder exists.
    Raises ConfigError if `runs_dir` cannot be written.
    """
    runs = config.runs_dir.absolute()
    base = f"{config.name}-{stamp}-s{config.seed}"
    try:
        runs.mkdir(parents=True, exist_ok=True)
        folder = _unused(runs, base)
        for part in (folder.logs, folder.blobs):
            part.mkdir()
        body = orjson.dumps(config.model_dump(mode="json"), option=orjson.OPT_INDENT_2)
        write_atomically(folder.path / "config.json", body, mode=0o600)
        _point_latest(runs, folder.run_id)
    except OSError as error:
        reason = f"runs_dir is {runs}, which cannot be written ({error.strerror})"
        raise ConfigError(f"{reason}; choose another with --set runs_dir=DIR") from error
    return folder


def find_run_folder(run: str, runs_dir: Path) -> RunFolder:
    """The folder of a run by its id, its path or `latest`. Raises ConfigError that lists the newest runs."""
    for candidate in (Path(run), runs_dir / run):
        if (candidate / "config.json").is_file():
            return RunFolder(candidate.resolve())
    folders = [path.parent for path in runs_dir.glob("*/config.json") if not path.parent.is_symlink()]
    known = [folder.name for folder in sorted(folders, key=lambda folder: folder.stat().st_mtime, reverse=True)]
    if not known:
        raise ConfigError(f"run {run!r} does not exist; there are no runs in {runs_dir}, start one with: dartrl run RECIPE")
    raise ConfigError(f"run {run!r} does not exist; runs in {runs_dir}: {', '.join(known[:5])}")


def load_config(folder: RunFolder) -> RunConfig:
    """The resolved configuration of a run. Raises ConfigError if config.json is missing or damaged."""
    path = folder.path / "config.json"
    try:
        tree: dict[str, Any] = orjson.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(f"{folder.path} is not a run folder: it has no config.json") from error
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
    return parse_config(tree, source=str(path))


def write_ports(folder: RunFolder, ports: Mapping[str, int]) -> None:
    """Record the chosen ports, such as `router`, `control`, `metrics`, `engine-0`."""
    write_atomically(folder.ports_file, orjson.dumps(dict(ports), option=orjson.OPT_INDENT_2))


def read_ports(folder: RunFolder) -> dict[str, int]:
    """The ports of the run. Raises ConfigError if the run was never started."""
    try:
        return orjson.loads(folder.ports_file.read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(f"{folder.ports_file} does not exist; the ports are chosen by `dartrl run`") from error


def write_atomically(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace a file by complete, durable contents, or leave it as it was."""
    temporary = path.with_name(path.name + ".partial")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _unused(runs: Path, base: str) -> RunFolder:
    number = 1
    while True:
        path = runs / (base if number == 1 else f"{base}-{number}")
        try:
            path.mkdir()
            return RunFolder(path)
        except FileExistsError:
            number += 1


def _point_latest(runs: Path, run_id: str) -> None:
    link = runs / LATEST
    temporary = runs / f".{LATEST}-{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(run_id)
    temporary.replace(link)
