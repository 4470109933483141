"""Simulated tasks and environments: an episode needs a number of right steps in a row, and every operation takes its time."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from dartrl.errors import EnvironmentCrashed, EvaluatorFault
from dartrl.interfaces import Clock, ImageRef, Message
from dartrl.simulate.plan import Latency, SimulationPlan
from dartrl.testing.images import flat_png
from dartrl.types import Action, ActionKind, Observation, ParseError, Step, Task, Verdict

SCREEN = 28
"""Edge of the screen in pixels."""
RIGHT, WRONG = "right", "wrong"
"""The two replies that can be read."""

_SCREENS = tuple(flat_png(SCREEN, SCREEN, shade) for shade in range(64))
_ACTIONS = {RIGHT: (Action(ActionKind.CLICK, x=7.0, y=14.0),), WRONG: (Action(ActionKind.CLICK, x=21.0, y=14.0),)}
_UNREADABLE = ParseError("unknown_verb", "say right or wrong")


def make_tasks(plan: SimulationPlan) -> list[Task]:
    """Training instances of all families, from easy and short to hard and long."""
    tasks: list[Task] = []
    for number in range(plan.families):
        family = f"family-{number:02d}"
        share = number / max(1, plan.families - 1)
        spec = {"steps": round(6 + 22 * share), "hardness": round(0.02 + 0.1 * share, 4)}
        tasks += [Task(f"{family}/{seed}", family, seed, spec=spec) for seed in range(plan.instances)]
    return tasks


class SimulatedEnvironment:
    """One desktop of a runner."""

    def __init__(self, plan: SimulationPlan, clock: Clock, generator: random.Random) -> None:
        self._plan = plan
        self._clock = clock
        self._random = generator
        self._task: Task | None = None
        self._done = 0
        self._right = 0

    async def reset(self, task: Task) -> Observation:
        await self._operate("reset", self._plan.reset)
        self._task, self._done, self._right = task, 0, 0
        return self._observe()

    async def step(self, actions: Sequence[Action]) -> Observation:
        await self._operate("step", self._plan.step)
        self._done += 1
        self._right += actions == _ACTIONS[RIGHT]
        return self._observe()

    async def evaluate(self) -> Verdict:
        await self._operate("evaluate", self._plan.evaluate)
        if self._random.random() < self._plan.evaluator_fault_share:
            raise EvaluatorFault("simulated: no reference file")
        success = self._right >= self._wanted
        return Verdict(score=float(success), success=success, raw=float(success))

    async def close(self) -> None:
        self._task = None

    def versions(self) -> Mapping[str, str]:
        return {"renderer": "simulated"}

    @property
    def _wanted(self) -> int:
        assert self._task is not None, "reset comes first"
        return self._task.spec["steps"]

    def _observe(self) -> Observation:
        assert self._task is not None
        return Observation(
            screenshot=_SCREENS[self._done % len(_SCREENS)],
            width=SCREEN,
            height=SCREEN,
            instruction=f"hardness {self._task.spec['hardness']}",
            done=self._done >= self._wanted,
        )

    async def _operate(self, operation: str, latency: Latency) -> None:
        await self._clock.sleep(latency.draw(self._random))
        if self._random.random() < self._plan.environment_fault_share:
            raise EnvironmentCrashed(f"simulated: the desktop died in {operation}")


class SimulatedPool:
    """Desktops of one life of a runner."""

    def __init__(self, plan: SimulationPlan, clock: Clock, name: str) -> None:
        """name: differs between two lives, so that their randomness does."""
        self.size = plan.slots
        self._plan = plan
        self._clock = clock
        self._name = name
        self._num_built = 0
        self._slots: dict[int, SimulatedEnvironment] = {}

    async def start(self) -> None:
        """Nothing is shared."""

    async def acquire(self, slot: int, task: Task) -> SimulatedEnvironment:
        if slot not in self._slots:
            self._num_built += 1
            generator = random.Random(f"{self._plan.seed}/{self._name}/{slot}/{self._num_built}")
            self._slots[slot] = SimulatedEnvironment(self._plan, self._clock, generator)
        return self._slots[slot]

    async def discard(self, slot: int) -> None:
        self._slots.pop(slot, None)

    async def close(self) -> None:
        self._slots.clear()


class SimulatedDialect:
    """Two words."""

    name = "simulated"
    history_images = 1
    max_reply_tokens = 8

    def messages(
        self, instruction: str, steps: Sequence[Step], observation: Observation, image: ImageRef | None
    ) -> Sequence[Message]:
        assert image is not None, "simulated environments have screenshots"
        return (Message("user", (instruction, image)),)

    def parse(self, text: str, screen: tuple[int, int]) -> tuple[Action, ...] | ParseError:
        return _ACTIONS.get(text, _UNREADABLE)
