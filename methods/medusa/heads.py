"""Medusa's heads and their checkpoints.

Head i guesses token t + 2 + i from the state f of token t behind the target's final norm: z = f + SiLU(W f + b), then
an output matrix of its own, or, where there is none ("shared head", a variant that vLLM knows, too), the target's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad, silu

from methods.checkpoints import WEIGHTS, check_tensors, check_width, read_checkpoint, write_checkpoint
from specbench.decoding.device import place_weights
from specbench.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from specbench.expand import Expansion

WHAT = "the heads"
FILES = (WEIGHTS, "medusa_lm_head.pt", "medusa_lm_head.safetensors")


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
        own = None if vocab is None else torch.nn.Parameter(torch.zeros(heads, vocab, hidden))
        self.register_parameter("output", own)

    @property
    def heads(self) -> int:
        """How many there are."""
        return self.weight.shape[0]

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """States [..., d] behind the target's final norm -> [..., K, d] for the output matrices."""
        k, d = self.bias.shape
        inner = torch.nn.functional.linear(states, self.weight.view(k * d, d), self.bias.view(-1))
        return states.unsqueeze(-2) + silu(inner.view(*states.shape[:-1], k, d))


def load_heads(
    folder: str | Path,
    hidden: int,
    device: torch.device,
    dtype: torch.dtype,
    expansion: Expansion | None = None,
) -> tuple[MedusaHeads, dict[str, Any]]:
    """Reads `config.json` and `model.safetensors` or the authors' `medusa_lm_head.pt` from a folder.

    Pickles are read with weights_only. The number of heads is that of the keys; the authors' config.json is wrong.

    Args:
        folder: where the files are.
        hidden: width of the target.
        device: to put the heads on.
        dtype: of the heads.
        expansion: how the target was expanded; the heads are, too.

    Returns:
        The heads, and the content of config.json.

    Raises:
        UserError: a file cannot be read, a key or a shape is missing, unknown or wrong, or the heads were made for a
            target of another width.
    """
    settings, state = read_checkpoint(folder, WHAT, FILES)
    width = hidden if expansion is None else expansion.old.hidden
    heads = _assembled(folder, state, width)
    if expansion is not None:
        if heads.output is not None:
            raise UserError(
                f"the heads in '{folder}' have output matrices of their own: they cannot be expanded"
            )
        more = expansion.new.hidden - width
        wide = MedusaHeads(heads.heads, expansion.new.hidden)
        wide.load_state_dict(
            {"weight": pad(heads.weight, (0, more, 0, more)), "bias": pad(heads.bias, (0, more))}
        )
        heads = wide
    place_weights(heads, device, dtype)
    return heads.eval().requires_grad_(False), settings


def save_heads(heads: MedusaHeads, folder: str | Path, dtype: torch.dtype, **notes: Any) -> None:
    """Writes config.json (with `notes`, such as the tree) and model.safetensors, under the authors' keys."""
    settings = {
        "medusa_num_heads": heads.heads,
        "medusa_num_layers": 1,
        "hidden_size": heads.bias.shape[1],
        "original_lm_head": heads.output is None,  # vLLM's name for the target's head in place of own ones
        **notes,
    }
    state = {}
    for i in range(heads.heads):
        state[f"{i}.0.linear.weight"], state[f"{i}.0.linear.bias"] = heads.weight[i], heads.bias[i]
        if heads.output is not None:
            state[f"{i}.1.weight"] = heads.output[i]
    write_checkpoint(folder, settings, state, dtype)


def _assembled(folder: str | Path, state: dict[str, torch.Tensor], hidden: int) -> MedusaHeads:
    """The heads of a checkpoint's tensors. Raises UserError as `load_heads` says."""
    count = len({name.split(".")[0] for name in state})
    own = any(name.endswith(".1.weight") for name in state)
    vocab = state["0.1.weight"].shape[0] if "0.1.weight" in state else None
    expected: dict[str, tuple[int, ...]] = {}
    for i in range(count):
        expected |= {f"{i}.0.linear.weight": (hidden, hidden), f"{i}.0.linear.bias": (hidden,)}
        if own:
            expected[f"{i}.1.weight"] = (vocab or 0, hidden)
    if "0.0.linear.weight" in state:
        check_width(folder, WHAT, state["0.0.linear.weight"].shape[0], hidden)
    check_tensors(folder, WHAT, state, expected)
    heads = MedusaHeads(count, hidden, vocab if own else None)
    with torch.no_grad():
        for i in range(count):
            heads.weight[i], heads.bias[i] = state[f"{i}.0.linear.weight"], state[f"{i}.0.linear.bias"]
            if heads.output is not None:
                heads.output[i] = state[f"{i}.1.weight"]
    return heads
