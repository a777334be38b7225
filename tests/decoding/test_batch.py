"""Batches: every row is its own sequential run, whatever drafts, whoever shares the batch, however it lies."""

from __future__ import annotations

import copy
import random
import time
from functools import cache

import pytest
import torch

from methods.ar import Autoregressive
from methods.eqspec import EqSpec
from methods.exspec import ExSpec
from methods.kangaroo import Kangaroo
from methods.kangaroo.adapter import save_adapter
from methods.pld import PromptLookup
from methods.ragged import RaggedBatch
from methods.s2d import SortedDraft
from methods.sps import SpeculativeSampling
from specbench.decoding import acceptance
from specbench.decoding.batch import BatchEngine, Request, Row, Scheduler
from specbench.decoding.draft import Drafter
from specbench.decoding.sampling import Decoding
from specbench.decoding.target import Target
from specbench.errors import UserError
from tests.decoding import test_sampling
from tests.support.decoding import (
    STOP,
    generate_with_transformers,
    near_identity_adapter,
    random_pair,
    random_prompt,
    sorted_pair,
    trimmed,
)
from tests.support.models import ARCHITECTURES

SIZES = (1, 3, 8, 16)
REQUESTS = 12


def schedulers(batch_size: int) -> dict[str, Scheduler]:
    return {
        "ragged": RaggedBatch(batch_size),
        "eqspec": EqSpec(batch_size),
        "exspec": ExSpec(batch_size, window=10, slack=0.1, patience=2),
        "exspec, never realigned": ExSpec(batch_size, window=12, slack=9.0),
    }


def drafters(arch: str, folder: str) -> dict[str, Drafter]:
    pair, sorted_ = random_pair(arch), sorted_pair(arch)
    save_adapter(near_identity_adapter(pair), folder, torch.float32)
    some = list(range(0, pair.vocab_size, 2))
    return {
        "none": Autoregressive(pair),
        "sps": SpeculativeSampling(pair, 4),
        "sps with a stop": SpeculativeSampling(pair, 6, 0.03),
        "sps, trimmed": trimmed(SpeculativeSampling(pair, 3), some),
        "pld": PromptLookup(pair, 5),
        "kangaroo": Kangaroo(pair, folder, 2, 4, 0.03),
        "kangaroo, constant": trimmed(Kangaroo(pair, folder, 2, 3, 0.0), some),
        "s2d": SortedDraft(sorted_, thresholds=[0.03, 0.03], max_draft_tokens=4),
        "s2d, deep": SortedDraft(sorted_, thresholds=[0.9, 0.04], confidence_threshold=0.03),
    }


@cache
def cases(arch: str) -> tuple[list[Request], list[list[int]]]:
    """Requests of many lengths, caps and stop sets, and transformers' answers."""
    pair, rng = random_pair(arch), random.Random(arch)
    requests, answers = [], []
    for seed in range(REQUESTS):
        prompt = random_prompt(rng, pair.target.config.vocab_size)
        cap, stops = rng.choice((1, 2, 3, 9, 15, 15)), rng.choice(((STOP,), (STOP, 3), ()))
        requests.append(Request(prompt, Decoding(cap), seed, frozenset(stops)))
        answers.append(generate_with_transformers(pair.target, prompt, cap, stops))
    return requests, answers


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("scheduler", ["ragged", "eqspec", "exspec", "exspec, never realigned"])
def test_every_row_is_transformers_own_answer(arch, scheduler, tmp_path):
    requests, expected = cases(arch)
    target = Target(random_pair(arch).target)
    turn = list(ARCHITECTURES).index(arch) + list(schedulers(1)).index(scheduler)
    for place, (name, drafter) in enumerate(drafters(arch, str(tmp_path)).items()):
        # Every drafter meets every architecture, and every scheduler on half of them; the two that matter most all.
        often = name in ("sps", "kangaroo")
        if not often and (turn + place) % 2:
            continue
        first = SIZES[(place + turn // 2 + list(ARCHITECTURES).index(arch)) % 4]
        for size in {first, 8} if often else {first}:
            engine = BatchEngine(target, drafter, schedulers(size)[scheduler], frozenset())
            answers = engine.generate(requests)
            assert [a.tokens for a in answers] == expected, (name, size)
            for request, answer in zip(requests, answers):
                assert sum(s.emitted for s in answer.steps) + 1 == len(answer.tokens)
                assert all(s.accepted <= s.drafted and 1 <= s.rows <= size for s in answer.steps)
                ended = answer.tokens[-1] in request.stop_ids
                assert answer.finish == ("stop" if ended else "length")
            steps = [s for a in answers for s in a.steps]
            assert any(0 < s.accepted for s in steps) == (name != "none"), (
                "a drafter whose drafts all fail proves little"
            )


@pytest.mark.parametrize("arch", ["mistral"])
@pytest.mark.parametrize("name", ["sps with a stop", "pld", "kangaroo", "s2d", "sps, trimmed"])
def test_a_sample_does_not_depend_on_who_shares_the_batch(arch, name, tmp_path):
    """The same seed gives the same answer alone, in any batch, and in any order."""
    requests = [Request(r.prompt, Decoding(12, 1.0), r.seed, r.stop_ids) for r in cases(arch)[0]]
    target, drafter = Target(random_pair(arch).target), drafters(arch, str(tmp_path))[name]
    alone = [BatchEngine(target, drafter, RaggedBatch(1), frozenset()).generate([r])[0] for r in requests]
    shuffled = random.Random(0).sample(range(len(requests)), len(requests))
    for scheduler in (RaggedBatch(8), EqSpec(5), ExSpec(4, window=9)):
        answers = BatchEngine(target, drafter, scheduler, frozenset()).generate(
            [requests[i] for i in shuffled]
        )
        assert [a.tokens for a in answers] == [alone[i].tokens for i in shuffled]
    assert any(s.accepted for a in alone for s in a.steps) or name == "pld", "chance seldom repeats itself"


def p_value_in_a_batch(method: str, folder: str, scheduler: Scheduler) -> float:
    """How well tokens 1 and 2 behind the first follow the target, as `test_sampling` asks it of single sequences."""
    pair = random_pair("llama", **test_sampling.SHAPE)
    drafter = test_sampling.drafter(pair, method, folder)
    engine = BatchEngine(Target(pair.target), drafter, scheduler, frozenset())
    decoding = Decoding(test_sampling.LENGTH, 1.0)
    requests = [Request(test_sampling.PROMPT, decoding, seed) for seed in range(test_sampling.ANSWERS)]
    counts = test_sampling.counted([answer.tokens for answer in engine.generate(requests)])
    return test_sampling.p_value(counts, test_sampling.expected_counts(pair.target))


@pytest.mark.parametrize("name", ["sps", "sps with a stop", "sps, trimmed", "pld", "kangaroo", "s2d"])
def test_samples_follow_the_target(name, tmp_path):
    assert p_value_in_a_batch(name, str(tmp_path), RaggedBatch(32)) > 1e-3


def test_a_residual_that_forgets_the_draft_is_found(tmp_path, monkeypatch):
    """With p in place of max(p - q, 0) the tokens that the draft model likes come too often."""
    monkeypatch.setattr(acceptance, "residual", lambda p, q: p)
    assert p_value_in_a_batch("sps", str(tmp_path), RaggedBatch(32)) < 1e-6


def test_drafts_are_cut_to_the_budget_by_the_batch_size_alone():
    """So that what a row drafts, and with that what it says when sampling, does not depend on how many rows run."""
    pair = random_pair("llama")
    requests = cases("llama")[0]
    scheduler = RaggedBatch(4, token_budget=12)
    answers = BatchEngine(Target(pair.target), SpeculativeSampling(pair, 6), scheduler, frozenset()).generate(
        requests[:2]
    )
    assert scheduler.longest_draft == 2
    assert max(s.drafted for a in answers for s in a.steps) == 2


def test_a_budget_of_one_token_a_row_is_plain_decoding():
    pair, (requests, expected) = random_pair("llama"), cases("llama")
    scheduler = RaggedBatch(4, token_budget=7)
    answers = BatchEngine(Target(pair.target), SpeculativeSampling(pair, 6), scheduler, frozenset()).generate(
        requests
    )
    assert [a.tokens for a in answers] == expected
    assert not any(s.drafted for a in answers for s in a.steps)
    with pytest.raises(UserError, match="token_budget must be at least 4"):
        RaggedBatch(4, token_budget=3)


def test_what_a_call_leaves_behind_serves_the_next():
    """Longer and shorter requests, more and fewer of them, in the buffers of one engine; and after a failure."""
    pair, (requests, expected) = random_pair("llama"), cases("llama")
    drafter = SpeculativeSampling(pair, 3)
    engine = BatchEngine(Target(pair.target), drafter, ExSpec(3, window=6), frozenset())
    by_length = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt))
    for some in (by_length[:2], by_length[-1:], by_length, by_length[2:4]):
        answers = engine.generate([requests[i] for i in some])
        assert [a.tokens for a in answers] == [expected[i] for i in some]
    engine = BatchEngine(Target(pair.target), drafter, ExSpec(3, window=6), frozenset())
    real, drafter.open_rows = drafter.open_rows, lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.generate(requests)
    drafter.open_rows = real
    assert [a.tokens for a in engine.generate(requests)] == expected


def held(*lengths: int, waited: int = 0) -> list[Row]:
    request = Request([1], Decoding(1))
    return [Row(place, request, frozenset(), n, waited=waited) for place, n in enumerate(lengths)]


def test_exspec_takes_rows_of_one_length_if_half_of_them_ran_last():
    scheduler = ExSpec(2, window=6)
    assert scheduler.choose(held(9, 8, 7, 7)) == [0, 1] and not scheduler.grouped
    assert scheduler.choose(held(9, 7, 8, 7)) == [1, 3] and scheduler.grouped
    scheduler = ExSpec(2, window=6)
    scheduler.choose(held(9, 8, 7, 7))
    assert scheduler.choose(held(9, 8, 7, 7)) == [0, 1], "both of the group would have to be copied in"
    assert scheduler.choose(held(9, 7, 8, 7, waited=16)) == [0, 1], "a row was overtaken too often"


def test_exspec_without_a_group_runs_the_oldest_rows():
    rows = held(5, 6, 7, 8)
    rows.reverse()
    assert ExSpec(2, window=4).choose(rows) == [2, 3]


@pytest.mark.parametrize("scheduler", [RaggedBatch(4), ExSpec(4, window=6)], ids=["ragged", "exspec"])
def test_freed_places_are_filled_at_once(scheduler):
    pair = random_pair("llama")
    requests = [Request(p.prompt, Decoding(6 + 5 * (i % 3))) for i, p in enumerate(cases("llama")[0])]
    answers = BatchEngine(Target(pair.target), Autoregressive(pair), scheduler, frozenset()).generate(
        requests
    )
    rounds = sum(1 / s.rows for a in answers for s in a.steps)
    full = sum(1 / s.rows for a in answers for s in a.steps if s.rows == 4)
    assert rounds - full < 17, "only while the last rows end may places be empty"
    assert rounds == pytest.approx(round(rounds))


def test_static_batches_wait_for_their_last_row():
    pair = random_pair("llama")
    requests = [Request([3, 4, 5], Decoding(cap)) for cap in (2, 9, 4, 4)]
    answers = BatchEngine(Target(pair.target), Autoregressive(pair), EqSpec(2), frozenset()).generate(
        requests
    )
    assert [[s.rows for s in a.steps] for a in answers] == [[2], [2] + [1] * 7, [2] * 3, [2] * 3]


def test_the_seconds_of_all_rows_are_the_time_of_the_call():
    pair, (requests, _) = random_pair("llama"), cases("llama")
    engine = BatchEngine(Target(pair.target), SpeculativeSampling(pair, 3), EqSpec(4), frozenset())
    begun = time.perf_counter()
    answers = engine.generate(requests)
    spent = time.perf_counter() - begun
    assert 0.9 * spent < sum(answer.seconds for answer in answers) <= spent
    for answer in answers:
        parts = sum(
            s.draft_seconds + s.verify_seconds + s.other_seconds + s.align_seconds for s in answer.steps
        )
        assert answer.seconds == pytest.approx(answer.prefill_seconds + parts)


@pytest.mark.parametrize("where", ["prefill", "round"])
def test_logits_that_are_nan_end_a_sampled_batch(where, monkeypatch):
    """As with one sequence; no token is made up. The engine is as good as new for the next requests."""
    pair, (requests, _) = random_pair("llama"), cases("llama")
    requests = [Request(r.prompt, Decoding(6, 1.0), r.seed) for r in requests[:4]]
    engine = BatchEngine(Target(pair.target), SpeculativeSampling(pair, 3), RaggedBatch(3), frozenset())
    expected = [answer.tokens for answer in engine.generate(requests)]
    head, calls = engine.target.head, 0

    def overflowing(hidden):
        nonlocal calls
        logits, calls = head(hidden), calls + 1
        if (hidden.dim() == 3) == (where == "round") and calls > 1:
            logits[-1] = float("nan")  # of one sequence
        return logits

    monkeypatch.setattr(engine.target, "head", overflowing)
    with pytest.raises(UserError, match="a token cannot be drawn: .* are NaN or infinite"):
        engine.generate(requests)
    monkeypatch.undo()
    assert [answer.tokens for answer in engine.generate(requests)] == expected


def test_a_draft_model_whose_logits_are_nan_ends_a_sampled_batch():
    pair = random_pair("llama")
    spoiled = copy.deepcopy(pair.draft)
    spoiled.lm_head.weight.data[7] = float("nan")
    drafter = SpeculativeSampling(type(pair)(**(vars(pair) | {"draft": spoiled})), 3)
    engine = BatchEngine(Target(pair.target), drafter, RaggedBatch(2), frozenset())
    with pytest.raises(UserError, match="of the target or of the draft model are NaN"):
        engine.generate([Request([3, 9, 27], Decoding(6, 1.0), seed) for seed in range(3)])


def test_what_cannot_be_decoded_is_refused_before_anything_runs():
    pair = random_pair("llama", max_position_embeddings=64)
    engine = BatchEngine(Target(pair.target), Autoregressive(pair), RaggedBatch(2), frozenset())
    for requests, said in (
        ([Request([], Decoding(4))], "empty"),
        ([Request([1] * 60, Decoding(5))], "do not fit the context of 64"),
        ([Request([1], Decoding(0))], "max_new_tokens must be at least 1"),
        ([Request([1], Decoding(4)), Request([1], Decoding(4, 1.0))], "one temperature"),
    ):
        with pytest.raises(UserError, match=said):
            engine.generate(requests)
    assert engine.generate([]) == []

    class Alone(Drafter):
        def draft(self, context):
            raise AssertionError("never asked")

    with pytest.raises(UserError, match="Alone cannot batch"):
        BatchEngine(Target(pair.target), Alone(), RaggedBatch(2), frozenset())
