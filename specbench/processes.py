"""Processes that do not outlive the one that started them, and leave in good order when asked to; their cores."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_LIBC = ctypes.CDLL(None)  # at once: between fork and exec is no time to load anything


def own_cores() -> set[int]:
    """Numbers of the cores that this process may run on: those of its affinity, or all where a system has none."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def end_with_parent() -> None:
    """Makes the kernel end this new process when its parent is gone (on Linux).

    Ctrl-C, which reaches every process of a terminal, is left to the parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@contextmanager
def heeding_sigterm() -> Iterator[None]:
    """SIGTERM leaves this process as an exception does, so that what it has started can be ended; exit code 143."""
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
