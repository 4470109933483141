"""Every option of a run: type, unit, range, default, one line. TOML in, frozen models out.

`load_recipe` reads a file, applies `--set a.b=c` and checks everything at once; it imports nothing heavy, so a wrong
recipe fails within a fraction of a second.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dartrl.errors import ConfigError


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TaskConfig(Section):
    """Which tasks are trained and evaluated."""

    set: str = "miniwob"
    """Task set, an entry point of group `dartrl.task_sets`."""
    families: tuple[str, ...] = Field(default=("click-test",), min_length=1)
    """Task families to train and evaluate."""
    train_instances: int = Field(default=200, ge=1, le=1_000_000)
    """Training instances per family; their seeds never meet the evaluation's."""
    evaluation_instances: int = Field(default=50, ge=1, le=100_000)
    """Held-out instances per family."""


class EnvironmentConfig(Section):
    """Environment cluster."""

    kind: str = "web"
    """Environment, an entry point of group `dartrl.environments`."""
    runners: int = Field(default=1, ge=1, le=64)
    """Runner processes on this machine; each drives one browser or desktop host."""
    slots: int = Field(default=8, ge=1, le=1024)
    """Environments per runner process."""
    settle_frames: int = Field(default=6, ge=1, le=120)
    """Upper bound of frames waited for two equal ones."""
    step_timeout_seconds: float = Field(default=20.0, gt=0, le=3600)
    """Deadline of one action with its observation."""
    reset_timeout_seconds: float = Field(default=30.0, gt=0, le=3600)
    """Deadline of one reset."""
    episodes_per_start: int = Field(default=2000, ge=1)
    """Episodes after which an environment is replaced by a fresh one."""
    reward: str = "environment"
    """Reward, an entry point of group `dartrl.rewards`; `environment` keeps the environment's own."""


class AgentConfig(Section):
    """How the policy is asked and read."""

    dialect: str = "compact"
    """Dialect, an entry point of group `dartrl.dialects`."""
    history_images: int = Field(default=1, ge=0, le=32)
    """Screenshots in the prompt, the newest included."""
    max_reply_tokens: int = Field(default=48, ge=1, le=8192)
    """Reply length at which the engine stops."""
    min_pixels: int = Field(default=3136, ge=784)
    """Smallest image area in pixels that the policy's image processor keeps; smaller screenshots are enlarged."""
    max_pixels: int = Field(default=313_600, ge=784)
    """Largest image area in pixels that the policy's image processor keeps; larger screenshots are reduced."""
    max_parse_errors: int = Field(default=3, ge=1, le=100)
    """Unreadable replies after which an episode is truncated."""
    max_steps: int = Field(default=10, ge=1, le=1000)
    """Length cap of an episode in steps."""
    episode_timeout_seconds: float = Field(default=300.0, gt=0)
    """Time cap of an episode."""


class PolicyConfig(Section):
    """The model."""

    path: Path = Path("models/tiny")
    """Folder with the initial policy in Hugging Face format."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type of engine and trainer alike."""


class RolloutConfig(Section):
    """Rollout service."""

    workers: int = Field(default=1, ge=1, le=64)
    """Policy workers on this machine."""
    temperature: float = Field(default=1.0, gt=0, le=10)
    """Sampling temperature of training episodes."""
    max_batch: int = Field(default=16, ge=1, le=4096)
    """Requests that one worker answers together."""
    max_waiting: int = Field(default=256, ge=1)
    """Requests the router queues before it answers 429."""
    request_timeout_seconds: float = Field(default=60.0, gt=0)
    """Deadline of one reply, queueing included."""
    sync_seconds: float = Field(default=0.5, gt=0)
    """Pause between two looks for newer weights."""
    drain_timeout_seconds: float = Field(default=30.0, gt=0)
    """How long a worker may take to finish its requests before a swap."""
    probe_tolerance: float = Field(default=1e-3, gt=0)
    """Largest difference of a probe's log-probability in nats."""
    host: str = "127.0.0.1"
    """Address that all services bind; off loopback a token is required."""
    port: int = Field(default=6008, ge=0, le=65535)
    """Inference port of the router; 0 lets the system choose."""
    control_port: int = Field(default=8881, ge=0, le=65535)
    """Control port of the router."""
    metrics_port: int = Field(default=15959, ge=0, le=65535)
    """Metrics and health port of the router."""


class DataConfig(Section):
    """Ledger and blobs."""

    database: str = ""
    """SQLAlchemy URL; empty means SQLite in the run's folder, `memory:` only inside one process."""
    lease_seconds: float = Field(default=30.0, gt=0)
    """Time without a heartbeat after which work is taken away."""
    group_deadline_seconds: float = Field(default=600.0, gt=0)
    """Age at which an incomplete group closes with what it has."""
    max_attempts: int = Field(default=3, ge=1, le=100)
    """Attempts at a slot before it is void."""
    breaker_share: float = Field(default=0.5, gt=0, le=1)
    """Share of infrastructure errors among recent episodes that stops admission."""
    breaker_window: int = Field(default=50, ge=5)
    """Recent episodes the breaker looks at."""


class CurationConfig(Section):
    """Adaptive data curation; each mechanism has one switch."""

    sampling: Literal["rollout", "task", "batch"] = "rollout"
    """Unit of scheduling: one episode, one whole group, or one whole batch."""
    max_rollouts: int = Field(default=8, ge=2, le=1024)
    """Slots of a group."""
    max_staleness: int = Field(default=4, ge=0)
    """Largest distance in versions between trainer and oldest token of a group."""
    drop_zero_variance: bool = True
    """Reject groups whose members all scored the same."""
    experience_pool: bool = True
    """Put one stored success into a group that failed throughout."""
    pool_max_age: int = Field(default=200, ge=0)
    """Largest age in versions of a replayed success."""
    high_entropy_share: float = Field(default=1.0, gt=0, le=1)
    """Share of a group's steps with the highest mean entropy that train; 0.8 in the paper, 1 trains all."""


class TrainingConfig(Section):
    """Trainer."""

    preset: Literal["default", "paper", "release"] = "default"
    """Objective: `paper` is step-wise GRPO, `release` the authors' published script (GSPO), `default` ours; sets PRESETS."""
    learning_rate: float = Field(default=1e-4, ge=0, le=1)
    """AdamW learning rate; 0 measures the control run."""
    groups_per_step: int = Field(default=8, ge=1)
    """Groups claimed for one training step."""
    minibatch_rows: int = Field(default=128, ge=1)
    """Steps per optimizer update."""
    microbatch_rows: int = Field(default=32, ge=1)
    """Steps per forward pass."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Lower clip of the ratio."""
    clip_high: float = Field(default=0.28, gt=0)
    """Upper clip of the ratio."""
    correction: Literal["truncate", "mask", "none"] = "truncate"
    """Importance correction from rollout to training policy: cap, two-sided mask, or none (measurement only)."""
    correction_cap: float = Field(default=2.0, gt=0)
    """Largest importance weight; 1 in the paper."""
    kl_weight: float = Field(default=0.0, ge=0)
    """Weight of the k3 divergence to the initial policy; 0.1 in the paper."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW weight decay."""
    max_gradient_norm: float = Field(default=1.0, gt=0)
    """Gradient clip."""
    publish_every: int = Field(default=1, ge=1)
    """Training steps between two published versions."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Training steps between two resumable checkpoints."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest checkpoints kept on disk."""
    max_minutes: float = Field(default=15.0, ge=0)
    """Training time; 0 only evaluates."""
    max_training_steps: int = Field(default=100_000, ge=1)
    """Training steps."""


PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "default": {},
    "paper": {"training": {"kl_weight": 0.1, "correction_cap": 1.0}, "curation": {"high_entropy_share": 0.8}},
    "release": {"training": {"clip_low": 0.1, "kl_weight": 0.1, "correction_cap": 1.0}},
}
"""Values that a preset gives to options of other names, where the recipe does not state them itself."""


class EvaluationConfig(Section):
    """Held-out evaluation before and after training."""

    episodes_per_task: int = Field(default=50, ge=1)
    """Episodes per family and temperature."""
    greedy: bool = True
    """Evaluate greedily as well as sampled."""
    before: bool = True
    """Evaluate the initial policy."""
    after: bool = True
    """Evaluate the trained policy."""


class RunConfig(Section):
    """One run: a recipe with all defaults filled in."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Prefix of the run's id."""
    seed: int = Field(default=0, ge=0)
    """Root of all sampling seeds."""
    runs_dir: Path = Path("runs")
    """Folder that receives one folder per run."""
    tasks: TaskConfig = TaskConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    agent: AgentConfig = AgentConfig()
    policy: PolicyConfig = PolicyConfig()
    rollout: RolloutConfig = RolloutConfig()
    data: DataConfig = DataConfig()
    curation: CurationConfig = CurationConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, tree: Any) -> Any:
        if not isinstance(tree, Mapping):
            return tree
        given = {name: _stated(section) for name, section in tree.items()}
        training = given.get("training")
        preset = training.get("preset") if isinstance(training, Mapping) else None
        for name, values in PRESETS.get(str(preset), {}).items():
            section = given.get(name, {})
            if isinstance(section, Mapping):
                given[name] = {**values, **section}
        return given

    @model_validator(mode="after")
    def _check_across(self) -> RunConfig:
        if self.training.microbatch_rows > self.training.minibatch_rows:
            raise ValueError(
                f"training.microbatch_rows is {self.training.microbatch_rows}, more than training.minibatch_rows "
                f"({self.training.minibatch_rows}); lower it"
            )
        if self.rollout.host not in ("127.0.0.1", "localhost", "::1"):
            raise ValueError(f"rollout.host is {self.rollout.host}; binding off loopback needs DARTRL_TOKEN, see docs/operating.md")
        if self.evaluation.episodes_per_task > self.tasks.evaluation_instances:
            raise ValueError(
                f"evaluation.episodes_per_task is {self.evaluation.episodes_per_task}, but there are only "
                f"{self.tasks.evaluation_instances} held-out instances; raise tasks.evaluation_instances"
            )
        return self


def _stated(section: Any) -> Any:
    return section.model_dump(exclude_unset=True) if isinstance(section, Section) else section


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The checked configuration of a recipe file.

    overrides: `section.option=value` items, value in TOML syntax or a bare word. Paths in the recipe are relative to the
    working directory. Raises ConfigError that names the option, its value and the nearest valid name.
    """
    try:
        tree: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"recipe {path} does not exist; the shipped ones are in recipes/") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path} is not valid TOML: {error}") from error
    for override in overrides:
        _apply_override(tree, override)
    return parse_config(tree, source=str(path))


def parse_config(tree: Mapping[str, Any], *, source: str = "config") -> RunConfig:
    """The checked configuration of a nested mapping. Raises ConfigError."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(problem, source) for problem in error.errors())) from error


def option_names(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Dotted names of all options, in order."""
    for name, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            yield from option_names(section, f"{prefix}{name}.")
        else:
            yield prefix + name


def nearest_option(name: str) -> str | None:
    """The valid option most like `name`, or None if none is close."""
    found = difflib.get_close_matches(name, list(option_names()), n=1, cutoff=0.6)
    return found[0] if found else None


def _apply_override(tree: dict[str, Any], override: str) -> None:
    name, separator, value = override.partition("=")
    if not separator or not name.strip():
        raise ConfigError(f"--set {override!r} is not of the form section.option=value")
    *sections, option = name.strip().split(".")
    branch = tree
    for section in sections:
        branch = branch.setdefault(section, {})
        if not isinstance(branch, dict):
            raise ConfigError(f"--set {override!r}: {section} is an option, not a section")
    try:
        branch[option] = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        branch[option] = value


def _explain(problem: Any, source: str) -> str:
    name = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        nearest = nearest_option(name)
        hint = f"; did you mean {nearest}?" if nearest else "; see docs/options.md"
        return f"{source}: unknown option {name}{hint}"
    message = problem["msg"].removeprefix("Value error, ")
    if not name:
        return f"{source}: {message}"
    return f"{source}: {name} is {problem['input']!r}; {message[0].lower()}{message[1:]}{_allowed(name)}"


def _allowed(name: str) -> str:
    model: Any = RunConfig
    for part in name.split("."):
        field = getattr(model, "model_fields", {}).get(part)
        if field is None:
            return ""
        model = field.annotation
    choices = [str(choice) for choice in get_args(model) if isinstance(choice, str)]
    return f" (one of {', '.join(choices)})" if choices else ""
