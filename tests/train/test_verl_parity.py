"""Our formulas against verl's own, where verl has the same one. Needs `pip install verl` (checked with 0.9.1)."""

from typing import Any

import numpy as np
import pytest
import torch

from dartrl.config import parse_config
from dartrl.train.advantage import leave_one_out, step_group_z_score
from dartrl.train.loss import importance_weights, k3_divergence
from dartrl.train.objective import TokenTerms, microbatch_loss, objective_of

core_algos: Any = pytest.importorskip(
    "verl.trainer.ppo.core_algos", reason="verl is not installed; `pip install verl==0.9.1` to compare", exc_type=ImportError
)
pytestmark = pytest.mark.slow

AGGREGATION = {"sequence_mean": "seq-mean-token-mean", "constant": "token-mean"}


def actor(**options: Any) -> Any:
    from verl.workers.config import ActorConfig

    return ActorConfig(
        strategy="fsdp", ppo_micro_batch_size_per_gpu=1, rollout_n=1, clip_ratio_c=1e9, ppo_mini_batch_size=1, **options
    )


def random_terms(seed: int) -> TokenTerms:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 12, 9)
    mask = np.arange(12)[None, :] < lengths[:, None]
    logprobs = -np.abs(random.normal(size=mask.shape))

    def near(spread: float) -> torch.Tensor:
        return torch.tensor((logprobs + spread * random.normal(size=mask.shape)) * mask, dtype=torch.float64)

    return TokenTerms(
        near(0.0).requires_grad_(), near(0.3), near(0.4), near(0.5), torch.tensor(mask), torch.tensor(random.normal(size=9))
    )


@pytest.mark.parametrize("seed", range(5))
def test_z_score_is_verls_grpo_advantage(seed):
    random = np.random.default_rng(seed)
    scores, groups = random.integers(0, 3, 40) / 2.0, random.integers(0, 9, 40)
    rewards = torch.zeros(40, 3)
    rewards[:, 2] = torch.tensor(scores)
    theirs, _ = core_algos.compute_grpo_outcome_advantage(rewards, torch.ones(40, 3), groups)
    np.testing.assert_allclose(step_group_z_score(scores, groups), theirs[:, 0].numpy(), atol=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_leave_one_out_is_verls_rloo_advantage(seed):
    random = np.random.default_rng(seed)
    groups = np.repeat(np.arange(5), 8)
    scores = random.integers(0, 2, 40).astype(np.float64)
    rewards = torch.zeros(40, 2, dtype=torch.float64)
    rewards[:, 1] = torch.tensor(scores)
    theirs, _ = core_algos.compute_rloo_outcome_advantage(rewards, torch.ones(40, 2), groups)
    np.testing.assert_allclose(leave_one_out(scores, groups), theirs[:, 0].numpy(), atol=1e-6)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("preset", ["default", "paper", "release"])
@pytest.mark.parametrize("kl_weight", [0.0, 0.1])
def test_loss_and_gradient_are_verls(seed, preset, kl_weight):
    """Vanilla (default, paper) and GSPO (release) with importance weights, plus verl's k3 term; the dual clip is off."""
    objective = objective_of(parse_config({"training": {"preset": preset, "kl_weight": kl_weight}}).training)
    terms = random_terms(seed)
    if not kl_weight:
        terms = TokenTerms(terms.logprobs_BT, terms.proximal_BT, terms.behaviour_BT, None, terms.mask_BT, terms.advantages_B)
    normaliser = float(terms.mask_BT.sum()) if objective.aggregation == "constant" else float(len(terms.mask_BT))
    ours = microbatch_loss(objective, terms, normaliser=normaliser).loss
    (our_gradient,) = torch.autograd.grad(ours, terms.logprobs_BT)

    name = "gspo" if objective.ratio == "sequence" else "vanilla"
    config = actor(clip_ratio=0.2, clip_ratio_low=objective.clip_low, clip_ratio_high=objective.clip_high)
    mask = terms.mask_BT.to(torch.float64)
    mode = AGGREGATION[objective.aggregation]
    theirs, metrics = core_algos.get_policy_loss_fn(name)(
        terms.proximal_BT,
        terms.logprobs_BT,
        terms.advantages_B[:, None].expand_as(mask),
        mask,
        mode,
        config,
        importance_weights(terms.proximal_BT, terms.behaviour_BT, correction="truncate", cap=objective.correction_cap),
    )
    if terms.reference_BT is not None:
        divergence = core_algos.kl_penalty(terms.logprobs_BT, terms.reference_BT, "k3")
        theirs = theirs + kl_weight * core_algos.agg_loss(divergence, mask, mode)
    (their_gradient,) = torch.autograd.grad(theirs, terms.logprobs_BT)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-6, atol=1e-9)
    clipped = microbatch_loss(objective, terms, normaliser=normaliser).clipped_BT
    assert float(clipped.sum() / mask.sum()) == pytest.approx(metrics["actor/pg_clipfrac"], abs=1e-6)


def test_k3_is_verls_even_where_it_is_bounded():
    logprobs = torch.linspace(-40.0, 0.0, 101, dtype=torch.float64)
    reference = torch.full_like(logprobs, -4.0)
    torch.testing.assert_close(k3_divergence(logprobs, reference), core_algos.kl_penalty(logprobs, reference, "low_var_kl"))
