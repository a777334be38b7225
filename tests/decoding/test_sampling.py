"""At temperature 1 whole answers follow the target's own distribution, whatever the method."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chisquare

from methods.kangaroo import Kangaroo
from methods.kangaroo.adapter import save_adapter
from methods.mirror_sd import MirrorSD
from methods.pld import PromptLookup
from methods.s2d import SortedDraft
from methods.sps import SpeculativeSampling
from specbench.decoding import acceptance
from specbench.decoding.engine import Engine
from specbench.decoding.sampling import NOT_DRAWN, Decoding, all_drawn, invert
from specbench.decoding.target import Target
from specbench.errors import UserError
from tests.support.decoding import near_identity_adapter, random_pair, sorted_pair, trimmed

VOCAB, ANSWERS, LENGTH = 5, 500, 4
PROMPT = [1, 3, 4, 1, 3]
KEPT = [0, 2, 3]  # what the trimmed heads know of the five tokens
# Of the pairs of random models one on which wrong rules move the distribution most, so that few answers show it.
SHAPE = {"seed": 108, "vocab_size": VOCAB, "num_hidden_layers": 3}


@pytest.fixture(scope="module")
def pair() -> SimpleNamespace:
    return random_pair("llama", **SHAPE)


def drafter(pair, method: str, folder: str):
    if method == "sps":
        return SpeculativeSampling(pair, 3)
    if method == "sps with a stop":
        return SpeculativeSampling(pair, 3, 0.5)
    if method == "sps, trimmed":
        return trimmed(SpeculativeSampling(pair, 3), KEPT)
    if method.startswith("s2d"):
        sorted_draft = SortedDraft(sorted_pair("llama", **SHAPE), thresholds=[0.35, 0.35], max_draft_tokens=3)
        return trimmed(sorted_draft, KEPT) if "trimmed" in method else sorted_draft
    if method.startswith("mirror"):
        return MirrorSD(pair, 3, kappa=2, acceptance=method.split()[-1], placement="inline")
    if method == "pld":
        return PromptLookup(pair, 3)
    save_adapter(near_identity_adapter(pair), folder, torch.float32)
    kangaroo = Kangaroo(pair, folder, 1, 3, 0.5)
    return trimmed(kangaroo, KEPT) if "trimmed" in method else kangaroo


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
    return counted(engine.generate(PROMPT, Decoding(LENGTH, 1.0), seed=s).tokens for s in range(ANSWERS))


def counted(answers: Iterable[list[int]]) -> torch.Tensor:
    """How often each pair of tokens 1 and 2 was said."""
    counts = torch.zeros(VOCAB * VOCAB)
    for tokens in answers:
        counts[tokens[1] * VOCAB + tokens[2]] += 1
    return counts


def p_value(observed: torch.Tensor, expected: torch.Tensor) -> float:
    rare = expected < 5  # the chi-square approximation wants at least five a cell: pool the rest
    observed = torch.cat([observed[~rare], observed[rare].sum(0, keepdim=True)]).double()
    expected = torch.cat([expected[~rare], expected[rare].sum(0, keepdim=True)]).double()
    filled = expected > 0
    observed, expected = observed[filled], expected[filled]
    return chisquare(observed.numpy(), (expected / expected.sum() * observed.sum()).numpy()).pvalue


@pytest.mark.parametrize(
    "method",
    [
        *(
            "sps",
            "sps with a stop",
            "sps, trimmed",
            "pld",
            "s2d",
            "s2d, trimmed",
            "kangaroo",
            "kangaroo, trimmed",
        ),
        *("mirror exact", "mirror ratio"),
    ],
)
def test_answers_follow_the_target(pair, method, tmp_path):
    assert p_value(observed_counts(pair, method, str(tmp_path)), expected_counts(pair.target)) > 1e-3


def test_a_spoiled_residual_is_found(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(acceptance, "residual", lambda p, q: p)
    assert p_value(observed_counts(pair, "sps", str(tmp_path)), expected_counts(pair.target)) < 1e-6


def only_the_drafted_token(rule, probs, tokens, draft_probs, uniforms):
    """The residual takes away no more than the drafted token's own probability."""
    if draft_probs is None:
        return rule(probs, tokens, draft_probs, uniforms)
    index = tokens.unsqueeze(-1)
    own = torch.zeros_like(draft_probs).scatter(-1, index, draft_probs.gather(-1, index))
    return rule(probs, tokens, own, uniforms)


def only_the_kept_tokens(rule, probs, tokens, draft_probs, uniforms):
    """The target, too, is cut to the trimmed vocabulary."""
    kept = torch.zeros(VOCAB).index_fill(0, torch.tensor(KEPT), 1.0)
    return rule(probs * kept / (probs * kept).sum(-1, keepdim=True), tokens, draft_probs, uniforms)


@pytest.mark.parametrize("wrong", [only_the_drafted_token, only_the_kept_tokens])
def test_wrong_rules_for_a_trimmed_head_are_found(pair, tmp_path, monkeypatch, wrong):
    """The mistakes that the research sheet has found in circulation."""
    monkeypatch.setattr(acceptance, "sampled_chain", partial(wrong, acceptance.sampled_chain))
    assert p_value(observed_counts(pair, "sps, trimmed", str(tmp_path)), expected_counts(pair.target)) < 1e-6


def test_weights_that_are_no_distribution_give_no_token():
    weights = torch.tensor(
        [[1.0, 2.0, 1.0], [1.0, float("nan"), 1.0], [float("inf"), 1.0, 1.0], [0.0, 0.0, 2.0]]
    )
    assert invert(weights, torch.tensor([0.5, 0.5, 0.5, 0.0])).tolist() == [1, NOT_DRAWN, NOT_DRAWN, 2]
    overflown = Decoding(1, 1e-38).select(torch.tensor([[1.0, 9.0, 3.0]]), uniforms=torch.tensor([0.5]))
    assert overflown[0].tolist() == [NOT_DRAWN]
    with pytest.raises(UserError, match="a token cannot be drawn"):
        all_drawn([4, NOT_DRAWN])
    assert all_drawn([4, 0]) == [4, 0]


def test_a_seed_fixes_the_answer(pair):
    engine = Engine(Target(pair.target), SpeculativeSampling(pair, 3), frozenset())
    answers = {tuple(engine.generate(PROMPT, Decoding(12, 1.0), seed=s).tokens) for s in (1, 1, 2)}
    assert len(answers) == 2
