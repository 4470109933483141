"""Records of the ledger: leases, assignments, claims, training steps, weights, runs and events.

Frozen; one line per field with its unit. What happens inside an episode is in `types.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from dartrl.types import Task, Trajectory

# --------------------------------------------------------------------------- scheduling


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write about one thing until it expires."""

    subject: str
    """What is leased: `trajectory:<id>`, `trainer:<run>`, `manager:<run>`."""
    holder: str
    """Who holds it."""
    token: int
    """Fencing token; a later holder of the subject has a larger one."""
    expires_at: float
    """Ledger time in seconds."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """One episode to run now."""

    trajectory_id: str
    """Id under which the attempt must be recorded."""
    group_id: str
    """The group whose slot it fills."""
    slot: int
    """0-based slot in the group."""
    attempt: int
    """0-based attempt at this slot."""
    task: Task
    """The instance to attempt."""
    max_steps: int
    """Length cap of the episode in steps."""
    temperature: float
    """Sampling temperature; 0 is greedy."""
    sampling_seed: int
    """Seed from which the seeds of all replies derive."""
    purpose: Literal["train", "evaluation"]
    """Evaluation episodes are scored and stored, never trained on."""
    lease: Lease
    """Must be renewed while the episode runs."""


@dataclass(frozen=True, slots=True)
class Wait:
    """No assignment now."""

    seconds: float
    """Ask again after this pause."""
    reason: str
    """Fixed word: staleness, sampling, no_weights, breaker, phase, finished."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A fixed set of held-out episodes at one temperature."""

    id: str
    """Unique in the run, such as `before-sampled`."""
    temperature: float
    """Sampling temperature; 0 is greedy."""
    episodes_per_task: int
    """Attempts per family, on that many instances of the evaluation split."""


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Scores of one evaluation so far."""

    evaluation: Evaluation
    """What was asked for."""
    finished: int
    """Episodes that ended in a named state."""
    total: int
    """Episodes asked for."""
    successes: dict[str, tuple[int, int]]
    """Family -> (successes, scored episodes)."""


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A trajectory's place in a claimed group: the audited unit."""

    membership_id: str
    """Id of the group_member row."""
    trajectory: Trajectory
    """With all steps."""
    role: Literal["fresh", "replay"]
    """Replay = taken from the experience pool."""


@dataclass(frozen=True, slots=True, eq=False)
class ClaimedGroup:
    """All members of one closed group, after curation."""

    group_id: str
    """Id of the rollout_group row."""
    task: Task
    """The instance all fresh members attempted."""
    members: tuple[Member, ...]
    """At least two, in slot order."""


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """Whole groups handed to the trainer for one training step."""

    id: str
    """Id of the claim."""
    groups: tuple[ClaimedGroup, ...]
    """Oldest first."""


@dataclass(frozen=True, slots=True)
class EpisodeSummary:
    """One finished attempt, without its steps."""

    trajectory_id: str
    """Id of the attempt."""
    family: str
    """Task family."""
    purpose: str
    """`train`, or the id of an evaluation."""
    end: str
    """How it ended: terminated, truncated, env_error, ..."""
    success: bool | None
    """Full success; None without a score."""
    num_steps: int
    """Replies of the policy."""
    finished_at: float
    """Ledger time in seconds."""


# --------------------------------------------------------------------------- training


@dataclass(frozen=True, slots=True)
class WeightsVersion:
    """Published weights that workers may load."""

    version: int
    """From the ledger's sequence; never reused."""
    path: str
    """Folder or URL of the Hugging Face directory."""
    checksum: str
    """Hash over the manifest of the folder's files."""
    training_step: int
    """Step that produced them; 0 for the initial weights."""
    parent: int | None
    """Version they were trained from."""
    created_at: float = 0.0
    """Ledger time in seconds."""


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """One acknowledged claim, which may hold several optimizer updates."""

    index: int
    """1-based along the lineage of the run."""
    claim_id: str
    """The claim it consumed."""
    metrics: dict[str, float]
    """Named numbers: loss, effective_sample_size, entropy, clip_share, logprob_gap_*, staleness_*, ..."""
    rejected: dict[str, str] = field(default_factory=dict[str, str])
    """membership id -> reason, for members whose rows were inconsistent."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A resumable point of training; its files are durable before the row."""

    name: str
    """Folder name."""
    path: str
    """Folder or URL."""
    training_step: int
    """Last step it contains."""
    weights_version: int
    """Version published with that step."""
    checksum: str
    """Hash over the manifest of the folder's files."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a trainer that just took the lease has to start."""

    checkpoint: Checkpoint | None
    """Newest resumable checkpoint of the lineage; None at the very beginning."""
    next_step: int
    """1-based index of the next training step."""
    rolled_back: int
    """Memberships returned from applied to ready."""


# --------------------------------------------------------------------------- runs and events


class Phase(StrEnum):
    """What a run is doing; assignments and claims follow it."""

    STARTING = "starting"
    EVALUATING = "evaluating"
    TRAINING = "training"
    DRAINING = "draining"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Run:
    """One training run."""

    id: str
    """Unique in the database."""
    seed: int
    """Root of every sampling seed."""
    config: dict[str, Any]
    """Resolved, secret-free configuration as JSON."""
    versions: dict[str, str] = field(default_factory=dict[str, str])
    """Package, renderer and font versions, code commit, data hashes."""
    phase: Phase = Phase.STARTING
    """Present phase."""


@dataclass(frozen=True, slots=True)
class Event:
    """A decision, a state change or a periodic reading, with its inputs."""

    kind: str
    """Fixed word, such as assignment, group_closed, claim, sync, stats, alarm, breaker, restart."""
    subject: str
    """Id of the thing it is about."""
    data: dict[str, Any]
    """JSON-ready inputs and results."""
    at: float = 0.0
    """Ledger time in seconds; set by the ledger if 0."""
