"""Other engines as arms of a run: one server decodes plainly, another one speculates, and both answer token ids.

Baseline and method are the same engine without and with speculation. The run decides what each of them is asked, and
when, as with our own arms.
"""

from __future__ import annotations

import math
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psutil

from specbench.decoding.sampling import truncate_at_stop
from specbench.decoding.trace import Generation, Step, counted
from specbench.engines.client import EngineError, RefusedError
from specbench.engines.dialects import DIALECTS, TargetPass
from specbench.engines.environments import check_install, program
from specbench.engines.server import wait_for
from specbench.system.errors import JobError, UserError, one_line
from specbench.system.paths import existing_file

if TYPE_CHECKING:
    from specbench.decoding.engine import Rounds
    from specbench.decoding.state import Request
    from specbench.engines.dialects import Reply
    from specbench.engines.server import Server
    from specbench.models.pairs import Pair

RESTARTS = 3  # of a server in a run, before it is given up
REMEMBERS = (
    0.9  # of the passes of first answers: with fewer for the same answers again, drafts come from memory
)
TRIALS, TRIED_PASSES = 3, 40  # warm-up questions, and speculative passes, that show what a server does
ENDING = 1.0  # seconds that a server which broke off gets to end
LEAST_MERGED = 3  # in one answer: a short one may arrive in a few pieces
MERGED = 0.25  # of the plain server's passes: if more have several tokens, it drafts and is not just busy
PLAIN, SPECULATIVE = "plain", "speculative"


class ServedEngine:
    """Two servers of one engine.

    Args:
        pair: whose target they serve.
        servers: by `PLAIN` and `SPECULATIVE`.
        dialect: a name in `dialects.DIALECTS`.
        answer_seconds: time without an event after which a server counts as hung.
        batch_size: requests that a server gets at once.

    Attributes:
        version: of the engine.
        faults: what went wrong so far, a line each.
        same_weights: whether it decodes with the pair's own weights, not with a file that somebody quantised.
        has_own_file: whether it decodes with a file that only it reads: its plain server judges then.
    """

    version: str = "unknown"
    start_hint: str = ""  # how long starting takes, for who waits
    same_weights: bool = True
    has_own_file: bool = False
    module: str | None = None  # of the engine, as its interpreter imports it; None: somebody else runs it

    def __init__(
        self,
        pair: Pair,
        servers: Mapping[str, Server],
        dialect: str,
        answer_seconds: float,
        batch_size: int = 1,
    ):
        self.pair, self.servers, self.answer_seconds = pair, servers, answer_seconds
        self.batch_size = batch_size
        self._restarting = threading.Lock()
        self.dialect = DIALECTS[dialect]
        self.faults: list[str] = []
        self._target_bytes: int | None = None

    @classmethod
    def check(cls, settings: Mapping[str, Any], drafter: Mapping[str, Any], batch_size: int) -> None:
        """Refuses configurations that cannot be measured with any models, before one is loaded.

        Args:
            settings: of the engine, as conf/engine/ has them.
            drafter: configuration of the run's drafter.
            batch_size: requests that a server gets at once.

        Raises:
            UserError: The engine is not installed, or a named file does not exist.
        """
        if cls.module is not None and settings.get("install"):
            check_install(settings["install"])
            program(settings["name"], settings["install"], settings.get("python"), cls.module)
        for name in ("target", "draft"):
            if settings.get(name):
                existing_file(settings[name])

    @property
    def is_ours(self) -> bool:
        """Whether the run starts its servers."""
        return all(server.is_ours for server in self.servers.values())

    @property
    def ports(self) -> set[int]:
        """Ports of servers on this machine that are not ours: their work does not count as a disturbance."""
        urls = [urlsplit(server.url) for server in self.servers.values() if not server.is_ours]
        return {url.port for url in urls if url.port is not None and is_here(url.hostname)}

    def open(self, prompts: Sequence[Request]) -> None:
        """Starts both servers and checks them before anything is timed.

        Args:
            prompts: requests of the warm-up.

        Raises:
            UserError: A server does not start, or does not meet the requirements of a measurement.
        """
        self._target_bytes = counted(self.pair.staged.pass_bytes()) if self.same_weights else None
        try:
            if self.is_ours:
                print(f"starting two servers{self.start_hint}", file=sys.stderr, flush=True)
            for server in self.servers.values():
                server.start()
            wait_for(self.servers.values())
            print("checking both servers on warm-up questions", file=sys.stderr, flush=True)
            self._shake_hands(prompts)
        except EngineError as error:
            ends = [(name, server.how_it_ended(ENDING)) for name, server in self.servers.items()]
            self.close()  # with the servers' logs
            why = "".join(f"; the {name} server {ended}" for name, ended in ends if ended)
            raise UserError(f"the engine cannot be measured: {error}{why}") from error
        except BaseException:  # also if the run is stopped meanwhile: no server remains
            self.close()
            raise

    def plain(self, requests: list[Request]) -> Rounds:
        """The arm without speculation."""
        return (yield from self._rounds(PLAIN, requests, self.batch_size))

    def single(self, requests: list[Request]) -> Rounds:
        """The arm without speculation, one request at a time."""
        return (yield from self._rounds(PLAIN, requests, 1))

    def speculative(self, requests: list[Request]) -> Rounds:
        """The arm with speculation."""
        return (yield from self._rounds(SPECULATIVE, requests, self.batch_size))

    def tops(self, request: Request) -> tuple[list[int], list[dict[int, float]]]:
        """An answer of the plain server, and log-probabilities by id at each position; [] if it reports none."""
        try:
            reply = self._reply(PLAIN, request, tops=True).completed()
        except (EngineError, RefusedError) as error:
            self.note(f"{PLAIN}: it gives no log-probabilities: {error}")
            reply = self._answer(PLAIN, request)[0].completed()
        return reply.tokens, reply.tops

    def note(self, fault: str) -> None:
        """Adds a fault unless it was noted before."""
        if fault not in self.faults:
            self.faults.append(fault)

    def close(self) -> None:
        """Ends both servers."""
        for server in self.servers.values():
            server.close()

    # -- asking

    def _rounds(self, name: str, requests: list[Request], at_once: int) -> Rounds:
        """Answers requests, `at_once` at a time; if several, each gets the share of the time that its tokens have."""
        if at_once == 1:
            answers = []
            for request in requests:
                answers.append(self._generation(name, *self._answer(name, request), request))
                yield len(answers[-1].tokens)
            return answers
        starts = None
        while starts != self.servers[name].starts:  # once more if a server was restarted meanwhile
            starts, begun = self.servers[name].starts, time.perf_counter()
            with ThreadPoolExecutor(at_once) as pool:
                replies = [*pool.map(partial(self._answer, name, several=True), requests)]
        seconds = max(reply.ended for reply, _ in replies) - begun
        answers = [
            self._generation(name, *reply, request, several=True) for reply, request in zip(replies, requests)
        ]
        tokens = sum(len(answer.tokens) for answer in answers)
        yield tokens
        # The server does not report which requests shared a pass, so the bytes read for each are unknown.
        unknown: dict[str, Any] = {
            "sequences": at_once,
            "draft_bytes": None,
            "target_bytes": None,
            "other_seconds": math.nan,
        }
        return [
            replace(
                answer,
                prefill_seconds=None,
                seconds=seconds * len(answer.tokens) / tokens,
                steps=[replace(step, **unknown) for step in answer.steps],
            )
            for answer in answers
        ]

    def _answer(self, name: str, request: Request, several: bool = False) -> tuple[Reply, float]:
        """An answer, alone or one of several at once, and the time of its request.

        A failed server is restarted once for each answer; one that is not ours is asked once more.
        """
        server = self.servers[name]
        # During a restart, `starts` already counts a server that does not answer yet.
        with self._restarting:
            starts = server.starts
        try:
            return self._timed(name, request, several)
        except EngineError as error:
            ended = server.how_it_ended(ENDING)
            self.faults.append(f"{name}: {error}" + (f"; it {ended}" if ended else ""))
            with self._restarting:  # only the first of several requests that fail together
                if server.starts == starts and (starts > RESTARTS or not server.revive()):
                    raise JobError(f"the {name} server failed: {error}") from error
        try:
            self._reply(name, request)  # the first answer of a server is not timed
            return self._timed(name, request, several)
        except EngineError as error:
            self.faults.append(f"{name}, once more: {error}")
            raise UserError(f"the {name} server failed twice: {error}") from error

    def _timed(self, name: str, request: Request, several: bool) -> tuple[Reply, float]:
        begun = time.perf_counter()
        reply = self._reply(name, request)
        if name == PLAIN and not several:
            passes = reply.passes[1:]
            if (merged := _merged(passes)) > max(MERGED * len(passes), LEAST_MERGED):
                raise EngineError(f"{merged} of {len(passes)} passes of the plain server gave several tokens")
            if merged:
                self.note(
                    f"{PLAIN}: it sends some passes together: where {SPECULATIVE} gives no counts of passes, its "
                    "acceptance lengths are too high"
                )
        return reply, begun

    def _reply(self, name: str, request: Request, tops: bool = False) -> Reply:
        url, stops = self.servers[name].url, self._stops(request)
        try:
            reply = self.dialect(url, request, stops, self.answer_seconds, tops)
        # Null in place of a list, and the like.
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise EngineError(f"an event has another form than it should: {one_line(error)}") from error
        if not reply.tokens and reply.complete is None:
            raise EngineError("the answer holds no token ids")
        return reply

    def _stops(self, request: Request) -> frozenset[int]:
        return self.pair.stop_ids if request.stop_ids is None else request.stop_ids

    def _generation(
        self, name: str, reply: Reply, begun: float, request: Request, several: bool = False
    ) -> Generation:
        """Converts a reply for the journal: the prompt's pass, then a round for each other pass."""
        if reply.cached_tokens:
            self.note(
                f"{name}: it remembers prompts, which makes second answers faster: disable its prefix cache"
            )
        try:
            reply.completed()
        except EngineError as error:
            raise UserError(f"the {name} server failed: {error}") from error
        _check_prompt(name, reply, request)
        tokens, most = reply.tokens, request.decoding.max_new_tokens
        finish = "stop" if tokens[-1] in self._stops(request) else "length"
        if finish == "length" and reply.at_limit and len(tokens) < most:
            raise UserError(
                f"the {name} server ended an answer after {len(tokens)} of {most} tokens: give it a larger context"
            )
        first, *others = reply.passes
        if several or name == PLAIN:
            others = _apart(name, others)
        steps, before = [], first.at
        for one in others:
            emitted, drafted = len(one.tokens), one.drafted
            if name == PLAIN:
                drafted = 0
            if (accepted := one.accepted) is None:
                accepted = emitted - 1 if drafted is None else min(emitted - 1, drafted)
            steps.append(
                Step(
                    drafted=drafted,
                    accepted=min(accepted, emitted),  # all, where a token of the draft ended the answer
                    emitted=emitted,
                    depth=drafted,
                    draft_seconds=math.nan,
                    verify_seconds=math.nan,
                    other_seconds=one.at - before,
                    draft_bytes=0 if drafted == 0 else None,
                    target_bytes=self._target_bytes,
                )
            )
            before = one.at
        return Generation(tokens, first.at - begun, reply.ended - begun, finish, steps)

    # -- before anything is timed

    def _shake_hands(self, requests: Sequence[Request]) -> None:
        """Raises UserError, with what to set, if a server does not meet the requirements of a measurement.

        The longest prompt comes first: caches of prompts keep whole blocks. Greedy answers show that drafts are
        accepted; drawn ones may be wrong for another reason. Each server answers in turn, so that none spins meanwhile.
        """
        longest_first = sorted(requests, key=lambda one: len(one.prompt), reverse=True)
        greedy = [replace(one, decoding=one.decoding.greedily()) for one in longest_first]
        replies = [self._tried(PLAIN, request) for request in greedy[:TRIALS]]
        if self._tried(PLAIN, greedy[0]).tokens != replies[0].tokens:
            self.note("plain: two answers to one prompt differ")
        plain = [one for reply in replies for one in reply.passes[1:]]
        if any(one.drafted for one in plain) or _merged(plain) > MERGED * len(plain):
            raise UserError("the plain server drafts: start it without speculation")
        speculative: list[TargetPass] = []
        of_second_answers = 0
        for number, request in enumerate(greedy, start=1):
            speculative += self._tried(SPECULATIVE, request).passes[1:]
            of_second_answers += len(self._tried(SPECULATIVE, request).passes[1:])
            if number >= TRIALS and len(speculative) >= TRIED_PASSES and _merged(speculative):
                break
        self._check_drafts(speculative)
        if of_second_answers < REMEMBERS * len(speculative):
            self.faults.append(
                f"{SPECULATIVE}: it remembers answers ({len(speculative)} passes at first, {of_second_answers} for the "
                "same again): repeats, and turns that are measured again, flatter it"
            )
        for name in (PLAIN, SPECULATIVE) if longest_first[0] != greedy[0] else ():
            self._tried(name, longest_first[0])  # shows whether the temperature is used

    def _tried(self, name: str, request: Request) -> Reply:
        """An answer, complete. Raises UserError if it shows that the server cannot be measured."""
        reply = self._reply(name, request)
        if not reply.tokens:  # before it is completed: a stream without ids has no times
            raise EngineError(f"the stream of the {name} server holds no token ids")
        _check_read(name, reply.completed(), request)
        if reply.cached_tokens is None and not self.servers[name].is_ours:
            self.note(
                f"{name}: it does not report cached prompt tokens, and a prefix cache makes second answers faster: "
                "make sure that it is off (vLLM reports them with --enable-prompt-tokens-details)"
            )
        if truncate_at_stop(reply.tokens, self.pair.stop_ids) != reply.tokens:
            raise UserError(
                f"the {name} server continues after a stop token: list that token in the model's files"
            )
        return reply

    @staticmethod
    def _check_drafts(passes: list[TargetPass]) -> None:
        """Raises UserError unless some drafts are accepted; not every server reports how many tokens it drafts."""
        counts = [one.drafted for one in passes if one.drafted is not None]
        if counts and not any(counts):
            raise UserError("the speculative server drafts nothing: is its kind of speculation named?")
        if all(len(one.tokens) == 1 for one in passes):
            drafted = f"{sum(counts)} draft tokens" if counts else "what it drafts, if it does"
            raise UserError(
                f"the speculative server accepts none of {drafted}: are the draft's weights loaded?"
            )


def _merged(passes: list[TargetPass]) -> int:
    """Number of an answer's passes that, by its events, produced several tokens."""
    return sum(len(one.tokens) > 1 for one in passes)


def _apart(name: str, passes: list[TargetPass]) -> list[TargetPass]:
    """Separates the passes of one of several answers at once: a busy server sends some of them together.

    Each pass of the plain server produces one token. For a speculative one, only counts show what each pass produced:
    without them no pass is known.
    """
    if name == PLAIN:
        return [TargetPass(one.at, [token]) for one in passes for token in one.tokens]
    return [] if any(one.drafted is None for one in passes) else passes


def _check_prompt(name: str, reply: Reply, request: Request) -> None:
    """Raises UserError unless a server has read the whole prompt, as far as it reports that."""
    if reply.prompt_tokens is not None and reply.prompt_tokens != len(request.prompt):
        raise UserError(
            f"the {name} server read {reply.prompt_tokens} tokens of a prompt of {len(request.prompt)}: "
            "it must add none and cut none"
        )


def _check_read(name: str, reply: Reply, request: Request) -> None:
    """Raises UserError unless a server has read the whole prompt and used the settings."""
    _check_prompt(name, reply, request)
    if reply.cached_tokens:
        raise UserError(
            f"the {name} server took {reply.cached_tokens} prompt tokens from its cache: disable its prefix cache"
        )
    for key, value in reply.echoed.items():
        wanted = getattr(request.decoding, key)
        if not math.isclose(value, wanted, abs_tol=1e-6):
            raise UserError(f"the {name} server took {key}={value}, not {wanted}")


def is_here(host: str | None) -> bool:
    """Whether a host, by name or address, is this machine."""
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:  # a name that nobody knows
        return False
    of_cards = {card.address.partition("%")[0] for cards in psutil.net_if_addrs().values() for card in cards}
    return not addresses.isdisjoint(of_cards)
