"""Environments, task sets, dialects and rewards by their entry-point names.

A plug-in is a package that declares an entry point in one of the groups below; dartrl's own parts use the same door.
Looking a name up imports the plug-in's module and nothing else.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from dartrl.config import AgentConfig, RunConfig
from dartrl.errors import ConfigError
from dartrl.interfaces import Clock, Dialect, EnvironmentPool, Reward, TaskSet

ENVIRONMENTS = "dartrl.environments"
TASK_SETS = "dartrl.task_sets"
DIALECTS = "dartrl.dialects"
REWARDS = "dartrl.rewards"

OPTIONS = {
    ENVIRONMENTS: "environment.kind",
    TASK_SETS: "tasks.set",
    DIALECTS: "agent.dialect",
    REWARDS: "environment.reward",
}
"""Group -> the option whose value is looked up in it."""


def create_pool(config: RunConfig, clock: Clock) -> EnvironmentPool:
    """The environment slots of one runner. Raises ConfigError for an unknown `environment.kind`."""
    factory = cast(Callable[[RunConfig, Clock], EnvironmentPool], load(ENVIRONMENTS, config.environment.kind))
    return factory(config, clock)


def create_task_set(name: str) -> TaskSet:
    """The task set of that name. Raises ConfigError if it is unknown."""
    factory = cast(Callable[[], TaskSet], load(TASK_SETS, name))
    return factory()


def create_dialect(config: AgentConfig) -> Dialect:
    """The dialect of `agent.dialect`. Raises ConfigError if it is unknown."""
    factory = cast(Callable[[AgentConfig], Dialect], load(DIALECTS, config.dialect))
    return factory(config)


def load_reward(name: str) -> Reward | None:
    """The reward of that name, or None for `environment`, which keeps the environment's own verdict."""
    if name == "environment":
        return None
    return cast(Reward, load(REWARDS, name))


def load(group: str, name: str, found: Iterable[EntryPoint] | None = None) -> Any:
    """The object behind an entry point.

    found: the entry points to look in; those installed for the group if None.
    Raises ConfigError that names the option, the nearest and all installed names.
    """
    candidates = {entry.name: entry for entry in (entry_points(group=group) if found is None else found)}
    entry = candidates.get(name)
    if entry is None:
        raise ConfigError(_unknown(group, name, sorted(candidates)))
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{OPTIONS[group]} is {name!r}, but its plug-in {entry.value} cannot be imported: {error}") from error


def _unknown(group: str, name: str, installed: list[str]) -> str:
    choices = ["environment", *installed] if group == REWARDS else installed
    nearest = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    known = ", ".join(choices) or "none"
    return f"{OPTIONS[group]} is {name!r}, which is not installed{hint} (installed: {known}; plug-ins use the group {group})"
