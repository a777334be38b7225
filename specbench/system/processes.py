"""Processes that do not outlive the one that started them, and leave in good order when asked to; cores and memory."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROC, SYSTEM = Path("/proc"), Path("/sys")
# Files of a control group (v2, v1): its limit and its usage; key of the file cache within that usage.
MEMORY = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
QUOTA = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))  # likewise, of its CPU time
_LIBC = ctypes.CDLL(None)  # loaded now: nothing may be loaded between fork and exec


def own_cores() -> set[int]:
    """Numbers of the cores that this process may run on: those of its affinity, or all where a system has none."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def cgroup_folder(controller: str, proc: Path = PROC, system: Path = SYSTEM) -> Path | None:
    """The folder of this process's control group (cgroups(7)), v1 or v2; None if there is none."""
    mounted, listed = system / "fs" / "cgroup", proc / "self" / "cgroup"
    if not listed.exists():
        return None
    groups = [line.split(":", 2) for line in listed.read_text().splitlines()]
    candidates = [
        mounted / controller / path.lstrip("/") for _, names, path in groups if controller in names.split(",")
    ]
    candidates += [
        mounted / path.lstrip("/") for number, names, path in groups if number == "0" and not names
    ]
    # In a container the path is often that outside of it: its own group is then at the root of the mount.
    candidates += [mounted / controller, mounted]
    return next((folder for folder in candidates if (folder / f"{controller}.stat").exists()), None)


def groups_around(controller: str, proc: Path = PROC, system: Path = SYSTEM) -> list[Path]:
    """The folder of this process's control group, and those of the groups around it, whose limits hold for it, too."""
    cgroup = cgroup_folder(controller, proc, system)
    folders = [] if cgroup is None else [cgroup, *cgroup.parents]
    return [folder for folder in folders if folder.is_relative_to(system / "fs" / "cgroup")]


def cpu_quota(proc: Path = PROC, system: Path = SYSTEM) -> float | None:
    """Cores' worth of time that this process may use: the smallest limit of its control groups; None without one."""
    quotas = []
    for folder in groups_around("cpu", proc, system):
        for files in QUOTA:
            if all((folder / file).exists() for file in files):
                quota, period = " ".join((folder / file).read_text() for file in files).split()
                quotas += [] if quota in ("max", "-1") else [int(quota) / int(period)]
    return min(quotas, default=None)


def free_memory(proc: Path = PROC, system: Path = SYSTEM) -> int | None:
    """Bytes that this process may still take: of the machine, or of its control group if that has less.

    None if the system reports neither.
    """
    file = proc / "meminfo"
    match = re.search(r"MemAvailable:\s+(\d+) kB", file.read_text()) if file.exists() else None
    free = [] if match is None else [1024 * int(match[1])]
    for folder in groups_around("memory", proc, system):
        for limit, usage, cached in MEMORY:
            if (folder / limit).exists() and (most := (folder / limit).read_text().strip()) != "max":
                held = re.search(rf"^{cached} (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
                used = int((folder / usage).read_text()) - (int(held[1]) if held else 0)
                free.append(max(0, int(most) - used))
    return min(free, default=None)


def end_with_parent() -> None:
    """Makes the kernel end this new process when its parent is gone (on Linux).

    Ctrl-C, which reaches every process of a terminal, is left to the parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@contextmanager
def heeding_sigterm() -> Iterator[None]:
    """Within the context, SIGTERM raises SystemExit(143), so that started processes can be ended."""
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
