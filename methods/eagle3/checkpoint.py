"""EAGLE-3's and P-EAGLE's checkpoints: the authors', SpecForge's and speculators'; ours are for vLLM and SGLang.

Settings of a config.json that are not supported here are refused by name: a missed variant would silently draft badly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from methods.common.checkpoints import (
    EMBEDDING,
    FIGURES,
    LAYER,
    WEIGHTS,
    Checkpoint,
    is_copy,
    read_checkpoint,
    ready,
    sizes_trained_for,
    unknown_settings,
    write_checkpoint,
)
from methods.eagle3.model import Eagle3Config, Eagle3Model, default_taps
from specbench.models.devices import name_of
from specbench.models.expansion import Expansion

if TYPE_CHECKING:
    from transformers import LlamaConfig

    from specbench.decoding.model.staged_model import StagedModel

WHAT = "the weights of EAGLE-3"
FILES = (WEIGHTS, "pytorch_model.bin")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
ARCHITECTURES = (
    *("LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"),
    *("Eagle3Speculator", "Eagle3DraftModel"),
    *("PEagleSpeculator", "PEagleDraftModel", "PeagleLlamaForCausalLM"),
)
MODEL_TYPES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
)  # whose layer is Llama's, with the tensors that are there
VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
MASKS = ("ptd_token_id", "mask_token_id", "pard_token")  # what files call the token of a mask
MASK_STATE, PARALLEL = "mask_hidden", "parallel_drafting"
# Of the layers, written as they are.
LAYER_SETTINGS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("vocab_size", "hidden_act", "rms_norm_eps", "max_position_embeddings", "attention_bias", "mlp_bias"),
)
# Settings that must have this value if present.
FIXED = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "hidden_act": "silu",
    "parallel_draft_step": 1,  # of NVIDIA's files
}
KINDS = ("eagle3", "peagle")  # of speculators' files
# Settings that do not affect drafting.
HARMLESS = {
    *(LAYER_IDS, "eagle_config", "speculators_model_type", *VARIANTS),
    *("draft_vocab_size", "target_hidden_size", "target_vocab_size"),
    *("next_layer_regular", "embed_requires_grad", "ttt_steps"),
    "parallel_draft_heads_num_layers",  # of heads that a step of 1 does not have
    *("para_depths", "para_num", "num_depths", "down_sample_ratio", "down_sample_ratio_min", "max_seq_len"),
    *("prediction_loss_weight", PARALLEL, *MASKS),
}


def load_eagle3(
    folder: str | Path,
    target: StagedModel,
    expansion: Expansion | None = None,
    taps: Sequence[int] | None = None,
    rope_theta: float | None = None,
    masks: bool = False,
) -> Eagle3Model:
    """Reads `config.json` and `model.safetensors` or `pytorch_model.bin` from a folder.

    Pickles are read with weights_only. Layers, heads, head width and draft vocabulary are those of the tensors.

    Args:
        folder: where the files are.
        target: model to draft for; its device and dtype are the drafting model's.
        expansion: how the target was expanded; the drafting model is, too.
        taps: depths to read in place of those that config.json names.
        rope_theta: base of the rotary positions, in place of config.json's.
        masks: whether it must be a model that fills masks (P-EAGLE), or one that does not.

    Raises:
        UserError: a file cannot be read; a key or a shape is missing, unknown or wrong; config.json sets what is not
            supported here; the drafting model was made for another target, or for the other method.
    """
    checkpoint = read_checkpoint(folder, WHAT, FILES)
    _flatten(checkpoint)
    checkpoint.state = {_own_name(name): tensor for name, tensor in checkpoint.state.items()}
    _check_method(checkpoint, masks)
    width, layers, vocab = sizes_trained_for(target, expansion)
    read = _taps(checkpoint, taps, layers)
    config = _config(checkpoint, rope_theta, len(read))
    checkpoint.check_width(config.input_width, width)
    token_ids = checkpoint.draft_token_ids(config.vocab_size, vocab)
    checkpoint.check_vocabulary(config.vocab_size, vocab)
    _drop_embedding(checkpoint, config, target, expansion)
    if config.mask_token_id is not None and not 0 <= config.mask_token_id < vocab:
        raise checkpoint.foreign(f"no token {config.mask_token_id}")
    model = Eagle3Model(config, read, token_ids)
    checkpoint.fill(model.state_dict())
    if expansion is not None:
        model = _expanded(model.float(), target, expansion)
    return ready(model, target)


def save_eagle3(model: Eagle3Model, folder: str | Path, dtype: torch.dtype, **figures: Any) -> None:
    """Writes config.json (with figures of the training) and model.safetensors as vLLM and SGLang read them.

    Keys and dtypes are the authors': `d2t` holds for each row of the head the token id minus the row's index,
    `t2d` which ids have a row. vLLM reads the depths at the top, as layers in front of which states are taken, SGLang
    those of `eagle_config`, as layers after which they are.
    """
    config, token_ids = model.config, model.token_ids.cpu()
    rope = dict(cast("dict[str, Any]", config.rope_parameters))
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type", "default")
    settings = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": model.depth,
        **{name: getattr(config, name) for name in LAYER_SETTINGS},
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else {"rope_type": kind, **rope},
        "draft_vocab_size": token_ids.shape[0],
        "torch_dtype": name_of(dtype),
        "tie_word_embeddings": False,
        LAYER_IDS: list(model.taps),
        "eagle_config": {"use_aux_hidden_state": True, LAYER_IDS: [tap - 1 for tap in model.taps]},
        **{name: True for name in VARIANTS if getattr(config, name)},
        FIGURES: figures,
    }
    if config.mask_token_id is not None:
        settings |= {MASKS[0]: config.mask_token_id, PARALLEL: True}
    if config.target_hidden_size is not None:  # SGLang and vLLM ask whether the key is there
        settings["target_hidden_size"] = config.target_hidden_size
    scored = torch.zeros(config.vocab_size, dtype=torch.bool)
    scored[token_ids] = True
    mapping = {"d2t": token_ids - torch.arange(token_ids.shape[0]), "t2d": scored}
    write_checkpoint(folder, settings, model.state_dict() | mapping, dtype)


def _flatten(checkpoint: Checkpoint) -> None:
    """Takes the nesting out of the settings. Raises UserError for what is not known here, by its name."""
    settings = checkpoint.settings
    layer, nested = settings.get(LAYER) or {}, settings.get("eagle_config") or {}
    flat = {**layer, **settings, **{name: value for name, value in nested.items() if name != LAYER_IDS}}
    if problems := [*_unknown(flat), *_unfit(flat, layer)]:
        raise checkpoint.unusable(f"config.json {'; '.join(problems)}")
    checkpoint.settings = flat


def _unknown(flat: dict[str, Any]) -> Iterator[str]:
    """Yields what a config.json sets that is not supported."""
    yield from unknown_settings(flat, HARMLESS, FIXED, ARCHITECTURES)
    if flat.get("speculators_model_type", KINDS[0]) not in KINDS:
        yield f"is of speculators' {flat['speculators_model_type']}, not of one of {', '.join(KINDS)}"


def _unfit(flat: dict[str, Any], layer: dict[str, Any]) -> Iterator[str]:
    """Yields the layer's settings in a config.json that do not fit, or are missing.

    Args:
        flat: all settings.
        layer: those that speculators nests.
    """
    if len(masks := {flat[name] for name in MASKS if flat.get(name) is not None}) > 1:
        yield f"names several mask tokens: {', '.join(map(str, sorted(masks)))}"
    if layer and "norm_before_residual" not in flat:
        # vLLM takes its absence for true, speculators once took it for false.
        yield "does not say norm_before_residual"
    kind = layer.get("model_type") or flat.get("model_type") or MODEL_TYPES[0]
    if kind not in MODEL_TYPES:
        yield f"has a layer of type {kind}, not one of {', '.join(MODEL_TYPES)}"
    if flat.get("sliding_window") and flat.get("use_sliding_window", True):
        yield "sets a sliding window"
    yield from (
        f"lacks {name}" for name in ("hidden_size", "num_attention_heads", "vocab_size") if not flat.get(name)
    )


def _own_name(name: str) -> str:
    """The authors' name of a tensor; speculators calls the layer `layers.0`."""
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def _check_method(checkpoint: Checkpoint, masks: bool) -> None:
    """Reshapes a mask's state. Raises UserError if the model fills masks and must not, or the reverse."""
    state = checkpoint.state
    if checkpoint.settings.get(PARALLEL) and MASK_STATE not in state:
        raise checkpoint.unusable(f"config.json sets {PARALLEL}, without {MASK_STATE}")
    if (MASK_STATE in state) != masks:
        kind, method = ("that fills no masks", "eagle3") if masks else ("that fills masks", "peagle")
        raise checkpoint.error(f"are of a model {kind}: use {method}")
    if masks:
        state[MASK_STATE] = state[MASK_STATE].reshape(1, 1, -1)


def _config(checkpoint: Checkpoint, rope_theta: float | None, depths: int) -> Eagle3Config:
    """Returns the layer's config, with sizes from the tensors' shapes; `depths` depths are read."""
    settings, state = checkpoint.settings, checkpoint.state
    attention = "midlayer.self_attn"
    needed = ("fc.weight", "lm_head.weight", f"{attention}.q_proj.weight", f"{attention}.k_proj.weight")
    if missing := [name for name in needed if name not in state]:
        raise checkpoint.unfit(f"missing {', '.join(missing)}")
    mask = next((settings[name] for name in MASKS if settings.get(name) is not None), None)
    if MASK_STATE in state and mask is None:
        raise checkpoint.unusable(f"config.json names no {MASKS[0]}")
    later = {int(name.split(".")[1]) for name in state if name.startswith("layers.")}
    width, heads = settings["hidden_size"], settings["num_attention_heads"]
    fc, head, q, k = (state[name].shape for name in needed)
    head_dim, read = q[0] // heads, fc[1] // depths
    if fc[1] % depths:
        raise checkpoint.unfit(f"fc has {fc[1]} columns, and {depths} depths are read")
    for name, size in (("head_dim", head_dim), ("draft_vocab_size", head[0]), ("target_hidden_size", read)):
        if settings.get(name) not in (None, size):
            raise checkpoint.unfit(f"config.json says {name}={settings[name]}, the tensors {size}")
    names = {*LAYER_SETTINGS, *VARIANTS, "rope_theta", "rope_scaling", "rope_parameters"}
    chosen = {name: value for name, value in settings.items() if name in names and value is not None}
    config = checkpoint.config(
        Eagle3Config,
        chosen
        | {
            "num_hidden_layers": 1 + max(later, default=0),
            "mask_token_id": mask if MASK_STATE in state else None,
            "head_dim": head_dim,
            "num_key_value_heads": k[0] // head_dim,
            "target_hidden_size": None if read == width else read,
            "qkv_bias": bool(settings.get("attention_bias")) or f"{attention}.q_proj.bias" in state,
        },
    )
    if rope_theta is not None:
        parameters = cast("dict[str, Any]", config.rope_parameters)
        config.rope_parameters = {**parameters, "rope_theta": rope_theta}
    return config


def _taps(checkpoint: Checkpoint, requested: Sequence[int] | None, layers: int) -> tuple[int, ...]:
    """Returns the depths to read, as `Drafter.taps`: as requested, else config.json's, else the authors'.

    There are two conventions: a first id of 2 is the layer in front of which a state is taken, a first id of 1 the
    layer after which it is.
    """
    settings = checkpoint.settings
    top, nested = settings.get(LAYER_IDS), (settings.get("eagle_config") or {}).get(LAYER_IDS)
    layer_ids = top or nested
    if requested is not None:
        read = tuple(requested)
    elif not layer_ids:
        read = default_taps(layers)
    elif top and nested and [i + 1 for i in nested] == list(top):
        read = tuple(top)
    elif (top and nested and list(nested) != list(top)) or layer_ids[0] not in (1, 2):
        raise checkpoint.error(
            f"do not say whether {LAYER_IDS}={layer_ids} are layers in front of which states are taken, or after "
            "which: set layers to the number of layers in front of each state"
        )
    else:
        read = tuple(i + (layer_ids[0] == 1) for i in layer_ids)
    if not read or not 0 <= min(read) <= max(read) < layers:
        raise checkpoint.unusable(f"the depths of this target are 0 to {layers - 1} layers, not {list(read)}")
    return read


def _drop_embedding(
    checkpoint: Checkpoint, config: Eagle3Config, target: StagedModel, expansion: Expansion | None
) -> None:
    """Removes an embedding that is the target's; notes in the config if it is the drafting model's own."""
    embedding = checkpoint.state.get(EMBEDDING)
    if embedding is None:
        if config.target_hidden_size is not None:
            raise checkpoint.unfit(
                f"missing {EMBEDDING} of a drafting model that is not as wide as its target"
            )
        return
    if expansion is not None:
        raise checkpoint.error("have an embedding of their own: they cannot be expanded")
    theirs = target.embed_tokens.weight
    if is_copy(embedding, theirs):
        del checkpoint.state[EMBEDDING]
    elif embedding.shape[0] < theirs.shape[0]:
        raise checkpoint.unfit(f"{EMBEDDING} has {embedding.shape[0]} rows, the target {theirs.shape[0]}")
    else:
        config.own_embedding = True


def _expanded(model: Eagle3Model, target: StagedModel, expansion: Expansion) -> Eagle3Model:
    """The drafting model at the width and heads of an expanded target."""
    config = model.config
    # The head's rows are those of the draft vocabulary, whatever the target's become, and never its embedding.
    own_sizes = {
        "vocab_size": model.token_ids.shape[0],
        "num_hidden_layers": model.depth,
        "tie_word_embeddings": False,
    }
    settings, shape = (one.to_dict() | own_sizes for one in (config, target.config))
    expander = Expansion(settings, shape, "the drafting model of EAGLE-3")
    taps, token_ids = tuple(expansion.layers(tap) for tap in model.taps), model.token_ids.to(target.device)

    def make(wide: LlamaConfig) -> Eagle3Model:
        flags = {name: getattr(config, name) for name in VARIANTS}
        return Eagle3Model(Eagle3Config(**wide.to_dict() | flags), taps, token_ids)

    mask, model.mask_hidden = model.mask_hidden, None
    built = expander.build(make, model, target.device, target.dtype)
    if mask is not None:
        depths = [expander.pad(depth) for depth in mask.detach().chunk(len(model.taps), dim=-1)]
        state = torch.cat(depths, dim=-1).to(target.device, target.dtype)
        built.mask_hidden = torch.nn.Parameter(state, requires_grad=False)
        built.config.mask_token_id = config.mask_token_id
    return built
