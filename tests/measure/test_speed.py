"""Probes of the machine, the best that it has shown, and what a summary holds of both."""

from __future__ import annotations

import json
import multiprocessing
import os

import pytest
import torch

from specbench.measure.machine import speed
from specbench.measure.machine.speed import BANDWIDTH, NAMES, OPERATIONS, PRODUCT, SLOW
from specbench.measure.metrics.summary import summarise
from tests.support.messages import says
from tests.support.synthetic import CONFIG, FACTS, QUIET, passes, probed, slowed

REAL_PROBE = speed.probe  # before the tests' own stands in for it
CPU = torch.device("cpu")
SPEED = {"machine": "EPYC", "best": QUIET}


@pytest.fixture
def best(tmp_path, monkeypatch):
    """The file of an empty cache."""
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    speed._warn.cache_clear()
    return speed.best_file()


# -- probes


def test_a_probe_measures_all_figures(monkeypatch):
    monkeypatch.setattr(speed, "LEAST_BYTES", 2**20)
    monkeypatch.setattr(speed, "MOST_BYTES", 2**20)
    found = REAL_PROBE(CPU)
    assert found.keys() == set(NAMES) and all(0 < value < 1e15 for value in found.values())


def test_figures_are_rates_of_the_fastest_stretch(monkeypatch):
    """With a clock by hand: each stretch takes 1 s, one of each kind half of it."""
    marks, spent = [], []

    class Clock:
        def __init__(self, device):
            pass

        def synchronize(self):
            pass

        def mark(self):
            marks.append(None)
            return len(marks)

        def seconds(self, start, end):
            assert end == start + 1
            spent.append(None)
            return 0.5 if len(spent) % speed.STRETCHES == 3 else 1.0

    monkeypatch.setattr("specbench.decoding.trace.Clock", Clock)
    monkeypatch.setattr(speed, "_buffer_bytes", lambda kind: 2**20)
    assert REAL_PROBE(CPU) == {
        BANDWIDTH: 2 * 2**20 / speed.STRETCHES,
        PRODUCT: 2 * 2 * speed.SIZE["cpu"] ** 3,
        OPERATIONS: 2 * speed.OPERATIONS_TIMED["cpu"],
    }


def test_the_buffer_is_larger_than_the_caches_within_bounds(monkeypatch):
    for cache, expected in ((2**20, speed.LEAST_BYTES), (2**27, 2**28), (2**31, speed.MOST_BYTES)):
        monkeypatch.setattr(speed.bandwidth, "last_level_cache_bytes", lambda cache=cache: cache)
        assert speed._buffer_bytes("cpu") == expected


def test_threads_make_another_machine():
    before = torch.get_num_threads()
    keys = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            keys.append(speed.machine_key(CPU))
    finally:
        torch.set_num_threads(before)
    one, two = keys
    assert "1 thread," in one and "2 threads," in two and f"torch {torch.__version__}" in one


def test_shares_below_the_best():
    shares = speed.below(slowed(product=0.3, operations=0.1), QUIET)
    assert shares == pytest.approx({BANDWIDTH: 0.0, PRODUCT: 0.3, OPERATIONS: 0.1})
    assert list(speed.slow(shares)) == [PRODUCT]
    assert speed.slow(speed.below(slowed(bandwidth=SLOW + 0.01), QUIET)).keys() == {BANDWIDTH}
    assert not speed.slow(speed.below(slowed(bandwidth=SLOW - 0.01), QUIET))
    assert speed.below(QUIET, slowed(product=0.3))[PRODUCT] == 0.0


def test_probes_wait_until_they_are_collected(best, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(speed.time, "monotonic", lambda: now[0])
    found = iter([slowed(product=0.3), QUIET])
    monkeypatch.setattr(speed, "probe", lambda device: next(found))
    probes = speed.Probes(CPU)
    assert probes.is_due()
    probes.take()
    assert probes.best == slowed(product=0.3) and not probes.is_due()
    now[0] += speed.SECONDS_BETWEEN
    assert probes.is_due()
    probes.take()
    assert probes.best == QUIET
    assert probes.collect() == [slowed(product=0.3), QUIET] and probes.collect() == []


# -- the best


def test_a_probe_without_memory_costs_no_question(best, monkeypatch, capfd):
    faults = iter(
        [RuntimeError("can't allocate memory: you tried to allocate 536870912 bytes"), RuntimeError("other")]
    )

    def fail(device):
        raise next(faults)

    probes = speed.Probes(CPU)
    monkeypatch.setattr(speed, "probe", fail)
    probes.take_if_possible()
    assert probes.collect() == [] and not probes.is_due()
    assert "speed was not probed: the machine has not enough free memory" in capfd.readouterr().err
    with pytest.raises(RuntimeError, match="other"):
        probes.take_if_possible()


def test_the_best_of_each_figure_is_kept_by_machine(best):
    assert speed.remember("one", slowed(product=0.3)) == slowed(product=0.3)
    assert speed.remember("one", slowed(bandwidth=0.2)) == QUIET
    assert speed.remember("other", slowed(product=0.5)) == slowed(product=0.5)
    assert speed.remember("one", slowed(product=0.3)) == QUIET
    assert json.loads(best.read_text()) == {"one": QUIET, "other": slowed(product=0.5)}


def test_where_the_best_is_kept(monkeypatch, tmp_path):
    assert "SPECBENCH_CACHE" in os.environ, "tests must not write into the user's cache"
    monkeypatch.delenv("SPECBENCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert speed.best_file() == tmp_path / "specbench" / "machine.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert speed.best_file() == tmp_path / "home" / ".cache" / "specbench" / "machine.json"


@pytest.mark.parametrize(
    "content",
    [
        b"{", b"[]", b"\xff", b"null", b'{"one": 3}', b'{"one": {}}',
        json.dumps({"one": QUIET | {PRODUCT: "fast"}}).encode(),
        json.dumps({"one": QUIET | {PRODUCT: float("nan")}}).encode(),
    ],
)  # fmt: skip
def test_a_damaged_file_is_begun_anew_with_one_line(best, content, capfd):
    best.parent.mkdir()
    best.write_bytes(content)
    assert speed.remember("one", slowed(product=0.3)) == slowed(product=0.3)
    said = capfd.readouterr().err
    assert says(said, f"{best} ... damaged") and said.count("\n") == 1
    assert json.loads(best.read_text()) == {"one": slowed(product=0.3)}
    speed.remember("one", QUIET)
    assert capfd.readouterr().err == ""


def test_a_cache_that_cannot_be_written_is_said_once_and_ends_nothing(best, capfd):
    best.parent.write_text("a file in place of the folder")
    for _ in range(2):
        assert speed.remember("one", slowed(product=0.3)) == slowed(product=0.3)
    said = capfd.readouterr().err
    assert "cannot save" in said and said.count("\n") == 1


def _remember_many(number: int) -> None:
    for step in range(20):
        speed.remember(f"of {number}", slowed(product=0.5 - step / 100))
        speed.remember("shared", QUIET | {PRODUCT: number * 100.0 + step})


@pytest.mark.process
def test_several_processes_write_and_none_loses_what_another_wrote(best):
    """Forked, so that what stands in for the probe stands in there, too."""
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=_remember_many, args=(number,)) for number in range(1, 5)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    known = json.loads(best.read_text())
    assert known["shared"][PRODUCT] == 419
    assert [known[f"of {number}"] for number in range(1, 5)] == [slowed(product=0.31)] * 4
    assert [path.name for path in best.parent.iterdir() if path.suffix == ".tmp"] == []


# -- in a summary


def of(records: list[dict], best: dict = QUIET) -> dict | None:
    facts = FACTS | {"speed": SPEED | {"best": best}}
    return summarise(records, facts, CONFIG)["machine"]["speed"]


def test_a_summary_holds_first_last_worst_and_best():
    found = of(probed(passes(1), slowed(bandwidth=0.1), slowed(product=0.3), QUIET))
    assert found == {
        "machine": "EPYC",
        "probes": 3,
        "first": slowed(bandwidth=0.1),
        "last": QUIET,
        "worst": slowed(bandwidth=0.1, product=0.3),
        "median": QUIET,
        "best": QUIET,
        "below": pytest.approx({BANDWIDTH: 0.1, PRODUCT: 0.3, OPERATIONS: 0.0}),
        "changed": pytest.approx({BANDWIDTH: 0.1, PRODUCT: 0.3, OPERATIONS: 0.0}),
    }


def test_the_best_is_of_all_runs_and_of_this_one():
    constant = of(probed(passes(1), slowed(product=0.3), slowed(product=0.3)))
    assert constant["below"][PRODUCT] == pytest.approx(0.3) and constant["changed"][PRODUCT] == 0
    faster = of(probed(passes(1), slowed(product=0.3), QUIET), best=slowed(product=0.3))
    assert faster["best"] == QUIET and faster["below"][PRODUCT] == pytest.approx(0.3)


def test_probes_count_in_the_order_of_the_journal_and_those_of_failed_questions_too():
    records = probed(passes(1), slowed(product=0.1), slowed(product=0.2))[::-1]
    records[0] |= {"error": "it broke", "turns": []}
    found = of(records)
    assert found["probes"] == 2
    assert (found["first"], found["last"]) == (slowed(product=0.2), slowed(product=0.1))


def test_without_probes_it_is_null():
    assert summarise(passes(1), FACTS, CONFIG)["machine"]["speed"] is None
