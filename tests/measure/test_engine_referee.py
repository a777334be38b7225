"""Answers of an engine that decodes with a file of its own: its plain server judges, not the pair's target."""

from __future__ import annotations

import pytest
import torch

from specbench.config.spec import AGAIN, BASELINE, METHOD, OWN_LOOP, RunSpec
from specbench.decoding.drafter import Drafter
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import Request
from specbench.decoding.trace import Generation
from specbench.measure.arms import Setup
from specbench.measure.certify import Certificate, Certifier
from specbench.measure.engine_referee import EngineReferee
from specbench.measure.protocol import Protocol
from tests.support.decoding import random_pair

PROMPT, TOKENS, VOCAB = [3, 9], 12, 32
GAP, CLOSE, CHANGE = 1.0, 0.004, 0.01  # of the first two choices; of a near-tie; between two shapes of passes


class Engine:
    """Served by logits that depend on the text, and a little on whether it is a prompt or was decoded."""

    has_own_file = True

    def __init__(self):
        self.close: set[tuple[int, ...]] = set()  # texts after which the first two choices are nearly equal
        self.notes: list[str] = []
        self.reports = True
        self.silent: set[tuple[int, ...]] = set()  # texts after which it reports no log-probabilities

    def choices(self, text: list[int]) -> list[int]:
        """The tokens in the order in which they are preferred."""
        generator = torch.Generator().manual_seed(hash(tuple(text)) % 2**32)
        return torch.randperm(VOCAB, generator=generator).tolist()

    def tops(self, request: Request) -> tuple[list[int], list[dict[int, float]]]:
        tokens: list[int] = []
        tops = []
        for place in range(request.decoding.max_new_tokens):
            text = [*request.prompt, *tokens]
            first, second, third = self.choices(text)[:3]
            gap = (CLOSE if tuple(text) in self.close else GAP) - (CHANGE if place == 0 else 0.0)
            logprobs = {first: -1.0, second: -1.0 - gap, third: -4.0}
            tops.append({} if tuple(text) in self.silent else logprobs)
            tokens.append(first if gap > 0 else second)
        return tokens, tops if self.reports else []

    def note(self, fault: str) -> None:
        self.notes.append(fault)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def plain(engine) -> list[int]:
    return engine.tops(Request(PROMPT, SamplingParams(TOKENS)))[0]


def departing(engine: Engine, answer: list[int], place: int) -> list[int]:
    """An answer with the engine's second choice at a place, and what it says after that."""
    begun = [*answer[:place], engine.choices([*PROMPT, *answer[:place]])[1]]
    while len(begun) < TOKENS:
        begun.append(engine.choices([*PROMPT, *begun])[0])
    return begun


def judged(engine: Engine, first: list[int], text: list[int], arm: str = METHOD) -> Certificate:
    pair, request = random_pair("llama", vocab_size=VOCAB), Request(PROMPT, SamplingParams(TOKENS))
    pair.stop_ids = frozenset()
    arms = dict.fromkeys((BASELINE, METHOD, AGAIN, OWN_LOOP))
    setup = Setup(pair, pair.staged, Drafter(), arms, RunSpec({}), served=engine)
    certifier = Certifier(setup, Protocol(pair, request.decoding, "paired", 0))
    assert certifier.engine_referee is not None
    certifier.engine_referee = EngineReferee(engine, [request], pair.stop_ids)
    texts = {name: [Generation(first, 0.0, 0.0, "length")] for name in arms}
    texts[arm] = [Generation(text, 0.0, 0.0, "length")]
    return certifier.judge(arm, dict.fromkeys(arms, request), texts, first)


def test_the_noise_is_twice_what_another_shape_changes(engine):
    referee = EngineReferee(engine, [Request(PROMPT, SamplingParams(TOKENS))], frozenset())
    assert referee.noise == pytest.approx(2 * CHANGE)
    engine.reports = False
    assert EngineReferee(engine, [Request(PROMPT, SamplingParams(TOKENS))], frozenset()).noise is None


def test_the_noise_has_a_bound(engine, monkeypatch):
    """Beyond half a logit an engine contradicts itself."""
    monkeypatch.setattr("tests.measure.test_engine_referee.CHANGE", 0.4)
    assert EngineReferee(engine, [Request(PROMPT, SamplingParams(TOKENS))], frozenset()).noise == 0.5


def test_an_equal_answer_is_exact_and_asks_for_nothing(engine, plain):
    engine.tops = None
    assert judged(engine, plain, plain).verdict == "exact"


def test_a_choice_between_nearly_equal_tokens_is_a_tie(engine, plain):
    engine.close.add((*PROMPT, *plain[:4]))
    tie = judged(engine, plain, departing(engine, plain, 4))
    assert (tie.verdict, tie.first_divergence) == ("tie", 4)
    assert tie.margin == pytest.approx(CLOSE - CHANGE) and tie.noise == pytest.approx(2 * CHANGE)


def test_any_other_choice_is_a_violation_with_its_margin(engine, plain):
    wrong = judged(engine, plain, departing(engine, plain, 4))
    assert wrong.verdict == "violation" and wrong.margin == pytest.approx(GAP - CHANGE)
    far = [*plain[:4], engine.choices([*PROMPT, *plain[:4]])[-1], *plain[5:]]
    assert judged(engine, plain, far).margin == float("inf"), "it is not among the likeliest"


def test_after_a_tie_the_answer_is_followed_to_its_end(engine, plain):
    engine.close.add((*PROMPT, *plain[:4]))
    once = departing(engine, plain, 4)
    twice = departing(engine, once, 8)
    assert judged(engine, plain, twice).verdict == "violation"
    assert judged(engine, plain, [*once[:-1], once[-1] ^ 1]).verdict == "violation"
    assert judged(engine, plain, once[:-2]).verdict == "violation", "nothing has ended it"
    assert judged(engine, plain, [*once, 5]).verdict == "violation", "longer than it may be"
    engine.close.add((*PROMPT, *once[:8]))
    assert judged(engine, plain, twice).verdict == "tie"


def test_without_log_probabilities_a_difference_is_not_judged(engine, plain):
    other = departing(engine, plain, 4)
    engine.reports = False
    assert judged(engine, plain, other).verdict is None
    assert judged(engine, plain, plain[:-2]).verdict == "violation", "nothing has ended it"
    assert engine.notes == ["method: it reports no log-probabilities: its answers that differ are not judged"]


def test_where_no_log_probabilities_are_reported_neither_noise_nor_a_verdict_rests_on_it(engine, plain):
    """As where llama.cpp's next token ends inside a character."""
    engine.silent.add((*PROMPT, *plain[:1]))  # a place at which the noise is measured
    assert judged(engine, plain, departing(engine, plain, 4)).verdict == "violation"
    engine.silent.add((*PROMPT, *plain[:4]))
    assert judged(engine, plain, departing(engine, plain, 4)).verdict is None
    assert engine.notes == [
        "method: it reports no log-probabilities where some answers differ: they are not judged"
    ]
    engine.silent = {(*PROMPT, *(once := departing(engine, plain, 4))[:8])}
    engine.close.add((*PROMPT, *plain[:4]))
    assert judged(engine, plain, departing(engine, once, 8)).verdict is None, "after a tie"


def test_our_loop_decodes_with_other_weights_and_is_not_judged(engine, plain):
    assert judged(engine, plain, departing(engine, plain, 4), OWN_LOOP).verdict is None
    again = judged(engine, plain, departing(engine, plain, 4), AGAIN)
    assert again.verdict == "violation", "the engine itself is not stable"
