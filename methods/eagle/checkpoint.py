"""Checkpoints of EAGLE-1's drafting model, which EAGLE-2 uses, too: the authors' files, and our own with their keys."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import LlamaConfig

from methods.common.checkpoints import (
    EMBEDDING,
    WEIGHTS,
    Checkpoint,
    is_copy,
    layer_sizes,
    read_checkpoint,
    ready,
    write_checkpoint,
)
from methods.eagle.model import EagleModel
from specbench.models.expansion import ADDED_ROW, Expansion
from specbench.system.errors import UserError

if TYPE_CHECKING:
    from specbench.decoding.model.staged_model import StagedModel

WHAT = "the weights of the drafter"
FILES = (WEIGHTS, "pytorch_model.bin")
LOGIT = -128.0  # of a token that an expanded vocabulary adds


def load_eagle(
    folder: str | Path, target: StagedModel, expansion: Expansion | None = None
) -> tuple[EagleModel, dict[str, Any]]:
    """Reads `config.json` and `model.safetensors` or the authors' `pytorch_model.bin` from a folder.

    Pickles are read with weights_only. KV heads, their width, and biases are taken from the tensors: the authors'
    config.json does not always name them.

    Args:
        folder: where the files are.
        target: model to draft for; its device and dtype are the drafting model's.
        expansion: how the target was expanded; the drafting model is, too.

    Returns:
        The drafting model, and the content of config.json.

    Raises:
        UserError: a file cannot be read, a key or a shape is missing, unknown or wrong, or the drafter was made for
            another target.
    """
    checkpoint = read_checkpoint(folder, WHAT, FILES)
    settings, state = checkpoint.settings, checkpoint.state
    checkpoint.check_target(target, expansion)
    _drop_embedding(checkpoint, target)
    model = EagleModel(checkpoint.config(LlamaConfig, settings | _layer_settings(settings, state)))
    checkpoint.fill(model.state_dict())
    if expansion is not None:
        model = _expanded(model.float(), target, expansion)
    return ready(model, target), settings


def save_eagle(model: EagleModel, folder: str | Path, dtype: torch.dtype, **notes: Any) -> None:
    """Writes config.json (with `notes`, such as the tree, added) and model.safetensors."""
    settings = model.config.to_diff_dict() | {"bias": model.fc.bias is not None} | notes
    write_checkpoint(folder, settings, model.state_dict(), dtype)


def _drop_embedding(checkpoint: Checkpoint, target: StagedModel) -> None:
    """Removes the embedding. Raises UserError if it is not the target's."""
    embedding = checkpoint.state.pop(EMBEDDING, None)
    if embedding is None:
        return
    ours = target.embed_tokens.weight
    # An expanded target is wider, and may have more rows.
    n, width = min(len(embedding), len(ours)), embedding.shape[1]
    if not is_copy(embedding[:n], ours[:n, :width]):
        raise checkpoint.error("hold an embedding unlike the target's: they were made for another one")


def _layer_settings(settings: dict[str, Any], state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Returns the layer's settings by its tensors: KV heads, their width, biases."""
    attention, layer_settings = "layers.0.self_attn", {"bias": "fc.bias" in state}
    layer_settings["qkv_bias"] = f"{attention}.q_proj.bias" in state
    queries, keys = (state.get(f"{attention}.{name}.weight") for name in ("q_proj", "k_proj"))
    heads = settings.get("num_attention_heads")
    if queries is None or keys is None or not heads or queries.shape[0] % heads:
        return layer_settings  # `fill` reports the problem
    head_dim = queries.shape[0] // heads
    return layer_settings | {"head_dim": head_dim, "num_key_value_heads": keys.shape[0] // head_dim}


def _expanded(model: EagleModel, target: StagedModel, expansion: Expansion) -> EagleModel:
    """The drafting model of an expanded target: it computes the same states, and costs what one of that width does."""
    if model.layer.self_attn.q_proj.bias is not None:
        raise UserError(f"{WHAT} hold biases of queries, keys or values: they cannot be expanded")
    grows = expansion.new.vocab > expansion.old.vocab
    settings = model.config.to_dict() | {"bias": grows or model.fc.bias is not None}
    expander = Expansion(settings, layer_sizes(target), "the drafter")
    device, dtype = target.device, target.dtype
    expanded = expander.build(EagleModel, torch.nn.ModuleDict({"layers": model.layers}), device, dtype)
    old, new = expander.old.hidden, expander.new.hidden
    with torch.no_grad():
        weight = model.fc.weight
        expanded.fc.weight[:old, :old] = weight[:, :old].to(device, dtype)
        expanded.fc.weight[:old, new : new + old] = weight[:, old:].to(device, dtype)
        if model.fc.bias is not None:
            expanded.fc.bias[:old] = model.fc.bias.to(device, dtype)
        if grows:
            # Read by the head's rows of added tokens; see `Expansion`. It is too small to count in the layer's norm.
            expanded.fc.bias[old] = LOGIT / ADDED_ROW
    return expanded
