"""A server that says given tokens as an engine would, and does wrong what it is told to."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle, pairwise

ACCEPTED = (2, 0, 3, 1)  # of each draft, over and over
DRAFTED = 3  # tokens of each draft
SPLIT = (0, 4, 6, 11)  # places of tokens that end inside a character
PINGS, PING_SECONDS = 40, 0.05


@dataclass
class Stub:
    """What a stub says.

    Attributes:
        answer: gives the tokens that follow a prompt, at most so many.
        drafts: whether it speculates.
        fault: what it does wrong: one of the keys of `FAULTS` below, or nothing.
        after: requests that it answers rightly before.
        times: requests of those that follow that it answers wrongly.
        asked: requests so far.
        at_once: requests that are answered now.
        most_at_once: the most that ever were.
    """

    answer: Callable[[list[int], int], list[int]]
    drafts: bool = False
    fault: str = ""
    after: int = 0
    times: int = 10**6
    asked: int = 0
    at_once: int = 0
    most_at_once: int = 0
    bodies: list[dict] = field(default_factory=list)

    def wrong(self) -> str:
        """The fault of the request that is answered now."""
        return self.fault if self.after < self.asked <= self.after + self.times else ""


# What a stub can do wrong.
FAULTS = {
    "refuses": "answers 500",
    "rejects requests": "answers 400",
    "hangs": "falls silent after the first event",
    "cuts": "ends the stream in the middle",
    "leaves": "does so, and is not ready any more",
    "half": "sends half an event",
    "tells": "sends an error as an event",
    "nothing": "says nothing",
    "text": "leaves the token ids out",
    "breaks": "says another token at place 5",
    "repeats": "says the token at place 5 twice",
    "goes on": "goes on after a stop token",
    "rejects": "drafts, and accepts nothing",
    "is plain": "does not draft",
    "learns": "accepts all that it drafts",
    "adds": "reads a token more than it was given",
    "remembers": "keeps the prompt of an earlier request",
    "swallows": "decodes at a temperature of its own",
    "narrows": "decodes with a top_p of its own",
    "uncounted": "does not say what it drafts",
    "sums": "says in total alone what it drafts",
    "joins": "sends two passes in one event",
    "pauses": "does so once",
    "splits": "sends no event for some tokens, as llama.cpp for those that end inside a character",
    "wavers": "does so too, and says another token at place 5 without a stream",
    "silent cache": "does not say what it keeps of prompts",
    "pings": "sends comments alone for two seconds",
    "aborts": "gives the answer up",
    "is full": "ends an answer after five tokens, for want of context",
    "dies": "ends its process",
}


def passes_of(stub: Stub, tokens: list[int], wrong: str) -> list[tuple[list[int], int]]:
    """The tokens of each pass, the prompt's first, and how many were drafted in it."""
    drafts = stub.drafts and wrong != "is plain"
    passes, left, accepted = (
        [(tokens[:1], 0)],
        tokens[1:],
        cycle((DRAFTED,) if wrong == "learns" else ACCEPTED),
    )
    while left:
        n = 1 + (next(accepted) if drafts and wrong != "rejects" else 0)
        passes.append((left[:n], DRAFTED if drafts else 0))
        left = left[n:]
    return passes


def spoiled(tokens: list[int], wrong: str) -> list[int]:
    """The tokens as a stub with a fault says them."""
    tokens = list(tokens)
    if wrong == "breaks" and len(tokens) > 5:
        tokens[5] += 1
    if wrong == "repeats" and len(tokens) > 5:
        tokens.insert(5, tokens[5])
    if wrong == "goes on":
        tokens += tokens[:2]
    if wrong == "is full":
        del tokens[5:]
    return [] if wrong == "nothing" else tokens


def llama_cpp_events(stub: Stub, body: dict, wrong: str) -> Iterator[dict]:
    """As llama.cpp: an event for each token, with counts so far; or, without a stream, all at once."""
    tokens = spoiled(stub.answer(body["prompt"], body["n_predict"]), wrong)
    settings = {name: body[name] for name in ("n_predict", "temperature", "top_k", "top_p") if name in body}
    if wrong == "swallows":
        settings["temperature"] = 0.8
    if wrong == "narrows" and "top_p" in settings:
        settings["top_p"] = 0.8
    read = len(body["prompt"]) + (wrong == "adds")
    cached = {} if wrong == "silent cache" else {"cache_n": 4 if wrong == "remembers" else 0}
    end = {"stop": True, "tokens": [], "tokens_predicted": len(tokens), "tokens_evaluated": read}
    end |= {"generation_settings": settings, "stop_type": "limit"}
    if not body["stream"]:
        yield end | {"tokens": spoiled(tokens, "breaks" if wrong == "wavers" else "")}
        return
    drafted = accepted = said = 0
    counts: dict = {}
    for of_pass, of_draft in passes_of(stub, tokens, wrong) if tokens else ():
        drafted, accepted = drafted + of_draft, accepted + len(of_pass) - 1
        counts = {"draft_n": drafted, "draft_n_accepted": accepted} if drafted else {}
        for token in of_pass:
            said += 1
            if wrong in ("splits", "wavers") and said - 1 in SPLIT:
                continue
            event = {"content": "x", "stop": False, "timings": counts, "tokens_predicted": said}
            if body["n_probs"]:
                top = [{"id": token, "logprob": -0.1}, {"id": token + 1, "logprob": -3.0}]
                event["completion_probabilities"] = [{"top_logprobs": top}]
            yield event if wrong == "text" else event | {"tokens": [token]}
    yield end | {"timings": counts | cached}


def openai_events(stub: Stub, body: dict, wrong: str) -> Iterator[dict]:
    """As vLLM: an event for each pass, and, if it speculates, counts at the end."""
    tokens = spoiled(stub.answer(body["prompt"], body["max_tokens"]), wrong)
    passes = passes_of(stub, tokens, wrong) if tokens else []
    each = 2 if wrong == "joins" else 1  # passes of an event
    starts = [i for i in range(0, len(passes), each) if not (wrong == "pauses" and i == 5)]
    for i, end in pairwise([*starts, len(passes)]):
        of_event = [token for of_pass, _ in passes[i:end] for token in of_pass]
        choice: dict = {"text": "x", "finish_reason": None}
        if wrong != "text":
            choice["token_ids"] = of_event
        if i == 0:
            choice["prompt_token_ids"] = body["prompt"]
        if body.get("logprobs"):
            tops = [{f"token_id:{token}": -0.1, f"token_id:{token + 1}": -3.0} for token in of_event]
            choice["logprobs"] = {"top_logprobs": tops}
        yield {"choices": [choice]}
    reason = "abort" if wrong == "aborts" else "length"
    yield {"choices": [{"text": "", "token_ids": [], "finish_reason": reason}]}
    usage: dict = {"prompt_tokens": len(body["prompt"]) + (wrong == "adds")}
    if wrong != "silent cache":
        usage["prompt_tokens_details"] = {"cached_tokens": 4 if wrong == "remembers" else 0}
    steps = [(len(of_pass) - 1, of_draft) for of_pass, of_draft in passes[1:] if of_draft]
    accepted, drafted = ([counts[i] for counts in steps] for i in (0, 1))
    counts = {"num_accepted_draft_tokens": sum(accepted), "num_draft_tokens": sum(drafted)}
    if wrong != "sums" and steps:
        counts |= {"per_step_accepted": accepted, "per_step_drafted": drafted}
    told = stub.drafts and wrong != "uncounted"
    yield {"choices": [], "usage": usage, "metrics": {"speculative_decoding": counts} if told else None}


def line_of(event: dict, wrong: str | None) -> bytes:
    """An event as it is sent, or what goes wrong with it."""
    if wrong == "tells":
        event = {"error": {"message": "out of memory"}}
    line = json.dumps(event)
    return f"data: {line[: len(line) // 2] if wrong == 'half' else line}\n\n".encode()


EVENTS = {"/completion": llama_cpp_events, "/v1/completions": openai_events}


class Server(ThreadingHTTPServer):
    """Serves a stub."""

    daemon_threads = True

    def __init__(self, stub: Stub, port: int = 0):
        self.stub, self.released, self.counting = stub, threading.Event(), threading.Lock()
        super().__init__(("127.0.0.1", port), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_: object) -> None:
        """A client that hangs up is no error."""


class Handler(BaseHTTPRequestHandler):
    """Answers as a stub says."""

    server: Server

    def log_message(self, *_: object) -> None:
        """Prints nothing."""

    def do_GET(self) -> None:
        stub = self.server.stub
        self.send_response(503 if stub.fault == "leaves" and stub.wrong() else 200)
        self.end_headers()

    def do_POST(self) -> None:
        stub = self.server.stub
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.counting:
            stub.asked += 1
            stub.at_once += 1
            stub.most_at_once = max(stub.most_at_once, stub.at_once)
            stub.bodies.append(body)
        self.counted = True
        try:
            self.answer(stub, body)
        finally:
            self.leave(stub)

    def leave(self, stub: Stub) -> None:
        """Is answered no more: before its last event is sent, after which the next request may come at once."""
        with self.server.counting:
            stub.at_once -= self.counted
            self.counted = False

    def answer(self, stub: Stub, body: dict) -> None:
        """Says what the stub says, or does wrong."""
        wrong = stub.wrong()
        if wrong == "dies":
            os._exit(3)
        if wrong in ("refuses", "rejects requests"):
            self.send_error(500 if wrong == "refuses" else 400, "EngineDeadError")
            return
        self.send_response(200)
        self.end_headers()
        events = list(EVENTS[self.path](stub, body, wrong))
        if not body["stream"]:
            self.leave(stub)
            self.wfile.write(json.dumps(events[0]).encode())
            return
        for number, event in enumerate(events):
            line = line_of(event, wrong if number == 2 else None)
            if number == len(events) - 1:
                self.leave(stub)
            self.wfile.write(line)
            self.wfile.flush()
            if wrong == "hangs" and number == 1:
                self.server.released.wait(60)
            for _ in range(PINGS if wrong == "pings" and number == 1 else 0):
                time.sleep(PING_SECONDS)
                self.wfile.write(b":\n\n")
            if wrong in ("cuts", "leaves") and number == 2:
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_WR)
                return
        self.wfile.write(b"data: [DONE]\n\n")


@contextmanager
def serving(*stubs: Stub) -> Iterator[list[str]]:
    """URLs at which stubs are served by threads of this process."""
    servers = [Server(stub) for stub in stubs]
    for server in servers:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield [server.url for server in servers]
    finally:
        for server in servers:
            server.released.set()
            server.shutdown()
            server.server_close()


def counting(prompt: list[int], n: int) -> list[int]:
    """An answer that follows from the prompt alone."""
    return [(sum(prompt) + 7 * i) % 50 + 3 for i in range(n)]


def main() -> None:
    """`python engine_stub.py PORT JSON`: a stub in a process of its own, which says `counting`."""
    told = json.loads(sys.argv[2])
    if told.pop("fails", False):
        print("no such model\n\n\n\n", flush=True)  # as OpenVINO's errors end
        sys.exit(4)
    if told.pop("crashes", False):
        os.kill(os.getpid(), signal.SIGFPE)
    if (marker := told.pop("marker", None)) is not None:  # started once more: wrong from the first request on
        if os.path.exists(marker):
            told["after"] = 0
        open(marker, "w").close()
    if told.pop("helper", False):  # a process of its own, as large engines have
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    time.sleep(told.pop("loads", 0.0))
    Server(Stub(counting, **told), int(sys.argv[1])).serve_forever()


if __name__ == "__main__":
    main()
