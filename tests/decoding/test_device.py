"""What is done for a GPU, as far as a CPU can tell: what is called, and on which device."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specbench.decoding import trace
from specbench.decoding.device import move_slots, on_device
from specbench.decoding.trace import Clock
from specbench.measure.bench import Bench, attempt
from specbench.measure.machine import bandwidth
from specbench.system.errors import JobError

CPU, SECOND_GPU = torch.device("cpu"), torch.device("cuda:1")


class Event:
    """Of CUDA, on a stream with a time of its own."""

    def __init__(self, enable_timing: bool = False):
        assert enable_timing
        self.at: float | None = None

    def record(self, stream) -> None:
        self.at = stream.time

    def elapsed_time(self, other) -> float:
        return other.at - self.at


@pytest.fixture
def streams(monkeypatch) -> dict[int, SimpleNamespace]:
    """The current stream of each of two GPUs, of which the first one is the current device."""
    both = {index: SimpleNamespace(time=0.0) for index in (0, 1)}
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: both[device.index if device else 0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    return both


def test_marks_are_of_the_targets_device(streams):
    clock = Clock(SECOND_GPU)
    begun = clock.mark()
    streams[1].time += 250.0  # ms
    ended = clock.mark()
    assert clock.seconds(begun, ended) == 0.25
    # Marks of another clock, of the draft model's device, are read by the same one.
    assert Clock(CPU).seconds(begun, ended) == 0.25 and clock.seconds(1.0, 1.5) == 0.5


def test_numbers_of_the_host_are_copied_without_a_wait(monkeypatch):
    assert torch.equal(on_device([[1, 2], [3, 4]], CPU), torch.tensor([[1, 2], [3, 4]]))
    assert on_device([], CPU).dtype == torch.int64

    class Pinned:
        def __init__(self, values: torch.Tensor):
            self.values = values

        def to(self, device, non_blocking=False) -> tuple:
            return self.values.tolist(), device, non_blocking

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: Pinned(self))
    for values in ([5], np.array([5])):  # torch pins no array of numpy as it makes a tensor of it
        assert on_device(values, SECOND_GPU) == ([5], SECOND_GPU, True)


def test_slots_are_moved_all_at_once():
    buffer = torch.arange(4).unsqueeze(1)
    move_slots(buffer, [0, 3], [3, 0])
    assert buffer.flatten().tolist() == [3, 1, 2, 0]


@pytest.mark.parametrize("broken", [False, True])
def test_a_device_that_has_failed_ends_the_run(monkeypatch, broken):
    """After a sticky error every call fails: one line, not one for each question."""
    bench = Bench(SimpleNamespace(pair=SimpleNamespace(device=SECOND_GPU)), None, None, None)

    def fail(*given):
        raise RuntimeError("CUDA error: device-side assert triggered")

    def synchronize(device) -> None:
        assert device == SECOND_GPU
        if broken:
            raise RuntimeError("CUDA error: device-side assert triggered\nCompile with ...")

    monkeypatch.setattr(Bench, "measure", fail)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    question = SimpleNamespace(question_id=1, task="qa", category="qa")
    if not broken:
        assert attempt(bench, [question], 0)[0]["error"].endswith("assert triggered")
        return
    with pytest.raises(
        JobError, match=r"cuda:1 has failed .*: RuntimeError: CUDA error: device-side assert triggered$"
    ):
        attempt(bench, [question], 0)


def test_the_bandwidth_of_a_gpu_is_measured_without_the_start_of_the_first_sum(monkeypatch):
    """A device that works while the host goes on: a kernel starts when it was launched, and the one before is done."""
    host, device = 0.0, 0.0
    launch, start, rate = 5e-6, 12e-6, 4e12

    class Buffer:
        def sum(self) -> None:
            nonlocal host, device
            idle = device <= host
            host += launch
            device = max(device, host + start * idle) + 2**30 / rate

    class Marks(Clock):
        def mark(self) -> float:
            nonlocal host
            host += launch
            return max(host, device)

        def synchronize(self) -> None:
            nonlocal host, device
            host = device = max(host, device) + 1e-5

    monkeypatch.setattr(torch, "ones", lambda *given, **options: Buffer())
    monkeypatch.setattr(trace, "Clock", Marks)
    assert bandwidth.bandwidth(SECOND_GPU) == pytest.approx(rate, rel=0.01)
