"""Checkpoints of Medusa's heads: under the authors' keys, and in the form that vLLM reads.

Block and output matrix of head i are `i.0.linear` and `i.1` for the authors, `blocks.i.layers.0` and `lm_heads.i` for
vLLM. vLLM's form has two more entries: a copy of the target's head if all heads share it (`lm_head`), and a
`token_map`, the token ids of the rows of output matrices.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from methods.common.checkpoints import (
    HEAD,
    WEIGHTS,
    Checkpoint,
    read_checkpoint,
    ready,
    sizes_trained_for,
    write_checkpoint,
)
from methods.medusa.heads import MedusaHeads
from specbench.system.errors import UserError

if TYPE_CHECKING:
    from specbench.decoding.model.staged_model import StagedModel
    from specbench.models.expansion import Expansion

WHAT = "the heads"
FILES = (WEIGHTS, "medusa_lm_head.pt", "medusa_lm_head.safetensors")
TOKEN_MAP = "token_map"
# vLLM's names, and the authors' in their place.
RENAMED = (
    (re.compile(r"^medusa_heads\."), ""),
    (re.compile(r"^blocks\.(\d+)\.layers\.0\."), r"\1.0.linear."),
    (re.compile(r"^lm_heads\.(\d+)\."), r"\1.1."),
)
State = dict[str, torch.Tensor]


def load_heads(
    folder: str | Path, target: StagedModel, expansion: Expansion | None = None
) -> tuple[MedusaHeads, dict[str, Any], torch.Tensor | None]:
    """Reads `config.json` and `model.safetensors` or the authors' `medusa_lm_head.pt` from a folder.

    Pickles are read with weights_only. The number of heads is that of the keys; the authors' config.json is wrong.

    Args:
        folder: where the files are, in either form.
        target: model to draft for; its device and dtype are the heads'.
        expansion: how the target was expanded; the heads are, too.

    Returns:
        The heads; the content of config.json; the token ids [rows] that they score, None for all.

    Raises:
        UserError: a file cannot be read, what it holds is a whole model, a key or a shape is missing, unknown or wrong,
            or the heads were made for another target.
    """
    checkpoint = read_checkpoint(folder, WHAT, FILES, lambda config: _check_heads_alone(folder, config))
    width, _, vocab = sizes_trained_for(target, expansion)
    ids = None
    if any(name.removeprefix("medusa_heads.").startswith("blocks.") for name in checkpoint.state):
        ids = _rename_from_vllm(checkpoint, target, vocab)
    heads = _assembled(checkpoint, width)
    rows = vocab if ids is None else len(ids)
    if heads.output is not None and heads.output.shape[1] != rows:
        raise checkpoint.unfit(f"they score {heads.output.shape[1]} tokens, not {rows}")
    if expansion is not None:
        if heads.output is not None:
            raise checkpoint.error("have output matrices of their own: they cannot be expanded")
        more = expansion.new.hidden - width
        wide = MedusaHeads(heads.heads, width + more)
        wide.load_state_dict(
            {"weight": pad(heads.weight, (0, more, 0, more)), "bias": pad(heads.bias, (0, more))}
        )
        heads = wide
    ids = None if ids is None else ids.to(target.device)
    return ready(heads, target), checkpoint.settings, ids


def save_heads(heads: MedusaHeads, folder: str | Path, dtype: torch.dtype, **notes: Any) -> None:
    """Writes config.json (with `notes`, such as the tree) and model.safetensors, under the authors' keys."""
    settings = {
        "medusa_num_heads": heads.heads,
        "medusa_num_layers": 1,
        "hidden_size": heads.bias.shape[1],
        "original_lm_head": heads.output is None,  # vLLM's name for the target's head in place of own ones
        **notes,
    }
    write_checkpoint(folder, settings, _state(heads, "{}.0.linear.", "{}.1."), dtype)


def save_for_vllm(
    heads: MedusaHeads, head: torch.Tensor, folder: str | Path, dtype: torch.dtype, **notes: Any
) -> None:
    """Writes config.json (with `notes`) and model.safetensors as vLLM reads them.

    Args:
        heads: to write.
        head: [vocab, d] the target's, of which heads without output matrices need a copy.
        folder: to write to.
        dtype: of the tensors.
        notes: such as the tree, which vLLM ignores.
    """
    settings = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "num_heads": heads.heads,
        "num_hidden_layers": 1,
        "hidden_size": heads.bias.shape[1],
        "vocab_size": head.shape[0],
        "truncated_vocab_size": head.shape[0],
        "medusa_fc_bias": True,
        "original_lm_head": heads.output is None,
        **notes,
    }
    state = _state(heads, "blocks.{}.layers.0.", "lm_heads.{}.")
    if heads.output is None:
        state[HEAD] = head
    write_checkpoint(folder, settings, state, dtype)


@torch.no_grad()
def _state(heads: MedusaHeads, block: str, output: str) -> State:
    """The tensors of heads, by patterns of the names of head i's block and output matrix."""
    state = {}
    for i in range(heads.heads):
        state[f"{block.format(i)}weight"], state[f"{block.format(i)}bias"] = heads.weight[i], heads.bias[i]
        if heads.output is not None:
            state[f"{output.format(i)}weight"] = heads.output[i]
    return state


def _check_heads_alone(folder: str | Path, settings: dict[str, Any]) -> None:
    """Raises UserError for a whole model, such as Medusa-2's, whose answers are not the target's, or another part."""
    if "num_attention_heads" in settings and any(name.startswith("medusa_") for name in settings):
        raise UserError(
            f"'{folder}' holds a whole model, not heads alone: those of Medusa-2 were trained together with it and "
            "serve no other target"
        )
    what = "heads of Hydra" if "hydra_num_heads" in settings else None
    if "num_attention_heads" in settings:
        architecture = ", ".join(settings.get("architectures") or ["a model with attention"])
        what = "an adapter of Kangaroo" if "exit_layer" in settings else architecture
    if what is not None:
        raise UserError(f"'{folder}' holds no heads of Medusa, but {what}: name another folder")


def _rename_from_vllm(checkpoint: Checkpoint, target: StagedModel, vocab: int) -> torch.Tensor | None:
    """Puts a state in vLLM's form, of a target of `vocab` ids, under the authors' keys; returns its token map."""
    settings, named = checkpoint.settings, State()
    for name, tensor in checkpoint.state.items():
        for pattern, replacement in RENAMED:
            name = pattern.sub(replacement, name)
        named[name] = tensor
    ids = named.pop(TOKEN_MAP, None)
    if ids is not None:
        _check_map(checkpoint, ids, vocab)
        outputs = [name for name in named if name.endswith(".1.weight") or name == HEAD]
        # Some files have the rows of all tokens.
        named |= {name: named[name][ids] for name in outputs if len(named[name]) == vocab}
    if settings.get("original_lm_head"):
        copy = named.pop(HEAD, named.pop("0.1.weight", None))
        if copy is None:
            raise checkpoint.unfit(f"missing {HEAD}")
        target_head = target.lm_head.weight[:vocab, : copy.shape[1]]
        checkpoint.check_copy(HEAD, copy, target_head if ids is None else target_head[ids])
    if not settings.get("medusa_fc_bias"):
        for name in [name for name in named if name.endswith(".0.linear.weight")]:
            # Some files have biases despite this setting; vLLM silently drops them.
            named.setdefault(name.replace("weight", "bias"), torch.zeros(len(named[name])))
    checkpoint.state = named
    return ids


def _check_map(checkpoint: Checkpoint, ids: torch.Tensor, vocab: int) -> None:
    """Raises UserError unless a token map holds different ids of the target, as many as config.json says."""
    settings = checkpoint.settings
    expected_size = settings.get("truncated_vocab_size") or settings.get("vocab_size")
    problem = None
    if ids.dim() != 1 or ids.is_floating_point():
        problem = "is no list of token ids"
    elif ids.shape[0] != expected_size:
        problem = f"has {ids.shape[0]} ids, config.json says {expected_size} (truncated_vocab_size)"
    elif ids.min() < 0 or ids.max() >= vocab or ids.unique().shape[0] != ids.shape[0]:
        problem = f"holds an id twice, or one that is not below {vocab}"
    if problem is not None:
        raise checkpoint.unfit(f"{TOKEN_MAP} {problem}")


def _assembled(checkpoint: Checkpoint, hidden: int) -> MedusaHeads:
    """The heads of a checkpoint's tensors. Raises UserError as `load_heads`."""
    state = checkpoint.state
    count = len({name.split(".")[0] for name in state})
    has_outputs = any(name.endswith(".1.weight") for name in state)
    vocab = state["0.1.weight"].shape[0] if "0.1.weight" in state else None
    if "0.0.linear.weight" in state:
        checkpoint.check_width(state["0.0.linear.weight"].shape[0], hidden)
    heads = MedusaHeads(count, hidden, (vocab or 0) if has_outputs else None)
    checkpoint.fill(_state(heads, "{}.0.linear.", "{}.1."))
    return heads
