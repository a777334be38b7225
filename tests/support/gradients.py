"""What a loss keeps in memory until its gradient, and gradients side by side."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from methods.common.losses import LIKELIEST, PROBS, Loss
from specbench.data.training import Batch
from specbench.models.pairs import Pair


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


def stored(pair: Pair, ids: list[list[int]], top: int = 3) -> Batch:
    """A batch with the target's likeliest tokens, and their probabilities, of every place."""
    tokens = torch.tensor(ids)
    with torch.no_grad():
        probs, likeliest = pair.target(tokens, use_cache=False).logits.softmax(-1).topk(top)
    return {"input_ids": tokens, "loss_weight": torch.ones(tokens.shape), PROBS: probs, LIKELIEST: likeliest}


def assert_learns_from_a_sample(
    module_of: Callable[[Loss], torch.nn.Module], model: torch.nn.Module, pair: Pair, ids: list[list[int]]
) -> None:
    """With all tokens drawn it is the loss of the whole vocabulary, to the gradient; with a few, nearly that loss."""
    batch = stored(pair, ids)
    exact = module_of(Loss())(batch)
    assert_same_gradients(model, module_of(Loss(vocab_sample=pair.vocab_size))(batch), exact)
    torch.manual_seed(0)
    module = module_of(Loss(vocab_sample=pair.vocab_size // 3))
    few = torch.stack([module(batch).detach() for _ in range(40)])
    assert few.mean().item() == pytest.approx(exact.item(), rel=0.03)
    assert few.std() > 0
