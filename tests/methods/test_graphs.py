"""Methods and schedulers with passes that are replayed, as graphs are: what is decoded stays what it was."""

from __future__ import annotations

import copy
import random
from contextlib import closing
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch._dynamo

from methods.ar import Autoregressive
from methods.eagle import Eagle, Eagle2
from methods.eagle3 import Eagle3
from methods.eagle3.checkpoint import save_eagle3
from methods.eagle3.train import fresh_model
from methods.eqspec import EqSpec
from methods.exspec import ExSpec
from methods.kangaroo import Kangaroo
from methods.kangaroo.tree import KangarooTree
from methods.lookahead import Lookahead
from methods.mirror_sd import MirrorSD
from methods.oracle import Oracle
from methods.pld import PromptLookup
from methods.ragged import RaggedBatch
from methods.recycling import TokenRecycling
from methods.s2d import SortedDraft
from methods.sps import SpeculativeSampling
from methods.sps_tree import DraftModelTree
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.model import fixed_shape
from specbench.decoding.model.graphs import compiled, is_within, uncaptured
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import Batch, Request
from tests.support.decoding import random_pair, random_prompt
from tests.support.graphs import PretendedRunner, Unguarded, pretend, replays_by_round, what_was_drafted
from tests.support.methods import drafts, saved_eagle, sorted_pair, trimmed

NEW_TOKENS = 20
DRAFTERS = {
    "ar": lambda pair, adapter: Autoregressive(pair),
    "pld": lambda pair, adapter: PromptLookup(pair, 4),
    "lookahead": lambda pair, adapter: Lookahead(pair, 3, 3, 2),
    "recycling": lambda pair, adapter: TokenRecycling(pair, 7),
    "sps": lambda pair, adapter: SpeculativeSampling(pair, 4),
    "sps with a stop": lambda pair, adapter: SpeculativeSampling(pair, 5, 0.1),
    "kangaroo": lambda pair, adapter: Kangaroo(pair, adapter, 2, 4, 0.05),
    "kangaroo tree": lambda pair, adapter: KangarooTree(pair, adapter, 2, 2, 3, 0.02),
    "s2d": lambda pair, adapter: SortedDraft(pair, thresholds=[0.2, 0.2], max_draft_tokens=4),
}
SCHEDULERS = {
    "ragged": lambda: RaggedBatch(3),
    "eqspec": lambda: EqSpec(3),
    "exspec": lambda: ExSpec(3, window=6, slack=0.1, max_skipped_rounds=2),
}


@cache
def requests(arch: str, count: int, temperature: float = 0.0) -> list[Request]:
    pair, rng = sorted_pair(arch), random.Random(arch)
    prompts = [random_prompt(rng, pair.vocab_size, 12) for _ in range(count)]
    return [Request(p, SamplingParams(NEW_TOKENS - i, temperature), i) for i, p in enumerate(prompts)]


@cache
def expected(arch: str, count: int, temperature: float = 0.0) -> list[list[int]]:
    """What autoregressive decoding says without graphs."""
    engine = Engine(StagedModel(sorted_pair(arch).target), Drafter(), frozenset())
    return [answer.tokens for answer in engine.generate(requests(arch, count, temperature))]


def answers(
    arch: str, drafter: Drafter, count: int, scheduler=None, width: int | None = None
) -> list[list[int]]:
    """What a drafter's answers are; some of its drafts must be accepted, and some not."""
    engine = Engine(StagedModel(sorted_pair(arch).target, width=width), drafter, frozenset(), scheduler)
    with closing(drafter):
        given = engine.generate(requests(arch, count))
    steps = [step for answer in given for step in answer.steps]
    drafted, accepted = (sum(getattr(step, name) for step in steps) for name in ("drafted", "accepted"))
    assert 0 < accepted < drafted or drafter.max_draft_tokens == 0
    return [answer.tokens for answer in given]


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda pair: SpeculativeSampling(pair, 5, 0.1),
        lambda pair: MirrorSD(pair, 3, kappa=2, placement="thread"),
    ],
    ids=["sps with a stop", "mirror in a thread"],
)
def test_settings_that_conformance_does_not_reach(monkeypatch, make):
    right = expected("llama", 3)
    made = pretend(monkeypatch)
    assert answers("llama", make(sorted_pair("llama")), 3) == right
    captures, replays = (sum(getattr(graphs, name) for graphs in made) for name in ("captures", "replays"))
    assert 0 < captures < replays


# Each drafter with three families and with each scheduler, but not with each pair of them. Gemma 3 has angles of two
# kinds, Kangaroo's adapter of one.
COVERING = [
    (arch, method, [*SCHEDULERS][(i + j) % len(SCHEDULERS)])
    for j, method in enumerate(DRAFTERS)
    for i, arch in enumerate(["mistral", "opt", "qwen3" if method.startswith("kangaroo") else "gemma3"])
]


@pytest.mark.one_in(8)
@pytest.mark.slow
@pytest.mark.parametrize(("arch", "method", "scheduler"), COVERING)
def test_batches_of_other_families(monkeypatch, adapter, arch, method, scheduler):
    right = expected(arch, 6)
    pretend(monkeypatch)
    drafter = DRAFTERS[method](sorted_pair(arch), arch != "gemma3" and adapter(arch))
    assert answers(arch, drafter, 6, SCHEDULERS[scheduler]()) == right


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["qwen3", "mistral", "opt", "gemma3"])
def test_other_families(monkeypatch, arch):
    right = expected(arch, 2)
    pretend(monkeypatch)
    assert answers(arch, DRAFTERS["sps"](sorted_pair(arch), None), 2) == right


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sps", "recycling"])
def test_the_same_again_captures_nothing(monkeypatch, method):
    made = pretend(monkeypatch)
    pair = sorted_pair("llama")
    engine = Engine(StagedModel(pair.target), DRAFTERS[method](pair, None), frozenset())
    captures = []
    for _ in range(2):
        engine.generate(requests("llama", 2))
        captures.append(sum(graphs.captures for graphs in made))
    assert captures[0] == captures[1]
    # Passes of 1 to 8 tokens, of as many reaches as two or three answers of 40 entries come by.
    assert 0 < captures[0] <= 3 * 8 * len(made)


@pytest.mark.slow
@pytest.mark.parametrize("other", [{"temperature": 0.5}, {"top_k": 2}, {"top_p": 0.4}], ids=str)
def test_another_distribution_is_another_pass(monkeypatch, other):
    """`specbench serve` answers requests of several with one engine."""
    pair, usual = sorted_pair("llama"), requests("llama", 2, 1.5)
    changed = [replace(one, decoding=replace(one.decoding, **other)) for one in usual]

    def sampled() -> list[list[int]]:
        engine = Engine(StagedModel(pair.target), DRAFTERS["sps"](pair, None), frozenset())
        return [engine.generate([request])[0].tokens for request in [*changed, *usual, *changed]]

    right = sampled()
    assert right[:2] != right[2:4]
    made = pretend(monkeypatch)
    assert sampled() == right and any(graphs.replays for graphs in made)


# -- whole drafts


@pytest.fixture(scope="session")
def eagle(tmp_path_factory) -> str:
    """The folder of EAGLE-1's drafting model for the random pair."""
    tree = [[0], [1], [0, 0], [2], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0]]
    return saved_eagle("llama", tmp_path_factory.mktemp("eagle"), tree=tree)


@pytest.fixture(scope="session")
def eagle3(tmp_path_factory) -> str:
    """The folder of an untrained drafting model of EAGLE-3 for the random pair, which mixes all depths it reads."""
    target, folder = StagedModel(random_pair("llama").target), tmp_path_factory.mktemp("eagle3")
    model = fresh_model(target, torch.arange(0, target.vocab_size, 2))
    torch.manual_seed(5)
    with torch.no_grad():
        model.fc.weight.normal_(std=0.1)
    save_eagle3(model, folder, torch.float32)
    return str(folder)


# What drafts without a look at the device, and the replays of a greedy round: the verification and, of a tree, its
# acceptance included.
WHOLE = {
    "sps": (DRAFTERS["sps"], 2),
    "sps, trimmed": (lambda pair, part: trimmed(SpeculativeSampling(pair, 4), [*range(0, 60, 2)]), 2),
    "sps tree": (lambda pair, part: DraftModelTree(pair, shape=[2, 2, 1]), 3),
    "eagle": (lambda pair, part: Eagle(pair, part("eagle")), 4),  # and the pairs of the tokens that stay
    "eagle2": (lambda pair, part: Eagle2(pair, part("eagle"), nodes=9, width=3, max_draft_tokens=4), 4),
    "eagle3": (lambda pair, part: Eagle3(pair, part("eagle3"), nodes=9, width=3, max_draft_tokens=4), 4),
    # A step is the adapter with the head, and the first layers. These take the pending token, too.
    "kangaroo": (lambda pair, part: Kangaroo(pair, part("kangaroo"), 2, 4, 0.0), 2 * 4 + 2),
    "kangaroo tree": (lambda pair, part: KangarooTree(pair, part("kangaroo"), 2, 2, 3, 0.0), 2 * 3 + 3),
}


@pytest.fixture
def parts(adapter, eagle, eagle3) -> dict[str, str]:
    """The folders of trained parts for the random pair."""
    return {"kangaroo": adapter("llama"), "eagle": eagle, "eagle3": eagle3}


def drafter_of(method: str, parts: dict[str, str], pair=None) -> Drafter:
    return WHOLE[method][0](pair or random_pair("llama"), parts.__getitem__)


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("method", WHOLE)
def test_drafts_are_those_without_graphs(monkeypatch, parts, method, temperature):
    pair = random_pair("llama")
    right = drafts(drafter_of(method, parts), pair, temperature)
    pretend(monkeypatch)
    found = drafts(drafter_of(method, parts), pair, temperature)
    assert len(found) == len(right) > 5
    for (tokens, probs), (own_tokens, own_probs) in zip(found, right, strict=True):
        assert tokens.tolist() == own_tokens.tolist()
        assert (probs is None) == (own_probs is None)
        if probs is not None:
            torch.testing.assert_close(probs, own_probs, rtol=1e-3, atol=1e-5)


@pytest.mark.one_in(4)
@pytest.mark.first_fast
@pytest.mark.parametrize("method", WHOLE)
def test_replays_of_a_round(monkeypatch, parts, method):
    counts = replays_by_round(monkeypatch, pretend(monkeypatch))
    drafter = drafter_of(method, parts)
    Engine(StagedModel(random_pair("llama").target), drafter, frozenset()).answer(
        [3, 9, 27], SamplingParams(30)
    )
    # Near the end of an answer drafts are shorter.
    assert len(counts) > 6 and {*counts[:4]} == {WHOLE[method][1]}


@pytest.mark.parametrize(("listens", "replays"), [(False, 1), (True, 2)])
def test_verification_is_cut_only_for_what_works_on_the_way(monkeypatch, listens, replays):
    class Tapping(PromptLookup):
        taps = (2,)
        if listens:

            def on_hidden(self, layer, hidden_states) -> None: ...

    counts = replays_by_round(monkeypatch, pretend(monkeypatch))
    pair = random_pair("llama")
    Engine(StagedModel(pair.target), Tapping(pair, 4), frozenset()).answer([3, 9, 27], SamplingParams(10))
    assert {*counts} == {replays}


class Both(PretendedRunner):
    """Runs each function as it is, and compiled as a whole: whatever breaks a graph of torch.compile raises."""

    def run(self, memory, key, function, *inputs):
        if is_within():
            return function(*inputs)
        torch._dynamo.reset()
        with uncaptured():
            own = [None if output is None else output.clone() for output in function(*inputs)]
            for one, other in zip(own, compiled(function, "eager")(*inputs), strict=True):
                torch.testing.assert_close(other, one)
        self.replays += 1
        return own


# Each takes some ten seconds: of those that share code, one.
@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(("method", "temperature"), [("sps", 0.9), ("eagle3", 0.0), ("kangaroo tree", 0.0)])
def test_whole_drafts_can_be_compiled(monkeypatch, parts, method, temperature):
    made, pair = pretend(monkeypatch, make=Both), copy.deepcopy(random_pair("llama"))
    for module in (*pair.target.modules(), *pair.draft.modules()):
        module._forward_hooks.clear()  # transformers' own, where a test has asked for all hidden states
    # One after the exit, or after the last that EAGLE-3 reads; all layers are alike.
    for model, layers in ((pair.target, 4 if method == "eagle3" else 3), (pair.draft, 1)):
        model.model.layers = model.model.layers[:layers]
        model.config.num_hidden_layers = layers
    drafter = drafter_of(method, parts, pair)
    engine = Engine(StagedModel(pair.target), drafter, frozenset())
    engine.answer([3, 9, 27], SamplingParams(7, temperature))
    assert sum(graphs.replays for graphs in made) > 3


def test_caches_grow_in_long_steps_where_the_draft_model_alone_is_captured(monkeypatch):
    """The target's weights may be quantised or spread, and a cache that grows drops the draft model's graphs."""
    pair = random_pair("llama")
    target = StagedModel(pair.target)
    made = pretend(monkeypatch)
    engine = Engine(target, SpeculativeSampling(pair, 4), frozenset())
    caches = set()
    for length in (10, 300):
        engine.answer([3] * length, SamplingParams(10))
        caches |= {id(cache) for cache in made[0]._captured}
    assert not target.fixed_shapes and len(caches) == 1


@pytest.mark.slow
def test_a_whole_draft_of_an_oracle(monkeypatch):
    """It proposes from what was foretold, which a replay looks up again."""
    pair, asked = random_pair("llama"), requests("llama", 3)
    right = expected("llama", 3)

    def run() -> list:
        oracle = Oracle(pair, {"_target_": "methods.sps.SpeculativeSampling"}, 0.7, max_draft_tokens=3)
        oracle.set_reference_answers([one.prompt for one in asked], [*right[:2], [1, 2, 3]])
        return Engine(StagedModel(pair.target), oracle, frozenset()).generate(asked)

    plain = run()
    pretend(monkeypatch)
    found = run()
    assert [answer.tokens for answer in found] == right
    assert what_was_drafted(found) == what_was_drafted(plain)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sps", "eagle2"])
def test_lengths_must_come_from_the_device(monkeypatch, parts, method):
    """A fault: what is captured goes on with the lengths of the first round."""
    pair, inner, first = random_pair("llama"), Batch.device_only, {}
    right = drafts(drafter_of(method, parts), pair, 0.0)
    pretend(monkeypatch)

    def stale(self, kv_bucket, known, *given):
        return inner(self, kv_bucket, first.setdefault(kv_bucket, known.clone()), *given)

    monkeypatch.setattr(Batch, "device_only", stale)
    found = drafts(drafter_of(method, parts), pair, 0.0)
    assert [tokens.tolist() for tokens, _ in found] != [tokens.tolist() for tokens, _ in right]


SAMPLED = {
    "pld": DRAFTERS["pld"],
    "recycling": DRAFTERS["recycling"],
    "sps": DRAFTERS["sps"],
    "sps tree": lambda pair, adapter: DraftModelTree(pair, shape=[2, 2, 1]),
    "s2d": DRAFTERS["s2d"],
}


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("scheduler", [None, "ragged"])
@pytest.mark.parametrize("method", SAMPLED)
def test_samples_are_those_without_graphs(monkeypatch, method, scheduler):
    """Also how many tokens of each draft are kept, which a graph of its own finds."""
    pair, asked = sorted_pair("llama"), requests("llama", 4, 0.9)

    def run() -> list:
        drafter = SAMPLED[method](pair, None)
        own = SCHEDULERS[scheduler]() if scheduler else None
        return Engine(StagedModel(pair.target), drafter, frozenset(), own).generate(asked)

    right = run()
    assert sum(step.accepted for answer in right for step in answer.steps) > 0
    if method in ("pld", "recycling"):
        assert [answer.tokens for answer in right] == expected("llama", 4, 0.9)
    made = pretend(monkeypatch)
    found = run()
    assert [answer.tokens for answer in found] == [answer.tokens for answer in right]
    assert what_was_drafted(found) == what_was_drafted(right)
    assert any("accept" in str(key) for graphs in made for keys in graphs._captured.values() for key in keys)


# -- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_a_drafter_keeps_must_not_be_overwritten(monkeypatch, adapter):
    """Kangaroo keeps the exit states of its passes until the draft is verified."""
    right = expected("llama", 3)
    pretend(monkeypatch, make=Unguarded)
    drafter = DRAFTERS["kangaroo"](sorted_pair("llama"), adapter("llama"))
    engine = Engine(StagedModel(sorted_pair("llama").target), drafter, frozenset())
    assert [answer.tokens for answer in engine.generate(requests("llama", 3))] != right


@pytest.mark.first_fast
@pytest.mark.parametrize("method", ["ar", "sps"])
def test_entries_behind_a_token_must_be_masked(monkeypatch, method):
    right = expected("llama", 3)
    pretend(monkeypatch)
    inner = fixed_shape.materialize

    def one_more(*given):
        ctx = inner(*given)
        ctx.kv_positions = ctx.kv_positions - 1
        return ctx

    monkeypatch.setattr(fixed_shape, "materialize", one_more)
    drafter = DRAFTERS[method](sorted_pair("llama"), None)
    engine = Engine(StagedModel(sorted_pair("llama").target), drafter, frozenset())
    assert [answer.tokens for answer in engine.generate(requests("llama", 3))] != right


@pytest.mark.slow
def test_entries_behind_the_last_one_must_be_masked_in_batches(monkeypatch):
    right = expected("llama", 6)
    pretend(monkeypatch)
    monkeypatch.setattr(fixed_shape, "EMPTY", 0)
    drafter = DRAFTERS["sps"](sorted_pair("llama"), None)
    engine = Engine(StagedModel(sorted_pair("llama").target), drafter, frozenset(), RaggedBatch(3))
    assert [answer.tokens for answer in engine.generate(requests("llama", 6))] != right
