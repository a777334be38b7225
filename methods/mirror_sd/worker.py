"""How the target's side reaches the draft's: in the same thread, in a thread or in a process of its own.

A thread is for CUDA, where it queues work on its own stream or device; a process is for a CPU, on its own cores.
During an answer both sides of a process spin; between answers the draft's side sleeps, so that it does not disturb
other measurements.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from enum import IntEnum
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

import torch
from torch import multiprocessing

from methods.mirror_sd.brancher import SettledDraft
from methods.mirror_sd.channel import Message, ProcessChannel, ThreadChannel, elapsed
from specbench.decoding.model.graphs import CAPTURING, GraphRunner
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.trace import Clock
from specbench.system.errors import JobError, one_line
from specbench.system.processes import end_with_parent

if TYPE_CHECKING:
    from methods.mirror_sd.brancher import Brancher
    from methods.mirror_sd.channel import Span

STARTING = 300.0  # seconds that a new process gets until it is ready


class Command(IntEnum):
    """Messages of the target's side."""

    BEGIN, LAUNCH, SETTLE, END, CLOSE = range(5)


class Response(IntEnum):
    """Messages of the draft's side."""

    READY, DRAFT, ENDED, FAILED = range(4)


def overlap_of(
    hit: bool | None, before_exit: Span, behind_exit: Span, exposed: Span, idle: float, ipc: float
) -> dict[str, Any]:
    """The statistics of a draft that was made during the verification of the one before.

    Times of drafting are those of the draft model's device, the two others those of the host.

    Args:
        hit: whether the target's decision was among the branches drafted meanwhile; None if none was launched.
        before_exit: seconds of drafting before the target had reached its exit.
        behind_exit: of drafting from there until its decision was known, on all branches.
        exposed: of drafting once its decision was known: the whole draft after a miss, the rest of it after a hit.
        idle: in which the drafter waited for the target.
        ipc: from sending to receiving, of every message in between.
    """
    return {
        "hit": hit,
        "overlapped_before_exit_seconds": before_exit,
        "overlapped_behind_exit_seconds": behind_exit,
        "exposed_seconds": exposed,
        "idle_seconds": idle,
        "ipc_seconds": ipc,
    }


class Inline:
    """Both sides in one thread, without overlap. For tests, and to compare with."""

    def __init__(self, brancher: Brancher):
        self.brancher, self.clock = brancher, Clock(brancher.device)

    def begin(self, prompt: torch.Tensor, room: int, decoding: SamplingParams, seed: int) -> None:
        """Starts a sequence; the arguments are those of `Brancher.begin`."""
        self.brancher.begin(prompt.to(self.brancher.device), room, decoding, seed)
        self._before_exit: Span = 0.0
        self._behind_exit: Span = 0.0

    def launch(self, k: int, depth: int, states: torch.Tensor) -> None:
        """Drafts for every likely decision, as `Brancher.expand`; does not wait for it."""
        clock, start = self.clock, self.clock.mark()
        self.brancher.foresee()
        foreseen = clock.mark()
        self.brancher.expand(k, depth, states.to(self.brancher.device))
        self._before_exit, self._behind_exit = elapsed(start, foreseen), elapsed(foreseen, clock.mark())

    def settle(self, accepted: int, following: int, limit: int) -> None:
        """The decision, as in `Brancher.settle`; does not wait for the draft after it."""
        self._decision = accepted, following, limit

    def collect(self) -> tuple[SettledDraft, dict[str, Any]]:
        """The draft after the last decision, and its statistics, see `overlap_of`."""
        start = self.clock.mark()
        settled = self.brancher.settle(*self._decision)
        exposed = elapsed(start, self.clock.mark())
        overlap = overlap_of(settled.hit, self._before_exit, self._behind_exit, exposed, 0.0, 0.0)
        self._before_exit = self._behind_exit = 0.0
        return settled, overlap

    def end(self) -> float:
        """Ends the sequence and abandons its work. Returns what `Brancher.end` does."""
        return self.brancher.end()

    def close(self) -> None:
        """Ends the draft's side."""


class Remote:
    """The same with overlap: requests go over a channel to `serve`, in a thread or process.

    Args:
        channel: to the draft's side.
        handle: the thread or process.
        timeout: seconds to wait for an answer.
    """

    def __init__(
        self, channel: ThreadChannel | ProcessChannel, handle: threading.Thread | BaseProcess, timeout: float
    ):
        self.channel, self.handle, self.timeout = channel, handle, timeout
        self._active = False
        self._answer(Response.READY, max(timeout, STARTING))

    def begin(self, prompt: torch.Tensor, room: int, decoding: SamplingParams, seed: int) -> None:
        """Starts a sequence, and waits until its prompt is prefilled; on CUDA the target's stream waits."""
        self._active = True
        self.channel.put_prompt(prompt)
        self.channel.requests.put(
            Command.BEGIN,
            prompt.shape[0],
            room,
            seed,
            decoding.top_k,
            reals=(decoding.temperature, decoding.top_p),
        )
        self._answer(Response.READY, self.timeout)  # a prefill is a prefill, on both sides
        self.channel.wait_prefilled()

    def launch(self, k: int, depth: int, states: torch.Tensor) -> None:
        """Asks for drafts after every likely decision."""
        self.channel.put_states(states)
        self.channel.requests.put(Command.LAUNCH, k, depth)

    def settle(self, accepted: int, following: int, limit: int) -> None:
        """Hands the decision over."""
        self.channel.requests.put(Command.SETTLE, accepted, following, limit)

    def collect(self) -> tuple[SettledDraft, dict[str, Any]]:
        """Waits for the draft after the last decision; as `Inline.collect`."""
        start = time.perf_counter()
        message = self._answer(Response.DRAFT, self.timeout)
        n, hit, *_ = message.numbers
        before_exit, behind_exit, exposed = self.channel.spans()
        idle, ipc, read = message.reals
        ipc += time.perf_counter() - max(start, message.sent)
        settled = SettledDraft(*self.channel.draft(n), None if hit < 0 else bool(hit), read)
        return settled, overlap_of(settled.hit, before_exit, behind_exit, exposed, idle, ipc)

    def end(self) -> float:
        """Ends the sequence, and waits until the draft's side has given it up; as `Inline.end`."""
        if not self._active:
            return 0.0
        self._active = False
        self.channel.requests.put(Command.END)
        return self._answer(Response.ENDED, self.timeout).reals[0]

    def close(self) -> None:
        """Ends the draft's side, by force if it does not answer."""
        self._active = False
        if self.handle.is_alive():
            self.channel.requests.put(Command.CLOSE)
            self.handle.join(self.timeout)
        self._kill()

    def _answer(self, kind: Response, timeout: float) -> Message:
        """Returns the next reply of type `kind`; discards earlier ones of others.

        Raises:
            JobError: the draft's side failed, is gone, or has not answered for `timeout` seconds in which it captured
                nothing.
        """
        try:
            while (message := self._reply(timeout)).kind != kind:
                if message.kind == Response.FAILED:
                    raise JobError(f"the draft worker failed: {self.channel.reason()}")
            return message
        except BaseException as error:  # the worker must not be used again
            self._active = False
            self._kill()
            if isinstance(error, EOFError):
                raise JobError(f"the draft worker is gone{self._how()}") from None
            if isinstance(error, TimeoutError):
                raise JobError(
                    f"the draft worker has not answered for {timeout:g} seconds (method.worker_timeout)"
                ) from None
            raise

    def _reply(self, timeout: float) -> Message:
        """The next reply; raises EOFError or TimeoutError.

        A thread may take as long as it needs to capture passes: compilation takes minutes per shape.
        """
        while True:
            before = GraphRunner.captures_of_all
            try:
                return self.channel.replies.take(self.handle.is_alive, timeout)
            except TimeoutError:
                if GraphRunner.captures_of_all == before and not CAPTURING.locked():
                    raise

    def _how(self) -> str:
        code = getattr(self.handle, "exitcode", None)
        if code is None:
            return ""
        if code >= 0:
            return f" (exit code {code})"
        return f" (killed by {signal.Signals(-code).name}; out of memory?)"

    def _kill(self) -> None:
        if hasattr(self.handle, "kill") and self.handle.is_alive():
            self.handle.kill()
            self.handle.join()


class Thread(Remote):
    """The draft's side in a thread; on CUDA with its own stream.

    There it waits for that stream once a round, to read the likely decisions; with speculative streaming once a pass.
    The target's side waits for it only when it needs the draft.
    """

    def __init__(self, brancher: Brancher, timeout: float):
        channel = ThreadChannel(brancher.device)
        on_cuda = brancher.device.type == "cuda"

        def work() -> None:
            # High priority: a pass of the target fills the GPU, and a draft after it would hide nothing.
            stream = torch.cuda.Stream(brancher.device, priority=-1) if on_cuda else None
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                serve(channel, brancher, threading.main_thread().is_alive)

        handle = threading.Thread(target=work, name="draft", daemon=True)
        handle.start()
        super().__init__(channel, handle, timeout)


class Process(Remote):
    """The draft's side in a process; while an answer is decoded, each side has its own cores.

    Args:
        shape: arguments of `ProcessChannel`.
        make: called there with `arguments`, returns the `Brancher`.
        arguments: of `make`.
        cores: number of this process's cores that the draft's side gets; if that leaves none, both sides share all.
        timeout: seconds to wait for an answer.
    """

    def __init__(self, shape: dict, make: Callable, arguments: tuple, cores: int, timeout: float):
        self._all_cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
        self._target_cores, draft_cores = self._all_cores[:-cores], self._all_cores[-cores:]
        channel = ProcessChannel(**shape, spins=bool(self._target_cores) or sys.platform != "linux")
        if not self._target_cores:
            self._target_cores = draft_cores = self._all_cores
        self._threads: int | None = None  # while an answer is decoded: those that torch had before
        context = multiprocessing.get_context("spawn")
        handle = context.Process(
            target=_work,
            args=(channel, make, arguments, draft_cores, cores, os.getpid()),
            name="draft",
            daemon=True,
        )
        handle.start()
        super().__init__(channel, handle, timeout)

    def begin(self, prompt: torch.Tensor, room: int, decoding: SamplingParams, seed: int) -> None:
        """Starts a sequence, with cores for each side."""
        if self._target_cores:
            _pin(self._target_cores)
            if self._threads is None:
                self._threads = torch.get_num_threads()
            torch.set_num_threads(min(self._threads, len(self._target_cores)))
        super().begin(prompt, room, decoding, seed)

    def end(self) -> float:
        """Ends the sequence; this side has all cores again."""
        try:
            return super().end()
        finally:
            if self._threads is not None:
                _pin(self._all_cores)
                torch.set_num_threads(self._threads)
                self._threads = None


def _pin(cores: list[int]) -> None:
    """Lets all threads of this process run on these cores alone."""
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:  # it has just ended
            continue


def _work(
    channel: ProcessChannel, make: Callable, arguments: tuple, cores: list[int], threads: int, parent: int
) -> None:
    """The main function of the draft's process, which ends with its parent, however that ends."""
    end_with_parent()
    if cores:
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)
    try:
        brancher = make(*arguments)
    except Exception as error:  # noqa: BLE001 - sent to the other side, which ends the run
        _give_up(channel, error)
        return
    serve(channel, brancher, lambda: os.getppid() == parent)


def serve(channel: ThreadChannel | ProcessChannel, brancher: Brancher, alive: Callable[[], bool]) -> None:
    """The draft's side: answers requests until it is asked to close, or the other side is gone."""
    now, clock = time.perf_counter, Clock(brancher.device)
    requests = channel.requests
    idle = ipc = 0.0
    before_exit: Span = 0.0
    behind_exit: Span = 0.0
    active = False
    channel.replies.put(Response.READY)
    while True:
        waited = now()
        try:
            message = requests.take(alive, awake=active)
        except EOFError:
            return
        got = now()
        idle += got - waited
        ipc += got - max(message.sent, waited)
        try:
            match message.kind:
                case Command.BEGIN:
                    n, room, seed, top_k = message.numbers
                    temperature, top_p, _ = message.reals
                    decoding = SamplingParams(1, temperature, top_k=top_k, top_p=top_p)
                    active = True
                    idle = ipc = before_exit = behind_exit = 0.0
                    brancher.begin(channel.prompt(n), room, decoding, seed)
                    channel.put_prefilled()
                    channel.replies.put(Response.READY)
                case Command.LAUNCH:
                    k, depth, *_ = message.numbers
                    states = channel.states(k + 1)  # a GPU waits here: this is no drafting time
                    begun = clock.mark()
                    brancher.expand(k, depth, states, requests.waiting)
                    behind_exit = elapsed(begun, clock.mark())
                case Command.SETTLE:
                    accepted, following, limit, _ = message.numbers
                    begun = clock.mark()
                    settled = brancher.settle(accepted, following, limit, requests.waiting)
                    channel.put_draft(settled.tokens, settled.probs)
                    hit = -1 if settled.hit is None else int(settled.hit)
                    channel.put_spans((before_exit, behind_exit, elapsed(begun, clock.mark())))
                    reals = (idle, ipc, settled.bytes_read)
                    channel.replies.put(Response.DRAFT, settled.tokens.shape[0], hit, reals=reals)
                    idle = ipc = before_exit = behind_exit = 0.0
                    if not requests.waiting():
                        begun = clock.mark()
                        brancher.foresee()
                        before_exit = elapsed(begun, clock.mark())
                case Command.END:
                    active = False
                    clock.synchronize()  # what is queued for the sequence; marks of it are read now
                    channel.replies.put(Response.ENDED, reals=(brancher.end(),))
                case _:
                    return
        except Exception as error:  # noqa: BLE001 - sent to the other side, which ends the run
            _give_up(channel, error)
            return


def _give_up(channel: ThreadChannel | ProcessChannel, error: Exception) -> None:
    channel.put_reason(one_line(error))
    channel.replies.put(Response.FAILED)
