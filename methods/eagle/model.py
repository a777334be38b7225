"""EAGLE-1's drafting model: a linear layer joins state and token, one decoder layer estimates the next state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import LlamaConfig

from methods.eagle.layer import DraftingModel, EagleLayer
from specbench.decoding.model.anatomy import rotary_of
from specbench.decoding.state import NORMED

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# What the drafter of a target has in common with it, where the target has it.
SHARED = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("intermediate_size", "hidden_act", "rms_norm_eps", "max_position_embeddings"),
)


class EagleModel(DraftingModel):
    """out = Layer(fc [e(x); f]): an estimate of the state that follows f, for the target's own head.

    Args:
        config: of the layer; `bias` of it is that of the linear layer, which has one where nothing is said.
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

    def features(self, states: dict[int, torch.Tensor]) -> torch.Tensor:
        """The target's states after its final norm [b, n, h]."""
        return states[NORMED]

    def forward(self, features: torch.Tensor, embeds: torch.Tensor, **attention: Any) -> torch.Tensor:
        """Pairs: features [b, n, h], embedded tokens [b, n, h] -> [b, n, h], the features of the next pairs."""
        joined = self.fc(torch.cat([embeds, features], dim=-1))
        return self.layer(joined, joined, **attention)


def eagle_config(target_config: PretrainedConfig) -> LlamaConfig:
    """The drafter that the authors give a target: a layer of its dimensions."""
    settings = {name: getattr(target_config, name, None) for name in SHARED}
    settings["intermediate_size"] = settings["intermediate_size"] or target_config.ffn_dim
    return LlamaConfig(
        **{name: value for name, value in settings.items() if value is not None},
        num_hidden_layers=1,
        rope_parameters={"rope_type": "default", "rope_theta": rotary_of(target_config)["rope_theta"]},
    )
