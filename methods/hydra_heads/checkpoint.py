"""Checkpoints of Hydra's heads, under the authors' keys.

The authors list a head's blocks as often as it has layers, though all but the first one are the same, and in Hydra++
with a dropout module in front of each. So block j of head i is `hydra_mlp.i.j` in Hydra and `hydra_mlp.i.(1 + 2 j)` in
Hydra++ (`prefix-mlp`), whose output matrices are `hydra_lm_head.i.1` instead of `hydra_lm_head.i`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import LlamaConfig

from methods.common.checkpoints import (
    WEIGHTS,
    Checkpoint,
    layer_sizes,
    read_checkpoint,
    ready,
    sizes_trained_for,
    write_checkpoint,
)
from methods.hydra_heads.heads import Heads, PrefixLayer
from specbench.models.expansion import Expansion

if TYPE_CHECKING:
    from specbench.decoding.model.staged_model import StagedModel

WHAT = "the Hydra heads"
FILES = (WEIGHTS, "hydra_lm_head.pt")
PLAIN, PREFIXED = "mlp", "prefix-mlp"  # the architectures, as the authors' config.json names them
PREFIX = "prefix_embeding_layer."  # spelt as by the authors
PARTS = ("res_connection", "linear")  # of the first block: A, B
EMBEDDING = "input_embed_fn.weight"  # a copy of the target's, which is used in its place
UNUSED = f"{PREFIX}embed_tokens.weight"


def save_heads(heads: Heads, folder: str | Path, dtype: torch.dtype, **notes: Any) -> None:
    """Writes config.json (with `notes`, such as the tree) and model.safetensors."""
    settings: dict[str, Any] = {
        "hydra_num_heads": heads.heads,
        "hydra_num_layers": heads.layers,
        "hydra_head_arch": PLAIN if heads.prefix is None else PREFIXED,
        "grounded_heads": True,
        "hidden_state_offset": 0,
        # Not the authors': the width, the target's head in place of own ones, what differs from a default Llama.
        "hidden_size": heads.hidden,
        "original_lm_head": heads.output is None,
        **({} if heads.prefix is None else {"prefix": heads.prefix.config.to_diff_dict()}),
    }
    write_checkpoint(folder, settings | notes, _state(heads), dtype)


def load_heads(
    folder: str | Path, target: StagedModel, expansion: Expansion | None = None
) -> tuple[Heads, dict[str, Any]]:
    """Reads `config.json` and `model.safetensors` or the authors' `hydra_lm_head.pt` from a folder.

    Pickles are read with weights_only.

    Args:
        folder: where the files are.
        target: model to draft for; its device and dtype are the heads'.
        expansion: how the target was expanded; the heads are, too.

    Returns:
        The heads, and the content of config.json.

    Raises:
        UserError: a file cannot be read, the heads are of another kind, a key or a shape is missing, unknown or wrong,
            tensors that must be equal are not, or the heads were made for another target.
    """
    checkpoint = read_checkpoint(folder, WHAT, FILES)
    settings, state = checkpoint.settings, checkpoint.state
    _check_settings(checkpoint)
    prefixed = settings["hydra_head_arch"] == PREFIXED
    hidden, _, vocab = sizes_trained_for(target, expansion)
    first = _names(prefixed, 0, 1)[0][0]
    if (weight := state.get(f"{first}.linear.weight")) is not None:
        checkpoint.check_width(weight.shape[0], hidden)
    layers = _count(checkpoint)
    config = None
    if prefixed:
        prefix_settings = settings.get("prefix")
        sizes = layer_sizes(target) if prefix_settings is None else prefix_settings
        config = checkpoint.config(LlamaConfig, sizes)
    heads = Heads(
        settings["hydra_num_heads"],
        layers,
        hidden,
        None if settings.get("original_lm_head") else vocab,
        config,
    )
    if (copy := state.pop(EMBEDDING, None)) is not None:
        checkpoint.check_copy(EMBEDDING, copy, target.embed_tokens.weight[:vocab, :hidden])
    state.pop(UNUSED, None)
    _fill(checkpoint, heads)
    if expansion is not None:
        heads = _expanded(checkpoint, heads, target, expansion)
    return ready(heads, target), settings


def _names(prefixed: bool, i: int, layers: int) -> tuple[list[str], str]:
    """Returns the names of head i's blocks and output matrix."""
    if prefixed:
        return [f"hydra_mlp.{i}.{1 + 2 * j}" for j in range(layers)], f"hydra_lm_head.{i}.1"
    return [f"hydra_mlp.{i}.{j}" for j in range(layers)], f"hydra_lm_head.{i}"


def _renamed(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


def _check_settings(checkpoint: Checkpoint) -> None:
    """Raises UserError for heads that are no Hydra heads this module supports."""
    settings = checkpoint.settings
    arch = settings.get("hydra_head_arch")
    problems = []
    if arch not in (PLAIN, PREFIXED):
        problems.append(f"hydra_head_arch is {arch!r}, not '{PLAIN}' or '{PREFIXED}'")
    if not settings.get("grounded_heads"):
        problems.append("grounded_heads is not true: the heads do not see the tokens in front of theirs")
    if settings.get("hidden_state_offset", 0) != 0:
        problems.append("hidden_state_offset is not 0: the heads read states of an earlier layer")
    problems += [
        f"{key} is {settings.get(key)!r}, not a whole number from 1 on"
        for key in ("hydra_num_heads", "hydra_num_layers")
        if not isinstance(settings.get(key), int) or settings[key] < 1
    ]
    if problems:
        raise checkpoint.unusable("; ".join(problems))


def _count(checkpoint: Checkpoint) -> int:
    """Number of layers per head. Raises UserError unless heads and layers are as many as in config.json."""
    blocks = {tuple(name.split(".")[1:3]) for name in checkpoint.state if name.startswith("hydra_mlp.")}
    heads = len({head for head, _ in blocks})
    counts = {"hydra_num_heads": heads, "hydra_num_layers": len(blocks) // max(1, heads)}
    for key, number in counts.items():
        if (value := checkpoint.settings[key]) != number:
            raise checkpoint.unfit(f"config.json says {key}={value}, the tensors are of {number}")
    return counts["hydra_num_layers"]


@torch.no_grad()
def _state(heads: Heads) -> dict[str, torch.Tensor]:
    """The tensors of heads under the authors' names: views of the parameters, which a copy into them sets."""
    state = {} if heads.prefix is None else _renamed(heads.prefix.state_dict(), PREFIX)
    for i, wide in enumerate(cast("list[torch.nn.Linear]", heads.wide)):
        blocks, output = _names(heads.prefix is not None, i, heads.layers)
        for part, rows in zip(PARTS, (slice(heads.hidden), slice(heads.hidden, None))):
            state[f"{blocks[0]}.{part}.weight"] = wide.weight[rows]
            state[f"{blocks[0]}.{part}.bias"] = wide.bias[rows]
        for block in blocks[1:]:
            state |= _renamed(heads.square[i].state_dict(), f"{block}.linear.")
        if heads.output is not None:
            state |= _renamed(heads.output[i].state_dict(), f"{output}.")
    return state


def _fill(checkpoint: Checkpoint, heads: Heads) -> None:
    """Loads a checkpoint's tensors into heads. Raises UserError as `load_heads`."""
    checkpoint.fill(_state(heads))
    state = checkpoint.state
    for i in range(heads.heads):
        blocks, _ = _names(heads.prefix is not None, i, heads.layers)
        for leaf in ("weight", "bias"):
            tied = [f"{block}.linear.{leaf}" for block in blocks[1:]]
            for name in tied[1:]:
                if not torch.equal(state[name], state[tied[0]]):
                    raise checkpoint.unfit(f"{name} differs from {tied[0]}, though both are the same block")


@torch.no_grad()
def _expanded(checkpoint: Checkpoint, heads: Heads, target: StagedModel, expansion: Expansion) -> Heads:
    """The heads at the width of an expanded target, with the predictions of the original ones."""
    if heads.output is not None:
        raise checkpoint.error("have output matrices of their own: they cannot be expanded")
    old, new = expansion.old.hidden, expansion.new.hidden
    wide = Heads(heads.heads, heads.layers, new)
    for parameter in wide.parameters():
        parameter.zero_()
    for i in range(heads.heads):
        # [A; B] by rows, [s, e, ...] by columns: each part at the beginning of its wider one.
        source, into = heads.wide[i].get_parameter("weight"), wide.wide[i].get_parameter("weight")
        into.view(2, new, 2 + i, new)[:, :old, :, :old] = source.view(2, old, 2 + i, old)
        bias = wide.wide[i].get_parameter("bias").view(2, new)
        bias[:, :old] = heads.wide[i].get_parameter("bias").view(2, old)
        if expansion.new.vocab > expansion.old.vocab:
            # In the target's states this dimension keeps added tokens from being chosen.
            bias[0, old] = 1.0
        if heads.layers > 1:
            wide.square[i].get_parameter("weight")[:old, :old] = heads.square[i].get_parameter("weight")
            wide.square[i].get_parameter("bias")[:old] = heads.square[i].get_parameter("bias")
    if heads.prefix is not None:
        expander = Expansion(heads.prefix.config.to_dict(), layer_sizes(target), "the prefix layer")
        layer = heads.prefix.float()
        wide.prefix = expander.build(
            lambda config: PrefixLayer(config, old), layer, target.device, target.dtype
        )
    return wide
