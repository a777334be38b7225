"""GGUF files of small Llama models, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import torch
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


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    kind: str = "F32",
    architecture: str = "llama",
    left_out: str | None = None,
    renamed: dict[int, str] | None = None,
) -> None:
    """Writes a Llama model and its byte-level BPE tokenizer.

    Args:
        path: of the file.
        model: with or without a tied head.
        tokenizer: of it.
        kind: of all matrices: F32, F16, Q8_0, Q4_1 ...
        architecture: what the file says it is.
        left_out: a tensor that the file lacks.
        renamed: other names of tokens, by their ids.
    """
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    add_tokenizer(writer, tokenizer, renamed or {})
    wanted = gguf.GGMLQuantizationType[kind]
    for name, values in tensors(model).items():
        if name == left_out:
            continue
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
        values = weight.float()
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            own = IN_LAYER[rest.removesuffix(".weight")]
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(own)
            name = f"blk.{layer}.{own}.weight"
            if heads:
                values = values.view(heads, 2, -1, values.shape[1]).transpose(1, 2).reshape(values.shape)
        else:
            name = NAMES[name]
        named[name] = values.contiguous().numpy()
    return named


def add_tokenizer(
    writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, renamed: dict[int, str]
) -> None:
    """Adds tokens, merges, special ids and the chat template."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = [""] * len(tokenizer)
    for token, i in tokenizer.get_vocab().items():
        tokens[i] = renamed.get(i, token)
    special = set(tokenizer.all_special_ids)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if i in special else normal for i in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)


def rounded(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    """The model with its matrices as a file of that kind gives them back, in place."""
    wanted = gguf.GGMLQuantizationType[kind]
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), wanted), wanted)))
    return model
