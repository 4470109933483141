"""Held-out accuracy of a policy in supervised training, cheaply: one forward pass per batch, no generation.

Every token is the policy's first choice given the right tokens before it. A reply counts as right if its words are the
expert's and its coordinates lie in the expert's boxes. Success in the browser, the real measure, is lower.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from dartrl.agent.demonstration import DemonstratedState, is_inside
from dartrl.policy.forward import hidden_states
from dartrl.policy.inputs import Row, collate
from dartrl.policy.model import Policy
from dartrl.train.supervised_data import Collection, CopyLessons, LessonWriter, expert_reply, task_text
from dartrl.types import ActionKind

MEASURED_STATES = 400
"""Held-out states looked at per measurement."""

MEASURED_COPIES = 100
"""Texts copied per measurement."""

MEASURE_SEED = 7
ROWS = 50

_POINT = re.compile(r"\((\d+),(\d+)\)")


def next_action_accuracy(
    policy: Policy, writer: LessonWriter, collection: Collection, indices: NDArray[np.int64]
) -> dict[str, float]:
    """Family -> share of right next actions, on a fixed sample of the states at `indices`."""
    chosen = np.random.default_rng(MEASURE_SEED).permutation(indices)[:MEASURED_STATES]
    right: dict[str, list[bool]] = {}
    for start in range(0, len(chosen), ROWS):
        part = [int(index) for index in chosen[start : start + ROWS]]
        rows: list[Row] = []
        for index in part:
            state, image = collection.states[index], collection.image(policy, index)
            assert state.expert is not None
            height, width = image.pixels_HWC.shape[:2]
            turn = (task_text(state.instruction, state.history), expert_reply(state.expert, (width, height)))
            rows.append(writer.row([turn], image))
        for index, reply in zip(part, first_choices(policy, rows), strict=True):
            state = collection.states[index]
            right.setdefault(state.family, []).append(is_right(reply, state))
    return {family: float(np.mean(values)) for family, values in sorted(right.items())}


class CopyAccuracy:
    """Share of held-out typing steps with fresh strings whose reply is exact in every token."""

    def __init__(self, lessons: CopyLessons) -> None:
        random = np.random.default_rng(MEASURE_SEED)
        self._turns = [lessons.turn(random) for _ in range(MEASURED_COPIES)]

    def measure(self, policy: Policy, writer: LessonWriter) -> float:
        """In [0, 1]."""
        replies = first_choices(policy, [writer.row([turn]) for turn in self._turns])
        return float(np.mean([reply == answer for reply, (_, answer) in zip(replies, self._turns, strict=True)]))


@torch.no_grad()  # not inference_mode: what the forward pass caches is used in training as well
def first_choices(policy: Policy, rows: Sequence[Row]) -> list[str]:
    """The labelled part of each row as the policy would write it, without the end token if it ends there."""
    batch = collate(rows)
    with policy.autocast():
        logits = policy.model.lm_head(hidden_states(policy, batch))
    choices_BS = logits.argmax(-1)
    texts: list[str] = []
    for row, choices_S in zip(rows, choices_BS, strict=True):
        ids = [int(choices_S[position - 1]) for position in np.flatnonzero(row.is_label_S)]
        ended = ids[:-1] if ids[-1] in policy.end_ids else ids
        texts.append(str(policy.tokenizer.decode(ended)))
    return texts


def is_right(reply: str, state: DemonstratedState) -> bool:
    """True if the reply does what the expert does."""
    expert = state.expert
    assert expert is not None
    if expert.kind is ActionKind.TYPE:
        return reply == expert_reply(expert, (0, 0))
    wanted = expert_reply(expert, (10_000, 10_000))
    if _POINT.sub("", reply) != _POINT.sub("", wanted):
        return False
    points = [(float(x), float(y)) for x, y in _POINT.findall(reply.rpartition("Action:")[2])]
    boxes = [box for box in (expert.box, expert.to_box) if box is not None]
    return len(points) == len(boxes) and all(is_inside(x, y, box) for (x, y), box in zip(points, boxes, strict=True))
