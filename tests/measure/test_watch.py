"""The counters of the machine: read from files of the kernel's forms, and from this very machine under load."""

import multiprocessing
import os
import time

import psutil
import pytest

from specbench.measure import watch
from specbench.measure.watch import Watch, added, between, cpu_quota, disturbance, unfit


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """Files as the kernel of a machine with four cores writes them; this process may use the first two."""
    monkeypatch.setattr(watch, "usable_cores", lambda: {0, 1})
    monkeypatch.setattr(watch, "TICKS", 100)
    monkeypatch.setattr(time, "process_time", lambda: 3.0)
    tasks = tmp_path / "proc" / "self" / "task"
    for task, waited in ((1, 500_000_000), (2, 250_000_000)):
        (tasks / str(task)).mkdir(parents=True)
        (tasks / str(task) / "schedstat").write_text(f"9000 {waited} 17\n")
    (tmp_path / "proc" / "stat").write_text(
        "cpu  1 1 1 1 1 1 1 1 0 0\ncpu0 100 20 30 9 9 40 10 7 0 0\ncpu1 300 0 0 9 9 0 0 3 0 0\n"
        "cpu2 777 0 0 0 0 0 0 50 0 0\nintr 12 0 0\n"
    )
    cgroup = tmp_path / "cgroup"
    cgroup.mkdir()
    (cgroup / "cpu.stat").write_text("usage_usec 9\nnr_throttled 2\nthrottled_usec 1500000\n")
    return tmp_path


def test_counters_as_the_kernel_writes_them(kernel):
    found = Watch(kernel / "proc", kernel / "cgroup").read()
    assert found["waited"] == 0.75 and found["stolen"] == 0.1 and found["throttled"] == 1.5
    assert found["others"] == pytest.approx((200 + 300) / 100 - 3.0)


def test_the_older_form_of_control_groups(kernel):
    (kernel / "cgroup" / "cpu.stat").unlink()
    (kernel / "cgroup" / "cpu").mkdir()
    (kernel / "cgroup" / "cpu" / "cpu.stat").write_text("nr_periods 1\nthrottled_time 2500000000\n")
    assert Watch(kernel / "proc", kernel / "cgroup").read()["throttled"] == 2.5


def test_what_a_system_does_not_count_is_missing(tmp_path):
    assert Watch(tmp_path, tmp_path).read().keys() == {"seconds", "switches"}


def test_sums_hold_what_all_readings_have():
    assert added([{"seconds": 1.0, "waited": 2.0}, {"seconds": 3.0}]) == {"seconds": 4.0}
    assert between({"seconds": 1.0}, {"seconds": 3.0, "waited": 1.0}) == {"seconds": 2.0} and added([]) == {}


@pytest.mark.parametrize(
    ("counted", "degree"),
    [
        ({"seconds": 2.0}, 0.0),
        ({"seconds": 2.0, "waited": 0.05, "stolen": 0.05, "others": 0.1}, 1.0),
        ({"seconds": 2.0, "throttled": 0.2}, 2.0),
        ({"seconds": 2.0, "waited": 0.0, "others": 1.0}, 2.0),
        ({"seconds": 0.0, "waited": 1.0}, 0.0),
    ],
)
def test_how_much_a_slice_was_disturbed(counted, degree):
    assert disturbance(counted) == pytest.approx(degree)


def _busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="not counted on this system")
def test_a_process_that_burns_a_core_is_seen_unless_it_is_a_child():
    """The counters are those of the machine: other tests may run, so that only differences are sure."""
    mine, foreign = Watch(), Watch()
    child = multiprocessing.get_context("fork").Process(target=_busy, args=(60.0,))
    child.start()
    try:
        mine.find_children()
        time.sleep(0.2)
        before, before_too = mine.read(), foreign.read()
        time.sleep(2.0)
        counted, counted_too = (
            between(before, mine.read()),
            between(before_too, foreign.read()),
        )
        burnt = counted_too["others"] - counted["others"]
        spent = psutil.Process(child.pid).cpu_times().user
        assert 0.2 < burnt < 2.2 and spent > 0.2
    finally:
        child.kill()
        child.join()


@pytest.mark.parametrize(
    ("counted", "threads", "said"),
    [
        ({}, 2, []),
        ({"others": 3.0}, 2, ["other processes kept 1.5 of 2 cores busy"]),
        ({"others": 0.1, "waited": 0.4}, 2, ["threads waited for a core for 20% of the time"]),
        ({"stolen": 0.4}, 2, ["the hypervisor took the cores away for 20% of the time"]),
        ({"throttled": 0.4}, 2, ["the CPU quota stopped this process for 20% of the time"]),
        ({}, 4, ["4 threads share a CPU quota of 2.5 cores"]),
    ],
)
def test_why_a_machine_is_not_fit(tmp_path, monkeypatch, counted, threads, said):
    monkeypatch.setattr(watch, "usable_cores", lambda: {0, 1})
    monkeypatch.setattr(psutil, "sensors_battery", lambda: None, raising=False)
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    start = {"seconds": 5.0} | dict.fromkeys(counted, 1.0)
    end = {"seconds": 7.0} | {name: 1.0 + value for name, value in counted.items()}
    assert unfit(start, end, threads, tmp_path) == said


def test_the_quota_of_a_control_group(tmp_path):
    assert cpu_quota(tmp_path) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("50000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_quota(tmp_path) == 0.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path) is None
