"""Objectives as wholes: invariance to row cutting, agreement of microbatches with the whole, presets."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dartrl.config import RunConfig, TrainingConfig, parse_config
from dartrl.train.objective import Objective, TokenTerms, microbatch_loss, objective_of, row_advantages


def objective(preset: str, **options: object) -> Objective:
    return objective_of(parse_config({"training": {"preset": preset, **options}}).training)


def ragged(rows: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(row) for row in rows)
    values = np.zeros((len(rows), width))
    mask = np.zeros((len(rows), width), bool)
    for b, row in enumerate(rows):
        values[b, : len(row)], mask[b, : len(row)] = row, True
    return torch.tensor(values), torch.tensor(mask)


def episode_gradient(chosen: Objective, episodes: list[np.ndarray], cuts: list[list[int]], scores: np.ndarray) -> np.ndarray:
    """Gradient at every token when each episode of [T, 3] log-probabilities is cut into rows at `cuts`."""
    rows = [part for episode, at in zip(episodes, cuts, strict=True) for part in np.split(episode, at)]
    rows_N = np.array([len(at) + 1 for at in cuts])
    advantages_R = row_advantages(chosen, scores, np.zeros(len(scores), np.int64), rows_N)
    logprobs, mask = ragged([row[:, 0] for row in rows])
    logprobs.requires_grad_()
    terms = TokenTerms(
        logprobs_BT=logprobs,
        proximal_BT=ragged([row[:, 1] for row in rows])[0],
        behaviour_BT=ragged([row[:, 2] for row in rows])[0],
        reference_BT=ragged([row[:, 2] for row in rows])[0] if chosen.kl_weight else None,
        mask_BT=mask,
        advantages_B=torch.tensor(advantages_R),
    )
    normaliser = float(mask.sum()) if chosen.aggregation == "constant" else float(len(rows))
    microbatch_loss(chosen, terms, normaliser=normaliser).loss.backward()
    assert logprobs.grad is not None
    return logprobs.grad[mask].numpy()


@st.composite
def cut_episodes(draw: st.DrawFn):
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lengths = draw(st.lists(st.integers(1, 12), min_size=2, max_size=5))
    episodes = [-np.abs(random.normal(size=(n, 1))) + 0.3 * random.normal(size=(n, 3)) for n in lengths]
    cuts = [sorted(draw(st.sets(st.integers(1, n - 1)))) if n > 1 else [] for n in lengths]
    return episodes, cuts, random.integers(0, 2, len(lengths)).astype(np.float64)


@settings(max_examples=60)
@given(cut_episodes(), st.sampled_from([0.0, 0.1]))
def test_default_gradient_does_not_change_when_episodes_are_cut_into_other_rows(drawn, kl_weight):
    episodes, cuts, scores = drawn
    chosen = objective("default", kl_weight=kl_weight)
    whole = episode_gradient(chosen, episodes, [[] for _ in episodes], scores)
    np.testing.assert_allclose(episode_gradient(chosen, episodes, cuts, scores), whole, rtol=1e-9, atol=1e-12)


def test_paper_gradient_does_change_when_an_episode_is_cut():
    """The reason for the default: the paper's statistics and its mean over rows both count rows."""
    random = np.random.default_rng(0)
    episodes = [random.normal(size=(6, 3)) * 0.1 - 1 for _ in range(2)]
    scores = np.array([1.0, 0.0])
    chosen = objective("paper")
    whole = episode_gradient(chosen, episodes, [[], []], scores)
    assert np.abs(episode_gradient(chosen, episodes, [[1, 2], []], scores) - whole).max() > 1e-3


@settings(max_examples=30)
@given(cut_episodes(), st.sampled_from(["default", "paper", "release"]), st.integers(1, 4))
def test_microbatches_add_up_to_the_update(drawn, preset, size):
    episodes, cuts, scores = drawn
    chosen = objective(preset)
    rows = [part for episode, at in zip(episodes, cuts, strict=True) for part in np.split(episode, at)]
    advantages = row_advantages(chosen, scores, np.zeros(len(scores), np.int64), np.array([len(c) + 1 for c in cuts]))
    tokens = float(sum(len(row) for row in rows))
    normaliser = tokens if chosen.aggregation == "constant" else float(len(rows))

    def loss_of(part: slice) -> float:
        logprobs, mask = ragged([row[:, 0] for row in rows[part]])
        proximal, behaviour = (ragged([row[:, k] for row in rows[part]])[0] for k in (1, 2))
        reference = behaviour if chosen.kl_weight else None
        terms = TokenTerms(logprobs, proximal, behaviour, reference, mask, torch.tensor(advantages[part]))
        return float(microbatch_loss(chosen, terms, normaliser=normaliser).loss)

    parts = [loss_of(slice(start, start + size)) for start in range(0, len(rows), size)]
    assert sum(parts) == pytest.approx(loss_of(slice(None)), rel=1e-6, abs=1e-9)


def test_padding_never_reaches_the_loss():
    mask = torch.tensor([[True, True, False]])
    good = torch.tensor([[-1.0, -2.0, 0.0]])
    wild = torch.tensor([[-1.0, -2.0, -1e4]])
    for preset in ("default", "paper", "release"):
        chosen = objective(preset)
        losses = [
            microbatch_loss(chosen, TokenTerms(current, good, good, good, mask, torch.tensor([0.5])), normaliser=2.0).loss
            for current in (good, wild)
        ]
        assert torch.equal(losses[0], losses[1])


def test_presets_name_their_parts():
    default, paper, release = objective("default"), objective("paper"), objective("release")
    assert (default.baseline, default.ratio, default.aggregation) == ("trajectories", "token", "constant")
    assert (paper.baseline, paper.ratio, paper.aggregation) == ("steps", "token", "sequence_mean")
    assert (paper.clip_low, paper.clip_high, paper.kl_weight) == (0.2, 0.28, 0.1)
    assert (paper.correction, paper.correction_cap) == ("truncate", 1.0)
    assert (release.ratio, release.clip_low, release.clip_high, release.correction_cap) == ("sequence", 0.1, 0.28, 1.0)


def test_a_preset_sets_options_of_other_names_and_the_recipe_wins():
    assert parse_config({"training": {"preset": "paper"}}).curation.high_entropy_share == 0.8
    stated = parse_config({"training": {"preset": "paper", "kl_weight": 0.0}, "curation": {"high_entropy_share": 1.0}})
    assert stated.training.kl_weight == 0.0
    assert stated.training.correction_cap == 1.0
    assert stated.curation.high_entropy_share == 1.0
    assert parse_config(stated.model_dump(mode="json")) == stated
    built = RunConfig(training=TrainingConfig(preset="paper", correction_cap=3.0))
    assert (built.training.correction_cap, built.training.kl_weight) == (3.0, 0.1)


def test_row_advantages_repeat_by_episode_in_order():
    scores, groups, rows = np.array([1.0, 0.0, 1.0, 0.0]), np.array([0, 0, 1, 1]), np.array([2, 1, 0, 3])
    np.testing.assert_allclose(row_advantages(objective("default"), scores, groups, rows), [1, 1, -1, -1, -1, -1])
    z = row_advantages(objective("paper"), scores, groups, rows)
    # group 0 has rows with scores 1, 1, 0; group 1 has only rows with score 0
    deviation = np.sqrt(1 / 3) + 1e-6
    np.testing.assert_allclose(z, [1 / 3 / deviation, 1 / 3 / deviation, -2 / 3 / deviation, 0, 0, 0])
