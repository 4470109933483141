"""Diagnostics of a training step against plain loops."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dartrl.train.diagnostics import effective_sample_size, gap_summary, staleness_summary

LOGS = st.lists(st.floats(-8, 8), min_size=1, max_size=50)


@given(LOGS)
def test_effective_sample_size_is_that_of_the_plain_loop(logs):
    weights = [math.exp(x) for x in logs]
    expected = math.fsum(weights) ** 2 / (len(weights) * math.fsum(w * w for w in weights))
    assert effective_sample_size(np.array(logs)) == pytest.approx(expected, rel=1e-9)


@given(LOGS, st.floats(-500, 500))
def test_effective_sample_size_is_a_share_and_ignores_scale(logs, shift):
    share = effective_sample_size(np.array(logs))
    assert 1 / len(logs) - 1e-9 <= share <= 1 + 1e-9
    assert effective_sample_size(np.array(logs) + shift) == pytest.approx(share, rel=1e-6)


def test_effective_sample_size_extremes():
    assert effective_sample_size(np.zeros(7)) == 1.0
    assert effective_sample_size(np.array([0.0, -100.0, -100.0, -100.0])) == pytest.approx(0.25)
    assert effective_sample_size(np.empty(0)) == 1.0


def test_gaps_are_summarised_over_all_tokens_and_at_lag_0():
    proximal = np.linspace(0.0, 1.0, 201)
    ages = np.array([0] * 101 + [3] * 100)
    summary = gap_summary(proximal, np.zeros(201), ages)
    assert summary["logprob_gap_mean"] == pytest.approx(0.5)
    assert summary["logprob_gap_max"] == 1.0
    assert summary["logprob_gap_p99"] == pytest.approx(0.99)
    assert summary["logprob_gap_max_at_lag_0"] == pytest.approx(0.5)
    assert summary["logprob_gap_mean_at_lag_0"] == pytest.approx(0.25)
    assert summary["logprob_gap_p99_at_lag_0"] == pytest.approx(0.495)


def test_lag_0_is_absent_without_fresh_tokens():
    summary = gap_summary(np.array([-1.0]), np.array([-1.5]), np.array([2]))
    assert set(summary) == {"logprob_gap_mean", "logprob_gap_p99", "logprob_gap_max"}
    assert gap_summary(np.empty(0), np.empty(0), np.empty(0, np.int64)) == {}


def test_staleness_is_summarised_by_row():
    assert staleness_summary(np.array([0, 1, 5])) == {"staleness_mean": 2.0, "staleness_max": 5.0}
    assert staleness_summary(np.empty(0, np.int64)) == {}
