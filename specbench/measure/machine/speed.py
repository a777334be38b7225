"""What the machine can do now, and the best that it has shown: short probes before, between and after the questions.

A processor has phases: shared or throttled, it may run at half its speed for hours. That changes the ratio of
arithmetic to overhead, and with it speedups; repeats within the phase do not show it. Probes do.

torch is imported where it is needed: a report reads the figures without it.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from specbench.measure.machine import bandwidth
from specbench.measure.machine.hardware import cpu_model
from specbench.system.errors import UserError, memory_permitting, warn
from specbench.system.files import write_atomic
from specbench.system.paths import cache_folder
from specbench.system.processes import own_cores

if TYPE_CHECKING:
    import torch

_warn = cache(warn)  # once in a process

Figures = dict[str, float]  # keyed by NAMES; higher is faster

BANDWIDTH, PRODUCT, OPERATIONS = (
    "bandwidth_bytes_per_second",
    "product_flops_per_second",
    "operations_per_second",
)
NAMES = (BANDWIDTH, PRODUCT, OPERATIONS)
# Share below the best above which a machine is slow. Probes of one phase scatter by 1 % (arithmetic, starting) to 10 %
# (memory, of which other load takes its part): a smaller share would warn of nothing. The interval of a speedup over 36
# questions reaches some 7 % to each side: with a larger share it would move by twice that in silence.
SLOW = 0.15
SECONDS_BETWEEN = 20.0  # probes take a tenth of a second: less than 1 % of a run

# A probe is many short stretches, of which the fastest counts: what interrupts a process seldom spares none of a
# millisecond each.
STRETCHES = 16
# Of the buffer that is read; more would take longer to make than to read.
LEAST_BYTES, MOST_BYTES = 2**26, 2**29
GPU_BYTES = 2**28  # several times the cache of any GPU
SIZE = {"cpu": 256, "cuda": 4096}  # rows and columns of the product
OPERATIONS_TIMED = {"cpu": 200, "cuda": 1000}


def probe(device: torch.device) -> Figures:
    """Measures the machine's current speed, with torch's current threads, in about a tenth of a second.

    Args:
        device: whose memory and arithmetic are measured.

    Returns:
        Bytes per second read by sums over a buffer that no cache holds; floating-point operations per second of a
        product of two square float32 matrices; operations per second on a tensor of a single number, which is what
        starting them costs. Each is the best of STRETCHES.
    """
    import torch

    sums = bandwidth.SUMS[device.type]
    size, count = SIZE[device.type], OPERATIONS_TIMED[device.type]
    seconds = partial(bandwidth.seconds_of, device)
    with torch.inference_mode():
        buffer = torch.ones(_buffer_bytes(device.type) // 4, device=device)
        # On a GPU all of it each time: a part would stay in its cache.
        parts = buffer.chunk(STRETCHES) if device.type == "cpu" else [buffer] * STRETCHES
        reading = min(seconds(part.sum, sums) for part in parts)
        matrix = torch.ones(size, size, device=device)
        multiplying = min(seconds(lambda: matrix @ matrix, 1) for _ in range(STRETCHES))
        number = torch.zeros(1, device=device)
        starting = min(seconds(partial(number.add_, 1), count) for _ in range(STRETCHES))
    return {
        BANDWIDTH: sums * parts[0].nbytes / reading,
        PRODUCT: 2 * size**3 / multiplying,
        OPERATIONS: count / starting,
    }


def _buffer_bytes(kind: str) -> int:
    """On a CPU twice its caches, within bounds: read in order, no part of it is still cached."""
    if kind != "cpu":
        return GPU_BYTES
    return min(max(LEAST_BYTES, 2 * bandwidth.last_level_cache_bytes()), MOST_BYTES)


def machine_key(device: torch.device) -> str:
    """Key that two probes must share to be compared: processor, cores, threads, torch, GPU."""
    import torch

    threads = torch.get_num_threads()
    parts = [
        cpu_model(),
        f"{len(own_cores())} of {os.cpu_count()} cores",
        f"{threads} thread{'s' if threads > 1 else ''}",
        f"torch {torch.__version__}",
    ]
    if device.type == "cuda":  # older figures read a part of the buffer, which its cache held
        parts += [torch.cuda.get_device_name(device), f"sums over {GPU_BYTES >> 20} MiB"]
    return ", ".join(parts)


def below(figures: Figures, best: Figures) -> Figures:
    """By figure, the share by which it is below the best, at least 0."""
    return {name: max(0.0, 1 - figures[name] / best[name]) for name in NAMES}


def slow(shares: Figures) -> Figures:
    """The shares that make a machine slow."""
    return {name: share for name, share in shares.items() if share > SLOW}


class Probes:
    """The probes of one process, and the best that its machine has shown.

    Attributes:
        machine: see `machine_key`.
        best: by figure, of all runs with these threads on this machine so far.

    Args:
        device: that is measured on.
        settle: called before each probe, to wait until nothing else of the run computes.
    """

    def __init__(self, device: torch.device, settle: Callable[[], None] | None = None):
        self._settle = settle
        self.machine = machine_key(device)
        self.best: Figures = {}
        self._device = device
        self._waiting: list[Figures] = []
        self._taken = -math.inf

    def take(self) -> Figures:
        """Measures, and keeps the figures until `collect`."""
        if self._settle is not None:
            self._settle()
        figures = probe(self._device)
        self.best = remember(self.machine, figures)
        self._waiting.append(figures)
        self._taken = time.monotonic()
        return figures

    def take_if_possible(self) -> Figures | None:
        """As `take`; a probe for which there is no memory is left out, since the questions are what counts."""
        with memory_permitting("the machine's speed was not probed", _warn):
            return self.take()
        self._taken = time.monotonic()
        return None

    def is_due(self) -> bool:
        """Whether the next probe is due."""
        return time.monotonic() - self._taken >= SECONDS_BETWEEN

    def collect(self) -> list[Figures]:
        """The figures since the last call, in order."""
        waiting, self._waiting = self._waiting, []
        return waiting


# -- the best that a machine has shown


def best_file() -> Path:
    """The file of these: in $SPECBENCH_CACHE, or in the folder specbench of $XDG_CACHE_HOME or ~/.cache."""
    return cache_folder() / "machine.json"


def remember(machine: str, figures: Figures) -> Figures:
    """Updates a machine's best figures: the highest of each is kept, since disturbance only ever lowers one.

    If the file cannot be written, warns and keeps nothing.

    Args:
        machine: see `machine_key`.
        figures: of a probe.

    Returns:
        By figure, the best so far, these included.
    """
    path = best_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a process that reads meanwhile gets the file before or after
            by_machine = _read(path)
            before = by_machine.get(machine, {})
            best = {name: max(value, before.get(name, 0.0)) for name, value in figures.items()}
            if best != before:
                write_atomic(path, json.dumps(by_machine | {machine: best}, indent=2) + "\n")
    except (OSError, UserError) as error:
        _warn(f"cannot save this machine's best figures: {error}")
        return figures
    return best


def _read(path: Path) -> dict[str, Figures]:
    """Figures by machine; {} if there is no file or, with a warning, if it is damaged."""
    if not path.exists():
        return {}
    try:
        by_machine = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # not JSON, or not UTF-8
        by_machine = None
    if not isinstance(by_machine, dict) or not all(map(_are_figures, by_machine.values())):
        _warn(f"{path} is damaged and was started over: this machine's best figures are unknown")
        return {}
    return by_machine


def _are_figures(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == set(NAMES)
        and all(isinstance(number, int | float) and 0 < number < math.inf for number in value.values())
    )
