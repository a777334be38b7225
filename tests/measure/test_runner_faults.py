"""The runner on a small saved pair: faults that must be found, questions that fail, full disks, kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from specbench.config.compose import CONF
from specbench.data.question_files import Question
from specbench.decoding import engine
from specbench.decoding.acceptance import outcome
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.kv_layout import RaggedLayout
from specbench.decoding.trace import Clock
from specbench.measure import runner
from specbench.measure.bench import Bench, attempt
from specbench.measure.records import run_folder as store
from specbench.report import verdicts
from specbench.system.errors import JobError
from specbench.system.files import read_json, write_json
from tests.support import commands
from tests.support.messages import says
from tests.support.runs import CATEGORIES, SAMPLED, measured, overrides, start, to_the_end
from tests.support.synthetic import full_disk

pytestmark = pytest.mark.slow


def keep_stale_entries(monkeypatch, bench):
    def sloppy(self, batch, count, counts, path):
        end = batch.lengths[0] + counts[0]
        # The last token that is kept gets the keys and values of one that was rejected.
        self.cache.move_entries(torch.tensor([[end]]), torch.tensor([[end - 1]]))

    monkeypatch.setattr(RaggedLayout, "commit", sloppy)


def accept_one_too_many(monkeypatch, bench):
    real = engine.accept

    def generous(logits, draft, *more):
        verdict = real(logits, draft, *more)
        count = (verdict.count + 1).clamp(max=draft.tokens.shape[1])
        following = verdict.tokens.gather(1, verdict.count.unsqueeze(1)).squeeze(1)
        return outcome(draft.tokens, count, following, verdict.path)

    monkeypatch.setattr(engine, "accept", generous)


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


def spoil(monkeypatch, fault):
    """Plants a fault in what runs prepare."""
    prepare = runner.prepare

    def prepare_and_spoil(cfg):
        bench = prepare(cfg)
        fault(monkeypatch, bench)
        return bench

    monkeypatch.setattr(runner, "prepare", prepare_and_spoil)


def test_a_fault_in_sampled_answers_is_a_violation(workplace, tmp_path, monkeypatch):
    spoil(monkeypatch, accept_one_too_many)
    _, summary, _ = measured(workplace, "pld", tmp_path, *SAMPLED)
    assert summary["equivalence"]["violation"] > 0


@pytest.mark.parametrize("fault", [keep_stale_entries, accept_one_too_many, drop_a_token])
def test_planted_faults_are_violations(workplace, tmp_path, monkeypatch, fault):
    spoil(monkeypatch, fault)
    _, summary, _ = measured(workplace, "sps", tmp_path, "decoding.max_new_tokens=24")
    assert summary["equivalence"]["violation"] > 0


def test_a_lossy_rule_is_found(workplace, tmp_path):
    """Typical acceptance: longer drafts survive, and the answers are not the target's."""
    settings = ["decoding.max_new_tokens=24", "method.max_draft_tokens=4"]
    _, exact, _ = measured(workplace, "sps", tmp_path / "exact", *settings)
    _, lossy, _ = measured(workplace, "sps", tmp_path / "lossy", *settings, "decoding.verification=typical")
    assert exact["equivalence"]["violation"] == 0 and lossy["equivalence"]["violation"] > 0
    assert lossy["overall"]["acceptance_length"] > exact["overall"]["acceptance_length"]
    assert any(line.startswith("LOSSY") for line in verdicts.faults(lossy))


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


def test_a_wrong_answer_counts_though_a_later_turn_fails(workplace, tmp_path, monkeypatch):
    def wrong_then_broken(monkeypatch, bench):
        drop_a_token(monkeypatch, bench)
        real = Bench._turn

        def until_the_second(self, requests, number, *rest):
            if number:
                raise RuntimeError("no memory")
            return real(self, requests, number, *rest)

        monkeypatch.setattr(Bench, "_turn", until_the_second)

    spoil(monkeypatch, wrong_then_broken)
    _, summary, records = measured(workplace, "sps", tmp_path, "decoding.max_new_tokens=24")
    broken = [record for record in records if record["error"]]
    assert broken and all(record["error"] == "RuntimeError: no memory" for record in broken)
    assert all(len(record["turns"]) == 1 for record in broken)
    answers = summary["equivalence"]
    assert answers["violation"] == answers["answers"] == len(records)


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


def test_why_an_earlier_attempt_ended_is_not_why_a_later_one_did(workplace, tmp_path):
    run_dir = start(workplace, "pld", tmp_path, "task=rag")
    store.note_failure(run_dir, "No space left on device")
    assert runner.run(run_dir) == 0
    assert store.why_failed(run_dir) is None


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


def test_a_process_certifies_against_the_first_and_takes_over_its_facts(workplace, tmp_path):
    """What another process of the run answered counts, and so do the ceiling and the memory that it found."""
    run_dir = start(
        workplace, "ragged", tmp_path, "processes=2", "repeats=2", "batch_size=2", "generate=false"
    )
    assert runner.run(run_dir) == store.EXIT_CONTINUE
    facts = read_json(run_dir / store.FACTS)
    write_json(
        run_dir / store.FACTS, facts | {"bandwidth_bytes_per_second": 1e15, "peak_memory_bytes": 10**15}
    )
    first, *others = (run_dir / store.RECORDS).read_text().splitlines()
    record = json.loads(first)
    [said] = record["turns"][0]["arms"]["single"]
    said["tokens"] = [token + 1 for token in said["tokens"]]
    (run_dir / store.RECORDS).write_text("\n".join([json.dumps(record), *others]) + "\n")
    runner.run(run_dir)
    later = [r for r in store.read_records(run_dir) if r["repeat"] == 1]
    wrong = [r["question_id"] for r in later if r["turns"][0]["equivalence"]["verdict"] == "violation"]
    assert wrong == [record["question_id"]]
    facts = read_json(run_dir / store.FACTS)
    assert facts["bandwidth_bytes_per_second"] == 1e15 and facts["peak_memory_bytes"] == 10**15


def test_a_device_that_is_gone_ends_the_job_and_is_no_failed_question(monkeypatch):
    class Gone(RuntimeError):
        pass

    def fail(*_: object) -> None:
        raise Gone("CUDA error: an illegal memory access")

    bench = SimpleNamespace(
        measure=fail, setup=SimpleNamespace(pair=SimpleNamespace(device=torch.device("cpu")))
    )
    question = Question(1, "qa", ("Why?",), None, "qa")
    [record] = attempt(bench, [question], 0)
    assert "illegal memory access" in record["error"], "a device that still answers is not gone"
    monkeypatch.setattr(Clock, "synchronize", fail)
    with pytest.raises(JobError):
        attempt(bench, [question], 0)
