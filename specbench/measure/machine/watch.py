"""What else runs on the machine while it measures: read from the kernel's counters between two slices of an arm.

A slice is *disturbed* if this process had to wait for a core, or if others used its cores. These counters decide that,
never the duration of the slice.
"""

from __future__ import annotations

import math
import os
import re
import resource
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from specbench.system.processes import PROC, SYSTEM, cpu_quota, groups_around, own_cores

Counters = dict[str, float]  # by name; what this system does not count is missing

LOST = ("waited", "stolen", "throttled")  # seconds in which a thread of ours could not run
WORST_LOST = 0.05  # of a slice's time, above which it is disturbed
WORST_OTHERS = 1 / 8  # of our cores that others computed on during it
SETTLING = 5.0  # seconds that other processes of a run get to become idle
LOOK, IDLE = 0.05, 0.2  # seconds of a look at them, and the share of a core below which they are idle
TICKS = os.sysconf("SC_CLK_TCK")  # in a second, of the counters of `stat`


class Watch:
    """Counters of this process and of the cores that it may run on.

    - seconds: on the wall.
    - waited: its threads were ready and had no core; the mean over `threads`.
    - stolen: the hypervisor gave the cores to other guests; the mean over as many cores as compute, since an idle one
      loses nothing.
    - throttled: its control group, or one around it, had used up its share of CPU time; likewise a mean, since the
      kernel sums over the cores.
    - others: CPU time of all other processes on these cores; its children count as its own.
    - switches: involuntary context switches.
    - throttlings (`heat`): times that one of the cores was throttled for heat.

    Args:
        threads: that this process computes with.
        proc: where the kernel shows processes.
        system: where it shows devices and control groups.

    Attributes:
        ports: local ports of measured servers that are no children.
    """

    def __init__(self, threads: int = 1, proc: Path = PROC, system: Path = SYSTEM):
        self.threads = threads
        self.ports: Collection[int] = ()
        self._stat, self._tasks = proc / "stat", proc / "self" / "task"
        around = [group / "cpu.stat" for group in groups_around("cpu", proc, system)]
        # Of those that count it: they are read in every slice.
        self._throttled = [file for file in around if file.exists() and _throttled(file) is not None]
        self._cores = own_cores()
        self._quota = cpu_quota(proc, system)  # read once: a slice is too short for it
        devices = system / "devices" / "system" / "cpu"
        cores = [devices / f"cpu{core}" for core in self._cores]
        heat, clocks = "thermal_throttle/core_throttle_count", "cpufreq/scaling_cur_freq"
        self._heat = [core / heat for core in cores if (core / heat).exists()]
        self._clocks = [core / clocks for core in cores if (core / clocks).exists()]
        self._children: list[psutil.Process] = []
        # By thread and by child; counts of ended ones are kept.
        self._waited_by: dict[str, int] = {}
        self._spent_by: dict[int, float] = {}

    def find_children(self) -> None:
        """Finds child processes and local servers, whose CPU time is not that of others. Takes milliseconds."""
        self._children = psutil.Process().children(recursive=True)
        if self.ports:
            with suppress(psutil.AccessDenied):
                sockets = psutil.net_connections("tcp")
                listening = {
                    one.pid
                    for one in sockets
                    if one.status == psutil.CONN_LISTEN and one.laddr.port in self.ports
                }
                for pid in filter(None, listening):
                    with suppress(psutil.NoSuchProcess):
                        server = psutil.Process(pid)
                        self._children += [server, *server.children(recursive=True)]

    def idle_children(self) -> bool:
        """Waits until the found processes are idle; False if they are still not after `SETTLING` seconds."""
        deadline, before, used = time.monotonic() + SETTLING, self._seconds_of_children(), math.inf
        while used > IDLE * LOOK and time.monotonic() < deadline:
            time.sleep(LOOK)
            now = self._seconds_of_children()
            used, before = now - before, now
        return used <= IDLE * LOOK

    def read(self) -> Counters:
        """All counters but `heat` now; times in seconds."""
        counters, computing = {"seconds": time.perf_counter()}, min(self.threads, len(self._cores))
        counters["switches"] = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        waited = self._waited()
        if waited is not None:
            counters["waited"] = waited / self.threads
        cpu_seconds = self._cpu_seconds()
        if cpu_seconds is not None:
            busy, stolen = cpu_seconds
            counters["stolen"] = stolen / computing
            ours = time.process_time() + self._seconds_of_children() + _seconds_of_reaped()
            counters["others"] = busy - ours
        if self._throttled:
            counters["throttled"] = sum(_throttled(file) or 0.0 for file in self._throttled) / computing
        return counters

    def heat(self) -> Counters:
        """The current count of throttlings; not in `read`, as a file per core is too much for every slice."""
        return {"throttlings": sum(int(file.read_text()) for file in self._heat)} if self._heat else {}

    def clock_mhz(self) -> float | None:
        """The mean frequency of our cores now; None if the system does not report it."""
        if not self._clocks:
            return None
        return sum(int(file.read_text()) for file in self._clocks) / len(self._clocks) / 1e3

    def disturbance(self, counted: Counters) -> float:
        """How much others disturbed a slice, relative to the tolerated amount: above 1 it is disturbed.

        `others` is counted in ticks, with an error of one for each of our threads. With more threads than cores, or
        than a quota allows, waiting is this process's own doing and does not count.
        """
        seconds = counted["seconds"]
        if seconds <= 0:
            return 0.0
        lost = sum(counted.get(name, 0.0) for name in self._lost()) / seconds
        others = max(0.0, counted.get("others", 0.0) - self.threads / TICKS) / seconds / len(self._cores)
        return max(lost / WORST_LOST, others / WORST_OTHERS)

    def unfit(self, before: Counters, after: Counters) -> list[str]:
        """Why this machine is not fit for measuring, each as part of a sentence; [] if nothing was seen.

        Args:
            before: counters before some work of this process.
            after: counters after it.
        """
        counted = between(before, after)
        seconds, cores, reasons = counted["seconds"], len(self._cores), []
        others = counted.get("others", 0.0) / seconds
        if others > WORST_OTHERS * cores:
            reasons.append(f"other processes kept {others:.1f} of {cores} cores busy")
        elif self.disturbance(counted) > 1:
            most = max(self._lost(), key=lambda name: counted.get(name, 0.0))
            share = min(1.0, counted[most] / seconds)  # others of its control group are throttled, too
            reasons.append(
                {
                    "waited": f"threads waited for a core for {share:.0%} of the time",
                    "stolen": f"the hypervisor took the cores away for {share:.0%} of the time",
                    "throttled": f"the CPU quota stopped this process for {share:.0%} of the time",
                }[most]
            )
        if self.threads > cores:
            reasons.append(f"{self.threads} threads share {cores} cores")
        if self._quota is not None and self._quota < self.threads:
            reasons.append(f"{self.threads} threads share a CPU quota of {self._quota:.1f} cores")
        if _on_battery():
            reasons.append("it runs on battery")
        return reasons

    def _lost(self) -> Sequence[str]:
        crowded = self.threads > len(self._cores) or (self._quota is not None and self._quota < self.threads)
        return ("stolen",) if crowded else LOST

    def _waited(self) -> float | None:
        """Seconds that the threads of this process have waited for a core (sched/stats in the kernel's manual)."""
        if not self._tasks.exists():
            return None
        for task in os.listdir(self._tasks):
            # A thread that has just ended, or a kernel without the counter.
            with suppress(OSError, IndexError):
                fields = (self._tasks / task / "schedstat").read_bytes().split()
                self._waited_by[task] = int(fields[1])
        return sum(self._waited_by.values()) / 1e9 if self._waited_by else None

    def _cpu_seconds(self) -> tuple[float, float] | None:
        """Seconds that our cores were busy, and that they were stolen (proc(5)); None if they are not counted."""
        if not self._stat.exists():
            return None
        busy = stolen = 0
        for line in self._stat.read_text().splitlines():
            name, *fields = line.split()
            if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in self._cores:
                user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
                busy += user + nice + system + irq + softirq
                stolen += steal
            elif not name.startswith("cpu"):
                break
        return (busy / TICKS, stolen / TICKS) if busy else None

    def _seconds_of_children(self) -> float:
        for child in self._children:
            with suppress(psutil.NoSuchProcess):
                times = child.cpu_times()
                self._spent_by[child.pid] = times.user + times.system
        return sum(self._spent_by.values())


def _seconds_of_reaped() -> float:
    """CPU time of this process's children that have ended, such as a compiler, which is no other's."""
    times = resource.getrusage(resource.RUSAGE_CHILDREN)
    return times.ru_utime + times.ru_stime


def between(before: Counters, after: Counters) -> Counters:
    """The counts between two readings."""
    return {name: after[name] - before[name] for name in after if name in before}


def added(readings: Sequence[Counters]) -> Counters:
    """The sums over several readings of the counters that all of them have."""
    names = set.intersection(*(set(reading) for reading in readings)) if readings else set()
    return {name: sum(reading[name] for reading in readings) for name in sorted(names)}


def _throttled(file: Path) -> float | None:
    """Seconds that a control group was throttled, summed over the cores; None if they are not counted."""
    match = re.search(r"throttled_(usec|time) (\d+)", file.read_text())  # us, or in the old kind of groups ns
    return int(match[2]) / (1e6 if match[1] == "usec" else 1e9) if match else None


def _on_battery() -> bool:
    with suppress(OSError, AttributeError):  # no such folder, or a system of which psutil does not know it
        battery = psutil.sensors_battery()
        return battery is not None and not battery.power_plugged
    return False
