"""How many threads torch computes with, how they wait, and that a run says so."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from specbench import THREAD_VARIABLES
from specbench.system import threads
from specbench.system.threads import counts, fewest_worth, measure, use_threads


@pytest.fixture(autouse=True)
def _same_threads_afterwards():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def by_measuring(monkeypatch):
    """Nobody has set a number, and there are four cores."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "usable_cores", lambda: 4)


@pytest.fixture
def taking(monkeypatch):
    """Makes work that takes so long with each number of threads, by a clock that nothing else moves."""
    now = 0.0
    monkeypatch.setattr(threads, "time", SimpleNamespace(perf_counter=lambda: now))

    def made(seconds: dict[int, float]):
        def work() -> None:
            nonlocal now
            now += seconds[torch.get_num_threads()]

        return work

    return made


@pytest.mark.nightly
@pytest.mark.process
@pytest.mark.parametrize(
    "first_import", ["specbench", "methods.sps", "specbench.measure.runner", "methods.common.training"]
)
def test_idle_threads_spin_briefly(first_import):
    """As OpenMP itself says it: the variable must be set before torch is imported, whatever is imported first."""
    bare = {name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES}
    command = [sys.executable, "-c", f"import {first_import}, torch"]
    found = subprocess.run(
        command, env=bare | {"OMP_DISPLAY_ENV": "VERBOSE"}, capture_output=True, text=True, check=True
    )
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in found.stderr and "GOMP_SPINCOUNT = '10000'" in found.stderr


@pytest.mark.process
@pytest.mark.parametrize(("name", "value"), [("OMP_WAIT_POLICY", "ACTIVE"), ("GOMP_SPINCOUNT", "1000")])
def test_what_the_user_has_set_stays(name, value):
    bare = {name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES}
    show = f"import os, specbench; print(os.environ['{name}'], os.environ.get('OMP_WAIT_POLICY'))"
    said = subprocess.check_output([sys.executable, "-c", show], env=bare | {name: value}, text=True).split()
    assert said == [value, value if name == "OMP_WAIT_POLICY" else "None"]


def test_numbers_that_are_tried():
    assert (
        counts(1) == [1] and counts(2) == [2, 1] and counts(6) == [6, 4, 2, 1] and counts(8) == [8, 4, 2, 1]
    )


@pytest.mark.parametrize(("quota", "most"), [(None, 4), (8.0, 4), (1.5, 2), (0.5, 1)])
def test_no_more_threads_than_a_quota_has_cores(monkeypatch, quota, most):
    monkeypatch.setattr(threads, "own_cores", lambda: set(range(4)))
    monkeypatch.setattr(threads, "cpu_quota", lambda: quota)
    torch.set_num_threads(8)
    assert threads.usable_cores() == most
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = use_threads(None, None)  # as for the servers of another engine
    assert (found.threads, found.chosen_by, torch.get_num_threads()) == (most, "torch", most)


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({2: 1.0, 1: 1.0}, 1),
        ({2: 0.95, 1: 1.0}, 1),  # not worth it
        ({2: 0.8, 1: 1.0}, 2),
        ({4: 0.79, 2: 0.8, 1: 1.0}, 2),
        ({4: 0.5, 2: 1.1, 1: 1.0}, 4),
        ({}, 1),
    ],
)
def test_more_threads_must_be_worth_it(seconds, chosen):
    assert fewest_worth(seconds) == chosen


def test_the_fastest_number_is_found(by_measuring, taking, capsys):
    found = use_threads(None, taking({4: 0.03, 2: 0.01, 1: 0.014}))
    assert capsys.readouterr().err == "choosing torch's threads: measuring 4, 2, 1\n"
    assert (found.threads, found.chosen_by, torch.get_num_threads()) == (2, "measuring", 2)
    assert found.seconds == pytest.approx({4: 0.03, 2: 0.01, 1: 0.014})


def test_far_too_few_threads_are_not_tried(taking):
    called, work = [], taking({4: 0.01, 2: 0.05, 1: 0.2})

    def watched() -> None:
        called.append(torch.get_num_threads())
        work()

    torch.set_num_threads(4)
    assert measure(watched, [4, 2, 1]).keys() == {4, 2}
    assert called.count(1) == 0 and called.count(2) == 3


def test_a_line_says_that_threads_are_measured_before_they_are(by_measuring, monkeypatch, capsys):
    said: list[str] = []

    def work() -> None:
        said.append(capsys.readouterr().err)

    use_threads(None, work)
    assert said[0] and not any(said[1:])
    monkeypatch.setattr(threads, "usable_cores", lambda: 1)  # nothing to choose from
    use_threads(None, work)
    assert capsys.readouterr().err == ""


def test_what_is_set_by_hand_is_not_measured(by_measuring, monkeypatch):
    def work() -> None:
        raise AssertionError("measured")

    assert use_threads(3, work).chosen_by == "threads=" and torch.get_num_threads() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert use_threads(None, work).chosen_by == "OMP_NUM_THREADS"
