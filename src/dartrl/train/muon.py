"""Muon in float32: momentum whose direction is orthogonalised, for the matrices inside a network.

`torch.optim.Muon` orthogonalises in bfloat16, which is fifteen times slower than float32 on processors without bfloat16
instructions. This one does the same in float32, and all matrices of one shape at once.
Source: Jordan et al., Muon, 2024; scaling of the update as in Moonlight (arXiv:2502.16982), so that AdamW's rates fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""Quintic of the Newton-Schulz iteration: steep at 0, so that few steps bring all singular values near 1."""

STEPS = 5
EPSILON = 1e-7
UPDATE_RMS = 0.2
"""Root mean square of an update per unit of learning rate, that of AdamW."""


class Muon(torch.optim.Optimizer):
    """Optimizer for 2-D parameters with Nesterov momentum and decoupled weight decay."""

    def __init__(self, parameters: Iterable[Tensor], *, lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(list(parameters), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update from the present gradients."""
        result = closure() if closure is not None else None
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in by_shape.items():
                directions_NRC = orthogonalise(torch.stack([self._direction(one, group["momentum"]) for one in parameters]))
                rate = group["lr"] * UPDATE_RMS * max(shape) ** 0.5
                for parameter, direction_RC in zip(parameters, directions_NRC, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(direction_RC, alpha=-rate)
        return result

    def _direction(self, parameter: Tensor, momentum: float) -> Tensor:
        state = self.state[parameter]
        gradient: Any = parameter.grad
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(gradient)
        state["momentum"].lerp_(gradient, 1 - momentum)
        return gradient.lerp(state["momentum"], momentum)


def orthogonalise(matrices_NRC: Tensor) -> Tensor:
    """Matrices of the same singular vectors whose singular values are all near 1 (within about 0.7 to 1.2).

    matrices_NRC: [N, rows, columns]. A matrix of zeros stays zero.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices_NRC.shape[1] > matrices_NRC.shape[2]
    x = matrices_NRC.transpose(1, 2) if is_tall else matrices_NRC
    x = x / (x.norm(dim=(1, 2), keepdim=True) + EPSILON)
    for _ in range(STEPS):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(1, 2) if is_tall else x
