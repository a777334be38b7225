"""How servers are asked for token ids: llama.cpp's `/completion`, and OpenAI's completions as vLLM extends them.

A dialect asks one request and gives the target passes that the answer came from, as far as the server shows them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specbench.engines.client import EngineError, events

if TYPE_CHECKING:
    from collections.abc import Callable

    from specbench.decoding.state import Request

TOP = 2  # tokens of each place whose log-probabilities are asked for


@dataclass(slots=True)
class TargetPass:
    """One pass of the target, as a server shows it.

    Attributes:
        at: `time.perf_counter()` when its last token arrived.
        tokens: that it gave.
        drafted: that it verified; None: the server does not say.
        accepted: of these; None: as many as its tokens tell. It may be more where the answer ended inside the draft.
    """

    at: float
    tokens: list[int]
    drafted: int | None = 0
    accepted: int | None = None


@dataclass(slots=True)
class Reply:
    """One answer of a server.

    Attributes:
        passes: the prompt's first.
        prompt_tokens: that the server says it read.
        cached_tokens: of them, those that it remembered instead.
        echoed: the settings that it says it used, by the names of `SamplingParams` and `Request`.
        tops: by place, log-probabilities by id, where they were asked for.
    """

    passes: list[TargetPass] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    echoed: dict[str, Any] = field(default_factory=dict)
    tops: list[dict[int, float]] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """The answer."""
        return [token for one in self.passes for token in one.tokens]


def llama_cpp(url: str, request: Request, stops: frozenset[int], timeout: float, tops: bool = False) -> Reply:
    """Asks llama.cpp's server.

    It sends an event for each token, with its counts of draft tokens so far. They change with the first token of a
    pass: as many as were accepted, and one, belong to it.

    Args:
        url: of the server.
        request: what to decode.
        stops: token ids that end the answer.
        timeout: seconds without an event.
        tops: also ask for log-probabilities.

    Raises:
        EngineError: The server fails, or its counts do not fit its tokens.
    """
    decoding = request.decoding
    body = {
        "prompt": request.prompt,
        "n_predict": decoding.max_new_tokens,
        "temperature": decoding.temperature,
        "seed": request.seed % 2**32,
        "samplers": ["temperature"],
        "stream": True,
        "return_tokens": True,
        "cache_prompt": False,
        "timings_per_token": True,
        "n_probs": TOP if tops else 0,
    }
    reply, left, drafted, accepted = Reply(), 0, 0, 0
    for at, event in events(url, "/completion", body, timeout):
        timings = event.get("timings") or {}
        now_drafted, now_accepted = timings.get("draft_n", drafted), timings.get("draft_n_accepted", accepted)
        for token in event.get("tokens", ()):
            if left == 0:
                reply.passes.append(TargetPass(at, [], now_drafted - drafted, now_accepted - accepted))
                left = now_accepted - accepted + 1
                drafted, accepted = now_drafted, now_accepted
            reply.passes[-1].tokens.append(token)
            reply.passes[-1].at = at
            left -= 1
        for place in event.get("completion_probabilities", ()):
            likeliest = place.get("top_logprobs") or ()
            reply.tops.append({one["id"]: one["logprob"] for one in likeliest})
        if event.get("stop"):
            settings = event.get("generation_settings") or {}
            reply.prompt_tokens, reply.cached_tokens = event.get("tokens_evaluated"), timings.get("cache_n")
            reply.echoed = {
                name: settings[key]
                for name, key in (("max_new_tokens", "n_predict"), ("temperature", "temperature"))
                if key in settings
            }
            return reply
        if reply.passes and reply.passes[-1].tokens[-1] in stops:
            return reply
    raise EngineError("the stream ended before the answer did")


def openai(
    url: str,
    request: Request,
    stops: frozenset[int],
    timeout: float,
    tops: bool = False,
    model: str | None = None,
) -> Reply:
    """Asks a server for completions as vLLM gives them, with token ids; as `llama_cpp`.

    It sends an event for each pass. What was drafted it tells at the end, if it was started with
    `--per-request-spec-decode-metrics detailed`. `model` is the name that the server has for it, where it wants one.
    """
    decoding = request.decoding
    body = {
        "prompt": request.prompt,
        "max_tokens": decoding.max_new_tokens,
        "temperature": decoding.temperature,
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
        for choice in event.get("choices", ()):
            ids = choice.get("token_ids") or []
            if ids:
                reply.passes.append(TargetPass(at, ids, None))
            if "prompt_token_ids" in choice and choice["prompt_token_ids"] is not None:
                reply.prompt_tokens = len(choice["prompt_token_ids"])
            for likeliest in (choice.get("logprobs") or {}).get("top_logprobs") or ():
                reply.tops.append({int(key.rpartition(":")[2]): value for key, value in likeliest.items()})
            ended |= choice.get("finish_reason") is not None
        if (usage := event.get("usage")) is not None:
            reply.prompt_tokens = usage.get("prompt_tokens", reply.prompt_tokens)
            reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        counts = (event.get("metrics") or {}).get("speculative_decoding")
        if counts is not None and reply.passes:
            accepted, drafted = (counts.get(f"per_step_{name}") or [] for name in ("accepted", "drafted"))
            _count_drafts(reply.passes[1:], accepted, drafted)
    if not ended:
        raise EngineError("the stream ended before the answer did")
    return reply


def _count_drafts(passes: list[TargetPass], accepted: list[int], drafted: list[int]) -> None:
    """Notes in passes what each verified, from counts of all of them, or of those that verified a draft, in order.

    Of several passes of one token it is not told which had a draft: the later ones are taken. The last pass may be cut
    short, by a stop token or at the cap.

    Raises:
        EngineError: The counts do not fit the tokens.
    """
    sizes = [len(one.tokens) for one in passes]
    numbers: list[int] | None
    if len(accepted) == len(passes):
        fit = all(size == 1 + count for size, count in zip(sizes[:-1], accepted))
        fit = fit and all(size <= 1 + count for size, count in zip(sizes[-1:], accepted[-1:]))
        numbers = [*range(len(passes))] if fit else None
    else:
        numbers = _passes_of(sizes, accepted, cut=False) or _passes_of(sizes, accepted, cut=True)
    if numbers is None:
        raise EngineError(
            f"{accepted} draft tokens are said to be accepted, where passes have {sizes} tokens"
        )
    for one in passes:
        one.drafted = one.accepted = 0
    for number, count, of_draft in zip(numbers, accepted, drafted):
        passes[number].drafted, passes[number].accepted = of_draft, count


def _passes_of(sizes: list[int], accepted: list[int], cut: bool) -> list[int] | None:
    """Which passes counts belong to, found from the end; `cut`: the last one belongs to the last pass, cut short."""
    numbers: list[int] = []
    at = len(sizes) - 1
    for count in reversed(accepted):
        if cut and not numbers:
            fits = at >= 0 and sizes[at] <= 1 + count
        else:
            while at >= 0 and sizes[at] == 1 and count > 0:
                at -= 1
            fits = at >= 0 and sizes[at] == 1 + count
        if not fits:
            return None
        numbers.insert(0, at)
        at -= 1
    return numbers if all(size == 1 for size in sizes[: at + 1]) else None


DIALECTS: dict[str, Callable[..., Reply]] = {"llama_cpp": llama_cpp, "openai": openai}
