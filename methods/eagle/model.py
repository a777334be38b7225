"""EAGLE-1's drafting model: a linear layer joins state and token, one decoder layer estimates the next state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from methods.common.draft_layer import CachedLayer
from methods.eagle.layer import EagleLayer
from specbench.decoding.state import NORMED

if TYPE_CHECKING:
    from transformers import LlamaConfig


class EagleModel(CachedLayer):
    """out = Layer(fc [e(x); f]): an estimate of the state that follows f, for the target's own head.

    Args:
        config: of the layer; its `bias`, true by default, is that of the linear layer.
    """

    taps = (NORMED,)
    compiled_layers = ("layers.0",)

    def __init__(self, config: LlamaConfig):
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=getattr(config, "bias", True))
        self.layers = nn.ModuleList([EagleLayer(config)])

    @property
    def layer(self) -> EagleLayer:
        """The decoder layer."""
        return cast("EagleLayer", self.layers[0])

    def forward(self, features: torch.Tensor, embeds: torch.Tensor, **attention: Any) -> torch.Tensor:
        """Pairs: features [b, n, h], embedded tokens [b, n, h] -> [b, n, h], the features of the next pairs."""
        joined = self.fc(torch.cat([embeds, features], dim=-1))
        return self.layer(joined, joined, **attention)
