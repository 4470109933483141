"""Trajectories survive their way through rows and a blob, bit for bit."""

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dartrl.data.encoding import decode_trajectory, encode_arrays, encode_step
from dartrl.errors import BlobCorrupt, LedgerConflict
from dartrl.types import Action, ActionKind, End, Generation, Outcome, ParseError, Step, Task, Trajectory

numbers = st.floats(-1e4, 1e4) | st.integers(-5, 5).map(float)
actions = st.builds(
    Action,
    kind=st.sampled_from(list(ActionKind)),
    x=st.none() | numbers,
    y=st.none() | numbers,
    to_x=st.none() | numbers,
    to_y=st.none() | numbers,
    direction=st.sampled_from([None, "up", "down", "left", "right"]),
    text=st.text(max_size=20),
    keys=st.lists(st.sampled_from(["ctrl", "c", "enter"]), max_size=3).map(tuple),
    clamped=st.booleans(),
)


@st.composite
def generations(draw):
    tokens = draw(st.integers(0, 5))
    prompt = draw(st.lists(st.integers(0, 2**31 - 1), max_size=6))
    images = draw(st.integers(0, 3))
    floats = st.lists(st.floats(-50, 0, width=32), min_size=tokens, max_size=tokens)
    return Generation(
        text=draw(st.text(max_size=20)),
        prompt_ids=np.asarray(prompt, dtype=np.int32),
        response_ids=np.asarray(draw(st.lists(st.integers(0, 999), min_size=tokens, max_size=tokens)), dtype=np.int32),
        behaviour_logprobs=np.asarray(draw(floats), dtype=np.float32),
        entropies=draw(st.none() | floats.map(lambda values: np.asarray(values, dtype=np.float32))),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        image_hashes=tuple(f"{number:064x}" for number in range(images)),
        image_grids=tuple((1, 2 + number, 4) for number in range(images)),
        fingerprint="f",
        temperature=draw(st.floats(0, 2)),
        banned_ids=tuple(draw(st.lists(st.integers(0, 99), max_size=3))),
        compute_dtype="bfloat16",
        weights_version=draw(st.integers(1, 99)),
        worker="w",
        request_id="q",
        seconds=0.5,
    )


@st.composite
def trajectories(draw):
    steps = tuple(
        Step(
            index=index,
            screenshot=draw(st.none() | st.just("a" * 64)),
            screen=(draw(st.integers(0, 2000)), 28),
            observation_text=draw(st.text(max_size=20)),
            generation=draw(generations()),
            actions=tuple(draw(st.lists(actions, max_size=2))),
            parse_error=draw(
                st.none() | st.builds(ParseError, st.sampled_from(["bad_box"]), st.text(max_size=9), st.integers(0, 9))
            ),
            environment_seconds=0.25,
            started_at=float(index),
        )
        for index in range(draw(st.integers(0, 3)))
    )
    return Trajectory(
        "t", Task("f/1", "f", 1), "do it", steps, Outcome(End.TRUNCATED, "steps", 0.5, False, -0.25), 1.0, 2.0, {"a": "b"}
    )


def row_of(trajectory):
    outcome = trajectory.outcome
    return {
        "trajectory_id": trajectory.id,
        "instruction": trajectory.instruction,
        "full_instruction": "",
        "state": str(outcome.end),
        "reason": outcome.reason,
        "reward": outcome.score,
        "success": outcome.success,
        "raw": outcome.raw,
        "detail": outcome.detail,
        "started_at": trajectory.started_at,
        "finished_at": trajectory.finished_at,
        "environment": trajectory.environment,
    }


def through_json(rows):
    return orjson.loads(orjson.dumps(rows))


@settings(max_examples=60, deadline=None)
@given(trajectory=trajectories())
def test_a_trajectory_survives_rows_and_blob(trajectory):
    rows = through_json([encode_step("r", trajectory.id, step) for step in trajectory.steps])
    found = decode_trajectory(row_of(trajectory), rows, trajectory.task, encode_arrays(trajectory))
    assert len(found.steps) == len(trajectory.steps)
    assert (found.outcome, found.instruction, found.environment) == (
        trajectory.outcome,
        trajectory.instruction,
        trajectory.environment,
    )
    for before, after in zip(trajectory.steps, found.steps, strict=True):
        for name in (name for name in Step.__slots__ if name != "generation"):
            assert getattr(before, name) == getattr(after, name), name
        for name in Generation.__slots__:
            one, two = getattr(before.generation, name), getattr(after.generation, name)
            if isinstance(one, np.ndarray):
                assert one.dtype == two.dtype and np.array_equal(one, two), name
            else:
                assert one == two and type(one) is type(two), name


def test_lengths_that_disagree_are_refused():
    generation = Generation(
        "",
        np.zeros(1, np.int32),
        np.zeros(3, np.int32),
        np.zeros(2, np.float32),
        None,
        "stop",
        (),
        (),
        "",
        1.0,
        (),
        "float32",
        1,
        "w",
        "q",
    )
    step = Step(0, None, (0, 0), "", generation, (), None, 0.0, 0.0)
    with pytest.raises(LedgerConflict, match="3 reply tokens but 2 log-probs"):
        encode_arrays(Trajectory("t", Task("a", "a", 0), "", (step,), Outcome(End.TERMINATED, "finished", 0.0, False), 0.0, 0.0))


@settings(max_examples=10, deadline=None)
@given(trajectory=trajectories().filter(lambda each: sum(len(step.generation.response_ids) for step in each.steps) > 0))
def test_arrays_that_do_not_fit_the_rows_are_noticed(trajectory):
    rows = [encode_step("r", trajectory.id, step) for step in trajectory.steps]
    rows[0]["num_reply_tokens"] += 1
    with pytest.raises(BlobCorrupt, match="reply tokens"):
        decode_trajectory(row_of(trajectory), rows, trajectory.task, encode_arrays(trajectory))
