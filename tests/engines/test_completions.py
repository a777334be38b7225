"""The server of completions: what is asked in a server's own words is answered pass by pass, by one thread."""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest

from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import Request
from specbench.engines.client import EngineError, RefusedError, is_ready
from specbench.engines.dialects import openai
from specbench.engines.own import OwnDecoder, Streamed
from specbench.engines.standalone.completions import (
    HOST,
    PATH,
    Completion,
    CompletionServer,
    Decode,
    HungUpError,
    RequestError,
    Send,
)
from tests.support.decoding import random_pair
from tests.support.drafters import ModelChain

PROMPT = [3, 9, 27, 11]
# The tokens of each pass, and how many draft tokens it verified and accepted: in the last one the end was drafted, too.
PASSES = [([5], 0, 0), ([6, 7, 8], 4, 2), ([9], 4, 0), ([10], 0, 0), ([11, 2], 3, 2)]
WAIT = 10.0  # s


@contextmanager
def serving(decode: Decode) -> Iterator[str]:
    """The URL at which a decoder is served by a thread of this process."""
    with CompletionServer(0, poll_seconds=0.01) as server:

        def run() -> None:
            with suppress(SystemExit):
                server.run(decode)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield server.url
        finally:
            server.waiting.put(SimpleNamespace(answer=sys.exit))
            thread.join(WAIT)
        assert not thread.is_alive()


def recited(completion: Completion, send: Send) -> str:
    for one in PASSES:
        send(*one)
    return "stop"


def posted(url: str, body: object, path: str = PATH) -> tuple[int, dict]:
    """Status and content of an answer that is no stream."""
    connection = http.client.HTTPConnection(HOST, int(url.rpartition(":")[2]), timeout=WAIT)
    try:
        connection.request("POST", path, body if isinstance(body, str) else json.dumps(body))
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def asked(url: str, n: int = 16, **settings):
    return openai(url, Request(PROMPT, SamplingParams(n, **settings), seed=7), frozenset({2}), WAIT)


def test_a_stream_holds_every_pass_and_what_it_verified():
    with serving(recited) as url:
        assert is_ready(url, "/health")
        reply = asked(url)
    assert [(one.tokens, one.drafted, one.accepted) for one in reply.passes[1:]] == PASSES[1:]
    assert reply.passes[0].tokens == [5] and reply.prompt_tokens == 4 and reply.cached_tokens == 0


def test_counts_that_are_not_known_are_not_told():
    def uncounted(completion: Completion, send: Send) -> str:
        for tokens, *_ in PASSES:
            send(tokens, None, None)
        return "stop"

    with serving(uncounted) as url:
        assert [one.drafted for one in asked(url).passes] == [None] * 5


def test_an_answer_at_once():
    with serving(recited) as url:
        status, content = posted(url, {"prompt": PROMPT, "max_tokens": 9})
    [choice] = content["choices"]
    assert status == 200 and choice["token_ids"] == [5, 6, 7, 8, 9, 10, 11, 2]
    assert choice["finish_reason"] == "stop" and choice["prompt_token_ids"] == PROMPT
    assert content["usage"]["completion_tokens"] == 8
    assert content["metrics"]["speculative_decoding"]["per_step_accepted"] == [2, 0, 0, 2]


def test_what_is_asked_for_reaches_the_decoder():
    requests = []

    def noted(completion: Completion, send: Send) -> str:
        requests.append(completion)
        return recited(completion, send)

    with serving(noted) as url:
        asked(url, 5, temperature=0.7)
        posted(url, {"prompt": PROMPT, "seed": None, "model": "x"})
    assert requests == [
        Completion(PROMPT, 5, 0.7, seed=7, stop_token_ids=[2], stream=True),
        Completion(PROMPT, 16, 0.0, seed=0, stop_token_ids=[], stream=False),
    ]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("{", "Expecting"),
        ([PROMPT], "not a JSON object"),
        ({}, "'prompt'"),
        ({"prompt": "text"}, "'prompt'"),
        ({"prompt": []}, "at least one token id"),
        ({"prompt": [1, -2]}, "token ids"),
        ({"prompt": [1, True]}, "token ids"),
        ({"prompt": [1], "max_tokens": 0}, "at least 1"),
        ({"prompt": [1], "max_tokens": True}, "'max_tokens'"),
        ({"prompt": [1], "temperature": -1}, "at least 0"),
        ({"prompt": [1], "top_k": -2}, "'top_k' must be"),
        ({"prompt": [1], "top_p": 0.0}, "above 0"),
        ({"prompt": [1], "min_p": 0.1}, "'min_p' is not known"),
        ({"prompt": [1], "ignore_eos": True}, "'ignore_eos' is not known"),
        ({"prompt": [1], "stream": 1}, "'stream'"),
    ],
)
def test_bad_requests_are_refused_in_one_line(body, said):
    with serving(recited) as url:
        status, content = posted(url, body)
        assert posted(url, {"prompt": PROMPT})[0] == 200  # and the next one is answered
    assert status == 400 and said in content["error"]["message"] and "\n" not in content["error"]["message"]


@pytest.mark.parametrize(("length", "status"), [("-1", 413), (str(2**40), 413), ("many", 400)])
def test_a_request_that_announces_no_sensible_size_is_refused_at_once(length, status):
    with serving(recited) as url:
        connection = http.client.HTTPConnection(HOST, int(url.rpartition(":")[2]), timeout=WAIT)
        connection.request("POST", PATH, b"", {"Content-Length": length})
        assert connection.getresponse().status == status
        connection.close()
        assert posted(url, {"prompt": PROMPT})[0] == 200


def test_nothing_else_is_served():
    with serving(recited) as url:
        assert posted(url, {"prompt": PROMPT}, "/v1/chat/completions")[0] == 404
        assert not is_ready(url, "/metrics")
        assert is_ready(url, "/v1/models")


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(
    "error", [RequestError("too long"), ValueError("too long"), BrokenPipeError("too long")]
)
def test_what_goes_wrong_is_told_and_the_next_request_is_answered(error, after):
    broken = [True]

    def breaking(completion: Completion, send: Send) -> str:
        if not broken:
            return recited(completion, send)
        broken.clear()
        for one in PASSES[:after]:
            send(*one)
        raise error

    with serving(breaking) as url:
        with pytest.raises((EngineError, RefusedError), match="too long"):
            asked(url)
        assert len(asked(url).tokens) == 8


def test_a_client_that_hangs_up_costs_its_own_answer_alone():
    met = []

    def slow(completion: Completion, send: Send) -> str:
        if met:
            return recited(completion, send)
        try:
            while True:
                send([5], 0, 0)
                time.sleep(0.01)
        except HungUpError as error:
            met.append(error)
            raise

    with serving(slow) as url:
        connection = http.client.HTTPConnection(HOST, int(url.rpartition(":")[2]), timeout=WAIT)
        connection.request("POST", PATH, json.dumps({"prompt": PROMPT, "stream": True}))
        response = connection.getresponse()
        response.readline()
        response.close()
        connection.close()
        assert len(asked(url).tokens) == 8
    assert met


def test_one_thread_answers_one_request_after_the_other():
    threads, running, most = set(), [], []

    def watched(completion: Completion, send: Send) -> str:
        threads.add(threading.get_ident())
        running.append(completion)
        most.append(len(running))
        finish = recited(completion, send)
        running.pop()
        return finish

    with serving(watched) as url, ThreadPoolExecutor(4) as pool:
        answers = [*pool.map(lambda _: asked(url).tokens, range(8))]
    assert len(threads) == 1 and most == [1] * 8
    assert all(len(answer) == 8 for answer in answers)


def own_decoder(pair, drafter: Drafter, verification: str = "token") -> OwnDecoder:
    scheduler = Streamed()
    engine = Engine(pair.staged, drafter, pair.stop_ids, scheduler, pair.context_length)
    return OwnDecoder(pair, engine.rounds, scheduler, verification)


class TestOwnDecoder:
    """This project's own decoding behind the server says what it says without."""

    @pytest.fixture(scope="class")
    def pair(self):
        return random_pair("llama")

    @pytest.mark.parametrize(
        "chosen", [{}, {"temperature": 0.8}, {"temperature": 0.8, "top_k": 9, "top_p": 0.5}], ids=str
    )
    @pytest.mark.parametrize("drafts", [pytest.param(False, marks=pytest.mark.slow), True])
    def test_passes_are_the_rounds_of_the_engine(self, pair, drafts, chosen):
        def drafter() -> Drafter:
            return ModelChain(pair.draft) if drafts else Drafter()

        decoding = SamplingParams(12, **chosen)
        alone = Engine(pair.staged, drafter(), pair.stop_ids, None, pair.context_length)
        with serving(own_decoder(pair, drafter())) as url:
            for prompt in (PROMPT, [7] * 30, [4]):
                [answer] = alone.generate([Request(prompt, decoding, 7)])
                reply = openai(url, Request(prompt, decoding, 7), pair.stop_ids, WAIT)
                assert reply.tokens == answer.tokens
                first, *others = reply.passes
                assert len(first.tokens) == 1
                steps = [(step.emitted, step.drafted, step.accepted) for step in answer.steps]
                assert [(len(one.tokens), one.drafted, one.accepted) for one in others] == steps

    def test_an_answer_ends_at_stop_tokens_of_its_own(self, pair):
        with serving(own_decoder(pair, Drafter())) as url:
            whole = posted(url, {"prompt": PROMPT, "max_tokens": 12})[1]["choices"][0]["token_ids"]
            stop = whole[4]
            cut = posted(url, {"prompt": PROMPT, "max_tokens": 12, "stop_token_ids": [stop]})[1]["choices"][0]
        assert cut["finish_reason"] == "stop" and cut["token_ids"] == whole[: whole.index(stop) + 1]

    @pytest.mark.parametrize(
        ("more", "said"),
        [
            ({"max_tokens": 10**6}, "context"),
            ({"prompt": [1, 10**6]}, "has token 1000000, but only"),
            ({"seed": 2**64}, "seed must be"),
            ({"seed": -1}, "seed must be"),
            ({"temperature": 0.5}, "for greedy decoding"),
        ],
    )
    def test_what_cannot_be_decoded_is_refused(self, pair, more, said):
        with serving(own_decoder(pair, Drafter(), "typical")) as url:
            status, content = posted(url, {"prompt": PROMPT} | more)
            assert status == 400 and said in content["error"]["message"]
            assert posted(url, {"prompt": PROMPT, "max_tokens": 2})[0] == 200
