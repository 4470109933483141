"""Curation rules against plain statements of what they promise."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dartrl.data.curation import (
    MAX_REPLAYS,
    CurationRules,
    MemberFacts,
    PoolFacts,
    Supply,
    admit_group,
    breaker_trips,
    choose_family,
    choose_replay,
    derive_seed,
    instance_order,
    judge_group,
    select_high_entropy_steps,
    trainable_share,
)
from dartrl.types import SCORED_ENDS, End

RULES = CurationRules(max_staleness=2, drop_zero_variance=True, experience_pool=True, pool_max_age=5)


def member(slot, score, *, version=10, steps=1, role="fresh", trajectory=None):
    return MemberFacts(f"m{slot}", trajectory or f"t{slot}", slot, role, score, score == 1.0, steps, version)


members_strategy = st.lists(
    st.builds(
        MemberFacts,
        membership_id=st.uuids().map(str),
        trajectory_id=st.sampled_from([f"t{number}" for number in range(6)]),
        slot=st.integers(0, 7),
        role=st.sampled_from(["fresh", "fresh", "replay"]),
        score=st.sampled_from([0.0, 0.5, 1.0]),
        success=st.just(False),
        num_steps=st.integers(0, 3),
        oldest_version=st.integers(3, 10),
    ).map(
        lambda facts: MemberFacts(*(getattr(facts, name) if name != "success" else facts.score == 1.0 for name in facts.__slots__))
    ),
    max_size=6,
    unique_by=lambda facts: facts.membership_id,
)
pool_strategy = st.lists(
    st.builds(
        PoolFacts,
        entry_id=st.integers(1, 100),
        trajectory_id=st.sampled_from([f"p{number}" for number in range(4)] + ["t0", "t1"]),
        score=st.just(1.0),
        num_steps=st.integers(0, 3),
        oldest_version=st.integers(0, 10),
        replays=st.integers(0, MAX_REPLAYS + 1),
    ),
    max_size=5,
    unique_by=lambda facts: facts.entry_id,
)
rules_strategy = st.builds(
    CurationRules,
    max_staleness=st.integers(0, 8),
    drop_zero_variance=st.booleans(),
    experience_pool=st.booleans(),
    pool_max_age=st.integers(0, 10),
)


@given(members=members_strategy, pool=pool_strategy, rules=rules_strategy)
def test_a_trainable_group_satisfies_every_rule(members, pool, rules):
    verdict = judge_group(members, pool, version=10, rules=rules)
    if not verdict.is_trainable:
        assert verdict.reason in ("stale", "too_small", "zero_variance") and verdict.replay is None
        return
    kept = [each for each in members if each.membership_id not in verdict.dropped]
    trajectories = [each.trajectory_id for each in kept] + ([verdict.replay.trajectory_id] if verdict.replay else [])
    scores = [each.score for each in kept] + ([verdict.replay.score] if verdict.replay else [])
    assert len(trajectories) >= 2 and len(set(trajectories)) == len(trajectories)
    assert all(each.num_steps > 0 for each in kept)
    assert all(10 - each.oldest_version <= rules.max_staleness for each in kept if each.role == "fresh")
    assert all(10 - each.oldest_version <= rules.pool_max_age for each in kept if each.role == "replay")
    assert not rules.drop_zero_variance or len(set(scores)) > 1
    if verdict.replay:
        assert rules.experience_pool and not any(each.success for each in kept)
        assert 10 - verdict.replay.oldest_version <= rules.pool_max_age and verdict.replay.replays < MAX_REPLAYS
        assert Counter(verdict.dropped.values())["substituted"] == 1
        assert verdict.replay_slot == next(
            each.slot for each in members if verdict.dropped.get(each.membership_id) == "substituted"
        )


def test_substitution_comes_before_zero_variance():
    failed = [member(slot, 0.0) for slot in range(3)]
    success = PoolFacts(1, "p", 1.0, 2, 8, 0)
    assert judge_group(failed, [], version=10, rules=RULES).reason == "zero_variance"
    verdict = judge_group(failed, [success], version=10, rules=RULES)
    assert (verdict.reason, verdict.replay, dict(verdict.dropped)) == ("", success, {"m0": "substituted"})


def test_age_is_judged_by_the_oldest_fresh_member():
    assert judge_group([member(0, 0.0, version=8), member(1, 1.0)], [], version=10, rules=RULES).is_trainable
    assert judge_group([member(0, 0.0, version=7), member(1, 1.0)], [], version=10, rules=RULES).reason == "stale"
    old_replay = [member(0, 0.0), member(1, 0.0), member(2, 1.0, version=5, role="replay")]
    assert judge_group(old_replay, [], version=10, rules=RULES).is_trainable


def test_the_least_replayed_and_then_newest_success_is_taken():
    pool = [
        PoolFacts(1, "a", 1.0, 1, 9, 1),
        PoolFacts(2, "b", 1.0, 1, 7, 0),
        PoolFacts(3, "c", 1.0, 1, 8, 0),
        PoolFacts(4, "d", 1.0, 1, 1, 0),
    ]
    assert choose_replay(pool, taken=set(), version=10, rules=RULES) == pool[2]
    assert choose_replay(pool, taken={"c", "b"}, version=10, rules=RULES) == pool[0]
    assert choose_replay(pool, taken={"a", "b", "c"}, version=10, rules=RULES) is None


# --------------------------------------------------------------------------- admission

supply_strategy = st.builds(
    Supply,
    open_groups=st.integers(0, 30),
    ready_groups=st.integers(0, 30),
    claimed_groups=st.integers(0, 8),
    groups_opened=st.integers(0, 200),
    trainable_share=st.floats(0.05, 1.0),
    trainer_version=st.integers(0, 50),
    served_version=st.integers(0, 50),
)


@given(supply=supply_strategy, batch=st.integers(1, 8), staleness=st.integers(0, 6))
def test_admission_bounds_what_waits_for_the_trainer(supply, batch, staleness):
    admission = admit_group(supply, sampling="rollout", batch=batch, max_staleness=staleness, slots=8, max_rollouts=4)
    assert batch <= admission.capacity <= (staleness + 1) * batch
    assert admission.admitted == (admission.expected_groups < admission.capacity)
    if admission.admitted:
        assert supply.ready_groups + supply.claimed_groups < (staleness + 1) * batch


@pytest.mark.parametrize("sampling", ["rollout", "task", "batch"])
@given(batch=st.integers(1, 6), staleness=st.integers(0, 4), ready=st.integers(0, 5), opened=st.integers(0, 50))
def test_admission_never_starves_a_waiting_trainer(sampling, batch, staleness, ready, opened):
    """Nothing runs and fewer groups are ready than a step needs: a group must be let in."""
    if ready >= batch:
        return
    supply = Supply(0, ready, 0, opened, 1.0, 20, 3)
    assert admit_group(supply, sampling=sampling, batch=batch, max_staleness=staleness, slots=8, max_rollouts=4).admitted


def test_baselines_wait_where_rollout_wise_goes_on():
    busy = Supply(2, 1, 0, 8, 1.0, 5, 5)
    options = {"batch": 4, "max_staleness": 4, "slots": 8, "max_rollouts": 4}
    assert admit_group(busy, sampling="rollout", **options).admitted
    assert admit_group(busy, sampling="task", **options).reason == "sampling"
    assert admit_group(busy, sampling="batch", **options).reason == "sampling"
    assert admit_group(Supply(1, 0, 0, 6, 1.0, 5, 5), sampling="batch", **options).admitted, "in the middle of a batch"


def test_a_queue_within_its_limit_is_trained_within_max_staleness():
    """First in, first out, one version per step: the last group of a full queue is just young enough."""
    for staleness in range(4):
        for batch in (1, 3):
            queue: list[int] = []
            for version in range(20):
                while admit_group(
                    Supply(0, len(queue), 0, 0, 1.0, version, version),
                    sampling="rollout",
                    batch=batch,
                    max_staleness=staleness,
                    slots=8,
                    max_rollouts=4,
                ).admitted:
                    queue.append(version)
                claimed, queue = queue[:batch], queue[batch:]
                assert max(version - sampled for sampled in claimed) <= staleness


def test_the_share_of_trainable_groups_starts_at_one():
    assert trainable_share(0, 0) == 1.0
    assert trainable_share(8, 8) == 1.0
    assert trainable_share(8, 0) == 0.5
    assert 0 < trainable_share(10_000, 0) < 0.01


@given(ends=st.lists(st.sampled_from(list(End)), max_size=30), window=st.integers(5, 20), share=st.floats(0.05, 1.0))
def test_the_breaker_counts_infrastructure_errors_in_its_window(ends, window, share):
    recent = ends[:window]
    broken = [end for end in recent if end not in SCORED_ENDS]
    assert breaker_trips(ends, window=window, share=share) == (len(recent) == window and len(broken) / window > share)


# --------------------------------------------------------------------------- choice of tasks


@given(seed=st.integers(0, 100), families=st.integers(1, 6), rounds=st.integers(1, 5))
def test_families_are_served_evenly(seed, families, rounds):
    opened = {f"family-{number}": 0 for number in range(families)}
    for _ in range(families * rounds):
        opened[choose_family(opened, seed)] += 1
    assert set(opened.values()) == {rounds}


def test_each_lap_serves_every_instance_once_in_another_order():
    names = [f"task/{number}" for number in range(30)]
    laps = [instance_order(names, 3, "task", lap) for lap in range(3)]
    assert all(sorted(lap) == sorted(names) for lap in laps)
    assert len(set(laps)) == 3
    assert laps[0] == instance_order(list(reversed(names)), 3, "task", 0)


def test_seeds_depend_on_every_part():
    seeds = [
        derive_seed(*parts)
        for parts in (
            (0, "train", "g", 1, 2),
            (1, "train", "g", 1, 2),
            (0, "evaluation", "g", 1, 2),
            (0, "train", "g", 12),
            (0, "train", "g1", 2),
        )
    ]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)
    assert seeds[0] == derive_seed(0, "train", "g", 1, 2) == 7_504_423_954_257_344_600


# --------------------------------------------------------------------------- steps


def slow_percentile(values, share):
    """Linear interpolation between the two nearest ranks."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * share
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@given(entropies=st.lists(st.floats(0, 5, width=32) | st.just(math.nan), max_size=30), share=st.sampled_from([0.2, 0.5, 0.8, 1.0]))
def test_steps_at_or_above_the_percentile_train(entropies, share):
    chosen = select_high_entropy_steps(share)(entropies)
    finite = [value for value in entropies if math.isfinite(value)]
    assert len(chosen) == len(entropies)
    for value, is_chosen in zip(entropies, chosen, strict=True):
        if share == 1.0 or not math.isfinite(value):
            assert is_chosen
            continue
        threshold = slow_percentile(finite, 1 - share)
        if not math.isclose(value, threshold, rel_tol=1e-9, abs_tol=1e-12):
            assert is_chosen == (value >= threshold)
    if finite:
        assert chosen[int(np.nanargmax(entropies))], "the step with the highest entropy always trains"


def test_eighty_percent_of_distinct_steps_train():
    assert select_high_entropy_steps(0.8)([float(number) for number in range(10)]) == [False, False] + [True] * 8
