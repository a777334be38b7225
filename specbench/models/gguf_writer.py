"""Llama models as GGUF files; `gguf` is the way back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.models.gguf import PADDING
from specbench.system.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
IN_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{hf}_proj": f"attn_{name}" for hf, name in zip("qkvo", ("q", "k", "v", "output"))},
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}


def check_writable(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises UserError unless model and tokenizer are of a kind that `write_gguf` writes."""
    if reason := _unsupported(model, tokenizer):
        raise UserError(
            f"{reason}; for a run, name a GGUF file with engine.target (a draft model: engine.draft)"
        )


def _unsupported(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Why a model and its tokenizer cannot be written; None if they can."""
    if model.config.model_type != "llama":
        return f"only models of the Llama family become GGUF files, not '{model.config.model_type}'"
    if (rope := model.config.rope_parameters.get("rope_type", "default")) != "default":
        return f"rotary positions of type '{rope}' are not written into GGUF files"
    if any(getattr(model.config, name, False) for name in ("attention_bias", "mlp_bias")):
        return "layers with biases are not written into GGUF files"
    splits = _tokenizer_model(tokenizer)
    if splits["type"] != "BPE" or splits.get("byte_fallback"):  # Llama 2's merges characters, not bytes
        kind = splits["type"] if splits["type"] != "BPE" else "one that merges characters"
        return f"only byte-level BPE tokenizers go into GGUF files, not {kind}"
    return None


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    kind: str,
    pre_tokenizer: str,
) -> None:
    """Writes a Llama model and its byte-level BPE tokenizer.

    Args:
        path: of the file.
        model: with or without a tied head.
        tokenizer: of it.
        kind: of all matrices: F32, F16, BF16, Q8_0, Q4_1 ...
        pre_tokenizer: llama.cpp's name of the way in which the tokenizer splits text before it merges bytes.
    """
    import gguf

    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_key_length(
        config.head_dim
    )  # without it the width over the heads, which is another one in some models
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
    _add_tokenizer(writer, tokenizer, tokens_of(tokenizer, config.vocab_size), pre_tokenizer)
    wanted = gguf.GGMLQuantizationType[kind]
    for name, values in tensors(model).items():
        of_this = wanted if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(values, of_this), raw_dtype=of_this)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """The weights by llama.cpp's names, the rows of queries and keys in its order of rotary pairs."""
    config, named = model.config, {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = weight.float().cpu()
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            part = IN_LAYER[rest.removesuffix(".weight")]
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(part)
            name = f"blk.{layer}.{part}.weight"
            if heads:
                values = values.view(heads, 2, -1, values.shape[1]).transpose(1, 2).reshape(values.shape)
        else:
            name = NAMES[name]
        named[name] = values.contiguous().numpy()
    return named


def tokens_of(tokenizer: PreTrainedTokenizerBase, count: int) -> list[str]:
    """The tokens by id, and for every id up to `count` that has none, the name that llama.cpp's converter gives it."""
    tokens = [PADDING.format(i) for i in range(max(count, len(tokenizer)))]
    for token, i in tokenizer.get_vocab().items():
        tokens[i] = token
    return tokens


def _tokenizer_model(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return json.loads(tokenizer.backend_tokenizer.to_str())["model"]


def _add_tokenizer(
    writer: Any, tokenizer: PreTrainedTokenizerBase, tokens: list[str], pre_tokenizer: str
) -> None:
    """Adds tokens, merges, special ids and the chat template."""
    import gguf

    added = {i: token.special for i, token in tokenizer.added_tokens_decoder.items()}
    added |= dict.fromkeys(tokenizer.all_special_ids, True)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    kinds = {None: gguf.TokenType.NORMAL, True: gguf.TokenType.CONTROL, False: gguf.TokenType.USER_DEFINED}
    types = [kinds[added.get(i)] for i in range(len(tokens))]
    for i in {*range(len(tokens))} - {*tokenizer.get_vocab().values()}:
        types[i] = gguf.TokenType.UNUSED
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in _tokenizer_model(tokenizer)["merges"]])
    for name in ("bos", "eos"):
        if (number := getattr(tokenizer, f"{name}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)
