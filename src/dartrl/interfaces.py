"""The seams between the modules, on one screen. Nothing heavy is imported here.

Who implements what: Clock in `launch/` (real) and `simulate/` (virtual); Environment, EnvironmentPool in `envs/`;
Dialect in `agent/`; PolicyClient in `rollout/`; Ledger and BlobStore in `data/`; TaskSet and Reward by plug-ins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from dartrl.records import (
    Assignment,
    Checkpoint,
    Claim,
    EpisodeSummary,
    Evaluation,
    EvaluationResult,
    Event,
    Lease,
    Phase,
    ResumePoint,
    Run,
    TrainingStep,
    Wait,
    WeightsVersion,
)
from dartrl.types import Action, Generation, Observation, ParseError, Step, Task, Trajectory, Verdict

T = TypeVar("T")

# --------------------------------------------------------------------------- time, randomness, blocking work


class Clock(Protocol):
    """Time, sleeping, deadlines and blocking work; injected everywhere, so that a run can happen in virtual time."""

    def now(self) -> float:
        """Seconds since the epoch."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after that time."""
        ...

    def timeout(self, seconds: float) -> AbstractAsyncContextManager[Any]:
        """Context that raises TimeoutError if its body takes longer."""
        ...

    async def run_blocking(self, function: Callable[..., T], *args: Any) -> T:
        """Result of a blocking call made off the event loop."""
        ...


# --------------------------------------------------------------------------- environments


class Environment(Protocol):
    """One slot's environment; owned by one task at a time, reused over episodes.

    Every method raises EnvironmentFault (or a child) when the infrastructure fails, and ends within its own deadline.
    """

    async def reset(self, task: Task) -> Observation:
        """First observation of the instance; equal seeds give equal observations."""
        ...

    async def step(self, actions: Sequence[Action]) -> Observation:
        """Observation after the actions took effect and the screen is still. Never re-sends an action."""
        ...

    async def evaluate(self) -> Verdict:
        """Score of the episode as it stands. Raises EvaluatorFault if it cannot be computed."""
        ...

    async def close(self) -> None:
        """Release everything; never raises."""
        ...

    def versions(self) -> Mapping[str, str]:
        """Renderer, font and page versions, stored with each trajectory."""
        ...


class EnvironmentPool(Protocol):
    """Slots of one runner process: creation, health, replacement."""

    size: int
    """Number of slots."""

    async def start(self) -> None:
        """Bring up what the slots share. Raises EnvironmentFault with the remedy if that is impossible."""
        ...

    async def acquire(self, slot: int, task: Task) -> Environment:
        """A healthy environment for the slot, replacing a broken one."""
        ...

    async def discard(self, slot: int) -> None:
        """Drop the slot's environment after a fault; the next acquire builds another."""
        ...

    async def close(self) -> None:
        """Release all slots; leaves no process behind."""
        ...


@runtime_checkable
class TaskSet(Protocol):
    """A finite, recorded set of task instances."""

    def tasks(self, families: Sequence[str], split: Literal["train", "evaluation"], count: int) -> Sequence[Task]:
        """`count` instances per family; the splits never share a seed. Raises ConfigError for an unknown family."""
        ...


Reward = Callable[[Trajectory, Verdict], Verdict]
"""Plug-in that may replace the environment's verdict; the raw score is kept by the caller."""

# --------------------------------------------------------------------------- agent


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; parts keep their order."""

    role: Literal["system", "user", "assistant"]
    """Speaker."""
    parts: tuple[str | ImageRef, ...]
    """Text pieces and images."""


@dataclass(frozen=True, slots=True)
class ImageRef:
    """A screenshot in a message, by content hash."""

    hash: str
    """SHA-256 of the PNG bytes."""
    width: int
    """Pixels."""
    height: int
    """Pixels."""


class Dialect(Protocol):
    """How a family of models is asked and how its replies are read. Pure."""

    name: str
    """Entry-point name."""
    history_images: int
    """Screenshots kept in the prompt, the newest included; 0 for text environments."""
    max_reply_tokens: int
    """Reply length at which the engine stops."""

    def messages(
        self, instruction: str, steps: Sequence[Step], observation: Observation, image: ImageRef | None
    ) -> Sequence[Message]:
        """The prompt for the next reply; `steps` are the earlier steps, `image` the present screenshot."""
        ...

    def parse(self, text: str, screen: tuple[int, int]) -> tuple[Action, ...] | ParseError:
        """Typed actions in screen pixels, or why there are none. Never raises, never guesses a coordinate."""
        ...


# --------------------------------------------------------------------------- policy


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request for one reply."""

    id: str
    """Unique; repeated on a retry, so that a worker can tell."""
    messages: tuple[Message, ...]
    """Prompt."""
    images: Mapping[str, bytes]
    """PNG bytes by content hash, for every ImageRef of the messages."""
    temperature: float
    """0 is greedy."""
    max_tokens: int
    """Reply length limit."""
    seed: int
    """Sampling seed; equal request and seed give an equal reply from equal weights."""
    affinity: str = ""
    """Trajectory id; requests of one trajectory prefer one worker."""


class PolicyClient(Protocol):
    """Whoever answers prompts: the router over HTTP, or a fake."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """One reply. Raises PolicyOverloaded, PolicyUnavailable or PolicyFault."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...


# --------------------------------------------------------------------------- data


class BlobStore(Protocol):
    """Content-addressed bytes; durable when `put` returns, verified on `get`."""

    def put(self, data: bytes) -> str:
        """SHA-256 of the data in hex, after it is stored."""
        ...

    def get(self, hash: str) -> bytes:
        """The bytes. Raises BlobCorrupt if missing or changed."""
        ...

    def __contains__(self, hash: str) -> bool:
        """True if a blob of that hash exists (not verified)."""
        ...


class Ledger(Protocol):
    """The data manager as every role sees it. Thread-safe, blocking; each call is one transaction.

    Safety comes from fencing: a method that takes a Lease raises LeaseLost if it is no longer the subject's newest.
    Bound to one run by `open_run` or at construction.
    """

    # -- run
    def open_run(self, run: Run, tasks: Sequence[Task]) -> Run:
        """The run, created or resumed. Raises ConfigError if the id exists with other tasks."""
        ...

    def run(self) -> Run:
        """Present state of the run."""
        ...

    def set_phase(self, phase: Phase) -> None:
        """Move the run to a phase."""
        ...

    # -- environment cluster
    def next_assignment(self, holder: str) -> Assignment | Wait:
        """The next episode for a free slot: evaluation first, then the oldest open group, then a new group if admitted."""
        ...

    def renew(self, leases: Sequence[Lease]) -> Sequence[Lease]:
        """The leases still held, with a later expiry."""
        ...

    def record_trajectory(self, lease: Lease, trajectory: Trajectory) -> None:
        """Store steps and outcome once; fills the slot if scored, frees it for a retry otherwise."""
        ...

    # -- evaluation
    def open_evaluation(self, evaluation: Evaluation) -> None:
        """Queue the episodes of an evaluation; idempotent by id."""
        ...

    def evaluation_result(self, evaluation_id: str) -> EvaluationResult:
        """Scores so far."""
        ...

    # -- trainer
    def acquire_trainer(self, holder: str) -> Lease | None:
        """The run's trainer lease, or None while another trainer holds it."""
        ...

    def begin_training(self, lease: Lease) -> ResumePoint:
        """Roll back what was applied since the newest resumable checkpoint and say where to start."""
        ...

    def claim_groups(self, lease: Lease, count: int) -> Claim | None:
        """The oldest `count` trainable groups, or None while there are fewer. Curation happens here, in DESIGN 6's order."""
        ...

    def next_weights_version(self, lease: Lease) -> int:
        """A version number that was never given out before."""
        ...

    def publish_weights(self, lease: Lease, weights: WeightsVersion) -> None:
        """Publish weights outside a step: the initial ones, or those of a resumed checkpoint."""
        ...

    def acknowledge_step(self, lease: Lease, claim: Claim, step: TrainingStep, weights: WeightsVersion | None) -> None:
        """In one transaction: members claimed -> applied (or rejected), the step's row, and its weights version."""
        ...

    def record_checkpoint(self, lease: Lease, checkpoint: Checkpoint) -> None:
        """Members applied up to the checkpoint's step become trained, each `used` + 1; its files are already durable."""
        ...

    # -- rollout service
    def current_weights(self) -> WeightsVersion | None:
        """The newest published version that is not rolled back."""
        ...

    # -- events and reading
    def record_event(self, event: Event) -> None:
        """Append to the event log."""
        ...

    def events(self, kinds: Sequence[str] = (), after: float = 0.0) -> Sequence[Event]:
        """Events of these kinds (all if empty) later than `after`, in order."""
        ...

    def counts(self) -> Mapping[str, int]:
        """Counters for views: groups_open, groups_ready, trajectories, trajectories_<end>, members_<state>, leases, ..."""
        ...

    def training_steps(self) -> Sequence[TrainingStep]:
        """Acknowledged steps of the present lineage, in order."""
        ...

    def trajectories(self, *, purpose: str, family: str | None = None, limit: int = 100) -> Sequence[Trajectory]:
        """Newest trajectories with steps; `purpose` is train, evaluation or an evaluation id."""
        ...

    def episodes(self, *, after: float = 0.0) -> Sequence[EpisodeSummary]:
        """All attempts that ended later than `after`, without their steps, in order of their end."""
        ...

    # -- time-driven work, done by the leased manager process
    def acquire_manager(self, holder: str) -> Lease | None:
        """The run's manager lease, or None while another process holds it."""
        ...

    def tick(self, lease: Lease) -> Mapping[str, int]:
        """Expire leases, close groups at their deadline, run the circuit breaker; what was done, by name."""
        ...


StepSelector = Callable[[Sequence[float]], Sequence[bool]]
"""Mean entropies of all steps of one group -> which of them train (curation, injected into the trainer)."""
