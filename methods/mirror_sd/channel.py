"""Between the target's side and the draft's: messages of a few numbers, and the tensors that they refer to.

Nothing is pickled on the way: both sides hold the same tensors (processes: in shared memory), and a semaphore
counts the messages in each direction. Raising and lowering it is also the memory barrier after which contents are
visible.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.synchronize import Semaphore

import torch
from torch import multiprocessing

from specbench.decoding.trace import Timestamp

RING = 8  # messages that may be in flight; neither side is ever more than a few ahead
SPANS = 3  # of a draft: before the exit, during the rest of the pass, after the decision
POLL_SECONDS = 0.5  # seconds between checks that the other side is alive
POLLS_BEFORE_YIELD = 200  # polls in a row before other work gets this core


Marked = tuple[torch.Tensor, torch.cuda.Event | None]
Span = float | tuple[Timestamp, Timestamp]  # seconds, or the marks between which they passed


def elapsed(start: Timestamp, end: Timestamp) -> Span:
    """Seconds from mark `start` to mark `end` of a clock; on a GPU the marks, as they cannot be read yet."""
    return end - start if isinstance(start, float) else (start, end)


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    Attributes:
        kind: a `Command` or a `Response`.
        numbers: up to four integers.
        reals: up to three.
        sent: when, by the clock that all processes of a machine share.
    """

    kind: int
    numbers: tuple[int, ...]
    reals: tuple[float, ...]
    sent: float


class MessageQueue:
    """Messages in one direction.

    Args:
        semaphore: of a thread or of a process; counts the messages that have arrived.
        shared: whether processes share it.
        spins: whether the receiver may poll instead of sleeping: microseconds instead of tens of them, at the cost of a
            core.
    """

    def __init__(self, semaphore: threading.Semaphore | Semaphore, shared: bool = False, spins: bool = False):
        self.arrived, self.spins = semaphore, spins
        self.numbers = torch.zeros(RING, 5, dtype=torch.int64)
        self.reals = torch.zeros(RING, 4, dtype=torch.float64)
        if shared:
            self.numbers.share_memory_()
            self.reals.share_memory_()
        self._sent = self._taken = 0  # each used on one side alone

    def put(self, kind: int, *numbers: int, reals: tuple[float, ...] = ()) -> None:
        """Sends a message; the arguments are the fields of `Message`."""
        index = self._sent % RING
        self._sent += 1
        self.numbers[index, : 1 + len(numbers)] = torch.tensor([kind, *numbers])
        times = torch.tensor([time.perf_counter(), *reals], dtype=torch.float64)
        self.reals[index, : 1 + len(reals)] = times
        self.arrived.release()

    def take(self, alive: Callable[[], bool], timeout: float | None = None, awake: bool = True) -> Message:
        """Waits for the next message.

        Args:
            alive: whether the sender is alive.
            timeout: seconds to wait; None: for ever.
            awake: whether to spin, if that is allowed at all.

        Raises:
            EOFError: no sender is alive.
            TimeoutError: none came in time.
        """
        deadline = None if timeout is None else time.perf_counter() + timeout
        while not self._wait(awake and self.spins):
            if not alive():
                if self.arrived.acquire(False):  # sent since, before it died
                    break
                raise EOFError
            if deadline is not None and time.perf_counter() > deadline:
                raise TimeoutError
        index = self._taken % RING
        self._taken += 1
        kind, *numbers = self.numbers[index].tolist()
        sent, *reals = self.reals[index].tolist()
        return Message(kind, tuple(numbers), tuple(reals), sent)

    def waiting(self) -> bool:
        """Whether a message is waiting."""
        if not self.arrived.acquire(False):
            return False
        self.arrived.release()
        return True

    def _wait(self, spinning: bool) -> bool:
        if not spinning:
            return self.arrived.acquire(True, POLL_SECONDS)
        for _ in range(POLLS_BEFORE_YIELD):
            if self.arrived.acquire(False):
                return True
        os.sched_yield()
        return False


class ProcessChannel:
    """A channel between two processes of one machine with models on the CPU.

    Args:
        longest: most tokens of a prompt.
        depth: most tokens of a draft.
        width: of the target's states.
        rows: width of the draft's distributions; 0 when none are handed over.
        dtype: of the target's states.
        spins: as in `MessageQueue`; false if both sides share a core.
    """

    def __init__(
        self, longest: int, depth: int, width: int, rows: int, dtype: torch.dtype, spins: bool = True
    ):
        semaphore = multiprocessing.get_context("spawn").Semaphore
        self.requests, self.replies = (
            MessageQueue(semaphore(0), True, spins),
            MessageQueue(semaphore(0), True, spins),
        )
        self._prompt = torch.zeros(longest, dtype=torch.int64).share_memory_()
        self._states = torch.zeros(depth + 1, width, dtype=dtype).share_memory_()
        self._tokens = torch.zeros(depth, dtype=torch.int64).share_memory_()
        self._probs = torch.zeros(depth if rows else 0, rows).share_memory_()
        self._spans = torch.zeros(SPANS, dtype=torch.float64).share_memory_()
        self._reason = torch.zeros(512, dtype=torch.uint8).share_memory_()

    def put_prompt(self, prompt: torch.Tensor) -> None:
        """Hands a prompt [n] to the draft's side."""
        self._prompt[: prompt.shape[0]] = prompt

    def prompt(self, n: int) -> torch.Tensor:
        """The last prompt, [n]."""
        return self._prompt[:n].clone()

    def put_prefilled(self) -> None:
        """Does nothing: no work is queued, so the prompt is prefilled."""

    def wait_prefilled(self) -> None:
        """Does nothing."""

    def put_states(self, states: torch.Tensor) -> None:
        """Hands exit states [n, d] to the draft's side."""
        self._states[: states.shape[0]] = states

    def states(self, n: int) -> torch.Tensor:
        """The last exit states, [n, d]."""
        return self._states[:n]

    def put_draft(self, tokens: torch.Tensor, probs: torch.Tensor | None) -> None:
        """Hands a draft [n] and its distributions [n, rows] to the target's side."""
        self._tokens[: tokens.shape[0]] = tokens
        if probs is not None:
            self._probs[: probs.shape[0]] = probs

    def draft(self, n: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The last draft [n], and distributions [n, rows], which mean nothing if it was not drawn."""
        return self._tokens[:n].clone(), self._probs[:n].clone() if self._probs.shape[0] else None

    def put_spans(self, spans: tuple[Span, ...]) -> None:
        """Hands over how long drafting took, in `SPANS` parts."""
        self._spans[:] = torch.tensor(spans, dtype=torch.float64)

    def spans(self) -> tuple[Span, ...]:
        """How long the last draft took."""
        return tuple(self._spans.tolist())

    def put_reason(self, text: str) -> None:
        """Hands over why the draft's side failed."""
        data = bytearray(text.encode()[: self._reason.shape[0]])
        self._reason[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)

    def reason(self) -> str:
        """Why the draft's side failed."""
        return bytes(self._reason.tolist()).rstrip(b"\0").decode(errors="replace")


class ThreadChannel:
    """A channel between two threads of one process.

    On CUDA each works on its own stream: tensors come with an event that the other stream waits for, and no thread
    waits for a device.

    Args:
        device: the draft model's.
    """

    def __init__(self, device: torch.device):
        self.requests, self.replies = (
            MessageQueue(threading.Semaphore(0)),
            MessageQueue(threading.Semaphore(0)),
        )
        self.device = device
        self._copying: dict[torch.device, torch.cuda.Stream] = {}
        self._prompt: Marked
        self._prefilled: torch.cuda.Event | None
        self._states: Marked
        self._tokens: Marked
        self._probs: Marked | None
        self._spans: tuple[Span, ...]
        self._text = ""

    def put_prompt(self, prompt: torch.Tensor) -> None:
        """Hands a prompt [n] to the draft's side."""
        self._prompt = _marked(prompt)

    def prompt(self, n: int) -> torch.Tensor:
        """The last prompt, [n]."""
        return _taken(self._prompt, self.device, self._copying)

    def put_prefilled(self) -> None:
        """Records that the prompt is prefilled once the work queued by now is done."""
        cuda = self.device.type == "cuda"
        self._prefilled = torch.cuda.current_stream(self.device).record_event() if cuda else None

    def wait_prefilled(self) -> None:
        """Makes the target's stream wait for the prefill, or its thread if it has none."""
        device = self._prompt[0].device
        if self._prefilled is None:
            return
        if device.type == "cuda":
            torch.cuda.current_stream(device).wait_event(self._prefilled)
        else:
            self._prefilled.synchronize()

    def put_states(self, states: torch.Tensor) -> None:
        """Hands exit states [n, d] to the draft's side."""
        self._states = _marked(states)

    def states(self, n: int) -> torch.Tensor:
        """The last exit states, [n, d]."""
        return _taken(self._states, self.device, self._copying)

    def put_draft(self, tokens: torch.Tensor, probs: torch.Tensor | None) -> None:
        """Hands a draft [n] and its distributions [n, rows] to the target's side."""
        self._tokens = _marked(tokens)
        self._probs = None if probs is None else _marked(probs)

    def draft(self, n: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The last draft [n], and its distributions [n, rows] if it was drawn."""
        probs = None if self._probs is None else _taken(self._probs, None, self._copying)
        return _taken(self._tokens, None, self._copying), probs

    def put_spans(self, spans: tuple[Span, ...]) -> None:
        """Hands over how long drafting took, in `SPANS` parts."""
        self._spans = spans

    def spans(self) -> tuple[Span, ...]:
        """How long the last draft took; on CUDA to be read once its stream is done."""
        return self._spans

    def put_reason(self, text: str) -> None:
        """Hands over why the draft's side failed."""
        self._text = text

    def reason(self) -> str:
        """Why the draft's side failed."""
        return self._text


def _marked(tensor: torch.Tensor) -> Marked:
    """A tensor with the event after which it is complete; None on a CPU."""
    if tensor.device.type != "cuda":
        return tensor, None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return tensor, event


def _taken(
    marked: Marked, device: torch.device | None, copying: dict[torch.device, torch.cuda.Stream]
) -> torch.Tensor:
    """The tensor, usable on the current stream.

    Args:
        marked: from `_marked`.
        device: where it is wanted; None: where it is.
        copying: a stream for each device that is copied from. The device's own stream would copy too late: after all
            that is queued there, such as the rest of the target's pass.
    """
    tensor, event = marked
    if event is None:
        return tensor if device is None else tensor.to(device)
    if device is None or device == tensor.device:
        stream = torch.cuda.current_stream(tensor.device)
        stream.wait_event(event)
        tensor.record_stream(stream)
        return tensor
    if tensor.device not in copying:
        copying[tensor.device] = torch.cuda.Stream(tensor.device)
    stream = copying[tensor.device]
    with torch.cuda.stream(stream):
        stream.wait_event(event)
        copy = tensor.to(device, non_blocking=device.type == "cuda")
        tensor.record_stream(stream)
        if device.type == "cuda":
            copied = stream.record_event()
            torch.cuda.current_stream(device).wait_event(copied)
            copy.record_stream(torch.cuda.current_stream(device))
    return copy
