"""Kangaroo's adapter: one attention layer between the exit states and the target's own head, and its checkpoints.

h' = h + SelfAttn(RMSNorm_in(h)); out = RMSNorm_out(h'); logits = head(out). No feed-forward part, no biases
(paper, section 4.1): 4 N^2 + 2 N parameters for hidden size N. Stock transformers modules, so that the key names and
the arithmetic are those of the authors' checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm

from methods.common.checkpoints import WEIGHTS, read_checkpoint, ready, write_checkpoint
from methods.common.draft_layer import DraftLayer
from specbench.models.expansion import Expansion
from specbench.system.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from specbench.decoding.model.staged_model import StagedModel

WHAT = "the weights of the adapter"
FILES = (WEIGHTS, "pytorch_model.bin")


class AdapterLayer(nn.Module):
    """h + SelfAttn(RMSNorm(h))."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, layer_idx=0)

    def forward(self, hidden: torch.Tensor, **attention: Any) -> torch.Tensor:
        """States [batch, n, d] -> states [batch, n, d]."""
        return hidden + self.self_attn(hidden_states=self.input_layernorm(hidden), **attention)[0]


class Adapter(DraftLayer):
    """The adapter's one layer and its norm.

    Args:
        config: one layer; hidden size, heads, eps and rotary settings are used.
    """

    compiled_layers = ("layers.0",)

    def __init__(self, config: LlamaConfig):
        super().__init__(config, AdapterLayer(config))


def adapter_config(target_config: PretrainedConfig) -> LlamaConfig:
    """The adapter that the paper gives a target: its width and heads, rotary base 10000."""
    heads = target_config.num_attention_heads
    return LlamaConfig(
        hidden_size=target_config.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=getattr(target_config, "head_dim", None) or target_config.hidden_size // heads,
        vocab_size=target_config.vocab_size,
        rms_norm_eps=1e-6,
        max_position_embeddings=target_config.max_position_embeddings,
    )


def check_exit_layer(exit_layer: int, layers: int) -> int:
    """The exit layer as given. Raises UserError unless it leaves layers of the target on both sides."""
    if not 0 < exit_layer < layers:
        raise UserError(f"exit_layer must lie between 1 and {layers - 1} for this target, not {exit_layer}")
    return exit_layer


def load_adapter(folder: str | Path, target: StagedModel, expansion: Expansion | None = None) -> Adapter:
    """Reads `config.json` and `model.safetensors` or the authors' `pytorch_model.bin` from a folder.

    Pickles are read with weights_only.

    Args:
        folder: where the files are.
        target: model to draft for; its device and dtype are the adapter's.
        expansion: how the target was expanded; the adapter is, too, to the size that the paper gives such a target.

    Raises:
        UserError: a file cannot be read, a key or a shape is missing, unknown or wrong, or the adapter was made for a
            target of another width.
    """
    checkpoint = read_checkpoint(folder, WHAT, FILES)
    checkpoint.check_target(target, expansion)
    adapter = Adapter(checkpoint.config(LlamaConfig, checkpoint.settings))
    checkpoint.fill(adapter.state_dict())
    if expansion is not None:
        adapter = _expanded(adapter.float(), target, expansion)
    return ready(adapter, target)


def _expanded(adapter: Adapter, target: StagedModel, expansion: Expansion) -> Adapter:
    """The adapter at the width and heads of an expanded target, for the same states after the exit layer."""
    expander = Expansion(adapter.config.to_dict(), adapter_config(target.config).to_dict(), "the adapter")
    expanded = expander.build(Adapter, adapter, target.device, target.dtype)
    if (exit_layer := getattr(adapter.config, "exit_layer", None)) is not None:
        expanded.config.exit_layer = expansion.layers(exit_layer)
    return expanded


def save_adapter(adapter: Adapter, folder: str | Path, dtype: torch.dtype, **notes: Any) -> None:
    """Writes config.json (with `notes`, such as the exit layer, added) and model.safetensors."""
    write_checkpoint(folder, adapter.config.to_diff_dict() | notes, adapter.state_dict(), dtype)
