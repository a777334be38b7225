"""Records of decoding, step by step, with times. Nothing here computes a metric: see `measure/metrics/`."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch

Timestamp = Any  # seconds on a CPU, a torch.cuda.Event on a GPU: a `Clock` makes only one kind


@dataclass(slots=True)
class Step:
    """One draft-verify round of a sequence. Its times are noted once the clock can be read, see `Clock`.

    Attributes:
        drafted: draft tokens handed to verification (all nodes of a tree). None: another engine does not report it.
        accepted: draft tokens that became part of the output. A stop token inside the draft ends the count.
        emitted: tokens the round added to the output, the target's own (bonus) token included.
        depth: draft tokens on the longest path that could have been accepted (equals drafted for a chain), or None.
        draft_seconds: drafting, without what a drafter computes after the verification. In a batch all seconds are this
            sequence's share of the round, one in `sequences`. NaN if another engine decodes, which reports only whole
            rounds: `other_seconds` is then the whole round.
        verify_seconds: verifying.
        other_seconds: the rest: acceptance, roll-back, commit, the drafter's passes over accepted tokens included.
        draft_bytes: bytes of weights read by the drafter's passes; in a batch of the whole passes. None: not known.
        target_bytes: likewise those read by the target's verification pass.
        sequences: number of sequences that shared the round.
        align_seconds: in a batch, the time spent on alignment in memory.
        stats: numbers of the drafter's and the scheduler's own, see `Draft`.
    """

    drafted: int | None
    accepted: int
    emitted: int
    depth: int | None
    draft_seconds: float
    verify_seconds: float
    other_seconds: float
    draft_bytes: int | None
    target_bytes: int | None
    sequences: int = 1
    align_seconds: float = 0.0
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds of the round; in a batch, this sequence's share."""
        parts = (self.draft_seconds, self.verify_seconds, self.other_seconds, self.align_seconds)
        return sum(seconds for seconds in parts if not math.isnan(seconds))


def counted(count: float) -> int | None:
    """A count as it is recorded; None for NaN."""
    return None if math.isnan(count) else int(count)


@dataclass(slots=True)
class Generation:
    """One answer turn of one arm.

    Attributes:
        tokens: new token ids; the last one is a stop token if `finish` is "stop".
        prefill_seconds: until the first token is known and the drafter is ready; None if it was not timed.
        seconds: the whole call, prefill included.
        finish: "stop" or "length".
        steps: the rounds after the prefill; the prefill itself emits the first token.
    """

    tokens: list[int]
    prefill_seconds: float | None
    seconds: float
    finish: str
    steps: list[Step] = field(default_factory=list)


class Clock:
    """Marks in time that cost nothing to take: the host's clock on a CPU, events in the stream on a GPU.

    A device synchronise in every phase would slow down what is measured, so CUDA marks are events that are read once
    the answer is complete. Events are recorded on the current stream of `device`, whichever device is the current one:
    on another stream, they would show when work was queued, not when it was done.
    """

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._device = device

    def mark(self) -> Timestamp:
        """A mark to hand to `seconds`."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def synchronize(self) -> None:
        """Waits until everything that was queued on the device is done."""
        if self._cuda:
            torch.cuda.synchronize(self._device)

    def seconds(self, start: Timestamp, end: Timestamp) -> float:
        """Seconds from mark `start` to mark `end`, also of another clock's; on a GPU only after `synchronize`."""
        return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3
