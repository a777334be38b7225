"""Medusa's heads.

Head i guesses token t + 2 + i from the state f of token t after the target's final norm: z = f + SiLU(W f + b), then
its own output matrix, or the target's if it has none ("shared head", a variant that vLLM supports, too).
"""

from __future__ import annotations

import torch
from torch.nn.functional import silu


class MedusaHeads(torch.nn.Module):
    """K residual blocks, and K output matrices unless they are the target's.

    Args:
        heads: K.
        hidden: width of the target.
        vocab: ids that the heads' own matrices score; None: they use the target's.
    """

    output: torch.nn.Parameter | None

    def __init__(self, heads: int, hidden: int, vocab: int | None = None):
        super().__init__()
        # As in the authors' code: every head begins as the target's.
        self.weight = torch.nn.Parameter(torch.zeros(heads, hidden, hidden))
        self.bias = torch.nn.Parameter(torch.zeros(heads, hidden))
        output = None if vocab is None else torch.nn.Parameter(torch.zeros(heads, vocab, hidden))
        self.register_parameter("output", output)

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.weight.shape[0]

    def forward(self, states: torch.Tensor, first: int | None = None) -> torch.Tensor:
        """States [..., d] after the target's final norm -> [..., K, d] for the output matrices, of the first heads."""
        weight, bias = self.weight[:first], self.bias[:first]
        k, d = bias.shape
        inner = torch.nn.functional.linear(states, weight.view(k * d, d), bias.view(-1))
        return states.unsqueeze(-2) + silu(inner.view(*states.shape[:-1], k, d))
