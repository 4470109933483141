"""What a training step does to the weights."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dartrl.config import RunConfig, parse_config
from dartrl.policy.forward import token_logprobs
from dartrl.policy.inputs import collate
from dartrl.train.batch import assemble
from dartrl.train.learner import Learner

SCORES = [[1.0, 0.0, 1.0, 0.0]]


def config(**training: object) -> RunConfig:
    return parse_config({"training": {"minibatch_rows": 64, "microbatch_rows": 16, "learning_rate": 1e-2, **training}})


@pytest.fixture
def batch_of(recorder, select_all):
    def build(learner: Learner, claim=None, scores=SCORES):
        claim = claim or recorder.claim("c", scores)
        return assemble(claim, blobs=recorder.blobs, tools=learner, objective=learner.objective, select_steps=select_all)

    return build


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in learner.policy.model.state_dict().items()}


def mean_logprob(learner: Learner, rows) -> float:
    with torch.no_grad():
        logprobs_BT, _, _ = token_logprobs(learner.policy, collate([row.row for row in rows]))
    return float(logprobs_BT.sum(-1).mean())


@pytest.mark.parametrize("preset", ["default", "paper", "release"])
def test_it_makes_good_replies_likelier_and_bad_ones_less_likely(make_policy, batch_of, preset):
    learner = Learner(make_policy(), reference=make_policy(), config=config(preset=preset, learning_rate=1e-3))
    batch = batch_of(learner)
    good = [row for row in batch.rows if row.advantage > 0]
    bad = [row for row in batch.rows if row.advantage < 0]
    before = mean_logprob(learner, good) - mean_logprob(learner, bad)
    for step in range(3):
        learner.train(batch, step=step + 1, version=1, is_published=step == 0)
    assert mean_logprob(learner, good) - mean_logprob(learner, bad) > before + 0.1


def test_microbatches_do_not_change_the_update(make_policy, batch_of):
    gradients = []
    for size in (1, 16):
        learner = Learner(make_policy(), reference=None, config=config(microbatch_rows=size, learning_rate=0.0))
        metrics = learner.train(batch_of(learner), step=1, version=1, is_published=True)
        gradients.append({name: p.grad.clone() for name, p in learner.policy.model.named_parameters() if p.grad is not None})
        assert metrics["updates"] == 1
    for other in gradients[1:]:
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-3, atol=1e-5)


def test_learning_rate_zero_changes_nothing_and_measures_everything(make_policy, batch_of):
    learner = Learner(make_policy(), reference=None, config=config(learning_rate=0.0, weight_decay=0.1))
    before = weights_of(learner)
    metrics = learner.train(batch_of(learner), step=1, version=1, is_published=True)
    for name, value in weights_of(learner).items():
        assert torch.equal(value, before[name])
    assert metrics["gradient_norm"] > 0
    assert metrics["effective_sample_size"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["logprob_gap_max_at_lag_0"] < 1e-4


def test_later_updates_are_measured_against_the_weights_at_the_start(make_policy, batch_of):
    """The proximal policy is that of the step's start for all updates, so the gap is noise however far the updates go."""
    learner = Learner(make_policy(), reference=None, config=config(minibatch_rows=2, microbatch_rows=2, learning_rate=3e-2))
    batch = batch_of(learner)
    before = mean_logprob(learner, batch.rows)
    metrics = learner.train(batch, step=1, version=1, is_published=True)
    assert metrics["updates"] == 4
    assert metrics["logprob_gap_max_at_lag_0"] < 1e-4
    assert metrics["clip_share"] > 0
    assert abs(mean_logprob(learner, batch.rows) - before) > 0.1


def test_weights_beyond_the_published_version_have_no_lag_0(make_policy, batch_of):
    learner = Learner(make_policy(), reference=None, config=config(learning_rate=0.0))
    batch = batch_of(learner)
    metrics = learner.train(batch, step=2, version=3, is_published=False)
    assert metrics["staleness_max"] == 2.0
    assert "logprob_gap_max_at_lag_0" not in metrics
    assert "logprob_gap_max" in metrics


def test_a_batch_without_rows_changes_nothing(make_policy, batch_of, recorder):
    learner = Learner(make_policy(), reference=None, config=config())
    claim = recorder.claim("c", SCORES)
    group = replace(claim.groups[0], members=claim.groups[0].members[:1])
    before = weights_of(learner)
    batch = batch_of(learner, replace(claim, groups=(group,)))
    metrics = learner.train(batch, step=1, version=1, is_published=True)
    assert (metrics["rows"], metrics["updates"], metrics["episodes_rejected"]) == (0.0, 0.0, 1.0)
    assert all(torch.equal(value, before[name]) for name, value in weights_of(learner).items())


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(make_policy, batch_of):
    learner = Learner(make_policy(), reference=None, config=config())
    batch = batch_of(learner)
    with torch.no_grad():
        learner.policy.model.lm_head.weight[5] = torch.inf
    before = weights_of(learner)
    metrics = learner.train(batch, step=1, version=1, is_published=True)
    assert metrics["skipped_updates"] == metrics["updates"] == 1.0
    assert all(torch.equal(value, before[name]) for name, value in weights_of(learner).items())


def test_mean_entropies_are_those_the_engine_would_report(make_policy, batch_of, recorder):
    learner = Learner(make_policy(), reference=None, config=config(microbatch_rows=3))
    batch = batch_of(learner)
    expected = [row.mean_entropy for row in batch.rows]
    np.testing.assert_allclose(learner.mean_entropies([row.row for row in batch.rows]), expected, rtol=1e-5)
