"""Checkpoints of MTP heads: speculators', and those that Qwen's models hold; ours are written as speculators' are.

Settings of a config.json that are not supported here are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import Qwen3Config

from methods.common.checkpoints import (
    FIGURES,
    LAYER,
    WEIGHTS,
    read_checkpoint,
    ready,
    unknown_settings,
    write_checkpoint,
)
from methods.mtp.model import MtpModel
from specbench.decoding.state import NORMED
from specbench.models.devices import name_of
from specbench.models.expansion import CONSTANT, NORM_WEIGHT, Expansion
from specbench.system.errors import UserError

if TYPE_CHECKING:
    from transformers import LlamaConfig

    from specbench.decoding.model.staged_model import StagedModel

WHAT = "the weights of the MTP head"
FILES = (WEIGHTS,)
KIND, COUNT = "mtp", "num_nextn_predict_layers"
ARCHITECTURE, TYPE = "MTPDraftModel", "qwen3"
READS, NORM, BEFORE = "target_state", "after_norm", "before_norm"  # of ours alone
# What files call the parts beside those of the layer: speculators' own names, and Qwen's.
SPECULATORS, QWEN = "mtp_layers.0.", "mtp."
QWEN_NAMES = {
    "fc": "input_proj",
    "pre_fc_norm_hidden": "hidden_layernorm",
    "pre_fc_norm_embedding": "token_layernorm",
    "norm": "final_layernorm",
}
PARTS = (*QWEN_NAMES.values(),)
# Settings that must have this value if present.
FIXED = {
    "model_type": TYPE,
    "hidden_act": "silu",
    COUNT: 1,
    "speculators_model_type": KIND,
    "use_sliding_window": False,
}


def load_mtp(folder: str | Path, target: StagedModel, expansion: Expansion | None = None) -> MtpModel:
    """Reads `config.json` and `model.safetensors` from a folder.

    Args:
        folder: where the files are.
        target: model to draft for; its device and dtype are the head's.
        expansion: how the target was expanded; the head is, too.

    Raises:
        UserError: a file cannot be read; a key or a shape is missing, unknown or wrong; config.json sets what is not
            supported here; the head was made for another target.
    """
    checkpoint = read_checkpoint(folder, WHAT, FILES)
    flat = checkpoint.settings
    flat |= flat.get(LAYER) or {}
    if problems := [*_problems(flat)]:
        raise checkpoint.unusable(f"config.json {'; '.join(problems)}")
    checkpoint.check_target(target, expansion)
    checkpoint.drop_copies(target, expansion)
    checkpoint.state = {_own_name(name): tensor for name, tensor in checkpoint.state.items()}
    # Speculators trains on the states in front of the target's final norm.
    reads = flat.get(READS) or (BEFORE if flat.get("speculators_model_type") else NORM)
    config = checkpoint.config(Qwen3Config, _layer_settings(flat))
    model = MtpModel(config, NORMED if reads == NORM else len(target.layers))
    checkpoint.fill(model.state_dict())
    if expansion is not None:
        model = _expanded(model.float(), target)
    return ready(model, target)


def save_mtp(model: MtpModel, folder: str | Path, dtype: torch.dtype, **figures: Any) -> None:
    """Writes config.json (with figures of the training) and model.safetensors in the form of speculators."""
    layer = model.config.to_diff_dict() | {"model_type": TYPE, "num_hidden_layers": 1}
    settings = {
        "architectures": [ARCHITECTURE],
        "speculators_model_type": KIND,
        COUNT: 1,
        READS: NORM if model.taps == (NORMED,) else BEFORE,
        LAYER: layer,
        "torch_dtype": name_of(dtype),
        FIGURES: figures,
    }
    state = {SPECULATORS + name.removeprefix("layers.0."): part for name, part in model.state_dict().items()}
    write_checkpoint(folder, settings, state, dtype)


def _problems(flat: dict[str, Any]) -> Iterator[str]:
    """Yields what a config.json lacks, or sets that is not supported."""
    needed = ("hidden_size", "num_attention_heads", "vocab_size", "intermediate_size")
    yield from (f"lacks {name}" for name in needed if not flat.get(name))
    yield from unknown_settings(flat, {READS}, FIXED)
    if flat.get(READS) not in (None, NORM, BEFORE):
        yield f"sets {READS}={flat[READS]}, not {NORM} or {BEFORE}"


def _own_name(name: str) -> str:
    """A file's name of a tensor -> the model's."""
    if name.startswith(SPECULATORS):
        rest = name.removeprefix(SPECULATORS)
        return rest if rest.split(".")[0] in PARTS else f"layers.0.{rest}"
    part, _, leaf = name.removeprefix(QWEN).partition(".")
    return f"{QWEN_NAMES[part]}.{leaf}" if part in QWEN_NAMES else name.removeprefix(QWEN)


def _layer_settings(flat: dict[str, Any]) -> dict[str, Any]:
    """The settings of the layer."""
    names = {*Qwen3Config().to_dict(), "rope_theta", "rope_scaling"} - {"dtype"}
    chosen = {name: value for name, value in flat.items() if name in names and value is not None}
    return chosen | {"num_hidden_layers": 1, "layer_types": ["full_attention"], "use_sliding_window": False}


def _expanded(model: MtpModel, target: StagedModel) -> MtpModel:
    """The head at the width and heads of an expanded target."""
    if model.config.attention_bias:
        raise UserError(f"{WHAT} hold biases of queries, keys or values: they cannot be expanded")
    sizes = {"num_hidden_layers": 1, "tie_word_embeddings": False}
    settings = model.config.to_dict() | {"model_type": "llama"} | sizes
    expander = Expansion(settings, target.config.to_dict() | sizes, "the MTP head")

    def make(wide: LlamaConfig) -> MtpModel:
        types = {"model_type": TYPE, "layer_types": ["full_attention"]}
        return MtpModel(Qwen3Config(**wide.to_dict() | types), model.taps[0])

    expanded = expander.build(make, model, target.device, target.dtype)
    if expander.new.vocab > expander.old.vocab:
        # Read by the head's rows of added tokens, as in the target; see `Expansion`.
        old, new = expander.old.hidden, expander.new.hidden
        bias = torch.zeros(new, device=target.device, dtype=target.dtype)
        bias[old] = CONSTANT
        expanded.input_proj.bias = torch.nn.Parameter(bias, requires_grad=False)
        with torch.no_grad():
            expanded.final_layernorm.weight[old] = NORM_WEIGHT * (old / new) ** 0.5
    return expanded
