"""Runs of batch methods on a small saved pair: pools, certificates against batch-1 decoding, planted faults."""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import time
from types import SimpleNamespace

import pytest
import torch

from methods.common.aligned_layout import AlignedLayout
from specbench.decoding.engine import exhaust
from specbench.decoding.kv_cache import KVCache
from specbench.decoding.kv_layout import RaggedLayout
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import Request
from specbench.measure import runner
from specbench.measure.arms import hf_generate_arm
from specbench.measure.records import run_folder as store
from specbench.system.files import read_json
from tests.support.decoding import random_pair
from tests.support.messages import says
from tests.support.runs import CATEGORIES, measured, start

pytestmark = pytest.mark.slow


def test_a_batch_of_one_is_held_against_the_baseline_of_one(workplace, tmp_path):
    settings = ["batch_size=1", "repeats=1", "generate=true"]
    code, summary, records = measured(workplace, "ragged", tmp_path, *settings)
    assert code == 0 and summary["equivalence"]["exact"] == len(CATEGORIES) + 2
    assert {name for r in records for t in r["turns"] for name in t["arms"]} == {
        "baseline",
        "method",
        "hf_generate",
    }
    assert summary["baseline"]["single_tokens_per_second"] == summary["baseline"]["tokens_per_second"]


def test_padding_never_pushes_a_row_beyond_the_context():
    sizes = []

    class Model:
        generation_config = None

        def get_experts_implementation(self):
            return {}

        def generate(self, ids, **_):
            sizes.append(tuple(ids.shape))
            return torch.cat([ids, torch.full((len(ids), 1), 9)], dim=1)

    pair = SimpleNamespace(
        target=Model(), stop_ids=frozenset([9]), device=torch.device("cpu"), context_length=100
    )
    requests = [
        Request([1] * n, SamplingParams(cap)) for n, cap in ((50, 50), (10, 50), (10, 60), (10, 60), (90, 10))
    ]
    answers = exhaust(hf_generate_arm(pair, 2)(requests))
    assert sizes == [(2, 50), (2, 10), (1, 90)] and [a.tokens for a in answers] == [[9]] * 5


def test_the_seconds_of_a_batch_of_generate_are_shared(monkeypatch):
    """Counted for each sequence, generate would be a baseline that is easily beaten."""
    pair = random_pair("llama")
    monkeypatch.setattr(pair, "stop_ids", frozenset())
    requests, begun = [Request([3, 9, 27], SamplingParams(48))] * 3, time.perf_counter()
    answers = exhaust(hf_generate_arm(pair, 3)(requests))
    passed = time.perf_counter() - begun
    assert 0.5 * passed < sum(answer.seconds for answer in answers) <= passed


def test_what_a_batch_of_generate_leaves_over_is_timed_as_its_batches(monkeypatch):
    """The prefill and the rounds of one request alone would count as those of all."""
    pair = random_pair("llama")
    monkeypatch.setattr(pair, "stop_ids", frozenset())
    for batch_size, timed in ((2, [False] * 3), (1, [True] * 3)):
        answers = exhaust(hf_generate_arm(pair, batch_size)([Request([3, 9, 27], SamplingParams(4))] * 3))
        assert [answer.prefill_seconds is not None for answer in answers] == timed
        assert [bool(answer.steps) for answer in answers] == timed


def test_generate_ends_at_any_stop_token(monkeypatch):
    """Beyond it, its time would count and its tokens would not."""
    pair, passes = random_pair("llama"), []
    monkeypatch.setattr(pair, "stop_ids", frozenset())
    [whole] = exhaust(hf_generate_arm(pair, 1)([Request([3, 9, 27], SamplingParams(24))]))
    end = max(whole.tokens[:12])
    never = next(token for token in range(end) if token not in whole.tokens)
    monkeypatch.setattr(pair, "stop_ids", frozenset([never, end]))
    forward = pair.target.forward
    monkeypatch.setattr(pair.target, "forward", lambda *a, **more: passes.append(1) or forward(*a, **more))
    [answer] = exhaust(hf_generate_arm(pair, 1)([Request([3, 9, 27], SamplingParams(24))]))
    assert answer.tokens == whole.tokens[: whole.tokens.index(end) + 1]
    assert len(passes) == len(answer.tokens)


def test_generate_keeps_to_the_cap_of_each_request(monkeypatch):
    pair = random_pair("llama")
    monkeypatch.setattr(pair, "stop_ids", frozenset())
    requests = [Request([3, 9, 27], SamplingParams(n)) for n in (4, 8)]
    assert [len(one.tokens) for one in exhaust(hf_generate_arm(pair, 2)(requests))] == [4, 8]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("method", ["ar_batch", "eqspec", "exspec", "ragged"])
def test_a_run(workplace, tmp_path, method):
    settings = ["batch_size=3", "pool=4", "repeats=2", "generate=true"]
    code, summary, records = measured(workplace, method, tmp_path, *settings)
    assert code == 0 and summary["status"] == "complete"
    assert summary["drafter"] == ("none" if method == "ar_batch" else "sps")
    counts = [summary["equivalence"][name] for name in ("answers", "exact", "tie", "violation")]
    assert counts == [len(CATEGORIES) + 2, len(CATEGORIES) + 2, 0, 0]
    assert sorted((r["repeat"], r["question_id"]) for r in records) == [
        (repeat, number) for repeat in (0, 1) for number in range(1, len(CATEGORIES) + 1)
    ]
    assert summary["slice_seconds"] == 0.05 and summary["repeats"] == 2
    for turn in (t for r in records for t in r["turns"]):
        said = {name: [g["tokens"] for g in repeats] for name, repeats in turn["arms"].items()}
        assert len(said["single"]) == len(said["method"]) == len(said["baseline"]) == 1
        assert {tuple(tokens) for answers in said.values() for tokens in answers} == {
            tuple(said["single"][0])
        }
    together = {
        name: max(
            max(t["arms"][name][0]["steps"]["sequences"], default=1) for r in records for t in r["turns"]
        )
        for name in ("baseline", "single", "method")
    }
    assert together == {"baseline": 3, "single": 1, "method": 3}
    overall, baseline = summary["overall"], summary["baseline"]
    assert (
        baseline["equivalence"]["exact"] == len(CATEGORIES) + 2 and baseline["single_tokens_per_second"] > 0
    )
    assert 0 < overall["occupancy"] <= 1 and overall["tokens_per_second"] > 0
    assert (overall["alignment_share"] > 0) == (method in ("eqspec", "exspec"))
    assert (overall["stats"].get("grouping_rate") is not None) == (method == "exspec")
    assert summary["peak_memory_bytes"] > 1e6
    steps = (
        overall["draft_seconds"]
        + overall["verify_seconds"]
        + overall["other_seconds"]
        + overall["align_seconds"]
    )
    assert overall["seconds"] == pytest.approx(steps + overall["prefill_seconds"])


@pytest.mark.parametrize(
    "settings", [["generate=false"], ["generate=true"], ["generate=true", "decoding=sample"]]
)
def test_the_batched_baseline_is_certified(workplace, tmp_path, monkeypatch, settings):
    """A speedup over batches that say something else is none, also where answers are drawn."""
    settings = ["batch_size=3", "repeats=1", *settings]
    _, summary, _ = measured(workplace, "ragged", tmp_path / "right", *settings)
    assert summary["baseline"]["equivalence"]["exact"] == len(CATEGORIES) + 2
    prepare = runner.prepare

    def spoiled(cfg):
        bench = prepare(cfg)
        right = bench.setup.arms["baseline"]

        def batched(requests):
            answers = yield from right(requests)
            answers[0].tokens[-1] += 1
            return answers

        bench.setup.arms["baseline"] = batched
        return bench

    monkeypatch.setattr(runner, "prepare", spoiled)
    _, summary, _ = measured(workplace, "ragged", tmp_path / "wrong", *settings)
    assert summary["baseline"]["equivalence"]["violation"] > 0 and not summary["equivalence"]["violation"]


def test_every_repeat_at_batch_size_1_is_certified(workplace, tmp_path, monkeypatch):
    """It says something else from its second time on, which no other arm does."""
    prepare = runner.prepare

    def spoiled(cfg):
        bench = prepare(cfg)
        real, asked = bench.setup.arms["single"], []

        def single(requests):
            answers = yield from real(requests)
            if asked.count(requests[0].prompt):
                answers[0].tokens[-1] += 1
            asked.append(requests[0].prompt if asked else "the warm-up")
            return answers

        bench.setup.arms["single"] = single
        return bench

    monkeypatch.setattr(runner, "prepare", spoiled)
    for repeats in (1, 2):
        settings = ["batch_size=3", f"repeats={repeats}"]
        _, summary, _ = measured(workplace, "ragged", tmp_path / str(repeats), *settings)
        assert (summary["equivalence"]["violation"] > 0) == (repeats == 2)


def test_pools_are_of_equal_size_and_mixed():
    questions = list(range(100))
    pools = runner.pools(questions, 48, 0)
    assert (
        sorted(map(len, pools)) == [33, 33, 34]
        and sorted(functools.reduce(operator.iadd, pools, [])) == questions
    )
    assert pools != runner.pools(questions, 48, 1) and pools == runner.pools(questions, 48, 0)
    assert runner.pools(questions[:3], None, 0) == [[0], [1], [2]]


@pytest.mark.parametrize("torn", [b"", b'{"question_id": 3, "ta'])
def test_a_torn_pool_is_measured_again_as_a_whole(workplace, tmp_path, monkeypatch, capsys, torn):
    run_dir = start(workplace, "ragged", tmp_path, "batch_size=2", "pool=4", "repeats=1")
    assert runner.run(run_dir) == 0
    journal = run_dir / store.RECORDS
    whole, first = read_json(run_dir / store.SUMMARY), store.read_records(run_dir)
    assert [record["pool"] for record in first] == [0, 0, 0, 0, 1, 1, 1]
    lines = journal.read_bytes().splitlines(keepends=True)
    (run_dir / store.SUMMARY).unlink()
    journal.write_bytes(b"".join(lines[:5]) + torn)
    measured_again, attempt = [], runner.attempt

    def attempted(bench, questions, pool, repeat):
        measured_again.append([q.question_id for q in questions])
        return attempt(bench, questions, pool, repeat)

    monkeypatch.setattr(runner, "attempt", attempted)
    capsys.readouterr()
    assert runner.run(run_dir) == 0
    assert measured_again == [[record["question_id"] for record in first[4:]]]
    assert says(capsys.readouterr().err, "pool 2 of 2 ... 1 of ... 3")
    again = journal.read_bytes().splitlines(keepends=True)
    assert again[:4] == lines[:4] and lines[4] not in again and len(again) == len(lines)
    assert read_json(run_dir / store.SUMMARY)["overall"]["occupancy"] == whole["overall"]["occupancy"]
    tokens = [
        {r["question_id"]: [t["arms"]["method"][0]["tokens"] for t in r["turns"]] for r in records}
        for records in (first, store.read_records(run_dir))
    ]
    assert tokens[0] == tokens[1]


def test_a_question_that_does_not_fit_fails_alone(workplace, tmp_path, capsys):
    questions = (workplace / "questions.jsonl").read_text().splitlines()
    long = json.loads(questions[4]) | {"turns": ["word " * 300]}
    path = tmp_path / "long.jsonl"
    path.write_text("\n".join([*questions[:4], json.dumps(long), *questions[5:]]) + "\n")
    code, summary, records = measured(
        workplace, "ragged", tmp_path, f"data.path={path}", "batch_size=4", "repeats=1"
    )
    assert code == 1 and summary["failed"] == 1 and summary["overall"]["questions"] == len(CATEGORIES) - 1
    assert [r["question_id"] for r in records if r["error"]] == [5]
    assert says(capsys.readouterr().err, "question 5 ... UserError: ")


# -- faults


def shift_positions(monkeypatch):
    real = RaggedLayout.place

    def shifted(self, batch, n, *more, **named):
        where = real(self, batch, n, *more, **named)
        held, own = where.kv_positions, where.positions
        if where.start is not None:
            held = torch.arange(where.kv_len).unsqueeze(0)
            own = held[:, where.start :].expand(batch.size, n)
        return dataclasses.replace(where, start=None, positions=own + 3, kv_positions=held)

    monkeypatch.setattr(RaggedLayout, "place", shifted)


def keep_a_stale_row(monkeypatch):
    real = KVCache.update

    def stale(self, keys, values, layer_idx, *args, **kwargs):
        keys, values = keys.clone(), values.clone()
        keys[-1], values[-1] = keys[0], values[0]
        return real(self, keys, values, layer_idx)

    monkeypatch.setattr(KVCache, "update", stale)


def number_by_column(monkeypatch):
    """What masking without position ids does: a hole counts as a position."""
    real = AlignedLayout.place

    def numbered(self, batch, n, *more, **named):
        where = real(self, batch, n, *more, **named)
        if where.start is not None:  # no holes
            return where
        own = (where.write_index + torch.arange(n)).expand(batch.size, n)
        held = where.kv_positions.clone()
        held[:, where.write_index : where.write_index + n] = own
        return dataclasses.replace(where, positions=own, kv_positions=held)

    monkeypatch.setattr(AlignedLayout, "place", numbered)


def spoil_answers(spoil):
    """A fault in what the method's arm hands back."""

    def plant(monkeypatch):
        prepare = runner.prepare

        def spoiled(cfg):
            bench = prepare(cfg)
            real = bench.setup.arms["method"]

            def method(requests):
                return spoil((yield from real(requests)))

            bench.setup.arms["method"] = method
            return bench

        monkeypatch.setattr(runner, "prepare", spoiled)

    return plant


def drop_a_bonus_token(answers):
    for answer in answers:
        at = 0
        for step in answer.steps:
            at += step.emitted
            if step.drafted and step.accepted == step.drafted:
                del answer.tokens[at]
                return answers
    raise AssertionError("no draft was accepted whole")


def swap_rows(answers):
    return [answers[1], answers[0], *answers[2:]]


def go_on_behind_the_stop(answers):
    answers[0].tokens.append(7)
    return answers


FAULTS = [
    ("ragged", shift_positions),
    ("ragged", keep_a_stale_row),
    ("eqspec", keep_a_stale_row),
    ("eqspec", number_by_column),
    ("exspec", number_by_column),
    ("ragged", spoil_answers(drop_a_bonus_token)),
    ("exspec", spoil_answers(swap_rows)),
    ("eqspec", spoil_answers(go_on_behind_the_stop)),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("method", "fault"), FAULTS)
def test_planted_faults_are_violations(workplace, tmp_path, monkeypatch, method, fault):
    fault(monkeypatch)
    # The draft model is the target itself, so that drafts are accepted whole; the certificate does not know.
    settings = [
        "batch_size=4", "repeats=1", "decoding.max_new_tokens=24", f"pair.draft={workplace}/target", "generate=true"
    ]  # fmt: skip
    _, summary, _ = measured(workplace, method, tmp_path, *settings)
    assert summary["equivalence"]["violation"] > 0
    assert summary["baseline"]["equivalence"]["violation"] == 0 or fault in (
        shift_positions,
        keep_a_stale_row,
    )
