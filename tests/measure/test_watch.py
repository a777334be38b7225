"""The counters of the machine: read from files of the kernel's forms, and from this very machine under load."""

import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import time

import psutil
import pytest

from specbench.measure.machine import watch
from specbench.measure.machine.watch import Watch, added, between
from specbench.system.processes import cgroup_folder

SECONDS_OF_REAPED = watch._seconds_of_reaped


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """Files as the kernel of a machine with four cores writes them; this process may use the first two."""
    monkeypatch.setattr(watch, "own_cores", lambda: {0, 1})
    monkeypatch.setattr(watch, "TICKS", 100)
    monkeypatch.setattr(time, "process_time", lambda: 3.0)
    monkeypatch.setattr(watch, "_on_battery", lambda: False)
    monkeypatch.setattr(watch, "_seconds_of_reaped", lambda: 0.0)
    tasks = tmp_path / "proc" / "self" / "task"
    for task, waited in ((1, 500_000_000), (2, 250_000_000)):
        (tasks / str(task)).mkdir(parents=True)
        (tasks / str(task) / "schedstat").write_text(f"9000 {waited} 17\n")
    (tmp_path / "proc" / "stat").write_text(
        "cpu  1 1 1 1 1 1 1 1 0 0\ncpu0 100 20 30 9 9 40 10 7 0 0\ncpu1 300 0 0 9 9 0 0 3 0 0\n"
        "cpu2 777 0 0 0 0 0 0 50 0 0\nintr 12 0 0\n"
    )
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/user/me\n")
    group = tmp_path / "sys" / "fs" / "cgroup" / "user" / "me"
    group.mkdir(parents=True)
    (group / "cpu.stat").write_text("usage_usec 9\nnr_throttled 2\nthrottled_usec 1500000\n")
    for core, mhz in ((0, 2000), (1, 3000), (2, 9000)):
        frequency = tmp_path / "sys" / "devices" / "system" / "cpu" / f"cpu{core}" / "cpufreq"
        frequency.mkdir(parents=True)
        (frequency / "scaling_cur_freq").write_text(f"{mhz * 1000}\n")
        (frequency.parent / "thermal_throttle").mkdir()
        (frequency.parent / "thermal_throttle" / "core_throttle_count").write_text(f"{core + 1}\n")
    return tmp_path


def of(kernel, threads: int = 1) -> Watch:
    return Watch(threads, kernel / "proc", kernel / "sys")


def test_counters_as_the_kernel_writes_them(kernel):
    found = of(kernel, threads=2).read()
    assert found["waited"] == 0.75 / 2 and found["stolen"] == 0.1 / 2 and found["throttled"] == 1.5 / 2
    assert found["others"] == pytest.approx((200 + 300) / 100 - 3.0)
    assert of(kernel).heat() == {"throttlings": 3} and of(kernel).clock_mhz() == 2500


@pytest.mark.parametrize(("threads", "computing"), [(1, 1), (2, 2), (3, 2)])
def test_time_is_lost_on_the_cores_that_compute_and_not_on_those_that_idle(kernel, threads, computing):
    found = of(kernel, threads).read()
    assert found["stolen"] == 0.1 / computing and found["throttled"] == 1.5 / computing


def test_what_a_thread_has_waited_stays_when_it_ends(kernel):
    seen = of(kernel)
    assert seen.read()["waited"] == 0.75
    shutil.rmtree(kernel / "proc" / "self" / "task" / "1")
    assert seen.read()["waited"] == 0.75


def test_the_older_kind_of_control_groups(kernel):
    shutil.rmtree(kernel / "sys" / "fs" / "cgroup")
    (kernel / "proc" / "self" / "cgroup").write_text("5:devices:/x\n3:cpu,cpuacct:/me\n")
    group = kernel / "sys" / "fs" / "cgroup" / "cpu" / "me"
    group.mkdir(parents=True)
    (group / "cpu.stat").write_text("nr_periods 1\nthrottled_time 2500000000\n")
    assert cgroup_folder("cpu", kernel / "proc", kernel / "sys") == group
    assert of(kernel).read()["throttled"] == 2.5


def test_the_group_of_a_container_is_at_the_root_of_its_mount(kernel):
    (kernel / "proc" / "self" / "cgroup").write_text("0::/what/the/host/calls/it\n")
    mounted = kernel / "sys" / "fs" / "cgroup"
    (mounted / "cpu.stat").write_text("usage_usec 1\n")
    assert cgroup_folder("cpu", kernel / "proc", kernel / "sys") == mounted
    assert "throttled" not in of(kernel).read()


def test_a_quota_of_a_group_around_it(kernel):
    around = kernel / "sys" / "fs" / "cgroup" / "user"
    (around / "cpu.stat").write_text("usage_usec 9\nthrottled_usec 500000\n")
    (around / "cpu.max").write_text("150000 100000\n")
    (around / "me" / "cpu.max").write_text("max 100000\n")
    (around.parent / "cpu.stat").write_text("usage_usec 99\n")
    seen = of(kernel, 2)
    assert seen.read()["throttled"] == (1.5 + 0.5) / 2
    start = {"seconds": 0.0, "waited": 0.0}
    assert seen.unfit(start, {"seconds": 1.0, "waited": 0.5}) == ["2 threads share a CPU quota of 1.5 cores"]


def test_what_a_system_does_not_count_is_missing(tmp_path):
    seen = Watch(1, tmp_path, tmp_path)
    assert seen.read().keys() == {"seconds", "switches"} and seen.clock_mhz() is None and seen.heat() == {}
    (tmp_path / "stat").write_text("cpu  0 0 0 0 0 0 0 0 0 0\ncpu0 0 0 0 0 0 0 0 0 0 0\n")  # a sandbox's
    assert seen.read().keys() == {"seconds", "switches"}


def test_sums_hold_what_all_readings_have():
    assert added([{"seconds": 1.0, "waited": 2.0}, {"seconds": 3.0}]) == {"seconds": 4.0}
    assert between({"seconds": 1.0}, {"seconds": 3.0, "waited": 1.0}) == {"seconds": 2.0} and added([]) == {}


@pytest.mark.parametrize(
    ("counted", "threads", "degree"),
    [
        ({"seconds": 2.0}, 1, 0.0),
        ({"seconds": 2.0, "waited": 0.05, "stolen": 0.05, "others": 0.1}, 1, 1.0),
        ({"seconds": 2.0, "throttled": 0.2}, 2, 2.0),
        (
            {"seconds": 2.0, "waited": 0.0, "others": 1.01},
            1,
            2.0,
        ),  # a tick less, of two cores a quarter of one
        ({"seconds": 0.05, "others": 0.02}, 2, 0.0),  # which the ticks of two threads may be
        (
            {"seconds": 2.0, "waited": 1.0, "throttled": 1.0},
            3,
            0.0,
        ),  # three threads on two cores wait for each other
        ({"seconds": 0.0, "waited": 1.0}, 1, 0.0),
    ],
)
def test_how_much_a_slice_was_disturbed(kernel, counted, threads, degree):
    assert of(kernel, threads).disturbance(counted) == pytest.approx(degree)


def test_more_cores_are_not_disturbed_by_what_leaves_them_free(kernel, monkeypatch):
    monkeypatch.setattr(watch, "own_cores", lambda: set(range(32)))
    assert of(kernel, 4).disturbance({"seconds": 1.0, "others": 2.0, "waited": 0.01}) < 1


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


def test_what_a_child_has_used_that_nobody_looked_for_is_no_others(kernel, monkeypatch):
    """Such as a compiler, which begins and ends while layers are compiled."""
    monkeypatch.setattr(watch, "_seconds_of_reaped", SECONDS_OF_REAPED)
    watched = Watch(proc=kernel / "proc", system=kernel / "sys")
    before = watched.read()
    subprocess.run([sys.executable, "-c", "sum(range(5_000_000))"], check=True)
    assert between(before, watched.read())["others"] < -0.02  # the kernel's file has not changed


def test_a_server_on_a_measured_port_counts_as_a_child():
    """This very process listens: it is no child of its own, so only the port can lead to it."""
    seen = Watch()
    with socket.create_server(("127.0.0.1", 0)) as server:
        seen.find_children()
        before = seen._seconds_of_children()
        seen.ports = {server.getsockname()[1]}
        seen.find_children()
        assert seen._seconds_of_children() > before + 0.1  # pytest has used more than that


@pytest.mark.parametrize(
    ("counted", "threads", "said"),
    [
        ({}, 2, []),
        ({"others": 3.0}, 2, ["other processes kept 1.5 of 2 cores busy"]),
        ({"others": 0.1, "waited": 0.4}, 2, ["threads waited for a core for 20% of the time"]),
        ({"stolen": 0.4}, 2, ["the hypervisor took the cores away for 20% of the time"]),
        ({"throttled": 0.4}, 1, ["the CPU quota stopped this process for 20% of the time"]),
        ({"throttled": 4.0}, 1, ["the CPU quota stopped this process for 100% of the time"]),
        (
            {"stolen": 0.2, "waited": 1.0},
            4,
            [
                "the hypervisor took the cores away for 10% of the time",
                "4 threads share 2 cores",
                "4 threads share a CPU quota of 2.5 cores",
            ],
        ),
        ({"waited": 1.0}, 4, ["4 threads share 2 cores", "4 threads share a CPU quota of 2.5 cores"]),
    ],
)
def test_why_a_machine_is_not_fit(kernel, counted, threads, said):
    (kernel / "sys" / "fs" / "cgroup" / "user" / "me" / "cpu.max").write_text("250000 100000\n")
    start = {"seconds": 5.0} | dict.fromkeys(counted, 1.0)
    end = {"seconds": 7.0} | {name: 1.0 + value for name, value in counted.items()}
    assert of(kernel, threads).unfit(start, end) == said


def test_a_group_without_a_quota_and_a_machine_without_a_battery(kernel, monkeypatch):
    monkeypatch.undo()
    (kernel / "sys" / "fs" / "cgroup" / "user" / "me" / "cpu.max").write_text("max 100000\n")

    def none() -> None:
        raise FileNotFoundError("/sys/class/power_supply")

    monkeypatch.setattr(psutil, "sensors_battery", none, raising=False)
    assert of(kernel, 1).unfit({"seconds": 0.0}, {"seconds": 1.0}) == []
