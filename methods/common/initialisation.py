"""What a part is before its first step of training: weights of the target, a fit by least squares, or silence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from specbench.data.conversations import watched

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from specbench.data.training import Batch

FITTED_PLACES = 60_000  # of a text, for a fit by least squares
UNSURE = 0.3  # of the target's logits, for a drafting layer to begin with
RIDGE, TINY = 1e-3, 1e-30  # of least squares, on inputs of unit size; instead of a size of nothing


@torch.no_grad()
def begin_like(module: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Copies all weights of another module, if those of both have the same names and shapes; whether they have."""
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
    """What a norm multiplies normed states by, [d]: its weight, or 1 more in Gemma's families."""
    signs = torch.ones_like(norm.weight)
    signs[1::2] = -1.0  # of mean 0 and size 1: normed already
    scale = (norm(signs) - norm(-signs)) / 2 * signs
    return norm.weight if torch.allclose(scale, norm.weight, rtol=1e-2) else scale


@torch.no_grad()
def silence(layer: Any) -> None:
    """Lets a decoder layer add nothing to its input: it learns to, from there on."""
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()


def some_of(text: Iterable[Batch]) -> Iterator[Batch]:
    """The first batches, until they hold as many places as a fit needs."""
    places = FITTED_PLACES
    for batch in watched(text, "fit", "batch"):
        yield batch
        places -= batch["input_ids"].numel()
        if places <= 0:
            return


def least_squares(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], bias: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """The linear layer that estimates outputs [..., m] from inputs [..., n] best, with a small ridge.

    What is trained may begin as it: on states of a real model that saves most of the steps.

    Args:
        pairs: inputs and outputs of some places.
        bias: whether it has one.

    Returns:
        Its weight [m, n] and bias [m], which is zero where it has none.
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
