"""Collecting demonstrations: expert episodes in the real browser, some of them disturbed, and synthetic pages.

An episode is kept only if the page rewards it in full, so that a label that the page disagrees with never becomes a
training example. Disturbances come before the expert's action and never press a button, so what is kept shows how to go on
from states that a policy reaches by mistake.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TextIO, cast

import numpy as np
from numpy.random import Generator as Random
from PIL import Image

from dartrl.agent.demonstration import (
    SCREENS_FILE,
    STATES_FILE,
    SUMMARY_FILE,
    Box,
    DemonstratedState,
    Element,
    ExpertAction,
    is_inside,
    state_to_json,
)
from dartrl.envs.web.experts import look, rebuild_page, require_expert
from dartrl.envs.web.miniwob import HEIGHT, WIDTH, MiniwobEnvironment
from dartrl.errors import EnvironmentFault
from dartrl.interfaces import EnvironmentPool
from dartrl.types import Action, ActionKind, Task

logger = logging.getLogger(__name__)

FIRST_SEED = 20_000_000
"""Seeds of demonstrations lie beyond those of training and evaluation instances."""

HOST_FAMILY = "click-test"
"""Family whose page is rebuilt into synthetic pages."""

SYNTHETIC = "synthetic"
"""Name of the generator of synthetic pages in the states."""

MAX_STEPS = 14
"""Longest episode; an expert needs at most ten steps without disturbances."""

GRID = 4
"""Actions are carried out at multiples of this many pixels, as policies are taught."""

JITTER = 5
"""The expert's clicks miss the centre by up to this many pixels, so that histories look like a policy's."""

MAX_FAULTS = 20
"""Environment faults after which collecting gives up."""

BLANK_AREA: Box = (8.0, 60.0, 148.0, 140.0)
"""Where disturbances click beside all elements."""


@dataclass(frozen=True, slots=True)
class Disturbance:
    """How often the expert is disturbed."""

    episode_share: float
    """Share of the episodes with disturbances."""
    step_share: float
    """Share of the steps in such an episode."""


@dataclass(slots=True)
class CollectionCounts:
    """What came of a family's episodes."""

    episodes: int = 0
    """Played."""
    kept: int = 0
    """Fully rewarded, their states written."""
    states: int = 0
    """Written."""


class CollectionWriter:
    """Appends states to a folder; `finish` marks it as complete."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        (folder / SUMMARY_FILE).unlink(missing_ok=True)
        self._states: TextIO = (folder / STATES_FILE).open("w", encoding="utf-8")
        self._screens: BinaryIO = (folder / SCREENS_FILE).open("wb")
        self.count = 0

    def add(self, state: DemonstratedState, png: bytes) -> None:
        """Append one state with its screen."""
        with Image.open(io.BytesIO(png), formats=("PNG",)) as image:
            pixels_HWC = np.asarray(image.convert("RGB"), dtype=np.uint8)
        if pixels_HWC.shape != (HEIGHT, WIDTH, 3):
            raise EnvironmentFault(f"screen of {state.family}/{state.seed} has shape {pixels_HWC.shape}", "display")
        self._screens.write(pixels_HWC.tobytes())
        self._states.write(json.dumps(state_to_json(state), ensure_ascii=False) + "\n")
        self.count += 1

    def finish(self, settings: Mapping[str, object]) -> None:
        """Close the files and record how the collection was made."""
        self.close()
        summary = {"states": self.count, "height": HEIGHT, "width": WIDTH, "settings": dict(settings)}
        (self._folder / SUMMARY_FILE).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")

    def close(self) -> None:
        """Close the files; what was written stays, but counts as incomplete without `finish`."""
        self._states.close()
        self._screens.close()


# --------------------------------------------------------------------------- pages with a task


async def collect_demonstrations(
    pools: Sequence[EnvironmentPool], writer: CollectionWriter, episodes: Mapping[str, int], *, disturbance: Disturbance
) -> dict[str, CollectionCounts]:
    """Play and write that many episodes per family; what was kept of each.

    pools: started, made with `EXPERT_SCRIPT` as init script. Families are spread over the slots; every episode is a function
    of its family and seed alone. Raises ConfigError for a family without expert, EnvironmentFault after many faults.
    """
    for family in episodes:
        require_expert(family)
    counts = {family: CollectionCounts() for family in episodes}
    jobs = [(family, FIRST_SEED + index) for family, number in episodes.items() for index in range(number)]
    waiting = iter(jobs)  # one family after another, so that a slot seldom changes the page
    faults = 0

    async def work(pool: EnvironmentPool, slot: int) -> None:
        nonlocal faults
        for family, seed in waiting:
            task = Task(id=f"{family}/{seed}", family=family, seed=seed)
            try:
                states = await demonstrate(await acquire(pool, slot, task), task, disturbance)
            except EnvironmentFault as error:
                faults += 1
                logger.warning("demonstration lost task=%s faults=%d error=%s", task.id, faults, error)
                if faults > MAX_FAULTS:
                    raise
                await pool.discard(slot)
                continue
            count = counts[family]
            count.episodes += 1
            if states:
                count.kept += 1
                count.states += len(states)
                for state, png in states:
                    writer.add(state, png)

    async with asyncio.TaskGroup() as group:
        for pool in pools:
            for slot in range(pool.size):
                group.create_task(work(pool, slot))
    return counts


async def demonstrate(
    environment: MiniwobEnvironment, task: Task, disturbance: Disturbance
) -> list[tuple[DemonstratedState, bytes]]:
    """States and screens of one expert episode; none if the page does not reward it in full. Raises EnvironmentFault."""
    random = np.random.default_rng([task.seed, *task.family.encode()])
    is_disturbed = random.random() < disturbance.episode_share
    states: list[tuple[DemonstratedState, bytes]] = []
    history: list[Action] = []
    observation = await environment.reset(task)
    while not observation.done and len(history) < MAX_STEPS:
        expert, elements = await look(environment, task.family, observation.instruction)
        if expert is None or observation.screenshot is None:
            return []
        state = DemonstratedState(task.family, task.seed, len(history), observation.instruction, tuple(history), expert, elements)
        states.append((state, observation.screenshot))
        disturbing = disturb(expert, elements, random) if is_disturbed and random.random() < disturbance.step_share else None
        history.append(disturbing or carry_out(expert, random))
        observation = await environment.step([history[-1]])
    return states if (await environment.evaluate()).success else []


def carry_out(expert: ExpertAction, random: Random) -> Action:
    """The expert's action as a policy would do it: on the grid, clicks a little off the centre."""
    action = expert.at_centers(GRID)
    if expert.kind is not ActionKind.CLICK or expert.box is None or action.x is None or action.y is None:
        return action
    shifted = [value + float(random.integers(-JITTER, JITTER + 1)) for value in (action.x, action.y)]
    x, y = (float(round(value / GRID) * GRID) for value in shifted)
    left, top, width, height = expert.box
    inner = (left + 2, top + 2, width - 4, height - 4)
    return Action(action.kind, x=x, y=y) if is_inside(x, y, inner) else action


def disturb(expert: ExpertAction, elements: Sequence[Element], random: Random) -> Action | None:
    """A harmless mistake: another field, a blank place, or a drag to somewhere else; None if there is no harmless one."""
    if expert.kind is ActionKind.DRAG:
        start = expert.at_centers(GRID)
        to_x, to_y = _random_point(random)
        return Action(ActionKind.DRAG, x=start.x, y=start.y, to_x=to_x, to_y=to_y)
    fields = [element for element in elements if element.kind in ("input", "textarea")]
    if fields and random.random() < 0.75:
        left, top, width, height = fields[int(random.integers(len(fields)))].box
        return Action(ActionKind.CLICK, x=float(round(left + width / 2)), y=float(round(top + height / 2)))
    x, y = _random_point(random)
    is_blank = not any(is_inside(x, y, element.box) for element in elements)
    return Action(ActionKind.CLICK, x=x, y=y) if is_blank and not (fields and expert.kind is ActionKind.TYPE) else None


# --------------------------------------------------------------------------- pages without a task


async def collect_pages(pools: Sequence[EnvironmentPool], writer: CollectionWriter, count: int) -> int:
    """Write `count` synthetic pages; returns the number of pages with something to point at, which are the ones written."""
    seeds = iter(range(FIRST_SEED, FIRST_SEED + count))
    written = 0

    async def work(pool: EnvironmentPool, slot: int) -> None:
        nonlocal written
        task = Task(id=f"{SYNTHETIC}/{slot}", family=HOST_FAMILY, seed=FIRST_SEED + slot)
        environment = await acquire(pool, slot, task)
        await environment.reset(task)
        for seed in seeds:
            png, elements = await rebuild_page(environment, seed)
            if elements:
                writer.add(DemonstratedState(SYNTHETIC, seed, 0, "", (), None, elements), png)
                written += 1

    async with asyncio.TaskGroup() as group:
        for pool in pools:
            for slot in range(pool.size):
                group.create_task(work(pool, slot))
    return written


async def acquire(pool: EnvironmentPool, slot: int, task: Task) -> MiniwobEnvironment:
    """The slot's environment, known to be a MiniWoB++ one."""
    return cast(MiniwobEnvironment, await pool.acquire(slot, task))


def _random_point(random: Random) -> tuple[float, float]:
    left, top, width, height = BLANK_AREA
    x, y = left + random.random() * width, top + random.random() * height
    return float(round(x / GRID) * GRID), float(round(y / GRID) * GRID)
