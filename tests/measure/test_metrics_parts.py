"""The parts of a run's numbers, which comparisons of several runs rest on."""

from __future__ import annotations

import json

import numpy as np
import pytest

from specbench.measure.metrics.dataframes import generations_frame
from specbench.measure.metrics.relative import parts, parts_by_process, ratio_of_runs
from specbench.measure.metrics.statistics import Estimate
from specbench.measure.metrics.summary import single_rate
from tests.support.synthetic import FACTS, answered, batched_run, overall, scaled


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
        found = parts(records, what, "question")
        assert found.index.tolist() == list(range(12))
        assert found["above"].sum() / found["below"].sum() == pytest.approx(numbers[key])


def test_bytes_of_large_models_are_counted_whole():
    """Six tokens of a target of 400 MB are more than 31 bits count."""
    small = varied()
    large = json.loads(json.dumps(small))  # no two turns share a step
    for step in (g["steps"] for r in large for t in r["turns"] for arm in t["arms"].values() for g in arm):
        for name in ("draft_bytes", "target_bytes"):
            step[name] = [400_000 * count for count in step[name]]
    one, other = (parts(records, "mbsu", "question") for records in (small, large))
    assert (other["above"] / other["below"]).tolist() == pytest.approx((one["above"] / one["below"]).tolist())


def test_parts_of_batches_are_runs_of_pools():
    """Decoding one by one is timed in every repeat: 9 s, then 10."""
    records = batched_run([[(2.0, 1.0), (8.0, 2.0)], [(3.0, 1.5), (4.0, 4.0)]])
    speedups = parts(records, "speedup", "pool")
    assert speedups.index.tolist() == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert speedups[["above", "below"]].to_numpy().tolist() == [
        [2.0, 1.0],
        [8.0, 2.0],
        [3.0, 1.5],
        [4.0, 4.0],
    ]
    throughput = parts(records, "throughput", "pool")
    assert throughput.index.tolist() == speedups.index.tolist()
    assert throughput[["above", "below"]].to_numpy().tolist() == [
        [9.0, 1.0],
        [10.0, 2.0],
        [9.0, 1.5],
        [10.0, 4.0],
    ]
    read = parts(records, "mbsu", "pool")
    numbers = overall(records, FACTS | {"unit": "pool"})
    assert read["above"].sum() / read["below"].sum() == pytest.approx(numbers["mbsu"])
    alone = [r | {"turns": [t | {"arms": {k: v for k, v in t["arms"].items() if k != "single"}} for t in r["turns"]]}
             for r in records]  # fmt: skip
    of_one = parts(alone, "throughput", "pool")  # batches of one row: no arm of its own
    assert of_one.equals(speedups)


def test_autoregressive_decoding_that_was_timed_once_gives_no_interval():
    """Its noise is in no repeat, so only the first one of a pool counts."""
    records = batched_run([[(2.0, 1.0), (8.0, 2.0), (3.0, 1.5)]])
    for one in records[1:]:
        del one["turns"][0]["arms"]["single"]
    throughput = parts(records, "throughput", "pool")
    assert throughput[["above", "below"]].to_numpy().tolist() == [[9.0, 1.0]]
    plain = parts(batched_run([[(2.0, 2.0)] * 3]), "throughput", "pool")
    found = ratio_of_runs([plain], [throughput])
    assert found == (Estimate(2.0, None, None), 1, "repeat")
    assert single_rate(generations_frame(records)) == 1.0


def test_the_noise_of_autoregressive_decoding_is_in_the_interval():
    """The method takes one second in every repeat: all of the spread is that of decoding one by one, 9 to 11 s."""
    throughput = parts(batched_run([[(2.0, 1.0)] * 3]), "throughput", "pool")
    exact = throughput.assign(above=10.0)
    found, count, unit = ratio_of_runs([exact], [throughput])
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
    run, by_process = (found(records, "speedup", "pool") for found in (parts, parts_by_process))
    assert [frame["below"].sum() for frame in by_process] == pytest.approx([3, 3.3])
    alone = ratio_of_runs([run], [run]).ratio
    assert (alone.low, alone.high) == (1, 1)
    found = ratio_of_runs([run], [run], [by_process, by_process]).ratio
    # Each run's mean of two logarithms that are ln(1.1) apart, with one degree of freedom.
    half = np.log(1.1) / 2 * 12.7062 * np.sqrt(2)
    assert found.value == 1 and np.log(found.high) == pytest.approx(half, rel=0.02) and found.low < 1
    once = ratio_of_runs([run], [run], [by_process[:1], by_process[:1]]).ratio
    assert once == alone
    assert parts_by_process(records, "acceptance_length", "pool") == []


def test_relative_rests_on_pools_where_there_are_several():
    records = batched_run([[(2.0, 1.0), (8.0, 2.0)], [(3.0, 1.5), (4.0, 4.0)]])
    run = parts(records, "speedup", "pool")
    assert ratio_of_runs([run], [run]) == (Estimate(1.0, 1.0, 1.0), 2, "pool")
    first = run.loc[[0]]
    assert ratio_of_runs([run], [first]) == (Estimate(1.0, 1.0, 1.0), 2, "repeat")
    doubled = [run, run.assign(above=2 * run["above"])]
    assert ratio_of_runs([run], doubled).ratio.value == pytest.approx(1.5)


def test_relative_counts_the_questions_that_are_in_all_runs():
    records = varied()
    first, second = (parts(scaled(records, factor), "speedup", "question") for factor in (1.0, 1.3))
    found, count, _ = ratio_of_runs([first], [second])
    assert (found.value, found.low, found.high) == pytest.approx((1, 1, 1)) and count == 12
    faster = second.assign(below=second["below"] / 1.25)
    found, count, _ = ratio_of_runs([first.iloc[2:]], [faster.iloc[::-1].iloc[2:]])
    assert (found.value, found.low, found.high) == pytest.approx((1.25, 1.25, 1.25)) and count == 8
    found, count, _ = ratio_of_runs([first, first], [faster, second])
    r = first["above"].sum() / first["below"].sum()
    assert found.value == pytest.approx((1.25 * r + r) / 2 / r)
    none = (Estimate(None, None, None), 0, "question")
    assert ratio_of_runs([first.iloc[:2]], [second.iloc[2:]]) == none
    nothing = parts([], "speedup", "question")
    assert ratio_of_runs([first], [nothing]) == none
    for what, unit in [("throughput", "pool"), ("mbsu", "question"), ("mbsu", "pool")]:
        assert parts([], what, unit).empty


def test_numbers_without_bytes_are_null():
    records = [answered(i, "qa", [2, 0, 3], 2.0) for i in range(6)]
    for one in records:
        one["turns"][0]["arms"]["method"][0]["steps"]["target_bytes"][1] = None
    facts = FACTS | {"bandwidth_bytes_per_second": 1e9}
    known, unknown = (overall(records, facts | {"target_pass_bytes": read}) for read in (1000, None))
    assert known["mbsu"] is unknown["mbsu"] is None and unknown["speedup"] == known["speedup"] == 2.0
    assert known["bandwidth_fraction"] > 0 and unknown["bandwidth_fraction"] is None
    assert parts(records, "mbsu", "question", 1000).empty, "null here, too: a gate must not pass on it"


def test_a_batch_of_autoregressive_decoding_reads_more_experts_than_one_sequence():
    """So what MBSU compares with is a pass of one token, not the baseline's largest one."""
    records = [answered(i, "qa", [2, 0, 3], 2.0) for i in range(6)]
    of_batch, of_one = (parts(records, "mbsu", "question", read) for read in (None, 500))
    assert (of_batch["above"] / of_one["above"]).tolist() == [2.0] * 6
    assert of_batch["below"].equals(of_one["below"])
