"""DFlash2's layers: a convolution over the places of a block in front of each sublayer, and one after it.

Each place is summed with the ones in front of it in its block. The weights are a learnt kernel plus a term from the
place's own normed state, per group of channels. Names of the parts are those of the authors' checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

if TYPE_CHECKING:
    from transformers import Qwen3Config


class LocalConvolution(nn.Module):
    """The convolutions around one sublayer; at first they change nothing.

    Args:
        width: of the states.
        size: places that are summed, a place's own included.
        group: channels that share the state's term.
    """

    def __init__(self, width: int, size: int, group: int):
        super().__init__()
        self.group = group
        self.base_kernel = nn.Parameter(torch.zeros(2, size, width))
        self.kernel_projection = nn.Linear(width, 2 * size * (width // group), bias=False)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1.0
            self.kernel_projection.weight.zero_()

    def around(
        self, sublayer: Callable[[torch.Tensor], torch.Tensor], states: torch.Tensor, places: int | None
    ) -> torch.Tensor:
        """Applies the sublayer and both convolutions to normed states [b, n, d]; `places` as in `convolved`."""
        size = self.base_kernel.shape[1]
        added = self.kernel_projection(states).unflatten(-1, (2, size, -1, 1))
        kernels = (self.base_kernel.unflatten(-1, (-1, self.group)) + added).flatten(-2)
        before, after = kernels.unbind(2)
        return convolved(sublayer(convolved(states, before, places)), after, places)


class ConvolvedLayer(Qwen3DecoderLayer):
    """A Qwen3 layer with convolutions around attention and MLP.

    Args:
        config: of a Qwen3 layer.
        layer_idx: its number in the cache.
        size: as in `LocalConvolution`.
        group: likewise.
    """

    def __init__(self, config: Qwen3Config, layer_idx: int, size: int, group: int):
        super().__init__(config, layer_idx)
        self.attention_conv = LocalConvolution(config.hidden_size, size, group)
        self.mlp_conv = LocalConvolution(config.hidden_size, size, group)

    def forward(self, states: torch.Tensor, places: int | None = None, **arguments: Any) -> torch.Tensor:  # type: ignore[override] # the names of others are not used
        """States [b, n, d] -> states [b, n, d].

        Args:
            states: of blocks.
            places: as in `convolved`.
            **arguments: of attention.
        """

        def attended(normed: torch.Tensor) -> torch.Tensor:
            return self.self_attn(hidden_states=normed, **arguments)[0]

        states = states + self.attention_conv.around(attended, self.input_layernorm(states), places)
        return states + self.mlp_conv.around(self.mlp, self.post_attention_layernorm(states), places)


def convolved(states: torch.Tensor, kernel: torch.Tensor, places: int | None) -> torch.Tensor:
    """Sums each place with the ones in front of it.

    Args:
        states: [b, n, d].
        kernel: [b, n, size, d] of each place: for itself, for the one in front, ...
        places: of a block, if n are several blocks side by side; None: all are one block.
    """
    blocks = states if places is None else states.unflatten(1, (-1, places)).flatten(0, 1)
    total = states * kernel[:, :, 0]
    for back in range(1, kernel.shape[2]):
        in_front = torch.cat([torch.zeros_like(blocks[:, :back]), blocks[:, :-back]], dim=1)
        total = total + in_front.view_as(states) * kernel[:, :, back]
    return total
