"""The objective of a run: which advantage, ratio, correction and sum belong together.

    default  trajectory baselines (leave-one-out), token ratio, every token counts alike
    paper    step-wise GRPO: z-score over all steps of a group, token ratio, mean over rows of the mean over tokens
    release  as `paper` with one ratio per row (GSPO), which is what the authors' published script runs

The numbers (clips, KL weight, correction and its cap, entropy share) are options; `config.PRESETS` gives each preset's own
values, and an option that the recipe states wins. In all of them the clip bounds the step from the proximal policy, while
the distance between rollout and proximal policy is corrected by a weight (decoupled PPO, arXiv:2110.00641).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from dartrl.config import TrainingConfig
from dartrl.train.advantage import Floats, Ids, leave_one_out, step_group_z_score
from dartrl.train.loss import (
    Aggregation,
    Correction,
    importance_weights,
    k3_divergence,
    sequence_ratio_loss,
    token_ratio_loss,
    token_shares,
)


@dataclass(frozen=True, slots=True)
class Objective:
    """Everything that turns log-probabilities and scores into one loss."""

    baseline: Literal["trajectories", "steps"]
    """Unit over which a group's scores are compared."""
    ratio: Literal["token", "sequence"]
    """Unit whose probability ratio is clipped."""
    aggregation: Aggregation
    """How tokens are summed."""
    clip_low: float
    """Lower clip of the ratio."""
    clip_high: float
    """Upper clip of the ratio."""
    kl_weight: float
    """Weight of the divergence to the initial policy."""
    correction: Correction
    """Correction from rollout to proximal policy."""
    correction_cap: float
    """Largest importance weight."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenTerms:
    """What the loss of one microbatch is made of; all [B, T] or [B]."""

    logprobs_BT: Tensor
    """Current policy, with gradient."""
    proximal_BT: Tensor
    """Weights at the start of the training step."""
    behaviour_BT: Tensor
    """As sampled; 0 outside the mask."""
    reference_BT: Tensor | None
    """Initial policy; None if the KL weight is 0."""
    mask_BT: Tensor
    """True on sampled tokens."""
    advantages_B: Tensor
    """Advantage of each row."""


@dataclass(frozen=True, slots=True, eq=False)
class LossParts:
    """Result of one microbatch."""

    loss: Tensor
    """Scalar share of the update's loss, with gradient."""
    clipped_BT: Tensor
    """True where the clip cuts the gradient."""
    weights_BT: Tensor
    """Importance weights applied."""
    divergence_BT: Tensor | None
    """k3 divergence to the initial policy, without gradient."""


def objective_of(training: TrainingConfig) -> Objective:
    """The objective that a recipe asks for."""
    is_default = training.preset == "default"
    return Objective(
        baseline="trajectories" if is_default else "steps",
        ratio="sequence" if training.preset == "release" else "token",
        aggregation="constant" if is_default else "sequence_mean",
        clip_low=training.clip_low,
        clip_high=training.clip_high,
        kl_weight=training.kl_weight,
        correction=training.correction,
        correction_cap=training.correction_cap,
    )


def row_advantages(objective: Objective, scores_N: Floats, groups_N: Ids, rows_N: Ids) -> Floats:
    """Advantage of each row, episode by episode in the given order.

    scores_N, groups_N: [N] score and group of each episode. rows_N: [N] number of rows of each episode. Returns [sum of
    rows_N].
    """
    if objective.baseline == "trajectories":
        return np.repeat(leave_one_out(scores_N, groups_N), rows_N)
    return step_group_z_score(np.repeat(scores_N, rows_N), np.repeat(groups_N, rows_N))


def microbatch_loss(objective: Objective, terms: TokenTerms, *, normaliser: float) -> LossParts:
    """One microbatch's share of the update's loss.

    normaliser: for `constant` the tokens of an average update of this training step, for `sequence_mean` the rows of this
    update; see `token_shares`.
    """
    clip = {"clip_low": objective.clip_low, "clip_high": objective.clip_high}
    if objective.ratio == "sequence":
        losses_BT, clipped_BT = sequence_ratio_loss(terms.logprobs_BT, terms.proximal_BT, terms.mask_BT, terms.advantages_B, **clip)
    else:
        losses_BT, clipped_BT = token_ratio_loss(terms.logprobs_BT, terms.proximal_BT, terms.advantages_B, **clip)
    weights_BT = importance_weights(
        terms.proximal_BT, terms.behaviour_BT, correction=objective.correction, cap=objective.correction_cap
    )
    losses_BT = losses_BT * weights_BT
    divergence_BT = None
    if terms.reference_BT is not None:
        divergence_BT = k3_divergence(terms.logprobs_BT, terms.reference_BT)
        losses_BT = losses_BT + objective.kl_weight * divergence_BT
        divergence_BT = divergence_BT.detach()
    shares_BT = token_shares(terms.mask_BT, aggregation=objective.aggregation, normaliser=normaliser)
    # where, not a product: padding may hold anything finite, and 0 * inf would poison the sum
    loss = (losses_BT * shares_BT).where(terms.mask_BT, losses_BT.new_zeros(())).sum()
    return LossParts(loss, clipped_BT & terms.mask_BT, weights_BT, divergence_BT)
