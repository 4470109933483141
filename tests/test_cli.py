"""The command line: quick, free of torch, and never a traceback for a user's mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def dartrl(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "dartrl", *arguments], cwd=cwd, capture_output=True, text=True, timeout=60)


def modules_after(source: str) -> set[str]:
    """Names of the modules that a fresh interpreter has loaded after running the source."""
    program = f"{source}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return set(json.loads(result.stdout.splitlines()[-1]))


HELP = "import contextlib, dartrl.cli\nwith contextlib.suppress(SystemExit):\n    dartrl.cli.main(['--help'])"
CONFIG = "from pathlib import Path\nfrom dartrl.config import load_recipe\nload_recipe(Path('recipes/miniwob-tiny-cpu.toml'))"
CHECK = (
    "import contextlib, dartrl.cli\nwith contextlib.suppress(SystemExit):\n    "
    "dartrl.cli.main(['check', 'recipes/miniwob-tiny-ci.toml'])"
)
ROLES = "import dartrl.launch.roles, dartrl.rollout.runner, dartrl.rollout.router, dartrl.rollout.client"


@pytest.mark.parametrize("source", [HELP, CONFIG, CHECK, ROLES], ids=["help", "config", "check", "runner and router"])
def test_torch_is_not_loaded(source: str):
    loaded = modules_after(source)
    assert not loaded & {"torch", "transformers"}


def test_help_loads_neither_pydantic_nor_sqlalchemy():
    assert not modules_after(HELP) & {"pydantic", "sqlalchemy", "numpy"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("chek",), "check"),
        (("run", "--resum"), "--resume"),
        (("run", "recipes/none.toml"), "does not exist"),
        (("run", "recipes/miniwob-tiny-ci.toml", "--set", "training.learnin_rate=1"), "did you mean training.learning_rate?"),
        (("run", "recipes/miniwob-tiny-ci.toml", "--set", "seed"), "not of the form"),
        (("run",), "no recipe given"),
        (("run", "--resume", "--set", "seed=1"), "cannot be combined"),
        (("run", "recipes/miniwob-tiny-ci.toml", "--set", "tasks.families=['click-tset']"), "did you mean 'click-test'?"),
        (("run", "recipes/miniwob-tiny-ci.toml", "--set", "policy.path=nowhere"), "policy.path is nowhere"),
        (("audit", "none", "--runs-dir", "nowhere"), "there are no runs"),
        (("role", "pilot", "--run-dir", "nowhere"), "must be one of engine, router, runner, trainer, manager"),
    ],
)
def test_a_mistake_gets_one_message_that_helps(arguments: tuple[str, ...], expected: str):
    result = dartrl(*arguments)
    output = " ".join((result.stdout + result.stderr).replace("│", " ").split())
    assert expected in output
    assert "Traceback" not in output
    assert result.returncode == 2


def test_help_names_every_command():
    output = dartrl("--help").stdout
    assert all(command in output for command in ("run", "eval", "check", "pretrain", "audit", "report", "role"))
