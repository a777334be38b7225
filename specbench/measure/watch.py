"""What else runs on the machine while it measures: read from the kernel's counters between two slices of an arm.

A slice is *disturbed* where this process had to wait for a core, or others computed beside it. Whether it was is judged
by these counters alone, never by how long the slice took: so leaving out what was disturbed favours no arm.
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Sequence

Counters = dict[str, float]  # by name; what this system does not count is missing

LOST = ("waited", "stolen", "throttled")  # seconds in which a thread of ours could not run
WORST_LOST = 0.05  # of a slice's time, above which it is disturbed
WORST_OTHERS = 0.25  # cores that others computed on during it
TICKS = os.sysconf("SC_CLK_TCK")


class Watch:
    """Counters of this process and of the cores that it may run on.

    - seconds: on the wall.
    - waited: its threads were ready and had no core; summed over the threads.
    - stolen: the hypervisor gave the cores to other guests.
    - throttled: its control group had used up its share of CPU time.
    - others: CPU time of all other processes on these cores; those of its children are its own.
    - switches: times that a thread had to give way before it was done.
    """

    def __init__(self, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")):
        self._stat, self._tasks = proc / "stat", proc / "self" / "task"
        self._throttling = next(
            (file for file in (cgroup / "cpu.stat", cgroup / "cpu" / "cpu.stat") if file.exists()), None
        )
        self._cores = {f"cpu{core}" for core in usable_cores()}
        self._children: list[psutil.Process] = []
        self._gone = 0.0  # CPU time of children that have ended since they were found

    def find_children(self) -> None:
        """Looks for child processes, whose CPU time is not that of others. Takes milliseconds."""
        self._children = psutil.Process().children(recursive=True)

    def read(self) -> Counters:
        """All counters now, in seconds."""
        counters = {"seconds": time.perf_counter()}
        counters["switches"] = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        waited = self._waited()
        if waited is not None:
            counters["waited"] = waited
        if self._stat.exists():
            busy, counters["stolen"] = self._cpu_seconds()
            counters["others"] = busy - time.process_time() - self._seconds_of_children()
        if self._throttling is not None:
            counters |= self._throttled(self._throttling)
        return counters

    def _waited(self) -> float | None:
        """Seconds that the threads of this process have waited for a core (sched/stats in the kernel's manual)."""
        total = 0
        try:
            for task in os.listdir(self._tasks):
                total += int((self._tasks / task / "schedstat").read_bytes().split()[1])
        except OSError:  # not counted here, or a thread that has just ended
            return None
        return total / 1e9

    def _cpu_seconds(self) -> tuple[float, float]:
        """Seconds that our cores were busy, and that they were stolen (proc(5))."""
        busy = stolen = 0
        for line in self._stat.read_text().splitlines():
            name, *fields = line.split()
            if name in self._cores:
                user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
                busy += user + nice + system + irq + softirq
                stolen += steal
            elif not name.startswith("cpu"):
                break
        return busy / TICKS, stolen / TICKS

    def _throttled(self, file: Path) -> Counters:
        fields = dict(line.split() for line in file.read_text().splitlines())
        if "throttled_usec" in fields:
            return {"throttled": int(fields["throttled_usec"]) / 1e6}
        return {"throttled": int(fields["throttled_time"]) / 1e9} if "throttled_time" in fields else {}

    def _seconds_of_children(self) -> float:
        total = 0.0
        for child in self._children:
            try:
                times = child.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
        return total


def usable_cores() -> set[int]:
    """Numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def between(before: Counters, after: Counters) -> Counters:
    """What was counted between two readings."""
    return {name: after[name] - before[name] for name in after if name in before}


def added(readings: Sequence[Counters]) -> Counters:
    """The sums over several readings, of what all of them have."""
    names = set.intersection(*(set(reading) for reading in readings)) if readings else set()
    return {name: sum(reading[name] for reading in readings) for name in sorted(names)}


def disturbance(counted: Counters) -> float:
    """How much others disturbed a slice, in units of what is still taken for undisturbed."""
    seconds = counted["seconds"]
    if seconds <= 0:
        return 0.0
    lost = sum(counted.get(name, 0.0) for name in LOST) / seconds
    return max(lost / WORST_LOST, counted.get("others", 0.0) / seconds / WORST_OTHERS)


# -- before measuring


def unfit(
    before: Counters, after: Counters, threads: int, cgroup: Path = Path("/sys/fs/cgroup")
) -> list[str]:
    """Why this machine is not fit for measuring, each as part of a sentence; [] if nothing was seen.

    Args:
        before: counters before the warm-up.
        after: counters after it.
        threads: that this process computes with.
        cgroup: where the kernel tells what the control group may use.
    """
    counted = between(before, after)
    seconds, cores, reasons = counted["seconds"], len(usable_cores()), []
    others = counted.get("others", 0.0) / seconds
    if others > WORST_OTHERS:
        reasons.append(f"other processes kept {others:.1f} of {cores} cores busy")
    elif sum(counted.get(name, 0.0) for name in LOST) > WORST_LOST * seconds:
        lost = max(LOST, key=lambda name: counted.get(name, 0.0))
        share = counted[lost] / seconds
        reasons.append(
            {
                "waited": f"threads waited for a core for {share:.0%} of the time",
                "stolen": f"the hypervisor took the cores away for {share:.0%} of the time",
                "throttled": f"the CPU quota stopped this process for {share:.0%} of the time",
            }[lost]
        )
    quota = cpu_quota(cgroup)
    if quota is not None and quota < threads:
        reasons.append(f"{threads} threads share a CPU quota of {quota:.1f} cores")
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    if battery is not None and not battery.power_plugged:
        reasons.append("it runs on battery")
    return reasons


def cpu_quota(cgroup: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Cores' worth of time that the control group of this process may use; None without a limit."""
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        if all((cgroup / file).exists() for file in files):
            quota, period = " ".join((cgroup / file).read_text() for file in files).split()
            return None if quota in ("max", "-1") else int(quota) / int(period)
    return None
