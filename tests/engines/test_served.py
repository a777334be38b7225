"""Other engines as arms: what servers say becomes rounds, what they do wrong is seen, and no process is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from specbench import WAITING
from specbench.decoding.engine import exhaust
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import Request
from specbench.engines import client, dialects
from specbench.engines import served as module
from specbench.engines import server as module_server
from specbench.engines.client import EngineError, RefusedError
from specbench.engines.dialects import DIALECTS, Reply, TargetPass, _counted
from specbench.engines.openai import OpenAI
from specbench.engines.served import PLAIN, SPECULATIVE, ServedEngine
from specbench.engines.server import Server, _pin, own_environment
from specbench.system.errors import JobError, UserError
from tests.support import engine_stub
from tests.support.commands import wait_for
from tests.support.decoding import random_pair
from tests.support.engine_stub import SPLIT, Stub, counting, serving

PROMPT, NEW = [3, 9, 27, 11, 33, 29, 17], 16
STOPS: frozenset[int] = frozenset({2})
SCRIPT = Path(engine_stub.__file__)
SILENT, PATIENT = 0.4, 20.0  # s without an event; the longer one for servers that do not hang


def request(n: int = NEW) -> Request:
    return Request(list(PROMPT), SamplingParams(n))


def stopping(prompt: list[int], n: int, stop: int = 2) -> list[int]:
    """An answer that ends at a stop token."""
    return [*counting(prompt, 4), stop]


@pytest.fixture(scope="module")
def pair():
    return random_pair("llama")


def engine_of(pair, urls: list[str], dialect: str, silent: float = PATIENT) -> ServedEngine:
    servers = {name: Server(name, url, seconds=5) for name, url in zip((PLAIN, SPECULATIVE), urls)}
    return ServedEngine(pair, servers, dialect, silent)


def process_engine(pair, speculative: dict | None = None, silent: float = PATIENT, **plain) -> ServedEngine:
    """Stubs in processes of their own, in llama.cpp's dialect."""

    def server(name: str, told: dict) -> Server:
        words = json.dumps(told)
        return Server(name, "", lambda port: [sys.executable, str(SCRIPT), str(port), words], seconds=20)

    servers = {
        PLAIN: server(PLAIN, plain),
        SPECULATIVE: server(SPECULATIVE, {"drafts": True} | (speculative or {})),
    }
    return ServedEngine(pair, servers, "llama_cpp", silent)


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


def test_what_an_ended_answer_did_not_say_was_not_accepted(pair):
    engine = engine_of(pair, ["", ""], "openai")
    reply = Reply([TargetPass(0.0, [5]), TargetPass(1.0, [6], 4, 4)], ended=1.0)
    (step,) = engine._generation(SPECULATIVE, reply, 0.0, request(2)).steps
    assert (step.drafted, step.emitted, step.accepted) == (4, 1, 1)


@pytest.mark.parametrize("error", [EngineError("gone"), RefusedError("no logprobs")])
def test_where_a_server_gives_no_log_probabilities_it_answers_without(pair, error):
    with serving(Stub(counting), Stub(counting, drafts=True)) as urls:
        engine = engine_of(pair, urls, "llama_cpp")
        dialect = engine.dialect

        def without(*given):
            if given[-1]:
                raise error
            return dialect(*given)

        engine.dialect = without
        tokens, tops = engine.tops(request())
    assert tokens == counting(PROMPT, NEW) and not tops
    assert engine.faults == [f"plain: it gives no log-probabilities: {error}"]


def tell(monkeypatch, *answers: list[dict]) -> None:
    """Lets dialects hear these events, one list for each request."""
    left = iter(answers)
    monkeypatch.setattr(dialects, "events", lambda *_: enumerate(next(left)))


@pytest.mark.parametrize(
    ("dialect", "events"),
    [
        ("openai", [{"choices": None}]),
        ("openai", [{"choices": [{"token_ids": [5], "finish_reason": "stop"}], "usage": [1]}]),
        ("openai", [{"choices": [{"token_ids": [5], "logprobs": {"top_logprobs": [{"the": -1.0}]}}]}]),
        ("llama_cpp", [{"tokens": 5}]),
        ("llama_cpp", [{"tokens": [5], "tokens_predicted": None, "stop": True}]),
        ("llama_cpp", [{"tokens": [5], "completion_probabilities": [{"top_logprobs": [{"logprob": -1.0}]}]}]),
    ],
)
def test_an_event_of_another_form_is_a_fault_of_the_server(pair, monkeypatch, dialect, events):
    tell(monkeypatch, events)
    with pytest.raises(EngineError, match="another form|of texts, not of token ids"):
        engine_of(pair, ["http://none"] * 2, dialect)._reply(PLAIN, request())


def test_an_answer_whose_tokens_all_end_inside_a_character_is_asked_for_once_more(pair, monkeypatch):
    ended = {"tokens": [], "stop": True, "tokens_predicted": 3}
    tell(monkeypatch, [ended], [{"tokens": [5, 6, 7], "stop": True}])
    engine = engine_of(pair, ["http://none"] * 2, "llama_cpp")
    reply = engine._reply(PLAIN, request(3))
    assert engine._generation(PLAIN, reply, -1.0, request(3)).tokens == [5, 6, 7] and reply.passes[0].at == 0
    tell(monkeypatch, [ended], [{"tokens": [], "stop": True}])
    with pytest.raises(EngineError, match="holds no token ids"):
        engine._reply(PLAIN, request(3)).completed()


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
class TestDialects:
    def test_a_reply_holds_the_passes_that_it_came_from(self, dialect):
        with serving(Stub(counting), Stub(counting, drafts=True)) as (plain, speculative):
            for url, accepted in ((plain, (0,) * 15), (speculative, (2, 0, 3, 1, 2, 0, 0))):
                reply = DIALECTS[dialect](url, request(), STOPS, PATIENT)
                assert reply.tokens == counting(PROMPT, NEW)
                assert reply.prompt_tokens == len(PROMPT) and not reply.cached_tokens
                assert [len(one.tokens) for one in reply.passes] == [1, *(1 + n for n in accepted)]
                assert [one.drafted or 0 for one in reply.passes[1:]] == [3 * (max(accepted) > 0)] * len(
                    accepted
                )
                assert [one.at for one in reply.passes] == sorted(one.at for one in reply.passes)

    def test_it_asks_for_what_the_run_decodes_with(self, dialect):
        stub = Stub(counting)
        with serving(stub) as [url]:
            DIALECTS[dialect](url, Request(PROMPT, SamplingParams(5, 0.7), seed=2**40 + 9), STOPS, PATIENT)
        [body] = stub.bodies
        assert body["prompt"] == PROMPT and body["temperature"] == 0.7 and body["seed"] == 9
        assert 5 in (body.get("n_predict"), body.get("max_tokens"))
        # From the whole distribution, as it is, and no prompt is remembered.
        neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        neutral |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
        whole = {"llama_cpp": {"samplers": ["temperature"], "cache_prompt": False}, "openai": neutral}
        assert {key: body.get(key) for key in whole[dialect]} == whole[dialect]

    def test_log_probabilities_come_by_place(self, dialect):
        with serving(Stub(counting)) as [url]:
            reply = DIALECTS[dialect](url, request(6), STOPS, PATIENT, True)
        assert [max(one, key=one.get) for one in reply.tops] == counting(PROMPT, 6)
        assert all(sorted(one.values()) == [-3.0, -0.1] for one in reply.tops)

    @pytest.mark.parametrize(
        ("fault", "said"),
        [
            ("refuses", "answers 500"),
            ("hangs", "silent"),
            ("pings", "silent"),
            ("cuts", "ended before the answer did"),
            ("half", "not JSON"),
            ("tells", "out of memory"),
        ],
    )
    def test_a_fault_is_told_in_one_line(self, dialect, fault, said):
        with serving(Stub(counting, fault=fault)) as [url], pytest.raises(EngineError, match=said) as raised:
            DIALECTS[dialect](url, request(), STOPS, SILENT)
        assert "\n" not in str(raised.value)

    def test_an_answer_ends_at_a_stop_token_and_what_is_told_after_it_is_read(self, dialect):
        with serving(Stub(stopping)) as [url]:
            reply = DIALECTS[dialect](url, request(), STOPS, PATIENT)
        assert reply.tokens == stopping(PROMPT, NEW)
        assert (reply.prompt_tokens, reply.cached_tokens) == (len(PROMPT), 0)
        assert reply.ended > reply.passes[-1].at

    def test_nobody_there(self, dialect):
        with serving(Stub(counting)) as [url]:
            pass
        with pytest.raises(EngineError, match="broke off"):
            DIALECTS[dialect](url, request(), STOPS, PATIENT)


class TestCounts:
    """vLLM counts the passes that verified a draft, and no others; a busy server sends passes together."""

    @pytest.mark.parametrize(
        ("sizes", "accepted", "drafted", "expected"),
        [
            ([1, 2, 2, 4, 5, 5, 4], [1, 1, 3, 4, 4, 4], [1, 1, 3, 4, 4, 4], [0, 1, 1, 3, 4, 4, 4]),
            ([1, 1, 1, 1, 2, 1, 3], [0, 0, 1, 2], [3, 4, 1, 4], [0, 0, 3, 4, 1, 0, 4]),
            ([1, 1, 1], [0, 0, 0], [3, 3, 2], [3, 3, 2]),
            ([1, 1, 1], [], [], [0, 0, 0]),
            ([2, 3, 1], [1, 2], [3, 4], [3, 4, 0]),  # the last one had no draft
            ([3, 1], [2], [4], [4, 0]),
            ([3, 1, 2], [2, 0, 2], [4, 0, 4], [4, 0, 4]),  # told of every pass; an end was drafted
            ([3, 2], [2, 4], [4, 4], [4, 4]),  # the last one ends at the cap
            ([3, 1], [2, 4], [4, 4], [4, 4]),
            ([], [], [], []),
        ],
    )
    def test_they_find_their_passes(self, sizes, accepted, drafted, expected):
        passes = _counted(events_of(sizes), accepted, drafted)
        assert [one.drafted for one in passes] == expected
        assert [len(one.tokens) for one in passes] == sizes

    @pytest.mark.parametrize(
        ("sizes", "accepted", "expected"),
        [
            ([5], [2, 1], [(3, 4), (2, 4)]),
            ([4, 3], [1, 2], [(1, 0), (1, 0), (2, 4), (3, 4)]),
            ([2, 5], [0, 2, 1], [(1, 0), (1, 4), (3, 4), (2, 4)]),
            ([3, 1, 1, 1], [0, 0, 0, 0], [(1, 0)] * 2 + [(1, 4)] * 4),
            ([4, 3], [3, 0, 4], [(4, 4), (1, 4), (2, 4)]),  # the last one ends at the cap
            ([3, 1], [], [(1, 0)] * 4),
        ],
    )
    def test_passes_that_came_together_are_told_apart(self, sizes, accepted, expected):
        events = events_of(sizes)
        passes = _counted(events, accepted, [4] * len(accepted))
        assert [(len(one.tokens), one.drafted) for one in passes] == expected
        tokens = [token for one in events for token in one.tokens]
        assert [token for one in passes for token in one.tokens] == tokens
        assert {one.at for one in passes} == {one.at for one in events}

    @pytest.mark.parametrize(("sizes", "accepted"), [([1, 1], [2]), ([2, 1], [2, 0]), ([1], [0, 0])])
    def test_counts_that_fit_no_tokens_are_an_error(self, sizes, accepted):
        with pytest.raises(EngineError, match="said to be accepted"):
            _counted(events_of([*sizes, 1]), [*accepted, 0], [3] * (len(accepted) + 1))


def events_of(sizes: list[int]) -> list[TargetPass]:
    """Events of so many tokens, each of which is another one."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [TargetPass(end / 8, [*range(end - size, end)], None) for end, size in zip(ends, sizes)]


class TestTokensLeftOut:
    """llama.cpp sends no event for a token that ends inside a character, and its counts go on."""

    def test_they_are_asked_for_without_a_stream(self):
        stub = Stub(counting, drafts=True, fault="splits")
        with serving(stub) as [url]:
            reply = DIALECTS["llama_cpp"](url, request(), STOPS, PATIENT)
            assert [body["stream"] for body in stub.bodies] == [True] and reply.tokens != counting(
                PROMPT, NEW
            )
            reply.complete()
        assert reply.tokens == counting(PROMPT, NEW) and reply.complete is None
        assert [body["stream"] for body in stub.bodies] == [True, False]
        first, *others = reply.passes
        assert first.tokens == reply.tokens[:1] and len(others) == 7
        assert sum(one.drafted for one in others) == 21 and sum(one.accepted for one in others) == 8

    def test_a_plain_answer_has_a_pass_for_each(self):
        with serving(Stub(counting, fault="splits")) as [url]:
            reply = DIALECTS["llama_cpp"](url, request(), STOPS, PATIENT, True)
            reply.complete()
        assert reply.tokens == counting(PROMPT, NEW) and len(reply.passes) == NEW
        assert [place for place, top in enumerate(reply.tops) if not top] == [*SPLIT]

    @pytest.mark.parametrize("at_once", [1, 2])
    def test_the_time_of_asking_again_is_no_time_of_the_answer(self, pair, monkeypatch, at_once):
        def slow(url, path, body, timeout):
            if not body["stream"]:
                time.sleep(0.3)
            yield from real(url, path, body, timeout)

        real = client.events
        stub = Stub(counting, fault="splits")
        with serving(stub, Stub(counting, drafts=True)) as urls:
            engine = engine_of(pair, urls, "llama_cpp")
            engine.batch_size = at_once
            engine.open([request()])
            monkeypatch.setattr(dialects, "events", slow)
            del stub.bodies[:]
            answers = exhaust(engine.plain([request()] * at_once))
        assert sum(answer.seconds for answer in answers) < 0.3
        assert [answer.tokens for answer in answers] == [counting(PROMPT, NEW)] * at_once
        streamed = [body["stream"] for body in stub.bodies]
        assert streamed == [True] * at_once + [False] * at_once, (
            "no answer is asked for while another is streamed"
        )

    def test_another_answer_without_a_stream_costs_its_question_alone(self):
        with (
            serving(Stub(counting, fault="wavers")) as [url],
            pytest.raises(UserError, match="without a stream its answer differs"),
        ):
            DIALECTS["llama_cpp"](url, request(), STOPS, PATIENT).complete()


class TestVllm:
    """What vLLM alone says."""

    def test_totals_are_no_counts_of_passes(self):
        with serving(Stub(counting, drafts=True, fault="sums")) as [url]:
            reply = DIALECTS["openai"](url, request(), STOPS, PATIENT)
        assert [(len(one.tokens), one.drafted) for one in reply.passes[1:]] == [
            (size, None) for size in (3, 1, 4, 2, 3, 1, 1)
        ]

    def test_an_answer_that_is_given_up_is_an_error(self):
        with (
            serving(Stub(counting, fault="aborts")) as [url],
            pytest.raises(EngineError, match="ended the answer: abort"),
        ):
            DIALECTS["openai"](url, request(), STOPS, PATIENT)

    def test_an_error_that_is_null_is_none(self):
        assert client._event('{"error": null}') == {"error": None}

    def test_passes_that_came_together_are_those_that_it_counts(self):
        with serving(Stub(counting, drafts=True, fault="joins")) as [url]:
            reply = DIALECTS["openai"](url, request(), STOPS, PATIENT)
        assert reply.tokens == counting(PROMPT, NEW)
        assert [len(one.tokens) for one in reply.passes] == [1, 3, 1, 4, 2, 3, 1, 1]
        assert [one.accepted for one in reply.passes[1:]] == [2, 0, 3, 1, 2, 0, 0]


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
        stubs[arm].fault, stubs[arm].after = "remembers", 2
        with (
            serving(*stubs.values()) as urls,
            pytest.raises(UserError, match=f"the {arm} server took 4 prompt tokens from its cache"),
        ):
            engine_of(pair, urls, dialect).open([request()])

    @pytest.mark.parametrize("at_once", [1, 2])
    def test_a_prefix_cache_that_timed_answers_show_is_named_once(self, pair, dialect, at_once):
        stub = Stub(counting, fault="remembers", after=3)
        with serving(stub, Stub(counting, drafts=True)) as urls:
            engine = engine_of(pair, urls, dialect)
            engine.batch_size = at_once
            engine.open([request()])
            exhaust(engine.plain([request()] * 2))
        [fault] = engine.faults
        assert fault.startswith("plain: it remembers prompts")

    def test_an_engine_that_contradicts_itself_is_named(self, pair, dialect):
        stub = Stub(counting, fault="breaks", after=2)
        with serving(stub, Stub(counting, drafts=True)) as urls:
            engine = engine_of(pair, urls, dialect)
            engine.open([request()])
        assert any("differ" in fault for fault in engine.faults)

    def test_an_engine_that_remembers_answers_is_named(self, pair, dialect):
        """Measured again, it would repeat what it said."""
        learns = Stub(counting, drafts=True, fault="learns", after=2)
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


def test_what_only_one_dialect_tells(pair):
    with (
        serving(Stub(counting), Stub(counting, drafts=True, fault="swallows")) as urls,
        pytest.raises(UserError, match="temperature=0.8"),
    ):
        engine_of(pair, urls, "llama_cpp").open([request()])


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
            with pytest.raises(JobError, match="4 of 7 passes of the plain server gave several tokens"):
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


class TestSeveralAtOnce:
    """A busy server sends the tokens of several passes in one event, where it did not in the handshake."""

    def answers(self, pair, stub: Stub, arm: str):
        """Two answers of an arm whose server is the stub."""
        stubs = {PLAIN: Stub(counting), SPECULATIVE: Stub(counting, drafts=True)} | {arm: stub}
        with serving(*stubs.values()) as urls:
            engine = engine_of(pair, urls, "openai")
            engine.batch_size = 2
            engine.open([request()])
            answers = exhaust(getattr(engine, arm)([request(), request()]))
            assert engine.faults == []
        assert [answer.tokens for answer in answers] == [counting(PROMPT, NEW)] * 2
        return answers

    def test_the_plain_server_gives_a_token_a_pass(self, pair):
        for answer in self.answers(pair, Stub(counting, fault="joins", after=3), PLAIN):
            assert [(step.emitted, step.drafted) for step in answer.steps] == [(1, 0)] * 15

    def test_counts_tell_the_passes_of_a_speculative_one(self, pair):
        for answer in self.answers(pair, Stub(counting, drafts=True, fault="joins", after=3), SPECULATIVE):
            assert [step.accepted for step in answer.steps] == [2, 0, 3, 1, 2, 0, 0]
            assert [step.emitted for step in answer.steps] == [3, 1, 4, 2, 3, 1, 1]

    def test_without_counts_no_pass_is_known(self, pair):
        for answer in self.answers(pair, Stub(counting, drafts=True, fault="uncounted"), SPECULATIVE):
            assert answer.steps == [] and answer.seconds > 0


# -- faults in the middle of a run


@pytest.mark.parametrize("fault", ["refuses", "hangs", "cuts", "half"])
def test_a_server_of_somebody_else_that_fails_ends_the_run(pair, fault):
    stub = Stub(counting, drafts=True, fault=fault, after=4)
    with serving(Stub(counting), stub) as urls:
        engine = engine_of(pair, urls, "llama_cpp", SILENT)
        engine.open([request()])
        exhaust(engine.speculative([request()]))
        with pytest.raises(JobError, match="speculative server failed"):
            exhaust(engine.speculative([request()]))
    assert len(engine.faults) == 1


@pytest.mark.process
@pytest.mark.parametrize("fault", ["dies", "hangs", "refuses"])
def test_a_server_of_ours_that_fails_is_started_again_once(pair, fault):
    engine = process_engine(pair, {"fault": fault, "after": 4}, SILENT)
    try:
        engine.open([request()])
        answers = [exhaust(engine.speculative([request()]))[0].tokens for _ in range(2)]
        assert answers == [counting(PROMPT, NEW)] * 2
        assert engine.servers[SPECULATIVE].starts == 2 and engine.servers[PLAIN].starts == 1
        [told] = engine.faults
        assert told.startswith("speculative: ")
    finally:
        engine.close()


@pytest.mark.process
def test_a_server_that_fails_at_once_again_costs_its_question(pair, tmp_path):
    engine = process_engine(pair, {"fault": "refuses", "after": 3, "marker": str(tmp_path / "started")})
    try:
        engine.open([request()])
        with pytest.raises(UserError, match="failed twice: .*500") as raised:
            exhaust(engine.speculative([request()]))
        assert not isinstance(raised.value, JobError)  # other questions may fare better
        assert len(engine.faults) == 2
    finally:
        engine.close()


@pytest.mark.process
def test_a_server_that_does_not_start_says_why(pair):
    with pytest.raises(UserError, match=r"ended with 4: no such model"):
        process_engine(pair, {"fails": True}).open([request()])
    with pytest.raises(UserError, match=r"ended with SIGFPE: it printed nothing"):
        process_engine(pair, {"crashes": True}).open([request()])
    slow = process_engine(pair, loads=30.0)
    slow.servers[PLAIN].seconds = 0.5
    with pytest.raises(UserError, match="not ready after"):
        slow.open([request()])


@pytest.mark.process
def test_servers_are_waited_for_and_none_is_left_behind(pair):
    engine = process_engine(pair, {"loads": 0.5, "helper": True})
    engine.open([request()])
    started = [one for server in engine.servers.values() for one in family(server._process.pid)]
    assert len(started) == 5  # a supervisor and a server each, and a helper
    assert all(alive(one) for one in started)
    engine.close()
    assert not any(alive(one) for one in started)
    engine.close()  # once more does no harm


def family(number: int) -> list[psutil.Process]:
    """A process and all that it has started."""
    parent = psutil.Process(number)
    return [parent, *parent.children(recursive=True)]


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.process
def test_a_killed_run_leaves_no_server(tmp_path):
    words = json.dumps({"helper": True})
    script = (
        "import sys, time; from specbench.engines.server import Server\n"
        f"s = Server('plain', '', lambda port: [sys.executable, {str(SCRIPT)!r}, str(port), {words!r}])\n"
        "s.start(); s.wait(); print(s._process.pid, flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    started = family(int(parent.stdout.readline()))
    assert len(started) == 3
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_for(lambda: not any(map(alive, started)))


def test_a_restart_is_no_time_of_a_batch_and_costs_one_of_the_restarts(pair, monkeypatch):
    def failing(engine, name, request, several):
        asked.append(name)
        if len(asked) == 2:  # the second of two, while the first is answered
            engine.servers[name].starts += 1
            time.sleep(0.3)
        return real(engine, name, request, several)

    asked, real = [], module.ServedEngine._answer
    with serving(Stub(counting), Stub(counting, drafts=True)) as urls:
        engine = engine_of(pair, urls, "llama_cpp")
        engine.batch_size = 2
        engine.open([request()])
        monkeypatch.setattr(module.ServedEngine, "_answer", failing)
        answers = exhaust(engine.speculative([request(), request()]))
    assert len(asked) == 4 and sum(answer.seconds for answer in answers) < 0.3


def test_seconds_of_a_batch_are_shared_by_tokens(pair):
    """A question whose answers differ in length has no speedup, and takes its share of the time with it."""
    with serving(Stub(counting), Stub(counting, drafts=True)) as urls:
        engine = engine_of(pair, urls, "llama_cpp")
        engine.batch_size = 2
        engine.open([request()])
        decoding = request().decoding
        short = replace(request(), decoding=replace(decoding, max_new_tokens=decoding.max_new_tokens // 2))
        long, half = exhaust(engine.speculative([request(), short]))
    assert long.seconds / half.seconds == pytest.approx(len(long.tokens) / len(half.tokens))


@pytest.mark.process
def test_a_process_that_ends_while_cores_are_given_is_left_alone(monkeypatch):
    """As those that an engine compiles with."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    of_ended = psutil.Process(ended.pid)
    ended.wait()
    running = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    core = min(os.sched_getaffinity(0))
    monkeypatch.setattr(psutil.Process, "children", lambda *_, **__: [of_ended])
    try:
        _pin(running, [core])
        assert os.sched_getaffinity(running.pid) == {core}
    finally:
        running.kill()
        running.wait()


def test_a_url_that_is_a_number_is_one_line():
    with pytest.raises(UserError, match="set engine.plain_url to the plain server"):
        OpenAI.check({"dialect": "openai", "plain_url": 8000, "speculative_url": 8001}, {"name": "sps"}, 1)


def test_restarts_have_an_end(pair, monkeypatch):
    monkeypatch.setattr(module, "RESTARTS", 0)
    stub = Stub(counting, drafts=True, fault="refuses", after=4)
    with serving(Stub(counting), stub) as urls:
        engine = engine_of(pair, urls, "llama_cpp")
        engine.open([request()])
        engine.servers[SPECULATIVE].command = lambda _port: []
        engine.servers[SPECULATIVE].starts = 1
        exhaust(engine.speculative([request()]))
        with pytest.raises(JobError):
            exhaust(engine.speculative([request()]))


def test_a_server_waits_as_its_own_engine_does(monkeypatch):
    """How our threads wait is not handed on; what the user has set is."""
    for name, value in WAITING.items():
        monkeypatch.setenv(name, value)
    assert not WAITING.keys() & own_environment().keys()
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert own_environment()["OMP_WAIT_POLICY"] == "ACTIVE"


@pytest.mark.process
def test_an_arm_starts_when_the_servers_are_idle(pair, monkeypatch):
    """One of vLLM spins for a second after an answer."""
    spin = "import time; begun = time.monotonic()\nwhile time.monotonic() - begun < 1: pass\ntime.sleep(60)"
    servers = {
        name: Server(name, "", lambda _: [sys.executable, "-c", spin]) for name in (PLAIN, SPECULATIVE)
    }
    engine = ServedEngine(pair, servers, "openai", SILENT)
    try:
        for server in servers.values():
            server.start()
        wait_for(lambda: all(server.cpu_seconds() > 0.2 for server in servers.values()))
        engine.settle()
        used = [server.cpu_seconds() for server in servers.values()]
        time.sleep(0.2)
        assert all(server.cpu_seconds() - before < 0.05 for server, before in zip(servers.values(), used))
        assert min(used) > 0.4
    finally:
        engine.close()
    assert [server.cpu_seconds() for server in servers.values()] == [0.0, 0.0]

    waits = []
    monkeypatch.setattr(ServedEngine, "settle", lambda _: waits.append(True))
    with serving(Stub(counting), Stub(counting, drafts=True)) as urls:
        engine = engine_of(pair, urls, "llama_cpp")
        for arm, count in ((engine.plain, 2), (engine.speculative, 2), (engine.settled(exhausted), 1)):
            exhaust(arm([request(), request()]))
            assert len(waits) == count
            waits.clear()


def exhausted(requests: list[Request]):
    """An arm that answers nothing."""
    yield from ()
    return []


def test_a_request_that_is_refused_costs_its_question_alone(pair):
    """A server that answers 400 is in good order: no restart mends that, and the run goes on."""
    stub = Stub(counting, drafts=True, fault="rejects requests", after=3, times=1)
    with serving(Stub(counting), stub) as urls:
        engine = engine_of(pair, urls, "openai")
        engine.open([request()])
        with pytest.raises(UserError, match="answers 400") as raised:
            exhaust(engine.speculative([request()]))
        assert not isinstance(raised.value, JobError) and engine.faults == []
        exhaust(engine.speculative([request()]))


def test_servers_of_somebody_else_on_this_machine_are_known_by_their_ports(pair):
    urls = ["http://localhost:8123", "http://10.0.0.9:8124"]
    assert engine_of(pair, urls, "openai").ports == {8123}
    assert process_engine(pair).ports == set() and process_engine(pair).is_ours
    assert not engine_of(pair, urls, "openai").is_ours


def test_one_thread_of_each_core_is_taken_first(monkeypatch, tmp_path):
    """Where threads of a core are numbered one after the other the last ones would be half of the cores."""
    real = module_server.Path

    def siblings(text: str):
        core = re.search(r"cpu(\d+)/", text)
        path = tmp_path / f"{core[1]}"
        path.write_text(f"{int(core[1]) // 2 * 2}-{int(core[1]) // 2 * 2 + 1}\n")
        return real(path)

    monkeypatch.setattr(module_server, "own_cores", lambda: set(range(8)))
    monkeypatch.setattr(module_server, "Path", siblings)
    assert [module_server.shared_cores(n) for n in (1, 2, 4)] == [[7], [5, 7], [1, 3, 5, 7]]
    assert module_server.shared_cores(5) == [1, 3, 5, 6, 7]
