"""From claims to rows: nothing lost, nothing doubled, nothing repaired."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dartrl.config import parse_config
from dartrl.policy.inputs import EncodedImage, Row, build_row
from dartrl.records import Claim
from dartrl.train.batch import TOO_SMALL, TrainingRow, assemble, plan_updates
from dartrl.train.objective import objective_of
from dartrl.types import End, Outcome

DEFAULT = objective_of(parse_config({}).training)


class Tools:
    """Row builder of a policy, with known entropies for rows that lack them."""

    def __init__(self, policy):
        self.policy = policy
        self.asked: list[int] = []

    def build_row(self, generation, images):
        return build_row(self.policy, generation, images)

    def mean_entropies(self, rows):
        self.asked.append(len(rows))
        return [float(len(row.ids_S)) for row in rows]


@pytest.fixture
def tools(recorder) -> Tools:
    return Tools(recorder.policy)


def change_generation(claim: Claim, group: int, slot: int, step: int, **changes) -> Claim:
    """The claim with one recorded reply altered."""
    groups = list(claim.groups)
    members = list(groups[group].members)
    trajectory = members[slot].trajectory
    steps = list(trajectory.steps)
    steps[step] = replace(steps[step], generation=replace(steps[step].generation, **changes))
    members[slot] = replace(members[slot], trajectory=replace(trajectory, steps=tuple(steps)))
    groups[group] = replace(groups[group], members=tuple(members))
    return replace(claim, groups=tuple(groups))


def build(claim, recorder, tools, select=None, objective=DEFAULT):
    return assemble(
        claim, blobs=recorder.blobs, tools=tools, objective=objective, select_steps=select or (lambda e: [True] * len(e))
    )


def test_every_step_becomes_one_row_with_its_own_numbers(recorder, tools):
    claim = recorder.claim("c", [[1.0, 0.0], [0.5, 0.0, 1.0]])
    batch = build(claim, recorder, tools)
    members = [member for group in claim.groups for member in group.members]
    assert [episode.membership_id for episode in batch.episodes] == [member.membership_id for member in members]
    steps = [step for member in members for step in member.trajectory.steps]
    assert len(batch.rows) == len(steps)
    for row, step in zip(batch.rows, steps, strict=True):
        np.testing.assert_array_equal(row.behaviour_T, step.generation.behaviour_logprobs)
        np.testing.assert_array_equal(row.row.ids_S[row.row.is_label_S], step.generation.response_ids)
        assert row.mean_entropy == pytest.approx(float(np.mean(step.generation.entropies)))
    by_member = {episode.membership_id: {row.advantage for row in episode.rows} for episode in batch.episodes}
    assert by_member == {"c-0-0": {1.0}, "c-0-1": {-1.0}, "c-1-0": {0.0}, "c-1-1": {-0.75}, "c-1-2": {0.75}}
    assert batch.rejected == {}


def test_screenshots_are_decoded_once_and_shared(recorder, tools):
    batch = build(recorder.claim("c", [[1.0, 0.0, 1.0]]), recorder, tools)
    images: dict[str, EncodedImage] = {}
    for row in batch.rows:
        for image in row.row.images:
            assert images.setdefault(image.hash, image) is image
    assert len(images) < len(batch.rows)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"behaviour_logprobs": np.zeros(0, np.float32)}, "lengths"),
        (
            {"behaviour_logprobs": np.array([np.nan], np.float32), "response_ids": np.array([2], np.int32), "entropies": None},
            "logprobs",
        ),
        ({"fingerprint": "another"}, "fingerprint"),
        ({"temperature": 0.0}, "greedy"),
        ({"image_hashes": ("0" * 64,)}, "image_corrupt"),
        ({"image_grids": ((1, 8, 8),)}, "grids"),
        ({"banned_ids": ()}, "banned_ids"),
    ],
)
def test_one_inconsistent_step_rejects_its_whole_member_with_a_reason(recorder, tools, changes, reason):
    claim = recorder.claim("c", [[1.0, 0.0, 0.0]])
    damaged = change_generation(claim, 0, 1, 1, **changes)
    batch = build(damaged, recorder, tools)
    assert batch.rejected == {"c-0-1": reason}
    assert {episode.membership_id for episode in batch.episodes} == {"c-0-0", "c-0-2"}
    summary = batch.summary()
    assert (summary["episodes_rejected"], summary[f"rejected_{reason}"]) == (1.0, 1.0)
    # the rejected member is in no baseline: one success against one failure
    assert [episode.rows[0].advantage for episode in batch.episodes] == [1.0, -1.0]


def test_a_member_left_alone_is_rejected_too(recorder, tools):
    claim = change_generation(recorder.claim("c", [[1.0, 0.0], [1.0, 0.0]]), 0, 0, 0, fingerprint="another")
    batch = build(claim, recorder, tools)
    assert batch.rejected == {"c-0-0": "fingerprint", "c-0-1": TOO_SMALL}
    assert {episode.group for episode in batch.episodes} == {1}


def test_a_member_without_a_score_is_rejected(recorder, tools):
    claim = recorder.claim("c", [[1.0, 0.0, 1.0]])
    member = claim.groups[0].members[2]
    broken = replace(member, trajectory=replace(member.trajectory, outcome=Outcome(End.ENV_ERROR, "crash")))
    group = replace(claim.groups[0], members=(*claim.groups[0].members[:2], broken))
    assert build(replace(claim, groups=(group,)), recorder, tools).rejected == {"c-0-2": "unscored"}


def test_selected_steps_train_and_all_steps_stay_in_the_statistics(recorder, tools):
    claim = recorder.claim("c", [[1.0, 0.0, 0.0], [0.0, 1.0]])
    paper = objective_of(parse_config({"training": {"preset": "paper"}}).training)
    seen: list[Sequence[float]] = []

    def upper_half(entropies: Sequence[float]) -> list[bool]:
        seen.append(entropies)
        middle = sorted(entropies)[len(entropies) // 2]
        return [value >= middle for value in entropies]

    whole = build(claim, recorder, tools, objective=paper)
    part = build(claim, recorder, tools, upper_half, paper)
    assert [len(entropies) for entropies in seen] == [6, 5]
    assert part.summary()["rows_left_out"] == len(whole.rows) - len(part.rows) > 0
    advantages = {id_of(row): row.advantage for row in whole.rows}
    assert all(row.advantage == advantages[id_of(row)] for row in part.rows)


def id_of(row: TrainingRow) -> bytes:
    return row.row.ids_S.tobytes() + row.behaviour_T.tobytes()


def test_missing_entropies_are_computed_by_the_trainer(recorder, tools):
    claim = change_generation(recorder.claim("c", [[1.0, 0.0], [1.0, 0.0]]), 1, 0, 0, entropies=None)
    seen: list[Sequence[float]] = []
    build(claim, recorder, tools, lambda e: (seen.append(e), [True] * len(e))[1])
    assert tools.asked == [len(seen[1])]
    assert min(seen[1]) > 10 > max(seen[0])


@st.composite
def training_rows(draw: st.DrawFn) -> list[TrainingRow]:
    lengths = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), max_size=25))
    return [
        TrainingRow(
            row=Row(
                ids_S=np.zeros(prompt + reply, np.int32),
                positions_3S=np.zeros((3, prompt + reply), np.int64),
                images=(),
                image_tokens_K=np.zeros(0, np.int64),
                is_label_S=np.arange(prompt + reply) >= prompt,
            ),
            behaviour_T=np.full(reply, -float(number), np.float32),
            weights_version=1,
            role="fresh",
            mean_entropy=0.0,
        )
        for number, (reply, prompt) in enumerate(lengths)
    ]


@given(training_rows(), st.integers(1, 20), st.integers(1, 20), st.integers(0, 99))
def test_updates_hold_every_row_exactly_once(rows, minibatch, microbatch, step):
    microbatch = min(microbatch, minibatch)
    updates = plan_updates(rows, minibatch_rows=minibatch, microbatch_rows=microbatch, seed=(0, step))
    flat = [row for update in updates for part in update for row in part]
    assert Counter(map(id, flat)) == Counter(map(id, rows))
    sizes = [sum(map(len, update)) for update in updates]
    assert all(0 < size <= minibatch for size in sizes)
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert all(0 < len(part) <= microbatch for update in updates for part in update)
    again = plan_updates(rows, minibatch_rows=minibatch, microbatch_rows=microbatch, seed=(0, step))
    assert [[list(map(id, part)) for part in update] for update in updates] == [
        [list(map(id, part)) for part in update] for update in again
    ]


def test_the_order_differs_from_step_to_step_and_seed_to_seed(recorder, tools):
    rows = build(recorder.claim("c", [[1.0, 0.0, 1.0, 0.0]] * 4), recorder, tools).rows
    plans = {
        tuple(id(row) for row in plan_updates(rows, minibatch_rows=8, microbatch_rows=8, seed=seed)[0][0])
        for seed in [(0, 1), (0, 2), (1, 1), (1, 2)]
    }
    assert len(plans) == 4
