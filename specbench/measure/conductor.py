"""Lets the arms of a run answer in turns on a watched machine, and once more if others disturbed them.

The arms take turns on the same prompt slice by slice, or answer by answer if one of them must not be interrupted: a
slowdown of the machine affects all of them alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specbench.config.spec import METHOD, POOL, QUESTION
from specbench.decoding.cpu.compiled_layers import CompiledLayer
from specbench.decoding.model.graphs import GraphRunner
from specbench.decoding.trace import Clock
from specbench.measure.interleave import Interleaver
from specbench.measure.machine import hardware
from specbench.measure.machine.watch import LOST, SETTLING, Watch, added, between
from specbench.measure.remeasure import CAPTURED, Attempt, Slice, least_disturbed

if TYPE_CHECKING:
    from specbench.decoding.state import Request
    from specbench.decoding.trace import Generation
    from specbench.measure.arms import Setup

# Stop measuring again once more than this share of all time was disturbed, checked after so many seconds.
HOPELESS, HOPELESS_AFTER = 0.5, 3.0
TOLERATED = 0.05  # of a turn's time may be disturbed without measuring it again


@dataclass(frozen=True, slots=True)
class Measurement:
    """One turn of some questions.

    Attributes:
        answers: of each arm, with the times of the attempts that were disturbed least.
        attempts: all of them.
        machine: the machine's readings for the journal.
    """

    answers: dict[str, list[Generation]]
    attempts: list[Attempt]
    machine: dict[str, Any]


def preparations() -> int:
    """Number of passes so far that captured a graph or compiled a layer, as only the first of each shape do."""
    return GraphRunner.captures_of_all + CompiledLayer.firsts_of_all


class Conductor:
    """Measures the arms of a run.

    Args:
        setup: with the arms.
        slice_seconds: after which an arm hands over to another one; None: arms alternate by whole answers.
        remeasure: most repeated attempts at a turn that others disturbed.

    Attributes:
        watch: of the machine.
        peak_memory: bytes, while a batch method ran; None if it was not measured.
    """

    def __init__(self, setup: Setup, slice_seconds: float | None, remeasure: int):
        self.setup, self.slice_seconds, self.remeasure = setup, slice_seconds, remeasure
        self.watch = Watch()
        if setup.served is not None:
            self.watch.ports = setup.served.ports
        self.peak_memory: int | None = None
        self._seconds = self._disturbed_seconds = 0.0  # of all first attempts

    def measure(self, requests: dict[str, list[Request]]) -> Measurement:
        """Runs every arm on its requests.

        Args:
            requests: by arm, in the order of the arms' first slices.
        """
        drafter, device = self.setup.drafter, self.setup.pair.device
        self.setup.set_reference_answers(requests[METHOD])
        self.watch.find_children()
        heat = self.watch.heat()
        learnt = drafter.snapshot()
        attempts = [self._attempt(requests)]
        counted = attempts[0].counted()
        self._seconds += counted["seconds"]
        self._disturbed_seconds += counted["disturbed"]
        answers, disturbed, captured = least_disturbed(attempts)
        still_disturbed = disturbed
        while self._is_worth_another(len(attempts), still_disturbed, captured):
            drafter.restore(learnt)  # or it would copy the answer that it has just given
            attempts.append(self._attempt(requests))
            answers, still_disturbed, captured = least_disturbed(attempts)
        heat = between(heat, self.watch.heat())
        counters = added([attempt.counted() for attempt in attempts])  # over all attempts and arms
        watched = any(name in counters for name in (*LOST, "others"))
        machine = {
            "attempts": len(attempts),
            "disturbed_share": disturbed if watched else None,
            "still_disturbed_share": still_disturbed if watched else None,
            "captured_share": captured,
            "counters": counters | heat,
            "clock_mhz": self.watch.clock_mhz(),
            "gpus": hardware.gpus(hardware.GPU_STATE, device) if device.type == "cuda" else [],
        }
        return Measurement(answers, attempts, machine)

    def settle(self) -> None:
        """Waits until another engine's servers are idle.

        A worker of vLLM spins for a second after an answer, on the cores of the next arm. That is no disturbance by
        others, and the arms do not follow one another equally often, so it would favour one of them.
        """
        served = self.setup.served
        if served is None:
            return
        self.watch.find_children()
        if not self.watch.idle_children():
            served.note(
                f"its servers compute for more than {SETTLING:.0f} s after an answer, which slows the next arm"
            )

    def _attempt(self, requests: dict[str, list[Request]]) -> Attempt:
        device, order = self.setup.pair.device, list(requests)
        slices: dict[str, list[Slice]] = {name: [] for name in order}

        @contextmanager
        def watched(number: int) -> Iterator[None]:
            name = order[number]
            in_process = self.setup.served is None  # a server's memory is not this process's
            counts_memory = name == METHOD and self.setup.spec.unit == POOL and in_process
            if counts_memory:
                hardware.reset_peak_memory(device)
            self.settle()
            before, prepared = self.watch.read(), preparations()
            yield
            counted = between(before, self.watch.read())
            # They are no part of an answer: the next attempt has them.
            degree = CAPTURED if preparations() > prepared else self.watch.disturbance(counted)
            slices[name].append(Slice(turns.tokens[number], counted, degree))
            if counts_memory:
                peak = hardware.peak_memory(device)
                self.peak_memory = peak and max(peak, self.peak_memory or 0)

        turns = Interleaver(Clock(device), self.slice_seconds or math.inf, watched)
        answers = turns.run([self.setup.arms[name](of_arm) for name, of_arm in requests.items()])
        return Attempt(dict(zip(order, answers)), slices)

    def _is_worth_another(self, attempts: int, disturbed: float, captured: float) -> bool:
        """Whether to measure a turn again, given the shares of it that are disturbed and in which passes were captured.

        The rounds of a batch belong to all its sequences, so an attempt at it is kept whole: another one may be
        disturbed elsewhere, but it replays what the first one captured.
        """
        busy = self._disturbed_seconds > HOPELESS * self._seconds and self._seconds > HOPELESS_AFTER
        lost = captured + (disturbed if self.setup.spec.unit == QUESTION and not busy else 0.0)
        return attempts <= self.remeasure and lost > TOLERATED
