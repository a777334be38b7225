"""Every drafter in every batch method: each row is its own sequential run."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from methods.ar import Autoregressive
from methods.eqspec import EqSpec
from methods.exspec import ExSpec
from methods.kangaroo import Kangaroo
from methods.pld import PromptLookup
from methods.ragged import RaggedBatch
from methods.s2d import SortedDraft
from methods.sps import SpeculativeSampling
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.kv_cache import KVCache
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.scheduler import Scheduler
from specbench.decoding.state import Request, SequenceState
from specbench.system.errors import UserError
from tests.methods import test_sampling
from tests.support.batches import (
    SIZES,
    assert_freed_places_are_filled_at_once,
    assert_lossless,
    assert_static_batches_wait_for_their_last_row,
    assert_the_seconds_of_all_rows_are_the_time_of_the_call,
    cases,
)
from tests.support.decoding import random_pair
from tests.support.distribution import SHAPE, p_value_in_a_batch
from tests.support.methods import saved_adapter, sorted_pair, trimmed
from tests.support.models import ARCHITECTURES, EVERY_ARCHITECTURE


def schedulers(batch_size: int) -> dict[str, Scheduler]:
    return {
        "ragged": RaggedBatch(batch_size),
        "eqspec": EqSpec(batch_size),
        "exspec": ExSpec(batch_size, window=10, slack=0.1, max_skipped_rounds=2),
        "exspec, never realigned": ExSpec(batch_size, window=12, slack=9.0),
    }


def drafters(arch: str, folder: str) -> dict[str, Drafter]:
    pair, sorted_ = random_pair(arch), sorted_pair(arch)
    saved_adapter(pair, folder)
    some = list(range(0, pair.vocab_size, 2))
    return {
        "none": Autoregressive(pair),
        "sps": SpeculativeSampling(pair, 4),
        "sps with a stop": SpeculativeSampling(pair, 6, 0.03),
        "sps, trimmed": trimmed(SpeculativeSampling(pair, 3), some),
        "pld": PromptLookup(pair, 5, match="latest"),  # the short random answers give it more to accept
        "kangaroo": Kangaroo(pair, folder, 2, 4, 0.03),
        "kangaroo, constant": trimmed(Kangaroo(pair, folder, 2, 3, 0.0), some),
        "s2d": SortedDraft(sorted_, thresholds=[0.03, 0.03], max_draft_tokens=4),
        "s2d, deep": SortedDraft(sorted_, thresholds=[0.9, 0.04], confidence_threshold=0.03),
    }


@pytest.mark.slow
@pytest.mark.one_in(5)
@pytest.mark.parametrize("arch", EVERY_ARCHITECTURE)
@pytest.mark.parametrize(
    "scheduler",
    [
        "exspec",
        *(pytest.param(s, marks=pytest.mark.slow) for s in ("ragged", "eqspec", "exspec, never realigned")),
    ],
)
def test_every_row_is_transformers_own_answer(arch, scheduler, tmp_path):
    requests, expected = cases(arch)
    target = StagedModel(random_pair(arch).target)
    turn = list(ARCHITECTURES).index(arch) + list(schedulers(1)).index(scheduler)
    for place, (name, drafter) in enumerate(drafters(arch, str(tmp_path)).items()):
        # Every drafter meets every architecture, and every scheduler on half of them; the two that matter most all.
        often = name in ("sps", "kangaroo")
        if not often and (turn + place) % 2:
            continue
        first = SIZES[(place + turn // 2 + list(ARCHITECTURES).index(arch)) % 4]
        for size in {first, 8} if often else {first}:
            engine = Engine(target, drafter, frozenset(), schedulers(size)[scheduler])
            steps = assert_lossless(engine, requests, expected)
            assert any(s.accepted > 0 for s in steps) == (name != "none"), (
                "a drafter whose drafts all fail proves little"
            )


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["mistral"])
@pytest.mark.parametrize("name", ["sps with a stop", "pld", "kangaroo", "s2d", "sps, trimmed"])
def test_a_sample_does_not_depend_on_who_shares_the_batch(arch, name, tmp_path):
    """The same seed gives the same answer alone, in any batch, and in any order."""
    requests = [Request(r.prompt, SamplingParams(12, 1.0), r.seed, r.stop_ids) for r in cases(arch)[0]]
    target, drafter = StagedModel(random_pair(arch).target), drafters(arch, str(tmp_path))[name]
    alone = [Engine(target, drafter, frozenset(), RaggedBatch(1)).generate([r])[0] for r in requests]
    shuffled = random.Random(0).sample(range(len(requests)), len(requests))
    for scheduler in (RaggedBatch(8), EqSpec(5), ExSpec(4, window=9)):
        answers = Engine(target, drafter, frozenset(), scheduler).generate([requests[i] for i in shuffled])
        assert [a.tokens for a in answers] == [alone[i].tokens for i in shuffled]
    assert any(s.accepted for a in alone for s in a.steps) or name == "pld", "chance seldom repeats itself"


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["sps", "sps with a stop", "sps, trimmed", "pld", "kangaroo", "s2d"])
def test_samples_follow_the_target(name, tmp_path):
    pair = random_pair("llama", **SHAPE)
    drafter = test_sampling.drafter(pair, name, str(tmp_path))
    assert p_value_in_a_batch(pair, drafter, RaggedBatch(32)) > 1e-3


def test_what_a_call_leaves_behind_serves_the_next():
    """Also in a drafter's own cache: longer and shorter requests, more and fewer of them; and after a failure."""
    pair, (requests, expected) = random_pair("llama"), cases("llama")
    drafter = SpeculativeSampling(pair, 3)
    engine = Engine(StagedModel(pair.target), drafter, frozenset(), ExSpec(3, window=6))
    by_length = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt))
    for some in (by_length[:2], by_length[-1:], by_length, by_length[2:4]):
        answers = engine.generate([requests[i] for i in some])
        assert [a.tokens for a in answers] == [expected[i] for i in some]
    engine = Engine(StagedModel(pair.target), drafter, frozenset(), ExSpec(3, window=6))
    real, drafter.open = drafter.open, lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.generate(requests)
    drafter.open = real
    assert [a.tokens for a in engine.generate(requests[:4])] == expected[:4]


def held(*lengths: int) -> list[SequenceState]:
    request = Request([1], SamplingParams(1))
    return [SequenceState(place, request, frozenset(), [0] * n) for place, n in enumerate(lengths)]


def test_exspec_takes_rows_of_one_length_if_half_of_them_ran_last():
    scheduler = ExSpec(2, window=6)
    assert scheduler.choose(held(9, 8, 7, 7)) == [0, 1] and not scheduler.stats["grouped"]
    assert scheduler.choose(held(9, 7, 8, 7)) == [1, 3] and scheduler.stats["grouped"]
    scheduler = ExSpec(2, window=6)
    scheduler.choose(held(9, 8, 7, 7))
    assert scheduler.choose(held(9, 8, 7, 7)) == [0, 1], "both of the group would have to be copied in"


def test_exspec_lets_younger_rows_overtake_one_only_so_often():
    scheduler = ExSpec(2, window=6, max_skipped_rounds=3)
    for _ in range(2):  # the second time with other rows in a new cache
        scheduler.layout(KVCache([torch.device("cpu")], 1, 1, 6, 16, torch.float32))
        scheduler.choose(held(9, 8, 7, 7))
        rounds = [scheduler.choose(held(9, 7, 8, 7)) for _ in range(5)]
        assert rounds == [[1, 3]] * 3 + [[0, 1]] * 2, "until the third row has run"


def test_exspec_without_a_group_runs_the_oldest_rows():
    rows = held(5, 6, 7, 8)
    rows.reverse()
    assert ExSpec(2, window=4).choose(rows) == [2, 3]


@pytest.mark.parametrize("scheduler", [RaggedBatch(4), ExSpec(4, window=6)], ids=["ragged", "exspec"])
def test_freed_places_are_filled_at_once(scheduler):
    assert_freed_places_are_filled_at_once(Autoregressive(random_pair("llama")), scheduler)


def test_static_batches_wait_for_their_last_row():
    assert_static_batches_wait_for_their_last_row(Autoregressive(random_pair("llama")), EqSpec(2))


def test_the_seconds_of_all_rows_are_the_time_of_the_call_alignment_included():
    drafter = SpeculativeSampling(random_pair("llama"), 3)
    steps = assert_the_seconds_of_all_rows_are_the_time_of_the_call(drafter, EqSpec(4))
    assert all(step.align_seconds > 0 for step in steps)


def test_a_draft_model_whose_logits_are_nan_ends_a_sampled_batch():
    pair = random_pair("llama")
    spoiled = copy.deepcopy(pair.draft)
    with torch.no_grad():
        spoiled.lm_head.weight[7] = float("nan")
    drafter = SpeculativeSampling(type(pair)(**(vars(pair) | {"draft": spoiled})), 3)
    engine = Engine(StagedModel(pair.target), drafter, frozenset(), RaggedBatch(2))
    with pytest.raises(UserError, match=r"NaN or inf.*pair\.dtype"):
        engine.generate([Request([3, 9, 27], SamplingParams(6, 1.0), seed) for seed in range(3)])
