"""Passes of one width for every arm: answers in half precision are equal bit by bit, and nothing else changes."""

from __future__ import annotations

import copy
import random
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from specbench.config.spec import HF, METHOD
from specbench.decoding.cpu import native
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.model import fixed_shape
from specbench.decoding.model import graphs as passes
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import Request
from specbench.measure import numeric_noise as rounding
from specbench.measure.certify import Certifier
from specbench.measure.numeric_noise import forced_logits, model_noise, shape_noise, tree_logits
from specbench.measure.runner import prepare
from specbench.models.devices import place_weights
from specbench.system.errors import UserError
from tests.methods.test_graphs import DRAFTERS, SCHEDULERS, answers, expected, requests
from tests.support.conf import composed
from tests.support.decoding import random_prompt
from tests.support.kernel_passes import needs_kernels
from tests.support.lossless import plant_mask_off_by_one
from tests.support.methods import sorted_pair
from tests.support.models import random_model

WIDTH = 8


@pytest.fixture(autouse=True)
def _torchs_kernels(request, monkeypatch):
    """With kernels of our own no width is needed: it is tested without."""
    if "panels" not in request.fixturenames:
        monkeypatch.setattr(native, "_available", lambda: False)


@pytest.fixture(scope="module")
def half() -> SimpleNamespace:
    """A pair in bfloat16."""
    pair = sorted_pair("qwen3")
    models = {name: copy.deepcopy(getattr(pair, name)) for name in ("target", "draft")}
    for model in models.values():
        place_weights(model, torch.device("cpu"), torch.bfloat16)
    return type(pair)(**(vars(pair) | models | {"dtype": torch.bfloat16}))


@pytest.fixture(scope="module")
def panels(half) -> SimpleNamespace:
    """The same, with kernels of our own."""
    models = {name: copy.deepcopy(getattr(half, name)) for name in ("target", "draft")}
    staged, _ = (StagedModel(model) for model in models.values())
    return SimpleNamespace(**(vars(half) | models | {"staged": staged}))


def half_requests(pair) -> list[Request]:
    rng = random.Random(1)
    return [Request(random_prompt(rng, pair.vocab_size), SamplingParams(40)) for _ in range(7)]


def said(pair, drafter: Drafter, width: int | None) -> list[list[int]]:
    engine = Engine(StagedModel(pair.target, width=width), drafter, frozenset())
    return [answer.tokens for answer in engine.generate(half_requests(pair))]


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["recycling", *(pytest.param(m, marks=pytest.mark.slow) for m in ("pld", "sps", "kangaroo"))]
)
def test_half_precision_is_exact(half, adapter, method):
    drafter = DRAFTERS[method](half, adapter("qwen3"))
    assert said(half, drafter, WIDTH) == said(half, Drafter(), WIDTH)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sps", "kangaroo"])
def test_a_run_gives_all_arms_the_width(method):
    settings = (f"method={method}", "pair.device=cpu", "pair.dtype=bfloat16", "generate=false")
    cfg = composed("bench", *settings, "decoding.verify_width=8")
    OmegaConf.resolve(cfg)
    bench = prepare(cfg)
    assert bench.setup.target.width == 8
    asked = [Request([11, 23, 35, 47, 59] * 2, SamplingParams(12))]
    with closing(bench.setup.drafter):
        one, other = (bench.setup.answers(arm, asked)[0].tokens for arm in ("baseline", "method"))
    assert one == other


@pytest.mark.slow
def test_half_precision_is_not_exact_without(half):
    """Else the test above would prove nothing."""
    plain = said(half, Drafter(), None)
    assert any(said(half, DRAFTERS[method](half, None), None) != plain for method in ("sps", "recycling"))


@pytest.mark.slow
@needs_kernels
def test_with_kernels_of_our_own_half_precision_is_exact_without_a_width(panels):
    plain = said(panels, Drafter(), None)
    for method in ("sps", "recycling"):
        assert said(panels, DRAFTERS[method](panels, None), None) == plain
    samples = [(request.prompt, list(range(3, 20))) for request in half_requests(panels)[:2]]
    target = StagedModel(panels.target)
    assert shape_noise(target, samples) == 0
    assert torch.equal(tree_logits(target, *samples[0]), forced_logits(target, *samples[0], 1))


@pytest.mark.slow
@needs_kernels
def test_noise_between_ours_and_the_models_forward_is_bounded_by_the_models_own(panels, monkeypatch):
    samples = [(request.prompt, list(range(3, 20))) for request in half_requests(panels)[:2]]
    target = StagedModel(panels.target)
    noise = model_noise(target, samples)
    assert 0 < noise < 1
    plant_mask_off_by_one(monkeypatch)
    assert model_noise(target, samples) < 2 * rounding.NOT_ROUNDING * noise


@pytest.mark.slow
def test_what_other_programs_round_is_measured_in_float32_where_that_can_be_had(half, monkeypatch):
    samples = [(request.prompt, list(range(3, 20))) for request in half_requests(half)[:1]]
    target = StagedModel(half.target)
    noise = rounding.foreign_noise(target, samples)
    steps = forced_logits(target, *samples[0], 1).abs().max().item() * torch.finfo(torch.bfloat16).eps
    assert 0 < noise <= rounding.NOT_ROUNDING * steps * 1.1
    monkeypatch.setattr(rounding, "model_noise", lambda *given: 7.0)
    assert rounding.foreign_noise(target, samples) == noise
    half.target.is_quantized = True  # which no copy turns into floats
    try:
        assert rounding.foreign_noise(target, samples) == 7.0
    finally:
        del half.target.is_quantized
    monkeypatch.setattr(rounding, "free_memory", lambda: 1000)
    assert rounding.foreign_noise(target, samples) == 7.0


@pytest.mark.slow
@needs_kernels
def test_generate_is_judged_by_the_noise_between_its_forward_and_ours(panels):
    target, warm_up = StagedModel(panels.target), half_requests(panels)[:2]
    engine = Engine(target, Drafter(), frozenset())
    setup: Any = SimpleNamespace(
        target=target,
        reference="baseline",
        drafter=Drafter(),
        spec=SimpleNamespace(unit="question"),
        served=None,
        verify_tokens=8,
        answers=lambda arm, requests: engine.generate(requests),
    )
    certifier = Certifier(setup, SimpleNamespace(warm_up_requests=lambda tokens: warm_up))
    assert certifier.noise(METHOD) == 0
    assert certifier.noise(HF) > 0


@pytest.mark.slow
def test_rounding_is_that_of_the_answers(half):
    """Passes of up to eight tokens give the very same logits where all of them are eight wide."""
    samples = [(request.prompt, list(range(3, 20))) for request in half_requests(half)[:2]]
    assert shape_noise(StagedModel(half.target), samples) > 0
    assert shape_noise(StagedModel(half.target, width=WIDTH), samples) == 0


def test_no_pass_that_judges_is_wider_than_those_of_the_answers(half, monkeypatch):
    """A wider one may round otherwise, and the noise would excuse faults."""
    target, prompt, answer = StagedModel(half.target, width=3), [5, 9, 2], list(range(3, 20))
    rows: list[int] = []
    verify, forward = target.verify, half.target.forward

    def verified(pending, draft, *rest):
        rows.append(1 + draft.tokens.shape[1])
        return verify(pending, draft, *rest)

    def run(ids, **more):
        rows.extend([ids.shape[1]] if "past_key_values" in more else [])
        return forward(ids, **more)

    monkeypatch.setattr(target, "verify", verified)
    monkeypatch.setattr(half.target, "forward", run)
    for judge in (
        lambda: forced_logits(target, prompt, answer, max(rounding.BLOCKS)),
        lambda: shape_noise(target, [(prompt, answer)], True, max(rounding.BLOCKS)),
        lambda: rounding.batch_noise(target, [(prompt, answer)], 2),
    ):
        judge()
        assert max(rows) == 3
        rows.clear()


@pytest.mark.slow
def test_nodes_of_trees_are_right_but_for_rounding(half):
    """They lie at other entries than the tokens of a chain, so that one width does not make them equal bit by bit."""
    samples = [(request.prompt, list(range(3, 20))) for request in half_requests(half)[:2]]
    target = StagedModel(half.target, width=WIDTH)
    assert 0 < shape_noise(target, samples, trees=True) <= 2 * shape_noise(StagedModel(half.target), samples)
    exact = StagedModel(sorted_pair("qwen3").target)
    for prompt, answer in samples:
        torch.testing.assert_close(
            tree_logits(exact, prompt, answer), forced_logits(exact, prompt, answer, 1)
        )


@needs_kernels
def test_no_node_of_a_tree_rounds_on_our_own_kernels(panels, monkeypatch):
    """So no difference is excused there; torch's kernels, and passes too wide for ours, keep an allowance."""
    target, samples = panels.staged, [(list(range(3, 20)), list(range(3, 20)))]
    assert shape_noise(target, samples, widest=native.MOST_TOKENS) == 0
    assert shape_noise(target, samples, widest=native.MOST_TOKENS + 1) > 0, (
        "also a chain's, if samples are short"
    )
    assert shape_noise(target, samples, trees=True, widest=30) == 0
    assert shape_noise(target, samples, trees=True, widest=native.MOST_TOKENS + 1) > 0
    assert shape_noise(target, samples, trees=True, widest=30, rows=8) > 0, "of a batch, all rows count"
    monkeypatch.setattr(StagedModel, "uses_torch", "for a reason")
    assert shape_noise(target, samples, trees=True, widest=30) > 0


@pytest.mark.slow
def test_a_token_rounds_alike_at_every_place_of_a_pass():
    """Three heads share keys: at width 11 the fused attention would take 32 of 33 queries together and one alone."""
    shape = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
    model = random_model("llama", 3, **shape, initializer_range=0.1, max_position_embeddings=512)
    place_weights(model, torch.device("cpu"), torch.bfloat16)
    target = StagedModel(model, width=11)
    assert target.width == 12
    assert StagedModel(model, width=10).width == 10
    ids = torch.randint(60, (290,), generator=torch.Generator().manual_seed(246)).tolist()
    single, *blocks = (forced_logits(target, ids[:246], ids[246:], n) for n in (1, 3, 10, 11))
    for block in blocks:
        assert torch.equal(block, single)


@pytest.mark.slow
def test_a_fault_in_verification_is_no_rounding(half, monkeypatch):
    """It must not widen the noise that it is judged by; bfloat16, where the model's own is widest."""
    samples = [(request.prompt, list(range(3, 20))) for request in half_requests(half)[:2]]
    target = StagedModel(half.target)
    noise = shape_noise(target, samples)
    with monkeypatch.context() as patch:
        patch.setattr(rounding, "NOT_ROUNDING", float("inf"))
        plant_mask_off_by_one(patch)
        assert shape_noise(target, samples) > 4 * noise
    plant_mask_off_by_one(monkeypatch)
    assert shape_noise(target, samples) < 2 * noise


@pytest.mark.one_in(5)
@pytest.mark.first_fast
@pytest.mark.parametrize("scheduler", [None, *SCHEDULERS])
@pytest.mark.parametrize("method", ["ar", "sps", "recycling", "kangaroo tree"])
def test_answers_stay_what_they_are(monkeypatch, adapter, method, scheduler):
    """Chains and trees, one after the other and in batches, in passes that are all equally wide."""
    widths, inner = set(), passes.EagerRunner.run

    def run(self, memory, key, function, *inputs):
        widths.add(inputs[0].shape[1])
        return inner(self, memory, key, function, *inputs)

    monkeypatch.setattr(passes.EagerRunner, "run", run)
    drafter = DRAFTERS[method](sorted_pair("llama"), adapter("llama"))
    made = None if scheduler is None else SCHEDULERS[scheduler]()
    assert answers("llama", drafter, 6, made, width=WIDTH) == expected("llama", 6)
    assert widths == {WIDTH}


@pytest.mark.parametrize("arch", ["opt", pytest.param("mistral", marks=pytest.mark.slow)])
def test_other_families(arch):
    assert answers(arch, DRAFTERS["sps"](sorted_pair(arch), None), 3, width=WIDTH) == expected(arch, 3)


@pytest.mark.slow
def test_what_is_padded_is_not_counted():
    pair = sorted_pair("llama")

    def steps(width: int | None) -> list[tuple]:
        engine = Engine(StagedModel(pair.target, width=width), DRAFTERS["sps"](pair, None), frozenset())
        given = engine.generate(requests("llama", 3))
        names = ("drafted", "accepted", "emitted", "depth", "draft_bytes", "target_bytes")
        return [tuple(getattr(step, name) for name in names) for answer in given for step in answer.steps]

    assert steps(WIDTH) == steps(None)


def test_drafts_that_are_longer_are_refused():
    pair = sorted_pair("llama")
    target = StagedModel(pair.target, width=4)
    with pytest.raises(
        UserError, match=r"verify_width is 4, .* up to 5: set decoding.verify_width=5 or more"
    ):
        Engine(target, DRAFTERS["sps"](pair, None), frozenset())
    Engine(target, DRAFTERS["sps"](pair, None), frozenset(), SCHEDULERS["ragged"]().__class__(3, 12))


@pytest.mark.parametrize("method", ["sps", "recycling"])
def test_a_pass_must_not_pad_over_its_own_tokens(monkeypatch, method):
    right, inner = expected("llama", 3), fixed_shape.materialize

    def shifted(ctx, cache, b, n, width):
        made = inner(ctx, cache, b, n, width)
        made.write_index = torch.cat([made.write_index[:n], made.write_index[n:] - 2])
        return made

    monkeypatch.setattr(fixed_shape, "materialize", shifted)
    engine = Engine(
        StagedModel(sorted_pair("llama").target, width=WIDTH),
        DRAFTERS[method](sorted_pair("llama"), None),
        frozenset(),
    )
    assert [answer.tokens for answer in engine.generate(requests("llama", 3))] != right
