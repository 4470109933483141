"""Advantages of a training step's rows from the scores of its episodes. Pure.

Axes: R = rows (one row is one step of an episode), N = episodes (trajectories). Everything is float64; callers round once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

STD_EPSILON = 1e-6

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]


def step_group_z_score(scores_R: Floats, groups_R: Ids) -> Floats:
    """Standard score of each row's episode score among *all rows* of its group.

    scores_R: [R] the episode's score in [0, 1], repeated on each of its rows. groups_R: [R] group of each row.
    Long episodes count as often as they have rows. The deviation is the unbiased one; a group of a single row gets mean 0
    and deviation 1, as in the authors' code. Source: DART, arXiv:2509.23866, equation of step-wise GRPO.
    """
    advantages_R = np.zeros(len(scores_R))
    for group in np.unique(groups_R):
        rows = np.flatnonzero(groups_R == group)
        scores = scores_R[rows]
        if len(rows) == 1:
            advantages_R[rows] = scores / (1.0 + STD_EPSILON)
        elif np.ptp(scores) > 0:
            advantages_R[rows] = (scores - scores.mean()) / (scores.std(ddof=1) + STD_EPSILON)
    return advantages_R


def leave_one_out(scores_N: Floats, groups_N: Ids) -> Floats:
    """Each episode's score minus the mean score of the *other* episodes of its group.

    scores_N: [N] scores in [0, 1]. groups_N: [N] group of each episode. Returns [N]; zero for a lone episode and where all
    scores of a group are equal. Episodes count once however many rows they have, and nothing is divided by a deviation, so
    neither length nor difficulty changes the scale. Source: RLOO, arXiv:2402.14740; it is n / (n - 1) times the mean-centred
    score of Dr. GRPO, arXiv:2503.20783.
    """
    advantages_N = np.zeros(len(scores_N))
    for group in np.unique(groups_N):
        episodes = np.flatnonzero(groups_N == group)
        scores = scores_N[episodes]
        if len(episodes) > 1 and np.ptp(scores) > 0:
            advantages_N[episodes] = scores - (scores.sum() - scores) / (len(episodes) - 1)
    return advantages_N
