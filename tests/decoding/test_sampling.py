"""At temperature 1 whole answers follow the target's own distribution, whatever the method."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chisquare

from methods.kangaroo import Kangaroo
from methods.kangaroo.adapter import save_adapter
from methods.pld import PromptLookup
from methods.sps import SpeculativeSampling
from specbench.decoding import acceptance
from specbench.decoding.engine import Engine
from specbench.decoding.sampling import Decoding
from specbench.decoding.target import Target
from tests.decoding.helpers import near_identity_adapter, random_pair

VOCAB, ANSWERS, LENGTH = 5, 1500, 4
PROMPT = [1, 3, 4, 1, 3]


@pytest.fixture(scope="module")
def pair() -> SimpleNamespace:
    return random_pair("llama", seed=4, vocab_size=VOCAB, num_hidden_layers=3)


def drafter(pair, method: str, folder: str):
    if method == "sps":
        return SpeculativeSampling(pair, 3)
    if method == "sps with a stop":
        return SpeculativeSampling(pair, 3, 0.5)
    if method == "pld":
        return PromptLookup(pair, 3)
    save_adapter(near_identity_adapter(pair), folder, torch.float32)
    return Kangaroo(pair, folder, 1, 3, 0.5)


@torch.inference_mode()
def expected_counts(model) -> torch.Tensor:
    """Expected counts of tokens 2 and 3 of the answer together (token 1 comes from the prefill), exactly enumerated."""

    def following(prefixes):
        return torch.softmax(model(prefixes, use_cache=False).logits[:, -1].float(), dim=-1)

    ids, weights = torch.tensor([PROMPT]), torch.ones(1)
    for _ in range(3):
        probs = following(ids)
        weights = (weights[:, None] * probs).flatten()
        ids = torch.cat(
            [ids.repeat_interleave(VOCAB, 0), torch.arange(VOCAB).repeat(len(ids))[:, None]], dim=1
        )
    return weights.view(VOCAB, VOCAB * VOCAB).sum(0) * ANSWERS


def observed_counts(pair, method, folder) -> torch.Tensor:
    engine = Engine(Target(pair.target), drafter(pair, method, folder), frozenset())
    counts = torch.zeros(VOCAB * VOCAB)
    for seed in range(ANSWERS):
        tokens = engine.generate(PROMPT, Decoding(LENGTH, 1.0), seed=seed).tokens
        counts[tokens[1] * VOCAB + tokens[2]] += 1
    return counts


def p_value(observed: torch.Tensor, expected: torch.Tensor) -> float:
    rare = expected < 5  # the chi-square approximation wants at least five a cell: pool the rest
    observed = torch.cat([observed[~rare], observed[rare].sum(0, keepdim=True)]).double()
    expected = torch.cat([expected[~rare], expected[rare].sum(0, keepdim=True)]).double()
    filled = expected > 0
    observed, expected = observed[filled], expected[filled]
    return chisquare(observed.numpy(), (expected / expected.sum() * observed.sum()).numpy()).pvalue


@pytest.mark.parametrize("method", ["sps", "sps with a stop", "pld", "kangaroo"])
def test_answers_follow_the_target(pair, method, tmp_path):
    assert p_value(observed_counts(pair, method, str(tmp_path)), expected_counts(pair.target)) > 1e-3


def test_a_spoiled_residual_is_found(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(acceptance, "residual", lambda p, q: p)
    assert p_value(observed_counts(pair, "sps", str(tmp_path)), expected_counts(pair.target)) < 1e-6


def test_a_seed_fixes_the_answer(pair):
    engine = Engine(Target(pair.target), SpeculativeSampling(pair, 3), frozenset())
    answers = {tuple(engine.generate(PROMPT, Decoding(12, 1.0), seed=s).tokens) for s in (1, 1, 2)}
    assert len(answers) == 2
