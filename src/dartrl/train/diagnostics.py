"""Numbers that say whether a training step can be trusted: how far off-policy it was and what was cut. Pure.

Axis: K = trained tokens of a training step, over all rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Ages = NDArray[np.int64]


def effective_sample_size(log_weights_K: Values) -> float:
    """Share of tokens that would carry as much information without weighting, in (0, 1]; 1 if all weights are equal.

    (sum w)^2 / (K sum w^2) with w = exp(log_weights_K), the ratio of proximal to behaviour policy before any cap. 1 without
    tokens.
    """
    if len(log_weights_K) == 0:
        return 1.0
    weights_K = np.exp(log_weights_K - log_weights_K.max())
    return float(weights_K.sum() ** 2 / (len(weights_K) * (weights_K**2).sum()))


def gap_summary(proximal_K: Values, behaviour_K: Values, ages_K: Ages) -> dict[str, float]:
    """Absolute difference of the two policies' log-probabilities, in nats: mean, p99 and max, of all tokens and at lag 0.

    ages_K: [K] versions between the trainer and the weights that sampled the token. At age 0 both sides hold the same
    weights, so the difference is numerical noise; growth over a run means a stale cache or a partial sync, not learning.
    The lag-0 names are absent if no token has age 0. p99 is the nearest rank from above.
    """
    gaps_K = np.abs(proximal_K - behaviour_K)
    summary = _spread("logprob_gap", "", gaps_K)
    fresh = gaps_K[ages_K == 0]
    return summary | (_spread("logprob_gap", "_at_lag_0", fresh) if len(fresh) else {})


def _spread(name: str, suffix: str, values_K: Values) -> dict[str, float]:
    if len(values_K) == 0:
        return {}
    return {
        f"{name}_mean{suffix}": float(values_K.mean()),
        f"{name}_p99{suffix}": float(np.quantile(values_K, 0.99, method="higher")),
        f"{name}_max{suffix}": float(values_K.max()),
    }


def staleness_summary(ages_R: Ages) -> dict[str, float]:
    """Mean and largest age in versions of a step's rows; empty without rows."""
    if len(ages_R) == 0:
        return {}
    return {"staleness_mean": float(ages_R.mean()), "staleness_max": float(ages_R.max())}
