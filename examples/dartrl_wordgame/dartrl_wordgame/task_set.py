"""The games that are trained and evaluated. Evaluation uses other words, so that it measures the skill and not the words."""

from __future__ import annotations

import difflib
import random
from collections.abc import Sequence
from typing import Literal

from dartrl.errors import ConfigError
from dartrl.types import Task

SHAPES = {"echo": [1], "first": [2], "rounds": [2, 2]}
"""Family -> number of words shown in each round."""

TRAINING_WORDS = (
    *("Karla", "Bob", "Juan", "Maria", "Paul", "Anna", "Peter", "Omar", "Nina", "Rosa", "Leo", "Emma", "Ivan", "Vera"),
    *("Bruce", "Helen", "Donna", "Frank", "Agnes", "Simon", "dog", "moon", "river", "cloud", "apple", "house", "green"),
)
EVALUATION_WORDS = ("Hugo", "Lisa", "Clara", "Oscar", "Marta", "Felix", "cat", "tree", "stone", "bread", "blue", "table")

FIRST_EVALUATION_SEED = 1_000_000_000


class WordTasks:
    """Every family with as many instances as asked for; the entry point `dartrl.task_sets: wordgame`."""

    def tasks(self, families: Sequence[str], split: Literal["train", "evaluation"], count: int) -> Sequence[Task]:
        """`count` instances per family; equal arguments give equal tasks. Raises ConfigError for an unknown family."""
        first = 0 if split == "train" else FIRST_EVALUATION_SEED
        return [make_task(family, seed, split) for family in families for seed in range(first, first + count)]


def make_task(family: str, seed: int, split: Literal["train", "evaluation"]) -> Task:
    """The game that family and seed stand for."""
    if family not in SHAPES:
        nearest = difflib.get_close_matches(family, SHAPES, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise ConfigError(f"tasks.families names {family!r}; the word game has {', '.join(SHAPES)}{hint}")
    words = TRAINING_WORDS if split == "train" else EVALUATION_WORDS
    generator = random.Random(f"{family}/{seed}")
    rounds = [generator.sample(words, count) for count in SHAPES[family]]
    return Task(id=f"{family}/{seed}", family=family, seed=seed, split=split, spec={"rounds": rounds})
