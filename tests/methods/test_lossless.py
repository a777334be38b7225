"""Every method's greedy answer is transformers' own, token by token, on every architecture in fp32."""

from __future__ import annotations

import random

import pytest

from methods.ar import Autoregressive
from methods.kangaroo import Kangaroo
from methods.mirror_sd import MirrorSD
from methods.pld import PromptLookup
from methods.ragged import RaggedBatch
from methods.s2d import SortedDraft
from methods.sps import SpeculativeSampling
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import Request
from tests.support.decoding import generate_with_transformers, random_pair, random_prompt
from tests.support.lossless import (
    LENGTHS,
    SOME_LENGTHS,
    assert_lossless,
    assert_rounds_of_every_kind,
    assert_stops_anywhere,
)
from tests.support.methods import padded_pair, sorted_pair, trimmed
from tests.support.models import EVERY_ARCHITECTURE

ETAS = (0.0, 0.6, 1.01)


@pytest.mark.parametrize("arch", EVERY_ARCHITECTURE)
def test_autoregressive_decoding(arch):
    steps = assert_lossless(arch, Autoregressive(random_pair(arch)))
    assert {(s.drafted, s.emitted) for s in steps} == {(0, 1)}


def test_prompt_lookup():
    pair, steps = random_pair("llama"), []
    for n in LENGTHS:
        match = ("earliest", "latest")[n % 2]  # each of them meets every case
        steps += assert_lossless("llama", PromptLookup(pair, n, max_ngram=2, match=match), third=n)
    assert max(s.drafted for s in steps) >= 6
    assert any(s.accepted > 0 for s in steps)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("arch", EVERY_ARCHITECTURE)
@pytest.mark.parametrize("threshold", [0.0, pytest.param(0.4, marks=pytest.mark.slow)])
def test_draft_model(arch, threshold):
    steps = []
    for n in (*SOME_LENGTHS, 5) if threshold == 0 else SOME_LENGTHS:
        steps += assert_lossless(arch, SpeculativeSampling(random_pair(arch), n, threshold), third=n)
    assert_rounds_of_every_kind(steps, partly=threshold == 0)


@pytest.mark.parametrize("arch", EVERY_ARCHITECTURE)
def test_target_as_its_own_draft_is_always_accepted(arch):
    pair = random_pair(arch)
    twin = SpeculativeSampling(type(pair)(**(vars(pair) | {"draft": pair.target})), 5)
    steps = assert_lossless(arch, twin)
    assert any(s.drafted for s in steps)
    # Only a stop token inside the draft, which ends the round without a token of the target, leaves some over.
    assert all(s.accepted == s.drafted or s.emitted == s.accepted for s in steps)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("arch", EVERY_ARCHITECTURE)
@pytest.mark.parametrize("eta", [ETAS[0], *(pytest.param(eta, marks=pytest.mark.slow) for eta in ETAS[1:])])
def test_kangaroo(arch, eta, adapter):
    steps = []
    for gamma in LENGTHS if eta == 0 else SOME_LENGTHS:
        steps += assert_lossless(arch, Kangaroo(random_pair(arch), adapter(arch), 2, gamma, eta), third=gamma)
    assert_rounds_of_every_kind(steps, partly=eta == 0)


@pytest.mark.one_in(5)
@pytest.mark.slow
@pytest.mark.parametrize("arch", EVERY_ARCHITECTURE)
@pytest.mark.parametrize("exit_layer", [1, 3])
def test_kangaroo_at_other_exits(arch, exit_layer, adapter):
    steps = assert_lossless(arch, Kangaroo(random_pair(arch), adapter(arch), exit_layer, 4, 0.5))
    assert any(s.drafted for s in steps)


@pytest.mark.slow
@pytest.mark.one_in(5)
@pytest.mark.parametrize("arch", EVERY_ARCHITECTURE)
@pytest.mark.parametrize(
    "threshold", [0.2, *(pytest.param(threshold, marks=pytest.mark.slow) for threshold in (0.0, 1.01))]
)
def test_sorted_draft(arch, threshold):
    steps = []
    for n in LENGTHS if threshold == 0.2 else SOME_LENGTHS:
        drafter = SortedDraft(sorted_pair(arch), thresholds=[threshold, threshold], max_draft_tokens=n)
        steps += assert_lossless(arch, drafter, third=n)
    assert_rounds_of_every_kind(steps)
    exits = {layers for s in steps for layers in s.stats.get("exits", ())}
    deepest = sorted_pair(arch).draft.config.num_hidden_layers
    assert exits == {0.0: {1}, 0.2: {1, 2, deepest}, 1.01: {deepest}}[threshold]


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("arch", EVERY_ARCHITECTURE)
def test_mirror(arch):
    steps = []
    for n in SOME_LENGTHS:
        drafter = MirrorSD(random_pair(arch), n, kappa=2, placement="inline")
        steps += assert_lossless(arch, drafter, third=n)
    assert_rounds_of_every_kind(steps)
    assert {s.stats.get("hit") for s in steps} == {None, True, False}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("arch", EVERY_ARCHITECTURE)
@pytest.mark.parametrize(
    "method", ["sps", *(pytest.param(method, marks=pytest.mark.slow) for method in ("kangaroo", "s2d"))]
)
def test_trimmed_head(arch, method, adapter):
    """Half of the vocabulary is out of the drafter's reach; what it drafts lies in the other half."""
    pair = sorted_pair(arch)
    kept = list(range(0, pair.target.config.vocab_size, 2))
    steps = []
    for n in SOME_LENGTHS:
        drafter = {
            "sps": lambda n=n: SpeculativeSampling(pair, n),
            "kangaroo": lambda n=n: Kangaroo(pair, adapter(arch), 2, n, 0.0),
            "s2d": lambda n=n: SortedDraft(pair, thresholds=[0.2, 0.2], max_draft_tokens=n),
        }[method]()
        steps += assert_lossless(arch, trimmed(drafter, kept), third=n)
    assert {s.accepted > 0 for s in steps if s.drafted} == {False, True}


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["sps", "s2d", "mirror", "ragged"])
def test_a_target_padded_beyond_the_draft_models_embedding(method, temperature):
    """Sampled, or with such weights, a target says padding ids; a draft model without them must go on drafting."""
    pair, rng = padded_pair(), random.Random(5)
    target, embeddings = StagedModel(pair.target), pair.draft.get_input_embeddings().weight.shape[0]
    prompts = [random_prompt(rng, pair.vocab_size) for _ in range(6)]
    requests = [Request(prompt, SamplingParams(24, temperature), seed) for seed, prompt in enumerate(prompts)]
    if method == "ragged":
        answers = Engine(target, SpeculativeSampling(pair, 3), frozenset(), RaggedBatch(4)).generate(requests)
    else:
        drafter = {
            "sps": lambda: SpeculativeSampling(pair, 3),
            "s2d": lambda: SortedDraft(pair, thresholds=[0.2, 0.2], max_draft_tokens=3),
            "mirror": lambda: MirrorSD(pair, 3, kappa=2, acceptance="ratio", placement="inline"),
        }[method]()
        engine = Engine(target, drafter, frozenset())
        answers = [engine.answer(r.prompt, r.decoding, r.seed) for r in requests]
    said = {token for answer in answers for token in answer.tokens[:-1]}
    assert max(said) >= embeddings, "only an id that the draft model lacks proves anything"
    assert any(s.accepted for a in answers for s in a.steps)
    if temperature == 0:
        expected = [generate_with_transformers(pair.target, prompt, 24, stop_ids=()) for prompt in prompts]
        assert [answer.tokens for answer in answers] == expected


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("method", ["pld", "sps", "s2d", "kangaroo", "mirror"])
def test_stop_token_anywhere(method, adapter):
    pair = random_pair("llama")
    drafters = {
        "pld": lambda *_: PromptLookup(pair, 6, match="latest"),
        "sps": lambda *_: SpeculativeSampling(pair, 6),
        "s2d": lambda *_: SortedDraft(sorted_pair("llama"), thresholds=[0.2, 0.2]),
        "kangaroo": lambda *_: Kangaroo(pair, adapter("llama"), 2, 6, 0.0),
        "mirror": lambda *_: MirrorSD(pair, 6, kappa=1, placement="inline"),
    }
    assert_stops_anywhere(drafters[method])
