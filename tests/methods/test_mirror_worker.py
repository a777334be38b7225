"""Mirror-SD's draft worker, in a thread or a process: it gives the same, and one that fails takes nothing with it."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pytest
import torch

from methods.mirror_sd import channel as channels
from methods.mirror_sd import worker
from methods.mirror_sd.brancher import Brancher
from methods.mirror_sd.channel import MessageQueue, ProcessChannel, ThreadChannel, elapsed
from methods.sps import SpeculativeSampling
from specbench.decoding.engine import Engine
from specbench.decoding.model.graphs import CAPTURING
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.trace import Clock
from specbench.system.errors import JobError
from tests.support.decoding import PROMPT, random_pair
from tests.support.graphs import PretendedRunner, pretend
from tests.support.methods import drafts
from tests.support.mirror import mirror, plain_drafts, steps, tokens_of


class Late:
    """A mark that tells its time only at the end, as an event of a GPU does."""

    def __init__(self):
        self.at = time.perf_counter()

    def elapsed_time(self, other: Late) -> float:
        return 1e3 * 100 * (other.at - self.at)  # ms of a device that takes a hundred times as long


class LateClock(Clock):
    """Of a draft model's device whose times are not those of the host."""

    def mark(self) -> Late:
        return Late()

    def span(self, start: Late, end: Late) -> tuple[Late, Late]:
        return start, end


def test_it_declares_the_cores_that_it_computes_on(monkeypatch):
    """A worker process has `draft_cores` of its own; drafting inline takes none beside torch's threads."""
    monkeypatch.setattr(
        "methods.mirror_sd.drafter.Process", lambda *made: SimpleNamespace(close=lambda: None)
    )
    pair = random_pair("llama")
    assert mirror(pair, "process", draft_cores=2, kappa=2).extra_cores == 2
    assert mirror(pair, "inline", kappa=2).extra_cores == 0 == SpeculativeSampling(pair, 4).extra_cores


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["inline", "thread"])
def test_times_of_drafting_are_the_draft_models_devices(monkeypatch, placement):
    monkeypatch.setattr(worker, "Clock", LateClock)
    drafter = mirror(random_pair("llama"), placement, kappa=2)
    found = [step.stats for step in steps(random_pair("llama"), drafter) if step.drafted][1:]
    assert all(isinstance(stats["overlapped_behind_exit_seconds"], float) for stats in found)
    beside, host = (
        sum(stats[name] for stats in found) for name in ("overlapped_behind_exit_seconds", "ipc_seconds")
    )
    assert beside > 10 * max(host, 0.001), "seconds of the device, not of the host"
    drafter.close()


def test_the_drafts_stream_has_a_high_priority(monkeypatch):
    """Else its kernels queue after those of the target, which fill the GPU."""
    made, entered = [], []
    device = SimpleNamespace(type="cuda")

    @contextmanager
    def entering(stream):
        entered.append((stream, threading.current_thread().name))
        yield

    monkeypatch.setattr(
        torch.cuda, "Stream", lambda device, priority=0: made.append((device, priority)) or "own"
    )
    monkeypatch.setattr(torch.cuda, "stream", entering)
    monkeypatch.setattr(
        worker, "serve", lambda channel, brancher, alive: channel.replies.put(worker.Response.READY)
    )
    worker.Thread(SimpleNamespace(device=device), 5.0)
    assert made == [(device, -1)] and entered == [("own", "draft")]


@pytest.mark.parametrize(("target", "waits"), [("cuda", "stream"), ("cpu", "host")])
def test_the_target_waits_for_the_drafts_prefill(monkeypatch, target, waits):
    """On CUDA it is only queued when the draft's thread answers: the rest of it would fall into the first round."""
    log: list[tuple[str, str]] = []
    begun: list[tuple] = []

    def note(what: str) -> None:
        log.append((threading.current_thread().name, what))

    event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: note("host"))
    stream = SimpleNamespace(
        record_event=lambda: note("event") or event,
        wait_event=lambda of: note("stream") if of is event and log else None,  # before: for the prompt
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(worker, "Clock", lambda device: None)
    device = SimpleNamespace(type="cuda")
    prompt = SimpleNamespace(
        device=device if target == "cuda" else SimpleNamespace(type="cpu"),
        shape=(3,),
        record_stream=lambda stream: None,
        to=lambda device: prompt,
    )
    brancher = SimpleNamespace(device=device, begin=lambda *given: begun.append(given) or note("prefill"))
    channel = ThreadChannel(device)
    handle = threading.Thread(target=worker.serve, args=(channel, brancher, lambda: True), name="draft")
    handle.start()
    remote = worker.Remote(channel, handle, 5.0)
    remote.begin(prompt, 9, SamplingParams(1, 0.7, top_k=5, top_p=0.8), 3)
    remote.close()
    assert [given[1:] for given in begun] == [(9, SamplingParams(1, 0.7, top_k=5, top_p=0.8), 3)]
    assert log == [("draft", "prefill"), ("draft", "event"), ("MainThread", waits)]


class Slow(PretendedRunner):
    """Takes longer to capture its first pass than a worker may for an answer, as one that is compiled does."""

    def capture(self, function, inputs):
        with CAPTURING:
            time.sleep(0 if self.captures else 1.5)
        return super().capture(function, inputs)


def test_a_thread_may_capture_for_longer_than_it_may_take_to_answer(monkeypatch):
    pair = random_pair("llama")
    target = StagedModel(pair.target)
    pretend(monkeypatch, make=Slow)
    monkeypatch.setattr(channels, "POLL_SECONDS", 0.02)
    with closing(mirror(pair, "thread", kappa=2, worker_timeout=1.0)) as drafter:
        answer = Engine(target, drafter, frozenset()).answer(PROMPT, SamplingParams(4))
    assert len(answer.tokens) == 4


def test_a_thread_that_hangs_is_found(monkeypatch):
    pair = random_pair("llama")
    monkeypatch.setattr(channels, "POLL_SECONDS", 0.02)
    hangs = threading.Event()
    monkeypatch.setattr(Brancher, "settle", lambda *given: hangs.wait(60))
    drafter = mirror(pair, "thread", kappa=2, worker_timeout=0.1)
    with pytest.raises(JobError, match="not answered for 0.1 seconds"):
        steps(pair, drafter)
    hangs.set()


def test_the_last_message_of_a_sender_that_died_is_taken():
    """It came after the receiver had looked."""
    queue = MessageQueue(threading.Semaphore(0))
    left = iter([7])

    def died() -> bool:
        for number in left:
            queue.put(1, number)
        return False

    assert queue.take(died).numbers[0] == 7
    with pytest.raises(EOFError):
        queue.take(died)


def test_a_process_is_handed_what_was_written():
    channel = ProcessChannel(longest=9, depth=3, width=4, rows=5, dtype=torch.float32)
    tokens, probs, states = torch.tensor([7, 3]), torch.rand(2, 5), torch.rand(3, 4)
    channel.put_draft(tokens, probs)
    channel.put_spans((0.5, 0.0, 2.0))
    channel.put_states(states)
    channel.put_prompt(torch.arange(6))
    assert channel.draft(2)[0].tolist() == [7, 3] and torch.equal(channel.draft(2)[1], probs)
    assert channel.spans() == (0.5, 0.0, 2.0)
    assert torch.equal(channel.states(3), states) and channel.prompt(6).tolist() == list(range(6))
    channel.put_reason("no room " * 100)
    assert channel.reason().startswith("no room no room")
    for number in range(20):  # more messages than the ring holds, taken as they come
        before = time.perf_counter()
        channel.requests.put(2, number, 5, reals=(0.5,))
        message = channel.requests.take(lambda: True)
        assert before < message.sent < time.perf_counter()
        assert (message.kind, message.numbers[:2], message.reals[0]) == (2, (number, 5), 0.5)
        assert not channel.requests.waiting()


# -- beside, for real


@pytest.mark.slow
def test_a_thread_gives_the_same_and_ends():
    pair = random_pair("mistral")
    before = threading.active_count()
    drafter = mirror(pair, "thread", kappa=3)
    assert tokens_of(drafts(drafter, pair, 0.0)) == plain_drafts("mistral")
    drafter.close()
    assert threading.active_count() == before


def test_a_failing_worker_ends_the_job_with_its_reason(monkeypatch):
    pair = random_pair("llama")
    drafter = mirror(pair, "thread")

    def out_of_memory(*args):
        raise MemoryError("no room for 64 branches")

    monkeypatch.setattr(Brancher, "expand", out_of_memory)
    with pytest.raises(JobError, match="MemoryError: no room for 64 branches"):
        steps(pair, drafter)


@pytest.fixture(scope="module")
def beside():
    """A drafter with a process of its own, and the cores this process may use."""
    cores = os.sched_getaffinity(0)
    drafter = mirror(random_pair("llama"), "process", kappa=3)
    yield drafter, cores
    pid = drafter.worker.handle.pid
    drafter.close()
    assert not running(pid)


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.process
def test_a_process_gives_the_same(beside):
    drafter, cores = beside
    pair = random_pair("llama")
    for _ in range(3):
        assert tokens_of(drafts(drafter, pair, 0.0)) == plain_drafts("llama")
        del drafter.draft  # what `drafts` put there
    assert os.sched_getaffinity(0) == cores


@pytest.mark.process
def test_a_process_sleeps_between_answers(beside):
    drafter, _ = beside
    pair = random_pair("llama")
    steps(pair, drafter)

    def used() -> int:
        with open(f"/proc/{drafter.worker.handle.pid}/stat") as stat:
            user, system = stat.read().rsplit(")", 1)[1].split()[11:13]
        return int(user) + int(system)

    before = used()
    time.sleep(1.0)
    assert used() - before <= 5  # hundredths of a second


@pytest.mark.process
def test_no_worker_outlives_its_parent():
    """However the parent ends. It is forked, so that only the worker has everything to import."""

    def hold_a_worker(said) -> None:
        said.send(mirror(random_pair("llama"), "process").worker.handle.pid)
        time.sleep(100)

    hears, says = multiprocessing.Pipe()
    parent = multiprocessing.get_context("fork").Process(target=hold_a_worker, args=(says,))
    parent.start()
    try:
        assert hears.poll(60), "no worker was started"
        pid = hears.recv()
        assert running(pid)
    finally:
        parent.kill()
        parent.join()
    deadline = time.monotonic() + 10
    while running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(pid)


@pytest.mark.one_in(2)
@pytest.mark.process
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_worker_that_dies_or_hangs(how):
    """Killed or stopped at a random moment of an answer: one clear error, never a wrong answer, nobody left behind."""
    pair = random_pair("llama")
    rng = random.Random(os.environ.get("SPECBENCH_KILLS_SEED", how))
    answered = SamplingParams(150)
    cores = os.sched_getaffinity(0)
    expected = Engine(StagedModel(pair.target), SpeculativeSampling(pair, 4), frozenset()).answer(
        PROMPT, answered
    )
    for _ in range(int(os.environ.get("SPECBENCH_KILLS", 1))):
        drafter = mirror(pair, "process", kappa=3, worker_timeout=2.0)
        engine = Engine(StagedModel(pair.target), drafter, frozenset())
        engine.answer(PROMPT, SamplingParams(8))
        pid = drafter.worker.handle.pid
        sent = signal.SIGKILL if how == "kill" else signal.SIGSTOP
        timer = threading.Timer(rng.random() * expected.seconds, os.kill, (pid, sent))
        timer.start()
        said = "SIGKILL" if how == "kill" else "2 seconds"
        with pytest.raises(JobError, match=said):
            while True:  # an answer that was complete before the worker was gone is right
                assert engine.answer(PROMPT, answered).tokens == expected.tokens
        with pytest.raises(JobError):
            engine.answer(PROMPT, answered)
        drafter.close()
        assert not running(pid)
        assert os.sched_getaffinity(0) == cores


def test_the_time_between_marks_of_a_gpu_is_not_read_before_it_has_come_so_far():
    begun, ended = object(), object()  # events
    assert elapsed(begun, ended) == (begun, ended) and elapsed(1.0, 1.5) == 0.5
