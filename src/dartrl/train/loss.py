"""Policy-gradient losses per token, and how tokens are summed to one number. Pure.

Axes: B = rows of a microbatch, T = positions of the padded rows. `mask_BT` is true on sampled tokens; values elsewhere must
be finite and are ignored. Three policies appear: *behaviour* (the engine that sampled), *proximal* (the trainer's weights
at the start of the training step) and *current* (the weights being optimised; only they carry gradients).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
SEQUENCE_LOG_RATIO_LIMIT = 10.0
DIVERGENCE_LIMIT = 10.0

Correction = Literal["truncate", "mask", "none"]
Aggregation = Literal["constant", "sequence_mean"]


def token_ratio_loss(
    logprobs_BT: Tensor, proximal_BT: Tensor, advantages_B: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Clipped loss of each token, and whether its gradient is cut off by the clip.

    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = current / proximal per token. Sources: PPO, arXiv:1707.06347;
    asymmetric clip from DAPO, arXiv:2503.14476. Without the further "dual" bound that verl puts on negative advantages.
    """
    ratio_BT = (logprobs_BT - proximal_BT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return _clipped(ratio_BT, advantages_B, clip_low, clip_high)


def sequence_ratio_loss(
    logprobs_BT: Tensor, proximal_BT: Tensor, mask_BT: Tensor, advantages_B: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """As token_ratio_loss, with one ratio per row: the geometric mean of its token ratios.

    The value is the row's ratio at every token, the gradient flows through each token's own log-probability.
    Source: GSPO, arXiv:2507.18071, token form.
    """
    lengths_B = mask_BT.sum(-1).clamp(min=1)
    log_ratio_B = ((logprobs_BT - proximal_BT) * mask_BT).sum(-1) / lengths_B
    log_ratio_BT = logprobs_BT - logprobs_BT.detach() + log_ratio_B.detach()[:, None]
    return _clipped(log_ratio_BT.clamp(max=SEQUENCE_LOG_RATIO_LIMIT).exp(), advantages_B, clip_low, clip_high)


def _clipped(ratio_BT: Tensor, advantages_B: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    advantages_B1 = advantages_B[:, None]
    free_BT = -advantages_B1 * ratio_BT
    bounded_BT = -advantages_B1 * ratio_BT.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(free_BT, bounded_BT), bounded_BT > free_BT


def importance_weights(proximal_BT: Tensor, behaviour_BT: Tensor, *, correction: Correction, cap: float) -> Tensor:
    """Weight of each token that corrects from the behaviour to the proximal policy; carries no gradient.

    With rho = proximal / behaviour: `truncate` gives min(rho, cap) (DART, arXiv:2509.23866, has cap 1), `mask` gives rho
    where 1 / cap <= rho <= cap and 0 elsewhere (IcePop, arXiv:2602.15763), `none` gives 1.
    """
    if correction == "none":
        return torch.ones_like(proximal_BT)
    rho_BT = (proximal_BT - behaviour_BT).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if correction == "truncate":
        return rho_BT.clamp(max=cap)
    return torch.where((rho_BT >= 1.0 / cap) & (rho_BT <= cap), rho_BT, torch.zeros_like(rho_BT))


def k3_divergence(logprobs_BT: Tensor, reference_BT: Tensor) -> Tensor:
    """Non-negative estimate of KL(current || reference) at each token: exp(d) - d - 1 with d = reference - current.

    Bounded as in verl, so that one wild token cannot dominate. Source: J. Schulman, "Approximating KL divergence", 2020.
    """
    difference_BT = (reference_BT - logprobs_BT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (difference_BT.exp() - difference_BT - 1.0).clamp(-DIVERGENCE_LIMIT, DIVERGENCE_LIMIT)


def token_shares(mask_BT: Tensor, *, aggregation: Aggregation, normaliser: float) -> Tensor:
    """Factor of each token in the summed loss; zero outside the mask.

    `constant`: every token counts 1 / normaliser, the same for all, so cutting an episode into other rows changes nothing.
    `sequence_mean`: tokens are averaged within their row and rows summed over `normaliser`, the number of rows of the
    update (verl's seq-mean-token-mean; the paper's form). Summing loss times share over the microbatches of an update gives
    the loss of the whole update.
    """
    mask_BT = mask_BT.to(torch.float32)
    if aggregation == "constant":
        return mask_BT / normaliser
    return mask_BT / (mask_BT.sum(-1, keepdim=True).clamp(min=1.0) * normaliser)
