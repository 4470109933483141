"""Records that cross a module boundary. Frozen; one line per field with its unit or axis.

Axes in names: T = tokens of one response.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

# --------------------------------------------------------------------------- tasks


@dataclass(frozen=True, slots=True)
class Task:
    """One instance of a task family: what a group and a pool entry match on."""

    id: str
    """Unique and stable: `family/seed` by convention."""
    family: str
    """Template; success rates, rollout numbers and length caps follow the family."""
    seed: int
    """Environment seed that makes this instance."""
    split: Literal["train", "evaluation"] = "train"
    """Evaluation instances are never trained on."""
    instruction: str = ""
    """Instruction in words; empty if the environment states it at reset."""
    spec: dict[str, Any] = field(default_factory=dict[str, Any])
    """JSON-ready extras that the environment needs."""


# --------------------------------------------------------------------------- actions


class ActionKind(StrEnum):
    """Everything an agent can do. Coordinates are screen pixels."""

    CLICK = "click"
    DOUBLE = "double"
    RIGHT = "right"
    MIDDLE = "middle"
    MOVE = "move"
    DRAG = "drag"
    SCROLL = "scroll"
    TYPE = "type"
    PRESS = "press"
    HOTKEY = "hotkey"
    WAIT = "wait"
    FINISH = "finish"
    FAIL = "fail"
    ASK_USER = "ask_user"


@dataclass(frozen=True, slots=True)
class Action:
    """One typed action; unused fields keep their defaults."""

    kind: ActionKind
    """What to do."""
    x: float | None = None
    """Screen pixels from the left; None if the kind needs no point."""
    y: float | None = None
    """Screen pixels from the top."""
    to_x: float | None = None
    """Drag target, screen pixels from the left."""
    to_y: float | None = None
    """Drag target, screen pixels from the top."""
    direction: Literal["up", "down", "left", "right"] | None = None
    """Scroll: content further in this direction becomes visible."""
    text: str = ""
    """Typed text, or the message of finish, fail and ask_user."""
    keys: tuple[str, ...] = ()
    """Canonical key names of press and hotkey, modifiers first."""
    clamped: bool = False
    """True if the model pointed just outside the image and the point was moved to the edge."""


@dataclass(frozen=True, slots=True)
class ParseError:
    """A reply that is not an action; a step with an error observation, never a FAIL verdict."""

    kind: str
    """Fixed word: no_action, unknown_verb, bad_box, out_of_bounds, bad_arguments, unknown_key, truncated."""
    message: str
    """What the model is told, with the valid forms."""
    start: int = 0
    """First offending character of the reply."""
    end: int = 0
    """One past the last offending character of the reply."""


# --------------------------------------------------------------------------- observations, generations, steps


@dataclass(frozen=True, slots=True)
class Observation:
    """What the agent sees: a screenshot, text, or both."""

    screenshot: bytes | None = None
    """PNG bytes of the whole screen; None for text environments."""
    width: int = 0
    """Screen width in pixels; 0 without a screenshot."""
    height: int = 0
    """Screen height in pixels."""
    text: str = ""
    """Text observation, or the error message that follows a failed parse."""
    instruction: str = ""
    """The task in words, as the environment states it."""
    done: bool = False
    """True once the environment has ended the episode by itself."""
    settle_seconds: float = 0.0
    """Time waited until the screen was still."""
    settled: bool = True
    """False if the bound was reached while the screen still moved."""
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    """JSON-ready extras, stored with the step."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The environment's own score of an episode."""

    score: float
    """In [0, 1]."""
    success: bool
    """The task is fully solved."""
    raw: float = 0.0
    """The environment's raw number, kept as it is."""


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """One reply of the policy, exactly as the engine reports it."""

    text: str
    """Decoded reply without the end token."""
    prompt_ids: NDArray[np.int32]
    """Prompt ids with image placeholders expanded."""
    response_ids: NDArray[np.int32]
    """[T] sampled ids, the end token included if sampled."""
    behaviour_logprobs: NDArray[np.float32]
    """[T] log-probabilities under the distribution actually sampled from."""
    entropies: NDArray[np.float32] | None
    """[T] entropy of that distribution in nats, or None if the engine cannot give it."""
    finish_reason: Literal["stop", "length"]
    """Why the reply ended."""
    image_hashes: tuple[str, ...]
    """Content hashes of the prompt's images, in order."""
    image_grids: tuple[tuple[int, int, int], ...]
    """(t, h, w) in patches of each image, in order."""
    fingerprint: str
    """Hash over processor settings, tokenizer and chat template."""
    temperature: float
    """Sampling temperature; 0 is greedy (log-probabilities then at temperature 1)."""
    banned_ids: tuple[int, ...]
    """Token ids that could not be sampled."""
    compute_dtype: str
    """float32 or bfloat16: the engine's compute type."""
    weights_version: int
    """Version of the weights that produced every token."""
    worker: str
    """Name of the policy worker that answered."""
    request_id: str
    """Unique id of the request."""
    seconds: float = 0.0
    """Time from request to reply, as seen by the caller."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Observation, reply and what was done."""

    index: int
    """0-based position in the episode."""
    screenshot: str | None
    """Content hash of the screenshot the reply was based on."""
    screen: tuple[int, int]
    """(width, height) of that screen in pixels; (0, 0) for text."""
    observation_text: str
    """Text part of the observation."""
    generation: Generation
    """The policy's reply."""
    actions: tuple[Action, ...]
    """Parsed actions, in order; empty after a parse error."""
    parse_error: ParseError | None
    """Set if the reply could not be parsed."""
    environment_seconds: float
    """Time the environment took to execute and settle."""
    started_at: float
    """Clock seconds at which the step began."""


class End(StrEnum):
    """How an episode ended. Only terminated and truncated carry a score."""

    TERMINATED = "terminated"
    TRUNCATED = "truncated"
    ENV_ERROR = "env_error"
    MODEL_ERROR = "model_error"
    EVALUATOR_ERROR = "evaluator_error"
    ABORTED = "aborted"


SCORED_ENDS = frozenset({End.TERMINATED, End.TRUNCATED})


@dataclass(frozen=True, slots=True)
class Outcome:
    """A type, not a number: failures of the infrastructure have no score."""

    end: End
    """Which kind of end."""
    reason: str
    """Fixed word: finished, environment, failed, steps, time, loop, parse_errors, reset, timeout, crash, server, lease, ..."""
    score: float | None = None
    """In [0, 1] for scored ends, else None."""
    success: bool | None = None
    """Full success, for scored ends."""
    raw: float | None = None
    """The environment's raw reward."""
    detail: str = ""
    """One line for a person."""

    @property
    def is_scored(self) -> bool:
        return self.end in SCORED_ENDS


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One attempt at one task instance; its id is never reused."""

    id: str
    """Unique over all runs."""
    task: Task
    """The instance attempted."""
    instruction: str
    """The task in words, as stated by the environment."""
    steps: tuple[Step, ...]
    """In order; may be empty if the reset failed."""
    outcome: Outcome
    """How it ended."""
    started_at: float
    """Clock seconds at which the attempt began."""
    finished_at: float
    """Clock seconds at which it ended."""
    environment: dict[str, str] = field(default_factory=dict[str, str])
    """Renderer, font and page versions."""

    @property
    def oldest_version(self) -> int | None:
        """Smallest weights version among the steps; None without steps."""
        return min((s.generation.weights_version for s in self.steps), default=None)
