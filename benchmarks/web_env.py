"""Steps per second of the web environment against `miniwob` with selenium, in turn in the same run.

    pip install 'dartrl[bench]'; apt-get install chromium chromium-driver chromium-headless-shell
    python benchmarks/web_env.py [--seconds 4] [--rounds 3] [--json FILE]

Every side clicks at the same random points of the same task, takes a lossless picture after every click, and begins the
next episode when one ends. A step is one action with its picture and the episode's state. Resets are timed apart and
counted in the figures called `with resets`. Rounds alternate between the sides; the median round counts. What the two
sides do beside that differs: selenium also returns the page's elements, and ours waits until two frames are equal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from dartrl.config import parse_config
from dartrl.envs.slots import SlotPool
from dartrl.envs.web.miniwob import create_pool
from dartrl.launch.system_clock import SystemClock
from dartrl.types import Action, ActionKind, Task

SLOTS = 8
TARGET_STEPS_PER_SECOND = 150
TARGET_RATIO = 10
WARM_UP_STEPS = 20


@dataclass
class Measurement:
    """One round of one side."""

    steps: list[float] = field(default_factory=list)
    """Seconds of each step."""
    resets: list[float] = field(default_factory=list)
    """Seconds of each reset."""
    wall_seconds: float = 0.0
    """Of the whole round."""
    cpu_seconds: float = 0.0
    """Of this process and all its children."""

    def rates(self, slots: int = 1) -> dict[str, float]:
        """Figures of the round; `slots` sides ran at once."""
        if not self.steps:
            sys.exit("no step finished within a round: the machine is too busy to measure; raise --seconds")
        return {
            "steps_per_second": slots * len(self.steps) / sum(self.steps),
            "steps_per_second_with_resets": len(self.steps) / self.wall_seconds,
            "step_p50_ms": 1e3 * statistics.median(self.steps),
            "step_p95_ms": 1e3 * sorted(self.steps)[int(0.95 * len(self.steps))],
            "reset_p50_ms": 1e3 * statistics.median(self.resets) if self.resets else 0.0,
            "cpu_ms_per_step": 1e3 * self.cpu_seconds / len(self.steps),
        }


def points(seed: int) -> random.Random:
    """Source of the points that both sides click at."""
    return random.Random(f"clicks {seed}")


def cpu_seconds() -> float:
    """CPU time of this process and its running descendants."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


async def play_slot(pool: SlotPool, slot: int, family: str, until: float, result: Measurement) -> None:
    """Random clicks in one slot until that moment of `time.perf_counter`."""
    rng = points(slot)
    seed = 1000 * slot
    environment = await pool.acquire(slot, Task(family, family, seed))
    observation = None
    while time.perf_counter() < until:
        started = time.perf_counter()
        if observation is None or observation.done:
            seed += 1
            observation = await environment.reset(Task(f"{family}/{seed}", family, seed))
            result.resets.append(time.perf_counter() - started)
            continue
        action = Action(ActionKind.CLICK, x=rng.randrange(160), y=rng.randrange(50, 210))
        observation = await environment.step([action])
        result.steps.append(time.perf_counter() - started)
        assert observation.screenshot


async def measure_ours(pool: SlotPool, slots: int, family: str, seconds: float) -> Measurement:
    """A round with that many slots at once, all in one browser."""
    await asyncio.gather(*(play_slot(pool, slot, family, time.perf_counter() + 0.5, Measurement()) for slot in range(slots)))
    result = Measurement()
    started, cpu = time.perf_counter(), cpu_seconds()
    await asyncio.gather(*(play_slot(pool, slot, family, started + seconds, result) for slot in range(slots)))
    result.wall_seconds, result.cpu_seconds = time.perf_counter() - started, cpu_seconds() - cpu
    return result


class SeleniumSide:
    """The gym environment of the `miniwob` package, as it comes."""

    def __init__(self, family: str) -> None:
        chromium, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
        if chromium is None or driver is None:
            sys.exit("chromium or chromedriver is missing; install them with `apt-get install chromium chromium-driver`")
        os.environ.update(MINIWOB_CHROME_BINARY=chromium, MINIWOB_CHROMEDRIVER=driver)
        try:
            import gymnasium
            import miniwob
            import selenium  # noqa: F401 - named here so that its absence is told apart
        except ImportError as error:
            sys.exit(f"{error.name} is missing; install it with `pip install 'dartrl[bench]'`")
        gymnasium.register_envs(miniwob)
        self._environment = gymnasium.make(f"miniwob/{family}-v1", render_mode=None)

    def measure(self, seconds: float) -> Measurement:
        """A round with one environment."""
        rng = points(0)
        self._play(rng, WARM_UP_STEPS, float("inf"), Measurement())
        result = Measurement()
        started, cpu = time.perf_counter(), cpu_seconds()
        self._play(rng, sys.maxsize, started + seconds, result)
        result.wall_seconds, result.cpu_seconds = time.perf_counter() - started, cpu_seconds() - cpu
        return result

    def _play(self, rng: random.Random, steps: int, until: float, result: Measurement) -> None:
        seed, is_done = 0, True
        while len(result.steps) < steps and time.perf_counter() < until:
            started = time.perf_counter()
            if is_done:
                seed += 1
                self._environment.reset(seed=seed)
                is_done = False
                result.resets.append(time.perf_counter() - started)
                continue
            coordinates = np.array([rng.randrange(160), rng.randrange(50, 210)], dtype=np.float32)
            action = self._environment.unwrapped.create_action("CLICK_COORDS", coords=coordinates)
            observation, _, terminated, truncated, _ = self._environment.step(action)
            assert observation["screenshot"].size
            is_done = terminated or truncated
            result.steps.append(time.perf_counter() - started)

    def close(self) -> None:
        self._environment.close()


async def run_rounds(family: str, seconds: float, rounds: int) -> dict[str, Any]:
    """Median figures of all sides."""
    pool = create_pool(parse_config({"environment": {"slots": SLOTS}}), SystemClock())
    assert isinstance(pool, SlotPool)
    await pool.start()
    found: dict[str, list[dict[str, float]]] = {"ours": [], "ours_8_slots": [], "selenium": []}
    selenium = SeleniumSide(family)
    try:
        for _ in range(rounds):
            found["ours"].append((await measure_ours(pool, 1, family, seconds)).rates())
            found["selenium"].append(selenium.measure(seconds).rates())
            found["ours_8_slots"].append((await measure_ours(pool, SLOTS, family, seconds)).rates(SLOTS))
        versions = dict((await pool.acquire(0, Task(family, family, 1))).versions())
    finally:
        selenium.close()
        await pool.close()
    sides = {
        name: {key: statistics.median(round_[key] for round_ in rounds_) for key in rounds_[0]} for name, rounds_ in found.items()
    }
    return {
        "steps_per_second": sides["ours"]["steps_per_second"],
        "steps_per_second_8_slots": sides["ours_8_slots"]["steps_per_second"],
        "ratio_to_selenium": sides["ours"]["steps_per_second"] / sides["selenium"]["steps_per_second"],
        "ratio_to_selenium_with_resets": sides["ours"]["steps_per_second_with_resets"]
        / sides["selenium"]["steps_per_second_with_resets"],
        "cpu_ms_per_step": sides["ours"]["cpu_ms_per_step"],
        "task": family,
        "load_average": os.getloadavg()[0],
        "versions": versions,
        "sides": sides,
    }


def print_table(figures: dict[str, Any]) -> None:
    """The figures for a person."""
    columns = ("steps/s", "with resets", "step p50 ms", "step p95 ms", "reset p50 ms", "CPU ms/step")
    print(f"{figures['task']}, load average {figures['load_average']:.1f}, {figures['versions']['browser']}")
    print(f"{'':14}" + "".join(f"{column:>14}" for column in columns))
    for name, side in figures["sides"].items():
        print(f"{name:14}" + "".join(f"{value:14.1f}" for value in side.values()))
    rate, ratio = figures["steps_per_second"], figures["ratio_to_selenium"]
    print(f"steps per second {rate:.0f} (target {TARGET_STEPS_PER_SECOND}), ratio to selenium {ratio:.1f} (target {TARGET_RATIO})")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="click-button", help="task family")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of one round of one side")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each side")
    parser.add_argument("--json", type=Path, help="file that receives the figures")
    options = parser.parse_args(arguments)
    figures = asyncio.run(run_rounds(options.task, options.seconds, options.rounds))
    print_table(figures)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
