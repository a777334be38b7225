"""Spec-Bench's own definitions: what its script would make of the answer files is in the summary."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from specbench.data.question_files import TASKS
from specbench.measure.records import run_folder as store
from specbench.system.files import read_json, write_json
from tests.support.synthetic import CONFIG, FACTS, TIE, by_repeat, generation, record, turn


def spec_bench(folder, tasks: dict) -> dict[str, tuple[float, float]]:
    """(speedup, mean accepted tokens) by task and "overall" as Spec-Bench's speed.py defines them, from answer files.

    A question's speed is its new tokens / its wall time over all turns, a task's the mean over its questions, the
    speedup the ratio of the method's and the baseline's; accepted tokens are the mean over all rounds. Two things are
    otherwise on purpose. The baseline's tokens are its `new_tokens`: speed.py counts them from the text, tokenised
    again, less one, so that ends of answers are lost in one arm alone. And repeats are further measurements of a
    question, here more turns; speed.py reads choices[0] of several files, and averages what comes out of each.
    """

    def answers(name: str) -> list[dict]:
        return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").split("\n") if line]

    def speeds(name: str, categories: tuple[str, ...]) -> list[float]:
        return [
            sum(sum(choice["new_tokens"]) for choice in answer["choices"])
            / sum(sum(choice["wall_time"]) for choice in answer["choices"])
            for answer in answers(name)
            if answer["category"] in categories
        ]

    found = {}
    for task, categories in (
        tasks | {"overall": tuple(c for of_task in tasks.values() for c in of_task)}
    ).items():
        method, plain = speeds("answers.jsonl", categories), speeds("answers_baseline.jsonl", categories)
        rounds = [
            count
            for answer in answers("answers.jsonl")
            if answer["category"] in categories
            for choice in answer["choices"]
            for count in choice["accept_lengths"]
        ]
        if method:
            ratio = (sum(method) / len(method)) / (sum(plain) / len(plain))
            found[task] = ratio, sum(rounds) / len(rounds)
    return found


def spec_bench_records(repeats: int) -> list[dict]:
    """Questions of four tasks, one of them of two turns; answers of other lengths in the arms, a failed question."""
    draw = np.random.default_rng(repeats)

    def arm(rounds: int, most: int, drafted: int) -> list[dict]:
        accepted = draw.integers(0, most + 1, rounds).tolist()  # greedy decoding says the same in each repeat
        return [
            generation(accepted, float(draw.uniform(0.3, 4)), 0.1, drafted=drafted) for _ in range(repeats)
        ]

    def asked(number: int) -> list[dict]:
        return [
            turn(
                i,
                TIE,
                baseline=arm(int(draw.integers(4, 30)), 0, 0),
                method=arm(int(draw.integers(2, 9)), 5, 5),
            )
            for i in range(number)
        ]

    kinds = [
        ("mt_bench", "writing"),
        ("mt_bench", "coding"),
        ("qa", "qa"),
        ("rag", "rag"),
        ("translation",) * 2,
    ]
    records = [
        record(10 * place + i, task, category, asked(2 if task == "mt_bench" else 1))
        for place, (task, category) in enumerate(kinds)
        for i in range(4)
    ]
    records[6] = record(records[6]["question_id"], "mt_bench", "coding", error="no memory")
    return by_repeat(random.Random(0).sample(records, len(records)))


@pytest.mark.first_fast
@pytest.mark.parametrize("repeats", [1, 3])
def test_spec_benchs_own_numbers_follow_from_its_answer_files(tmp_path, repeats):
    run_dir = store.find_or_create(CONFIG | {"runs_root": str(tmp_path), "repeats": repeats})
    write_json(run_dir / store.FACTS, FACTS)
    with store.open_journal(run_dir) as journal:
        journal.append(*spec_bench_records(repeats))
        store.finalise(run_dir)
    ours, theirs = read_json(run_dir / store.SUMMARY), spec_bench(run_dir, TASKS)
    assert set(theirs) == {"mt_bench", "translation", "qa", "rag", "overall"}
    for task, (ratio, accepted) in theirs.items():
        numbers = ours["overall"] if task == "overall" else ours["tasks"][task]
        assert numbers["spec_bench_speedup"] == pytest.approx(ratio, rel=1e-9, abs=0)
        assert numbers["acceptance_length"] == pytest.approx(accepted, rel=1e-9, abs=0)
    spread = [ratio for ratio, _ in theirs.values()]
    assert max(spread) - min(spread) > 0.05  # not all alike
    assert ours["overall"]["spec_bench_speedup"] != pytest.approx(ours["overall"]["speedup"], rel=1e-3)
    with_answers = [json.loads(line) for line in (run_dir / "answers.jsonl").open(encoding="utf-8")]
    assert len(with_answers) == 19 and all(len(answer["choices"]) == repeats for answer in with_answers)
