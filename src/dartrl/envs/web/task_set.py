"""The MiniWoB++ tasks: all pages of the installed package, with disjoint seeds for training and evaluation."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from dartrl.envs.web.versions import page_folder
from dartrl.errors import ConfigError
from dartrl.types import Task

SEEDS = {"train": range(0, 1_000_000), "evaluation": range(10_000_000, 10_100_000)}
"""Seeds of each split. They share none, and neither is ever changed: results depend on them."""


GUESS_RATES = Path(__file__).with_name("guess_rates.json")
"""Family -> success rate of guessing, measured by benchmarks/guess_rates.py."""


class MiniwobTasks:
    """Implements TaskSet."""

    def families(self) -> Sequence[str]:
        """Names of all families, sorted."""
        return family_names()

    def guess_rates(self) -> dict[str, float]:
        """Success rate of guessing an element of the right kind, for the families where it was measured."""
        return json.loads(GUESS_RATES.read_text(encoding="utf-8"))

    def tasks(self, families: Sequence[str], split: Literal["train", "evaluation"], count: int) -> Sequence[Task]:
        """The first `count` instances of each family. Raises ConfigError for an unknown family or too many instances."""
        seeds = SEEDS[split]
        if not 0 <= count <= len(seeds):
            raise ConfigError(f"{count} {split} instances asked for; a family has 0 to {len(seeds)}")
        for family in families:
            require_family(family)
        return tuple(
            Task(id=f"{family}/{seed}", family=family, seed=seed, split=split) for family in families for seed in seeds[:count]
        )


@cache
def family_names() -> tuple[str, ...]:
    """Names of all pages, sorted."""
    return tuple(sorted(file.stem for file in (page_folder() / "miniwob").glob("*.html")))


def require_family(family: str) -> None:
    """Raises ConfigError, naming the nearest family, if there is no such page."""
    if family not in family_names():
        nearest = difflib.get_close_matches(family, family_names(), n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise ConfigError(f"task family {family!r} is not one of the {len(family_names())} MiniWoB++ pages{hint}")
