"""How many operations a pass of the target and a round of each method start, at the dimensions of Llama 3.1 8B with
Llama 3.2 1B: on a GPU, where each costs microseconds, that decides. Bounds are what it was, with some room."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from methods.ar import Autoregressive
from methods.common import rank_trees
from methods.common.checkpoints import layer_sizes
from methods.eagle import Eagle, Eagle2
from methods.eagle import checkpoint as eagle
from methods.eagle.model import EagleModel
from methods.eagle3 import Eagle3
from methods.eagle3 import checkpoint as eagle3
from methods.eagle3.model import Eagle3Config, Eagle3Model
from methods.hydra_heads import HydraHeads
from methods.hydra_heads import checkpoint as hydra
from methods.hydra_heads.heads import Heads
from methods.kangaroo import Kangaroo
from methods.kangaroo import adapter as adapters
from methods.medusa import Medusa
from methods.medusa import drafter as medusa
from methods.medusa.heads import MedusaHeads
from methods.mirror_sd import MirrorSD
from methods.mirror_sd import drafter as mirror
from methods.pld import PromptLookup
from methods.ragged import RaggedBatch
from methods.recycling import TokenRecycling
from methods.sps import SpeculativeSampling
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import Request
from tests.support.kernels import Kernels, counts_by_round, without_data

LAYERS, DRAFT_LAYERS = 3, 2
COMMON = {"num_key_value_heads": 8, "num_attention_heads": 32, "vocab_size": 128256}
TARGET = COMMON | {"hidden_size": 4096, "intermediate_size": 14336, "head_dim": 128}
DRAFT = COMMON | {"hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_trees_without_data_are_kept() -> Iterator[None]:
    """Trees are made once for all drafters: those of tensors without data are of no use to other tests."""
    rank_trees.rank_tree.cache_clear()
    yield
    rank_trees.rank_tree.cache_clear()


def model(shape: dict, layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(**shape, num_hidden_layers=layers)
    made = LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    return made.eval().requires_grad_(False)


def pair() -> SimpleNamespace:
    """Target and draft model, of some layers."""
    target = model(TARGET, LAYERS)
    return SimpleNamespace(
        name="8b", target=target, staged=StagedModel(target), draft=model(DRAFT, DRAFT_LAYERS), device=CPU,
        dtype=torch.bfloat16, vocab_size=TARGET["vocab_size"], stop_ids=frozenset(), parts={},
        expansion=None, draft_expansion=None, trimmed=None,
    )  # fmt: skip


def passes(layers: int, tokens: int) -> int:
    """Operations of a pass of so many tokens after 1000 others, head included."""
    target = StagedModel(model(TARGET, layers))
    cache = target.new_cache(2048)
    target._make_angles(2048)
    with Kernels() as kernels:
        target.head(target.run_layers(target.embed(torch.zeros(1, tokens, dtype=torch.int64)), cache, 1000))
    return kernels.total


@pytest.mark.parametrize("tokens", [1, 6])
def test_a_pass_of_the_target(monkeypatch, tokens):
    with without_data(monkeypatch):
        few, more = passes(LAYERS, tokens), passes(LAYERS + 2, tokens)
    a_layer = (more - few) / 2
    assert 25 < a_layer <= {1: 40, 6: 42}[tokens] + 2
    assert 5 < few - LAYERS * a_layer <= {1: 11, 6: 18}[tokens] + 2  # with the mask of several tokens


@contextmanager
def in_bfloat16() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def adapter(folder, target, expansion) -> adapters.Adapter:
    with in_bfloat16():
        return adapters.Adapter(adapters.adapter_config(target.config)).eval().requires_grad_(False)


def heads(folder, target, expansion) -> tuple[MedusaHeads, dict, None]:
    with in_bfloat16():
        return MedusaHeads(5, target.hidden_size).eval().requires_grad_(False), {}, None


def hydra_heads(folder, target, expansion) -> tuple[Heads, dict]:
    tree = [[0], [1], [0, 0], [0, 0, 0], [0, 1], [0, 0, 0, 0], [1, 0]]
    with in_bfloat16():
        heads = Heads(4, 4, target.hidden_size, None, LlamaConfig(**layer_sizes(target)))
        return heads.eval().requires_grad_(False), {"tree": tree}


def eagle_model(folder, target, *others) -> tuple[EagleModel, dict]:
    with in_bfloat16():
        return EagleModel(LlamaConfig(**layer_sizes(target))).eval().requires_grad_(False), {}


def eagle3_model(folder, target, *others) -> Eagle3Model:
    config = Eagle3Config(**layer_sizes(target))
    with in_bfloat16():
        # A draft vocabulary of 32000 tokens, as published.
        return Eagle3Model(config, (1, 2, 3), torch.arange(32000)).eval().requires_grad_(False)


MAKE = {
    "ar": Autoregressive,
    "pld": lambda pair: PromptLookup(pair, 5),
    "sps": lambda pair: SpeculativeSampling(pair, 5),
    "kangaroo": lambda pair: Kangaroo(pair, "none", 1, 5, 0.0),
    "medusa": lambda pair: Medusa(pair, "none", 16),
    "hydra_heads": lambda pair: HydraHeads(pair, "none"),
    "eagle": lambda pair: Eagle(pair, "none", max_draft_tokens=3),
    "eagle2": lambda pair: Eagle2(pair, "none", nodes=16, width=4, max_draft_tokens=3),
    "eagle3": lambda pair: Eagle3(pair, "none", nodes=16, width=4, max_draft_tokens=3),
    "recycling": lambda pair: TokenRecycling(pair, 16),
    "mirror_sd": lambda pair: MirrorSD(
        pair, 4, kappa=12, branches=24, floor=0.01, candidates="both", placement="inline"
    ),
}


# Of a round: greedy and sampled, of one sequence and of a batch of eight.
COUNTS = {
    ("ar", 1): (127, 137),
    ("ar", 8): (145, 162),
    ("pld", 1): (146, 159),
    ("pld", 8): (165, 182),
    ("sps", 1): (572, 672),
    ("sps", 8): (661, 780),
    ("kangaroo", 1): (516, 616),
    ("kangaroo", 8): (691, 810),
    ("medusa", 1): (204, 219),
    ("medusa", 8): (223, 242),
    ("hydra_heads", 1): (372, 387),
    ("hydra_heads", 8): (406, 425),
    ("eagle", 1): (373, 388),
    ("eagle", 8): (423, 442),
    ("eagle2", 1): (466, 481),
    ("eagle2", 8): (516, 535),
    ("eagle3", 1): (548, 563),
    ("eagle3", 8): (598, 617),
    ("recycling", 1): (236, 251),
    ("recycling", 8): (260, 279),
    ("mirror_sd", 1): (639, 652),
}
ROOM = 1.08


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("method", "b"), COUNTS)
def test_a_round(monkeypatch, method, b, temperature):
    monkeypatch.setattr(adapters, "load_adapter", adapter)
    monkeypatch.setattr(medusa, "load_heads", heads)
    monkeypatch.setattr(hydra, "load_heads", hydra_heads)
    monkeypatch.setattr(eagle, "load_eagle", eagle_model)
    monkeypatch.setattr(eagle3, "load_eagle3", eagle3_model)
    # Moving a module is more than fake tensors can.
    monkeypatch.setattr(mirror, "_exit_parts", lambda target, model: (target.norm, target.lm_head.weight))
    with without_data(monkeypatch):
        chosen = pair()
        engine = Engine(chosen.staged, MAKE[method](chosen), frozenset(), RaggedBatch(b))
        # Lengths differ, as they do in a batch; prompt lookup finds something.
        prompts = [[7, 5, 1, 1, 1, 1, 1, 1, 9, 1][: 10 - i % 2] for i in range(b)]
        requests = [Request(prompt, SamplingParams(18, temperature)) for prompt in prompts]
        found = counts_by_round(monkeypatch, engine, requests, rounds=4)
    counts = [round_.total() for round_ in found[2:]]
    expected = COUNTS[method, b][temperature > 0]
    assert expected / 2 < min(counts) and max(counts) <= ROOM * expected
