"""Muon in fp32, batched over matrices of one shape.

`torch.optim.Muon` orthogonalises in bf16, which a CPU without bf16 units emulates: that alone can take four
fifths of a training step. Source: Keller Jordan et al., "Muon: An optimizer for hidden layers in neural
networks" (2024).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """About the nearest semi-orthogonal matrix of each of `matrices` [N, R, C] (Newton-Schulz iteration)."""
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum whose step is orthogonalised; for 2-D parameters only (ValueError otherwise)."""

    def __init__(self, params: Iterable[torch.nn.Parameter], lr: float = 0.02, momentum: float = 0.95,
                 weight_decay: float = 0.0) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        if any(p.ndim != 2 for group in self.param_groups for p in group["params"]):
            raise ValueError("Muon takes 2-D parameters only")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            same_shape: dict[tuple[int, ...], list[torch.nn.Parameter]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    same_shape[tuple(p.shape)].append(p)
            for (rows, columns), params in same_shape.items():
                updates = []
                for p in params:
                    state = self.state[p]
                    buffer = state.setdefault("momentum", torch.zeros_like(p))
                    buffer.lerp_(p.grad, 1 - group["momentum"])
                    updates.append(p.grad.lerp(buffer, group["momentum"]))
                scale = max(1.0, rows / columns) ** 0.5
                for p, update in zip(params, orthogonalise(torch.stack(updates)), strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update, alpha=-group["lr"] * scale)
