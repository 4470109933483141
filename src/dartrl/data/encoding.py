"""Trajectories as rows and one blob of arrays, and back, exactly.

The blob holds the token arrays of all steps end to end, in safetensors format (no pickle):
`prompt_ids` [sum of prompt lengths] int32, `response_ids` [sum T] int32, `behaviour_logprobs` [sum T] float32 and
`entropies` [sum T] float32 (NaN where the engine gave none). The lengths are in the step rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from dartrl.data.store import Row
from dartrl.errors import BlobCorrupt, LedgerConflict
from dartrl.types import Action, ActionKind, End, Generation, Outcome, ParseError, Step, Task, Trajectory


def encode_arrays(trajectory: Trajectory) -> bytes:
    """The token arrays of all steps. Raises LedgerConflict if lengths within a step disagree."""
    generations = [step.generation for step in trajectory.steps]
    for step in trajectory.steps:
        _check_lengths(trajectory.id, step)
    return save(
        {
            "prompt_ids": _joined([g.prompt_ids for g in generations], np.int32),
            "response_ids": _joined([g.response_ids for g in generations], np.int32),
            "behaviour_logprobs": _joined([g.behaviour_logprobs for g in generations], np.float32),
            "entropies": _joined([_entropies(g) for g in generations], np.float32),
        }
    )


def encode_step(run_id: str, trajectory_id: str, step: Step) -> Row:
    """Row of table `step`."""
    generation = step.generation
    return {
        "run_id": run_id,
        "trajectory_id": trajectory_id,
        "step_index": step.index,
        "screenshot": step.screenshot,
        "width": step.screen[0],
        "height": step.screen[1],
        "observation_text": step.observation_text,
        "reply": generation.text,
        "actions": [_encode_action(action) for action in step.actions],
        "parse_error": _encode_parse_error(step.parse_error),
        "image_hashes": list(generation.image_hashes),
        "image_grids": [list(grid) for grid in generation.image_grids],
        "banned_ids": list(generation.banned_ids),
        "num_prompt_tokens": len(generation.prompt_ids),
        "num_reply_tokens": len(generation.response_ids),
        "has_entropies": generation.entropies is not None,
        "mean_entropy": _mean(generation.entropies),
        "finish_reason": generation.finish_reason,
        "fingerprint": generation.fingerprint,
        "temperature": generation.temperature,
        "compute_dtype": generation.compute_dtype,
        "weights_version": generation.weights_version,
        "worker": generation.worker,
        "request_id": generation.request_id,
        "generation_seconds": generation.seconds,
        "environment_seconds": step.environment_seconds,
        "started_at": step.started_at,
    }


def decode_trajectory(row: Row, steps: Sequence[Row], task: Task, arrays: bytes | None) -> Trajectory:
    """The trajectory of a rollout_run row, its step rows in order, and its blob. Raises BlobCorrupt if they disagree."""
    return Trajectory(
        id=row["trajectory_id"],
        task=task,
        instruction=row["full_instruction"] or row["instruction"] or "",
        steps=_decode_steps(steps, arrays),
        outcome=Outcome(
            end=End(row["state"]),
            reason=row["reason"],
            score=row["reward"],
            success=row["success"],
            raw=row["raw"],
            detail=row["detail"],
        ),
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        environment=row["environment"] or {},
    )


def decode_task(row: Row) -> Task:
    """The task of a row of table `task`."""
    return Task(row["task_id"], row["family"], row["seed"], row["split"], row["instruction"], row["spec"] or {})


def _decode_steps(rows: Sequence[Row], blob: bytes | None) -> tuple[Step, ...]:
    if not rows:
        return ()
    arrays: dict[str, NDArray[Any]] = load(blob or b"")
    prompts = sum(row["num_prompt_tokens"] for row in rows)
    replies = sum(row["num_reply_tokens"] for row in rows)
    if len(arrays["prompt_ids"]) != prompts or len(arrays["response_ids"]) != replies:
        raise BlobCorrupt(
            f"arrays of {rows[0]['trajectory_id']} hold {len(arrays['prompt_ids'])} prompt and {len(arrays['response_ids'])} "
            f"reply tokens, but its steps say {prompts} and {replies}"
        )
    result: list[Step] = []
    prompt_start = reply_start = 0
    for row in rows:
        prompt = slice(prompt_start, prompt_start + row["num_prompt_tokens"])
        reply = slice(reply_start, reply_start + row["num_reply_tokens"])
        result.append(_decode_step(row, _decode_generation(row, arrays, prompt, reply)))
        prompt_start, reply_start = prompt.stop, reply.stop
    return tuple(result)


def _decode_step(row: Row, generation: Generation) -> Step:
    return Step(
        index=row["step_index"],
        screenshot=row["screenshot"],
        screen=(row["width"], row["height"]),
        observation_text=row["observation_text"],
        generation=generation,
        actions=tuple(_decode_action(action) for action in row["actions"]),
        parse_error=ParseError(*row["parse_error"]) if row["parse_error"] else None,
        environment_seconds=row["environment_seconds"],
        started_at=row["started_at"],
    )


def _decode_generation(row: Row, arrays: dict[str, NDArray[Any]], prompt: slice, reply: slice) -> Generation:
    return Generation(
        text=row["reply"],
        prompt_ids=arrays["prompt_ids"][prompt],
        response_ids=arrays["response_ids"][reply],
        behaviour_logprobs=arrays["behaviour_logprobs"][reply],
        entropies=arrays["entropies"][reply] if row["has_entropies"] else None,
        finish_reason=row["finish_reason"],
        image_hashes=tuple(row["image_hashes"]),
        image_grids=tuple((grid[0], grid[1], grid[2]) for grid in row["image_grids"]),
        fingerprint=row["fingerprint"],
        temperature=row["temperature"],
        banned_ids=tuple(row["banned_ids"]),
        compute_dtype=row["compute_dtype"],
        weights_version=row["weights_version"],
        worker=row["worker"],
        request_id=row["request_id"],
        seconds=row["generation_seconds"],
    )


def _encode_action(action: Action) -> dict[str, Any]:
    """Only what differs from the default, to keep rows short."""
    fields: dict[str, Any] = {
        "x": action.x,
        "y": action.y,
        "to_x": action.to_x,
        "to_y": action.to_y,
        "direction": action.direction,
        "text": action.text,
        "keys": list(action.keys),
        "clamped": action.clamped,
    }
    unsaid: tuple[Any, ...] = (None, False, "", [])
    said = {name: value for name, value in fields.items() if isinstance(value, float) or value not in unsaid}
    return {"kind": str(action.kind), **said}


def _decode_action(fields: dict[str, Any]) -> Action:
    said: dict[str, Any] = {**fields, "kind": ActionKind(fields["kind"]), "keys": tuple(fields.get("keys", ()))}
    return Action(**said)


def _encode_parse_error(error: ParseError | None) -> list[Any] | None:
    return None if error is None else [error.kind, error.message, error.start, error.end]


def _check_lengths(trajectory_id: str, step: Step) -> None:
    generation = step.generation
    tokens = len(generation.response_ids)
    others = [len(generation.behaviour_logprobs)] + ([] if generation.entropies is None else [len(generation.entropies)])
    if any(length != tokens for length in others):
        raise LedgerConflict(
            f"step {step.index} of {trajectory_id} has {tokens} reply tokens but {others[0]} log-probs"
            f"{f' and {others[1]} entropies' if len(others) > 1 else ''}; they must be as many"
        )


def _entropies(generation: Generation) -> NDArray[np.float32]:
    if generation.entropies is not None:
        return generation.entropies
    return np.full(len(generation.response_ids), np.nan, dtype=np.float32)


def _joined(arrays: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    if not arrays:
        return np.zeros(0, dtype=dtype)
    return np.concatenate(arrays).astype(dtype, copy=False)


def _mean(entropies: NDArray[np.float32] | None) -> float | None:
    if entropies is None or not len(entropies):
        return None
    mean = float(entropies.mean())
    return mean if np.isfinite(mean) else None
