"""Goes at the same answers that are joined: every stretch from the go that was disturbed least, for all arms alike."""

import itertools
import math
import time
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from methods.pld import PromptLookup
from specbench.config.spec import METHOD, POOL, QUESTION, RunSpec
from specbench.decoding.cpu.compiled_layers import CompiledLayer
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine, Rounds
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import Request
from specbench.decoding.trace import Generation, Step
from specbench.measure import conductor
from specbench.measure.arms import Setup
from specbench.measure.conductor import Conductor
from specbench.measure.machine.watch import Watch
from specbench.measure.remeasure import CAPTURED, STRETCH, Attempt, Slice, least_disturbed
from specbench.measure.runner import prepare
from tests.support.conf import composed
from tests.support.decoding import random_pair
from tests.support.graphs import pretend

TIME = {"seconds": 0.05}
QUIET, BUSY = (TIME, 0.3), (TIME, 4.0)  # counted, degree


def step(seconds: float, emitted: int = 1) -> Step:
    parts = seconds / 4, seconds / 2, seconds / 8
    return Step(emitted - 1, emitted - 1, emitted, emitted - 1, *parts, 0, 0, align_seconds=seconds / 8)


def answer(seconds: list[float], emitted: int = 1, rest: float = 0.0) -> Generation:
    """A prefill and rounds of so many seconds; `rest` belongs to none of them."""
    steps = [step(s, emitted) for s in seconds[1:]]
    tokens = list(range(1 + emitted * len(steps)))
    return Generation(tokens, seconds[0], sum(seconds) + rest, "length", steps)


def attempt(slow: dict[int, bool], factor: float) -> Attempt:
    """Two arms over four stretches, one of one and one of four tokens a round, one slice for each stretch.

    slow: the stretches in which others were there, as a result of which everything takes `factor` times as long.
    """
    answers, slices = {}, {}
    for name, emitted in (("baseline", 1), ("method", 4)):
        rounds = 4 * STRETCH // emitted - (emitted == 1)
        ends = [1, *(1 + emitted * (i + 1) for i in range(rounds))]
        seconds = [1e-3 * (factor if slow.get((end - 1) // STRETCH) else 1.0) for end in ends]
        answers[name] = [answer(seconds, emitted, rest=0.01)]
        slices[name] = [Slice(STRETCH * (i + 1), *(BUSY if slow.get(i) else QUIET)) for i in range(4)]
        slices[name].append(Slice(ends[-1], *(BUSY if slow.get(4) else QUIET)))
    return Attempt(answers, slices)


@given(st.sets(st.integers(0, 3)), st.sets(st.integers(0, 3)), st.floats(0.2, 5.0))
def test_joined_goes_are_as_one_that_nobody_disturbed(first, second, factor):
    """Where at least one go was left alone; whether a disturbed one was slower or faster plays no part."""
    attempts = [attempt(dict.fromkeys(first, True), factor), attempt(dict.fromkeys(second, True), factor)]
    answers, disturbed, _ = least_disturbed(attempts)
    quiet, *_ = least_disturbed([attempt({}, factor)])
    for arm in quiet:
        for at, (ours, theirs) in enumerate(zip(answers[arm][0].steps, quiet[arm][0].steps)):
            stretch = (1 + (at + 1) * ours.emitted - 1) // STRETCH
            if stretch in first & second:
                assert ours.verify_seconds == pytest.approx(theirs.verify_seconds * factor)
            else:
                assert ours.verify_seconds == theirs.verify_seconds
    assert (disturbed == 0) == (not first & second)
    if disturbed == 0:
        for arm in quiet:
            assert answers[arm][0].seconds == pytest.approx(quiet[arm][0].seconds)
            assert answers[arm][0].tokens == quiet[arm][0].tokens


@pytest.mark.parametrize("arm", ["baseline", "method"])
def test_all_arms_take_a_stretch_from_one_go(arm):
    """Only this one was disturbed, and the times of that stretch are replaced in the other as well."""
    attempts = [attempt({1: True}, 3.0), attempt({}, 3.0)]
    other = {"baseline": "method", "method": "baseline"}[arm]
    attempts[0].slices[other] = attempts[1].slices[other]
    answers, *_ = least_disturbed(attempts)
    for name in (arm, other):
        seconds = [
            sum(step.verify_seconds for step in of[name][0].steps) for of in (answers, attempts[1].answers)
        ]
        assert seconds[0] == pytest.approx(seconds[1])


def test_the_seconds_of_an_answer_are_those_of_its_parts():
    answers, *_ = least_disturbed([attempt({0: True, 3: True}, 4.0), attempt({2: True}, 4.0)])
    for (answer,) in answers.values():
        parts = ("draft_seconds", "verify_seconds", "other_seconds", "align_seconds")
        rounds = sum(getattr(step, part) for step in answer.steps for part in parts)
        assert answer.seconds == pytest.approx(answer.prefill_seconds + rounds + 0.01)


def test_goes_whose_rounds_differ_are_not_mixed():
    first, second = attempt({0: True, 1: True}, 2.0), attempt({3: True}, 2.0)
    second.answers["method"][0].steps[2:4] = [step(1e-3, 8)]
    answers, disturbed, _ = least_disturbed([first, second])
    assert answers is second.answers and disturbed == pytest.approx(2 / 10)


def test_a_batch_is_taken_as_a_whole():
    first, second = attempt({0: True, 1: True}, 2.0), attempt({3: True}, 2.0)
    for one in (first, second):
        one.answers["method"] *= 2
    assert least_disturbed([first, second])[0] is second.answers


def test_an_answer_without_rounds_that_were_timed():
    attempts = [attempt({1: True}, 2.0), attempt({}, 2.0)]
    for number, one in enumerate(attempts):
        one.answers["generate"] = [Generation([1, 2, 3], None, 1.0 + number, "length")]
        one.slices["generate"] = [Slice(3, *(BUSY if number == 0 else QUIET))]
    answers, disturbed, _ = least_disturbed(attempts)
    assert answers["generate"][0].seconds == 2.0 and disturbed == 0


@pytest.mark.slow
def test_each_go_knows_what_the_first_one_did(monkeypatch):
    """A drafter whose memory goes on would else copy the answer that it has just given."""
    settings = (
        "method=suffix",
        "method.memory=run",
        "pair=tiny_shallow",
        "pair.device=cpu",
        "generate=false",
    )
    bench = prepare(composed("bench", *settings, "remeasure=2", "decoding.max_new_tokens=24"))
    monkeypatch.setattr(Watch, "disturbance", lambda *_: 4.0)
    seen: list[list[Attempt]] = []
    monkeypatch.setattr(
        conductor, "least_disturbed", lambda attempts: seen.append(attempts) or least_disturbed(attempts)
    )
    with closing(bench.setup.drafter):
        bench.measure(bench.protocol.warmup[:1], 0)
    drafted = [[(step.drafted, step.accepted) for step in one.answers["method"][0].steps] for one in seen[0]]
    assert len(drafted) == 3 and drafted == drafted[:1] * 3


@pytest.mark.slow
def test_an_answer_whose_times_are_not_taken_is_judged_as_well(monkeypatch):
    settings = ("method=pld", "pair=tiny_shallow", "pair.device=cpu", "generate=false")
    bench = prepare(composed("bench", *settings, "remeasure=1", "decoding.max_new_tokens=24"))
    monkeypatch.setattr(Watch, "disturbance", lambda *_: 4.0)
    right, calls = bench.setup.arms[METHOD], itertools.count(1)

    def wrong_at_last(requests):
        answers = yield from right(requests)
        if next(calls) == 2:
            time.sleep(0.3)  # so that it is the more disturbed one
            answers[0].tokens[-1] ^= 1
        return answers

    bench.setup.arms[METHOD] = wrong_at_last
    [record] = bench.measure(bench.protocol.warmup[:1], 0)
    turn = record["turns"][0]
    assert turn["machine"]["attempts"] == 2
    first, reference = (turn["arms"][name][0]["tokens"] for name in (METHOD, "baseline"))
    assert first == reference and turn["equivalence"]["verdict"] == "violation"


def conductor_of(monkeypatch, attempts: list[Attempt], remeasure: int = 2, unit: str = QUESTION) -> Conductor:
    """A conductor whose attempts are these."""
    drafter = SimpleNamespace(snapshot=lambda: None, restore=lambda learnt: None)
    pair, spec = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(unit=unit)
    setup = SimpleNamespace(drafter=drafter, pair=pair, spec=spec, served=None)
    setup.set_reference_answers = lambda requests: None
    left = iter(attempts)
    monkeypatch.setattr(Conductor, "_attempt", lambda *_: next(left))
    return Conductor(setup, 0.05, remeasure)


def test_times_are_those_of_the_attempt_that_nobody_disturbed(monkeypatch):
    busy, quiet = attempt(dict.fromkeys(range(5), True), 10.0), attempt({}, 1.0)
    measured = conductor_of(monkeypatch, [busy, quiet]).measure({"method": []})
    assert measured.answers["method"][0].seconds == pytest.approx(quiet.answers["method"][0].seconds)
    assert measured.attempts == [busy, quiet] and measured.machine["attempts"] == 2
    assert measured.machine["disturbed_share"] != 0 == (measured.machine["still_disturbed_share"] or 0)


def test_answers_that_capture_a_pass_are_measured_again_and_the_machine_is_not_hopeless_for_it(monkeypatch):
    """Drafts as long as what is found have many shapes: a capture takes ten passes' time once."""
    made = pretend(monkeypatch)
    pair = random_pair("llama")
    drafter = PromptLookup(pair)
    engine = Engine(pair.staged, drafter, frozenset(), None, pair.context_length)
    setup = Setup(pair, pair.staged, drafter, {METHOD: engine.rounds}, RunSpec({}))
    conductor_ = Conductor(setup, 1e-9, 2)
    monkeypatch.setattr(Watch, "disturbance", lambda *_: 0.0)
    prompt = [3, 9, 27, 11] * 3
    first, second = (
        conductor_.measure({METHOD: [Request(prompt, SamplingParams(12))]}).machine for _ in range(2)
    )
    assert sum(graphs.captures for graphs in made) > 1
    assert first["attempts"] == 2 and second["attempts"] == 1
    assert first["disturbed_share"] == 0, "others are not to blame"


def test_a_slice_in_which_a_layer_is_compiled_is_measured_again(monkeypatch):
    """The first pass of a shape runs both ways, and traces the layer."""
    pair = random_pair("llama")
    engine = Engine(pair.staged, Drafter(), frozenset())

    def rounds(requests: list[Request]) -> Rounds:
        CompiledLayer.firsts_of_all += firsts.pop(0) if firsts else 0
        return (yield from engine.rounds(requests))

    firsts = [1]
    conductor_ = Conductor(Setup(pair, pair.staged, Drafter(), {METHOD: rounds}, RunSpec({})), math.inf, 2)
    monkeypatch.setattr(Watch, "disturbance", lambda *_: 0.0)
    facts = conductor_.measure({METHOD: [Request([3, 9, 27, 11], SamplingParams(12))]}).machine
    assert facts["attempts"] == 2 and facts["disturbed_share"] == 0


def test_an_attempt_that_captured_a_pass_is_not_the_one_that_counts():
    """Where attempts differ, one is taken as a whole."""
    first, second = attempt({}, 1.0), attempt({}, 1.0)
    for slices in first.slices.values():
        slices[0] = Slice(slices[0].tokens, TIME, CAPTURED)
    second.answers["method"][0].tokens[-1] += 1
    answers, disturbed, captured = least_disturbed([first, second])
    assert answers is second.answers and disturbed == captured == 0
    answers, disturbed, captured = least_disturbed([first])
    assert disturbed == 0 < captured


def capturing_attempt(seconds: float = 1.0) -> Attempt:
    """One in whose first slices a pass was captured."""
    one = attempt({}, seconds)
    for slices in one.slices.values():
        slices[0] = Slice(slices[0].tokens, TIME, CAPTURED)
    return one


def test_a_batch_is_measured_again_for_a_capture_alone(monkeypatch):
    quiet, busy = attempt({}, 1.0), attempt(dict.fromkeys(range(5), True), 10.0)
    measured = conductor_of(monkeypatch, [capturing_attempt(), quiet], unit=POOL).measure({"method": []})
    assert measured.machine["attempts"] == 2 and measured.machine["captured_share"] == 0
    measured = conductor_of(monkeypatch, [busy, quiet], unit=POOL).measure({"method": []})
    assert measured.machine["attempts"] == 1


@pytest.mark.parametrize("unit", [QUESTION, POOL])
def test_captures_that_stay_in_the_times_are_counted(monkeypatch, unit):
    attempts = [capturing_attempt() for _ in range(3)]
    measured = conductor_of(monkeypatch, attempts, unit=unit).measure({"method": []})
    assert measured.machine["attempts"] == 3 and 0 < measured.machine["captured_share"] < 1


@pytest.mark.parametrize(("slow", "times"), [({}, 1), ({0: True}, 3)])
def test_what_is_hardly_disturbed_is_not_measured_again(monkeypatch, slow, times):
    """And what stays disturbed no more often than is asked for."""
    measured = conductor_of(monkeypatch, [attempt(slow, 2.0)] * 4).measure({"method": []})
    assert measured.machine["attempts"] == times


def test_on_a_hopeless_machine_nothing_is_measured_again(monkeypatch):
    busy = attempt(dict.fromkeys(range(5), True), 2.0)
    conductor_ = conductor_of(monkeypatch, [busy] * 99)
    goes = [conductor_.measure({"method": []}).machine["attempts"] for _ in range(12)]
    assert goes[0] == 3 and goes[-1] == 1
