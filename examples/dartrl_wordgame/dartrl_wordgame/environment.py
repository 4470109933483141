"""The game: in each round some words are shown, and the player has to say the first of them.

It has no screen, so observations carry text alone. A task's spec holds the rounds: `{"rounds": [["Karla", "Bob"], ...]}`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dartrl.config import RunConfig
from dartrl.interfaces import Clock
from dartrl.types import Action, ActionKind, Observation, Task, Verdict

INSTRUCTION = "Say the first word that is shown."


class WordGame:
    """One game at a time; owns no resources."""

    def __init__(self) -> None:
        self._rounds: list[list[str]] = []
        self._said: list[str] = []

    async def reset(self, task: Task) -> Observation:
        """The first round's words."""
        self._rounds = task.spec["rounds"]
        self._said = []
        return self._observe()

    async def step(self, actions: Sequence[Action]) -> Observation:
        """The next round's words. Typed text is an answer; anything else passes the round."""
        for action in actions[: len(self._rounds) - len(self._said)]:
            self._said.append(action.text if action.kind is ActionKind.TYPE else "")
        return self._observe()

    async def evaluate(self) -> Verdict:
        """Share of rounds won; success if all are."""
        won = sum(said == words[0] for said, words in zip(self._said, self._rounds, strict=False))
        return Verdict(score=won / len(self._rounds), success=won == len(self._rounds), raw=float(won))

    async def close(self) -> None:
        """Nothing to release."""

    def versions(self) -> Mapping[str, str]:
        """The rules of the game."""
        return {"wordgame": "1"}

    def _observe(self) -> Observation:
        done = len(self._said) >= len(self._rounds)
        words = [] if done else self._rounds[len(self._said)]
        return Observation(text=" ".join(f'"{word}"' for word in words), instruction=INSTRUCTION, done=done)


class WordGamePool:
    """A game for each slot."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._games: dict[int, WordGame] = {}

    async def start(self) -> None:
        """Nothing is shared."""

    async def acquire(self, slot: int, task: Task) -> WordGame:
        """The slot's game, set up if there is none."""
        return self._games.setdefault(slot, WordGame())

    async def discard(self, slot: int) -> None:
        """Forget the slot's game."""
        self._games.pop(slot, None)

    async def close(self) -> None:
        """Forget all games."""
        self._games.clear()


def create_pool(config: RunConfig, clock: Clock) -> WordGamePool:
    """The pool of one runner process; the entry point `dartrl.environments: wordgame`."""
    return WordGamePool(config.environment.slots)
