"""Layouts of weights as tests ask for them: the shapes of two passes, and what a choice made of a module."""

from __future__ import annotations

import pytest
import torch

from specbench.decoding.cpu import autotune as layouts
from specbench.decoding.cpu import packed_linear as linear
from specbench.decoding.cpu.autotune import PassShape
from specbench.decoding.cpu.packed_linear import LAYOUTS, EmbeddingBagGemv

ONE, SIX = PassShape(1, 1), PassShape(1, 6)


def has_packed(dtype: torch.dtype = torch.float32) -> bool:
    return layouts._made(LAYOUTS["packed"], [torch.ones(32, 16, dtype=dtype)]) is not None


needs_packed = pytest.mark.skipif(not has_packed(), reason="this torch has no packed weights")


def names_of(choices: dict) -> dict:
    """The layouts alone."""
    return {name: {n: choice["layout"] for n, choice in of.items()} for name, of in choices["groups"].items()}


def laid(module: torch.nn.Module):
    return module._joined.laid if isinstance(module, linear.JoinedLinear) else module.__dict__["_laid"]


def kind(weight) -> str:
    """How a matrix lies in memory."""
    if isinstance(weight, EmbeddingBagGemv):
        return "bags"
    if weight.is_mkldnn:
        return "packed"
    return "rows" if weight.stride(1) == 1 else "columns"
