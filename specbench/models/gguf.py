"""GGUF files as models: dequantised once by transformers, into a folder in the user's cache.

The measured model has the pair's own dtype and the values of the file's weights: its passes read the bytes of that
dtype, not those of the file.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from specbench.system.errors import UserError, one_line, warn
from specbench.system.files import file_sha256, made_once, read_json, write_atomic
from specbench.system.paths import cache_folder

SUFFIX = ".gguf"
FORM = 5  # of the cached folders; those of another form are made anew
SOURCE = "source.json"  # a converted model's record of its file
MODEL = "model"  # a converted model's folder
# Types of tensors that are not quantised.
FLOATS = ("F32", "F16", "BF16", "F64")
TOKENS, TOKEN_TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
# Type and name of the tokens that llama.cpp's converter adds for rows of padding.
UNUSED, PADDING = 5, "[PAD{}]"
# Keys of the tokens that end a turn, and names of such tokens in the vocabularies of chat models.
ENDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
END_TOKENS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
)
FREQUENCIES = "rope_freqs.weight"  # what each rotary frequency is divided by
LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Numbers of layers of the 27B Gemmas, whose queries are scaled by another width than that of a head: llama.cpp
# hard-codes this, no file states it.
WIDE_GEMMAS = {"gemma2": 46, "gemma3_text": 62}
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
# What transformers and gguf raise for files that they cannot read.
UNREADABLE = (
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    NotImplementedError,
    ImportError,
    OSError,
    RuntimeError,
)


def is_gguf(name: str) -> bool:
    """Whether a model's name means a GGUF file."""
    return name.endswith(SUFFIX)


def converted(path: Path, dtype: str = "float32") -> Path:
    """The folder with the dequantised model of a GGUF file, its tokenizer and template; made if it does not exist.

    It takes as many bytes, on the disk and for a while in memory, as the weights have in that dtype.

    Safe when several processes do it at once: one converts, the others wait.

    Args:
        path: the file.
        dtype: of the weights, as the configuration names it.

    Raises:
        UserError: transformers cannot read it.
    """
    digest = file_sha256(path)
    folder = cache_folder() / "gguf" / f"{path.stem}-{digest[:12]}-{dtype}-{FORM}"

    def write(partial: Path) -> None:
        partial.mkdir()
        print(f"dequantising {path} into {folder}, once", file=sys.stderr, flush=True)
        _convert(path, digest, dtype, partial)

    return made_once(folder / MODEL, "converted", write)


def source_of(folder: Path | None) -> str | None:
    """The origin of a converted model, as tables show it: "dequantised from Q4_1"; None for any other folder."""
    if folder is None or not (folder / SOURCE).is_file():
        return None
    types = read_json(folder / SOURCE)["types"]
    quantised = [name for name in types if name not in FLOATS]
    return f"dequantised from {quantised[0]}" if quantised else f"from a GGUF file in {next(iter(types))}"


def own_tokens(tokenizer: Any, count: int) -> Any:
    """A file's tokenizer without padding, and without what transformers adds to it, such as an <unk> that it lacks.

    Args:
        tokenizer: as transformers reads it.
        count: tokens that the file has, without padding.
    """
    if max(tokenizer.get_vocab().values()) < count:
        return tokenizer
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < count]
    if isinstance(vocab := content["model"]["vocab"], dict):  # by token; else a list, which has no padding
        content["model"]["vocab"] = {token: i for token, i in vocab.items() if i < count}
    special = {name: getattr(tokenizer, name) for name in SPECIAL}
    special_tokens = {
        name: token
        for name, token in special.items()
        if token is not None and tokenizer.convert_tokens_to_ids(token) < count
    }
    trimmed = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)), **special_tokens
    )
    trimmed.chat_template = tokenizer.chat_template
    return trimmed


def count_tokens(reader: Any) -> int:
    """How many tokens a file has, without those at its end that stand for rows of padding."""
    tokens, count = reader.fields[TOKENS], len(reader.fields[TOKENS].data)
    types = reader.fields[TOKEN_TYPES].contents() if TOKEN_TYPES in reader.fields else []
    for last in range(min(count, len(types)) - 1, -1, -1):
        if types[last] != UNUSED or tokens.contents(last) != PADDING.format(last):
            break
        count = last
    return count


def warn_of_unused(name: str, tensors: Iterable[str]) -> None:
    """Warns of tensors of a model's file that its config does not use, if there are any."""
    if unused := sorted(tensors):
        warn(f"'{name}' has {len(unused)} tensors that its config does not use, such as {unused[0]}")


def _field(reader: Any, end: str) -> Any:
    """The value of the file's key with this end; None if it has none."""
    return next((field.contents() for key, field in reader.fields.items() if key.endswith(end)), None)


def _check_whole(path: Path, reader: Any, model: Any) -> None:
    """Raises UserError if a file has numbers that transformers has silently left out, such as biases."""
    there = sum(int(one.n_elements) for one in reader.tensors if not one.name.startswith("rope_"))
    read = sum(weight.numel() for weight in model.parameters())  # a tied head once, as in the file
    if there > read:
        raise UserError(
            f"'{path}' holds {there:,} weights, of which transformers reads {read:,}, so that it would be another "
            "model: name the original one, in a folder or on the hub"
        )


def _complete(config: Any, reader: Any) -> None:
    """Adds numbers of the file's attention to a config, which transformers reads only for some families.

    Raises:
        UserError: rotary positions are scaled in an unsupported way.
    """
    window = _field(reader, ".attention.sliding_window")
    if window and hasattr(config, "sliding_window"):
        config.sliding_window = int(window)
    if WIDE_GEMMAS.get(config.model_type) == config.num_hidden_layers:
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    base, rope = _field(reader, ".rope.freq_base"), getattr(config, "rope_parameters", None)
    if base is not None and rope:
        read = {"rope_theta": float(base)}
        full = rope.get("full_attention")  # of kinds of layers, as Gemma 3 has it
        config.rope_parameters = rope | (read if full is None else {"full_attention": full | read})
    _scale_rope(config, reader)


def _scale_rope(config: Any, reader: Any) -> None:
    """Adds the file's scaling of rotary positions to a config, which transformers reads only for few families.

    Raises:
        UserError: its kind is not supported.
    """
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = getattr(config, "rope_parameters", None) or {}
    if not rope or rope.get("rope_type", "default") != "default":
        return
    if unread := sorted(t.name for t in reader.tensors if t.name.startswith("rope_factors")):
        raise UserError(f"{unread[0]} scales rotary positions in an unsupported way: name the original model")
    rotated = _field(reader, ".rope.dimension_count")
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    share = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    if rotated is not None and int(rotated) != int(width * share):
        raise UserError(
            f"the file rotates {int(rotated)} of {width} numbers of a head, which transformers does not read: name the "
            "original model"
        )
    fields = {key.partition(".rope.scaling.")[2]: field.contents() for key, field in reader.fields.items()}
    if (factor := _field(reader, ".rope.scale_linear") or 1.0) != 1.0:  # as files had it until 2023
        fields |= {"type": "linear", "factor": factor}
    kind = fields.get("type", "none")
    tensors = (torch.tensor(tensor.data).float() for tensor in reader.tensors if tensor.name == FREQUENCIES)
    divisors = next(tensors, None)
    by_kind = all(isinstance(part, dict) for part in rope.values())  # of layers, as Gemma 3 has it
    if divisors is not None and not by_kind:
        config.rope_parameters = (
            rope | {"rope_type": "llama3", "factor": round(float(divisors.max()), 3)} | LLAMA_3
        )
        usual = rope["rope_theta"] ** -(torch.arange(len(divisors)).float() / len(divisors))
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        if not torch.allclose(usual / divisors, scaled, rtol=1e-2):
            raise UserError(
                f"the rotary frequencies of {FREQUENCIES} are not those of Llama 3: name the original model"
            )
    elif kind == "linear":
        linear = {"rope_type": "linear", "factor": float(fields.get("factor", 1.0))}
        full = {"full_attention": rope["full_attention"] | linear} if by_kind else linear
        config.rope_parameters = rope | full
    elif kind != "none" or divisors is not None:
        raise UserError(
            f"rotary positions of type '{kind}' are not read from a GGUF file: name the original model"
        )


def _convert(path: Path, digest: str, dtype: str, folder: Path) -> None:
    """Writes model, tokenizer and SOURCE into an empty folder. Raises UserError for a file that cannot be read."""
    import torch
    import transformers
    from gguf import GGUFReader
    from safetensors.torch import save_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        types: Counter[str] = Counter()
        reader = GGUFReader(path)
        for tensor in reader.tensors:
            types[tensor.tensor_type.name] += int(tensor.n_elements)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        tokenizer = own_tokens(tokenizer, count_tokens(reader))
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=getattr(torch, dtype), output_loading_info=True
        )
    except UNREADABLE as error:
        raise UserError(f"transformers cannot read '{path}': {one_line(error)}") from error
    model, info = loaded
    if info["missing_keys"]:  # transformers fills them with random numbers
        missing = sorted(info["missing_keys"])
        raise UserError(f"'{path}' lacks {len(missing)} tensors, such as {missing[0]}")
    warn_of_unused(str(path), info["unexpected_keys"])
    if not info["unexpected_keys"]:
        _check_whole(path, reader, model)
    _complete(model.config.get_text_config(), reader)
    ends = {int(reader.fields[key].contents()) for key in ENDS if key in reader.fields}
    vocabulary = tokenizer.get_vocab()
    ends |= {vocabulary[token] for token in END_TOKENS if token in vocabulary}
    model.generation_config.eos_token_id = sorted(ends) or None
    if hasattr(model.config, "quantization_config"):  # its weights are not quantised any more
        del model.config.quantization_config
    tokenizer.save_pretrained(folder)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    source = {
        "file": path.name,
        "sha256": digest,
        "types": dict(types.most_common()),  # numbers of each
        "transformers": transformers.__version__,
    }
    write_atomic(folder / SOURCE, json.dumps(source, indent=1) + "\n")
