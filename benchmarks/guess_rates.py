"""Success rate of guessing, per task family: what a policy scores that sees the kind of thing to do, but not which.

    .venv/bin/python benchmarks/guess_rates.py --episodes 200 [--write] [--json FILE] [FAMILY ...]

A click goes to a random element of the kind that the expert would click (any element where no expert plays the family), a drag
starts right and ends anywhere, and typed text is a random word of the instruction. `--write` stores the rates with the task set.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from dartrl.agent.demonstration import Element, ExpertAction
from dartrl.config import EnvironmentConfig, RunConfig, load_recipe
from dartrl.envs.web.demonstrations import acquire
from dartrl.envs.web.experts import EXPERT_SCRIPT, FAMILIES, look
from dartrl.envs.web.miniwob import HEIGHT, WIDTH, MiniwobEnvironment, create_pool
from dartrl.envs.web.task_set import GUESS_RATES
from dartrl.errors import EnvironmentFault
from dartrl.interfaces import EnvironmentPool
from dartrl.launch.system_clock import SystemClock
from dartrl.types import Action, ActionKind, Task

FIRST_SEED = 50_000_000
"""Seeds of these episodes, outside those of training and evaluation."""
MOST_STEPS = 8
"""Actions of an episode."""
ROOT = Path(__file__).resolve().parent.parent


def guess(expert: ExpertAction | None, elements: tuple[Element, ...], instruction: str, random: np.random.Generator) -> Action:
    """An action of the right kind at a random place."""
    if expert is not None and expert.kind is ActionKind.TYPE:
        words = instruction.split() or ["a"]
        return Action(ActionKind.TYPE, text=words[int(random.integers(len(words)))].strip('".,'))
    if expert is not None and expert.kind is not ActionKind.CLICK:
        start = expert.at_centers()
        return Action(
            expert.kind, x=start.x, y=start.y, to_x=float(random.integers(WIDTH)), to_y=float(random.integers(52, HEIGHT)),
            direction=start.direction,
        )  # fmt: skip
    candidates = [element for element in elements if element.kind != "word"] or list(elements)
    if expert is not None and expert.box is not None:
        same = [element for element in elements if element.kind == kind_of(expert, elements)]
        candidates = same or candidates
    if not candidates:
        return Action(ActionKind.CLICK, x=float(random.integers(WIDTH)), y=float(random.integers(52, HEIGHT)))
    left, top, width, height = candidates[int(random.integers(len(candidates)))].box
    return Action(ActionKind.CLICK, x=left + width / 2, y=top + height / 2)


def kind_of(expert: ExpertAction, elements: tuple[Element, ...]) -> str:
    """Kind of the smallest element around the expert's target."""
    target = expert.at_centers()
    around = [element for element in elements if holds(element, target)]
    return min(around, key=lambda element: element.box[2] * element.box[3]).kind if around else ""


def holds(element: Element, point: Action) -> bool:
    """True if the point lies inside the element."""
    left, top, width, height = element.box
    return point.x is not None and point.y is not None and left <= point.x <= left + width and top <= point.y <= top + height


async def play(environment: MiniwobEnvironment, task: Task) -> bool:
    """True if guessing solved the episode."""
    random = np.random.default_rng([task.seed, *task.family.encode()])
    observation = await environment.reset(task)
    for _ in range(MOST_STEPS):
        if observation.done:
            break
        if task.family in FAMILIES:
            expert, elements = await look(environment, task.family, observation.instruction)
        else:
            _, elements = await look(environment, FAMILIES[0], observation.instruction)
            expert = None
        observation = await environment.step([guess(expert, elements, observation.instruction, random)])
    return (await environment.evaluate()).success


async def play_surely(pool: EnvironmentPool, slot: int, task: Task) -> bool:
    """As `play`, again on a fresh environment after a fault, up to five times."""
    for _ in range(5):
        try:
            return await play(await acquire(pool, slot, task), task)
        except EnvironmentFault as fault:
            print(f"{task.id}: {fault}; trying again", file=sys.stderr)
            await pool.discard(slot)
    raise SystemExit(f"{task.id} broke its environment five times")


async def measure(families: list[str], episodes: int, note: Callable[[str, float], None]) -> None:
    """Plays all families, one after another; `note` is told the share of solved episodes of each when it is known."""
    config = RunConfig(environment=EnvironmentConfig(slots=4))
    pool = create_pool(config, SystemClock(), init_scripts=(EXPERT_SCRIPT,))
    await pool.start()
    try:
        for family in families:
            seeds = iter(range(FIRST_SEED, FIRST_SEED + episodes))
            async with asyncio.TaskGroup() as tasks:
                counts = [tasks.create_task(count_wins(pool, slot, family, seeds)) for slot in range(pool.size)]
            note(family, sum(count.result() for count in counts) / episodes)
    finally:
        await pool.close()


async def count_wins(pool: EnvironmentPool, slot: int, family: str, seeds: Iterator[int]) -> int:
    """Episodes that one slot solved, taking seeds until there are none left."""
    wins = 0
    for seed in seeds:
        wins += await play_surely(pool, slot, Task(id=f"{family}/{seed}", family=family, seed=seed))
    return wins


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="those of the demo and of all experts, if none is named")
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    demo = load_recipe(ROOT / "recipes" / "miniwob-tiny-cpu.toml").tasks.families
    families = arguments.families or sorted({*demo, *FAMILIES})
    rates: dict[str, float] = {}

    def note(family: str, rate: float) -> None:
        rates[family] = rate
        print(f"{family:28} {rate:.3f}", flush=True)
        if arguments.write:
            known = json.loads(GUESS_RATES.read_text(encoding="utf-8"))
            GUESS_RATES.write_text(json.dumps(dict(sorted({**known, family: rate}.items())), indent=1) + "\n", encoding="utf-8")

    asyncio.run(measure(families, arguments.episodes, note))
    if arguments.json:
        arguments.json.write_text(json.dumps(rates, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
