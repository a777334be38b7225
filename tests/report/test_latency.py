"""How long single answers take: times by hand, percentiles that enough times hold, and what has no such times."""

from __future__ import annotations

import pytest

from specbench.measure.metrics.statistics import speedup
from specbench.report import latency as module
from specbench.report.latency import ANSWER, CHUNKS, FIRST, LATER, latencies, latency_table
from specbench.report.runs import Run
from tests.support.messages import shown
from tests.support.samples import SUMMARY, changed, runs_of
from tests.support.synthetic import generation, record, turn


def run(records: list[dict], name: str = "a", **changes) -> Run:
    made = runs_of(**{name: changed(SUMMARY, **changes)})[0]
    made.__dict__["records"] = records
    return made


def arms(first: float = 0.2, plain: float = 1.0, prefill: float = 0.25, ours: float = 0.75, rounds=(1, 1)):
    """Seconds of a turn's prefills and answers, which have as many tokens in both arms."""
    method = generation(rounds, ours, prefill)
    count = len(method["tokens"])
    return {"baseline": generation([0] * (count - 1), plain, first, drafted=0), "method": method}


def asked(count: int = 1, **more) -> list[dict]:
    return [record(i, turns=[turn(**arms(**more))]) for i in range(count)]


def by_name(records: list[dict]) -> dict[str, module.Latency]:
    return {one.name: one for one in latencies(run(records))}


def test_times_by_hand():
    found = by_name([record(turns=[turn(0, **arms()), turn(1, **arms(first=0.4, prefill=0.35))])])
    times = {
        name: [one.seconds[arm].round(6).tolist() for arm in ("baseline", "method")]
        for name, one in found.items()
    }
    assert times == {
        FIRST: [[0.2, 0.4], [0.25, 0.35]],
        LATER: [[0.2, 0.15], [0.125, 0.1]],  # of four tokens after the first
        CHUNKS: [[0.035] * 8, [0.035] * 4],
        ANSWER: [[1.0, 1.0], [0.75, 0.75]],
    }
    ratios = {name: one.ratio and round(one.ratio.value, 6) for name, one in found.items()}
    assert ratios == {FIRST: 1.0, LATER: round(0.35 / 0.225, 6), CHUNKS: None, ANSWER: round(2 / 1.5, 6)}


def test_a_ratio_has_the_interval_of_a_speedup():
    firsts = [0.2, 0.3, 0.25, 0.2, 0.4, 0.3, 0.2]
    records = [record(i, turns=[turn(**arms(first=first))]) for i, first in enumerate(firsts)]
    ratio = by_name(records)[FIRST].ratio
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx(
        [getattr(speedup(firsts, [0.25] * 7), name) for name in ("value", "low", "high")]
    )
    assert by_name(records[:5])[FIRST].ratio.low is None
    # How far processes differ counts, too.
    again = [one | {"process": 1, "repeat": 1} for one in asked(7, first=0.5)]
    both = by_name(records + again)[FIRST].ratio
    assert both.value == pytest.approx((sum(firsts) / 7 + 0.5) / 2 / 0.25)
    alike = [one | {"process": 1, "repeat": 1} for one in records]
    assert both.width > 2 * by_name(records + alike)[FIRST].ratio.width


def test_a_percentile_needs_enough_times():
    def cells(count: int) -> list[str]:
        lines = shown(latency_table(run(asked(count))), 140).splitlines()
        return next(line for line in lines if FIRST in line).split()[2:]

    assert cells(1) == ["baseline", "1", "200", "–", "–", "–"]
    assert cells(19) == ["baseline", "19", "200", "200", "–", "–"]
    assert cells(20) == ["baseline", "20", "200", "200", "200", "–"]
    assert cells(100) == ["baseline", "100", "200", "200", "200", "200"]
    spread = [record(i, turns=[turn(**arms(first=(i + 1) / 100))]) for i in range(101)]
    lines = shown(latency_table(run(spread)), 140).splitlines()
    assert next(line for line in lines if FIRST in line).split()[4:] == ["510", "510", "960", "1000"]


def test_an_answer_of_one_token_has_no_time_per_later_token():
    found = by_name([*asked(2), record(9, turns=[turn(**arms(rounds=(), plain=0.2, ours=0.25))])])
    counts = [len(found[name].seconds["method"]) for name in (FIRST, LATER, CHUNKS, ANSWER)]
    assert counts == [3, 2, 4, 3]
    assert found[LATER].ratio.value == pytest.approx(0.2 / 0.125)


def test_a_turn_of_one_token_leaves_the_other_turns_of_its_question():
    one = arms(rounds=(), plain=0.2, ours=0.25)
    records = [
        record(0, turns=[turn(0, **one), turn(1, **arms())]),
        record(1, turns=[turn(**arms(first=0.4))]),
    ]
    assert by_name(records)[LATER].ratio.value == pytest.approx((0.2 + 0.15) / (2 * 0.125))


def test_whole_answers_are_compared_at_equal_lengths():
    """A near-tie can make one arm's answer shorter, which is no speedup."""
    both = arms()
    both["baseline"] = generation(
        [0] * 8, 1.8, 0.2, drafted=0
    )  # eight tokens after the first; the method: four
    ratio = by_name([record(turns=[turn(**both)])])[ANSWER].ratio
    assert ratio.value == pytest.approx(1.8 / (0.25 + 2 * 0.5))


def test_a_run_quoted_against_generate_says_whose_times_are_shown():
    ours, theirs = (
        shown(latency_table(run(asked(), baseline__quoted_against=arm)), 140)
        for arm in ("engine", "hf_generate")
    )
    assert "against generate" not in ours and "against generate" in " ".join(theirs.split())


def test_what_was_not_timed_is_a_dash():
    """As batches of another engine have no time of a prefill."""
    lines = shown(latency_table(run(asked(7, prefill=None))), 140).splitlines()
    row = lines[[FIRST in line for line in lines].index(True) + 1]
    assert row.split() == ["kangaroo", "0", "–", "–", "–", "–", "–"]


def test_questions_that_failed_do_not_count():
    records = [*asked(6), record(7, error="it fell over", turns=[turn(**arms(first=9.0))])]
    assert by_name(records)[FIRST].seconds["baseline"].tolist() == [0.2] * 6


def test_batches_are_left_out(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    batch = run(asked(), "pooled", unit="pool", batch_size=4)
    for given, expected in (([batch, run(asked(7))], 0), ([batch], None)):
        monkeypatch.setattr(module, "runs_of_command", lambda *_, given=given, **__: given)
        if expected is None:
            with pytest.raises(SystemExit) as end:
                module.main()
            assert end.value.code == 2 and "without a scheduler" in capsys.readouterr().err
        else:
            assert module.main() == expected
            out = capsys.readouterr().out
            assert "runs of batches left out: 1;" in out and out.count("first token") == 1
