"""Hydra's heads.

Head i guesses token t + 2 + i from the state f of token t after the target's final norm and from the tokens in
between. With u = [s, e(t + 1), ..., e(t + 1 + i)], e being the target's embedding, its first block is
z = A u + a + SiLU(B u + b), and every further one z + SiLU(W z + c) with the same W and c. Then comes its own output
matrix with a bias, or the target's if it has none ("shared head"). In Hydra s is f. In Hydra++ s is the output for f of
the prefix layer, a decoder layer over the states of all tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import pad, silu
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from methods.common.draft_layer import DraftLayer
from specbench.decoding.state import NORMED

if TYPE_CHECKING:
    from transformers import LlamaConfig


class PrefixLayer(DraftLayer):
    """Hydra++'s prefix layer: a Llama model of one layer over the target's states.

    Args:
        config: one layer.
        width: dimensions of the states that are read, the first ones; None: all.
    """

    taps = (NORMED,)
    compiled_layers = ("layers.0",)

    def __init__(self, config: LlamaConfig, width: int | None = None):
        super().__init__(config, LlamaDecoderLayer(config, layer_idx=0))
        self.width = width

    def forward(self, hidden: torch.Tensor, **attention: Any) -> torch.Tensor:
        """States [batch, n, d] -> states [batch, n, d]."""
        if self.width is not None:
            hidden = pad(hidden[..., : self.width], (0, hidden.shape[-1] - self.width))
        return super().forward(hidden, **attention)


class Heads(nn.Module):
    """K heads; see the module.

    Args:
        heads: K.
        layers: blocks of each head; all but the first one are the same block.
        hidden: width of the target.
        vocab: ids that the heads' own matrices score; None: they use the target's.
        prefix: of the prefix layer; None: there is none.
    """

    output: nn.ModuleList | None
    prefix: PrefixLayer | None

    def __init__(
        self,
        heads: int,
        layers: int,
        hidden: int,
        vocab: int | None = None,
        prefix: LlamaConfig | None = None,
    ):
        super().__init__()
        self.layers, self.hidden = layers, hidden
        # The rows of A, and after them those of B: one product.
        self.wide = nn.ModuleList(nn.Linear((2 + i) * hidden, 2 * hidden) for i in range(heads))
        self.square = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(heads if layers > 1 else 0))
        self.output = None if vocab is None else nn.ModuleList(nn.Linear(hidden, vocab) for _ in range(heads))
        self.prefix = None if prefix is None else PrefixLayer(prefix)

    @property
    def heads(self) -> int:
        """Number of heads."""
        return len(self.wide)

    def seen(self, states: torch.Tensor) -> torch.Tensor:
        """The target's states [b, T, d] of a whole text -> what the heads see of them, [b, T, d]."""
        if self.prefix is None:
            return states
        positions = torch.arange(states.shape[1], device=states.device).unsqueeze(0)
        return self.prefix(states, position_embeddings=self.prefix.rope(positions, states))

    def forward(self, i: int, states: torch.Tensor) -> torch.Tensor:
        """Head i's input u [..., (2 + i) d] -> states [..., d] for the output matrix."""
        through, inner = self.wide[i](states).split(self.hidden, -1)
        z = through + silu(inner)
        for _ in range(self.layers - 1):
            z = z + silu(self.square[i](z))
        return z
