"""The whole trainer against the real data manager in memory and a small random policy."""

from pathlib import Path

import pytest
import torch

from dartrl.policy.manifest import verify_manifest
from dartrl.policy.model import load_policy
from dartrl.policy.probes import check_probes

GROUP = 4


async def test_it_publishes_the_initial_weights_before_anything_else(make_bench, make_policy):
    bench = make_bench()
    async with bench.running():
        await bench.clock.advance(1.0)
        weights = bench.ledger.current_weights()
        assert weights is not None
        assert (weights.version, weights.training_step, weights.parent) == (1, 0, None)
        verify_manifest(Path(weights.path), weights.checksum)
        assert check_probes(make_policy(), Path(weights.path), tolerance=1e-6) <= 1e-6


async def test_it_trains_publishes_and_checkpoints_and_leaves_nothing_applied(make_bench, make_policy):
    bench = make_bench()
    async with bench.running():
        await bench.until_step(5)
    steps = bench.ledger.training_steps()
    assert [step.index for step in steps] == list(range(1, len(steps) + 1))
    counts = bench.ledger.counts()
    assert counts.get("members_applied", 0) == 0
    assert counts["members_trained"] == len(steps) * 2 * GROUP
    weights = bench.ledger.current_weights()
    assert weights is not None and weights.training_step == len(steps)
    trained = load_policy(Path(weights.path)).model.state_dict()
    initial = make_policy().model.state_dict()
    assert any(not torch.equal(trained[name], initial[name]) for name in initial)


async def test_each_step_reports_how_far_off_policy_it_was(make_bench):
    bench = make_bench()
    async with bench.running():
        await bench.until_step(3)
    for step in bench.ledger.training_steps():
        metrics = step.metrics
        assert metrics["episodes"] == 2 * GROUP
        assert metrics["success"] == 0.5
        assert 0 < metrics["effective_sample_size"] <= 1
        assert 0 <= metrics["staleness_max"] <= bench.config.curation.max_staleness
        assert metrics["rows_left_out"] == 0
        if "logprob_gap_max_at_lag_0" in metrics:
            assert metrics["logprob_gap_max_at_lag_0"] < 1e-4
    first = bench.ledger.training_steps()[0].metrics
    assert first["logprob_gap_max_at_lag_0"] < 1e-4
    assert first["effective_sample_size"] == pytest.approx(1.0, abs=1e-4)


async def test_learning_rate_zero_is_a_control_run(make_bench, make_policy):
    bench = make_bench(learning_rate=0.0)
    async with bench.running():
        await bench.until_step(3)
    weights = bench.ledger.current_weights()
    assert weights is not None and weights.version >= 4
    served = load_policy(Path(weights.path)).model.state_dict()
    for name, value in make_policy().model.state_dict().items():
        assert torch.equal(served[name], value), name
