import json
import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.data.question_files import TASKS
from specbench.measure.metrics import summary as metrics
from specbench.measure.metrics.acceptance import mbsu
from specbench.measure.metrics.dataframes import STEP_COLUMNS, generations_frame, steps_frame
from specbench.measure.metrics.metrics import ceiling_rate
from specbench.measure.metrics.statistics import Speedup
from specbench.measure.records import run_folder as store
from specbench.measure.records.migrate import migrated
from specbench.system.files import read_json, write_json
from tests.support.synthetic import (
    CONFIG,
    EXACT,
    FACTS,
    TIE,
    VIOLATION,
    answered,
    columns,
    generation,
    overall,
    questions,
    record,
    turn,
)

KEYS = [
    *("questions", "tokens", "seconds", "tokens_per_second", "speedup", "speedup_low", "speedup_high"),
    *("decode_speedup", "decode_speedup_low", "decode_speedup_high"),
    *("spec_bench_speedup", "acceptance_length", "acceptance_rate", "mbsu"),
    *("draft_seconds", "verify_seconds", "other_seconds"),
]


def scaled(records, factor):
    """The same records with every time multiplied."""

    def walk(node):
        if isinstance(node, list):
            return [walk(item) for item in node]
        if isinstance(node, dict):
            return {k: times(v) if k.endswith("seconds") else walk(v) for k, v in node.items()}
        return node

    def times(value):
        if isinstance(value, list):
            return [None if v is None else v * factor for v in value]
        return value * factor

    return walk(records)


def test_the_step_columns_are_those_of_the_trace():
    from specbench.decoding.trace import Step

    assert list(STEP_COLUMNS) == list(Step.__dataclass_fields__)


def test_repetition_is_counted_within_an_answer():
    def asked(number: int, tokens: list[int]) -> dict:
        plain = generation([0] * 9, drafted=0) | {"tokens": tokens}
        return record(number, turns=[turn(baseline=plain, method=generation([8]))])

    loop, plain = (
        [1, 2, 3, 4] * 2,
        [1, 2, 3, 4, 5],
    )  # 5 4-grams, of which 4 differ; 2, one of them in the loop, too
    assert overall([asked(1, loop)])["distinct_4grams"] == pytest.approx(4 / 5)
    assert overall([asked(1, loop), asked(1, loop), asked(2, plain)])["distinct_4grams"] == pytest.approx(
        6 / 7
    )
    assert overall([asked(1, [1, 2, 3])])["distinct_4grams"] is None


def test_numbers_of_one_question_by_hand():
    method = generation([2, 5, 0], seconds=1.0, prefill=0.4)  # 11 tokens in 3 rounds
    plain = generation([0] * 10, seconds=2.5, prefill=0.5, drafted=0)
    found = metrics.summary([record(turns=[turn(baseline=plain, method=method)])], FACTS, CONFIG)
    numbers = found["overall"]
    assert (numbers["questions"], numbers["tokens"], numbers["seconds"]) == (1, 11, 1.0)
    assert numbers["tokens_per_second"] == 11.0
    assert numbers["speedup"] == 2.5 and numbers["speedup_low"] is None
    assert numbers["decode_speedup"] == pytest.approx(2.0 / 0.6)
    assert numbers["spec_bench_speedup"] == 2.5
    assert numbers["acceptance_length"] == pytest.approx(10 / 3)
    assert numbers["acceptance_rate"] == pytest.approx(7 / 15)
    assert numbers["acceptance_by_position"] == pytest.approx([2 / 3, 2 / 3, 1 / 3, 1 / 3, 1 / 3])
    assert numbers["acceptance_by_position_conditional"] == pytest.approx([2 / 3, 1, 1 / 2, 1, 1])
    assert numbers["mbsu"] == pytest.approx(10 * 1000 / (3 * 1000 + 15 * 100))
    assert numbers["draft_seconds"] == pytest.approx(0.03)
    assert numbers["verify_seconds"] == pytest.approx(0.06)
    assert numbers["other_seconds"] == pytest.approx(0.015)
    assert numbers["bandwidth_fraction"] == pytest.approx(10 / 0.6 * 1000 / 1e6)
    baseline = found["baseline"]
    assert baseline["tokens_per_second"] == 4.4 and baseline["hf_generate_tokens_per_second"] is None
    assert baseline["quoted_against"] == "engine"
    assert baseline["bandwidth_fraction"] == pytest.approx(10 / 2.0 * 1000 / 1e6), "of decoding alone"
    assert baseline["ceiling_tokens_per_second"] == pytest.approx(1e6 / 1000), "whatever a prompt takes"


def test_questions_by_hand():
    """One exact question of two turns, two repeats each; one that failed; one whose second turn is a violation."""
    method = [generation([2, 5], seconds=1.0), generation([2, 5], seconds=2.0)]  # 10 tokens
    plain = [generation([0] * 9, seconds=4.0, drafted=0)] * 2
    two = [turn(i, baseline=plain, method=method) for i in range(2)]
    ties = [turn(0, TIE, baseline=plain, method=method), turn(1, VIOLATION, baseline=plain, method=method)]
    records = migrated([record(7, "rag", turns=two), record(3, error="no room"), record(5, turns=ties)])
    found = metrics.by_question(records, "baseline", "question")
    assert list(found["question_id"]) == [3, 5, 7] and list(found["task"]) == ["qa", "qa", "rag"]
    assert list(found["verdict"]) == [None, "violation", "exact"]
    assert list(found["error"]) == ["no room", None, None]
    numbers = found.loc[2, "tokens":"acceptance_rate"]
    assert list(numbers) == pytest.approx([20, 8.0, 3.0, 8 / 3, 9 / 2, 7 / 10])
    assert found.loc[0, "tokens":"acceptance_rate"].isna().all()
    pooled = metrics.by_question(records, "baseline", "pool")
    assert pooled[["baseline_seconds", "method_seconds", "speedup"]].isna().all(axis=None)
    assert pooled.loc[2, "acceptance_length"] == 4.5
    empty = metrics.by_question([], "baseline", "question")
    assert list(empty) == list(found) and empty.empty
    assert metrics.by_question([record(1, error="no room")], "baseline", "question")["tokens"].isna().all()


@pytest.mark.slow
@settings(deadline=None, max_examples=10)
@given(questions())
def test_questions_add_up_to_the_whole(records):
    found, whole = metrics.by_question(records, "baseline", "question"), overall(records)
    assert found["baseline_seconds"].sum() / found["method_seconds"].sum() == pytest.approx(whole["speedup"])
    assert found["tokens"].sum() == whole["tokens"] and len(found) == whole["questions"]


def test_the_summary_has_the_keys_that_others_read():
    found = metrics.summary([answered(1), answered(2, "rag")], FACTS, CONFIG)
    assert {
        *(
            "schema",
            "status",
            "method",
            "pair",
            "data",
            "task",
            "temperature",
            "batch_size",
            "dtype",
            "device",
        ),
        *("overall", "tasks", "equivalence", "baseline"),
    } <= set(found)
    assert (found["schema"], found["status"], found["method"], found["pair"]) == (
        metrics.SCHEMA,
        "complete",
        "sps",
        "tiny",
    )
    assert found["settings"] == {"max_draft_tokens": 5}
    assert list(found["tasks"]) == ["qa", "rag"]
    for numbers in (found["overall"], *found["tasks"].values()):
        assert set(KEYS) <= set(numbers)
    assert set(found["equivalence"]) == {"answers", "exact", "tie", "violation", "first_divergence_median"}
    assert {"tokens_per_second", "hf_generate_tokens_per_second", "bandwidth_fraction"} <= set(
        found["baseline"]
    )
    json.dumps(found, allow_nan=False)


@pytest.mark.slow
@settings(deadline=None, max_examples=10)
@given(questions(), st.sampled_from([0.25, 2.0]))
def test_the_unit_of_time_leaves_ratios_alone(records, factor):
    one, other = overall(records), overall(scaled(records, factor))
    for name, value in one.items():
        if value is None:
            assert other[name] is None
        elif name.endswith("seconds"):
            assert other[name] == pytest.approx(value * factor)
        elif name in ("tokens_per_second", "bandwidth_fraction"):
            assert other[name] == pytest.approx(value / factor)
        else:
            assert other[name] == value


@pytest.mark.slow
@settings(deadline=None, max_examples=10)
@given(questions(min_size=6, slow=st.just(1.0)))
def test_a_baseline_against_itself_holds_1(records):
    found = overall(records)
    assert found["speedup"] == found["speedup_low"] == found["speedup_high"] == 1.0
    assert found["spec_bench_speedup"] == pytest.approx(1.0)


def test_the_interval_does_not_depend_on_the_order_of_the_questions():
    records = [answered(i, slow=1 + i % 4, accepted=[i % 6]) for i in range(12)]
    names = ("speedup", "speedup_low", "speedup_high")
    assert [overall(records)[n] for n in names] == [overall(records[::-1])[n] for n in names]


def test_autoregressive_decoding_as_a_method():
    plain = generation([0] * 5, drafted=0)
    found = overall([record(turns=[turn(baseline=plain, method=plain)])])
    assert found["acceptance_length"] == 1.0 and found["mbsu"] == 1.0
    assert found["acceptance_rate"] is None
    assert found["acceptance_by_position"] == found["acceptance_by_position_conditional"] == []


def test_repeats_are_averaged_per_question_and_totalled_in_sums():
    def repeats(*spent):
        return [generation([1, 1], seconds=s) for s in spent]

    first = record(1, turns=[turn(baseline=repeats(4.0, 2.0), method=repeats(1.0, 2.0))])
    second = record(2, turns=[turn(baseline=repeats(6.0), method=repeats(3.0, 3.0))])
    found = overall(migrated([first, second]))
    assert found["speedup"] == pytest.approx((3.0 + 6.0) / (1.5 + 3.0))
    assert (found["questions"], found["tokens"], found["seconds"]) == (2, 20, 9.0)


def test_answers_of_other_lengths_are_compared_over_equal_tokens():
    """Both arms decode 20 tokens/s; the method's answer is half as long, which must win it nothing."""
    plain = generation([0] * 20, seconds=0.5 + 1.0, prefill=0.5, drafted=0)
    method = generation([0] * 10, seconds=0.5 + 0.5, prefill=0.5)
    found = overall([record(turns=[turn(baseline=plain, method=method, equivalence=TIE)])])
    assert found["speedup"] == pytest.approx(1.0)
    assert found["decode_speedup"] == pytest.approx(1.0)


def test_an_answer_that_cannot_be_scaled_is_left_out_of_the_comparison():
    short = generation([], seconds=0.1)
    long = generation([0] * 9, seconds=1.0, drafted=0)
    found = overall(
        [record(1, turns=[turn(baseline=long, method=short, equivalence=TIE)]), answered(2, slow=3.0)]
    )
    assert found["questions"] == 2 and found["speedup_questions"] == 1
    assert found["speedup"] == pytest.approx(3.0)
    both_short = overall([record(turns=[turn(baseline=generation([], seconds=0.3), method=short)])])
    assert both_short["speedup"] == pytest.approx(3.0) and both_short["acceptance_length"] is None


def hf(count, seconds):
    return generation(tokens=count, seconds=seconds, prefill=None)


def test_the_faster_baseline_is_the_one_that_is_quoted():
    method, plain = generation([4], seconds=1.0), generation([0] * 5, seconds=2.0, drafted=0)
    slower = metrics.summary(
        [record(turns=[turn(baseline=plain, method=method, hf_generate=hf(6, 3.0))])], FACTS, CONFIG
    )
    assert slower["baseline"]["quoted_against"] == "engine" and slower["overall"]["speedup"] == 2.0
    assert slower["baseline"]["hf_generate_tokens_per_second"] == 2.0
    faster = metrics.summary(
        [record(turns=[turn(baseline=plain, method=method, hf_generate=hf(6, 1.5))])], FACTS, CONFIG
    )
    assert faster["baseline"]["quoted_against"] == "hf_generate" and faster["overall"]["speedup"] == 1.5
    assert faster["overall"]["spec_bench_speedup"] == 1.5
    assert faster["overall"]["decode_speedup"] is None  # its prefill was not timed
    assert faster["baseline"]["bandwidth_fraction"] == pytest.approx(4.0 * 1000 / 1e6)


def test_baselines_are_compared_on_the_questions_that_both_answered():
    timed = record(1, turns=[turn(baseline=generation([0] * 9, seconds=1.0), method=generation([8]),
                                  hf_generate=hf(10, 2.0))])  # fmt: skip
    rest = record(2, turns=[turn(baseline=generation([0] * 9, seconds=50.0), method=generation([8]))])
    found = metrics.summary([timed, rest], FACTS, CONFIG)["baseline"]
    assert (found["tokens_per_second"], found["hf_generate_tokens_per_second"]) == (10.0, 5.0)
    assert found["quoted_against"] == "engine"


def test_failed_questions_count_as_failed_and_nowhere_else():
    failed = record(9, "rag", error="out of memory")
    found = metrics.summary([answered(1), failed], FACTS, CONFIG)
    assert (found["status"], found["failed"]) == ("failed", 1)
    assert found["overall"] == metrics.summary([answered(1)], FACTS, CONFIG)["overall"]
    assert found["tasks"]["rag"]["questions"] == 0
    assert all(found["tasks"]["rag"][key] is None for key in KEYS if key != "questions")
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("records", [[], [record(error="no memory")]])
def test_nothing_measured_is_none(records):
    found = metrics.summary(records, FACTS, CONFIG)
    assert all(found["overall"][key] is None for key in KEYS if key != "questions")
    assert found["equivalence"] == {
        "answers": 0, "exact": None, "tie": None, "violation": None, "first_divergence_median": None
    }  # fmt: skip
    assert found["baseline"]["tokens_per_second"] is None and found["baseline"]["bandwidth_fraction"] is None


def test_equivalence_counts_answers():
    unjudged = dict.fromkeys(EXACT)
    turns = [turn(i, certificate) for i, certificate in enumerate([EXACT, TIE, TIE, VIOLATION, unjudged])]
    found = metrics.equivalence([record(turns=turns)])
    assert found == {"answers": 4, "exact": 1, "tie": 2, "violation": 1, "first_divergence_median": 4.0}


def test_an_unknown_bandwidth_leaves_the_fraction_open():
    found = metrics.summary([answered()], FACTS | {"bandwidth_bytes_per_second": None}, CONFIG)
    assert found["overall"]["bandwidth_fraction"] is None and found["baseline"]["bandwidth_fraction"] is None


@settings(deadline=None, max_examples=20)
@given(questions())
def test_frames_hold_every_generation_and_every_round(records):
    generations, steps = generations_frame(records), steps_frame(records)
    counted = [g for r in records for t in r["turns"] for arm in t["arms"].values() for g in arm]
    assert len(generations) == len(counted)
    assert len(steps) == sum(len(g["steps"]["emitted"]) for g in counted)
    assert steps["emitted"].sum() == generations["tokens"].sum() - len(generations)
    assert not steps.duplicated(["question_id", "turn", "arm", "repeat", "step"]).any()


@pytest.mark.process
@pytest.mark.parametrize("module", ["specbench.measure.metrics.summary", "specbench.data.questions"])
def test_imports_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def batched_run(seconds: list[list[tuple[float, float]]]) -> list[dict]:
    """One question per pool; for each repeat the seconds of the baseline and of the method, two rows a round."""
    records = []
    for pool, repeats in enumerate(seconds):
        rounds = [
            {"accepted": 1, "sequences": 2, "align_seconds": 0.1, "stats": {"grouped": i == 0}}
            for i in range(4)
        ]
        method = [generation([1] * 4, seconds=m) | {"steps": columns(rounds)} for _, m in repeats]
        plain = [generation([0] * 8, seconds=b, drafted=0) for b, _ in repeats]
        single = [generation([0] * 8, seconds=9.0 + i, drafted=0) for i in range(len(repeats))]
        records.append(record(pool, pool=pool, turns=[turn(baseline=plain, method=method, single=single)]))
    return migrated(records)


def test_a_batch_run_by_hand():
    records = batched_run([[(2.0, 1.0), (8.0, 2.0)], [(3.0, 1.5), (4.0, 4.0)]])
    config = CONFIG | {
        "batch_size": 4,
        "method": {
            "_target_": "methods.exspec.ExSpec",
            "name": "exspec",
            "batch_size": 8,
            "repeats": 3,
            "window": 5,
        },
    }
    found = metrics.summary(records, FACTS | {"unit": "pool", "peak_memory_bytes": 7}, config)
    numbers, ratios = found["overall"], np.log([10 / 3, 7 / 5.5])  # of the two pools, repeats together
    assert numbers["speedup"] == pytest.approx(17 / 8.5) and numbers["pools"] == 2
    half = 12.7062 * ratios.std(ddof=1) / np.sqrt(2)
    assert numbers["speedup_high"] == pytest.approx(2 * np.exp(half), rel=1e-4)
    assert numbers["occupancy"] == pytest.approx(2 / 4)  # two sequences in each round, slots for four
    assert numbers["stats"]["grouping_rate"] == pytest.approx(1 / 4)
    assert found["notes"] == ["grouping rate 25%"]
    assert numbers["mbsu"] == pytest.approx(2 / (1 + 500 / 1000))  # as of one sequence
    task = found["tasks"]["qa"]
    assert (task["speedup"], task["tokens_per_second"], task["decode_speedup"]) == (None, None, None)
    assert task["acceptance_length"] == 2 and numbers["spec_bench_speedup"] is None
    assert numbers["align_seconds"] == pytest.approx(16 * 0.1)
    assert numbers["alignment_share"] == pytest.approx(1.6 / 8.5)
    assert found["baseline"]["single_tokens_per_second"] == pytest.approx(4 * 9 / 38)
    assert (found["drafter"], found["batch_size"], found["peak_memory_bytes"]) == ("none", 4, 7)
    assert found["settings"] == {"window": 5}
    alone = metrics.summary([answered(1)], FACTS, CONFIG)
    assert alone["drafter"] is None and alone["overall"]["occupancy"] is alone["overall"]["pools"] is None
    assert alone["baseline"]["single_tokens_per_second"] is None


def test_a_batch_is_held_against_the_ceiling_of_its_sequences():
    """Eight passes for two sequences each: the memory allows twice as many tokens as of one sequence."""
    records, facts = batched_run([[(2.0, 1.0)]]), FACTS | {"unit": "pool"}
    records[0]["turns"][0]["arms"]["baseline"][0]["steps"]["sequences"] = [2] * 8
    found = metrics.summary(records, facts, CONFIG)
    assert found["baseline"]["ceiling_tokens_per_second"] == pytest.approx(2 * 1e6 / 1000)
    assert found["baseline"]["bandwidth_fraction"] == pytest.approx(8 / (2.0 - 0.1) / 2000)
    assert found["overall"]["bandwidth_fraction"] == pytest.approx(8 / (1.0 - 0.1) / 2000)
    steps = steps_frame(records)
    plain = steps[steps["arm"] == "baseline"]
    assert mbsu(plain, 1000) == 1.0
    # How many sequences share a pass, neither transformers' generate nor another engine tells.
    other = facts | {"engine": {"name": "x"}}
    assert ceiling_rate(plain.iloc[:0], facts) is ceiling_rate(plain, other) is None
    assert ceiling_rate(plain.iloc[:0], FACTS) == pytest.approx(1e6 / 1000)


# -- Spec-Bench's own definitions


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
    return migrated(random.Random(0).sample(records, len(records)))


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


# -- parts of a run, for comparisons of several


def varied(count: int = 12) -> list[dict]:
    draw = np.random.default_rng(0)
    return [
        answered(i, "qa", draw.integers(0, 6, 4).tolist(), float(draw.uniform(1, 3)), 1 + i % 2)
        for i in range(count)
    ]


def test_parts_make_the_numbers_of_a_run():
    records = varied()
    numbers = overall(records)
    for what, key in (("speedup", "speedup"), ("mbsu", "mbsu")):
        found = metrics.parts(records, what, "question")
        assert found.index.tolist() == list(range(12))
        assert found["above"].sum() / found["below"].sum() == pytest.approx(numbers[key])


def test_bytes_of_large_models_are_counted_whole():
    """Six tokens of a target of 400 MB are more than 31 bits count."""
    small = varied()
    large = json.loads(json.dumps(small))  # no two turns share a step
    for step in (g["steps"] for r in large for t in r["turns"] for arm in t["arms"].values() for g in arm):
        for name in ("draft_bytes", "target_bytes"):
            step[name] = [400_000 * count for count in step[name]]
    one, other = (metrics.parts(records, "mbsu", "question") for records in (small, large))
    assert (other["above"] / other["below"]).tolist() == pytest.approx((one["above"] / one["below"]).tolist())


def test_parts_of_batches_are_runs_of_pools():
    """Decoding one by one is timed in every repeat: 9 s, then 10."""
    records = batched_run([[(2.0, 1.0), (8.0, 2.0)], [(3.0, 1.5), (4.0, 4.0)]])
    speedups = metrics.parts(records, "speedup", "pool")
    assert speedups.index.tolist() == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert speedups.to_numpy().tolist() == [[2.0, 1.0], [8.0, 2.0], [3.0, 1.5], [4.0, 4.0]]
    throughput = metrics.parts(records, "throughput", "pool")
    assert throughput.index.tolist() == speedups.index.tolist()
    assert throughput.to_numpy().tolist() == [[9.0, 1.0], [10.0, 2.0], [9.0, 1.5], [10.0, 4.0]]
    read = metrics.parts(records, "mbsu", "pool")
    numbers = overall(records, FACTS | {"unit": "pool"})
    assert read["above"].sum() / read["below"].sum() == pytest.approx(numbers["mbsu"])
    alone = [r | {"turns": [t | {"arms": {k: v for k, v in t["arms"].items() if k != "single"}} for t in r["turns"]]}
             for r in records]  # fmt: skip
    of_one = metrics.parts(alone, "throughput", "pool")  # batches of one row: no arm of its own
    assert of_one.to_numpy().tolist() == speedups.to_numpy().tolist()


def test_autoregressive_decoding_that_was_timed_once_gives_no_interval():
    """Folders of earlier versions: its noise is in no repeat, so only the first one of a pool counts."""
    records = batched_run([[(2.0, 1.0), (8.0, 2.0), (3.0, 1.5)]])
    for one in records[1:]:
        del one["turns"][0]["arms"]["single"]
    throughput = metrics.parts(records, "throughput", "pool")
    assert throughput.to_numpy().tolist() == [[9.0, 1.0]]
    plain = metrics.parts(batched_run([[(2.0, 2.0)] * 3]), "throughput", "pool")
    found = metrics.relative([plain], [throughput])
    assert found == (Speedup(2.0, None, None), 1, "repeat")
    assert metrics.single_rate(generations_frame(records)) == 1.0


def test_the_noise_of_autoregressive_decoding_is_in_the_interval():
    """The method takes one second in every repeat: all of the spread is that of decoding one by one, 9 to 11 s."""
    throughput = metrics.parts(batched_run([[(2.0, 1.0)] * 3]), "throughput", "pool")
    exact = throughput.assign(above=10.0)
    found, count, unit = metrics.relative([exact], [throughput])
    assert (count, unit) == (3, "repeat") and found.value == 1.0
    assert found.low < 0.9 and found.high > 1.1


def test_processes_that_differ_widen_the_interval_of_batches_too():
    """Each process ran every pool once, and the second was slower with the method; pools are alike."""
    journals = [batched_run([[(2.0, seconds)], [(4.0, 2 * seconds)]]) for seconds in (1.0, 1.1)]
    records = [
        one | {"process": process, "repeat": process}
        for process, journal in enumerate(journals)
        for one in journal
    ]
    run, by_process = (
        found(records, "speedup", "pool") for found in (metrics.parts, metrics.parts_by_process)
    )
    assert [frame["below"].sum() for frame in by_process] == pytest.approx([3, 3.3])
    alone = metrics.relative([run], [run]).ratio
    assert (alone.low, alone.high) == (1, 1)
    found = metrics.relative([run], [run], [by_process, by_process]).ratio
    # Each run's mean of two logarithms that are ln(1.1) apart, with one degree of freedom.
    half = np.log(1.1) / 2 * 12.7062 * np.sqrt(2)
    assert found.value == 1 and np.log(found.high) == pytest.approx(half, rel=0.02) and found.low < 1
    once = metrics.relative([run], [run], [by_process[:1], by_process[:1]]).ratio
    assert once == alone
    assert metrics.parts_by_process(records, "acceptance_length", "pool") == []


def test_relative_rests_on_pools_where_there_are_several():
    records = batched_run([[(2.0, 1.0), (8.0, 2.0)], [(3.0, 1.5), (4.0, 4.0)]])
    run = metrics.parts(records, "speedup", "pool")
    assert metrics.relative([run], [run]) == (Speedup(1.0, 1.0, 1.0), 2, "pool")
    first = run.loc[[0]]
    assert metrics.relative([run], [first]) == (Speedup(1.0, 1.0, 1.0), 2, "repeat")
    doubled = [run, run.assign(above=2 * run["above"])]
    assert metrics.relative([run], doubled).ratio.value == pytest.approx(1.5)


def test_relative_counts_the_questions_that_are_in_all_runs():
    records = varied()
    first, second = (metrics.parts(scaled(records, factor), "speedup", "question") for factor in (1.0, 1.3))
    found, count, _ = metrics.relative([first], [second])
    assert (found.value, found.low, found.high) == pytest.approx((1, 1, 1)) and count == 12
    faster = second.assign(below=second["below"] / 1.25)
    found, count, _ = metrics.relative([first.iloc[2:]], [faster.iloc[::-1].iloc[2:]])
    assert (found.value, found.low, found.high) == pytest.approx((1.25, 1.25, 1.25)) and count == 8
    found, count, _ = metrics.relative([first, first], [faster, second])
    r = first["above"].sum() / first["below"].sum()
    assert found.value == pytest.approx((1.25 * r + r) / 2 / r)
    none = (Speedup(None, None, None), 0, "question")
    assert metrics.relative([first.iloc[:2]], [second.iloc[2:]]) == none
    nothing = metrics.parts([], "speedup", "question")
    assert metrics.relative([first], [nothing]) == none
    for what, unit in [("throughput", "pool"), ("mbsu", "question"), ("mbsu", "pool")]:
        assert metrics.parts([], what, unit).empty


def test_numbers_without_bytes_are_null():
    records = [answered(i, "qa", [2, 0, 3], 2.0) for i in range(6)]
    for one in records:
        one["turns"][0]["arms"]["method"][0]["steps"]["target_bytes"][1] = None
    facts = FACTS | {"bandwidth_bytes_per_second": 1e9}
    known, unknown = (overall(records, facts | {"target_pass_bytes": read}) for read in (1000, None))
    assert known["mbsu"] is unknown["mbsu"] is None and unknown["speedup"] == known["speedup"] == 2.0
    assert known["bandwidth_fraction"] > 0 and unknown["bandwidth_fraction"] is None
    assert metrics.parts(records, "mbsu", "question", 1000).empty, (
        "null here, too: a gate must not pass on it"
    )


def test_a_batch_of_autoregressive_decoding_reads_more_experts_than_one_sequence():
    """So what MBSU compares with is a pass of one token, not the baseline's largest one."""
    records = [answered(i, "qa", [2, 0, 3], 2.0) for i in range(6)]
    of_batch, of_one = (metrics.parts(records, "mbsu", "question", read) for read in (None, 500))
    assert (of_batch["above"] / of_one["above"]).tolist() == [2.0] * 6
    assert of_batch["below"].equals(of_one["below"])
