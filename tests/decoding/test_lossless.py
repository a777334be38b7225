"""Whatever is drafted, the greedy answer is transformers' own, token by token, on every architecture in fp32."""

from __future__ import annotations

import pytest

from specbench.decoding import engine
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from tests.support.decoding import random_pair
from tests.support.drafters import EarlyExit, ModelChain, ModelTree, Oracle
from tests.support.lossless import (
    SOME_LENGTHS,
    assert_lossless,
    assert_rounds_of_every_kind,
    assert_stops_anywhere,
    cases,
)
from tests.support.models import EVERY_ARCHITECTURE


@pytest.mark.one_in(3)
@pytest.mark.parametrize("arch", EVERY_ARCHITECTURE)
@pytest.mark.parametrize("threshold", [0.0, pytest.param(0.4, marks=pytest.mark.slow)])
def test_chain(arch, threshold):
    steps = []
    for n in SOME_LENGTHS:
        steps += assert_lossless(arch, ModelChain(random_pair(arch).draft, n, threshold), third=n)
    assert_rounds_of_every_kind(steps, partly=threshold == 0)


@pytest.mark.parametrize("arch", EVERY_ARCHITECTURE)
def test_tree(arch):
    steps = assert_lossless(arch, ModelTree(random_pair(arch).draft))
    assert {s.accepted for s in steps} == {0, 1, 2}
    assert {s.depth for s in steps} >= {1, 2}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("arch", EVERY_ARCHITECTURE)
@pytest.mark.parametrize("layer", [1, 2, 3])
def test_early_exit(arch, layer):
    steps = assert_lossless(arch, EarlyExit(layer, 4))
    assert any(s.accepted for s in steps)
    assert any(s.accepted < s.drafted for s in steps)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("arch", EVERY_ARCHITECTURE)
def test_any_acceptance_pattern(arch, tree):
    """A drafter that is right and wrong at random leaves the answer as it is, for chains and for trees."""
    target = StagedModel(random_pair(arch).target)
    accepted = set()
    for seed, error in enumerate([0.0, 0.1, 0.3, 1.0]):
        # Of drafts that are all right, or all wrong, a third of the cases shows what there is to see.
        some = cases(arch) if 0 < error < 1 else cases(arch)[::3]
        for prompt, cap, stop_ids, expected in some:
            oracle = Oracle(len(prompt), expected, target.vocab_size, seed, error, longest=8, tree=tree)
            answer = Engine(target, oracle, frozenset(stop_ids)).answer(prompt, SamplingParams(cap))
            assert answer.tokens == expected
            accepted |= {s.accepted for s in answer.steps}
    assert {0, 1, 2, 3} <= accepted and max(accepted) >= 6


@pytest.mark.one_in(3)
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("arch", EVERY_ARCHITECTURE)
def test_certain_drafts_leave_a_sampled_answer_as_it_is(arch, tree):
    """Token for token: what is drafted without chance changes no draw, whatever is accepted of it."""
    target = StagedModel(random_pair(arch).target)
    accepted = set()
    for seed, error in enumerate([0.0, 0.3, 1.0]):
        for prompt, cap, stop_ids, _ in cases(arch)[:4]:
            stops, decoding = frozenset(stop_ids), SamplingParams(cap, 0.8)
            plain = Engine(target, Drafter(), stops).answer(prompt, decoding, seed).tokens
            oracle = Oracle(len(prompt), plain, target.vocab_size, seed, error, longest=8, tree=tree)
            answer = Engine(target, oracle, stops).answer(prompt, decoding, seed)
            assert answer.tokens == plain
            accepted |= {s.accepted for s in answer.steps}
    assert 0 in accepted and max(accepted) >= 4


def test_a_draw_with_the_number_of_another_position_is_found(monkeypatch):
    real = engine.accept

    def shifted(logits, draft, decoding, uniforms, limits):
        return real(logits, draft, decoding, uniforms.roll(1, 1), limits)

    monkeypatch.setattr(engine, "accept", shifted)
    with pytest.raises(AssertionError, match=r"assert \["):
        test_certain_drafts_leave_a_sampled_answer_as_it_is("llama", False)


@pytest.mark.one_in(3)
@pytest.mark.first_fast
@pytest.mark.parametrize(
    "kind", [pytest.param("chain", marks=pytest.mark.slow), "early exit", "oracle", "oracle tree"]
)
def test_stop_token_anywhere(kind):
    pair = random_pair("llama")

    def drafter(prompt: list[int], free: list[int]) -> Drafter:
        return {
            "chain": lambda: ModelChain(pair.draft, 6),
            "early exit": lambda: EarlyExit(2, 6),
            "oracle": lambda: Oracle(len(prompt), free, pair.vocab_size, 0, 0.05, 8, False),
            "oracle tree": lambda: Oracle(len(prompt), free, pair.vocab_size, 0, 0.05, 8, True),
        }[kind]()

    assert_stops_anywhere(drafter)
