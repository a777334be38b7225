"""Checkpoints of block drafters: z-lab's (DFlash, DFlash2), DeepSpec's (DFlash, DSpark), and speculators' of all three.

Ours are written as the first two are. Speculators' may have their own head over a draft vocabulary. Settings of a
config.json that are not supported here are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import Qwen3Config

from methods.common.checkpoints import (
    EMBEDDING,
    FIGURES,
    HEAD,
    LAYER,
    WEIGHTS,
    Checkpoint,
    read_checkpoint,
    ready,
    sizes_trained_for,
    unknown_settings,
    write_checkpoint,
)
from methods.dflash.model import BlockConfig, BlockModel
from specbench.models.devices import name_of
from specbench.models.expansion import Expansion
from specbench.system.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import LlamaConfig

    from specbench.decoding.model.staged_model import StagedModel

WHAT = "the weights of the block drafter"
FILES = (WEIGHTS,)
FILLS_IN, SELECTS = "DFlashDraftModel", "DFlash2DraftModel"  # z-lab's architectures
PREDICTS = "Qwen3DSparkModel"  # DeepSpec's
KIND, KINDS = "speculators_model_type", ("dflash", "dspark", "dflash2")  # of speculators
STATES, AFTER = "aux_hidden_state_layer_ids", "sample_from_anchor"
ARCHITECTURES = (FILLS_IN, SELECTS, PREDICTS, "DFlashSpeculator", "DSparkSpeculator", "DSparkDraftModel")
NESTED, LAYERS, MASK = "dflash_config", "target_layer_ids", "mask_token_id"
MARKOV, ESTIMATE, WITH_MARKOV = "markov_rank", "enable_confidence_head", "confidence_head_with_markov"
CHOICE = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")  # DFlash2's
# Settings that must have this value if present.
FIXED = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "markov_head_type": "vanilla",
    "causal": False,
    "is_causal": False,
    "use_swa": False,
    "use_sliding_window": False,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": 0.0,
    "projector_type": "dflash",
    "shift_label": False,
}
# Settings that do not affect drafting.
HARMLESS = {
    *("num_target_layers", "block_size", "num_anchors", "max_anchors"),
    *(KIND, NESTED, LAYERS, MASK, MARKOV, ESTIMATE, WITH_MARKOV, STATES, AFTER),
    *("draft_vocab_size", "sliding_window_non_causal", "ce_loss_alpha", "l1_loss_alpha", "loss_decay_gamma"),
    *("confidence_head_alpha", "pure_draft_prefix_len", "emb_dim", "gru_hidden_dim", "lambda_base_start"),
    *("lambda_base_decay_ratio", "auf", "selector_loss_alpha", *CHOICE),
}


def load_blocks(folder: str | Path, target: StagedModel, expansion: Expansion | None = None) -> BlockModel:
    """Reads `config.json` and `model.safetensors` from a folder.

    Args:
        folder: where the files are.
        target: model to draft for; its device and dtype are the drafting model's.
        expansion: how the target was expanded; the drafting model is, too.

    Raises:
        UserError: a file cannot be read; a key or a shape is missing, unknown or wrong; config.json sets what is not
            supported here; the drafting model was made for another target.
    """
    checkpoint = read_checkpoint(folder, WHAT, FILES)
    flat = checkpoint.settings
    flat |= {**(flat.get(NESTED) or {}), **(flat.get(LAYER) or {})}
    if flat.get(STATES):  # layers in front of which states are taken
        flat[LAYERS] = [i - 1 for i in flat[STATES]]
    if problems := [*_problems(flat)]:
        raise checkpoint.unusable(f"config.json {'; '.join(problems)}")
    width, layers, vocab = sizes_trained_for(target, expansion)
    checkpoint.check_width(flat["hidden_size"], width)
    config = _config(checkpoint)
    taps = tuple(i + 1 for i in flat[LAYERS])
    # Only speculators' name the state after the last layer; transformers' own list has the normed one there.
    if not 0 <= min(taps) <= max(taps) <= (layers if flat.get(STATES) else layers - 1):
        raise checkpoint.unusable(
            f"they read the states after layers {flat[LAYERS]}, the target has {layers} layers"
        )
    token_ids = None
    if "d2t" in checkpoint.state:
        token_ids = checkpoint.draft_token_ids(config.vocab_size, vocab)
    if config.vocab_size != vocab and (config.markov_rank or config.selector_rank):
        raise checkpoint.foreign(f"they correct {config.vocab_size} tokens, and it has {vocab}")
    checkpoint.check_vocabulary(config.vocab_size, vocab)
    # A head over a draft vocabulary is the drafting model's own.
    copies = (EMBEDDING, HEAD) if token_ids is None else (EMBEDDING,)
    checkpoint.drop_copies(target, expansion, copies)
    model = BlockModel(config, taps, token_ids)
    checkpoint.fill(model.state_dict())
    if not 0 <= config.mask_token_id < target.embed_tokens.weight.shape[0]:
        raise checkpoint.foreign(f"it has no token {config.mask_token_id}")
    if expansion is not None:
        model = _expanded(model.float(), target, expansion)
    model = ready(model, target)
    model.join()
    return model


def save_blocks(model: BlockModel, folder: str | Path, dtype: torch.dtype, **figures: Any) -> None:
    """Writes config.json (with figures of the training) and model.safetensors as the authors' code and vLLM read them.

    A drafting model that fills in its masks is written as z-lab's, of DFlash or DFlash2, any other one as DeepSpec's.
    """
    config = model.config
    layer_ids, mask = [tap - 1 for tap in model.taps], config.mask_token_id
    special = BlockConfig.__annotations__
    settings = {name: value for name, value in config.to_diff_dict().items() if name not in special}
    settings |= {
        "architectures": [_architecture(config)],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "torch_dtype": name_of(dtype),
        FIGURES: figures,
    }
    if config.fills_in:
        chosen = {name: getattr(config, name) for name in CHOICE} if config.selector_rank else {}
        settings[NESTED] = {MASK: mask, LAYERS: layer_ids, **chosen}
    else:
        settings |= {
            MASK: mask,
            LAYERS: layer_ids,
            MARKOV: config.markov_rank,
            "markov_head_type": "vanilla",
            ESTIMATE: config.confidence,
            WITH_MARKOV: config.confidence,
        }
    write_checkpoint(folder, settings, model.state_dict(), dtype)


def _architecture(config: BlockConfig) -> str:
    if not config.fills_in:
        return PREDICTS
    return SELECTS if config.selector_rank else FILLS_IN


def _problems(flat: dict[str, Any]) -> Iterator[str]:
    """Yields what a config.json lacks, or sets that is not supported."""
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "block_size", LAYERS)
    yield from (f"lacks {name}" for name in needed if not flat.get(name))
    if flat.get(MASK) is None:
        yield f"lacks {MASK}"
    yield from unknown_settings(flat, HARMLESS, FIXED, ARCHITECTURES)
    if (kind := flat.get(KIND)) is not None and kind not in KINDS:
        yield f"is of speculators' {kind}, not of one of {', '.join(KINDS)}"
    elif kind is None and any(
        "DSpark" in name and name != PREDICTS for name in flat.get("architectures") or []
    ):
        yield f"does not say {KIND}"
    elif _predicts(flat) is None:
        yield f"does not say whether each place guesses the token after it ({AFTER})"
    group, width = flat.get("conv_group_size") or 1, flat.get("hidden_size") or 0
    if flat.get("conv_kernel_size") and width % group:
        yield f"sets conv_group_size={group}, which does not divide hidden_size={width}"
    if flat.get(ESTIMATE) and not (flat.get(WITH_MARKOV) and flat.get(MARKOV)):
        yield f"sets {ESTIMATE} without {WITH_MARKOV}"


def _predicts(flat: dict[str, Any]) -> bool | None:
    """Whether each place guesses the token after it, not its own; None if a config.json does not say.

    Speculators' DSpark did the one, later the other; since July 2026 its files say which.
    """
    if (after := flat.get(AFTER)) is not None:
        return bool(after)
    if flat.get(KIND) != "dspark":
        return PREDICTS in (flat.get("architectures") or [])
    proposals = (flat.get("speculators_config") or {}).get("proposal_methods") or [{}]
    places = flat.get("block_size") or 0
    return {places: True, places - 1: False}.get(proposals[0].get("speculative_tokens"))


def _config(checkpoint: Checkpoint) -> BlockConfig:
    """The config of the drafting layers and heads."""
    flat = checkpoint.settings
    names = {*Qwen3Config().to_dict(), "rope_theta", "rope_scaling", "block_size", MASK, MARKOV, *CHOICE}
    chosen = {n: value for n, value in flat.items() if n in names - {"dtype"} and value is not None}
    return checkpoint.config(
        BlockConfig,
        chosen
        | {
            "fills_in": not _predicts(flat),
            "confidence": bool(flat.get(ESTIMATE)),
            "layer_types": ["full_attention"] * flat["num_hidden_layers"],
            "use_sliding_window": False,
        },
    )


def _expanded(model: BlockModel, target: StagedModel, expansion: Expansion) -> BlockModel:
    """The drafting model at the width and heads of an expanded target."""
    config = model.config
    if config.attention_bias or config.conv_kernel_size or config.selector_rank or model.lm_head is not None:
        raise UserError(
            f"{WHAT} hold biases of queries, keys or values, convolutions, a selector, or a head of their own: they "
            "cannot be expanded"
        )
    special = {name: getattr(model.config, name) for name in BlockConfig.__annotations__}
    # An estimate cannot read the expanded states.
    special["confidence"], model.confidence_head = False, None
    settings = model.config.to_dict() | {"model_type": "llama"}
    sizes = {"num_hidden_layers": model.depth, "tie_word_embeddings": False}
    expander = Expansion(settings | sizes, target.config.to_dict() | sizes, "the block drafter")
    taps = tuple(expansion.layers(tap) for tap in model.taps)

    def make(wide: LlamaConfig) -> BlockModel:
        types = {"model_type": "qwen3", "layer_types": ["full_attention"] * model.depth}
        return BlockModel(BlockConfig(**wide.to_dict() | special | types), taps)

    return expander.build(make, model, target.device, target.dtype)
