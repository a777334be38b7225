"""What a part is before its first step of training: weights of the target, a fit by least squares, or silence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from specbench.data.conversations import watched

if TYPE_CHECKING:
    from specbench.data.training import Batch

FITTED_PLACES = 60_000  # of a text, for a fit by least squares
UNSURE = 0.3  # of the target's logits, for a drafting layer to begin with
RIDGE, TINY = 1e-3, 1e-30  # of least squares, on inputs of unit size; instead of a size of nothing


@torch.no_grad()
def begin_like(module: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Copies all weights of another module if names and shapes are the same; returns whether they are."""
    shapes, others = ({name: w.shape for name, w in m.state_dict().items()} for m in (module, other))
    if shapes != others:
        return False
    module.load_state_dict(other.state_dict())
    for name, part in module.named_modules():
        weights = dict(part.named_parameters(recurse=False))
        if weights.keys() == {"weight"} and weights["weight"].dim() == 1:  # a norm
            weights["weight"].copy_(scale_of(other.get_submodule(name)))
    return True


@torch.no_grad()
def scale_of(norm: Any) -> torch.Tensor:
    """Returns a norm's factors [d]: its weight, or its weight plus 1 in Gemma's families."""
    signs = torch.ones_like(norm.weight)
    signs[1::2] = -1.0  # of mean 0 and size 1: normed already
    scale = (norm(signs) - norm(-signs)) / 2 * signs
    return norm.weight if torch.allclose(scale, norm.weight, rtol=1e-2) else scale


@torch.no_grad()
def silence(layer: Any) -> None:
    """Makes a decoder layer add nothing to its input until it has learnt to."""
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()


def some_of(text: Iterable[Batch]) -> Iterator[Batch]:
    """Yields the first batches, until they hold enough positions for a fit."""
    places = FITTED_PLACES
    for batch in watched(text, "fit", "batch"):
        yield batch
        places -= batch["input_ids"].numel()
        if places <= 0:
            return


def least_squares(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], bias: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the linear layer that best estimates outputs [..., m] from inputs [..., n], with a small ridge.

    It serves as initial weights: on states of a real model this saves most of the steps.

    Args:
        pairs: inputs and outputs of some places.
        bias: whether it has one.

    Returns:
        Its weight [m, n] and bias [m], zero if it has none.
    """
    moments: Any = None
    products: Any = None
    for inputs, outputs in pairs:
        ones = inputs.new_full((*inputs.shape[:-1], 1), float(bias), dtype=torch.float)
        x = torch.cat([inputs.float(), ones], dim=-1).flatten(0, -2)
        y = outputs.float().flatten(0, -2)
        # Sums over many places in float64; the products of one batch do not need it.
        moments, products = (
            (one if total is None else total + one)
            for total, one in ((moments, (x.T @ x).double()), (products, (x.T @ y).double()))
        )
    scale = moments.diagonal().sqrt().clamp(min=TINY)
    normal = moments / scale.outer(scale) + RIDGE * torch.eye(len(scale), device=scale.device)
    solution = torch.linalg.solve(normal, products / scale.unsqueeze(1)) / scale.unsqueeze(1)
    return solution[:-1].T.float(), solution[-1].float()
