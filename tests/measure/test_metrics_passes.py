"""The numbers of runs whose questions were measured in several passes, also by several processes."""

import pytest

from specbench.measure.metrics.metrics import equivalence
from specbench.measure.metrics.questions import by_question
from specbench.measure.metrics.statistics import over_passes
from specbench.measure.metrics.summary import summarise
from tests.support.synthetic import CONFIG, FACTS, TIE, VIOLATION, overall, passes


def test_the_interval_over_passes_by_hand():
    numbers = overall(passes(3))
    found = over_passes([2.0, 2.1, 2.2], [1.0, 1.0, 1.0])
    assert (numbers["passes_low"], numbers["passes_high"]) == pytest.approx((found.low, found.high))
    assert numbers["speedup"] == pytest.approx(2.1)
    single = overall(passes(1))
    assert (single["passes_low"], single["passes_high"]) == (None, None)


def test_processes_are_the_unit_where_there_are_several():
    numbers, alone = overall(passes(4, processes=2)), overall(passes(4))
    found = over_passes([2.05, 2.25], [1.0, 1.0])
    assert (numbers["passes_low"], numbers["passes_high"]) == pytest.approx((found.low, found.high))
    assert numbers["speedup_high"] > alone["speedup_high"] and numbers["speedup"] == alone["speedup"]


def test_only_questions_that_all_passes_have_count_in_their_interval():
    records = [r for r in passes(3) if (r["repeat"], r["question_id"]) != (2, 3)]
    records[0]["turns"][0]["arms"]["baseline"][0]["seconds"] *= 5
    without = [r for r in records if r["question_id"] != 3]
    assert overall(records)["passes_low"] == overall(without)["passes_low"]


def test_a_question_that_failed_in_one_pass_is_left_out_of_all():
    records = passes(3)
    records[9] |= {"error": "no memory", "turns": []}
    found = summarise(records, FACTS, CONFIG)
    assert found["failed"] == 1 and found["overall"]["questions"] == 6 and found["records"] == 21
    rest = summarise([r for r in records if r["question_id"] != 2], FACTS, CONFIG)
    without_verdicts = [numbers["overall"] | {"equivalence": None} for numbers in (found, rest)]
    assert without_verdicts[0] == without_verdicts[1]
    assert (found["repeats"], found["processes"]) == (3, 1)
    every = [record | {"error": "no memory", "turns": []} for record in passes(3)]
    found = summarise(every, FACTS, CONFIG)
    assert (found["status"], found["repeats"], found["processes"]) == ("failed", 3, 1)


def test_an_answer_is_wrong_whether_or_not_its_question_failed_in_another_pass():
    records = passes(3)
    (wrong,) = (r for r in records if (r["repeat"], r["question_id"]) == (0, 2))
    wrong["turns"][0] |= {"equivalence": VIOLATION, "baseline_equivalence": VIOLATION}
    before = summarise(records, FACTS, CONFIG)
    records[9] |= {"error": "no memory", "turns": []}
    found = summarise(records, FACTS, CONFIG)
    assert before["equivalence"]["violation"] == found["equivalence"]["violation"] == 1
    assert found["tasks"][wrong["task"]]["equivalence"]["violation"] == 1
    assert found["baseline"]["equivalence"]["violation"] == 1


def test_the_worst_verdict_of_an_answers_passes_counts():
    records = passes(3)
    records[8]["turns"][0]["equivalence"] = TIE
    records[15]["turns"][0]["equivalence"] = VIOLATION
    found = equivalence(records)
    assert (found["answers"], found["exact"], found["tie"], found["violation"]) == (7, 6, 0, 1)
    table = by_question(records, "baseline", "question")
    assert list(table["question_id"]) == list(range(7)) and table["verdict"][1] == "violation"
