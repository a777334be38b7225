"""Before the first question: the number of threads is chosen, and every arm warms up."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from specbench.config.spec import BASELINE, HF, METHOD, SINGLE
from specbench.decoding.model.fixed_shape import KV_BUCKET, rounded_up
from specbench.decoding.model.graphs import GraphRunner
from specbench.decoding.state import Request
from specbench.measure.arms import FastestOf
from specbench.measure.draft_length import Constant, VariableLength
from specbench.system import threads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specbench.data.question_files import Question
    from specbench.measure.arms import Setup
    from specbench.measure.protocol import Protocol

TOKENS = 16  # of each arm on a warm-up question, to warm up and to choose the number of threads by


def warm_up(setup: Setup, protocol: Protocol, questions: Sequence[Question] = ()) -> None:
    """Runs every arm on the warm-up questions with the shortest and the longest prompt.

    Where passes are captured, also those of generate, it also runs prompts as long as those of the run's `questions`;
    elsewhere buffers of that length are made.
    """
    # Whole answers where passes are captured: each number of entries that they attend to has a graph of its own.
    captured = isinstance(setup.target.runner, GraphRunner) or setup.drafter.captures_passes()
    lengths_count = captured or isinstance(setup.arms.get(HF), FastestOf)
    ends = end_requests(protocol, protocol.decoding.max_new_tokens if lengths_count else TOKENS)
    if lengths_count:
        long = long_requests(ends[-1], protocol.longest_prompt(questions))
        caps = [protocol.capped(one.prompt, one.decoding.max_new_tokens) for one in long]
        ends = [*(replace(one, decoding=decoding) for one, decoding in zip(long, caps)), *ends]
    else:
        prompt = [0] * protocol.longest_prompt(questions)
        longest = Request(prompt, protocol.capped(prompt))
        for engine in setup.engines:
            engine.reserve([longest] * setup.slots)
    setup.set_reference_answers(ends)
    batch = filled(ends, setup.spec.batch_size)
    for name in setup.arms:
        setup.answers(name, ends if name == SINGLE else batch)
    if captured and setup.spec.batch_size > 1:  # and so has each number of sequences
        size = setup.spec.batch_size
        for name, most in ((BASELINE, 1), (METHOD, 1 + setup.drafter.max_draft_tokens)):
            setup.answers(name, ending_one_by_one(batch[-size:], most))
    if setup.slots > len(batch):  # what holds all sequences that wait has its size now
        setup.answers(METHOD, filled(ends, setup.slots))
    drafter = setup.drafter
    if captured and isinstance(drafter, VariableLength):  # and so has each draft length
        rule = drafter.rule
        for length in range(1, drafter.max_draft_tokens + 1):
            drafter.rule = Constant(length)
            setup.answers(METHOD, batch)
        drafter.rule = rule


def end_requests(protocol: Protocol, tokens: int) -> list[Request]:
    """The warm-up questions with the shortest and the longest prompt, for answers of so many tokens."""
    requests = sorted(protocol.warm_up_requests(tokens), key=lambda request: len(request.prompt))
    return [requests[0], requests[-1]]


def long_requests(request: Request, longest: int) -> list[Request]:
    """Prompts, made of that of `request`: of `longest` tokens first, then across each step of the KV length below.

    A cache that grows later, or a graph of another KV length, would cost an answer time that is not the method's.
    """
    n = len(request.prompt)
    if longest <= n:
        return []
    copies, short = request.prompt * (1 + longest // n), replace(request.decoding, max_new_tokens=TOKENS)
    steps = range(rounded_up(longest, KV_BUCKET) - KV_BUCKET - TOKENS // 2, n, -KV_BUCKET)
    return [
        replace(request, prompt=copies[:longest]),
        *(replace(request, prompt=copies[:length], decoding=short) for length in steps),
    ]


def choose_threads(setup: Setup, protocol: Protocol, requested_threads: int | None) -> threads.Threads:
    """Sets torch's threads for all arms: as asked, or as many as baseline and method together are fastest with.

    It is measured on the first warm-up question (batches: on as many as fill one). Servers of another engine have the
    threads that they were started with: nothing is measured then.
    """
    size = setup.spec.batch_size
    requests = filled(protocol.warm_up_requests(TOKENS), size)[:size]
    setup.set_reference_answers(requests)

    def work() -> None:
        for name in (BASELINE, METHOD):
            setup.answers(name, requests)

    matters = setup.pair.device.type == "cpu" and setup.served is None
    return threads.use_threads(requested_threads, work if matters else None)


def filled(requests: list[Request], size: int) -> list[Request]:
    """The same requests again until they fill a batch of some size."""
    return requests * -(-size // len(requests))


def ending_one_by_one(requests: list[Request], most: int) -> list[Request]:
    """The same requests with caps that rise by what a round emits at `most`: the batch becomes smaller one by one."""
    step = max(1, min(most, min(one.decoding.max_new_tokens for one in requests) // len(requests)))
    decodings = [
        replace(one.decoding, max_new_tokens=min(one.decoding.max_new_tokens, step * n))
        for n, one in enumerate(requests, start=1)
    ]
    return [replace(one, decoding=decoding) for one, decoding in zip(requests, decodings)]
