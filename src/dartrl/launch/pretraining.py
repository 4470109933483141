"""`dartrl pretrain`: from nothing to a policy folder, in four stages that are each kept and never repeated.

    collect demonstrations and pages -> train (copying, then jointly) -> measure in the browser -> copy one stage to `output`

The recipe is a TOML file of its own kind, because nothing of a run's configuration applies here but the agent's prompt.
"""

from __future__ import annotations

import asyncio
import json
import logging
import tomllib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError

from dartrl.agent.demonstration import SUMMARY_FILE
from dartrl.config import RunConfig, Section, parse_config
from dartrl.envs.web.demonstrations import CollectionWriter, Disturbance, collect_demonstrations, collect_pages
from dartrl.envs.web.experts import EXPERT_SCRIPT, PAGE_SCRIPT, require_expert
from dartrl.envs.web.miniwob import create_pool
from dartrl.envs.web.task_set import MiniwobTasks, require_family
from dartrl.errors import ConfigError, DartrlError
from dartrl.interfaces import EnvironmentPool
from dartrl.launch.policy_measurement import measure_policy
from dartrl.launch.system_clock import SystemClock
from dartrl.policy.model import load_policy, save_policy
from dartrl.train.supervised import CopyStage, JointStage, SupervisedPlan, create_initial_policy, train_policy

logger = logging.getLogger(__name__)

T = TypeVar("T")

MEASUREMENTS_FILE = "measurements.json"


class CollectionConfig(Section):
    """What is collected in the browser."""

    browsers: int = Field(default=2, ge=1, le=64)
    """Browser processes; one per core."""
    slots: int = Field(default=6, ge=1, le=64)
    """Environments per browser."""
    pages: int = Field(default=12_000, ge=1)
    """Synthetic pages."""
    disturbed_episodes: float = Field(default=0.4, ge=0, le=1)
    """Share of the episodes in which the expert is disturbed."""
    disturbed_steps: float = Field(default=0.35, ge=0, le=1)
    """Share of the disturbed steps in such an episode."""
    episodes: dict[str, int] = Field(min_length=1)
    """Task family -> expert episodes."""


class MeasurementConfig(Section):
    """Success in the browser, on training instances: the held-out ones stay unseen until a run evaluates."""

    families: tuple[str, ...] = ()
    """Families played; those never demonstrated may be among them."""
    episodes: int = Field(default=24, ge=1)
    """Episodes per family, stage and temperature."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """Sampling temperatures; 0 is greedy."""
    stages: tuple[int, ...] = ()
    """Steps of the joint stage whose policies are measured beside the one that ships."""


class PretrainConfig(Section):
    """One pre-training: a recipe with all defaults filled in."""

    seed: int = Field(default=0, ge=0)
    """Root of all randomness."""
    work_dir: Path
    """Receives collections, stages and measurements; about 5 GB."""
    output: Path
    """Receives the policy that ships."""
    processes: int = Field(default=2, ge=1, le=64)
    """Training processes, one thread each."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the matrix products in training; bfloat16 is slow without instructions for it."""
    vocabulary: int = Field(default=1536, ge=512)
    """Entries of the tokenizer."""
    collection: CollectionConfig
    copying: CopyStage = CopyStage()
    joint: JointStage = JointStage()
    measurement: MeasurementConfig = MeasurementConfig()

    @property
    def plan(self) -> SupervisedPlan:
        """What the training processes are told."""
        return SupervisedPlan(
            collection=self.work_dir / "demonstrations",
            pages=self.work_dir / "pages",
            work_dir=self.work_dir,
            copy=self.copying,
            joint=self.joint,
            seed=self.seed,
            processes=self.processes,
            dtype=self.dtype,
        )


def run_pretraining(recipe: Path, overrides: Sequence[str] = ()) -> int:
    """Do what the recipe says and is not done yet; the exit code. A finished stage is found again in the work folder."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        config = load_pretraining(recipe, overrides)
        asyncio.run(collect(config))
        shipped = train(config)
        save_policy(load_policy(shipped), config.output)
        logger.info("policy written folder=%s from=%s", config.output, shipped.name)
        asyncio.run(measure(config))
    except DartrlError as error:
        logger.error("pretraining failed: %s", error)
        return 2
    return 0


def load_pretraining(path: Path, overrides: Sequence[str] = ()) -> PretrainConfig:
    """The checked recipe. overrides: `section.option=value` in TOML syntax. Raises ConfigError."""
    try:
        tree: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        for override in overrides:
            _merge(tree, tomllib.loads(override))
        config = PretrainConfig.model_validate(tree)
    except FileNotFoundError as error:
        raise ConfigError(f"recipe {path} does not exist; the shipped one is recipes/pretrain-miniwob-tiny.toml") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"recipe {path} or one of {list(overrides)} is not valid TOML: {error}") from error
    except ValidationError as error:
        problems = [f"{path}: {'.'.join(map(str, one['loc']))} is {one['input']!r}; {one['msg']}" for one in error.errors()]
        raise ConfigError("\n".join(problems)) from error
    for family in config.collection.episodes:
        require_expert(family)
    for family in config.measurement.families:
        require_family(family)
    return config


# --------------------------------------------------------------------------- stages


async def collect(config: PretrainConfig) -> None:
    """Fill the folders of demonstrations and pages that are not complete. Raises EnvironmentFault."""
    plan, settings = config.plan, config.collection
    made = {"episodes": settings.episodes, "disturbed": [settings.disturbed_episodes, settings.disturbed_steps]}
    if not is_collected(plan.collection, made):
        disturbance = Disturbance(settings.disturbed_episodes, settings.disturbed_steps)
        await _write(
            config,
            plan.collection,
            made,
            lambda pools, writer: collect_demonstrations(pools, writer, settings.episodes, disturbance=disturbance),
        )
    if not is_collected(plan.pages, {"pages": settings.pages}):
        await _write(
            config, plan.pages, {"pages": settings.pages}, lambda pools, writer: collect_pages(pools, writer, settings.pages)
        )


def is_collected(folder: Path, settings: Mapping[str, object]) -> bool:
    """True if the folder holds a complete collection made with these settings."""
    try:
        summary = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return summary.get("settings") == json.loads(json.dumps(settings))


def train(config: PretrainConfig) -> Path:
    """The folder of the policy that ships, trained now unless it is there already."""
    plan = config.plan
    shipped = plan.stage(config.joint.last_step)
    if shipped.exists():
        return shipped
    create_initial_policy(plan, config.vocabulary)
    return train_policy(plan, SystemClock)


async def measure(config: PretrainConfig) -> None:
    """Write success per stage, temperature and family, beside the rate of guessing, to the work folder."""
    settings = config.measurement
    guesses = MiniwobTasks().guess_rates()
    results: dict[str, Any] = {"guess_rate": {family: guesses.get(family) for family in settings.families}}
    for step in sorted({*settings.stages, config.joint.last_step}):
        for temperature in settings.temperatures:
            successes = await measure_policy(
                measurement_config(config),
                SystemClock(),
                policy=config.plan.stage(step),
                families=settings.families,
                episodes=settings.episodes,
                temperature=temperature,
            )
            mean = sum(successes.values()) / max(1, len(successes))
            results[f"step {step}, temperature {temperature:g}"] = {"mean": round(mean, 3), **successes}
            logger.info("measured step=%d temperature=%g success=%.3f %s", step, temperature, mean, json.dumps(successes))
    (config.work_dir / MEASUREMENTS_FILE).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def measurement_config(config: PretrainConfig) -> RunConfig:
    """Settings of environment, agent and engine while a policy is measured."""
    slots = config.collection.browsers * config.collection.slots
    return parse_config({"environment": {"slots": slots}, "rollout": {"max_batch": slots}, "agent": {"max_steps": 10}})


async def _write(
    config: PretrainConfig,
    folder: Path,
    settings: Mapping[str, object],
    collect_into: Callable[[Sequence[EnvironmentPool], CollectionWriter], Awaitable[Any]],
) -> None:
    clock = SystemClock()
    environment = parse_config({"environment": {"slots": config.collection.slots}})
    pools = [create_pool(environment, clock, init_scripts=(EXPERT_SCRIPT, PAGE_SCRIPT)) for _ in range(config.collection.browsers)]
    writer = CollectionWriter(folder)
    started = clock.now()
    try:
        for pool in pools:
            await pool.start()
        outcome = await collect_into(pools, writer)
        writer.finish(settings)
        seconds = clock.now() - started
        logger.info("collected folder=%s states=%d seconds=%.0f outcome=%s", folder, writer.count, seconds, outcome)
    finally:
        writer.close()
        for pool in pools:
            await pool.close()


def _merge(tree: dict[str, Any], override: Mapping[str, Any]) -> None:
    for key, value in override.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = value
