"""The runner on a small saved pair: arms, certificates, threads, slices, memory, protocols."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
import os
from types import SimpleNamespace

import pytest
import torch
from omegaconf import DictConfig

from methods.sps import SpeculativeSampling
from specbench.decoding import engine
from specbench.decoding.drafter import Drafter, Needs
from specbench.decoding.engine import Engine
from specbench.decoding.model.layer_stack import LayerStack
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.measure import certify, conductor, runner
from specbench.measure.bench import Bench
from specbench.measure.facts import models_in_place
from specbench.measure.interleave import Interleaver
from specbench.measure.machine import speed
from specbench.measure.machine.hardware import cpu_model
from specbench.measure.machine.watch import Watch
from specbench.measure.metrics.drawn import SURPRISE
from specbench.measure.protocol import Protocol
from specbench.measure.records import run_folder as store
from specbench.report import decision, verdicts
from specbench.system import threads
from specbench.system.errors import JobError, UserError
from specbench.system.files import read_json
from tests.support.decoding import random_pair
from tests.support.kernel_passes import needs_kernels
from tests.support.messages import says
from tests.support.runs import CATEGORIES, SAMPLED, measured, start, to_the_end
from tests.support.synthetic import slowed

pytestmark = pytest.mark.slow


@pytest.mark.one_in(2)
@pytest.mark.parametrize("method", ["ar", "sps", "pld", "kangaroo"])
def test_a_run(workplace, tmp_path, method):
    code, summary, records = measured(workplace, method, tmp_path, "generate=true")
    assert code == 0 and summary["status"] == "complete"
    assert summary["equivalence"]["answers"] == len(CATEGORIES) + 2
    assert summary["equivalence"]["violation"] == 0
    assert [r["question_id"] for r in records] == list(range(1, len(CATEGORIES) + 1))
    for turn in (t for r in records for t in r["turns"]):
        baseline, method_answer = turn["arms"]["baseline"][0], turn["arms"]["method"][0]
        assert baseline["tokens"] == method_answer["tokens"] == turn["arms"]["hf_generate"][0]["tokens"]
        assert turn["baseline_equivalence"]["verdict"] == "exact"
    if method == "ar":
        assert summary["overall"]["acceptance_length"] == 1 and summary["overall"]["mbsu"] == 1


def test_without_generate(workplace, tmp_path):
    code, summary, records = measured(workplace, "sps", tmp_path, "task=rag")
    baseline, answer = summary["baseline"], summary["equivalence"]
    assert code == 0 and answer["exact"] == answer["answers"] == 1 and summary["overall"]["speedup"] > 0
    assert baseline["hf_generate_tokens_per_second"] is None and baseline["quoted_against"] == "engine"
    assert summary["processor"] == cpu_model() and summary["seed"] == 0
    told = [summary[key] for key in ("any_length", "longest_path", "max_nodes")]
    assert (
        told == [True, summary["settings"]["max_draft_tokens"], 0] and len(summary["questions_sha256"]) == 64
    )
    assert baseline["equivalence"]["answers"] == 0
    assert [sorted(t["arms"]) for r in records for t in r["turns"]] == [["baseline", "method"]]


def test_a_token_budget_shortens_drafts_in_the_record_too(workplace, tmp_path):
    arguments = ("drafter=sps", "drafter.max_draft_tokens=5", "batch_size=2", "method.token_budget=6")
    _, summary, _ = measured(workplace, "ragged", tmp_path, "task=rag", *arguments)
    assert summary["longest_path"] == 2 and decision.draft_length(summary) == 2
    assert summary["beyond_kernels"] is None


def test_another_engines_own_files_are_told_by_name_and_checksum():
    """As is the pair's draft model, but where an engine has weights of its own."""
    pair = DictConfig({"draft": "models/draft"})
    loads, brings = (
        SimpleNamespace(spec=SimpleNamespace(needs=needs)) for needs in (Needs(draft_model=True), Needs())
    )
    for setup, draft in ((loads, "models/draft"), (brings, None)):
        assert models_in_place(setup, pair, {}) == {"engine_target": None, "draft": draft}
    cut = DictConfig({"draft": "models/draft", "draft_layers": 2})
    assert models_in_place(loads, cut, {})["draft"] == "models/draft (draft_layers=2)"
    files = {
        f"engine.{name}": {"source": f"/m/{name}.gguf", "files": {f"{name}.gguf": digit * 64}}
        for name, digit in (("target", "a"), ("draft", "b"))
    }
    assert models_in_place(loads, pair, files) == {
        "engine_target": "target.gguf (aaaaaaaa)",
        "draft": "draft.gguf (bbbbbbbb)",
    }


@needs_kernels
def test_weights_that_no_kernel_of_ours_reads_are_told():
    """Experts are no linear layers, nor are quantised ones."""
    target = StagedModel(copy.deepcopy(random_pair("llama").target))
    assert target.uses_torch is None
    target.layers[0].experts = torch.nn.Parameter(torch.zeros(4, 64, 64), requires_grad=False)
    assert says(target.uses_torch or "", "for ... of the weights, which are not plain linear layers")


def test_how_often_cores_were_slowed_is_read_around_a_turn_and_not_its_slices(
    workplace, tmp_path, monkeypatch
):
    readings = itertools.count(step=3)
    monkeypatch.setattr(Watch, "heat", lambda watch: {"throttlings": next(readings)})
    _, summary, records = measured(workplace, "sps", tmp_path, "task=rag", "slice_seconds=1e-3")
    (turn,) = records[0]["turns"]
    assert turn["machine"]["counters"]["throttlings"] == 3 and next(readings) == 6
    assert summary["machine"]["throttlings_per_second"] > 0


def test_the_machine_is_probed_before_between_and_after(workplace, tmp_path, monkeypatch):
    """And never within an answer. Each process begins with a probe, of which provenance holds the first."""
    taken = iter([slowed(product=share / 100) for share in range(100)])
    timed = []

    def probe(device):
        assert not timed, "inside of what is timed"
        return next(taken)

    def turn(bench, *arguments, answer=Bench._turn):
        timed.append(None)
        records = answer(bench, *arguments)
        timed.pop()
        return records

    monkeypatch.setattr(speed, "probe", probe)
    monkeypatch.setattr(Bench, "_turn", turn)
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(speed, "SECONDS_BETWEEN", 1e9)
    run_dir = start(workplace, "pld", tmp_path / "runs", "processes=2", "data.limit=1")
    to_the_end(run_dir)
    records = store.read_records(run_dir)
    per_pass = len(records) // 2
    counts = [len(record["speed"]) for record in records]
    assert per_pass > 1 and counts == ([1] + [0] * (per_pass - 2) + [1]) * 2
    found = read_json(run_dir / store.SUMMARY)["machine"]["speed"]
    assert found["first"] == slowed(product=0) and found["last"] == found["worst"] == slowed(product=0.03)
    began = read_json(run_dir / store.PROVENANCE)["speed"]
    assert began["first"] == began["best"] == found["best"] == slowed(product=0)
    assert began["machine"] == found["machine"]
    monkeypatch.setattr(speed, "SECONDS_BETWEEN", 0.0)
    _, _, often = measured(workplace, "pld", tmp_path / "often", "data.limit=1")
    # One before each question, the first one of the run, and the last one of the pass.
    assert [len(record["speed"]) for record in often] == [2, *[1] * (per_pass - 2), 2]


@pytest.mark.parametrize("method", [["sps"], ["ragged", "batch_size=3", "pool=4"]])
def test_no_cache_grows_while_a_question_is_measured(workplace, tmp_path, monkeypatch, method):
    """It would count as part of an answer's prefill. Here every longer request needs a larger cache."""
    made, new_cache = [], StagedModel.new_cache
    monkeypatch.setattr(engine, "CACHE_STEP", 1)
    monkeypatch.setattr(StagedModel, "new_cache", lambda *sizes: made.append(sizes) or new_cache(*sizes))
    before = []

    def turn(bench, *arguments, answer=Bench._turn):
        before.append(len(made))
        return answer(bench, *arguments)

    monkeypatch.setattr(Bench, "_turn", turn)
    assert measured(workplace, method[0], tmp_path, *method[1:], "data.turns=1")[0] == 0
    assert 0 < before[0] == len(made)


def test_after_a_question_that_failed_no_cache_grows_within_an_answer(workplace, tmp_path, monkeypatch):
    """An engine that fails gives up what it holds."""
    made, new_cache, commit = [], StagedModel.new_cache, SpeculativeSampling.commit
    grown, failures, measure = [], [], conductor.Conductor.measure
    monkeypatch.setattr(StagedModel, "new_cache", lambda *sizes: made.append(sizes) or new_cache(*sizes))

    def counted(of_run, requests):
        before, failing = len(made), len(failures) == 0
        if failing:
            failures.append("due")
        answers = measure(of_run, requests)
        grown.append(len(made) - before)
        return answers

    def failing(drafter, batch, verified):
        if failures == ["due"]:
            failures.append("met")
            raise RuntimeError("no memory")
        commit(drafter, batch, verified)

    monkeypatch.setattr(conductor.Conductor, "measure", counted)
    monkeypatch.setattr(SpeculativeSampling, "commit", failing)
    _, summary, _ = measured(workplace, "sps", tmp_path, "data.turns=1", "repeats=1")
    assert summary["failed"] == 1 and len(grown) > 1 and not any(grown)


@pytest.fixture
def _same_threads_afterwards():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_threads_are_measured_written_down_and_kept(
    workplace, tmp_path, monkeypatch, _same_threads_afterwards
):
    """A run that goes on takes the number that it began with, whatever would be fastest now."""
    used = []

    def watched(bench, *arguments, answer=Bench._turn):
        used.append(torch.get_num_threads())
        if len(used) == 2:
            raise JobError("stopped")
        return answer(bench, *arguments)

    monkeypatch.setattr(Bench, "_turn", watched)
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    monkeypatch.setattr(threads, "fewest_worth", lambda seconds: max(seconds))
    run_dir = start(workplace, "sps", tmp_path, "data.limit=null")
    with pytest.raises(JobError):
        runner.run(run_dir)
    monkeypatch.setattr(threads, "fewest_worth", lambda seconds: min(seconds))
    torch.set_num_threads(1)
    assert runner.run(run_dir) == 0
    assert used[:3] == [2, 2, 2]
    found = read_json(run_dir / store.PROVENANCE)
    assert found["threads"]["torch"] == found["thread_choice"]["threads"] == 2
    assert found["thread_choice"]["chosen_by"] == "measuring" and found["thread_choice"][
        "seconds"
    ].keys() == {"1", "2"}
    assert found["environment"]["OMP_WAIT_POLICY"] == os.environ["OMP_WAIT_POLICY"]
    summary = read_json(run_dir / store.SUMMARY)
    assert summary["threads"] == 2


def test_threads_by_hand(workplace, tmp_path, _same_threads_afterwards):
    run_dir = start(workplace, "sps", tmp_path, "task=rag", "threads=2")
    assert runner.run(run_dir) == 0
    found = read_json(run_dir / store.PROVENANCE)
    assert found["threads"]["torch"] == 2 and found["thread_choice"]["chosen_by"] == "threads="


@pytest.mark.one_in(3)
@pytest.mark.parametrize("method", ["sps", "pld", "ar"])
def test_sampled_answers_are_certified_where_nothing_was_drafted_by_chance(workplace, tmp_path, method):
    code, summary, records = measured(workplace, method, tmp_path, *SAMPLED, "repeats=2", "generate=true")
    assert code == 0 and summary["temperature"] == 1.0
    verdicts = {t["equivalence"]["verdict"] for r in records for t in r["turns"]}
    assert verdicts == ({None} if method == "sps" else {"exact"})
    likely = summary["likelihood"]  # where drafts were drawn: of all answers together
    assert likely.keys() == ({"baseline", "method"} if method == "sps" else {"baseline"})
    assert all(abs(one["standard_errors"]) < SURPRISE for one in likely.values())
    leans = {name: one["lean"] for name, one in likely.items()}
    assert leans["baseline"] is None and (method != "sps" or abs(leans["method"]) < SURPRISE)
    assert {t["baseline_equivalence"]["verdict"] for r in records for t in r["turns"]} == {None}
    texts = [t["arms"]["baseline"][0]["tokens"] for r in records for t in r["turns"]]
    assert texts[0] != texts[len(texts) // 2], "a repeat draws anew"


def test_a_sampler_that_is_wrong_in_both_arms_is_found(workplace, tmp_path, monkeypatch):
    """Their answers agree, and transformers draws other random numbers."""
    probs = SamplingParams.probs
    monkeypatch.setattr(SamplingParams, "probs", lambda self, logits: probs(self, 2 * logits))
    _, summary, _ = measured(workplace, "pld", tmp_path, *SAMPLED)
    assert verdicts.violates(summary) and summary["equivalence"]["violation"] == 0
    assert abs(summary["likelihood"]["baseline"]["standard_errors"]) > SURPRISE


def test_arms_take_turns_in_going_first(workplace, tmp_path, monkeypatch):
    order = []
    prepare = runner.prepare

    def watched(cfg):
        bench = prepare(cfg)
        bench.setup.arms = {
            name: lambda *a, name=name, arm=arm: (order.append(name), arm(*a))[1]
            for name, arm in bench.setup.arms.items()
        }
        return bench

    monkeypatch.setattr(runner, "prepare", watched)
    measured(workplace, "pld", tmp_path, "generate=true", "task=rag", "repeats=6")
    timed = order[3:]  # after the warm-up
    assert len(timed) == 18
    firsts = timed[::3]
    assert {name: firsts.count(name) for name in firsts} == {"baseline": 2, "method": 2, "hf_generate": 2}
    assert len({tuple(timed[i : i + 3]) for i in range(0, 18, 3)}) == 6


def test_the_noise_is_measured_when_an_answer_differs_and_once(workplace, tmp_path, monkeypatch):
    measured_noise = []
    shape_noise = certify.shape_noise
    monkeypatch.setattr(
        certify, "shape_noise", lambda *of, **more: measured_noise.append(of) or shape_noise(*of, **more)
    )
    _, summary, _ = measured(workplace, "pld", tmp_path / "exact")
    assert summary["equivalence"]["exact"] == summary["equivalence"]["answers"] and not measured_noise

    real = Engine.rounds

    def wrong(self, requests):
        answers = yield from real(self, requests)
        if type(self.drafter).__name__ == "PromptLookup":
            answers[0].tokens[:3] = [40, 41, 42]
        return answers

    monkeypatch.setattr(Engine, "rounds", wrong)
    _, summary, _ = measured(workplace, "pld", tmp_path / "wrong")
    assert summary["equivalence"]["violation"] > 1 and len(measured_noise) == 1


@pytest.mark.one_in(3)
@pytest.mark.parametrize("method", ["sps", "kangaroo", "pld"])
def test_short_slices_change_no_answer(workplace, tmp_path, method):
    """Every round hands over: the arms' caches and drafts are their own."""
    code, summary, records = measured(workplace, method, tmp_path, "generate=true", "slice_seconds=1e-9")
    assert code == 0 and summary["slice_seconds"] == 1e-9
    assert summary["equivalence"]["exact"] == summary["equivalence"]["answers"] == len(CATEGORIES) + 2
    alone = measured(workplace, method, tmp_path, "generate=true", "slice_seconds=null")[2]

    def said(records: list[dict]) -> list:
        return [
            {name: [g["tokens"] for g in arm] for name, arm in turn["arms"].items()}
            for record in records
            for turn in record["turns"]
        ]

    assert said(records) == said(alone)


def only_whole(clock, seconds, around):
    """Stands in for `Interleaver`, and takes no slices."""
    assert math.isinf(seconds)
    return Interleaver(clock, seconds, around)


def test_an_arm_that_must_not_be_cut_alternates_by_answers(workplace, tmp_path, monkeypatch):
    assert measured(workplace, "pld", tmp_path, "task=rag")[1]["slice_seconds"] == 0.05
    monkeypatch.setattr(Drafter, "extra_cores", 1)
    monkeypatch.setattr(conductor, "Interleaver", only_whole)
    assert measured(workplace, "pld", tmp_path, "task=qa")[1]["slice_seconds"] is None


def test_the_memory_of_a_run_is_emptied_before_every_pass(workplace, tmp_path):
    """Or the second pass would copy the answers of the first. With memory=answer no question helps another."""
    settings = ("repeats=2", "method.nodes=20", "method.prompt=false", "decoding.max_new_tokens=16")

    def accepted(memory: str) -> list[list[list[int]]]:
        _, _, records = measured(
            workplace, "recycling", tmp_path / memory, *settings, f"method.memory={memory}"
        )
        return [
            [
                t["arms"]["method"][0]["steps"]["accepted"]
                for r in records
                if r["repeat"] == n
                for t in r["turns"]
            ]
            for n in (0, 1)
        ]

    kept, forgotten = accepted("run"), accepted("answer")
    assert kept[0] == kept[1] and forgotten[0] == forgotten[1]
    assert sum(map(sum, kept[0])) > sum(map(sum, forgotten[0])), "one table for all learns from all"


def test_a_pass_that_was_cut_short_is_measured_again_where_the_method_learns(workplace, tmp_path, capsys):
    """What it had learnt is lost with the process, and what it knows after the warm-up is none of it."""
    run_dir = start(workplace, "recycling", tmp_path, "method.memory=run", "method.nodes=20", "repeats=2")
    assert to_the_end(run_dir)[-1] == 0
    first, count = store.read_records(run_dir), len(CATEGORIES)
    lines = (run_dir / store.RECORDS).read_text().splitlines(keepends=True)
    (run_dir / store.SUMMARY).unlink()
    (run_dir / store.RECORDS).write_text("".join(lines[: count + 3]))
    capsys.readouterr()
    assert to_the_end(run_dir)[-1] == 0
    assert says(capsys.readouterr().err, f"cut short after 3 of its {count} questions")
    again = store.read_records(run_dir)
    assert (run_dir / store.RECORDS).read_text().splitlines(keepends=True)[:count] == lines[:count]

    def rounds(records: list[dict]) -> list:
        return [
            (r["repeat"], r["question_id"], t["arms"]["method"][0]["steps"]["accepted"])
            for r in records
            for t in r["turns"]
        ]

    assert rounds(again) == rounds(first)


@pytest.mark.parametrize("group", [("recycling",), ("ragged", "drafter=recycling", "drafter.nodes=9")])
def test_a_run_tells_which_file_its_memory_was_warmed_with(workplace, tmp_path, group):
    file = tmp_path / "talk.jsonl"
    told = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "The old man."}]
    file.write_text(json.dumps({"messages": told}) + "\n")
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    what = "drafter" if len(group) > 1 else "method"
    run_dir = start(workplace, group[0], tmp_path, *group[1:], f"{what}.warm={file}")
    assert to_the_end(run_dir)[-1] == 0
    summary = read_json(run_dir / store.SUMMARY)
    assert summary["equivalence"]["violation"] == 0
    record = summary["training"]["warm"]
    assert (record["source"], record["data"]) == (str(file), f"sha256:{sha256}") and record["tokens"] > 10
    assert summary["notes"] == [f"memory warmed with talk.jsonl ({record['tokens']} tokens)"]
    assert read_json(run_dir / store.PROVENANCE)["weights"]["method.warm"]["files"] == {"talk.jsonl": sha256}
    # A run that goes on does so with the same file.
    (run_dir / store.SUMMARY).unlink()
    lines = (run_dir / store.RECORDS).read_text().splitlines(keepends=True)
    (run_dir / store.RECORDS).write_text("".join(lines[:-1]))
    file.write_text(file.read_text() * 2)
    with pytest.raises(UserError, match=r"other conditions \(weights.method.warm.files.talk.jsonl"):
        runner.run(run_dir)


def test_a_run_that_goes_on_is_compiled_as_it_was(workplace, tmp_path, monkeypatch):
    run_dir = start(workplace, "pld", tmp_path, "task=rag")
    assert runner.run(run_dir) == 0 and read_json(run_dir / store.PROVENANCE)["compiled"] is False
    (run_dir / store.SUMMARY).unlink()
    (run_dir / store.RECORDS).write_text("")
    monkeypatch.setattr(LayerStack, "is_compiled", True)
    with pytest.raises(UserError, match=r"other conditions \(compiled False against True\)"):
        runner.run(run_dir)


def test_turn_two_follows_the_baseline_or_each_arm_itself(workplace, tmp_path, monkeypatch):
    """With an arm that says something else in turn 1, the protocols differ in what they ask in turn 2."""
    real = Engine.rounds

    def stutter(self, requests):
        answers = yield from real(self, requests)
        if type(self.drafter).__name__ == "PromptLookup":
            # Plain letters, which the chat template hands on as they are.
            answers[0].tokens[:3] = [40, 41, 42]
        return answers

    monkeypatch.setattr(Engine, "rounds", stutter)
    prompts = {"paired": [], "spec_bench": []}
    for protocol, seen in prompts.items():
        ask = Protocol.prompt
        monkeypatch.setattr(
            Protocol,
            "prompt",
            lambda s, q, a, seen=seen, ask=ask: (seen.append(ask(s, q, a)), ask(s, q, a))[1],
        )
        measured(
            workplace,
            "pld",
            tmp_path / protocol,
            "generate=true",
            "task=mt_bench",
            "data.limit=1",
            f"protocol={protocol}",
        )
        monkeypatch.setattr(Protocol, "prompt", ask)
    second = {protocol: {tuple(p) for p in seen[-3:]} for protocol, seen in prompts.items()}
    assert len(second["paired"]) == 1
    assert len(second["spec_bench"]) == 2
