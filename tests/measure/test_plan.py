"""The plan of a run, from its journal alone."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench.measure.plan import LEAST_FOR_PRECISION, RunPlan

CONFIG = {"repeats": 1, "processes": 1, "precision": None, "max_minutes": 30}


def walk(plan: RunPlan, widths, questions: int = 4, minutes: float = 0.0) -> list[tuple[int, int]]:
    """(pass, process) of a run whose interval after n passes is widths(n) wide, each pass taking so many minutes."""
    done, passes = Counter(), []
    while (repeat := plan.next(done, questions, widths(len(done)), 60 * minutes * len(done))) is not None:
        assert len(passes) < 100
        done[repeat] = questions
        passes.append((repeat, plan.process_of(repeat)))
    return passes


@given(st.integers(1, 12), st.integers(1, 12))
def test_processes_share_the_passes(repeats, processes):
    plan = RunPlan.of(CONFIG | {"repeats": repeats, "processes": processes})
    found = walk(plan, lambda n: None)
    assert [repeat for repeat, _ in found] == list(range(max(repeats, processes)))
    shares = Counter(process for _, process in found)
    assert sorted(shares) == list(range(processes)) and max(shares.values()) - min(shares.values()) <= 1
    assert [process for _, process in found] == sorted(process for _, process in found)


@pytest.mark.parametrize("processes", [1, 3])
def test_passes_are_added_until_the_interval_is_narrow(processes):
    plan = RunPlan.of(CONFIG | {"precision": 0.02, "processes": processes})
    found = walk(plan, lambda n: 0.16 / max(n, 1))
    assert len(found) == 8
    assert len(set(process for _, process in found)) == (1 if processes == 1 else 8)


def test_a_narrow_interval_needs_some_passes():
    assert len(walk(RunPlan.of(CONFIG | {"precision": 0.02}), lambda n: 0.0)) == LEAST_FOR_PRECISION


def test_without_any_answer_no_pass_is_added():
    assert len(walk(RunPlan.of(CONFIG | {"precision": 0.02}), lambda n: None)) == LEAST_FOR_PRECISION


def test_no_pass_is_added_that_would_end_too_late():
    plan = RunPlan.of(CONFIG | {"precision": 1e-9, "max_minutes": 10})
    assert len(walk(plan, lambda n: 1.0, minutes=2.0)) == 5
    assert len(walk(plan, lambda n: 1.0, minutes=20.0)) == LEAST_FOR_PRECISION


def test_a_pass_that_was_begun_is_ended_first():
    plan = RunPlan.of(CONFIG | {"repeats": 2, "precision": 0.02, "max_minutes": 1e-9})
    assert plan.next({}, 4, None, 0) == 0
    assert plan.next({0: 4, 1: 3}, 4, None, 0) == 1
    assert plan.next({0: 4, 1: 4, 2: 4, 3: 1}, 4, 0.5, 1e9) == 3
    assert plan.next({0: 4, 1: 4, 2: 4, 3: 4}, 4, 0.5, 1e9) is None
