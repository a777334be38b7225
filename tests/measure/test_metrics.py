"""From journal records to a summary: numbers by hand, what was not measured, which baseline is quoted."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.measure.metrics import dataframes
from specbench.measure.metrics.acceptance import STRETCHES, mbsu, rounds_over
from specbench.measure.metrics.dataframes import STEP_COLUMNS, generations_frame, steps_frame
from specbench.measure.metrics.metrics import ceiling_rate, equivalence
from specbench.measure.metrics.questions import by_question
from specbench.measure.metrics.summary import SCHEMA, summarise
from tests.support.samples import summarised
from tests.support.synthetic import (
    CONFIG,
    EXACT,
    FACTS,
    TIE,
    VIOLATION,
    answered,
    batched_run,
    by_repeat,
    generation,
    overall,
    questions,
    record,
    scaled,
    turn,
)

OF_VERDICTS = ("exact", "tie", "violation", "first_divergence_median", "tie_margin", "tie_noise")
KEYS = [
    *("questions", "tokens", "seconds", "tokens_per_second", "speedup", "speedup_low", "speedup_high"),
    *("decode_speedup", "decode_speedup_low", "decode_speedup_high"),
    *("spec_bench_speedup", "acceptance_length", "acceptance_rate", "mbsu"),
    *("draft_seconds", "verify_seconds", "other_seconds"),
]


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


def test_the_size_of_a_model_changes_no_number():
    """Not for a target of 100 GB either: its bytes leave 32 bits."""
    times, names = 10**8, ("draft_bytes", "target_bytes")

    def numbers(scale: int) -> list[dict]:
        arms = [generation([0] * 10, drafted=0), generation([2, 5, 0])]
        for one in arms:
            one["steps"] |= {name: [scale * value for value in one["steps"][name]] for name in names}
        sizes = ("target_pass_bytes", "bandwidth_bytes_per_second")
        facts = FACTS | {name: scale * FACTS[name] for name in sizes}
        whole = summarise([record(turns=[turn(baseline=arms[0], method=arms[1])])], facts, CONFIG)
        blocks = [whole["overall"], *whole["tasks"].values(), whole["baseline"]]
        return [{k: v for k, v in one.items() if not isinstance(v, (dict, list))} for one in blocks]

    for small, large in zip(numbers(1), numbers(times), strict=True):
        assert large == pytest.approx(small)


def test_numbers_of_one_question_by_hand():
    method = generation([2, 5, 0], seconds=1.0, prefill=0.4)  # 11 tokens in 3 rounds
    plain = generation([0] * 10, seconds=2.5, prefill=0.5, drafted=0)
    found = summarise([record(turns=[turn(baseline=plain, method=method)])], FACTS, CONFIG)
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
    records = by_repeat([record(7, "rag", turns=two), record(3, error="no room"), record(5, turns=ties)])
    found = by_question(records, "baseline", "question")
    assert list(found["question_id"]) == [3, 5, 7] and list(found["task"]) == ["qa", "qa", "rag"]
    assert list(found["verdict"]) == [None, "violation", "exact"]
    assert list(found["error"]) == ["no room", None, None]
    numbers = found.loc[2, "tokens":"acceptance_rate"]
    assert list(numbers) == pytest.approx([20, 8.0, 3.0, 8 / 3, 9 / 2, 7 / 10])
    assert found.loc[0, "tokens":"acceptance_rate"].isna().all()
    pooled = by_question(records, "baseline", "pool")
    assert pooled[["baseline_seconds", "method_seconds", "speedup"]].isna().all(axis=None)
    assert pooled.loc[2, "acceptance_length"] == 4.5
    empty = by_question([], "baseline", "question")
    assert list(empty) == list(found) and empty.empty
    assert by_question([record(1, error="no room")], "baseline", "question")["tokens"].isna().all()


@pytest.mark.slow
@settings(deadline=None, max_examples=10)
@given(questions())
def test_questions_add_up_to_the_whole(records):
    found, whole = by_question(records, "baseline", "question"), overall(records)
    assert found["baseline_seconds"].sum() / found["method_seconds"].sum() == pytest.approx(whole["speedup"])
    assert found["tokens"].sum() == whole["tokens"] and len(found) == whole["questions"]


def test_the_summary_has_the_keys_that_others_read():
    data = CONFIG["data"] | {"split": "low", "turns": 1}
    found = summarise([answered(1), answered(2, "rag")], FACTS, CONFIG | {"data": data})
    assert [found[key] for key in ("split", "turns", "questions_sha256")] == ["low", 1, "e" * 64]
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
        SCHEMA,
        "complete",
        "sps",
        "tiny",
    )
    assert found["settings"] == {"max_draft_tokens": 5}
    assert list(found["tasks"]) == ["qa", "rag"]
    for numbers in (found["overall"], *found["tasks"].values()):
        assert set(KEYS) <= set(numbers)
    assert set(found["equivalence"]) == {"answers", *OF_VERDICTS}
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
    forwards, backwards = overall(records), overall(records[::-1])
    assert [forwards[n] for n in names] == [backwards[n] for n in names]


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
    found = overall(by_repeat([first, second]))
    assert found["speedup"] == pytest.approx((3.0 + 6.0) / (1.5 + 3.0))
    assert (found["questions"], found["tokens"], found["seconds"]) == (2, 20, 9.0)


def test_answers_of_other_lengths_are_compared_over_equal_tokens():
    """Both arms decode 20 tokens/s; the method's answer is half as long, which must win it nothing."""
    plain = generation([0] * 20, seconds=0.5 + 1.0, prefill=0.5, drafted=0)
    method = generation([0] * 10, seconds=0.5 + 0.5, prefill=0.5)
    found = overall([record(turns=[turn(baseline=plain, method=method, equivalence=TIE)])])
    assert found["speedup"] == pytest.approx(1.0)
    assert found["decode_speedup"] == pytest.approx(1.0)


def test_one_factor_scales_all_answers():
    """18 tokens of the baseline after the first ones against 9: the missing ones count at the method's pace."""
    short = generation([], seconds=0.5, prefill=0.5)
    long = generation([0] * 9, seconds=1.0 + 0.5, prefill=0.5, drafted=0)
    cut = record(1, turns=[turn(baseline=long, method=short, equivalence=TIE)])
    full = record(2, turns=[turn(baseline=long, method=generation([8], seconds=0.5 + 0.2, prefill=0.5))])
    found = overall([cut, full])
    assert found["speedup_questions"] == 2
    assert found["speedup"] == pytest.approx(3.0 / (1.0 + 0.2 * 18 / 9))
    assert found["decode_speedup"] == pytest.approx(2.0 / (0.2 * 18 / 9))
    assert overall([cut])["speedup"] is None, "there is no pace to scale by"
    both_short = overall([record(turns=[turn(baseline=generation([], seconds=0.3), method=short)])])
    assert both_short["speedup"] == pytest.approx(0.6) and both_short["acceptance_length"] is None


def test_an_answer_whose_prefill_was_not_timed_is_scaled_as_a_whole():
    """As of batches of another engine."""
    plain = generation([0] * 19, seconds=2.0, prefill=None, drafted=0)
    half = generation([0] * 9, seconds=1.0, prefill=None)
    found = overall([record(turns=[turn(baseline=plain, method=half, equivalence=TIE)])])
    assert found["speedup"] == pytest.approx(1.0)


def test_a_question_is_left_out_with_all_its_turns():
    plain, short = generation([0] * 9, seconds=1.0, drafted=0), generation([], seconds=0.1)
    fine = turn(0, baseline=generation([0] * 9, seconds=9.0, drafted=0), method=generation([0] * 9))
    plain["seconds"] = None
    mixed = record(1, turns=[fine, turn(1, baseline=plain, method=short, equivalence=TIE)])
    found = overall([mixed, answered(2, slow=3.0)])
    assert found["speedup_questions"] == 1 and found["speedup"] == pytest.approx(3.0)


def test_a_round_belongs_to_the_stretch_that_begins_with_it():
    edge = STRETCHES["place"][1]
    rounds = pd.DataFrame({"place": [edge - 1, edge], "emitted": [1, 1]})
    assert rounds_over(rounds, "place") == [1, 1]


def hf(count, seconds):
    return generation(tokens=count, seconds=seconds, prefill=None)


def test_the_faster_baseline_is_the_one_that_is_quoted():
    method, plain = generation([4], seconds=1.0), generation([0] * 5, seconds=2.0, drafted=0)
    slower = summarise(
        [record(turns=[turn(baseline=plain, method=method, hf_generate=hf(6, 3.0))])], FACTS, CONFIG
    )
    assert slower["baseline"]["quoted_against"] == "engine" and slower["overall"]["speedup"] == 2.0
    assert slower["baseline"]["hf_generate_tokens_per_second"] == 2.0
    faster = summarise(
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
    found = summarise([timed, rest], FACTS, CONFIG)["baseline"]
    assert (found["tokens_per_second"], found["hf_generate_tokens_per_second"]) == (10.0, 5.0)
    assert found["quoted_against"] == "engine"


def test_drawn_answers_of_failed_questions_are_judged():
    """One that is wrong is so whether or not a later turn failed."""
    drawn = {"tokens": 10, "logprob": -5.0, "surprise": -8.0, "variance": 4.0}
    failed = answered(9, "rag", error="out of memory")
    failed["turns"][0]["likelihood"] = {"baseline": drawn, "method": drawn}
    found = summarise([answered(1), failed], FACTS, CONFIG)
    assert found["failed"] == 1 and found["likelihood"]["method"]["logprob"] == -0.5


def test_failed_questions_count_as_failed_and_nowhere_else():
    failed = record(9, "rag", error="out of memory")
    found = summarise([answered(1), failed], FACTS, CONFIG)
    assert (found["status"], found["failed"]) == ("failed", 1)
    assert found["overall"] == summarised([answered(1)])["overall"]
    assert found["tasks"]["rag"]["questions"] == 0
    assert all(found["tasks"]["rag"][key] is None for key in KEYS if key != "questions")
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("records", [[], [record(error="no memory")]])
def test_nothing_measured_is_none(records):
    found = summarise(records, FACTS, CONFIG)
    assert all(found["overall"][key] is None for key in KEYS if key != "questions")
    assert found["equivalence"] == {"answers": 0} | dict.fromkeys(OF_VERDICTS)
    assert found["baseline"]["tokens_per_second"] is None and found["baseline"]["bandwidth_fraction"] is None


def test_equivalence_counts_answers():
    unjudged = dict.fromkeys(EXACT)
    wider = TIE | {"margin": -0.25, "noise": 0.5}
    turns = [turn(i, certificate) for i, certificate in enumerate([EXACT, TIE, wider, VIOLATION, unjudged])]
    found = equivalence([record(turns=turns)])
    widest = {"tie_margin": 0.25, "tie_noise": 0.5}
    counts = {"answers": 4, "exact": 1, "tie": 2, "violation": 1}
    assert found == counts | {"first_divergence_median": 4.0} | widest
    repeats = [record(turns=[turn(0, certificate)]) for certificate in (TIE, wider, TIE)]
    assert equivalence(repeats) == counts | {
        "answers": 1, "exact": 0, "tie": 1, "violation": 0, "first_divergence_median": 4.0
    } | widest, "the widest tie of any repeat"  # fmt: skip


def test_an_unknown_bandwidth_leaves_the_fraction_open():
    found = summarise([answered()], FACTS | {"bandwidth_bytes_per_second": None}, CONFIG)
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


@pytest.mark.parametrize("unit", ["question", "pool"])
def test_records_are_made_into_tables_once(monkeypatch, unit):
    """Whatever reads them: the baseline, all questions, each task, each third."""
    made, generations = [], dataframes._generations
    monkeypatch.setattr(dataframes, "_generations", lambda records: made.append(1) or generations(records))
    records = [answered(i, "qa" if i % 2 else "rag") for i in range(6)]
    learns = CONFIG | {"method": CONFIG["method"] | {"memory": "run"}}
    found = summarise(records, FACTS | {"unit": unit}, learns)
    assert len(found["tasks"]) == 2 and (unit == "pool" or found["drift"])
    assert len(made) == 2, "answers and rounds"


@pytest.mark.process
@pytest.mark.parametrize("module", ["specbench.measure.metrics.summary", "specbench.data.questions"])
def test_imports_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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
    found = summarise(records, FACTS | {"unit": "pool", "peak_memory_bytes": 7}, config)
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
    engine = summarise(
        records, FACTS | {"unit": "pool"}, config | {"engine": {"name": "vllm", "speculative": {}}}
    )["overall"]
    assert engine["align_seconds"] is engine["alignment_share"] is engine["occupancy"] is None
    assert found["baseline"]["single_tokens_per_second"] == pytest.approx(4 * 9 / 38)
    assert (found["drafter"], found["batch_size"], found["peak_memory_bytes"]) == ("none", 4, 7)
    assert found["settings"] == {"window": 5}
    alone = summarised([answered(1)])
    assert alone["drafter"] is None and alone["overall"]["occupancy"] is alone["overall"]["pools"] is None
    assert alone["baseline"]["single_tokens_per_second"] is None


def test_a_batch_is_held_against_the_ceiling_of_its_sequences():
    """Eight passes for two sequences each: the memory allows twice as many tokens as of one sequence."""
    records, facts = batched_run([[(2.0, 1.0)]]), FACTS | {"unit": "pool"}
    records[0]["turns"][0]["arms"]["baseline"][0]["steps"]["sequences"] = [2] * 8
    found = summarise(records, facts, CONFIG)
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
