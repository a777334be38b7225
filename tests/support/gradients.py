"""What a loss keeps in memory until its gradient, and gradients side by side."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def alive(widths: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shapes of the tensors [n, width] that are in use, but for those that were frozen."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) is torch.Tensor]
    return [tuple(one.shape) for one in tensors if one.dim() == 2 and one.shape[1] in widths]


@contextmanager
def no_distribution_stays(*widths: int) -> Iterator[None]:
    """Fails where a tensor [n, width] that was made inside is saved for a gradient, or held by what makes one."""
    saved = []
    gc.collect()
    gc.freeze()  # what there was before: neither searched nor, the second time, collected

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 2 and tensor.shape[1] in widths:
            saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield
    assert not saved and not alive(widths)


def assert_same_gradients(model: torch.nn.Module, loss: torch.Tensor, expected: torch.Tensor) -> None:
    """Two losses [] are the same, and their gradients by every weight of a model."""
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    names, weights = zip(*model.named_parameters())
    both = torch.autograd.grad(loss, weights), torch.autograd.grad(expected, weights)
    for name, one, other in zip(names, *both, strict=True):
        assert (one - other).norm() < 1e-4 * other.norm(), name
