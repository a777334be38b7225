"""Batches: every row is its own sequential run, whatever drafts, whoever shares the batch, however it lies."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
import torch

from specbench.decoding import acceptance
from specbench.decoding.drafter import Drafter, Needs
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.scheduler import Scheduler
from specbench.decoding.state import Batch, Request
from specbench.system.errors import UserError
from tests.support.batches import (
    REQUESTS,
    SIZES,
    Chaos,
    Static,
    assert_freed_places_are_filled_at_once,
    assert_lossless,
    assert_static_batches_wait_for_their_last_row,
    assert_the_seconds_of_all_rows_are_the_time_of_the_call,
    cases,
)
from tests.support.decoding import random_pair
from tests.support.distribution import SHAPE, p_value_in_a_batch
from tests.support.drafters import EarlyExit, ModelChain, ModelTree
from tests.support.models import EVERY_ARCHITECTURE

SCHEDULERS = {
    "ragged": Scheduler,
    "static": Static,
    "chaos": lambda size: Chaos(size, random.Random(size)),
}
DRAFTERS = {
    "none": lambda pair: Drafter(),
    "chain": lambda pair: ModelChain(pair.draft, 4),
    "chain with a stop": lambda pair: ModelChain(pair.draft, 6, 0.03),
    "early exit": lambda pair: EarlyExit(2, 4),
    "tree": lambda pair: ModelTree(pair.draft),
}


@pytest.mark.one_in(5)
@pytest.mark.first_fast
@pytest.mark.parametrize("arch", EVERY_ARCHITECTURE)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_row_is_transformers_own_answer(arch, scheduler):
    requests, expected = cases(arch)
    pair = random_pair(arch)
    target = StagedModel(pair.target)
    for place, (name, drafter) in enumerate(DRAFTERS.items()):
        size = SIZES[(place + list(SCHEDULERS).index(scheduler)) % 4]
        engine = Engine(target, drafter(pair), frozenset(), SCHEDULERS[scheduler](size))
        steps = assert_lossless(engine, requests, expected)
        assert any(s.accepted for s in steps) == (name != "none"), (
            "a drafter whose drafts all fail proves little"
        )


@pytest.mark.one_in(3)
@pytest.mark.first_fast
@pytest.mark.parametrize(
    "kind", [pytest.param("chain with a stop", marks=pytest.mark.slow), "early exit", "tree"]
)
def test_a_sample_does_not_depend_on_who_shares_the_batch(kind):
    """The same seed gives the same answer alone, in any batch, and in any order."""
    requests = [Request(r.prompt, SamplingParams(12, 1.0), r.seed, r.stop_ids) for r in cases("llama")[0]]
    pair = random_pair("llama")
    target, drafter = StagedModel(pair.target), DRAFTERS[kind](pair)
    alone = [Engine(target, drafter, frozenset(), Scheduler(1)).generate([r])[0] for r in requests]
    shuffled = random.Random(0).sample(range(REQUESTS), REQUESTS)
    for scheduler in (Scheduler(8), Static(5), Chaos(4, random.Random(1))):
        answers = Engine(target, drafter, frozenset(), scheduler).generate([requests[i] for i in shuffled])
        assert [a.tokens for a in answers] == [alone[i].tokens for i in shuffled]
    assert any(s.accepted for a in alone for s in a.steps), "chance seldom repeats itself"


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "kind",
    [
        "early exit",
        *(pytest.param(k, marks=pytest.mark.slow) for k in ("chain", "chain with a stop", "tree")),
    ],
)
def test_samples_follow_the_target(kind):
    pair = random_pair("llama", **SHAPE)
    drafter = {
        "chain": ModelChain(pair.draft, 3),
        "chain with a stop": ModelChain(pair.draft, 3, 0.5),
        "early exit": EarlyExit(1, 3),
        "tree": ModelTree(pair.draft),
    }[kind]
    assert p_value_in_a_batch(pair, drafter, Scheduler(32)) > 1e-3


@pytest.mark.slow
def test_a_residual_that_forgets_the_draft_is_found(monkeypatch):
    """With p in place of max(p - q, 0) the tokens that the draft model likes come too often."""
    monkeypatch.setattr(acceptance, "residual", lambda p, q: p)
    pair = random_pair("llama", **SHAPE)
    assert p_value_in_a_batch(pair, ModelChain(pair.draft, 3), Scheduler(32)) < 1e-6


def test_drafts_are_cut_to_the_budget_by_the_batch_size_alone():
    """So that what a row drafts, and with that what it says when sampling, does not depend on how many rows run."""
    pair = random_pair("llama")
    requests = cases("llama")[0]
    scheduler = Scheduler(4, token_budget=12)
    answers = Engine(StagedModel(pair.target), ModelChain(pair.draft, 6), frozenset(), scheduler).generate(
        requests[:2]
    )
    assert scheduler.longest_draft == 2
    assert max(s.drafted for a in answers for s in a.steps) == 2


def test_a_budget_of_one_token_a_row_is_autoregressive_decoding():
    pair, (requests, expected) = random_pair("llama"), cases("llama")
    scheduler = Scheduler(4, token_budget=7)
    answers = Engine(StagedModel(pair.target), ModelChain(pair.draft, 6), frozenset(), scheduler).generate(
        requests
    )
    assert [a.tokens for a in answers] == expected
    assert not any(s.drafted for a in answers for s in a.steps)
    with pytest.raises(UserError, match=r"token_budget .*\b4\b.*\b3\b"):
        Scheduler(4, token_budget=3)


def test_drafts_of_one_length_are_not_cut_to_a_budget():
    pair = random_pair("llama")
    drafter = ModelChain(pair.draft, 6)
    drafter.needs = replace(drafter.needs, any_length=False)
    Engine(StagedModel(pair.target), drafter, frozenset(), Scheduler(4, token_budget=28))
    with pytest.raises(UserError, match="ModelChain has drafts of one length.* token_budget"):
        Engine(StagedModel(pair.target), drafter, frozenset(), Scheduler(4, token_budget=27))


def test_what_a_call_leaves_behind_serves_the_next():
    """Longer and shorter requests, more and fewer of them, in the buffers of one engine; and after a failure."""
    pair, (requests, expected) = random_pair("llama"), cases("llama")
    drafter = ModelChain(pair.draft, 3)
    engine = Engine(StagedModel(pair.target), drafter, frozenset(), Chaos(3, random.Random(0)))
    by_length = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt))
    for some in (by_length[:2], by_length[-1:], by_length, by_length[2:4]):
        answers = engine.generate([requests[i] for i in some])
        assert [a.tokens for a in answers] == [expected[i] for i in some]
    engine = Engine(StagedModel(pair.target), drafter, frozenset(), Chaos(3, random.Random(0)))
    real, drafter.open = drafter.open, lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.generate(requests)
    drafter.open = real
    assert [a.tokens for a in engine.generate(requests[:4])] == expected[:4]


def test_freed_places_are_filled_at_once():
    assert_freed_places_are_filled_at_once(Drafter(), Scheduler(4))


def test_static_batches_wait_for_their_last_row():
    assert_static_batches_wait_for_their_last_row(Drafter(), Static(2))


def test_the_seconds_of_all_rows_are_the_time_of_the_call():
    drafter = ModelChain(random_pair("llama").draft, 3)
    steps = assert_the_seconds_of_all_rows_are_the_time_of_the_call(drafter, Static(4))
    assert not any(step.align_seconds for step in steps)


@pytest.mark.parametrize("stage", ["prefill", "round"])
def test_logits_that_are_nan_end_a_sampled_batch(stage, monkeypatch):
    """As with one sequence; no token is made up. The engine is as good as new for the next requests."""
    pair, (requests, _) = random_pair("llama"), cases("llama")
    requests = [Request(r.prompt, SamplingParams(6, 1.0), r.seed) for r in requests[:4]]
    engine = Engine(StagedModel(pair.target), ModelChain(pair.draft, 3), frozenset(), Scheduler(3))
    expected = [answer.tokens for answer in engine.generate(requests)]
    unembed, calls = engine.target.unembed, 0

    def overflowing(hidden):
        nonlocal calls
        logits, calls = unembed(hidden), calls + 1
        if (hidden.dim() == 3) == (stage == "round") and calls > 1:
            logits[-1] = float("nan")  # of one sequence
        return logits

    monkeypatch.setattr(engine.target, "unembed", overflowing)
    with pytest.raises(UserError, match=r"NaN or inf.*pair\.dtype"):
        engine.generate(requests)
    monkeypatch.undo()
    assert [answer.tokens for answer in engine.generate(requests)] == expected


def test_a_draft_model_whose_logits_are_nan_ends_a_sampled_batch():
    pair = random_pair("llama")
    spoiled = copy.deepcopy(pair.draft)
    with torch.no_grad():
        spoiled.lm_head.weight[7] = float("nan")
    drafter = ModelChain(spoiled, 3)
    engine = Engine(StagedModel(pair.target), drafter, frozenset(), Scheduler(2))
    with pytest.raises(UserError, match=r"NaN or inf.*pair\.dtype"):
        engine.generate([Request([3, 9, 27], SamplingParams(6, 1.0), seed) for seed in range(3)])


def test_what_cannot_be_decoded_is_refused_before_anything_runs():
    pair = random_pair("llama", max_position_embeddings=64)
    engine = Engine(StagedModel(pair.target), Drafter(), frozenset(), Scheduler(2))
    for requests, said in (
        ([Request([], SamplingParams(4))], "empty"),
        ([Request([1] * 60, SamplingParams(5))], "60 .*5 .*64"),
        ([Request([1], SamplingParams(0))], "max_new_tokens .*1.*0"),
        ([Request([1], SamplingParams(4)), Request([1], SamplingParams(4, 1.0))], "temperature"),
    ):
        with pytest.raises(UserError, match=said):
            engine.generate(requests)
    assert engine.generate([]) == []

    class Alone(Drafter):
        needs = Needs(batching=False)

    with pytest.raises(UserError, match="Alone .*batch"):
        Engine(StagedModel(pair.target), Alone(), frozenset(), Scheduler(2))


@pytest.mark.parametrize("lengths", [[5], [5, 5], [5, 3], [2, 7]])
@pytest.mark.parametrize("captured", [False, True])
def test_a_window_has_the_entries_of_each_sequence(lengths, captured):
    """Inside a captured function, too, where lengths are known on the device alone."""
    tokens, states = torch.arange(36).view(3, 12), torch.randn(3, 12, 2, 4)
    batch = Batch([], lengths, [1] * len(lengths), 1, tokens, SamplingParams(1), None)
    if captured:
        batch = batch.device_only(12, torch.tensor(lengths), tokens[: batch.size], None)
    for offset, n in ((0, 3), (-1, 1), (-3, 3), (-4, 5), (2, 1)):
        for buffer in (tokens, states):
            entries = [[max(length + offset + i, 0) for i in range(n)] for length in lengths]
            expected = [row[some] for row, some in zip(buffer, entries)]
            assert torch.equal(batch.window(buffer, offset, n), torch.stack(expected))


def test_how_long_a_draft_may_be_is_not_known_inside_a_captured_function():
    """It may differ from replay to replay."""
    tokens = torch.zeros(2, 12, dtype=torch.int64)
    batch = Batch([], [4, 6], [3, 5], 9, tokens, SamplingParams(1), None)
    assert batch.max_draft == 5
    with pytest.raises(ValueError, match="empty"):
        _ = batch.device_only(12, torch.tensor([4, 6]), tokens, None).max_draft
