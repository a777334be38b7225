"""What happened while decoding, step by step. Nothing here computes a metric: see `measure/metrics.py`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class Beside:
    """How a draft came to be that was made beside the verification of the one before.

    hit: whether what the target decided was among the branches drafted meanwhile; None where none had been launched.
    early_seconds: spent drafting before the target had reached its exit. beside_seconds: and from there until its
    decision was known, on all branches. after_seconds: spent drafting once its
    decision was known: the whole draft after a miss, what was lacking after a hit. idle_seconds: the drafter waited for
    the target. handover_seconds: from sending to receiving, of every message in between.
    """

    hit: bool | None
    early_seconds: float
    beside_seconds: float
    after_seconds: float
    idle_seconds: float
    handover_seconds: float


@dataclass(frozen=True, slots=True)
class Step:
    """One draft-verify round.

    drafted: draft tokens handed to verification (all nodes of a tree).
    accepted: draft tokens that became part of the output. A stop token inside the draft ends the count.
    emitted: tokens the round added to the output, the target's own (bonus) token included.
    depth: draft tokens on the longest path that could have been accepted (equals drafted for a chain).
    *_seconds: time spent drafting, verifying, and on the rest (acceptance, roll-back, commit).
    *_bytes: bytes of weights read by the drafter's passes and by the target's verification pass.
    exits: as in `Draft`, one entry per drafted token; empty for a drafter with a single depth.

    In a batch: rows: how many sequences shared the round; seconds are this one's part of it (one in `rows`), bytes are
    those of the whole passes. align_seconds: the part spent on lining rows up in memory. grouped: whether the scheduler
    had found rows of one length; None for one that does not look for them.

    Of a drafter that works beside the target: exit_seconds: the part of verify_seconds before it was launched; the
    others are those of `Beside`, about the draft that this round verified.
    """

    drafted: int
    accepted: int
    emitted: int
    depth: int
    draft_seconds: float
    verify_seconds: float
    other_seconds: float
    draft_bytes: int
    target_bytes: int
    exits: tuple[int, ...] = ()
    rows: int = 1
    align_seconds: float = 0.0
    grouped: bool | None = None
    exit_seconds: float | None = None
    hit: bool | None = None
    early_seconds: float | None = None
    beside_seconds: float | None = None
    after_seconds: float | None = None
    idle_seconds: float | None = None
    handover_seconds: float | None = None


@dataclass(slots=True)
class Generation:
    """One answer turn of one arm.

    tokens: new token ids; the last one is a stop token if `finish` is "stop".
    steps: the rounds after the prefill; the prefill itself emits the first token.
    seconds: the whole call, prefill included; prefill_seconds: until the first token is known and the drafter is ready.
    """

    tokens: list[int]
    prefill_seconds: float
    seconds: float
    finish: str  # "stop" | "length"
    steps: list[Step] = field(default_factory=list)


class Clock:
    """Marks in time that cost nothing to take: the host's clock on a CPU, events in the stream on a GPU.

    A device synchronise in every phase would slow the very thing that is measured, so CUDA marks are events that
    are read once the answer is complete.
    """

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._device = device

    def mark(self):
        """A mark to hand to `seconds`."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def synchronize(self) -> None:
        """Waits until everything that was queued on the device is done."""
        if self._cuda:
            torch.cuda.synchronize(self._device)

    def seconds(self, start, end) -> float:
        """Seconds from mark `start` to mark `end`; on a GPU only after `synchronize`."""
        return start.elapsed_time(end) / 1e3 if self._cuda else end - start
