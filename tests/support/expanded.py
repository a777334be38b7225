"""Pairs that compute what the embedded one does at other dimensions, and the configurations that they come from."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from specbench.models.expansion import embedded
from tests.support.conf import composed

LLAMA = {"model_type": "llama", "max_position_embeddings": 4096, "tie_word_embeddings": False}
TARGET = LLAMA | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 16384,
}
DRAFT = TARGET | {"num_hidden_layers": 4}  # as many as the preset of Mirror-SD takes of the sorted one
# By what differs from the embedded target: changes of the target's shape, and of the draft model's.
SHAPES: dict[str, tuple[dict, dict]] = {
    "wider heads": ({"head_dim": 96}, {"head_dim": 64}),
    "grouped heads": (
        {"num_attention_heads": 16, "num_key_value_heads": 8},
        {"num_attention_heads": 8, "num_key_value_heads": 4},
    ),
    "more layers": ({"num_hidden_layers": 31}, {"num_hidden_layers": 7}),
    "larger vocabulary": ({"vocab_size": 20000}, {"vocab_size": 17000, "tie_word_embeddings": True}),
    "all of it": (
        {
            "hidden_size": 200,
            "head_dim": 80,
            "num_attention_heads": 10,
            "num_key_value_heads": 5,
            "num_hidden_layers": 26,
            "vocab_size": 16500,
            "tie_word_embeddings": True,
        },
        {
            "hidden_size": 160,
            "head_dim": 48,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "num_hidden_layers": 4,
            "vocab_size": 16500,
        },
    ),
}


def expanded_config(shape: str | None, *overrides: str) -> DictConfig:
    """The configuration of a run on a pair of one of the shapes; None: on the embedded pair itself."""
    cfg = composed("bench", "pair=tiny", "pair.device=cpu", *overrides)
    if shape is not None:
        target, draft = SHAPES[shape]
        cfg.pair.init = "expanded"
        cfg.pair.target_shape, cfg.pair.draft_shape = TARGET | target, DRAFT | draft
    cfg.pair = embedded(cfg.pair)
    OmegaConf.resolve(cfg)
    return cfg
