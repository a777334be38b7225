"""On a GPU, too, every method's greedy answer is the one of transformers' generate there, in fp32."""

from __future__ import annotations

import copy
import random
from contextlib import closing
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from methods.ar import Autoregressive
from methods.eqspec import EqSpec
from methods.exspec import ExSpec
from methods.kangaroo import Kangaroo
from methods.mirror_sd import MirrorSD
from methods.pld import PromptLookup
from methods.ragged import RaggedBatch
from methods.s2d import SortedDraft
from methods.sps import SpeculativeSampling
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.model import graphs as passes
from specbench.decoding.model.graphs import EagerRunner, GraphRunner
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import Draft, Request
from specbench.models.devices import place_weights
from tests.support.decoding import STOP, generate_with_transformers, random_prompt
from tests.support.drafters import EarlyExit, ModelChain, ModelTree
from tests.support.methods import sorted_pair
from tests.support.models import random_model

pytestmark = pytest.mark.cuda

DEVICE, NEW_TOKENS = "cuda", 24
METHODS = {
    "ar": lambda pair, adapter: Autoregressive(pair),
    "pld": lambda pair, adapter: PromptLookup(pair, 4),
    "sps": lambda pair, adapter: SpeculativeSampling(pair, 4),
    "sps with a stop": lambda pair, adapter: SpeculativeSampling(pair, 6, 0.3),
    "kangaroo": lambda pair, adapter: Kangaroo(pair, adapter, 2, 4, 0.3),
    "s2d": lambda pair, adapter: SortedDraft(pair, thresholds=[0.2, 0.2], max_draft_tokens=4),
    "mirror inline": lambda pair, adapter: MirrorSD(pair, 4, kappa=2, placement="inline"),
    "mirror thread": lambda pair, adapter: MirrorSD(pair, 4, kappa=2, placement="thread"),
    "tree": lambda pair, adapter: ModelTree(pair.draft),
}
SCHEDULERS = {"ragged": RaggedBatch, "eqspec": EqSpec, "exspec": ExSpec}
BATCHED = {
    "chain": lambda pair, adapter: ModelChain(pair.draft, 4),
    "early exit": lambda pair, adapter: EarlyExit(2, 4),
    **{name: METHODS[name] for name in ("pld", "sps", "sps with a stop", "kangaroo", "s2d")},
}


@pytest.fixture(scope="module")
def pair_on():
    """A pair of small random models on the GPU."""

    @cache
    def moved(arch: str) -> SimpleNamespace:
        pair = sorted_pair(arch)
        models = {name: copy.deepcopy(getattr(pair, name)).to(DEVICE) for name in ("target", "draft")}
        return type(pair)(**(vars(pair) | models | {"device": models["target"].device}))

    return moved


def prompts(pair) -> list[list[int]]:
    rng = random.Random(pair.name)
    return [random_prompt(rng, pair.vocab_size) for _ in range(8)]


@pytest.mark.parametrize("arch", ["llama", "qwen3", "mistral", "opt"])
@pytest.mark.parametrize("method", METHODS)
def test_an_answer_is_transformers_own(pair_on, adapter, arch, method):
    pair = pair_on(arch)
    drafter = METHODS[method](pair, adapter(arch))
    engine = Engine(StagedModel(pair.target), drafter, frozenset([STOP]))
    accepted = 0
    try:
        for prompt in prompts(pair):
            answer = engine.answer(prompt, SamplingParams(NEW_TOKENS))
            assert answer.tokens == generate_with_transformers(pair.target, prompt, NEW_TOKENS)
            accepted += sum(step.accepted for step in answer.steps)
    finally:
        drafter.close()
    assert (accepted > 0) == (method != "ar"), "a drafter whose drafts all fail proves little"


@pytest.mark.parametrize("arch", ["llama", "mistral"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("drafter", BATCHED)
def test_every_row_of_a_batch_is_transformers_own(pair_on, adapter, arch, scheduler, drafter):
    pair = pair_on(arch)
    engine = Engine(
        StagedModel(pair.target),
        BATCHED[drafter](pair, adapter(arch)),
        frozenset([STOP]),
        SCHEDULERS[scheduler](3),
    )
    answers = engine.generate([Request(prompt, SamplingParams(NEW_TOKENS)) for prompt in prompts(pair)])
    expected = [generate_with_transformers(pair.target, prompt, NEW_TOKENS) for prompt in prompts(pair)]
    assert [answer.tokens for answer in answers] == expected


@pytest.mark.parametrize("method", METHODS)
def test_without_graphs_an_answer_is_the_same(pair_on, adapter, monkeypatch, method):
    pair = pair_on("llama")
    found = []
    for graphs in (True, False):
        monkeypatch.setattr(passes, "DEFAULT", passes.Options(graphs=graphs))
        drafter = METHODS[method](pair, adapter("llama"))
        engine = Engine(StagedModel(pair.target), drafter, frozenset([STOP]))
        before = GraphRunner.captures_of_all
        with closing(drafter):
            found.append(
                [engine.answer(prompt, SamplingParams(NEW_TOKENS)).tokens for prompt in prompts(pair)]
            )
        assert isinstance(engine.target.runner, GraphRunner) == graphs
        assert not graphs or GraphRunner.captures_of_all > before
    assert found[0] == found[1]


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("arch", ["llama", "qwen3", "mistral", "opt"])
def test_a_replay_gives_what_its_operations_give(pair_on, monkeypatch, arch, compiles):
    """Bit by bit, but where it was compiled."""
    monkeypatch.setattr(passes, "DEFAULT", passes.Options(compile=compiles))
    target = StagedModel(pair_on(arch).target)
    cache, ids = target.new_cache(512), torch.arange(3, 13, device=DEVICE).unsqueeze(0)
    graphs, found, before = target.runner, [], GraphRunner.captures_of_all
    with torch.inference_mode():
        for runs in (graphs, graphs, EagerRunner()):
            target.runner = runs
            target.prefill(ids[:, :6], cache)
            found.append(target.verify(ids[:, 6:7], Draft(ids[:, 7:]), cache, 6))
    assert GraphRunner.captures_of_all == before + 1
    assert torch.equal(found[0], found[1]) and found[0].data_ptr() != found[1].data_ptr()
    torch.testing.assert_close(found[1], found[2], **({} if compiles else {"rtol": 0, "atol": 0}))


@pytest.mark.parametrize("arch", ["mixtral", "qwen3_moe"])
def test_experts_in_graphs_give_what_their_operations_give(arch):
    """Where nothing waits for the host, which is so in bfloat16 on compute capability 9.0 and above."""
    model = copy.deepcopy(random_model(arch, 0)).to(DEVICE, torch.bfloat16)
    target = StagedModel(model)
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("such experts wait for the host")
    graphs, before = target.runner, GraphRunner.captures_of_all
    cache, ids = target.new_cache(512), torch.arange(3, 13, device=DEVICE).unsqueeze(0)
    found = []
    with torch.inference_mode():
        for runs in (graphs, graphs, EagerRunner()):
            target.runner = runs
            target.prefill(ids[:, :6], cache)
            found.append(target.verify(ids[:, 6:7], Draft(ids[:, 7:]), cache, 6))
    assert GraphRunner.captures_of_all == before + 1
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_half_precision_is_exact_in_passes_of_one_width(pair_on):
    pair = pair_on("llama")
    models = {name: copy.deepcopy(getattr(pair, name)) for name in ("target", "draft")}
    for model in models.values():
        place_weights(model, model.device, torch.bfloat16)
    half = type(pair)(**(vars(pair) | models | {"dtype": torch.bfloat16}))
    target = StagedModel(half.target, width=8)
    found = [
        [
            Engine(target, drafter, frozenset()).answer(prompt, SamplingParams(40)).tokens
            for prompt in prompts(pair)
        ]
        for drafter in (Drafter(), SpeculativeSampling(half, 5), PromptLookup(half, 6))
    ]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("method", ["sps", "kangaroo"])
def test_a_seed_fixes_a_sampled_answer(pair_on, adapter, method):
    pair = pair_on("llama")
    engine = Engine(StagedModel(pair.target), METHODS[method](pair, adapter("llama")), frozenset())
    prompt = prompts(pair)[0]
    one, same, other = (
        engine.answer(prompt, SamplingParams(NEW_TOKENS, 1.0), seed=seed) for seed in (1, 1, 2)
    )
    assert one.tokens == same.tokens != other.tokens
