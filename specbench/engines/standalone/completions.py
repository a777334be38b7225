"""An HTTP server of completions as vLLM extends OpenAI's: token ids in, an event with those of each target pass out.

Any decoder can be used. Requests are answered one after the other, by the thread that calls `run`: a decoder's threads
and caches then belong to one thread, and two answers never share the processor.
"""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue
from typing import Any

HOST = "127.0.0.1"
PATH = "/v1/completions"
OK, BAD_REQUEST, NOT_FOUND, TOO_LARGE, FAILED = 200, 400, 404, 413, 500
LARGEST_BODY = 64 * 2**20  # bytes: some 8 million token ids
# Accepted and ignored: clients that request token ids set them; log-probabilities are not returned.
IGNORED = ("model", "stream_options", "return_token_ids", "return_tokens_as_token_ids", "logprobs")
# Accepted where they change nothing.
NEUTRAL = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}

# Accepts the tokens of one target pass, the number of draft tokens that it verified, and the number of accepted ones;
# None: not known.
Send = Callable[[list[int], int | None, int | None], None]


class RequestError(Exception):
    """The reason why a request is not answered, in one line."""


class HungUpError(Exception):
    """The client has closed the connection."""


@dataclass(frozen=True)
class Completion:
    """A request for a completion.

    Attributes:
        prompt: token ids.
        max_tokens: new tokens at most.
        temperature: 0 is greedy.
        seed: of the sampling.
        stop_token_ids: that end the answer, beside the model's own.
        stream: whether every pass is sent as it comes.
        top_k: only this many of the likeliest tokens are drawn; 0: all.
        top_p: of those, the likeliest ones that together have this probability; 1: all.
    """

    prompt: list[int]
    max_tokens: int = 16
    temperature: float = 0.0
    seed: int = 0
    stop_token_ids: list[int] = field(default_factory=list)
    stream: bool = False
    top_k: int = 0
    top_p: float = 1.0

    @classmethod
    def of(cls, body: Any) -> Completion:
        """Parses a request body. Raises RequestError for a field that is missing, unknown or of another type."""
        if not isinstance(body, dict):
            raise RequestError("the request is not a JSON object")
        fields = {name: value for name, value in body.items() if name not in IGNORED and value is not None}
        fields = {name: value for name, value in fields.items() if NEUTRAL.get(name) != value}
        kinds: dict[str, tuple[type, ...]] = {
            "prompt": (list,),
            "max_tokens": (int,),
            "temperature": (int, float),
            "top_k": (int,),
            "top_p": (int, float),
            "seed": (int,),
            "stop_token_ids": (list,),
            "stream": (bool,),
        }
        for name, value in fields.items():
            if name not in kinds:
                raise RequestError(f"'{name}' is not known here: leave it out")
            if not isinstance(value, kinds[name]) or (isinstance(value, bool) and name != "stream"):
                raise RequestError(f"'{name}' has a value of the wrong type")
        for name in ("prompt", "stop_token_ids"):
            if not all(type(token) is int and token >= 0 for token in fields.get(name, ())):
                raise RequestError(f"'{name}' must be a list of token ids")
        if not fields.get("prompt"):
            raise RequestError("'prompt' must be a list of at least one token id")
        if fields.get("max_tokens", 1) < 1 or fields.get("temperature", 0) < 0:
            raise RequestError("'max_tokens' must be at least 1, and 'temperature' at least 0")
        if fields.get("top_k", 0) < 0 or not 0 < fields.get("top_p", 1) <= 1:
            raise RequestError("'top_k' must be at least 0 (0 or -1: all), and 'top_p' above 0, up to 1")
        return cls(**fields)


# Decodes one request, hands every pass to the second argument, and returns "stop" or "length".
Decode = Callable[[Completion, Send], str]


class CompletionServer(ThreadingHTTPServer):
    """Accepts connections once made, and answers them while `run` runs. Use it as a context manager.

    Args:
        port: to listen at; 0: any that is free.
        poll_seconds: most seconds that ending it takes.

    Attributes:
        url: that it is reached at.
    """

    daemon_threads = True

    def __init__(self, port: int, poll_seconds: float = 0.5):
        super().__init__((HOST, port), _Handler)
        self.poll_seconds = poll_seconds
        self.url = f"http://{HOST}:{self.server_address[1]}"
        self.waiting: SimpleQueue[_Handler] = SimpleQueue()

    def run(self, decode: Decode) -> None:
        """Answers requests, one after the other, until it is interrupted."""
        threading.Thread(target=self.serve_forever, args=(self.poll_seconds,), daemon=True).start()
        try:
            while True:
                self.waiting.get().answer(decode)
        finally:
            self.shutdown()


class _Handler(BaseHTTPRequestHandler):
    """One request: parsed in a thread of its own, which then waits until it is answered."""

    server: CompletionServer
    disable_nagle_algorithm = True  # an event is sent at once

    def log_message(self, *_: object) -> None:
        """Prints nothing."""

    def handle_one_request(self) -> None:
        """Reads a request and answers it."""
        with suppress(HungUpError):
            super().handle_one_request()

    def do_GET(self) -> None:
        """`/health` reports that the server is ready; `/v1/models` is what clients of OpenAI's request first."""
        if self.path == "/health":
            self._answer(OK, {})
        elif self.path == "/v1/models":
            self._answer(OK, {"object": "list", "data": [{"id": "model", "object": "model"}]})
        else:
            self._refuse(NOT_FOUND, f"there is nothing at {self.path}")

    def do_POST(self) -> None:
        """A completion."""
        if self.path != PATH:
            self._refuse(NOT_FOUND, f"there is nothing at {self.path}: ask {PATH}")
            return
        try:
            length = int(self.headers.get("Content-Length") or 0)
            if not 0 <= length <= LARGEST_BODY:
                self._refuse(TOO_LARGE, f"a request has at most {LARGEST_BODY} bytes")
                return
            self.completion = Completion.of(json.loads(self.rfile.read(length)))
        except (ValueError, RequestError) as error:
            self._refuse(BAD_REQUEST, str(error))
            return
        self.answered, self.begun = threading.Event(), False
        self.server.waiting.put(self)
        self.answered.wait()

    def answer(self, decode: Decode) -> None:
        """Decodes in the caller's thread and sends the tokens."""
        tokens: list[int] = []
        passes: list[tuple[int | None, int | None]] = []

        def send(new: list[int], drafted: int | None, accepted: int | None) -> None:
            if self.completion.stream:
                prompt = {} if passes else {"prompt_token_ids": self.completion.prompt}
                self._event({"choices": [_choice(new) | prompt]})
            passes.append((drafted, accepted))
            tokens.extend(new)

        try:
            finish = decode(self.completion, send)
            end = _usage(self.completion.prompt, tokens, passes)
            if self.completion.stream:
                self._event({"choices": [_choice([], finish)]})
                self._event({"choices": []} | end)
                with self._reaching_the_client():
                    self.wfile.write(b"data: [DONE]\n\n")
            else:
                prompt = {"prompt_token_ids": self.completion.prompt}
                self._answer(OK, {"choices": [_choice(tokens, finish) | prompt]} | end)
        except HungUpError:
            pass
        except RequestError as error:
            self._fail(BAD_REQUEST, str(error))
        except Exception as error:  # noqa: BLE001 - reported to the client, and printed; the next request may work
            traceback.print_exc()
            self._fail(FAILED, f"{type(error).__name__} {error}")
        finally:
            self.answered.set()

    def _event(self, content: dict[str, Any]) -> None:
        with self._reaching_the_client():
            if not self.begun:
                self.begun = True
                self.send_response(OK)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
            self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())

    def _fail(self, code: int, message: str) -> None:
        """Reports an error: as the answer, or as an event if the answer has begun."""
        with suppress(HungUpError):
            if self.begun:
                self._event({"error": {"message": message}})
            else:
                self._refuse(code, message)

    def _refuse(self, code: int, message: str) -> None:
        self._answer(code, {"error": {"message": message}})

    def _answer(self, code: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        with self._reaching_the_client():
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    @contextmanager
    def _reaching_the_client(self) -> Iterator[None]:
        """Raises HungUpError if the client is gone, unlike for a broken connection of the decoder's own."""
        try:
            yield
        except ConnectionError as error:
            raise HungUpError from error


def _choice(tokens: list[int], finish: str | None = None) -> dict[str, Any]:
    return {"index": 0, "text": "", "token_ids": tokens, "finish_reason": finish}


def _usage(
    prompt: list[int], tokens: list[int], passes: list[tuple[int | None, int | None]]
) -> dict[str, Any]:
    """The last event: numbers of tokens, and the counts of every pass but the prompt's, as vLLM names them."""
    usage = {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(tokens),
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    drafted, accepted = ([counts[i] for counts in passes[1:]] for i in (0, 1))
    if None in drafted:
        return {"usage": usage}
    counts = {"per_step_accepted": accepted, "per_step_drafted": drafted}
    return {"usage": usage, "metrics": {"speculative_decoding": counts}}
