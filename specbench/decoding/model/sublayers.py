"""Layers with their attention or their feed-forward part left out."""

from __future__ import annotations

import copy
from typing import Any

import torch

from specbench.system.errors import UserError

PARTS = ("self_attn", "mlp")  # of a layer, what families call its attention and its feed-forward part


class _Nothing(torch.nn.Module):
    """In place of a part of a layer: what it adds to the states is zero."""

    def __init__(self, gives_pair: bool):
        super().__init__()
        self.gives_pair = gives_pair

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> Any:
        """Zeros like the states; in a pair as attention gives them: with the weights that nobody asks for."""
        nothing = torch.zeros_like(hidden_states)
        return (nothing, None) if self.gives_pair else nothing


class _Unchanged(torch.nn.Module):
    """In place of a whole layer."""

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """The states as they come."""
        return hidden_states


def check_parts(layer: torch.nn.Module) -> None:
    """Raises UserError unless a layer has its attention and its feed-forward part as modules, named as in PARTS."""
    if not all(isinstance(getattr(layer, name, None), torch.nn.Module) for name in PARTS):
        raise UserError(f"a {type(layer).__name__} has no {' and '.join(PARTS)} that could be left out")


def thinned(layer: torch.nn.Module, attention: bool, mlp: bool, mlp_gives_pair: bool) -> torch.nn.Module:
    """A layer without some of its parts, sharing the weights of the others.

    Args:
        layer: of a model, as `lean_copy` makes it.
        attention: whether its attention is left out.
        mlp: whether its feed-forward part is.
        mlp_gives_pair: whether that part returns states and scores, as a router's does in some families.

    Raises:
        UserError: as `check_parts`.
    """
    check_parts(layer)
    if not attention and not mlp:
        return layer
    if attention and mlp:
        return _Unchanged()
    twin = copy.copy(layer)
    left_out = {"self_attn": _Nothing(True)} if attention else {"mlp": _Nothing(mlp_gives_pair)}
    twin.__dict__.update(left_out)
    twin.__dict__["_modules"] = layer._modules | left_out
    return twin
