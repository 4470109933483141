"""The command line. Everything heavy is imported inside the command that needs it.

Exit status: 0 done, 1 the run failed, 2 the user's input is wrong, 130 interrupted.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dartrl.errors import ConfigError, DartrlError

if TYPE_CHECKING:
    from dartrl.config import RunConfig

app = typer.Typer(
    name="dartrl",
    help="Train vision-language GUI agents by decoupled, asynchronous reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Recipe = Annotated[Path, typer.Argument(help="Recipe file in TOML; the shipped ones are in recipes/.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SECTION.OPTION=VALUE", help="Override one option of the recipe; may be repeated.", show_default=False
    ),
]
RunsDir = Annotated[Path, typer.Option("--runs-dir", help="Folder that holds the runs.")]


@app.command()
def run(
    recipe: Annotated[Path | None, typer.Argument(help="Recipe file in TOML.", show_default=False)] = None,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run: its id, its folder, or the latest.")] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Evaluate, train with all modules at once, evaluate again, write the report."""
    if resume and overrides:
        raise ConfigError("--set cannot be combined with --resume: a run keeps the configuration it started with")
    if resume:
        from dartrl.launch.entry import resume_run

        raise typer.Exit(resume_run(str(recipe) if recipe else "latest", runs_dir))
    if recipe is None:
        raise ConfigError("no recipe given; try: dartrl run recipes/miniwob-tiny-cpu.toml")
    config = _load(recipe, overrides)
    from dartrl.launch.entry import start_run

    raise typer.Exit(start_run(config))


@app.command(name="eval")
def evaluate(recipe: Recipe, overrides: Overrides = None) -> None:
    """Evaluate the policy of a recipe on held-out tasks, sampled and greedily, without training."""
    config = _load(recipe, overrides)
    from dartrl.launch.entry import start_run, without_training

    raise typer.Exit(start_run(without_training(config)))


@app.command()
def check(recipe: Recipe, overrides: Overrides = None) -> None:
    """Check config, plug-ins, model, disk, database, ports, browser and fonts; each failure names its remedy."""
    config = _load(recipe, overrides)
    from rich.console import Console

    from dartrl.dashboard.tables import check_table
    from dartrl.launch.checks import run_checks

    results = run_checks(config)
    Console().print(check_table([(result.name, result.ok, result.detail, result.remedy) for result in results]))
    raise typer.Exit(0 if all(result.ok for result in results) else 2)


@app.command()
def pretrain(recipe: Recipe, overrides: Overrides = None) -> None:
    """Train a policy from nothing on screenshots of the browser environment with scripted experts."""
    from dartrl.launch.pretraining import run_pretraining

    raise typer.Exit(run_pretraining(recipe, overrides or []))


@app.command()
def audit(
    run: Annotated[str, typer.Argument(help="Run: its id, its folder, or latest.")] = "latest",
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Prove from the ledger alone that nothing was lost or counted twice."""
    from dartrl.launch.entry import audit_run

    report = audit_run(run, runs_dir)
    for line in report.lines:
        print(line)
    for problem in report.problems:
        print(f"PROBLEM {problem}")
    raise typer.Exit(0 if report.ok else 1)


@app.command()
def report(
    run: Annotated[str, typer.Argument(help="Run: its id, its folder, or latest.")] = "latest",
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Write report.json and report.html of a run anew and print the figures."""
    from dartrl.launch.entry import write_report_of

    write_report_of(run, runs_dir)


@app.command()
def role(
    name: Annotated[str, typer.Argument(metavar="ROLE", help="engine, router, runner, trainer or manager.", show_default=False)],
    run_dir: Annotated[Path, typer.Option("--run-dir", help="Folder of the run that the role works on.", show_default=False)],
    index: Annotated[int, typer.Option("--index", min=0, help="Number among the processes of this role.")] = 0,
    supervisor_pid: Annotated[int | None, typer.Option("--supervisor-pid", hidden=True)] = None,
) -> None:
    """Run one role as a process of its own; `dartrl run` starts all of them by itself."""
    from dartrl.launch.roles import ROLES, run_role
    from dartrl.launch.run_folder import find_run_folder

    if name not in ROLES:
        raise ConfigError(f"role {name!r} does not exist; it must be one of {', '.join(ROLES)}")
    status = run_role(name, index, find_run_folder(str(run_dir), Path("runs")), supervisor_pid=supervisor_pid)
    logging.shutdown()
    os._exit(status)  # everything is closed; tearing torch down would only take time


def main(arguments: list[str] | None = None) -> None:
    """Entry point: runs a command and turns every error of the user into one message without a traceback."""
    try:
        app(arguments, prog_name="dartrl")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except DartrlError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def _load(recipe: Path, overrides: list[str] | None) -> RunConfig:
    from dartrl.config import load_recipe

    return load_recipe(recipe, overrides or [])
