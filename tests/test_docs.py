"""The documentation mentions every command, option, metric, event and figure, so that none is added without a word."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import typer

from dartrl.cli import app
from dartrl.config import option_names

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = {path.name: path.read_text(encoding="utf-8") for path in DOCS.glob("*.md")}


def commands() -> dict[str, list[str]]:
    """Command -> its long options."""
    group = typer.main.get_command(app)
    found: dict[str, list[str]] = {}
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
        found[name] = [option for parameter in shown for option in parameter.opts if option.startswith("--")]
    return found


def metric_names() -> set[str]:
    """Names that the sources give to a Meter; the constant start of composed ones."""
    names: set[str] = set()
    for path in (ROOT / "src" / "dartrl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
                continue
            if node.func.attr not in ("add", "observe", "busy"):
                continue
            argument = node.args[0]
            if isinstance(argument, ast.JoinedStr) and argument.values and isinstance(argument.values[0], ast.Constant):
                argument = argument.values[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str) and "/" in argument.value:
                names.add(argument.value)
    return names


def test_pages_of_the_documentation_exist():
    assert {"start.md", "architecture.md", "operating.md", "metrics.md", "options.md", "results.md"} <= PAGES.keys()


@pytest.mark.parametrize("command", sorted(commands()))
def test_every_command_and_its_options_are_documented(command: str):
    assert f"dartrl {command}" in PAGES["operating.md"]
    missing = [option for option in commands()[command] if option not in PAGES["operating.md"]]
    assert missing == []


def test_every_option_is_documented():
    assert [name for name in option_names() if f"`{name}`" not in PAGES["options.md"]] == []


def test_every_metric_is_documented():
    names = metric_names()
    assert "envs/episodes" in names
    assert sorted(name for name in names if name not in PAGES["metrics.md"]) == []


def test_every_figure_of_the_report_is_documented():
    source = (ROOT / "src" / "dartrl" / "dashboard" / "report.py").read_text(encoding="utf-8")
    figures = set(re.findall(r'^\s+"([a-z][a-z0-9_]+)": ', source, flags=re.MULTILINE))
    assert {"success_before", "max_staleness", "restarts"} <= figures
    assert sorted(name for name in figures if f"`{name}`" not in PAGES["metrics.md"]) == []


def test_every_link_inside_the_documentation_leads_somewhere():
    broken: list[str] = []
    for path in [*DOCS.glob("*.md"), ROOT / "README.md"]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
            if "://" not in target and not (path.parent / target).exists():
                broken.append(f"{path.name}: {target}")
    assert broken == []
