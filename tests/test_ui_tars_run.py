"""The whole system once with the prompt of a large policy: UI-TARS 1.5, three screenshots of history, real browser."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(1200)]

ROOT = Path(__file__).resolve().parent.parent


def test_a_run_with_the_full_dialect_trains_and_audits_clean(tmp_path, tiny_policy_folder):
    shipped = ROOT / "models" / "tiny"
    policy = shipped if (shipped / "model.safetensors").is_file() else tiny_policy_folder
    overrides = (f"runs_dir={tmp_path}", f"policy.path={policy}")
    command = [sys.executable, "-m", "dartrl", "run", str(ROOT / "recipes" / "uitars-dialect-ci.toml")]
    command += [part for override in overrides for part in ("--set", override)]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1100, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    report = json.loads((tmp_path / "latest" / "report.json").read_text(encoding="utf-8"))
    assert report["audit_ok"] and report["restarts"] == 0 and report["requests_failed"] == 0
    assert report["training_steps"] >= 1 and report["weight_syncs"] >= 1
    assert report["logprob_gap_p99_at_lag_0"] < 1e-3
