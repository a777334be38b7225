"""Small random models of the architectures that count, and a pair of them saved as the hub would hold it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from omegaconf import DictConfig, OmegaConf
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import (
    Glm4Config,
    Glm4ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from specbench.config.compose import CONF

# Vocabularies differ, so that no test depends on one; the window of Mistral is shorter than most prompts.
ARCHITECTURES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"vocab_size": 61, "num_hidden_layers": 5}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"vocab_size": 67, "num_hidden_layers": 4, "head_dim": 24}),
    "glm4": (Glm4ForCausalLM, Glm4Config, {"vocab_size": 71, "num_hidden_layers": 4, "head_dim": 16}),
    "mistral": (
        MistralForCausalLM,
        MistralConfig,
        {"vocab_size": 83, "num_hidden_layers": 6, "head_dim": 16, "sliding_window": 8},
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"vocab_size": 97, "num_hidden_layers": 5}),
    "opt": (
        OPTForCausalLM,
        OPTConfig,
        {
            "vocab_size": 89,
            "num_hidden_layers": 5,
            "num_key_value_heads": 4,
            "ffn_dim": 96,
            "word_embed_proj_dim": 64,
            "init_std": 0.25,
        },
    ),
}
SLIDING = ["sliding_attention", "full_attention"] * 2
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
THETA = {"rope_theta": 10000.0}
# Families beyond these, each as transformers names its classes, and angles of the positions that are scaled. Windows
# are shorter than most prompts, scales and caps such that logits differ without them.
FAMILIES: dict[str, tuple[str, dict]] = {
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": SLIDING,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": SLIDING,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
            },
        },
    ),
    "cohere": ("Cohere", {"logit_scale": 0.0625, "use_qk_norm": True}),
    "cohere2": ("Cohere2", {"sliding_window": 8, "layer_types": SLIDING}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.3,
        },
    ),
    "gpt_neox": ("GPTNeoX", {"num_key_value_heads": 4}),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": SLIDING,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default"} | THETA,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": 8, "layer_types": SLIDING}),
    "phi": ("Phi", {}),
    "phi3": ("Phi3", {"sliding_window": 8}),
    "qwen2_moe": ("Qwen2Moe", {"shared_expert_intermediate_size": 32, **EXPERTS}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 16, **EXPERTS}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "stablelm": ("StableLm", {}),
    "starcoder2": ("Starcoder2", {"sliding_window": 8}),
    "linear angles": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0} | THETA}),
    "yarn angles": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
            | THETA
        },
    ),
    "llama3 angles": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
                **THETA,
            }
        },
    ),
}
# For what is proved on each: the fast tests take the first alone.
EVERY_ARCHITECTURE = [
    pytest.param(arch, marks=[] if place == 0 else pytest.mark.slow)
    for place, arch in enumerate(ARCHITECTURES)
]
COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Wide enough that attention looks at different places and greedy answers do not fall into one token.
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

BYTES = 256
SPECIAL = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "user": "<user>",
    "assistant": "<assistant>",
}  # ids from 256 on
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def random_model(arch: str, seed: int, **overrides) -> PreTrainedModel:
    """A random fp32 model on the CPU in eval mode; `overrides` replace values of its config."""
    if arch in ARCHITECTURES:
        cls, config_cls, own = ARCHITECTURES[arch]
    else:
        name, own = FAMILIES[arch]
        cls = getattr(transformers, f"{name}ForCausalLM")
        config_cls, own = cls.config_class, {"vocab_size": 61, "num_hidden_layers": 4} | own
    config = config_cls(**{**COMMON, **own, **overrides})
    config._attn_implementation = "sdpa" if cls._supports_sdpa else "eager"
    torch.manual_seed(seed)
    return cls(config).eval().requires_grad_(False)


def byte_tokenizer(
    chat_template: str | None = TEMPLATE, first_special: str = "<s>"
) -> PreTrainedTokenizerFast:
    """One id per byte, then the special tokens; `first_special` renames the first, which is BOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([first_special])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first_special} $A", special_tokens=[(first_special, BYTES)]
    )
    names = {**SPECIAL, "bos_token": first_special}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=names["bos_token"],
        eos_token=names["eos_token"],
        additional_special_tokens=[names["user"], names["assistant"]],
    )
    fast.chat_template = chat_template
    return fast


def save_pair(folder: Path, tokenizer: PreTrainedTokenizerFast | None = None, **overrides) -> DictConfig:
    """Saves a target (5 layers), a draft (1 layer) and the target's tokenizer; returns the pair's config.

    overrides: values of both model configs.
    """
    tokenizer = tokenizer or byte_tokenizer()
    size = {
        "vocab_size": BYTES + len(SPECIAL),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": None,
        **overrides,
    }
    random_model("llama", 0, **size).save_pretrained(folder / "target")
    random_model("qwen2", 1, **{**size, "num_hidden_layers": 1}).save_pretrained(folder / "draft")
    tokenizer.save_pretrained(folder / "target")
    base = OmegaConf.load(CONF / "pair" / "_base.yaml")
    own = {"name": "saved", "target": str(folder / "target"), "draft": str(folder / "draft"), "device": "cpu"}
    return OmegaConf.merge(base, own)


def edit_json(path: Path, **values: object) -> None:
    """Sets values of a file that holds an object."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
