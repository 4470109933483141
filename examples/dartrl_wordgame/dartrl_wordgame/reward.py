"""A point for each right letter, so that a policy which gets half a word right learns from it."""

from __future__ import annotations

import os.path
from dataclasses import replace

from dartrl.types import Trajectory, Verdict


def letters(trajectory: Trajectory, verdict: Verdict) -> Verdict:
    """Score: mean over the rounds of the share of letters that are right from the start of the word; success is unchanged.

    The entry point `dartrl.rewards: letters`.
    """
    said = [action.text for step in trajectory.steps for action in step.actions]
    wanted = [words[0] for words in trajectory.task.spec["rounds"]]
    said += [""] * (len(wanted) - len(said))
    return replace(verdict, score=sum(map(_right_share, said, wanted)) / len(wanted))


def _right_share(said: str, wanted: str) -> float:
    return len(os.path.commonprefix([said, wanted])) / max(len(said), len(wanted))
