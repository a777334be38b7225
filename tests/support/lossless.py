"""Prompts with transformers' own greedy answers, and the check that a drafter leaves these answers as they are."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.model.layer_stack import LayerStack
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.scheduler import Scheduler
from specbench.decoding.state import Request
from tests.support.decoding import STOP, generate_with_transformers, random_pair, random_prompt

# Caps and stop ids: answers that end by either, and some that nothing ends early.
ENDS = (
    (1, (STOP,)),
    (2, (STOP,)),
    (3, (STOP,)),
    (24, (STOP,)),
    (16, (STOP, 3)),
    (20, ()),
    (32, ()),
    (20, ()),
)
LENGTHS, SOME_LENGTHS = range(1, 9), (1, 3, 8)  # one for each third of the cases


@cache
def cases(arch: str) -> list[tuple[list[int], int, tuple[int, ...], list[int]]]:
    """(prompt, cap, stop ids, transformers' answer), computed once per architecture."""
    pair, rng = random_pair(arch), random.Random(arch)
    prompts = [(random_prompt(rng, pair.target.config.vocab_size), *end) for end in ENDS]
    return [(*case, generate_with_transformers(pair.target, *case)) for case in prompts]


def assert_lossless(arch: str, drafter: Drafter, third: int | None = None) -> list:
    """Runs every case, or every third from the given one on; returns all steps."""
    engine = Engine(StagedModel(random_pair(arch).target), drafter, frozenset())
    steps = []
    chosen = cases(arch) if third is None else cases(arch)[third % 3 :: 3]
    for prompt, cap, stop_ids, expected in chosen:
        engine.stop_ids = frozenset(stop_ids)
        answer = engine.answer(prompt, SamplingParams(cap))
        assert answer.tokens == expected
        assert sum(s.emitted for s in answer.steps) + 1 == len(expected)
        assert answer.finish == ("stop" if expected[-1] in stop_ids else "length")
        steps += answer.steps
    return steps


def plant_mask_off_by_one(monkeypatch) -> None:
    """A fault: in passes of several tokens after a prompt each token sees what the one before it does."""
    masks = LayerStack.masks

    def off_by_one(self, ctx, n, like):
        return [mask if mask is None or n == 1 else mask.roll(1, -2) for mask in masks(self, ctx, n, like)]

    monkeypatch.setattr(LayerStack, "masks", off_by_one)


def sampled_requests(pair, new_tokens: int, temperature: float) -> list[Request]:
    """Random prompts to sample answers to."""
    rng, decoding = random.Random(2), SamplingParams(new_tokens, temperature)
    return [Request(random_prompt(rng, pair.vocab_size), decoding, seed) for seed in range(6)]


def assert_samples_like_plain_decoding(
    pair, drafter: Drafter, requests: list[Request], scheduler: Scheduler | None = None
) -> int:
    """Of a drafter without chance the samples are those of autoregressive decoding; returns what it got accepted."""
    target = StagedModel(pair.target)
    plain = Engine(target, Drafter(), frozenset()).generate(requests)
    answers = Engine(target, drafter, frozenset(), scheduler).generate(requests)
    assert drafter.deterministic and [a.tokens for a in answers] == [a.tokens for a in plain]
    return sum(s.accepted for a in answers for s in a.steps)


def assert_rounds_of_every_kind(steps: list, partly: bool = False) -> None:
    """A test is worth something only if some rounds accepted nothing of their draft and some all of it.

    partly: some must have accepted a part, too.
    """
    shares = {s.accepted / s.drafted for s in steps if s.drafted}
    assert {0, 1} <= shares
    assert not partly or any(0 < share < 1 for share in shares)


@cache
def free_answers() -> list[tuple[list[int], list[int]]]:
    """(prompt, what transformers says where nothing stops it)."""
    pair, rng = random_pair("llama"), random.Random(3)
    prompts = [random_prompt(rng, pair.vocab_size) for _ in range(3)]
    # A text that goes on repeats itself: prompt lookup can draft the stop token, too.
    prompts[2] += generate_with_transformers(pair.target, prompts[2], 60, stop_ids=())
    return [(prompt, generate_with_transformers(pair.target, prompt, 18, stop_ids=())) for prompt in prompts]


def assert_stops_anywhere(drafter: Callable[[list[int], list[int]], Drafter]) -> None:
    """As first token, inside a draft, as bonus token, on the very cap: the answer ends with the stop token.

    drafter: made anew for each prompt and the answer that it has without a stop token.
    """
    target = StagedModel(random_pair("llama").target)
    places = set()
    for turn, (prompt, free) in enumerate(free_answers()):
        engine = Engine(target, drafter(prompt, free), frozenset())
        for number, stop in enumerate(dict.fromkeys(free)):
            cut = free.index(stop) + 1
            cap = (cut, cut + 1, 24)[(turn + number) % 3]  # each place meets each cap on another prompt
            engine.stop_ids = frozenset([stop])
            answer = engine.answer(prompt, SamplingParams(cap))
            assert answer.tokens == free[:cut]
            assert answer.finish == "stop"
            last = answer.steps[-1] if answer.steps else None
            stop = "first" if last is None else "bonus" if last.emitted > last.accepted else "draft"
            places.add((stop, cap == cut))
    # A draft leaves the last place before the cap to the target alone.
    assert places == {("first", True), ("first", False), ("draft", False), ("bonus", True), ("bonus", False)}
