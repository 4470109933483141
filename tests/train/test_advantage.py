"""Advantages against plain loops, properties and numbers worked out by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dartrl.train.advantage import STD_EPSILON, leave_one_out, step_group_z_score

SCORES = st.floats(0.0, 1.0, allow_subnormal=False)
GROUPED_SCORES = st.lists(st.tuples(SCORES, st.integers(0, 4)), min_size=1, max_size=40)


def slow_z_score(scores: list[float], groups: list[int]) -> list[float]:
    result: list[float] = []
    for score, group in zip(scores, groups, strict=True):
        fellows = [s for s, g in zip(scores, groups, strict=True) if g == group]
        if len(fellows) == 1:
            mean, deviation = 0.0, 1.0
        else:
            mean = math.fsum(fellows) / len(fellows)
            deviation = math.sqrt(math.fsum((s - mean) ** 2 for s in fellows) / (len(fellows) - 1))
        result.append((score - mean) / (deviation + STD_EPSILON))
    return result


def slow_leave_one_out(scores: list[float], groups: list[int]) -> list[float]:
    result: list[float] = []
    for position, (score, group) in enumerate(zip(scores, groups, strict=True)):
        others = [s for i, (s, g) in enumerate(zip(scores, groups, strict=True)) if g == group and i != position]
        result.append(score - math.fsum(others) / len(others) if others else 0.0)
    return result


def arrays(pairs: list[tuple[float, int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([s for s, _ in pairs], np.float64), np.array([g for _, g in pairs], np.int64)


@given(GROUPED_SCORES)
def test_z_score_is_that_of_the_plain_loop(pairs):
    scores, groups = arrays(pairs)
    # an eps of 1e-6 amplifies rounding of nearly equal scores a million times
    np.testing.assert_allclose(step_group_z_score(scores, groups), slow_z_score(list(scores), list(groups)), atol=1e-8)


@given(GROUPED_SCORES)
def test_leave_one_out_is_that_of_the_plain_loop(pairs):
    scores, groups = arrays(pairs)
    np.testing.assert_allclose(leave_one_out(scores, groups), slow_leave_one_out(list(scores), list(groups)), atol=1e-12)


@given(GROUPED_SCORES)
def test_leave_one_out_sums_to_zero_in_each_group(pairs):
    scores, groups = arrays(pairs)
    advantages = leave_one_out(scores, groups)
    for group in set(groups.tolist()):
        assert advantages[groups == group].sum() == pytest.approx(0.0, abs=1e-12)


@given(GROUPED_SCORES, st.randoms(use_true_random=False))
def test_advantages_follow_their_rows_when_the_order_changes(pairs, random):
    order = list(range(len(pairs)))
    random.shuffle(order)
    scores, groups = arrays(pairs)
    for advantage in (step_group_z_score, leave_one_out):
        np.testing.assert_allclose(advantage(scores[order], groups[order]), advantage(scores, groups)[order], atol=1e-8)


@given(SCORES, st.integers(2, 12))
def test_equal_scores_teach_nothing(score, size):
    scores, groups = np.full(size, score), np.zeros(size, np.int64)
    assert not step_group_z_score(scores, groups).any()
    assert not leave_one_out(scores, groups).any()


def test_z_score_counts_long_failures_once_per_step():
    """2 successes of 10 steps beside 6 failures of 28 steps: +2.89 and -0.34, the arithmetic of the paper's weighting."""
    scores = np.array([1.0] * 20 + [0.0] * 168)
    advantages = step_group_z_score(scores, np.zeros(188, np.int64))
    assert advantages[0] == pytest.approx(2.8905, abs=1e-4)
    assert advantages[-1] == pytest.approx(-0.3441, abs=1e-4)


def test_golden_values():
    scores = np.array([1.0, 0.0, 0.5, 0.0, 1.0])
    groups = np.array([0, 0, 0, 1, 2])
    np.testing.assert_allclose(step_group_z_score(scores, groups), [0.999998, -0.999998, 0.0, 0.0, 0.999999], rtol=0, atol=1e-9)
    np.testing.assert_allclose(leave_one_out(scores, groups), [0.75, -0.75, 0.0, 0.0, 0.0], rtol=0, atol=0)


def test_a_lone_row_keeps_its_score_in_the_paper_and_nothing_in_the_default():
    assert step_group_z_score(np.array([1.0]), np.array([7])) == pytest.approx(1.0, abs=2e-6)
    assert leave_one_out(np.array([1.0]), np.array([7])) == 0.0
