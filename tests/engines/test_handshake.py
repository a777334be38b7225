"""What a server does wrong is seen before it is measured."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from specbench.decoding.engine import exhaust
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import Request
from specbench.engines.dialects import DIALECTS, TargetPass
from specbench.engines.served import PLAIN, SPECULATIVE
from specbench.system.errors import UserError
from tests.support import engine_stub
from tests.support.engine_stub import Stub, counting, serving
from tests.support.served import (
    NEW,
    PROMPT,
    engine_of,
    request,
    stopping,
)


def test_a_server_that_ignores_a_temperature_is_refused(pair, monkeypatch):
    """Greedily it does all that it is told."""
    events = engine_stub.EVENTS["/completion"]
    monkeypatch.setitem(
        engine_stub.EVENTS,
        "/completion",
        lambda stub, body, wrong: events(stub, body | {"temperature": 0.0}, wrong),
    )
    drawn = Request(PROMPT, SamplingParams(NEW, 0.7), 3)
    with (
        serving(Stub(counting), Stub(counting, drafts=True)) as urls,
        pytest.raises(UserError, match=r"temperature"),
    ):
        engine_of(pair, urls, "llama_cpp").open([drawn])


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
class TestHandshake:
    def test_servers_that_do_what_they_should(self, pair, dialect):
        with serving(Stub(counting), Stub(counting, drafts=True)) as urls:
            engine = engine_of(pair, urls, dialect)
            engine.open([request(), request(8)])
            assert engine.faults == []
            [plain], [speculative] = (
                exhaust(engine.plain([request()])),
                exhaust(engine.speculative([request()])),
            )
        assert plain.tokens == speculative.tokens == counting(PROMPT, NEW)
        assert [step.accepted for step in plain.steps] == [0] * 15
        assert [step.accepted for step in speculative.steps] == [2, 0, 3, 1, 2, 0, 0]
        assert {step.drafted for step in speculative.steps} == {3}
        assert sum(step.emitted for step in speculative.steps) == NEW - 1
        for answer in (plain, speculative):
            spent = answer.prefill_seconds + sum(step.other_seconds for step in answer.steps)
            assert 0 < answer.prefill_seconds < spent <= answer.seconds

    @pytest.mark.parametrize(
        ("arm", "fault", "said"),
        [
            (SPECULATIVE, "rejects", "accepts none of"),
            (SPECULATIVE, "is plain", "drafts nothing"),
            (PLAIN, "drafts", "the plain server drafts"),
            (PLAIN, "adds", "read 8 tokens of a prompt of 7"),
            (SPECULATIVE, "remembers", "prefix cache"),
            (PLAIN, "nothing", "no token ids"),
            (SPECULATIVE, "text", "no token ids"),
            (PLAIN, "refuses", "500"),
        ],
    )
    def test_what_a_measurement_cannot_rest_on_is_refused(self, pair, dialect, arm, fault, said):
        stubs = {PLAIN: Stub(counting), SPECULATIVE: Stub(counting, drafts=True)}
        if fault == "drafts":
            stubs[arm].drafts = True
        else:
            stubs[arm].fault = fault
        with serving(*stubs.values()) as urls, pytest.raises(UserError, match=said):
            engine_of(pair, urls, dialect).open([request()])

    @pytest.mark.parametrize("arm", [PLAIN, SPECULATIVE])
    def test_a_prefix_cache_that_only_second_answers_show_is_refused(self, pair, dialect, arm):
        stubs = {PLAIN: Stub(counting), SPECULATIVE: Stub(counting, drafts=True)}
        stubs[arm].fault, stubs[arm].after = "remembers", 1
        with (
            serving(*stubs.values()) as urls,
            pytest.raises(UserError, match=f"the {arm} server took 4 prompt tokens from its cache"),
        ):
            engine_of(pair, urls, dialect).open([request()])

    @pytest.mark.parametrize(
        ("fault", "said"),
        [
            ("is full", "plain server ended an answer after 5 of 16 tokens"),
            ("adds", "read 8 tokens of a prompt of 7"),
        ],
    )
    @pytest.mark.parametrize("at_once", [1, 2])
    def test_a_timed_answer_that_is_cut_or_of_another_prompt_costs_its_question(
        self, pair, dialect, at_once, fault, said
    ):
        with serving(Stub(counting, fault=fault, after=2), Stub(counting, drafts=True)) as urls:
            engine = engine_of(pair, urls, dialect)
            engine.batch_size = at_once
            engine.open([request()])
            with pytest.raises(UserError, match=said):
                exhaust(engine.plain([request()] * at_once))

    @pytest.mark.parametrize("at_once", [1, 2])
    def test_a_prefix_cache_that_timed_answers_show_is_named_once(self, pair, dialect, at_once):
        stub = Stub(counting, fault="remembers", after=2)
        with serving(stub, Stub(counting, drafts=True)) as urls:
            engine = engine_of(pair, urls, dialect)
            engine.batch_size = at_once
            engine.open([request()])
            exhaust(engine.plain([request()] * 2))
        [fault] = engine.faults
        assert fault.startswith("plain: it remembers prompts")

    def test_the_longest_prompt_is_asked_first_and_few_of_many(self, pair, dialect):
        """Until enough passes have shown that drafts are accepted."""
        stubs = [Stub(counting), Stub(counting, drafts=True)]
        lengths = [5, 6, 30, 7, 8, 9, 10, 11, 12, 13]
        with serving(*stubs) as urls:
            engine_of(pair, urls, dialect).open([Request([3] * n, SamplingParams(NEW)) for n in lengths])
        asked = [[len(body["prompt"]) for body in stub.bodies] for stub in stubs]
        assert asked == [[30, 13, 12, 30], [n for n in (30, 13, 12, 11, 10, 9) for _ in range(2)]]

    def test_an_engine_that_contradicts_itself_is_named(self, pair, dialect):
        stub = Stub(counting, fault="breaks", after=1)
        with serving(stub, Stub(counting, drafts=True)) as urls:
            engine = engine_of(pair, urls, dialect)
            engine.open([request()])
        assert any("differ" in fault for fault in engine.faults)

    def test_an_engine_that_remembers_answers_is_named(self, pair, dialect):
        """Measured again, it would repeat what it said."""
        learns = Stub(counting, drafts=True, fault="learns", after=1)
        with serving(Stub(counting), learns) as urls:
            engine = engine_of(pair, urls, dialect)
            engine.open([request()])
        [fault] = engine.faults
        assert "it remembers answers (7 passes at first, 4 for the same again)" in fault


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
class TestWhatServersTell:
    def test_answers_that_end_at_a_stop_token_are_checked_too(self, pair, dialect):
        stop = next(iter(pair.stop_ids))
        stubs = [Stub(partial(stopping, stop=stop), drafts=drafts) for drafts in (False, True)]
        stubs[0].fault = "adds"
        with serving(*stubs) as urls, pytest.raises(UserError, match="read 8 tokens of a prompt of 7"):
            engine_of(pair, urls, dialect).open([request()])

    def test_one_that_does_not_tell_what_it_remembers_is_named(self, pair, dialect):
        """With a prefix cache, second answers are faster, and nothing else shows it."""
        with serving(Stub(counting, fault="silent cache"), Stub(counting, drafts=True)) as urls:
            engine = engine_of(pair, urls, dialect)
            engine.open([request(), request(8)])
        [fault] = engine.faults
        assert fault.startswith("plain: it does not report cached prompt tokens")


@pytest.mark.parametrize(
    ("fault", "decoding", "said"),
    [
        ("swallows", SamplingParams(16), "temperature=0.8, not 0.0"),
        ("narrows", SamplingParams(16, 0.7, top_k=20, top_p=0.9), "top_p=0.8, not 0.9"),
    ],
    ids=["temperature", "top_p"],
)
def test_what_only_one_dialect_tells(pair, fault, decoding, said):
    with (
        serving(Stub(counting), Stub(counting, drafts=True, fault=fault)) as urls,
        pytest.raises(UserError, match=said),
    ):
        engine_of(pair, urls, "llama_cpp").open([replace(request(), decoding=decoding)])


class TestUntoldCounts:
    """A server that does not tell how many tokens its passes verify has lengths, and no rates."""

    def test_lengths_are_those_of_the_passes(self, pair):
        with serving(Stub(counting), Stub(counting, drafts=True, fault="uncounted")) as urls:
            engine = engine_of(pair, urls, "openai")
            engine.open([request()])
            [plain], [answer] = (exhaust(arm([request()])) for arm in (engine.plain, engine.speculative))
        assert [step.emitted for step in answer.steps] == [3, 1, 4, 2, 3, 1, 1]
        assert [step.accepted for step in answer.steps] == [2, 0, 3, 1, 2, 0, 0]
        told = [
            {(step.drafted, step.depth, step.draft_bytes) for step in one.steps} for one in (plain, answer)
        ]
        assert told == [{(0, 0, 0)}, {(None, None, None)}]

    def test_one_that_accepts_nothing_is_refused(self, pair):
        with (
            serving(Stub(counting), Stub(counting, fault="uncounted")) as urls,
            pytest.raises(UserError, match="accepts none of what it drafts"),
        ):
            engine_of(pair, urls, "openai").open([request()])

    def test_a_plain_server_that_gives_several_tokens_at_once_is_found(self, pair):
        stub = Stub(counting)
        with serving(stub, Stub(counting, drafts=True)) as urls:
            engine = engine_of(pair, urls, "openai")
            engine.open([request()])
            stub.drafts = True
            with pytest.raises(UserError, match="4 of 7 passes of the plain server gave several tokens"):
                exhaust(engine.plain([request()]))

    def test_a_short_answer_that_comes_in_pieces_is_no_draft(self, pair):
        passes = [TargetPass(0.0, tokens) for tokens in ([1], [1], [1], [2, 3], [4, 5], [6])]
        with serving(Stub(counting), Stub(counting, drafts=True)) as urls:
            engine = engine_of(pair, urls, "openai")
            engine._reply = lambda *_: SimpleNamespace(passes=passes)
            engine._timed(PLAIN, request(), several=False)
        assert "sends some passes together" in engine.faults[0]

    def test_a_plain_server_that_sends_two_passes_together_now_and_then_is_none_that_drafts(self, pair):
        """Each token was a pass; what the other server's events hold is then not known to be a pass."""
        with serving(Stub(counting, fault="pauses"), Stub(counting, drafts=True)) as urls:
            engine = engine_of(pair, urls, "openai")
            engine.open([request()])
            [answer] = exhaust(engine.plain([request()]))
        assert [(step.emitted, step.drafted) for step in answer.steps] == [(1, 0)] * 15
        [fault] = engine.faults
        assert "sends some passes together" in fault


def test_an_answer_that_goes_on_after_a_stop_token_is_refused(pair):
    stop = next(iter(pair.stop_ids))

    def stopped(prompt: list[int], n: int) -> list[int]:
        return [*counting(prompt, 4), stop]

    with serving(Stub(stopped), Stub(stopped, drafts=True)) as urls:
        engine = engine_of(pair, urls, "openai")
        engine.open([request()])
        [answer] = exhaust(engine.speculative([request()]))
        assert answer.finish == "stop" and answer.tokens[-1] == stop
    with (
        serving(Stub(stopped, fault="goes on"), Stub(stopped, drafts=True)) as urls,
        pytest.raises(UserError, match="continues after a stop token"),
    ):
        engine_of(pair, urls, "openai").open([request()])
