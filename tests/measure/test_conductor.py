"""Servers of another engine are idle when an arm starts: one of vLLM spins for a second after an answer."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import torch

from specbench.config.spec import QUESTION
from specbench.decoding.trace import Generation
from specbench.measure.conductor import Conductor
from specbench.measure.machine import watch as module
from specbench.measure.machine.watch import Watch
from tests.support.commands import wait_for

SPIN = "import time; begun = time.monotonic()\nwhile time.monotonic() - begun < {}: pass\ntime.sleep(60)"


@pytest.fixture
def spinning():
    """Starts a process that computes for so many seconds, and returns it when it does."""
    started = []

    def start(seconds: float) -> psutil.Process:
        started.append(subprocess.Popen([sys.executable, "-c", SPIN.format(seconds)]))
        process = psutil.Process(started[-1].pid)
        wait_for(lambda: process.cpu_times().user > 0.1)
        return process

    yield start
    for one in started:
        one.kill()
        one.wait()


@pytest.mark.process
def test_processes_that_spin_are_waited_for(spinning, monkeypatch):
    children = [spinning(0.7), spinning(0.7)]
    watch = Watch()
    watch.find_children()
    assert watch.idle_children()
    before = [child.cpu_times().user for child in children]
    time.sleep(0.2)
    assert all(child.cpu_times().user - used < 0.05 for child, used in zip(children, before))
    assert min(before) > 0.3
    monkeypatch.setattr(module, "SETTLING", 0.2)
    spinning(60)
    watch.find_children()
    assert not watch.idle_children()


def conductor(served) -> Conductor:
    """Of two arms that answer a token."""

    def arm(_requests):
        yield 1
        return [Generation([5], 0.1, 0.1, "length")]

    setup = SimpleNamespace(
        drafter=SimpleNamespace(snapshot=lambda: None, restore=lambda learnt: None),
        pair=SimpleNamespace(device=torch.device("cpu")),
        spec=SimpleNamespace(unit=QUESTION),
        served=served,
        arms={"baseline": arm, "method": arm},
        set_reference_answers=lambda requests: None,
    )
    return Conductor(setup, None, 0)


@pytest.mark.parametrize("is_idle", [True, False])
def test_every_arm_of_another_engine_starts_when_its_servers_are_idle(monkeypatch, is_idle):
    """Before anything of it is counted; and a server that never is becomes a fault."""
    seen: list[str] = []
    noted: list[str] = []
    monkeypatch.setattr(Watch, "find_children", lambda watch: seen.append(f"ports {sorted(watch.ports)}"))
    monkeypatch.setattr(Watch, "idle_children", lambda _: seen.append("waits") or is_idle)
    read = Watch.read
    monkeypatch.setattr(Watch, "read", lambda self: seen.append("reads") or read(self))
    served = SimpleNamespace(ports={8123}, note=noted.append)
    conductor(served).measure({"baseline": [], "method": []})
    assert seen == ["ports [8123]", *["ports [8123]", "waits", "reads", "reads"] * 2]
    assert len(noted) == (0 if is_idle else 2) and all(
        "more than 5 s after an answer" in one for one in noted
    )
    seen.clear()
    conductor(None).measure({"baseline": [], "method": []})
    assert "waits" not in seen
