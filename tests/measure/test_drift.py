"""The first and the last third of each task's questions, if a drafter goes on with what it has learnt."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import pytest

from specbench.measure.metrics.summary import summarise
from specbench.report import remarks
from tests.support.synthetic import CONFIG, FACTS, answered, record

LEARNT = {"_target_": "methods.suffix.SuffixDecoding", "name": "suffix", "memory": "run"}
# Seven questions in the order in which they were asked, not in that of their numbers; two rounds each.
ORDER = (9, 2, 30, 4, 1, 8, 5)
SLOW = dict(zip(ORDER, (1.0, 2.0, 9.0, 9.0, 9.0, 3.0, 5.0)))
ACCEPTED = dict(zip(ORDER, ((0, 1), (1, 2), (5, 5), (5, 5), (5, 5), (3, 3), (4, 4))))


def of(method: dict, records: list[dict], **facts: object) -> dict:
    return summarise(records, FACTS | facts, CONFIG | {"method": method})


@cache
def learnt() -> dict:
    """The summary of a drafter that has learnt."""
    return of(LEARNT, asked())


def asked() -> list[dict]:
    """The records, those of a question that failed among them, and of a second pass in which all were faster."""
    first = [answered(q, accepted=ACCEPTED[q], slow=SLOW[q]) for q in ORDER]
    again = [answered(q, accepted=ACCEPTED[q], slow=SLOW[q]) | {"repeat": 1} for q in ORDER]
    return [record(77, error="it broke"), *first, *again]


def test_thirds_are_in_the_order_of_the_questions():
    found = learnt()["drift"]
    # Every answer takes the method the same time, so that a speedup is the mean of both questions' own.
    assert found["first"]["questions"] == found["last"]["questions"] == 2
    assert found["first"]["speedup"] == pytest.approx(1.5) and found["last"]["speedup"] == pytest.approx(4)
    assert found["first"]["acceptance_length"] == pytest.approx((1 + 2 + 2 + 3) / 4)
    assert found["last"]["acceptance_length"] == pytest.approx((4 + 4 + 5 + 5) / 4)
    assert found["first"]["speedup_low"] is None, "two questions have no interval"


def test_tasks_are_not_compared_with_each_other():
    """One after the other, and the second faster: a drafter that does not learn would seem to."""
    slow = [answered(q, accepted=(1, 1), slow=1.0) | {"task": "qa"} for q in (1, 2, 3, 4)]
    fast = [answered(q, accepted=(3, 3), slow=2.0) | {"task": "rag"} for q in (5, 6, 7)]
    few = [answered(q, accepted=(9, 9), slow=9.0) | {"task": "mt_bench"} for q in (8, 9)]
    first, last = (of(LEARNT, slow + fast + few)["drift"][third] for third in ("first", "last"))
    assert first == last
    assert first["questions"] == 2 and first["speedup"] == pytest.approx(1.5)


def test_the_foot_of_the_table_says_both():
    (line,) = learnt()["notes"]
    assert "first third of each task: speedup 1.50, acceptance length 2.00" in line
    assert line.endswith("last third: speedup 4.00, acceptance length 4.50")


@pytest.mark.parametrize("method", [LEARNT | {"memory": "answer"}, CONFIG["method"]])
def test_where_nothing_is_learnt_there_are_none(method):
    found = of(method, asked())
    assert found["drift"] == {} and found["notes"] == [] and not found["learns"]


def test_a_wrapped_drafter_may_learn():
    wrapping = {"_target_": "methods.samd.SAMDecoding", "name": "samd", "drafter": LEARNT}
    assert of(wrapping, asked())["drift"]["last"]["questions"] == 2


def test_two_questions_have_no_thirds():
    found = of(LEARNT, asked()[1:3])
    assert found["drift"] == {} and found["learns"]
    run = SimpleNamespace(name="few", summary=found)
    assert remarks.memories([run]) == ["memory carries over between answers: few"]


def test_batches_have_an_acceptance_length_alone():
    config = CONFIG | {
        "method": {"_target_": "methods.ragged.RaggedBatch", "name": "ragged"},
        "drafter": LEARNT,
        "batch_size": 2,
    }
    records = [r | {"pool": 0} for r in asked()[1:8]]
    found = summarise(records, FACTS | {"unit": "pool"}, config)
    assert found["drift"]["last"]["speedup"] is None
    assert found["drift"]["last"]["acceptance_length"] == pytest.approx(4.5)
