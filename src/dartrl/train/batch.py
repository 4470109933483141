"""From claimed groups to rows that can be trained on: checks, advantages, selection, order.

    claim -> episodes -> advantages over all steps -> high-entropy steps -> updates of microbatches

A member with one inconsistent step is rejected as a whole, with the step's reason: half an episode would carry a wrong
baseline. Nothing is repaired, dropped or repeated silently: every member ends up either in `episodes` or in `rejected`, and
every row of `episodes` is either selected or counted as left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from dartrl.errors import BlobCorrupt, RowRejected
from dartrl.interfaces import BlobStore, StepSelector
from dartrl.policy.inputs import EncodedImage, Row
from dartrl.records import Claim, ClaimedGroup, Member
from dartrl.train.objective import Objective, row_advantages
from dartrl.types import Generation

TOO_SMALL = "group_too_small"
"""Reason of members whose fellows were rejected, so that nothing is left to compare them with."""
ORDER_STREAM = 1
"""Distinguishes the generator of the row order from others of the same run seed."""

BuildRow = Callable[[Generation, dict[str, bytes]], Row]
ScoreEntropies = Callable[[Sequence[Row]], Sequence[float]]


@dataclass(frozen=True, slots=True, eq=False)
class TrainingRow:
    """One step of one episode."""

    row: Row
    """Ids, pixels, positions and labels."""
    behaviour_T: NDArray[np.float32]
    """[T] log-probabilities of the sampled tokens, as recorded."""
    weights_version: int
    """Version that sampled it."""
    role: Literal["fresh", "replay"]
    """Whether the episode was generated for its group or taken from the pool."""
    mean_entropy: float | None
    """Mean entropy of its tokens in nats; None if the engine did not report it."""
    advantage: float = 0.0
    """Advantage of all its tokens."""

    @property
    def num_tokens(self) -> int:
        return len(self.behaviour_T)


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """One accepted member."""

    membership_id: str
    """Id of the group_member row."""
    group: int
    """0-based group of the claim."""
    role: Literal["fresh", "replay"]
    """Replay = from the experience pool."""
    score: float
    """In [0, 1]."""
    success: bool
    """Full success."""
    rows: tuple[TrainingRow, ...]
    """Its steps in order."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingBatch:
    """Everything one training step needs."""

    episodes: tuple[Episode, ...]
    """Accepted members, in the claim's order, with advantages."""
    rows: tuple[TrainingRow, ...]
    """Selected rows of these episodes, in order."""
    rejected: dict[str, str]
    """membership id -> reason."""

    def summary(self) -> dict[str, float]:
        """What went in and what was left out, as metrics."""
        fresh = [episode for episode in self.episodes if episode.role == "fresh"]
        counts = {
            "episodes": len(self.episodes),
            "episodes_replayed": len(self.episodes) - len(fresh),
            "episodes_rejected": len(self.rejected),
            "rows": len(self.rows),
            "rows_left_out": sum(len(episode.rows) for episode in self.episodes) - len(self.rows),
            "tokens": sum(row.num_tokens for row in self.rows),
        }
        counts |= {f"rejected_{reason}": count for reason, count in Counter(self.rejected.values()).items()}
        summary = {name: float(count) for name, count in counts.items()}
        if fresh:
            summary["success"] = float(np.mean([episode.success for episode in fresh]))
            summary["score"] = float(np.mean([episode.score for episode in fresh]))
        return summary


class RowTools(Protocol):
    """What assembling needs from the policy's side; the learner has it."""

    def build_row(self, generation: Generation, images: dict[str, bytes]) -> Row:
        """The row of a recorded reply and its PNG bytes by hash. Raises RowRejected."""
        ...

    def mean_entropies(self, rows: Sequence[Row]) -> Sequence[float]:
        """Mean token entropy of each row in nats, under the present weights."""
        ...


def assemble(claim: Claim, *, blobs: BlobStore, tools: RowTools, objective: Objective, select_steps: StepSelector) -> TrainingBatch:
    """The claim as a batch: rows checked, advantages computed over all of them, then the training ones selected.

    tools: builds rows and, for engines that report no entropies, scores them. select_steps: sees the mean entropies of all
    steps of one group.
    """
    pixels: dict[str, EncodedImage] = {}
    episodes: list[Episode] = []
    rejected: dict[str, str] = {}
    for index, group in enumerate(claim.groups):
        accepted, refused = _accept(group, index, blobs, tools.build_row, pixels)
        episodes += accepted
        rejected |= refused
    episodes = _with_advantages(episodes, objective)
    rows = _select(episodes, select_steps, tools.mean_entropies)
    return TrainingBatch(tuple(episodes), tuple(rows), rejected)


def plan_updates(
    rows: Sequence[TrainingRow], *, minibatch_rows: int, microbatch_rows: int, seed: Sequence[int]
) -> list[list[list[TrainingRow]]]:
    """Rows as optimizer updates of microbatches; every row exactly once, in an order fixed by the seed.

    Updates have at most minibatch_rows rows and differ by one row at most. Inside an update rows are sorted by prompt and
    length, so that microbatches have little padding and rows that share a screenshot meet in one of them.
    """
    if not rows:
        return []
    generator = np.random.default_rng([ORDER_STREAM, *seed])
    order = generator.permutation(len(rows))
    updates: list[list[list[TrainingRow]]] = []
    for part in np.array_split(order, -(-len(rows) // minibatch_rows)):
        members = sorted((rows[index] for index in part), key=_likeness)
        updates.append([members[at : at + microbatch_rows] for at in range(0, len(members), microbatch_rows)])
    return updates


# --------------------------------------------------------------------------- parts


def _likeness(row: TrainingRow) -> tuple[int, tuple[str, ...], int]:
    length = len(row.row.ids_S)
    return length - row.num_tokens, tuple(image.hash for image in row.row.images), length


def _accept(
    group: ClaimedGroup, index: int, blobs: BlobStore, build: BuildRow, pixels: dict[str, EncodedImage]
) -> tuple[list[Episode], dict[str, str]]:
    accepted: list[Episode] = []
    rejected: dict[str, str] = {}
    for member in group.members:
        try:
            accepted.append(_episode(member, index, blobs, build, pixels))
        except RowRejected as error:
            rejected[member.membership_id] = error.reason
    if len(accepted) < 2:
        rejected |= {episode.membership_id: TOO_SMALL for episode in accepted}
        accepted = []
    return accepted, rejected


def _episode(member: Member, group: int, blobs: BlobStore, build: BuildRow, pixels: dict[str, EncodedImage]) -> Episode:
    trajectory = member.trajectory
    score = trajectory.outcome.score
    if not trajectory.outcome.is_scored or score is None:
        raise RowRejected(f"trajectory {trajectory.id} ended as {trajectory.outcome.end} and has no score", "unscored")
    rows: list[TrainingRow] = []
    for step in trajectory.steps:
        generation = step.generation
        if generation.temperature <= 0:
            raise RowRejected(f"step {step.index} of trajectory {trajectory.id} was decoded greedily, not sampled", "greedy")
        row = build(generation, _images(generation, blobs))
        shared = tuple(pixels.setdefault(image.hash, image) for image in row.images)
        entropies = generation.entropies
        rows.append(
            TrainingRow(
                row=replace(row, images=shared),
                behaviour_T=generation.behaviour_logprobs,
                weights_version=generation.weights_version,
                role=member.role,
                mean_entropy=None if entropies is None else float(np.mean(entropies, dtype=np.float64)),
            )
        )
    return Episode(member.membership_id, group, member.role, score, bool(trajectory.outcome.success), tuple(rows))


def _images(generation: Generation, blobs: BlobStore) -> dict[str, bytes]:
    try:
        return {content_hash: blobs.get(content_hash) for content_hash in generation.image_hashes}
    except BlobCorrupt as error:
        raise RowRejected(f"request {generation.request_id}: {error}", "image_corrupt") from error


def _with_advantages(episodes: Sequence[Episode], objective: Objective) -> list[Episode]:
    advantages = row_advantages(
        objective,
        np.array([episode.score for episode in episodes], dtype=np.float64),
        np.array([episode.group for episode in episodes], dtype=np.int64),
        np.array([len(episode.rows) for episode in episodes], dtype=np.int64),
    )
    result: list[Episode] = []
    start = 0
    for episode in episodes:
        own = advantages[start : start + len(episode.rows)]
        start += len(episode.rows)
        rows = tuple(replace(row, advantage=float(value)) for row, value in zip(episode.rows, own, strict=True))
        result.append(replace(episode, rows=rows))
    return result


def _select(episodes: Sequence[Episode], select_steps: StepSelector, score: ScoreEntropies) -> list[TrainingRow]:
    selected: list[TrainingRow] = []
    for group in dict.fromkeys(episode.group for episode in episodes):
        rows = [row for episode in episodes if episode.group == group for row in episode.rows]
        if not rows:
            continue
        keep = select_steps(_entropies(rows, score))
        selected += [row for row, is_kept in zip(rows, keep, strict=True) if is_kept]
    return selected


def _entropies(rows: Sequence[TrainingRow], score: ScoreEntropies) -> list[float]:
    known = [row.mean_entropy for row in rows if row.mean_entropy is not None]
    if len(known) == len(rows):
        return known
    return list(score([row.row for row in rows]))
