"""A target with the attention or the feed-forward part of some of its layers left out."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch

from specbench.decoding.model.cost import NO_EXPERTS, weight_bytes
from specbench.decoding.model.graphs import EagerRunner
from specbench.system.errors import UserError

if TYPE_CHECKING:
    from specbench.decoding.model.staged_model import StagedModel

PARTS = ("self_attn", "mlp")  # of a layer, what families call its attention and its feed-forward part


class _Nothing(torch.nn.Module):
    """Replaces a part of a layer: it adds zero to the states."""

    def __init__(self, gives_pair: bool):
        super().__init__()
        self.gives_pair = gives_pair

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> Any:
        """Zeros like the states; if `gives_pair`, in a pair as attention returns them, without weights."""
        nothing = torch.zeros_like(hidden_states)
        return (nothing, None) if self.gives_pair else nothing


class _Unchanged(torch.nn.Module):
    """Replaces a whole layer."""

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """Returns the states."""
        return hidden_states


class Sublayers:
    """The sublayers of a target. A search makes many models: what all of them need is looked up once.

    Args:
        target: whose layers passed `check_parts`.
    """

    @torch.inference_mode()
    def __init__(self, target: StagedModel):
        self.target = target
        layers: list[Any] = target.layers  # a family's own modules
        states = target.embed(torch.zeros(1, 1, dtype=torch.int64, device=target.device))
        # Whether a feed-forward part returns more than states: only a call shows it.
        self._mlp_gives_pair = [isinstance(layer.mlp(states), tuple) for layer in layers]
        # Bytes of each layer's attention and feed-forward part, without routed experts.
        self._bytes = [
            (weight_bytes(layer.self_attn), weight_bytes(layer.mlp) - experts.bytes)
            for layer, experts in zip(layers, target.experts)
        ]

    def without(self, attention: Collection[int], mlp: Collection[int]) -> StagedModel:
        """The target without some of them, for drafting. It shares weights and caches.

        Its passes are neither captured nor widened, and the layers that lack a part are not compiled.

        Args:
            attention: layers whose attention is left out.
            mlp: layers whose feed-forward part is left out.
        """
        target, layers, read = self.target, [], []
        twin = copy.copy(target)
        for i, (layer, pair) in enumerate(zip(target.layers, self._mlp_gives_pair)):
            if i in attention or i in mlp:
                layers.append(thinned(layer, i in attention, i in mlp, pair))
            else:
                layers.append(layer if target.stack.compiled is None else target.stack.compiled[i])
            attention_bytes, mlp_bytes = self._bytes[i]
            left = target.layer_bytes[i] - (i in attention) * attention_bytes - (i in mlp) * mlp_bytes
            read.append(0 if i in attention and i in mlp else left)
        twin.runner, twin.fixed_shapes, twin.width, twin.padding = EagerRunner(), False, None, 0
        twin.stack = copy.copy(target.stack)
        twin.stack.layers, twin.stack.compiled = layers, None
        twin.layer_bytes = read
        twin.experts = [NO_EXPERTS if i in mlp else some for i, some in enumerate(target.experts)]
        return twin


def check_parts(layer: torch.nn.Module) -> None:
    """Raises UserError unless a layer has its attention and its feed-forward part as modules, named as in PARTS."""
    if not all(isinstance(getattr(layer, name, None), torch.nn.Module) for name in PARTS):
        raise UserError(f"a {type(layer).__name__} has no {' and '.join(PARTS)} that could be left out")


def thinned(layer: torch.nn.Module, attention: bool, mlp: bool, mlp_gives_pair: bool) -> torch.nn.Module:
    """A layer without one of its parts or both, sharing the weights of the others.

    Args:
        layer: of a model, as `lean_copy` makes it.
        attention: whether its attention is left out.
        mlp: whether its feed-forward part is.
        mlp_gives_pair: whether that part returns states and scores, as a router's does in some families.
    """
    if attention and mlp:
        return _Unchanged()
    twin = copy.copy(layer)
    # Accelerate's, of a target on several devices: it runs the whole layer.
    twin.__dict__.pop("forward", None)
    left_out = {"self_attn": _Nothing(True)} if attention else {"mlp": _Nothing(mlp_gives_pair)}
    twin.__dict__.update(left_out)
    twin.__dict__["_modules"] = layer._modules | left_out
    return twin
