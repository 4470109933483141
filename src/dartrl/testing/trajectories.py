"""Whole trajectories for tests of whoever stores or trains on them."""

from __future__ import annotations

import numpy as np

from dartrl.interfaces import BlobStore
from dartrl.records import Assignment
from dartrl.testing.images import flat_png
from dartrl.types import SCORED_ENDS, Action, ActionKind, End, Generation, Outcome, ParseError, Step, Trajectory


def make_generation(
    *, image: str | None = None, version: int = 1, tokens: int = 4, seed: int = 0, request_id: str = "q"
) -> Generation:
    """A reply of `tokens` tokens; equal arguments give equal arrays."""
    numbers = np.random.default_rng(seed)
    return Generation(
        text="click",
        prompt_ids=numbers.integers(0, 100, 7).astype(np.int32),
        response_ids=numbers.integers(0, 100, tokens).astype(np.int32),
        behaviour_logprobs=-numbers.random(tokens).astype(np.float32),
        entropies=numbers.random(tokens).astype(np.float32),
        finish_reason="stop",
        image_hashes=(image,) if image else (),
        image_grids=((1, 2, 4),) if image else (),
        fingerprint="fake",
        temperature=1.0,
        banned_ids=(3,),
        compute_dtype="float32",
        weights_version=version,
        worker="worker-0",
        request_id=request_id,
        seconds=0.25,
    )


def make_trajectory(
    assignment: Assignment,
    blobs: BlobStore,
    *,
    score: float = 0.0,
    end: End = End.TERMINATED,
    num_steps: int = 2,
    version: int = 1,
    started_at: float = 0.0,
) -> Trajectory:
    """What a runner would record for the assignment, with its screenshots stored; score 1 is a success."""
    image = blobs.put(flat_png(56, 28, shade=assignment.slot % 250))
    steps = tuple(
        Step(
            index=index,
            screenshot=image,
            screen=(56, 28),
            observation_text="",
            generation=make_generation(
                image=image,
                version=version,
                seed=assignment.sampling_seed % 1000 + index,
                request_id=f"{assignment.trajectory_id}.{index}",
            ),
            actions=() if index == 1 else (Action(ActionKind.CLICK, x=0.0, y=12.5),),
            parse_error=ParseError("no_action", "say an action", 0, 3) if index == 1 else None,
            environment_seconds=0.01,
            started_at=started_at + index,
        )
        for index in range(num_steps)
    )
    if end in SCORED_ENDS:
        outcome = Outcome(end, "environment", score=score, success=score == 1.0, raw=score)
    else:
        outcome = Outcome(end, "crash", detail="it broke")
    return Trajectory(
        id=assignment.trajectory_id,
        task=assignment.task,
        instruction="click on the left",
        steps=steps,
        outcome=outcome,
        started_at=started_at,
        finished_at=started_at + num_steps,
        environment={"renderer": "fake 1"},
    )
