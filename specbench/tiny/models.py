"""The models of the family: stock Llama, deep and narrow, and growth in depth that keeps the function."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specbench.tiny.tokenizer import CONTEXT

HEAD_DIM = 32
CODE = 14  # numbers of a token by which the lookup circuit knows it again; even


@dataclass(frozen=True)
class Shape:
    """Depth and widths of one model; heads are `HEAD_DIM` wide."""

    layers: int
    hidden: int
    ffn: int


def build(shape: Shape, tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A fresh fp32 model; ValueError when the hidden size is not a multiple of `HEAD_DIM`."""
    if shape.hidden % HEAD_DIM:
        raise ValueError(f"hidden size {shape.hidden} is not a multiple of the head size {HEAD_DIM}")
    heads = shape.hidden // HEAD_DIM
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=shape.hidden, intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers, num_attention_heads=heads, num_key_value_heads=heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True, rms_norm_eps=1e-5, initializer_range=0.02,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).float()
    # Embeddings of size one, so that what the layers write does not drown which token it was; the final norm takes
    # the size back for the tied head. Branches start silent.
    model.model.embed_tokens.weight.data.normal_(std=1.0)
    model.model.norm.weight.data.fill_(0.06)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    install_lookup(model)
    generation = model.generation_config
    generation.do_sample = False
    generation.bos_token_id = tokenizer.bos_token_id
    generation.eos_token_id = tokenizer.eos_token_id
    generation.pad_token_id = tokenizer.pad_token_id
    return model


@torch.no_grad()
def install_lookup(model: LlamaForCausalLM) -> None:
    """Start a fresh model with an induction circuit (Olsson et al. 2022), which finds what followed a token before.

    Models find this circuit by themselves, but only after some billion tokens; text that quotes its prompt needs it.
    Layer 0, head 0 attends to the token before (RoPE turns two constant vectors into that) and notes `CODE` numbers
    of it in dimensions that the embedding leaves free. Layer 1 looks for positions whose note fits the token at
    hand, and adds the embedding of the token there. Only the slow pairs of RoPE compare codes, so that distance
    does not matter. ValueError for fewer than two layers.
    """
    if len(model.model.layers) < 2:
        raise ValueError("the lookup circuit takes two layers")
    embedding = model.model.embed_tokens.weight
    hidden, half = embedding.shape[1], HEAD_DIM // 2
    heads = hidden // HEAD_DIM
    slow = [pair + part for part in (0, half) for pair in range(half - CODE // 2, half)]
    constant, code, notes = 0, slice(1, 1 + CODE), slice(hidden - CODE, hidden)
    embedding[:, constant] = 0.0
    embedding[:, notes] = 0.0
    embedding.div_(
        embedding.square().mean(1, keepdim=True).sqrt()
    )  # equal norms: short rows would draw attention
    embedding[:, constant] = 4.0  # adds the same to all logits of the tied head: no effect

    before, after = (layer.self_attn for layer in model.model.layers[:2])
    fast = 6  # pairs that turn enough within one position to tell it from the next
    angle = model.model.rotary_emb.inv_freq[:fast]
    before.q_proj.weight[:HEAD_DIM], before.k_proj.weight[:HEAD_DIM] = 0.0, 0.0
    before.k_proj.weight[:fast, constant] = 2.0
    before.q_proj.weight[:fast, constant] = 2.0 * torch.cos(angle)
    before.q_proj.weight[half : half + fast, constant] = -2.0 * torch.sin(angle)
    before.v_proj.weight[:HEAD_DIM] = 0.0
    before.v_proj.weight[:CODE, code] = torch.eye(CODE)
    before.o_proj.weight[notes, :CODE] = torch.eye(CODE)

    after.q_proj.weight.zero_()
    after.k_proj.weight.zero_()
    after.v_proj.weight.zero_()
    for head in range(heads):
        rows = [head * HEAD_DIM + place for place in slow]
        after.q_proj.weight[rows, code] = 3.0 * torch.eye(CODE)
        after.k_proj.weight[rows, notes] = 3.0 * torch.eye(CODE)
        copied = torch.arange(head * HEAD_DIM, min((head + 1) * HEAD_DIM, hidden - CODE))
        after.v_proj.weight[copied, copied] = 1.0
        after.o_proj.weight[copied, copied] = 2.0


def grow(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """A model of twice the depth with the same logits.

    Every layer is followed by a copy of itself whose `o_proj` and `down_proj` are zero: the copy adds nothing
    to the residual stream yet, and its other weights are a good place to learn from.
    """
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 2 * model.config.num_hidden_layers
    if getattr(config, "layer_types", None):
        config.layer_types = [kind for kind in config.layer_types for _ in range(2)]
    bigger = LlamaForCausalLM(config).to(model.dtype)
    bigger.generation_config = copy.deepcopy(model.generation_config)
    bigger.model.embed_tokens.load_state_dict(model.model.embed_tokens.state_dict())
    bigger.model.norm.load_state_dict(model.model.norm.state_dict())
    for number, layer in enumerate(model.model.layers):
        weights = layer.state_dict()
        bigger.model.layers[2 * number].load_state_dict(weights)
        quiet = {
            name: torch.zeros_like(w) if name.endswith(("o_proj.weight", "down_proj.weight")) else w
            for name, w in weights.items()
        }
        bigger.model.layers[2 * number + 1].load_state_dict(quiet)
    bigger.tie_weights()
    return bigger


def save_bf16(model: LlamaForCausalLM, folder: Path) -> None:
    """Write a bf16 copy in the Hugging Face format; the model itself stays fp32."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Read a saved model in `dtype`, ready for inference."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval()
