"""The memory that a process may still take, and its share of CPU time, as the kernel's files tell it."""

from __future__ import annotations

from pathlib import Path

import pytest

from specbench.system.processes import cpu_quota, free_memory


@pytest.fixture
def kernel(tmp_path) -> Path:
    """Faked `proc` and `sys` of a machine with 1000 kB that are free, and no control group."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemFree: 9 kB\nMemAvailable:       1000 kB\nCached: 7 kB\n")
    return tmp_path


def of(kernel: Path) -> int | None:
    return free_memory(kernel / "proc", kernel / "sys")


def group(kernel: Path, path: str, listed: str, **files: str) -> None:
    """A control group at a path of the mount, which `proc` lists as told."""
    folder = kernel / "sys" / "fs" / "cgroup" / path
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(text)
    (kernel / "proc" / "self" / "cgroup").write_text(listed)


STAT = "anon 300\ninactive_file 2048\nactive_file 5\ntotal_inactive_file 1024\n"


def test_without_a_limit_it_is_what_the_machine_has(kernel):
    assert of(kernel) == 1000 * 1024
    group(kernel, "me", "0::/me\n", max="max\n", current="5000\n", stat=STAT)
    assert of(kernel) == 1000 * 1024


def test_a_limit_of_the_group_counts_where_it_leaves_less(kernel):
    group(kernel, "me", "0::/me\n", max="900000\n", current="500000\n", stat=STAT)
    assert of(kernel) == 900_000 - (500_000 - 2048), "a cache of files makes room"
    (kernel / "sys/fs/cgroup/me/memory.max").write_text("9000000\n")
    assert of(kernel) == 1000 * 1024
    (kernel / "sys/fs/cgroup/me/memory.max").write_text("400000\n")
    assert of(kernel) == 0


def test_the_older_kind_of_groups(kernel):
    group(
        kernel,
        "memory/me",
        "5:devices:/x\n3:memory:/me\n",
        limit_in_bytes="800000\n",
        usage_in_bytes="300000\n",
        stat=STAT,
    )
    assert of(kernel) == 800_000 - (300_000 - 1024)


def test_a_limit_of_a_group_around_it(kernel):
    group(kernel, "pod", "", max="600000\n", current="200000\n", stat="inactive_file 0\n")
    group(kernel, "pod/me", "0::/pod/me\n", max="max\n", current="100000\n", stat="inactive_file 0\n")
    assert of(kernel) == 400_000


def test_the_smallest_quota_of_the_groups_holds(kernel):
    mount = kernel / "sys" / "fs" / "cgroup"
    (mount / "pod" / "me").mkdir(parents=True)
    (mount / "pod" / "me" / "cpu.stat").write_text("usage_usec 9\n")
    (kernel / "proc" / "self" / "cgroup").write_text("0::/pod/me\n")
    quotas = []
    for folder, text in (("me", "max"), (".", "250000"), ("me", "400000"), ("me", "50000")):
        (mount / "pod" / folder / "cpu.max").write_text(f"{text} 100000\n")
        quotas.append(cpu_quota(kernel / "proc", kernel / "sys"))
    assert quotas == [None, 2.5, 2.5, 0.5]


def test_a_quota_of_the_older_kind_of_groups(kernel):
    group = kernel / "sys" / "fs" / "cgroup" / "cpu" / "me"
    group.mkdir(parents=True)
    (kernel / "proc" / "self" / "cgroup").write_text("3:cpu,cpuacct:/me\n")
    for file, text in (("stat", "nr_periods 1"), ("cfs_quota_us", "-1"), ("cfs_period_us", "100000")):
        (group / f"cpu.{file}").write_text(f"{text}\n")
    assert cpu_quota(kernel / "proc", kernel / "sys") is None
    (group / "cpu.cfs_quota_us").write_text("150000\n")
    assert cpu_quota(kernel / "proc", kernel / "sys") == 1.5


def test_a_system_that_tells_nothing(tmp_path):
    assert of(tmp_path) is None and cpu_quota(tmp_path, tmp_path) is None
