"""Run folders: created once, found by every name, written whole."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dartrl.config import RunConfig
from dartrl.errors import ConfigError
from dartrl.launch.run_folder import create_run_folder, find_run_folder, read_ports, write_atomically, write_ports


def config(tmp_path: Path) -> RunConfig:
    return RunConfig(name="demo", seed=3, runs_dir=tmp_path / "runs")


def test_a_run_is_found_by_id_path_and_latest(tmp_path: Path):
    first = create_run_folder(config(tmp_path), stamp="20260101-000000")
    second = create_run_folder(config(tmp_path), stamp="20260101-000000")
    assert first.run_id == "demo-20260101-000000-s3"
    assert second.run_id == "demo-20260101-000000-s3-2"
    runs = tmp_path / "runs"
    assert find_run_folder("latest", runs) == second
    assert find_run_folder(first.run_id, runs) == first
    assert find_run_folder(str(first.path), Path("elsewhere")) == first
    assert os.readlink(runs / "latest") == second.run_id


def test_the_configuration_comes_back_as_it_was(tmp_path: Path):
    folder = create_run_folder(config(tmp_path), stamp="s")
    assert folder.config() == config(tmp_path)
    assert stat.S_IMODE((folder.path / "config.json").stat().st_mode) == 0o600


def test_an_unknown_run_names_those_that_exist(tmp_path: Path):
    with pytest.raises(ConfigError, match="there are no runs"):
        find_run_folder("latest", tmp_path / "runs")
    folder = create_run_folder(config(tmp_path), stamp="s")
    with pytest.raises(ConfigError, match=folder.run_id):
        find_run_folder("nope", tmp_path / "runs")


def test_a_damaged_configuration_is_named(tmp_path: Path):
    folder = create_run_folder(config(tmp_path), stamp="s")
    (folder.path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json is damaged"):
        folder.config()


def test_a_place_that_cannot_be_written_is_a_clear_error(tmp_path: Path):
    (tmp_path / "runs").write_text("a file", encoding="utf-8")
    with pytest.raises(ConfigError, match="runs_dir is .* cannot be written"):
        create_run_folder(config(tmp_path), stamp="s")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "report.json"
    write_atomically(path, b"old")
    with pytest.raises(TypeError):
        write_atomically(path, "not bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]


def test_ports_are_kept(tmp_path: Path):
    folder = create_run_folder(config(tmp_path), stamp="s")
    with pytest.raises(ConfigError, match="dartrl run"):
        read_ports(folder)
    write_ports(folder, {"router": 1, "engine-0": 2})
    assert read_ports(folder) == {"router": 1, "engine-0": 2}


def test_an_sqlite_ledger_lies_in_the_folder_unless_configured(tmp_path: Path):
    folder = create_run_folder(config(tmp_path), stamp="s")
    assert folder.ledger_url(folder.config()) == f"sqlite:///{folder.path}/ledger.sqlite"
