"""At temperature 1 whole answers follow the target's own distribution, whatever the method."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from methods.kangaroo import Kangaroo
from methods.mirror_sd import MirrorSD
from methods.pld import PromptLookup
from methods.s2d import SortedDraft
from methods.sps import SpeculativeSampling
from specbench.decoding import acceptance
from tests.support.decoding import random_pair
from tests.support.distribution import SHAPE, VOCAB, p_value_alone
from tests.support.methods import saved_adapter, sorted_pair, trimmed

pytestmark = pytest.mark.slow

KEPT = [0, 2, 3]  # what the trimmed heads know of the five tokens


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
    kangaroo = Kangaroo(pair, saved_adapter(pair, folder), 1, 3, 0.5)
    return trimmed(kangaroo, KEPT) if "trimmed" in method else kangaroo


@pytest.mark.one_in(5)
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
    assert p_value_alone(pair, drafter(pair, method, str(tmp_path))) > 1e-3


def test_a_spoiled_residual_is_found(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(acceptance, "residual", lambda p, q: p)
    assert p_value_alone(pair, drafter(pair, "sps", str(tmp_path))) < 1e-6


def only_the_drafted_token(rule, probs, tokens, draft_probs, uniforms, live):
    """The residual takes away no more than the drafted token's own probability."""
    index = tokens.unsqueeze(-1)
    own = torch.zeros_like(draft_probs).scatter(-1, index, draft_probs.gather(-1, index))
    return rule(probs, tokens, own, uniforms, live)


def only_the_kept_tokens(rule, probs, tokens, draft_probs, uniforms, live):
    """The target, too, is cut to the trimmed vocabulary."""
    kept = torch.zeros(VOCAB).index_fill(0, torch.tensor(KEPT), 1.0)
    return rule(probs * kept / (probs * kept).sum(-1, keepdim=True), tokens, draft_probs, uniforms, live)


@pytest.mark.parametrize("wrong", [only_the_drafted_token, only_the_kept_tokens])
def test_wrong_rules_for_a_trimmed_head_are_found(pair, tmp_path, monkeypatch, wrong):
    """Mistakes of public implementations."""
    monkeypatch.setattr(acceptance, "sampled_chain", partial(wrong, acceptance.sampled_chain))
    assert p_value_alone(pair, drafter(pair, "sps, trimmed", str(tmp_path))) < 1e-6
