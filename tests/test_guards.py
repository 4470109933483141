"""Rules of the source tree that no other tool checks: budgets, injected time, golden options, confined exceptions."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from dartrl.config import load_recipe, option_names

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src" / "dartrl"
FILES = sorted(SOURCES.rglob("*.py"))

FILE_LINES = 400
FUNCTION_LINES = 60
MOST_OPTIONS = 80

REAL_TIME = {"launch/system_clock.py"}
"""Files that may ask the machine for time."""
BANNED_CALLS = {
    "time.time", "time.time_ns", "time.monotonic", "time.monotonic_ns", "time.perf_counter", "time.perf_counter_ns", "time.sleep",
    "asyncio.sleep", "asyncio.to_thread", "datetime.now", "datetime.datetime.now", "datetime.utcnow", "uuid.uuid1", "uuid.uuid4",
}  # fmt: skip
BROAD_EXCEPTIONS = {"rollout/episode.py", "rollout/runner.py", "envs/slots.py", "launch/roles.py", "launch/entry.py"}
"""End of an episode, slot replacement, role supervision, top of the command line."""


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def place(path: Path) -> str:
    return path.relative_to(SOURCES).as_posix()


def dotted(node: ast.AST) -> str:
    """`time.sleep` for the expression that reads so; empty for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def banned_uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            name = dotted(node)
            if name in BANNED_CALLS or ("random" in modules and name.startswith("random.") and name != "random.Random"):
                yield node.lineno, name
        if isinstance(node, ast.ImportFrom) and node.module in ("time", "random"):
            yield node.lineno, f"from {node.module} import"


def is_broad(handler: ast.ExceptHandler) -> bool:
    """True if the handler catches everything and keeps it; one that ends in a bare `raise` only cleans up."""
    catches_all = handler.type is None or dotted(handler.type) in ("Exception", "BaseException")
    last = handler.body[-1]
    return catches_all and not (isinstance(last, ast.Raise) and last.exc is None)


def test_the_guard_sees_banned_calls():
    source = "import time, asyncio, random\nasync def f():\n    await asyncio.sleep(time.time())\n    return random.random()\n"
    assert {name for _, name in banned_uses(ast.parse(source))} == {"asyncio.sleep", "time.time", "random.random"}


def test_time_threads_and_chance_are_injected():
    found = [
        f"{place(path)}:{line} {name}"
        for path in FILES
        if place(path) not in REAL_TIME and not place(path).startswith("simulate/")
        for line, name in banned_uses(parsed(path))
    ]
    assert found == []


def test_files_and_functions_keep_their_budgets():
    long_files = [place(path) for path in FILES if len(path.read_text(encoding="utf-8").splitlines()) > FILE_LINES]
    long_functions = [
        f"{place(path)}:{node.name}"
        for path in FILES
        if "migrations/versions" not in place(path)  # generated from the schema, one statement a table
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno + 1 > FUNCTION_LINES
    ]
    assert (long_files, long_functions) == ([], [])


def test_broad_exceptions_stay_at_the_four_boundaries():
    broad = {
        place(path)
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ExceptHandler) and is_broad(node)
    }
    assert broad <= BROAD_EXCEPTIONS


def test_nothing_unfinished_and_no_unsafe_loading():
    words = ("TODO", "FIXME", "NotImplementedError", "pickle.load", "yaml.load(")
    found = [f"{place(path)}: {word}" for path in FILES for word in words if word in path.read_text(encoding="utf-8")]
    assert found == []


def test_no_machine_path_is_tracked():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    needles = ("/wo" + "rk/", "/ro" + "ot/", "/ho" + "me/")
    guilty: list[str] = []
    for name in listed:
        path = ROOT / name
        if not name or not path.is_file() or path.suffix in {".png", ".safetensors", ".svg"} or name.startswith("models/"):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        guilty += [f"{name}: {needle}" for needle in needles if needle in text]
    assert guilty == []


def test_options_match_the_golden_list_and_the_page():
    generator = runpy.run_path(str(ROOT / "script" / "options"))
    assert (ROOT / "tests" / "golden" / "options.txt").read_text(encoding="utf-8") == generator["golden_list"]()
    assert (ROOT / "docs" / "options.md").read_text(encoding="utf-8") == generator["options_page"]()
    assert len(list(option_names())) <= MOST_OPTIONS


RECIPES = [path for path in sorted((ROOT / "recipes").glob("*.toml")) if not path.name.startswith("pretrain")]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_parses(recipe: Path):
    config = load_recipe(recipe)
    assert config.name == recipe.stem


def test_import_contracts_hold():
    contracts = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([contracts, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
