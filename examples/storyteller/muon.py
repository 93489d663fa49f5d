"""Muon, an optimizer for matrices that needs far fewer steps than Adam here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

MOMENTUM = 0.95
STEPS = 5
A, B, C = 3.4445, -4.7750, 2.0315
"""Coefficients of the iteration that makes a matrix orthogonal, those of Muon's author."""


class Muon(torch.optim.Optimizer):
    """Muon as torch has it, without its bfloat16, which many CPUs compute a hundred times slower than float32."""

    def __init__(self, params: Iterable[torch.nn.Parameter], lr: float, weight_decay: float) -> None:
        """Create the optimizer; the learning rate is that of AdamW."""
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update each matrix; those of one shape together."""
        for group in self.param_groups:
            alike = defaultdict(list)
            for matrix in group["params"]:
                alike[tuple(matrix.shape)].append(matrix)
            for (height, width), matrices in alike.items():
                updates = torch.stack([self._momentum(matrix) for matrix in matrices])
                lr = group["lr"] * 0.2 * max(height, width) ** 0.5
                for matrix, update in zip(matrices, orthogonal(updates), strict=True):
                    matrix.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-lr)

    def _momentum(self, matrix: torch.nn.Parameter) -> torch.Tensor:
        """Return the gradient with Nesterov's momentum."""
        assert matrix.grad is not None
        state = self.state[matrix]
        mean = state.setdefault("mean", torch.zeros_like(matrix)).lerp_(matrix.grad, 1 - MOMENTUM)
        return matrix.grad.lerp(mean, MOMENTUM)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Return nearly orthogonal matrices with the directions of these, [count, height, width]."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(STEPS):
        square = x @ x.mT
        x = A * x + (B * square + C * square @ square) @ x
    return x.mT if tall else x
