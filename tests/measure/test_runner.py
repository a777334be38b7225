"""The runner on a small saved pair: arms, certificates, faults that must be found, questions that fail, kills."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from methods.kangaroo.adapter import Adapter, adapter_config, save_adapter
from specbench.config.checks import check
from specbench.config.compose import CONF
from specbench.decoding import acceptance
from specbench.decoding.acceptance import outcome
from specbench.decoding.cpu import autotune as layouts
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.kv_layout import RaggedLayout
from specbench.measure import certify, conductor, runner
from specbench.measure.bench import Bench
from specbench.measure.interleave import Interleaver
from specbench.measure.machine import speed
from specbench.measure.machine.provenance import cpu_model
from specbench.measure.machine.watch import Watch
from specbench.measure.protocol import Protocol
from specbench.measure.records import run_folder as store
from specbench.report import remarks
from specbench.system import threads
from specbench.system.errors import JobError, UserError
from specbench.system.files import read_json
from tests.support import commands
from tests.support.conf import composed
from tests.support.messages import says
from tests.support.models import save_pair
from tests.support.synthetic import full_disk, slowed

pytestmark = pytest.mark.slow

CATEGORIES = ["writing", "coding", "translation", "summarization", "qa", "math_reasoning", "rag"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A saved pair, an adapter for it, questions and warm-up questions."""
    folder = tmp_path_factory.mktemp("workplace")
    save_pair(folder, num_hidden_layers=4)
    config = AutoConfig.from_pretrained(folder / "target")
    save_adapter(Adapter(adapter_config(config)), folder / "kangaroo", torch.float32, exit_layer=2)
    for name, first in (("questions", 1), ("warmup", 100)):
        lines = [
            {
                "question_id": first + i,
                "category": category,
                "turns": [f"Say something about {category}.", "Say more."][: 2 if i < 2 else 1],
            }
            for i, category in enumerate(CATEGORIES if name == "questions" else CATEGORIES[-1:])
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def overrides(workplace: Path, method: str, runs: Path) -> list[str]:
    return [
        f"method={method}",
        "pair=tiny",
        f"pair.target={workplace}/target",
        f"pair.draft={workplace}/draft",
        f"pair.tokenizer={workplace}/target",
        f"pair.parts.kangaroo={workplace}/kangaroo",
        f"data.path={workplace}/questions.jsonl",
        f"data.warmup={workplace}/warmup.jsonl",
        "data.limit=null",
        "decoding.max_new_tokens=12",
        "generate=false",
        "pair.device=cpu",
        "remeasure=0",  # other tests run at the same time
        f"runs_root={runs}",
    ]


def start(workplace: Path, method: str, runs: Path, *more: str) -> Path:
    """The folder of a run that is yet to be measured."""
    cfg = composed("bench", *overrides(workplace, method, runs), *more)
    check(cfg)
    return store.find_or_create(cfg)


def measured(workplace: Path, method: str, runs: Path, *more: str) -> tuple[int, dict, list[dict]]:
    """Exit code, summary and records of a run in this process."""
    run_dir = start(workplace, method, runs, *more)
    code = to_the_end(run_dir)[-1]
    return code, read_json(run_dir / store.SUMMARY), store.read_records(run_dir)


def to_the_end(run_dir: Path) -> list[int]:
    """Exit codes of the processes that measure a folder one after the other; here they are all this one."""
    codes = [runner.run(run_dir)]
    while codes[-1] == store.EXIT_CONTINUE:
        codes.append(runner.run(run_dir))
    return codes


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
    assert baseline["equivalence"]["answers"] == 0
    assert [sorted(t["arms"]) for r in records for t in r["turns"]] == [["baseline", "method"]]


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
    assert [len(record["speed"]) for record in often] == [2] + [1] * (per_pass - 1)


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
    monkeypatch.setattr(layouts, "_remembered", lambda key, _: pytest.fail(f"{key} was measured anew"))
    torch.set_num_threads(1)
    chosen = read_json(run_dir / store.PROVENANCE)["layouts"]
    assert {name.split()[0] for name in chosen["groups"]} == {"head", "layers", "drafter"}
    assert runner.run(run_dir) == 0
    assert used[:3] == [2, 2, 2]
    found = read_json(run_dir / store.PROVENANCE)
    assert found["threads"]["torch"] == found["thread_choice"]["threads"] == 2
    assert found["thread_choice"]["chosen_by"] == "measuring" and found["thread_choice"][
        "seconds"
    ].keys() == {"1", "2"}
    assert found["environment"]["OMP_WAIT_POLICY"] == os.environ["OMP_WAIT_POLICY"]
    summary = read_json(run_dir / store.SUMMARY)
    assert summary["threads"] == 2 and summary["layouts"] == found["layouts"] == chosen


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("method", "verify_tokens", "more"),
    [
        ("ar", 1, ()),
        ("sps", 4, ("method.max_draft_tokens=3",)),
        ("recycling", 10, ("method.nodes=9",)),
        ("sps", 6, ("decoding.verify_width=6",)),
    ],
)
def test_layouts_are_chosen_in_passes_of_this_run(
    workplace, tmp_path, monkeypatch, method, verify_tokens, more
):
    """The baseline's and the method's widest one, of the one target that both have."""
    asked = []

    def chosen(target, passes, known):
        asked.append((target, set(passes)))
        return {"groups": {}, "pass_ms": {}}

    monkeypatch.setattr(layouts, "choose_layouts", chosen)
    code, summary, _ = measured(workplace, method, tmp_path, "task=rag", *more)
    assert code == 0 and summary["layouts"] == {"groups": {}, "pass_ms": {}}
    assert {id(target) for target, _ in asked} == {id(asked[0][0])}
    assert asked[0][1] == {(1, 1), (1, verify_tokens)}


def test_threads_by_hand(workplace, tmp_path, _same_threads_afterwards):
    run_dir = start(workplace, "sps", tmp_path, "task=rag", "threads=2")
    assert runner.run(run_dir) == 0
    found = read_json(run_dir / store.PROVENANCE)
    assert found["threads"]["torch"] == 2 and found["thread_choice"]["chosen_by"] == "threads="


SAMPLED = ("decoding=sample", "decoding.max_new_tokens=8")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("method", ["sps", "pld", "ar"])
def test_sampled_answers_are_certified_where_nothing_was_drafted_by_chance(workplace, tmp_path, method):
    code, summary, records = measured(workplace, method, tmp_path, *SAMPLED, "repeats=2", "generate=true")
    assert code == 0 and summary["temperature"] == 1.0
    verdicts = {t["equivalence"]["verdict"] for r in records for t in r["turns"]}
    assert verdicts == ({None} if method == "sps" else {"exact"})
    assert {t["baseline_equivalence"]["verdict"] for r in records for t in r["turns"]} == {None}
    texts = [t["arms"]["baseline"][0]["tokens"] for r in records for t in r["turns"]]
    assert texts[0] != texts[len(texts) // 2], "a repeat draws anew"


def test_a_fault_in_sampled_answers_is_a_violation(workplace, tmp_path, monkeypatch):
    prepare = runner.prepare

    def prepare_and_spoil(cfg):
        bench = prepare(cfg)
        accept_one_too_many(monkeypatch, bench)
        return bench

    monkeypatch.setattr(runner, "prepare", prepare_and_spoil)
    _, summary, _ = measured(workplace, "pld", tmp_path, *SAMPLED)
    assert summary["equivalence"]["violation"] > 0


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
    monkeypatch.setattr(Drafter, "exclusive", True)
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


def keep_stale_entries(monkeypatch, bench):
    def sloppy(self, batch, count, counts, path):
        end = batch.lengths[0] + counts[0]
        # The last token that is kept gets the keys and values of one that was rejected.
        self.cache.move_entries(torch.tensor([[end]]), torch.tensor([[end - 1]]))

    monkeypatch.setattr(RaggedLayout, "commit", sloppy)


def accept_one_too_many(monkeypatch, bench):
    real = acceptance.accept

    def generous(logits, draft, *more):
        verdict = real(logits, draft, *more)
        count = (verdict.count + 1).clamp(max=draft.tokens.shape[1])
        following = verdict.tokens.gather(1, verdict.count.unsqueeze(1)).squeeze(1)
        return outcome(draft.tokens, count, following, verdict.path)

    monkeypatch.setattr(acceptance, "accept", generous)


def drop_a_token(monkeypatch, bench):
    real = bench.setup.arms["method"]

    def forgetful(requests):
        answers = yield from real(requests)
        del answers[0].tokens[5]
        return answers

    bench.setup.arms["method"] = forgetful


def run_past_the_stop_token(monkeypatch):
    real = Engine.rounds

    def restless(self, requests):
        drafting = type(self.drafter) is not Drafter
        self.stop_ids, stops = (frozenset(), self.stop_ids) if drafting else (self.stop_ids, self.stop_ids)
        answer = yield from real(self, requests)
        self.stop_ids = stops
        return answer

    monkeypatch.setattr(Engine, "rounds", restless)


@pytest.mark.parametrize("fault", [keep_stale_entries, accept_one_too_many, drop_a_token])
def test_planted_faults_are_violations(workplace, tmp_path, monkeypatch, fault):
    prepare = runner.prepare

    def prepare_and_spoil(cfg):
        bench = prepare(cfg)
        fault(monkeypatch, bench)
        return bench

    monkeypatch.setattr(runner, "prepare", prepare_and_spoil)
    _, summary, _ = measured(workplace, "sps", tmp_path, "decoding.max_new_tokens=24")
    assert summary["equivalence"]["violation"] > 0


def test_a_lossy_rule_is_found(workplace, tmp_path):
    """Typical acceptance: longer drafts survive, and the answers are not the target's."""
    settings = ["decoding.max_new_tokens=24", "method.max_draft_tokens=4"]
    _, exact, _ = measured(workplace, "sps", tmp_path / "exact", *settings)
    _, lossy, _ = measured(workplace, "sps", tmp_path / "lossy", *settings, "decoding.verification=typical")
    assert exact["equivalence"]["violation"] == 0 and lossy["equivalence"]["violation"] > 0
    assert lossy["overall"]["acceptance_length"] > exact["overall"]["acceptance_length"]
    assert any(line.startswith("LOSSY") for line in remarks.faults(lossy))


def test_tokens_after_the_stop_token_are_a_violation(workplace, tmp_path, monkeypatch):
    """Also where everything up to the stop token is right."""
    common = ["decoding.max_new_tokens=24"]
    _, _, records = measured(workplace, "sps", tmp_path / "free", *common)
    said = [t["arms"]["baseline"][0]["tokens"] for r in records for t in r["turns"]]
    stop = said[0][10]  # made a stop id, it ends an answer in the middle
    run_past_the_stop_token(monkeypatch)
    _, _, records = measured(workplace, "sps", tmp_path / "stop", *common, f"pair.stop_ids=[{stop}]")
    turn = records[0]["turns"][0]
    assert turn["equivalence"]["verdict"] == "violation"
    assert turn["equivalence"]["first_divergence"] == len(turn["arms"]["baseline"][0]["tokens"])
    assert len(turn["arms"]["method"][0]["tokens"]) > len(turn["arms"]["baseline"][0]["tokens"])


def test_a_question_that_fails_is_recorded_and_leaves_the_others_alone(workplace, tmp_path, capsys):
    questions = (workplace / "questions.jsonl").read_text().splitlines()
    long = json.loads(questions[4]) | {"turns": ["word " * 300]}
    path = tmp_path / "long.jsonl"
    path.write_text("\n".join([*questions[:4], json.dumps(long), *questions[5:]]) + "\n")
    code, summary, records = measured(workplace, "pld", tmp_path, f"data.path={path}")
    assert code == 1 and summary["status"] != "complete"
    failed = [r for r in records if r["error"]]
    assert [r["question_id"] for r in failed] == [5]
    assert says(failed[0]["error"], "prompt ... 512")
    assert summary["overall"]["questions"] == len(CATEGORIES) - 1
    assert "question 5 " in capsys.readouterr().err


def test_what_ends_the_job_is_not_booked_as_a_question_that_failed(workplace, tmp_path, monkeypatch):
    """The questions before it stand, and the same command goes on after them."""
    real, calls = Engine.rounds, iter(range(1000))

    def until(self, *arguments, **more):
        if type(self.drafter).__name__ == "PromptLookup" and next(calls) == 4:
            raise JobError("the draft worker is gone")
        return real(self, *arguments, **more)

    monkeypatch.setattr(Engine, "rounds", until)
    run_dir = start(workplace, "pld", tmp_path)
    with pytest.raises(JobError):
        runner.run(run_dir)
    before = store.read_records(run_dir)
    assert 0 < len(before) < len(CATEGORIES) and not any(record["error"] for record in before)
    assert runner.run(run_dir) == 0
    assert store.read_records(run_dir)[: len(before)] == before


@pytest.mark.parametrize(
    "left", [1_000, 0]
)  # bytes: what still fits of the question, and of the note why it ended
def test_a_full_disk_ends_a_run_in_one_line(workplace, tmp_path, monkeypatch, capsys, left):
    """What was written stays, and the same command goes on after it."""
    run_dir = start(workplace, "pld", tmp_path)
    journal, attempt = run_dir / store.RECORDS, runner.attempt

    def attempted(bench, questions, pool, repeat):
        records = attempt(bench, questions, pool, repeat)
        if pool == 3:
            room(journal.stat().st_size + left if left else 0)
        return records

    monkeypatch.setattr(runner, "attempt", attempted)
    monkeypatch.setattr(sys, "argv", ["runner", str(run_dir)])
    with full_disk() as room:
        assert commands.exit_code(runner.main) == 2
    said = capsys.readouterr().err
    assert says(said.splitlines()[-1], f"error: ... {journal}: File too large") and "Traceback" not in said
    before = store.read_records(run_dir)
    assert [record["question_id"] for record in before] == [1, 2, 3]
    assert (store.why_failed(run_dir) is not None) == (left > 0)
    monkeypatch.undo()
    assert runner.run(run_dir) == 0
    records = store.read_records(run_dir)
    assert records[:3] == before and len(records) == len(CATEGORIES)


def test_a_full_disk_at_the_summary_is_told_in_one_line(workplace, tmp_path, monkeypatch, capsys):
    run_dir = start(workplace, "pld", tmp_path, "task=rag")
    finalise = store.finalise
    monkeypatch.setattr(store, "finalise", lambda run_dir: (room(0), finalise(run_dir))[1])
    monkeypatch.setattr(sys, "argv", ["runner", str(run_dir)])
    with full_disk() as room:
        assert commands.exit_code(runner.main) == 2
    assert says(capsys.readouterr().err, f"\nerror: ... {run_dir}/answers.jsonl: File too large")
    assert not store.is_complete(run_dir)
    monkeypatch.undo()
    assert runner.run(run_dir) == 0 and store.is_complete(run_dir)


def without_times(summary: dict) -> dict:
    """A summary less its times and what is computed from them."""
    summary.pop("machine", None)
    timed = ("seconds", "speedup", "per_second", "bandwidth", "verdict", "quoted", "noise", "low", "high")
    return {
        key: without_times(value) if isinstance(value, dict) else value
        for key, value in summary.items()
        if not any(word in key for word in timed)
    }


PASSES = ["repeats=3", "processes=2", "precision=1e-9", "max_minutes=1e-6"]


@pytest.mark.one_in(2)
@pytest.mark.process
@pytest.mark.parametrize(("more", "passes", "behind"), [([], [0], 2), (PASSES, [0, 0, 1], 15)])
def test_killed_and_started_again(workplace, tmp_path, monkeypatch, more, passes, behind):
    """Kill -9 in the middle, half a line at the end of the journal: no question is lost or measured twice.

    passes: the process of each pass; after: questions after which the process that measures is killed.
    """
    runs = tmp_path / "killed"
    process = commands.start(CONF.parent, *overrides(workplace, "sps", runs), *more)
    while (
        not (journals := list(runs.glob("*/records.jsonl"))) or journals[0].read_bytes().count(b"\n") < behind
    ):
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.005)
    child = int(subprocess.check_output(["pgrep", "-P", str(process.pid)], text=True).split()[0])
    os.kill(child, signal.SIGKILL)
    process.communicate(timeout=commands.TIMEOUT)
    assert process.returncode != 0
    (run_dir,) = runs.iterdir()
    finished = store.read_records(run_dir)
    assert behind <= len(finished) < len(CATEGORIES) * len(passes) and not store.is_complete(run_dir)
    with open(run_dir / store.RECORDS, "a") as journal:
        journal.write('{"question_id": 3, "task": "tr')

    assert start(workplace, "sps", runs, *more) == run_dir  # what the same command finds
    assert to_the_end(run_dir)[-1] == 0
    records = store.read_records(run_dir)
    expected = [
        (number, repeat, process)
        for repeat, process in enumerate(passes)
        for number in range(1, len(CATEGORIES) + 1)
    ]
    assert [(r["question_id"], r["repeat"], r["process"]) for r in records] == expected
    assert records[: len(finished)] == finished
    _, undisturbed, _ = measured(workplace, "sps", tmp_path / "whole", *more)
    assert without_times(read_json(run_dir / store.SUMMARY)) == without_times(undisturbed)
