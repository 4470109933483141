"""Muon: orthogonal updates of the same size and direction as torch's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dartrl.train.muon import Muon, orthogonalise


@given(st.integers(2, 24), st.integers(2, 24), st.integers(0, 1000))
def test_singular_values_come_near_one(rows: int, columns: int, seed: int) -> None:
    matrices = torch.randn(3, rows, columns, generator=torch.Generator().manual_seed(seed))
    well_conditioned = torch.linalg.svdvals(matrices)[:, -1] > 0.05 * torch.linalg.svdvals(matrices)[:, 0]
    values = torch.linalg.svdvals(orthogonalise(matrices))[well_conditioned]
    assert bool((values > 0.5).all()) and bool((values < 1.3).all())


def test_zero_gradient_moves_nothing() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 6))
    weight.grad = torch.zeros(4, 6)
    Muon([weight], lr=0.1).step()
    assert torch.equal(weight.data, torch.ones(4, 6))


@pytest.mark.parametrize("shape", [(16, 16), (48, 16), (16, 48)])
def test_agrees_with_torch_up_to_bfloat16(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    mine = Muon([ours], lr=0.01, momentum=0.95, weight_decay=0.02)
    stock = torch.optim.Muon([theirs], lr=0.01, momentum=0.95, weight_decay=0.02, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        gradient = torch.randn(shape, generator=generator)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        mine.step()
        stock.step()
    moved = (theirs - start).norm()
    assert (ours - theirs).norm() < 0.05 * moved
