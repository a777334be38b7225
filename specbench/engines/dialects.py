"""How servers are asked for token ids: llama.cpp's `/completion`, and OpenAI's completions as vLLM extends them.

A dialect sends one request and returns the target passes of the answer, as far as the server reports them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any

from specbench.decoding.sampling import truncate_at_stop
from specbench.engines.client import EngineError, events
from specbench.engines.standalone.completions import NEUTRAL
from specbench.system.errors import UserError

if TYPE_CHECKING:
    from specbench.decoding.state import Request

TOP = 5  # tokens per position whose log-probabilities are requested
FINISHED = ("stop", "length")  # how an answer ends; any other reason is a failure of the server
UNSTREAMED = 10  # time limit of a whole answer, as a multiple of that of an event


@dataclass(slots=True)
class TargetPass:
    """One pass of the target, as a server reports it.

    Attributes:
        at: `time.perf_counter()` when its last token arrived.
        tokens: that it produced.
        drafted: draft tokens that it verified; None: not reported.
        accepted: of these; None: to be derived from `tokens`. It may be more if the answer ended inside the draft.
    """

    at: float
    tokens: list[int]
    drafted: int | None = 0
    accepted: int | None = None


@dataclass(slots=True)
class Reply:
    """One answer of a server.

    Attributes:
        passes: the prompt's first, which produces one token.
        ended: `time.perf_counter()` when the last event of the answer arrived.
        prompt_tokens: number of tokens that the server reports it read.
        cached_tokens: of them, those taken from its cache instead; None: not reported.
        echoed: the settings that it reports it used, by the names of `SamplingParams` and `Request`.
        tops: for each position, log-probabilities by id, if requested.
        at_limit: whether the server says that a limit ended the answer, and not a stop token.
        complete: adds what the stream left out, with another request, which is not timed; None: nothing is missing.
    """

    passes: list[TargetPass] = field(default_factory=list)
    ended: float = math.nan
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    echoed: dict[str, Any] = field(default_factory=dict)
    tops: list[dict[int, float]] = field(default_factory=list)
    at_limit: bool = False
    complete: Callable[[], None] | None = None

    @property
    def tokens(self) -> list[int]:
        """The answer."""
        return [token for one in self.passes for token in one.tokens]

    def completed(self) -> Reply:
        """This answer, with what the stream left out."""
        if self.complete is not None:
            self.complete()
        return self


@dataclass(frozen=True, slots=True)
class SentToken:
    """A token of llama.cpp's stream.

    Attributes:
        at: `time.perf_counter()` of its event.
        token: its id.
        drafted: draft tokens of the answer so far.
        accepted: of these.
        top: log-probabilities by id, if requested.
    """

    at: float
    token: int
    drafted: int
    accepted: int
    top: dict[int, float]


def llama_cpp(url: str, request: Request, stops: frozenset[int], timeout: float, tops: bool = False) -> Reply:
    """Asks llama.cpp's server.

    It sends an event for each token, with the counts of draft tokens so far. They change at the first token of a pass,
    which has as many tokens as were accepted, and one more.

    Args:
        url: of the server.
        request: what to decode.
        stops: token ids that end the answer.
        timeout: most seconds without an event.
        tops: whether to request log-probabilities.

    Raises:
        EngineError: The server fails, or its counts do not fit its tokens.
    """
    decoding = request.decoding
    drawn = {"temperature": decoding.temperature, **decoding.truncation}
    body = {
        "prompt": request.prompt,
        "n_predict": decoding.max_new_tokens,
        **drawn,
        "seed": request.seed % 2**32,
        "samplers": [*drawn],  # one after the other
        "stream": True,
        "return_tokens": True,
        "cache_prompt": False,
        "timings_per_token": True,
        "n_probs": TOP if tops else 0,
    }
    seen: list[SentToken] = []
    reply, drafted, accepted, predicted = Reply(), 0, 0, 0
    for at, event in events(url, "/completion", body, timeout):
        ids, timings = event.get("tokens") or [], event.get("timings") or {}
        stopped = bool(seen) and seen[-1].token in stops
        if stopped and ids:  # the server does not know this stop token; its last event is not waited for
            break
        reply.ended = at
        reply.prompt_tokens = event.get("tokens_evaluated", reply.prompt_tokens)
        reply.cached_tokens = timings.get("cache_n", reply.cached_tokens)
        predicted = event.get("tokens_predicted", predicted)
        drafted, accepted = timings.get("draft_n", drafted), timings.get("draft_n_accepted", accepted)
        likeliest = [one.get("top_logprobs") or () for one in event.get("completion_probabilities") or ()]
        for place, token in enumerate(ids):
            top = {one["id"]: one["logprob"] for one in (likeliest[place] if place < len(likeliest) else ())}
            seen.append(SentToken(at, token, drafted, accepted, top))
        if event.get("stop"):
            settings = event.get("generation_settings") or {}
            reply.at_limit = event.get("stop_type") == "limit"
            reply.echoed = {
                name: settings[key]
                for name, key in (("max_new_tokens", "n_predict"), *((one, one) for one in drawn))
                if key in settings
            }
            break
    else:
        if not (seen and seen[-1].token in stops):
            raise EngineError("the stream ended before the answer did")

    def take(every: list[SentToken]) -> None:
        reply.passes = _passes_of_tokens(every)
        reply.tops = [one.top for one in every] if tops else []

    def complete() -> None:
        """Raises UserError if the answer without a stream differs."""
        last = SentToken(reply.ended, 0, drafted, accepted, {})
        take(_completed(seen, _unstreamed(url, body, stops, timeout), last))
        reply.complete = None
        if not reply.tokens:
            raise EngineError("the answer holds no token ids")

    take(seen)
    reply.complete = complete if predicted > len(seen) else None
    return reply


def _unstreamed(url: str, body: Mapping, stops: frozenset[int], timeout: float) -> list[int]:
    """The token ids of the same answer, requested without a stream: one event at the end."""
    at_once = events(url, "/completion", {**body, "stream": False}, UNSTREAMED * timeout)
    return truncate_at_stop([token for _, event in at_once for token in event.get("tokens") or ()], stops)


def _completed(streamed: list[SentToken], tokens: list[int], last: SentToken) -> list[SentToken]:
    """A stream with the tokens that llama.cpp leaves out of it: those that end inside a character.

    Each gets time and counts of the next token that was sent, or of the last event if none was.

    Args:
        streamed: the tokens that were sent.
        tokens: all tokens of the answer.
        last: time and counts of the last event.

    Raises:
        UserError: The stream is not a part of them.
    """
    completed, sent = [], 0
    for token in tokens:
        of_event = streamed[min(sent, len(streamed) - 1)] if streamed else last
        is_sent = sent < len(streamed) and of_event.token == token
        completed.append(of_event if is_sent else replace(of_event, token=token, top={}))
        sent += is_sent
    if sent < len(streamed):
        raise UserError(
            "llama.cpp left token ids that end inside a character out of its stream, and without a stream its answer "
            "differs"
        )
    return completed


def _passes_of_tokens(streamed: list[SentToken]) -> list[TargetPass]:
    """Groups tokens into passes by their counts; the prompt's pass has only the first one."""
    passes = [TargetPass(one.at, [one.token]) for one in streamed[:1]]
    left = drafted = accepted = 0
    for one in streamed[1:]:
        if left == 0:
            passes.append(TargetPass(one.at, [], one.drafted - drafted, one.accepted - accepted))
            left = one.accepted - accepted + 1
            drafted, accepted = one.drafted, one.accepted
        passes[-1].tokens.append(one.token)
        passes[-1].at = one.at
        left -= 1
    return passes


def openai(
    url: str,
    request: Request,
    stops: frozenset[int],
    timeout: float,
    tops: bool = False,
    model: str | None = None,
) -> Reply:
    """Asks a server for completions in vLLM's form, with token ids; arguments as in `llama_cpp`.

    It sends an event for each pass or, when busy, one for several. It reports draft counts at the end, if it was
    started with `--per-request-spec-decode-metrics detailed`. `model` is the server's name of the model, if it requires
    one.
    """
    decoding = request.decoding
    body = {
        "prompt": request.prompt,
        "max_tokens": decoding.max_new_tokens,
        "temperature": decoding.temperature,
        # Else vLLM takes them from the checkpoint's generation config.
        **NEUTRAL,
        **decoding.truncation,
        "seed": request.seed % 2**32,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "stop_token_ids": sorted(stops),
        "return_tokens_as_token_ids": True,
        "logprobs": TOP if tops else None,
        **({} if model is None else {"model": model}),
    }
    reply, ended = Reply(), False
    for at, event in events(url, "/v1/completions", body, timeout):
        reply.ended = at
        for choice in event.get("choices", ()):
            ended |= _add_choice(reply, at, choice)
        if (usage := event.get("usage")) is not None:
            reply.prompt_tokens = usage.get("prompt_tokens", reply.prompt_tokens)
            reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        counts = (event.get("metrics") or {}).get("speculative_decoding") or {}
        # vLLM leaves out lists that are empty.
        none: list[int] | None = [] if counts.get("num_draft_tokens") == 0 else None
        accepted, drafted = counts.get("per_step_accepted", none), counts.get("per_step_drafted", none)
        if reply.passes and accepted is not None and drafted is not None:  # a summary has totals alone
            reply.passes[1:] = _counted(reply.passes[1:], accepted, drafted)
    if not ended:
        raise EngineError("the stream ended before the answer did")
    return reply


def _add_choice(reply: Reply, at: float, choice: Mapping) -> bool:
    """Adds the tokens of an event; returns whether they end the answer. Raises EngineError if the server gave up."""
    ids = choice.get("token_ids") or []
    if ids and not reply.passes:
        reply.passes.append(TargetPass(at, ids[:1], None))
        ids = ids[1:]
    if ids:
        reply.passes.append(TargetPass(at, ids, None))
    if choice.get("prompt_token_ids") is not None:
        reply.prompt_tokens = len(choice["prompt_token_ids"])
    for likeliest in (choice.get("logprobs") or {}).get("top_logprobs") or ():
        ids_of = {key.rpartition(":")[2]: value for key, value in (likeliest or {}).items()}
        if not all(key.isdecimal() for key in ids_of):
            raise EngineError("log-probabilities are of texts, not of token ids")
        reply.tops.append({int(key): value for key, value in ids_of.items()})
    reason = choice.get("finish_reason")
    if reason not in (None, *FINISHED):
        raise EngineError(f"the server ended the answer: {reason}")
    reply.at_limit = reason == "length"
    return reason is not None


def _counted(events: list[TargetPass], accepted: list[int], drafted: list[int]) -> list[TargetPass]:
    """Splits events into passes with their draft counts: an event holds one pass, or several that were sent together.

    If several passes have one token, the server does not report which had a draft: the later ones are assumed. The last
    pass may be cut short, by a stop token or at the cap.

    Args:
        events: with the tokens and the time of each.
        accepted: counts of all passes, or of those that verified a draft, in order.
        drafted: likewise.

    Raises:
        EngineError: The counts do not fit the tokens.
    """
    boundaries = [*accumulate((len(one.tokens) for one in events), initial=0)]
    sizes = [1 + count for count in accepted]
    ends = _ends(boundaries, sizes)
    cut = min(accepted[-1], len(events[-1].tokens)) if accepted and events else 0
    while ends is None and cut > 0:  # tokens of the last pass, which nothing follows
        sizes[-1] = cut
        ends = _ends(boundaries, sizes, is_cut=True)
        cut -= 1
    if ends is None:
        raise EngineError(
            f"{accepted} draft tokens are said to be accepted, where passes have "
            f"{[len(one.tokens) for one in events]} tokens"
        )
    shapes: list[tuple[int, int, int]] = []  # tokens of each pass, drafted and accepted ones
    at = 0
    for end, size, of_draft, count in zip(ends, sizes, drafted, accepted):
        shapes += [(1, 0, 0)] * (end - size - at) + [(size, of_draft, count)]
        at = end
    shapes += [(1, 0, 0)] * (boundaries[-1] - at)
    arrived = iter([(one.at, token) for one in events for token in one.tokens])
    passes = []
    for size, of_draft, count in shapes:
        of_pass = [*islice(arrived, size)]
        passes.append(TargetPass(of_pass[-1][0], [token for _, token in of_pass], of_draft, count))
    return passes


def _ends(boundaries: list[int], sizes: list[int], is_cut: bool = False) -> list[int] | None:
    """Finds where passes end, from the last one backwards; passes of one token fill the gaps.

    Args:
        boundaries: of events, in tokens, which no pass crosses; the last one is the total.
        sizes: tokens of each pass.
        is_cut: whether the last one was cut short, so that nothing follows it.

    Returns:
        The ends in tokens from the beginning; None if the passes do not fit.
    """
    ends: list[int] = []
    at, inside = boundaries[-1], set(boundaries)
    for size in reversed(sizes):
        while at >= size and not inside.isdisjoint(range(at - size + 1, at)):
            at -= 1
        if at < size:
            return None
        ends.insert(0, at)
        at -= size
    return None if is_cut and ends[-1] != boundaries[-1] else ends


DIALECTS: dict[str, Callable[..., Reply]] = {"llama_cpp": llama_cpp, "openai": openai}
