"""Ways to answer requests: an engine for single sequences one by one, and transformers' own generate in batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, StoppingCriteria

from specbench.decoding.interleave import checkpoint
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import Request
from specbench.decoding.stop import truncate_at_stop
from specbench.decoding.trace import Clock, Generation, Step, Timestamp
from specbench.models.pairs import Pair

if TYPE_CHECKING:
    from specbench.decoding.engine import Engine

Arm = Callable[[list[Request]], list[Generation]]


class Steps(StoppingCriteria):
    """Stops nothing: times the steps of transformers' generate, and lets other arms run between two of them.

    Args:
        clock: of the arm.
        prompt: tokens of the longest prompt.
        batch: requests that are answered at once.
        device: that the answers are on.
    """

    def __init__(self, clock: Clock, prompt: int, batch: int, device: torch.device):
        self.clock, self.prompt = clock, prompt
        self._none = torch.zeros(batch, dtype=torch.bool, device=device)  # which answers are to stop
        self.begins: list[Timestamp] = [clock.mark()]
        self.ends: list[Timestamp] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.Tensor:
        """Ends a step, the first of which is the prefill; input_ids: [batch, n] so far."""
        batch, length = input_ids.shape
        self.ends.append(self.clock.mark())
        span = checkpoint(self.clock, batch * (length - self.prompt))
        self.begins.append(self.ends[-1] if span is None else span[1])
        return self._none

    def seconds(self) -> list[float]:
        """Seconds of each step; on a GPU only after the clock's `synchronize`."""
        return [self.clock.seconds(begin, end) for begin, end in zip(self.begins, self.ends)]


def one_by_one(engine: Engine) -> Arm:
    """An engine for single sequences, which answers its requests one after the other."""
    return lambda requests: [engine.generate([request])[0] for request in requests]


class FastestOf:
    """Times every arm on the first requests, after one warm-up call, then uses the fastest.

    Args:
        arms: by name.

    Attributes:
        chosen: the name of the faster one; None before the first requests.
    """

    def __init__(self, arms: dict[str, Arm]):
        self.arms = arms
        self.chosen: str | None = None

    def __call__(self, requests: list[Request]) -> list[Generation]:
        """The answers of the faster arm."""
        if self.chosen is None:
            seconds = {}
            for name, arm in self.arms.items():
                arm(requests)  # what is compiled and captured is so now
                seconds[name] = sum(answer.seconds for answer in arm(requests))
            self.chosen = min(seconds, key=lambda name: seconds[name])
        return self.arms[self.chosen](requests)


def generate_arm(pair: Pair, batch_size: int, pass_bytes: int | None) -> Arm:
    """As `hf_generate_arm`; on CUDA the faster one of generate as it comes and compiled with a static cache."""
    plain = hf_generate_arm(pair, batch_size, pass_bytes)
    if pair.device.type != "cuda":
        return plain
    static = hf_generate_arm(pair, batch_size, pass_bytes, cache_implementation="static")
    return FastestOf({"dynamic": plain, "static": static})


def hf_generate_arm(pair: Pair, batch_size: int = 1, pass_bytes: int | None = 0, **options: Any) -> Arm:
    """The generate of transformers on the same target: the reference that our baseline must not be slower than.

    Args:
        pair: with the target.
        batch_size: requests that it gets at once, padded on the left; their seconds are shared equally.
        pass_bytes: bytes of weights that one pass reads, for the steps; None where that cannot be known.
        **options: more arguments for `generate`, such as `assistant_model`.
    """
    clock = Clock(pair.device)
    target: Any = pair.target
    pad = min(pair.stop_ids, default=0)
    # A static cache is kept from call to call, and what is captured reads it: no tensor of one call alone.
    without_gradients = torch.no_grad if "cache_implementation" in options else torch.inference_mode

    @without_gradients()
    def generate(requests: list[Request]) -> list[Generation]:
        decoding = SamplingParams(
            max(r.decoding.max_new_tokens for r in requests), requests[0].decoding.temperature
        )
        sampling = {} if decoding.greedy else {"temperature": decoding.temperature, "top_k": 0, "top_p": 1.0}
        config = GenerationConfig(
            max_new_tokens=decoding.max_new_tokens,
            do_sample=not decoding.greedy,
            eos_token_id=sorted(pair.stop_ids) or None,
            pad_token_id=pad,
            **sampling,
        )
        torch.manual_seed(requests[0].seed)
        clock.synchronize()
        longest = max(len(r.prompt) for r in requests)
        steps = Steps(clock, longest, len(requests), pair.device)
        ids = torch.tensor(
            [[pad] * (longest - len(r.prompt)) + r.prompt for r in requests], device=pair.device
        )
        mask = torch.tensor(
            [[0] * (longest - len(r.prompt)) + [1] * len(r.prompt) for r in requests], device=pair.device
        )
        output = target.generate(
            ids, attention_mask=mask, generation_config=config, stopping_criteria=[steps], **options
        )
        new = output[:, longest:].tolist()
        steps.ends.append(clock.mark())  # after the last step
        clock.synchronize()
        seconds = steps.seconds()
        answers = [
            truncate_at_stop(tokens[: request.decoding.max_new_tokens], pair.stop_ids)
            for tokens, request in zip(new, requests)
        ]
        return [_generation(tokens, seconds, len(requests)) for tokens in answers]

    def _generation(tokens: list[int], seconds: list[float], requests: int) -> Generation:
        finish = "stop" if tokens[-1] in pair.stop_ids else "length"
        if requests > 1 or len(seconds) != len(tokens) + 1:  # a step is not one token of this answer
            return Generation(tokens, None, sum(seconds) / requests, finish)
        rounds = [Step(0, 0, 1, 0, 0.0, spent, 0.0, 0, pass_bytes) for spent in seconds[1 : len(tokens)]]
        return Generation(tokens, seconds[0], sum(seconds), finish, rounds)

    def fits(chunk: list[Request]) -> bool:
        """Whether a chunk is not too large, and padding makes no prompt too long for the context."""
        longest, cap = max(len(r.prompt) for r in chunk), max(r.decoding.max_new_tokens for r in chunk)
        return len(chunk) <= batch_size and longest + cap <= pair.context_length

    def in_batches(requests: list[Request]) -> list[Generation]:
        chunks: list[list[Request]] = []
        for request in requests:
            if chunks and fits([*chunks[-1], request]):
                chunks[-1].append(request)
            else:
                chunks.append([request])
        return [generation for chunk in chunks for generation in generate(chunk)]

    return in_batches
