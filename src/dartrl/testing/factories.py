"""Short ways to make valid records."""

from __future__ import annotations

from typing import Any

from dartrl.records import Assignment, Lease
from dartrl.types import Task


def make_task(family: str = "click-left", seed: int = 0, **spec: Any) -> Task:
    """A training instance of the clicking world of `dartrl.testing.fakes`."""
    return Task(id=f"{family}/{seed}", family=family, seed=seed, spec=spec)


def make_assignment(task: Task | None = None, *, trajectory_id: str = "t-0", max_steps: int = 10) -> Assignment:
    """A training assignment with a lease that never expires."""
    return Assignment(
        trajectory_id=trajectory_id,
        group_id="g-0",
        slot=0,
        attempt=0,
        task=task or make_task(),
        max_steps=max_steps,
        temperature=1.0,
        sampling_seed=17,
        purpose="train",
        lease=Lease(f"trajectory:{trajectory_id}", "runner", 1, float("inf")),
    )
