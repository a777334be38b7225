"""Before the first question: the number of threads is chosen, and every arm warms up."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from specbench.config.spec import BASELINE, HF, METHOD, SINGLE
from specbench.decoding.model.fixed_shape import KV_BUCKET, rounded_up
from specbench.decoding.model.graphs import GraphRunner
from specbench.decoding.state import Request
from specbench.measure.arms import FastestOf
from specbench.measure.draft_length import Constant, VariableLength
from specbench.system import threads

if TYPE_CHECKING:
    from specbench.data.question_files import Question
    from specbench.measure.arms import Setup
    from specbench.measure.protocol import Protocol

TOKENS = 16  # per arm and warm-up question, for warm-up and for choosing the number of threads


def warm_up(setup: Setup, protocol: Protocol, questions: Sequence[Question] = ()) -> None:
    """Runs every arm on the warm-up questions with the shortest and the longest prompt.

    If passes are captured (also those of generate), it also runs prompts as long as those of the run's `questions`;
    otherwise it reserves buffers of that length.
    """
    # Whole answers if passes are captured: each number of entries that they attend to has its own graph.
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
    size, last = setup.spec.batch_size, ends[-1]
    if size > 1 and len(ends[0].prompt) == len(last.prompt):  # layers are compiled for unequal lengths, too
        ends[-1] = replace(last, prompt=[*last.prompt, last.prompt[-1]])
    setup.set_reference_answers(ends)
    batch = filled(ends, size)
    for name in setup.arms:
        setup.answers(name, ends if name == SINGLE else batch)
    if size > 1:  # each number of sequences has a graph, and a single one has compiled layers of its own
        for name, most in ((BASELINE, 1), (METHOD, 1 + setup.drafter.max_draft_tokens)):
            setup.answers(name, ending_one_by_one(batch[-size:], most))
    if setup.slots > len(batch):  # allocates the buffers of all waiting sequences
        setup.answers(METHOD, filled(ends, setup.slots))
    drafter = setup.drafter
    if captured and isinstance(drafter, VariableLength):  # each draft length has a graph
        rule = drafter.rule
        for length in range(1, drafter.max_draft_tokens + 1):
            drafter.rule = Constant(length)
            setup.answers(METHOD, batch)
        drafter.rule = rule


def end_requests(protocol: Protocol, tokens: int) -> list[Request]:
    """The warm-up questions with the shortest and the longest prompt, for answers of `tokens` tokens."""
    requests = sorted(protocol.warm_up_requests(tokens), key=lambda request: len(request.prompt))
    return [requests[0], requests[-1]]


def long_requests(request: Request, longest: int) -> list[Request]:
    """Repeats the prompt of `request` to `longest` tokens, then to just below each smaller step of the KV length.

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


def choose_threads(
    setup: Setup, protocol: Protocol, requested_threads: int | None, measured: Mapping[int, float]
) -> tuple[threads.Threads, dict[int, float]]:
    """Sets torch's threads for all arms: as requested, or the number with which baseline and method are fastest.

    It is measured on the first warm-up question (batches: on as many as fill one). Servers of another engine keep the
    threads that they were started with: nothing is measured then.

    Args:
        setup: with the arms.
        protocol: with the warm-up questions.
        requested_threads: set by hand, or chosen by an earlier process of the run; None: to be chosen.
        measured: the second result of that process; {} in the first one.

    Returns:
        The choice; and the least seconds of the baseline by number of threads, as far as measured. If the method
        drafts on extra cores, the baseline is also measured on as many.
    """
    size, matters = setup.spec.batch_size, setup.pair.device.type == "cpu" and setup.served is None
    requests = filled(protocol.warm_up_requests(TOKENS), size)[:size]
    setup.set_reference_answers(requests)
    seconds = dict(measured)

    def baseline() -> None:
        begun, n = time.perf_counter(), torch.get_num_threads()
        setup.answers(BASELINE, requests)
        seconds[n] = min(seconds.get(n, math.inf), time.perf_counter() - begun)

    def work() -> None:
        baseline()
        setup.answers(METHOD, requests)

    chosen = threads.use_threads(requested_threads, work if matters else None)
    all_cores = min(chosen.threads + setup.drafter.extra_cores, threads.present_cores())
    if matters and all_cores > chosen.threads and all_cores not in seconds:
        for n in (all_cores, chosen.threads) * 2:  # last the chosen number: it remains set
            torch.set_num_threads(n)
            baseline()
    return chosen, seconds


def filled(requests: list[Request], size: int) -> list[Request]:
    """The requests, repeated until they fill a batch of `size`."""
    return requests * -(-size // len(requests))


def ending_one_by_one(requests: list[Request], most: int) -> list[Request]:
    """The same requests with caps that rise by `most`, the tokens of a round: the batch shrinks one by one."""
    step = max(1, min(most, min(one.decoding.max_new_tokens for one in requests) // len(requests)))
    decodings = [
        replace(one.decoding, max_new_tokens=min(one.decoding.max_new_tokens, step * n))
        for n, one in enumerate(requests, start=1)
    ]
    return [replace(one, decoding=decoding) for one, decoding in zip(requests, decodings)]
