"""Losses against plain loops, properties, golden values and gradients."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dartrl.train.loss import (
    importance_weights,
    k3_divergence,
    sequence_ratio_loss,
    token_ratio_loss,
    token_shares,
)

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


@st.composite
def microbatches(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Random log-probabilities of two policies with a ragged mask; float64, so that the loops can be compared closely."""
    rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from([0.0, 0.1, 1.0, 15.0]))
    lengths = random.integers(1, width + 1, rows)
    logprobs = -np.abs(random.normal(size=(rows, width))) * 2
    return {
        "logprobs_BT": torch.tensor(logprobs),
        "proximal_BT": torch.tensor(logprobs + spread * random.normal(size=(rows, width))),
        "behaviour_BT": torch.tensor(logprobs + spread * random.normal(size=(rows, width))),
        "mask_BT": torch.tensor(np.arange(width)[None, :] < lengths[:, None]),
        "advantages_B": torch.tensor(random.normal(size=rows)),
    }


def entries(batch):
    for b, t in zip(*np.nonzero(batch["mask_BT"].numpy()), strict=True):
        yield int(b), int(t)


def slow_clip(ratio, advantage):
    bounded = min(max(ratio, 1 - CLIP["clip_low"]), 1 + CLIP["clip_high"])
    return -min(ratio * advantage, bounded * advantage)


@given(microbatches())
def test_token_ratio_loss_is_that_of_the_plain_loop(batch):
    losses, clipped = token_ratio_loss(batch["logprobs_BT"], batch["proximal_BT"], batch["advantages_B"], **CLIP)
    for b, t in entries(batch):
        log_ratio = float(batch["logprobs_BT"][b, t] - batch["proximal_BT"][b, t])
        ratio, advantage = math.exp(min(max(log_ratio, -20), 20)), float(batch["advantages_B"][b])
        assert float(losses[b, t]) == pytest.approx(slow_clip(ratio, advantage), rel=1e-9)
        is_outside = ratio > 1.28 if advantage > 0 else ratio < 0.8
        assert bool(clipped[b, t]) == is_outside


@given(microbatches())
def test_sequence_ratio_loss_is_that_of_the_plain_loop(batch):
    losses, _ = sequence_ratio_loss(batch["logprobs_BT"], batch["proximal_BT"], batch["mask_BT"], batch["advantages_B"], **CLIP)
    for b, t in entries(batch):
        row = [float(batch["logprobs_BT"][b, k] - batch["proximal_BT"][b, k]) for c, k in entries(batch) if c == b]
        ratio = math.exp(min(math.fsum(row) / len(row), 10))
        assert float(losses[b, t]) == pytest.approx(slow_clip(ratio, float(batch["advantages_B"][b])), rel=1e-9)


@given(microbatches(), st.sampled_from(["truncate", "mask", "none"]), st.sampled_from([1.0, 1.5, 2.0, 5.0]))
def test_importance_weights_are_those_of_the_plain_loop(batch, correction, cap):
    weights = importance_weights(batch["proximal_BT"], batch["behaviour_BT"], correction=correction, cap=cap)
    for b, t in entries(batch):
        log_rho = float(batch["proximal_BT"][b, t] - batch["behaviour_BT"][b, t])
        rho = math.exp(min(max(log_rho, -20), 20))
        expected = {"truncate": min(rho, cap), "mask": rho if 1 / cap <= rho <= cap else 0.0, "none": 1.0}[correction]
        assert float(weights[b, t]) == pytest.approx(expected, rel=1e-9)


@given(microbatches())
def test_k3_is_that_of_the_plain_loop_and_never_negative(batch):
    divergence = k3_divergence(batch["logprobs_BT"], batch["behaviour_BT"])
    for b, t in entries(batch):
        d = min(max(float(batch["behaviour_BT"][b, t] - batch["logprobs_BT"][b, t]), -20), 20)
        assert float(divergence[b, t]) == pytest.approx(min(math.exp(d) - d - 1, 10.0), rel=1e-9, abs=1e-12)
        assert float(divergence[b, t]) >= 0


@given(microbatches())
def test_shares_of_both_sums_are_those_of_the_plain_loop(batch):
    mask = batch["mask_BT"]
    constant = token_shares(mask, aggregation="constant", normaliser=24.0)
    by_row = token_shares(mask, aggregation="sequence_mean", normaliser=float(len(mask)))
    for b in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            assert float(constant[b, t]) == pytest.approx(1 / 24 if mask[b, t] else 0.0)
            assert float(by_row[b, t]) == pytest.approx(1 / (int(mask[b].sum()) * len(mask)) if mask[b, t] else 0.0)
    assert float(by_row.sum()) == pytest.approx(1.0, rel=1e-6)


@settings(max_examples=25)
@given(microbatches())
def test_unchanged_weights_give_the_plain_policy_gradient(batch):
    """At ratio 1 nothing is clipped, and the gradient of both forms is -A (divided by nothing) at every token."""
    for use_sequence in (False, True):
        logprobs = batch["logprobs_BT"].clone().requires_grad_()
        if use_sequence:
            losses, clipped = sequence_ratio_loss(logprobs, logprobs.detach(), batch["mask_BT"], batch["advantages_B"], **CLIP)
        else:
            losses, clipped = token_ratio_loss(logprobs, logprobs.detach(), batch["advantages_B"], **CLIP)
        losses[batch["mask_BT"]].sum().backward()
        expected = -batch["advantages_B"][:, None].expand_as(logprobs) * batch["mask_BT"]
        torch.testing.assert_close(logprobs.grad, expected)
        assert not clipped.any()


def test_clipped_tokens_have_no_gradient_and_others_do():
    logprobs = torch.tensor([[math.log(1.5), math.log(0.5), 0.0]], dtype=torch.float64, requires_grad=True)
    proximal = torch.zeros(1, 3, dtype=torch.float64)
    losses, clipped = token_ratio_loss(logprobs, proximal, torch.tensor([1.0], dtype=torch.float64), **CLIP)
    losses.sum().backward()
    assert clipped.tolist() == [[True, False, False]]
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.0, -0.5, -1.0]], dtype=torch.float64))


def test_golden_values():
    logprobs = torch.tensor([[-0.1, -2.0, -0.7], [-1.2, -0.3, -5.0]], dtype=torch.float64)
    proximal = torch.tensor([[-0.4, -1.5, -0.7], [-1.0, -0.9, -4.0]], dtype=torch.float64)
    behaviour = torch.tensor([[-0.5, -1.0, -0.7], [-2.0, -0.9, -4.5]], dtype=torch.float64)
    advantages = torch.tensor([0.75, -0.5], dtype=torch.float64)
    losses, _ = token_ratio_loss(logprobs, proximal, advantages, **CLIP)
    golden = [[-0.96, -0.454897994784475, -0.75], [0.409365376538991, 0.911059400195254, 0.4]]
    np.testing.assert_allclose(losses.numpy(), golden, rtol=1e-12)
    weights = importance_weights(proximal, behaviour, correction="truncate", cap=2.0)
    np.testing.assert_allclose(
        weights.numpy(), [[1.10517091807565, 0.606530659712633, 1.0], [2.0, 1.0, 1.64872127070013]], rtol=1e-12
    )
    weights = importance_weights(proximal, behaviour, correction="mask", cap=1.6)
    np.testing.assert_allclose(weights.numpy(), [[1.10517091807565, 0.0, 1.0], [0.0, 1.0, 0.0]], rtol=1e-12)
    np.testing.assert_allclose(
        k3_divergence(logprobs, behaviour).numpy(),
        [[0.0703200460356393, 0.718281828459045, 0.0], [0.249328964117222, 0.148811636094026, 0.148721270700128]],
        rtol=1e-12,
    )


def test_extreme_ratios_stay_finite():
    logprobs = torch.tensor([[0.0, -80.0]], requires_grad=True)
    far = torch.tensor([[-90.0, 0.0]])
    for losses in (
        token_ratio_loss(logprobs, far, torch.tensor([-1.0]), **CLIP)[0],
        sequence_ratio_loss(logprobs, far, torch.ones(1, 2, dtype=torch.bool), torch.tensor([-1.0]), **CLIP)[0],
        k3_divergence(logprobs, far),
        importance_weights(far, logprobs, correction="truncate", cap=2.0),
    ):
        assert torch.isfinite(losses).all()
