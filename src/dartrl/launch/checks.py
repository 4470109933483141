"""`dartrl check`: everything a run needs, looked at before it starts; each failure names its remedy.

Nothing here imports torch, so that a wrong recipe is known within a moment.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from dartrl.config import RunConfig
from dartrl.errors import ConfigError, DartrlError, EnvironmentFault, WeightsRejected
from dartrl.launch import plugins
from dartrl.launch.ports import SERVICE_PORTS, check_port

LEAST_DISK_GIB = 1.0
"""Free space below which a run is refused; the demo writes a few hundred MiB."""

MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "preprocessor_config.json")
"""Files without which a folder is no policy; sharded weights have an index instead of the second."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check found."""

    name: str
    """What was looked at."""
    ok: bool
    """True if a run can rely on it."""
    detail: str
    """What was found."""
    remedy: str = ""
    """What to do if it is not ok."""


def run_checks(config: RunConfig) -> list[CheckResult]:
    """All checks that apply to the configuration, in order; never raises for what it looks at."""
    checks: list[tuple[str, Callable[[RunConfig], CheckResult]]] = [
        ("plug-ins", check_plugins),
        ("tasks", check_tasks),
        ("model", check_model),
        ("images", check_images),
        ("disk", check_disk),
        ("database", check_database),
        ("ports", check_ports),
    ]
    if config.environment.kind == "web":
        checks += [("browser", check_browser), ("fonts", check_fonts)]
    return [_guarded(name, check, config) for name, check in checks]


def failures(results: Sequence[CheckResult]) -> str:
    """One line per failed check with its remedy; empty if all are ok."""
    return "\n".join(f"{result.name}: {result.detail}; {result.remedy}" for result in results if not result.ok)


def check_plugins(config: RunConfig) -> CheckResult:
    """Environment, dialect and reward are installed."""
    plugins.load(plugins.ENVIRONMENTS, config.environment.kind)
    dialect = plugins.create_dialect(config.agent)
    plugins.load_reward(config.environment.reward)
    detail = f"environment {config.environment.kind}, dialect {dialect.name}, reward {config.environment.reward}"
    return CheckResult("plug-ins", True, detail)


def check_tasks(config: RunConfig) -> CheckResult:
    """Every family exists, and training and evaluation share no instance."""
    task_set = plugins.create_task_set(config.tasks.set)
    train = task_set.tasks(config.tasks.families, "train", config.tasks.train_instances)
    held_out = task_set.tasks(config.tasks.families, "evaluation", config.tasks.evaluation_instances)
    shared = {(task.family, task.seed) for task in train} & {(task.family, task.seed) for task in held_out}
    if shared:
        family, seed = min(shared)
        return CheckResult("tasks", False, f"{family} seed {seed} is in both splits", "repair the task set's seeds")
    detail = f"{len(config.tasks.families)} families, {len(train)} training and {len(held_out)} held-out instances"
    return CheckResult("tasks", True, detail)


def check_model(config: RunConfig) -> CheckResult:
    """The policy's folder is complete and, if it has a manifest, undamaged."""
    from dartrl.policy.manifest import verify_manifest

    folder = config.policy.path
    remedy = "set policy.path to a folder in Hugging Face format, such as models/tiny, or make one with: dartrl pretrain"
    if not folder.is_dir():
        return CheckResult("model", False, f"policy.path is {folder}, which is not a folder", remedy)
    present = {path.name for path in folder.iterdir()}
    if "model.safetensors.index.json" in present:
        present.add("model.safetensors")
    missing = [name for name in MODEL_FILES if name not in present]
    if missing:
        return CheckResult("model", False, f"{folder} lacks {', '.join(missing)}", remedy)
    architecture = orjson.loads((folder / "config.json").read_bytes()).get("architectures", ["unknown"])[0]
    if "manifest.json" in present:
        try:
            verify_manifest(folder, None)
        except WeightsRejected as error:
            remedy = "restore the folder, or delete its manifest.json if you changed it on purpose"
            return CheckResult("model", False, str(error), remedy)
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file()) / 2**20
    return CheckResult("model", True, f"{folder} ({architecture}, {size:.1f} MiB)")


def check_images(config: RunConfig) -> CheckResult:
    """The agent maps coordinates with the same image limits as the policy's image processor resizes with."""
    if config.agent.history_images == 0:
        return CheckResult("images", True, "none in the prompt")
    processor = orjson.loads((config.policy.path / "preprocessor_config.json").read_bytes())
    size = processor.get("size") or {}
    least = processor.get("min_pixels") or size.get("shortest_edge")
    most = processor.get("max_pixels") or size.get("longest_edge")
    if (least, most) == (config.agent.min_pixels, config.agent.max_pixels):
        return CheckResult("images", True, f"{least} to {most} pixels, as in the policy's image processor")
    detail = (
        f"agent.min_pixels and agent.max_pixels are {config.agent.min_pixels} and {config.agent.max_pixels}, but the policy's "
        f"image processor keeps {least} to {most} pixels, so points would land elsewhere"
    )
    return CheckResult("images", False, detail, f"set agent.min_pixels={least} and agent.max_pixels={most}")


def check_disk(config: RunConfig) -> CheckResult:
    """There is room for a run."""
    folder = config.runs_dir.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free / 2**30
    detail = f"{free:.1f} GiB free in {existing}"
    remedy = f"free space (at least {LEAST_DISK_GIB:g} GiB) or choose another disk with --set runs_dir=DIR"
    return CheckResult("disk", free >= LEAST_DISK_GIB, detail, remedy)


def check_database(config: RunConfig) -> CheckResult:
    """The configured database answers; the embedded SQLite needs nothing."""
    from dartrl.data.blobs import MemoryBlobStore
    from dartrl.data.manager import open_ledger

    url = config.data.database
    if not url:
        return CheckResult("database", True, "SQLite in the run's folder")
    if url == "memory:":
        return CheckResult("database", False, "data.database is memory:, which lives in one process", "leave data.database empty")
    open_ledger(url, blobs=MemoryBlobStore(), config=config, run_id="check", now=lambda: 0.0)
    return CheckResult("database", True, f"{url.split('@')[-1]} answers")


def check_ports(config: RunConfig) -> CheckResult:
    """The configured ports are free."""
    host = config.rollout.host
    chosen: list[str] = []
    for option in SERVICE_PORTS.values():
        port: int = getattr(config.rollout, option)
        check_port(host, port, option)
        chosen.append(str(port) if port else "free choice")
    return CheckResult("ports", True, f"{host}: {', '.join(chosen)}")


def check_fonts(config: RunConfig) -> CheckResult:
    """The pages' fonts are installed, so that screenshots look as they did in pre-training."""
    remedy = "install fonts: apt-get install fonts-liberation fontconfig (script/setup does it)"
    try:
        found = subprocess.run(["fc-match", "Arial"], capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except FileNotFoundError:
        return CheckResult("fonts", False, "fc-match is not installed", remedy)
    except (subprocess.SubprocessError, OSError) as error:
        return CheckResult("fonts", False, f"fc-match failed: {error}", remedy)
    suitable = any(name in found for name in ("Liberation", "Arial", "Arimo"))
    return CheckResult("fonts", suitable, f"Arial is shown as {found}", remedy)


def check_browser(config: RunConfig) -> CheckResult:
    """A headless Chromium is installed and starts."""
    from dartrl.envs.web.browser import find_browser

    path = Path(find_browser())
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (subprocess.SubprocessError, OSError) as error:
        remedy = "reinstall it: apt-get install --reinstall chromium-headless-shell"
        return CheckResult("browser", False, f"{path} does not start: {error}", remedy)
    return CheckResult("browser", True, f"{path} ({answer})")


def _guarded(name: str, check: Callable[[RunConfig], CheckResult], config: RunConfig) -> CheckResult:
    try:
        return check(config)
    except (ConfigError, EnvironmentFault) as error:
        message, _, remedy = str(error).rpartition("; ")
        return CheckResult(name, False, message or remedy, remedy if message else "correct it in the recipe or with --set")
    except (DartrlError, OSError) as error:
        return CheckResult(name, False, str(error), "see docs/operating.md, section Checks")
