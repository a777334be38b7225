"""Medusa's heads.

Head i guesses token t + 2 + i from the state f of token t after the target's final norm: z = f + SiLU(W f + b), then
an output matrix of its own, or, where there is none ("shared head", a variant that vLLM knows, too), the target's.
"""

from __future__ import annotations

import torch
from torch.nn.functional import silu


class MedusaHeads(torch.nn.Module):
    """K residual blocks, and K output matrices where they are not the target's.

    Args:
        heads: K.
        hidden: width of the target.
        vocab: ids that heads of their own score; None: the target's head is used.
    """

    output: torch.nn.Parameter | None

    def __init__(self, heads: int, hidden: int, vocab: int | None = None):
        super().__init__()
        # As the authors begin: every head says what the target's says.
        self.weight = torch.nn.Parameter(torch.zeros(heads, hidden, hidden))
        self.bias = torch.nn.Parameter(torch.zeros(heads, hidden))
        output = None if vocab is None else torch.nn.Parameter(torch.zeros(heads, vocab, hidden))
        self.register_parameter("output", output)

    @property
    def heads(self) -> int:
        """How many there are."""
        return self.weight.shape[0]

    def forward(self, states: torch.Tensor, first: int | None = None) -> torch.Tensor:
        """States [..., d] after the target's final norm -> [..., K, d] for the output matrices, of the first heads."""
        weight, bias = self.weight[:first], self.bias[:first]
        k, d = bias.shape
        inner = torch.nn.functional.linear(states, weight.view(k * d, d), bias.view(-1))
        return states.unsqueeze(-2) + silu(inner.view(*states.shape[:-1], k, d))
