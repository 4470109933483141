"""Adaptive data curation: every rule as a pure function of counts and rows that the ledger hands in.

Order of operations at a claim: validity (age, missing rows) -> de-duplication -> substitution from the experience
pool -> zero variance. What follows, advantage statistics over all remaining steps and the selection of high-entropy
steps, happens in the trainer, which gets `select_high_entropy_steps` handed in.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dartrl.interfaces import StepSelector
from dartrl.types import SCORED_ENDS, End

MIN_MEMBERS = 2
"""A group with fewer scored members has no baseline."""
MAX_REPLAYS = 8
"""Times that one stored success may replace a failure."""
PRIOR_GROUPS = 8
"""Groups counted as trainable before any has closed, so that the share starts at 1 and moves slowly."""

# --------------------------------------------------------------------------- seeds


def derive_seed(run_seed: int, purpose: str, *ids: object) -> int:
    """Seed in [0, 2^63) that depends on the run's seed, what it is for, and ids; equal inputs give equal seeds."""
    text = "\x1f".join([str(run_seed), purpose, *map(str, ids)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


# --------------------------------------------------------------------------- which task next


def choose_family(groups_opened: Mapping[str, int], run_seed: int) -> str:
    """The family that was served least so far; ties are broken by a seeded draw that changes from group to group."""
    total = sum(groups_opened.values())
    return min(groups_opened, key=lambda family: (groups_opened[family], derive_seed(run_seed, "family", total, family)))


def instance_order(task_ids: Sequence[str], run_seed: int, family: str, lap: int) -> tuple[str, ...]:
    """Order in which the instances of a family are served in one lap: a seeded shuffle, each instance once."""
    return tuple(sorted(task_ids, key=lambda task_id: derive_seed(run_seed, "instance", family, lap, task_id)))


# --------------------------------------------------------------------------- admission


@dataclass(frozen=True, slots=True)
class Supply:
    """What the ledger holds when a free slot asks for a new group."""

    open_groups: int
    """Training groups whose slots are still being filled."""
    ready_groups: int
    """Closed groups that wait for the trainer."""
    claimed_groups: int
    """Groups in the trainer's hands."""
    groups_opened: int
    """Training groups opened so far."""
    trainable_share: float
    """Share of closed groups that were fit to train on, in (0, 1]."""
    trainer_version: int
    """Newest published version."""
    served_version: int
    """Oldest version that a policy worker answers with."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether a new group may open, and why."""

    admitted: bool
    """True if a new group may open."""
    reason: str
    """admitted, staleness or sampling."""
    expected_groups: float
    """Trainable groups that are in flight or ready."""
    capacity: int
    """Limit of expected_groups."""


def admit_group(
    supply: Supply,
    *,
    sampling: Literal["rollout", "task", "batch"],
    batch: int,
    max_staleness: int,
    slots: int,
    max_rollouts: int,
) -> Admission:
    """May a new group open?

    Expected trainable groups in flight and ready stay below (max_staleness + 1) x batch, minus one batch for every
    version by which the workers lag behind the trainer (at least one batch remains). A first-in, first-out queue of
    that length is trained within max_staleness versions of its tokens. Every final state frees capacity.

    sampling: `rollout` opens whenever a slot is free; `task` holds slots until their whole group is done (`slots` /
    `max_rollouts` groups side by side); `batch` opens a batch only after the last one was trained.
    """
    lag = min(max(supply.trainer_version - supply.served_version, 0), max_staleness)
    capacity = (max_staleness + 1 - lag) * batch
    expected = supply.open_groups * supply.trainable_share + supply.ready_groups + supply.claimed_groups
    if expected >= capacity:
        return Admission(False, "staleness", expected, capacity)
    if sampling == "task" and supply.open_groups >= max(1, slots // max_rollouts):
        return Admission(False, "sampling", expected, capacity)
    if sampling == "batch" and not _batch_may_grow(supply, batch):
        return Admission(False, "sampling", expected, capacity)
    return Admission(True, "admitted", expected, capacity)


def _batch_may_grow(supply: Supply, batch: int) -> bool:
    """True in the middle of a batch, or once nothing runs or trains and too few groups are ready for a step."""
    if supply.groups_opened % batch:
        return True
    return supply.open_groups == 0 and supply.claimed_groups == 0 and supply.ready_groups < batch


def trainable_share(closed: int, trainable: int) -> float:
    """Share of closed groups that were fit to train on, pulled towards 1 while few have closed."""
    return (trainable + PRIOR_GROUPS) / (closed + PRIOR_GROUPS)


def breaker_trips(ends: Sequence[str], *, window: int, share: float) -> bool:
    """True if infrastructure errors exceed `share` of the last `window` episodes; never before `window` have ended.

    ends: newest first.
    """
    recent = ends[:window]
    errors = sum(End(end) not in SCORED_ENDS for end in recent)
    return len(recent) >= window and errors > share * len(recent)


# --------------------------------------------------------------------------- what is fit to train on


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """One membership, as far as curation needs it."""

    membership_id: str
    """Id of the row."""
    trajectory_id: str
    """Its trajectory."""
    slot: int
    """Slot in the group."""
    role: Literal["fresh", "replay"]
    """Replay = from the experience pool."""
    score: float
    """In [0, 1]."""
    success: bool
    """Fully solved."""
    num_steps: int
    """Training rows it would give."""
    oldest_version: int
    """Smallest weights version among its tokens."""


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """One stored success of an instance."""

    entry_id: int
    """Id of the row."""
    trajectory_id: str
    """Its trajectory."""
    score: float
    """In [0, 1]."""
    num_steps: int
    """Training rows it would give."""
    oldest_version: int
    """Smallest weights version among its tokens."""
    replays: int
    """Times it was replayed."""


@dataclass(frozen=True, slots=True)
class CurationRules:
    """The switches."""

    max_staleness: int
    """Largest age in versions of a fresh member."""
    drop_zero_variance: bool
    """Reject groups whose members all scored the same."""
    experience_pool: bool
    """Replace one failure of a group that failed throughout."""
    pool_max_age: int
    """Largest age in versions of a replayed success."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a group."""

    reason: str
    """`` if it trains, else why it is rejected: too_small, stale or zero_variance."""
    dropped: Mapping[str, str]
    """membership id -> reason, for members that are left out."""
    replay: PoolFacts | None
    """The stored success that joins the group."""
    replay_slot: int
    """Slot of the failure it replaces; -1 without."""

    @property
    def is_trainable(self) -> bool:
        return not self.reason


def judge_group(members: Sequence[MemberFacts], pool: Sequence[PoolFacts], *, version: int, rules: CurationRules) -> Verdict:
    """Is the group fit to train on, and who joins or leaves?

    members: all that are not rejected. pool: stored successes of the same instance. version: the trainer's.
    """
    dropped: dict[str, str] = {}
    kept = _drop_invalid(members, dropped, version=version, rules=rules)
    fresh_ages = [version - member.oldest_version for member in kept if member.role == "fresh"]
    if max(fresh_ages, default=0) > rules.max_staleness:
        return Verdict("stale", dropped, None, -1)
    if len(kept) < MIN_MEMBERS:
        return Verdict("too_small", dropped, None, -1)
    replay = None
    slot = -1
    if rules.experience_pool and not any(member.success for member in kept):
        replay = choose_replay(pool, taken={member.trajectory_id for member in kept}, version=version, rules=rules)
        if replay is not None:
            replaced = min(kept, key=lambda member: (member.oldest_version, member.slot))
            dropped[replaced.membership_id] = "substituted"
            slot = replaced.slot
            kept = [member for member in kept if member is not replaced]
    scores = {member.score for member in kept} | ({replay.score} if replay else set())
    if rules.drop_zero_variance and len(scores) == 1:
        return Verdict("zero_variance", {}, None, -1)
    return Verdict("", dropped, replay, slot)


def _drop_invalid(
    members: Sequence[MemberFacts], dropped: dict[str, str], *, version: int, rules: CurationRules
) -> list[MemberFacts]:
    """Members without rows, replays past their age, and second appearances of a trajectory leave."""
    kept: list[MemberFacts] = []
    seen: set[str] = set()
    for member in members:
        if member.num_steps == 0:
            dropped[member.membership_id] = "empty"
        elif member.role == "replay" and version - member.oldest_version > rules.pool_max_age:
            dropped[member.membership_id] = "pool_age"
        elif member.trajectory_id in seen:
            dropped[member.membership_id] = "duplicate"
        else:
            seen.add(member.trajectory_id)
            kept.append(member)
    return kept


def choose_replay(pool: Sequence[PoolFacts], *, taken: set[str], version: int, rules: CurationRules) -> PoolFacts | None:
    """The stored success that was replayed least, newest first among equals; None if all are too old or used up."""
    usable = [
        entry
        for entry in pool
        if entry.trajectory_id not in taken
        and entry.replays < MAX_REPLAYS
        and entry.num_steps > 0
        and version - entry.oldest_version <= rules.pool_max_age
    ]
    return min(usable, key=lambda entry: (entry.replays, -entry.oldest_version, -entry.entry_id), default=None)


# --------------------------------------------------------------------------- which steps train


def select_high_entropy_steps(share: float) -> StepSelector:
    """Selector of the steps whose mean token entropy is at or above the group's (1 - share) percentile.

    share: in (0, 1]; 0.8 keeps the top 80 %, 1 keeps all. Steps without a finite entropy cannot be ranked and train.
    Source: DART, arXiv:2509.23866, high-entropy step selection (percentile with linear interpolation).
    """

    def select(entropies: Sequence[float]) -> Sequence[bool]:
        finite = [entropy for entropy in entropies if math.isfinite(entropy)]
        if share >= 1 or not finite:
            return [True] * len(entropies)
        threshold = float(np.percentile(np.asarray(finite, dtype=np.float64), 100 * (1 - share)))
        return [not math.isfinite(entropy) or entropy >= threshold for entropy in entropies]

    return select
