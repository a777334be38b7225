"""What servers say becomes rounds: events, counts, and tokens that a stream leaves out."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from specbench.decoding.engine import exhaust
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import Request
from specbench.engines import client, dialects
from specbench.engines.client import EngineError, RefusedError
from specbench.engines.dialects import DIALECTS, Reply, TargetPass, _counted
from specbench.engines.served import PLAIN, SPECULATIVE
from specbench.system.errors import UserError
from tests.support.engine_stub import SPLIT, Stub, counting, serving
from tests.support.served import (
    NEW,
    PATIENT,
    PROMPT,
    SILENT,
    STOPS,
    engine_of,
    request,
    stopping,
)


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
            sampled = Request(PROMPT, SamplingParams(5, 0.7), seed=2**40 + 9)
            DIALECTS[dialect](url, sampled, frozenset({9, 2}), PATIENT)
        [body] = stub.bodies
        assert body.get("stop_token_ids") == ([2, 9] if dialect == "openai" else None)
        assert body["prompt"] == PROMPT and body["temperature"] == 0.7 and body["seed"] == 9
        assert 5 in (body.get("n_predict"), body.get("max_tokens"))
        # From the whole distribution, as it is, and no prompt is remembered.
        neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        neutral |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
        whole = {"llama_cpp": {"samplers": ["temperature"], "cache_prompt": False}, "openai": neutral}
        assert {key: body.get(key) for key in whole[dialect]} == whole[dialect]

    def test_it_asks_for_the_tokens_that_are_left_in(self, dialect):
        stub = Stub(counting)
        with serving(stub) as [url]:
            for cut in ({"top_k": 20, "top_p": 0.9}, {"top_p": 0.9}):
                DIALECTS[dialect](url, Request(PROMPT, SamplingParams(5, 0.7, **cut), 9), STOPS, PATIENT)
        both, one = stub.bodies
        assert (both["top_k"], both["top_p"], one["top_p"]) == (20, 0.9, 0.9)
        assert one.get("top_k") == (-1 if dialect == "openai" else None)
        order = ["temperature", "top_k", "top_p"]  # as in vLLM, which knows no other
        assert both.get("samplers") == (order if dialect == "llama_cpp" else None)

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


@pytest.mark.parametrize("at_once", [1, 2])
def test_an_answer_without_a_draft_has_counts(pair, at_once):
    """vLLM leaves out lists that are empty."""
    stub = Stub(counting, drafts=True, fault="is plain", after=2)
    with serving(Stub(counting), stub) as urls:
        engine = engine_of(pair, urls, "openai")
        engine.batch_size = at_once
        engine.open([request()])
        answers = exhaust(engine.speculative([request()] * at_once))
    assert len(answers) == at_once
    for answer in answers:
        assert [(step.emitted, step.drafted, step.accepted) for step in answer.steps] == [(1, 0, 0)] * (
            NEW - 1
        )


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
        for answer in self.answers(pair, Stub(counting, fault="joins", after=2), PLAIN):
            assert [(step.emitted, step.drafted) for step in answer.steps] == [(1, 0)] * 15

    def test_counts_tell_the_passes_of_a_speculative_one(self, pair):
        for answer in self.answers(pair, Stub(counting, drafts=True, fault="joins", after=2), SPECULATIVE):
            assert [step.accepted for step in answer.steps] == [2, 0, 3, 1, 2, 0, 0]
            assert [step.emitted for step in answer.steps] == [3, 1, 4, 2, 3, 1, 1]

    def test_without_counts_no_pass_is_known(self, pair):
        for answer in self.answers(pair, Stub(counting, drafts=True, fault="uncounted"), SPECULATIVE):
            assert answer.steps == [] and answer.seconds > 0


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
