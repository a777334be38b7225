"""Every method's greedy answer is transformers' own, token by token, on five architectures in fp32."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from methods.ar import Autoregressive
from methods.kangaroo import Kangaroo
from methods.kangaroo.adapter import save_adapter
from methods.mirror_sd import MirrorSD
from methods.pld import PromptLookup
from methods.ragged import RaggedBatch
from methods.s2d import SortedDraft
from methods.sps import SpeculativeSampling
from specbench.decoding.batch import BatchEngine, Request
from specbench.decoding.engine import Engine
from specbench.decoding.sampling import Decoding
from specbench.decoding.target import Target
from tests.support.decoding import (
    STOP,
    Oracle,
    generate_with_transformers,
    near_identity_adapter,
    padded_pair,
    random_pair,
    random_prompt,
    sorted_pair,
    trimmed,
)
from tests.support.models import ARCHITECTURES

# Caps and stop ids: answers that end by either, and some that nothing ends early.
ENDS = (
    (1, (STOP,)),
    (2, (STOP,)),
    (3, (STOP,)),
    (24, (STOP,)),
    (16, (STOP, 3)),
    (20, ()),
    (32, ()),
    (20, ()),
)
LENGTHS, SOME_LENGTHS = range(1, 9), (1, 3, 8)  # one for each third of the cases
ETAS = (0.0, 0.6, 1.01)


@cache
def cases(arch: str) -> list[tuple[list[int], int, tuple[int, ...], list[int]]]:
    """(prompt, cap, stop ids, transformers' answer), computed once per architecture."""
    pair, rng = random_pair(arch), random.Random(arch)
    prompts = [(random_prompt(rng, pair.target.config.vocab_size), *end) for end in ENDS]
    return [(*case, generate_with_transformers(pair.target, *case)) for case in prompts]


def assert_lossless(arch: str, drafter, third: int | None = None) -> list:
    """Runs every case, or every third from the given one on; returns all steps."""
    engine = Engine(Target(random_pair(arch).target), drafter, frozenset())
    steps = []
    chosen = cases(arch) if third is None else cases(arch)[third % 3 :: 3]
    for prompt, cap, stop_ids, expected in chosen:
        engine.stop_ids = frozenset(stop_ids)
        answer = engine.generate(prompt, Decoding(cap))
        assert answer.tokens == expected
        assert sum(s.emitted for s in answer.steps) + 1 == len(expected)
        assert answer.finish == ("stop" if expected[-1] in stop_ids else "length")
        steps += answer.steps
    return steps


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    folders = {}
    for arch in ARCHITECTURES:
        folders[arch] = str(tmp_path_factory.mktemp(arch))
        save_adapter(near_identity_adapter(random_pair(arch)), folders[arch], torch.float32)
    return folders


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_plain_decoding(arch):
    steps = assert_lossless(arch, Autoregressive(random_pair(arch)))
    assert {(s.drafted, s.emitted) for s in steps} == {(0, 1)}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_prompt_lookup(arch):
    steps = [
        s
        for n in LENGTHS
        for s in assert_lossless(arch, PromptLookup(random_pair(arch), n, max_ngram=2), third=n)
    ]
    assert max(s.drafted for s in steps) >= 6
    assert any(0 < s.accepted for s in steps)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("threshold", [0.0, 0.4])
def test_draft_model(arch, threshold):
    accepted = []
    for n in LENGTHS if threshold == 0 else SOME_LENGTHS:
        steps = assert_lossless(arch, SpeculativeSampling(random_pair(arch), n, threshold), third=n)
        accepted += [s.accepted / s.drafted for s in steps if s.drafted]
    # The test is worth something only if rounds of every kind took place.
    assert 0 in accepted and 1 in accepted
    if threshold == 0:
        assert any(0 < a < 1 for a in accepted)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_target_as_its_own_draft_is_always_accepted(arch):
    pair = random_pair(arch)
    twin = SpeculativeSampling(type(pair)(**(vars(pair) | {"draft": pair.target})), 5)
    steps = assert_lossless(arch, twin)
    # Only a stop token inside the draft, which ends the round without a token of the target, leaves some over.
    assert all(s.accepted == s.drafted or s.emitted == s.accepted for s in steps)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("eta", ETAS)
def test_kangaroo(arch, eta, adapters):
    accepted = []
    for gamma in LENGTHS:
        steps = assert_lossless(arch, Kangaroo(random_pair(arch), adapters[arch], 2, gamma, eta), third=gamma)
        accepted += [s.accepted / s.drafted for s in steps if s.drafted]
    assert 0 in accepted and 1 in accepted
    if eta == 0:
        assert any(0 < a < 1 for a in accepted)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("exit_layer", [1, 3])
def test_kangaroo_at_other_exits(arch, exit_layer, adapters):
    assert_lossless(arch, Kangaroo(random_pair(arch), adapters[arch], exit_layer, 4, 0.5))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("threshold", [0.0, 0.2, 1.01])
def test_sorted_draft(arch, threshold):
    accepted, exits = [], set()
    for n in LENGTHS if threshold == 0.2 else SOME_LENGTHS:
        drafter = SortedDraft(sorted_pair(arch), thresholds=[threshold, threshold], max_draft_tokens=n)
        steps = assert_lossless(arch, drafter, third=n)
        accepted += [s.accepted / s.drafted for s in steps if s.drafted]
        exits |= {layers for s in steps for layers in s.exits}
    assert 0 in accepted and 1 in accepted
    deepest = sorted_pair(arch).draft.config.num_hidden_layers
    assert exits == {0.0: {1}, 0.2: {1, 2, deepest}, 1.01: {deepest}}[threshold]


@pytest.mark.parametrize(
    ("arch", "candidates"),
    [*((arch, "exit") for arch in ARCHITECTURES), ("llama", "draft"), ("mistral", "both")],
)
def test_mirror(arch, candidates):
    accepted, hits = [], set()
    for n in SOME_LENGTHS:
        drafter = MirrorSD(random_pair(arch), n, kappa=2, candidates=candidates, placement="inline")
        steps = assert_lossless(arch, drafter, third=n)
        accepted += [s.accepted / s.drafted for s in steps if s.drafted]
        hits |= {s.hit for s in steps}
    assert 0 in accepted and 1 in accepted
    assert hits == {None, True, False}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("method", ["sps", "kangaroo", "s2d"])
def test_trimmed_head(arch, method, adapters):
    """Half of the vocabulary is out of the drafter's reach; what it drafts lies in the other half."""
    pair = sorted_pair(arch)
    kept = list(range(0, pair.target.config.vocab_size, 2))
    steps = []
    for n in SOME_LENGTHS:
        drafter = {
            "sps": lambda n=n: SpeculativeSampling(pair, n),
            "kangaroo": lambda n=n: Kangaroo(pair, adapters[arch], 2, n, 0.0),
            "s2d": lambda n=n: SortedDraft(pair, thresholds=[0.2, 0.2], max_draft_tokens=n),
        }[method]()
        steps += assert_lossless(arch, trimmed(drafter, kept), third=n)
    accepted = [s.accepted / s.drafted for s in steps if s.drafted]
    assert 0 in accepted and any(a > 0 for a in accepted)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["sps", "s2d", "mirror", "ragged"])
def test_a_target_padded_beyond_the_draft_models_embedding(method, temperature):
    """Sampled, or with such weights, a target says padding ids; a draft model without them must go on drafting."""
    pair, rng = padded_pair(), random.Random(5)
    target, embeddings = Target(pair.target), pair.draft.get_input_embeddings().weight.shape[0]
    prompts = [random_prompt(rng, pair.vocab_size) for _ in range(6)]
    requests = [Request(prompt, Decoding(24, temperature), seed) for seed, prompt in enumerate(prompts)]
    if method == "ragged":
        answers = BatchEngine(target, SpeculativeSampling(pair, 3), RaggedBatch(4), frozenset()).generate(
            requests
        )
    else:
        drafter = {
            "sps": lambda: SpeculativeSampling(pair, 3),
            "s2d": lambda: SortedDraft(pair, thresholds=[0.2, 0.2], max_draft_tokens=3),
            "mirror": lambda: MirrorSD(pair, 3, kappa=2, acceptance="ratio", placement="inline"),
        }[method]()
        engine = Engine(target, drafter, frozenset())
        answers = [engine.generate(r.prompt, r.decoding, r.seed) for r in requests]
    said = {token for answer in answers for token in answer.tokens[:-1]}
    assert max(said) >= embeddings, "only an id that the draft model lacks proves anything"
    assert any(s.accepted for a in answers for s in a.steps)
    if temperature == 0:
        expected = [generate_with_transformers(pair.target, prompt, 24, stop_ids=()) for prompt in prompts]
        assert [answer.tokens for answer in answers] == expected


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_any_acceptance_pattern(arch, tree):
    """A drafter that is right and wrong at random leaves the answer as it is, for chains and for trees."""
    target = Target(random_pair(arch).target)
    accepted = set()
    for seed, error in enumerate([0.0, 0.1, 0.3, 1.0]):
        for prompt, cap, stop_ids, expected in cases(arch):
            oracle = Oracle(len(prompt), expected, target.vocab_size, seed, error, longest=8, tree=tree)
            answer = Engine(target, oracle, frozenset(stop_ids)).generate(prompt, Decoding(cap))
            assert answer.tokens == expected
            accepted |= {s.accepted for s in answer.steps}
    assert {0, 1, 2, 3} <= accepted and max(accepted) >= 6


@cache
def free_answers() -> list[tuple[list[int], list[int]]]:
    """(prompt, what transformers says where nothing stops it)."""
    pair, rng = random_pair("llama"), random.Random(3)
    prompts = [random_prompt(rng, pair.vocab_size) for _ in range(3)]
    # A text that goes on repeats itself: prompt lookup can draft the stop token, too.
    prompts[2] += generate_with_transformers(pair.target, prompts[2], 60, stop_ids=())
    return [(prompt, generate_with_transformers(pair.target, prompt, 18, stop_ids=())) for prompt in prompts]


@pytest.mark.parametrize("method", ["pld", "sps", "s2d", "kangaroo", "mirror", "oracle", "tree"])
def test_stop_token_anywhere(method, adapters):
    """As first token, inside a draft, as bonus token, on the very cap: the answer ends with it and nothing follows."""
    pair = random_pair("llama")
    target = Target(pair.target)
    places = set()
    for turn, (prompt, free) in enumerate(free_answers()):
        drafter = {
            "pld": lambda: PromptLookup(pair, 6),
            "sps": lambda: SpeculativeSampling(pair, 6),
            "s2d": lambda: SortedDraft(sorted_pair("llama"), thresholds=[0.2, 0.2]),
            "kangaroo": lambda: Kangaroo(pair, adapters["llama"], 2, 6, 0.0),
            "mirror": lambda: MirrorSD(pair, 6, kappa=1, placement="inline"),
            "oracle": lambda p=prompt, f=free: Oracle(len(p), f, target.vocab_size, 0, 0.05, 8, False),
            "tree": lambda p=prompt, f=free: Oracle(len(p), f, target.vocab_size, 0, 0.05, 8, True),
        }[method]()
        engine = Engine(target, drafter, frozenset())
        for number, stop in enumerate(dict.fromkeys(free)):
            cut = free.index(stop) + 1
            cap = (cut, cut + 1, 24)[(turn + number) % 3]  # each place meets each cap on another prompt
            engine.stop_ids = frozenset([stop])
            answer = engine.generate(prompt, Decoding(cap))
            assert answer.tokens == free[:cut]
            assert answer.finish == "stop"
            last = answer.steps[-1] if answer.steps else None
            where = "first" if last is None else "bonus" if last.emitted > last.accepted else "draft"
            places.add((where, cap == cut))
    # A draft leaves the last place before the cap to the target alone.
    assert places == {("first", True), ("first", False), ("draft", False), ("bonus", True), ("bonus", False)}
