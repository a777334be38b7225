"""Checkpoints of trained parts: a folder with config.json and tensors, read strictly, and written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from specbench.decoding.cpu.packed_linear import pack_linears
from specbench.decoding.model.anatomy import check_rope
from specbench.models.devices import place_weights
from specbench.models.expansion import Sizes
from specbench.models.model_source import fetch_small_files
from specbench.system.errors import UserError, one_line, warn
from specbench.system.files import share_weights
from specbench.system.paths import packaged

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from specbench.decoding.model.staged_model import StagedModel
    from specbench.models.expansion import Expansion

Config = TypeVar("Config", bound="PretrainedConfig")
Module = TypeVar("Module", bound=torch.nn.Module)

CONFIG, WEIGHTS = "config.json", "model.safetensors"
ANGLES = "rotary_emb.inv_freq"  # recomputed: older versions of transformers kept them among the weights
# What transformers before 5 wrote into every config, for generation and tasks that drafting does not have.
GENERIC = {
    *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups"),
    *("num_return_sequences", "temperature", "top_k", "top_p", "typical_p", "diversity_penalty"),
    *("repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
    *("exponential_decay_length_penalty", "bad_words_ids", "forced_bos_token_id", "forced_eos_token_id"),
    *("suppress_tokens", "begin_suppress_tokens", "output_scores", "return_dict_in_generate"),
    *("remove_invalid_values", "decoder_start_token_id", "sep_token_id", "prefix", "finetuning_task"),
    *("task_specific_params", "problem_type", "tokenizer_class", "tf_legacy_loss", "torchscript"),
    *("use_bfloat16", "tie_encoder_decoder", "cross_attention_hidden_size", "pruned_heads"),
    *("unsloth_fixed", "unsloth_version"),
}
LAYER = "transformer_layer_config"  # settings of the layers, in speculators' files
FIGURES = "figures"  # of the training, in ours
# Of forms and versions, and what every drafting model reads itself.
FORM = {
    *("auto_map", "torch_dtype", "rope_theta", "rope_scaling", LAYER, FIGURES),
    *("speculators_config", "speculators_version", "has_no_defaults_at_init"),
}
ROWS = 4096  # of a matrix that are compared at a time
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"  # copies of the target's, which many files hold


@dataclass
class Checkpoint:
    """What a folder holds of a trained part. Its checks raise UserError, or return it.

    Attributes:
        folder: where the files are, as a configuration names it, or a hub id.
        what: that is in it, for messages: "the heads".
        settings: the content of config.json.
        state: the tensors by name, without rotary frequencies.
    """

    folder: str | Path
    what: str
    settings: dict[str, Any]
    state: dict[str, torch.Tensor]

    def error(self, why: str) -> UserError:
        """An error about it; `why` is the predicate of the sentence."""
        return UserError(f"{self.what} in '{self.folder}' {why}")

    def unusable(self, why: str) -> UserError:
        """The error of a part that is whole, but not supported here."""
        return self.error(f"cannot be used: {why}")

    def unfit(self, why: str) -> UserError:
        """The error of tensors that do not fit each other, or config.json."""
        return self.error(f"do not fit: {why}")

    def foreign(self, why: str) -> UserError:
        """The error of a part that belongs to another target."""
        return self.error(f"were made for another target: {why}")

    def config(self, kind: type[Config], settings: Mapping[str, Any]) -> Config:
        """Makes its config.

        Raises UserError for a setting of the wrong type, one that does not fit the others, or rotary positions that the
        drafting layers do not have.
        """
        try:
            config = kind(**settings)
        except (StrictDataclassError, TypeError, ValueError) as error:
            raise self.unusable(f"{CONFIG}: {one_line(error)}") from error
        check_rope(config)
        rope = {**settings, **(getattr(config, "rope_parameters", None) or {})}
        if (factor := rope.get("partial_rotary_factor")) not in (None, 1):
            raise self.unusable(
                f"{CONFIG} sets partial_rotary_factor={factor}, and drafting layers rotate whole heads"
            )
        return config

    def check_width(self, width: int | None, target: int) -> None:
        """Raises UserError unless it is as wide as the target's states."""
        if width is None:
            raise self.unusable(f"{CONFIG} names no hidden_size")
        if width != target:
            raise self.error(f"are {width} wide, the target {target}: they were made for another target")

    def check_vocabulary(self, vocab: int | None, target: int) -> None:
        """Warns if its config.json names another vocabulary size than its target has.

        This is no error: the target may be a fine-tune with a few more tokens, not only a model of another family.
        """
        if vocab not in (None, target):
            warn(str(self.error(f"were made for a target of {vocab} tokens, and this one has {target}")))

    def check_target(self, target: StagedModel, expansion: Expansion | None) -> None:
        """Applies `check_width` and `check_vocabulary` to its settings, which have its target's sizes."""
        width, _, vocab = sizes_trained_for(target, expansion)
        self.check_width(self.settings.get("hidden_size"), width)
        self.check_vocabulary(self.settings.get("vocab_size"), vocab)

    def check_copy(self, name: str, copy: torch.Tensor, original: torch.Tensor) -> None:
        """Raises UserError unless a tensor is a copy of one of the target's, see `is_copy`."""
        if not is_copy(copy, original):
            raise self.foreign(f"{name} is not the target's")

    def drop_copies(
        self, target: StagedModel, expansion: Expansion | None, names: Sequence[str] = (EMBEDDING, HEAD)
    ) -> None:
        """Removes copies of the target's embedding and head; the originals are used instead.

        Args:
            target: model to draft for.
            expansion: how it was expanded; copies are then not compared.
            names: of the tensors to remove, as modules of `target` have them.

        Raises:
            UserError: one is not the target's.
        """
        for name in names:
            copy = self.state.pop(name, None)
            if copy is not None and expansion is None:
                self.check_copy(name, copy, getattr(target, name.removesuffix(".weight")).weight)

    def check_tensors(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raises UserError that names all tensors that are missing, unknown or of another shape than given."""
        state = self.state
        problems = [f"missing {name}" for name in shapes.keys() - state.keys()]
        problems += [f"unknown {name}" for name in state.keys() - shapes.keys()]
        problems += [
            f"{name} is {tuple(state[name].shape)}, not {tuple(shape)}"
            for name, shape in shapes.items()
            if name in state and tuple(state[name].shape) != tuple(shape)
        ]
        if problems or not state:
            raise self.unfit("; ".join(sorted(problems)) or "there is no tensor")

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copies the file's tensors into those of a model, by name. Raises UserError as `check_tensors`."""
        self.check_tensors({name: tensor.shape for name, tensor in tensors.items()})
        for name, tensor in tensors.items():
            tensor.copy_(self.state[name])

    def draft_token_ids(self, vocab_size: int, vocab: int) -> torch.Tensor:
        """Removes the mapping of a draft vocabulary from the tensors.

        Of these, `d2t` holds for each row of `lm_head.weight` the token id minus the row's index, `t2d` which ids have
        a row.

        Args:
            vocab_size: ids of the checkpoint's target.
            vocab: ids of the target that is drafted for.

        Returns:
            [rows] token ids of the target, by row of the head.
        """
        if HEAD not in self.state:
            raise self.unusable(f"there is d2t without {HEAD}")
        rows = self.state[HEAD].shape[0]
        offsets, t2d = self.state.pop("d2t", None), self.state.pop("t2d", None)
        index = torch.arange(rows)
        if offsets is None:
            if rows != vocab_size:
                raise self.unusable(f"d2t is missing, and the head has {rows} rows for {vocab_size} tokens")
            offsets = torch.zeros_like(index)
        if offsets.shape != index.shape or offsets.is_floating_point():
            raise self.unusable(f"d2t is {offsets.dtype} {tuple(offsets.shape)}, not whole numbers ({rows},)")
        ids = index + offsets.long()
        if t2d is not None and t2d.shape != (vocab_size,):
            raise self.unusable(f"t2d is {tuple(t2d.shape)}, not ({vocab_size},)")
        scored = torch.zeros(vocab_size, dtype=torch.bool)
        fitting = int(ids.min()) >= 0 and int(ids.max()) < vocab_size
        if fitting:
            scored[ids] = True
        agrees = fitting and int(scored.sum()) == rows and (t2d is None or torch.equal(scored, t2d.bool()))
        # Without t2d only the form of d2t reveals a wrong table: no adjacent ids are kept, or only the first ones.
        unsure = t2d is None and rows < vocab_size and rows > 1
        if not agrees or (unsure and (bool((offsets.diff() > 0).all()) or not offsets.any())):
            raise self.unusable(
                "d2t does not hold each token id's distance from its row (ids in place of distances, an empty table, "
                "or one of another checkpoint)"
            )
        if int(ids.max()) >= vocab:
            raise self.unusable(
                f"it drafts token {int(ids.max())}, the target has {vocab}: they were made for another target"
            )
        return ids


def read_checkpoint(
    folder: str | Path,
    what: str,
    files: Sequence[str],
    check: Callable[[dict[str, Any]], None] | None = None,
) -> Checkpoint:
    """Reads a folder. Nothing in it is run: pickles are read with weights_only.

    Args:
        folder: as in `Checkpoint`.
        what: likewise.
        files: names that the file of tensors may have; the first one that is there is read.
        check: called with the content of config.json before tensors are looked for.

    Raises:
        UserError: a file is missing or cannot be read.
    """
    local = fetched(packaged(folder), files)
    present = [name for name in files if (local / name).is_file()]
    try:
        if not (local / CONFIG).is_file():
            raise UserError(f"{what} in '{local}' cannot be read: {CONFIG} is missing")
        settings = json.loads((local / CONFIG).read_text())
        if check is not None:
            check(settings)
        if not present:
            raise UserError(f"{what} in '{local}' cannot be read: one of {', '.join(files)} is missing")
        path = local / present[0]
        if path.suffix == ".safetensors":
            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, SafetensorError, UnpicklingError) as error:
        raise UserError(f"{what} in '{local}' cannot be read: {one_line(error)}") from error
    if not isinstance(state, dict):
        raise UserError(f"{what} in '{local}' cannot be read: {path.name} holds no tensors by name")
    tensors = {name: tensor for name, tensor in state.items() if not name.endswith(ANGLES)}
    return Checkpoint(folder, what, settings, tensors)


def fetched(folder: Path, files: Sequence[str]) -> Path:
    """Returns the folder, or the cached files of the hub if there is none and its name has the form of a hub id.

    Raises UserError if it exists neither here nor on the hub.
    """
    if folder.is_dir() or len(folder.parts) != 2 or folder.is_absolute():
        return folder
    return fetch_small_files(folder.as_posix(), patterns=[CONFIG, *files])


def is_copy(copy: torch.Tensor, original: torch.Tensor) -> bool:
    """Whether a tensor [rows, d] is a copy of one of the target's, but for the rounding of a 16-bit type."""
    if copy.shape != original.shape:
        return False
    parts = zip(copy.split(ROWS), original.detach().split(ROWS))  # in float32 a whole one may take gigabytes
    return all(
        torch.allclose(theirs.to(ours.device, torch.float32), ours.float(), rtol=2**-7, atol=1e-4)
        for theirs, ours in parts
    )


def unknown_settings(
    flat: Mapping[str, Any], harmless: set[str], fixed: Mapping[str, Any], architectures: Sequence[str] = ()
) -> Iterator[str]:
    """Yields what a drafting model's config.json sets that is not supported here.

    Args:
        flat: config.json without nesting.
        harmless: settings beside `GENERIC` and `FORM` that change nothing, or that the method reads.
        fixed: settings that must have this value if present.
        architectures: supported ones; empty: all.
    """
    from transformers import LlamaConfig, Qwen3Config  # late: it takes seconds

    of_layers = Qwen3Config().to_dict().keys() | LlamaConfig().to_dict().keys()
    valid = harmless | GENERIC | FORM | fixed.keys() | of_layers
    yield from (f"sets {name}, which is not known here" for name in flat if flat[name] and name not in valid)
    yield from (
        f"sets {name}={flat[name]}, not {value}"
        for name, value in fixed.items()
        if flat.get(name) not in (None, value)
    )
    for name in flat.get("architectures") or []:
        if architectures and name not in architectures:
            yield f"is of a {name}, not of one of {', '.join(architectures)}"
    if types := {*(flat.get("layer_types") or [])} - {"full_attention"}:
        yield f"has layers of type {', '.join(sorted(types))}, not of full_attention alone"


def ready(model: Module, target: StagedModel) -> Module:
    """Prepares a trained part for drafting: device and dtype of the target, no gradients, packed linear layers."""
    place_weights(model, target.device, target.dtype)
    model.eval().requires_grad_(False)
    pack_linears(model)
    return model


def sizes_trained_for(target: StagedModel, expansion: Expansion | None) -> tuple[int, int, int]:
    """Returns width, layers and tokens of the target that a part was trained for.

    Args:
        target: model to draft for.
        expansion: how it was expanded since; None if it was not.
    """
    if expansion is None:
        return target.hidden_size, len(target.layers), target.vocab_size
    return expansion.old.hidden, expansion.old.layers, expansion.old.vocab


def attention_sizes(target: StagedModel) -> dict[str, Any]:
    """Returns the config of one attention layer as of its target: width, heads, eps and rotary positions.

    The layer has no biases.
    """
    config = target.config
    sizes = Sizes.of(config.to_dict())
    return {
        "hidden_size": sizes.hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": sizes.kv_heads * sizes.group,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "vocab_size": target.vocab_size,
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": rotary_of(config),
    }


def rotary_of(config: PretrainedConfig) -> dict[str, Any]:
    """Returns the rotary settings of a drafting layer: the target's, or the usual ones if it has none."""
    rope = getattr(config, "rope_parameters", None) or {}
    settings = {name: value for name, value in rope.items() if name != "partial_rotary_factor"}
    return settings if "rope_theta" in settings else {"rope_type": "default", "rope_theta": 10000.0}


def layer_sizes(target: StagedModel) -> dict[str, Any]:
    """As `attention_sizes`, for a layer with a feed-forward part as wide as the target's."""
    return attention_sizes(target) | {"intermediate_size": Sizes.of(target.config.to_dict()).inner}


def write_checkpoint(
    folder: str | Path, settings: Mapping[str, Any], state: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> None:
    """Writes config.json and model.safetensors: tensors of floats in a dtype, others as they are."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    saved = {}
    for name, tensor in state.items():
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        saved[name] = tensor.detach().to(kind).contiguous().clone()
    save_file(saved, folder / WEIGHTS, metadata={"format": "pt"})
    share_weights(folder)
