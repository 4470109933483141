"""The plug-in trains: one minute with all modules as processes of their own, as continuous integration does it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLE = Path(__file__).resolve().parents[1]
ROOT = EXAMPLE.parents[1]
NOISE = 0.12
"""Two standard errors of the difference between two means over 150 episodes, near one half: a minute must not wreck the policy."""


def test_the_word_game_trains_for_a_minute(tmp_path):
    recipe = EXAMPLE / "wordgame-tiny-cpu.toml"
    command = [
        sys.executable,
        "-m",
        "dartrl",
        "run",
        str(recipe),
        "--set",
        f"runs_dir={tmp_path}",
        "--set",
        "evaluation.greedy=false",
    ]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    report = json.loads((tmp_path / "latest" / "report.json").read_text(encoding="utf-8"))
    assert report["audit_ok"] and report["restarts"] == 0 and report["requests_failed"] == 0
    assert report["training_steps"] >= 1 and report["weight_syncs"] >= 1
    assert report["max_staleness"] <= report["staleness_limit"]
    assert set(report["per_task"]) == {"echo", "first", "rounds"}
    assert report["success_after"] > report["success_before"] - NOISE
