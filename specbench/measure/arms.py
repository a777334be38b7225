"""Ways to answer requests, round by round: engines, for one sequence or a batch, and transformers' own generate."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import GenerationConfig

from specbench.config.spec import AGAIN, BASELINE, HF, METHOD, OWN_LOOP, SINGLE
from specbench.decoding.cpu.packed_linear import assume_unchanged
from specbench.decoding.engine import Rounds, exhaust
from specbench.decoding.sampling import truncate_at_stop
from specbench.decoding.state import Request
from specbench.decoding.trace import Clock, Generation, Step
from specbench.models.pairs import Pair
from specbench.system.errors import one_line, warn

if TYPE_CHECKING:
    from specbench.config.spec import RunSpec
    from specbench.decoding.drafter import Drafter
    from specbench.decoding.engine import Engine
    from specbench.decoding.model.staged_model import StagedModel

Arm = Callable[[list[Request]], Rounds]
Pause = Callable[[int], None]  # called with the new tokens of a step; others may run meanwhile


@dataclass(slots=True)
class Setup:
    """The models of a run, and the arms that they make.

    Attributes:
        pair: the loaded models.
        target: of the pair.
        drafter: of the method.
        arms: by name.
        spec: the run.
        verify_tokens: tokens of each sequence in the method's widest pass.
        slots: most sequences that the method holds at once.
        served: the engine that runs baseline and method; None: this project's.
        engines: this project's engines that run arms.
    """

    pair: Pair
    target: StagedModel
    drafter: Drafter
    arms: dict[str, Arm]
    spec: RunSpec
    verify_tokens: int = 1
    slots: int = 1
    served: Served | None = None
    engines: Collection[Engine] = ()

    def close(self) -> None:
        """Closes the drafter and the served engine."""
        self.drafter.close()
        if self.served is not None:
            self.served.close()

    @property
    def reference(self) -> str:
        """The arm that every answer is compared with."""
        return SINGLE if SINGLE in self.arms else BASELINE

    @property
    def judged(self) -> dict[str, list[str]]:
        """The arms that each certificate covers, by its key in a record."""
        of_baseline = [arm for arm in (HF, OWN_LOOP) if arm in self.arms]
        if SINGLE in self.arms and self.served is None:
            of_baseline.append(BASELINE)
        judged = {
            "equivalence": [METHOD],
            "baseline_equivalence": of_baseline,
            "again_equivalence": [arm for arm in (AGAIN,) if arm in self.arms],
        }
        return {key: arms for key, arms in judged.items() if arms}

    def answers(self, arm: str, requests: list[Request]) -> list[Generation]:
        """Runs an arm to its end; returns its answers."""
        return exhaust(self.arms[arm](requests))

    def set_reference_answers(self, requests: list[Request]) -> None:
        """Passes the target's own answers to `requests` to a drafter that needs them; not timed."""
        if self.drafter.needs.reference_answer:
            answers = self.answers(BASELINE, requests)
            self.drafter.set_reference_answers([r.prompt for r in requests], [a.tokens for a in answers])


class Served(Protocol):
    """Another engine, as a run sees it; implemented in `specbench.engines.served`.

    Attributes:
        version: its version.
        faults: its faults so far, a line each.
        same_weights: whether it decodes with the pair's own weights.
        has_own_file: whether it decodes with a file that only it reads.
        is_ours: whether the run starts its servers.
        ports: local ports of servers that the run did not start.
    """

    version: str
    faults: list[str]
    same_weights: bool
    has_own_file: bool
    is_ours: bool
    ports: Collection[int]

    def open(self, prompts: Sequence[Request]) -> None:
        """Starts it, and checks what a measurement relies on."""

    def plain(self, requests: list[Request]) -> Rounds:
        """The arm without speculation."""

    def single(self, requests: list[Request]) -> Rounds:
        """The arm without speculation, one request at a time."""

    def speculative(self, requests: list[Request]) -> Rounds:
        """The arm with speculation."""

    def note(self, fault: str) -> None:
        """Adds a fault unless it was noted before."""

    def tops(self, request: Request) -> tuple[list[int], list[dict[int, float]]]:
        """Returns a plain answer, and the log-probabilities by id at each of its places."""

    def close(self) -> None:
        """Ends it."""


class FastestOf:
    """Times every arm on the first requests, after one warm-up call, then uses the fastest.

    An arm that fails there is left out with a warning, unless all do: compiled code may not suit a model or a driver.

    Args:
        arms: by name.

    Attributes:
        chosen: the name of the fastest arm; None before the first requests.
    """

    def __init__(self, arms: dict[str, Arm]):
        self.arms = arms
        self.chosen: str | None = None

    def __call__(self, requests: list[Request]) -> Rounds:
        """The rounds of the fastest arm."""
        if self.chosen is None:
            seconds = {}
            for name, arm in self.arms.items():
                try:
                    exhaust(arm(requests))  # compiles and captures
                    seconds[name] = sum(answer.seconds for answer in exhaust(arm(requests)))
                except Exception as error:
                    if name == [*self.arms][-1] and not seconds:
                        raise
                    warn(f"transformers generate ({name} cache) fails and is left out: {one_line(error)}")
            self.chosen = min(seconds, key=lambda name: seconds[name])
        return (yield from self.arms[self.chosen](requests))


def generate_arm(pair: Pair, batch_size: int, pass_bytes: int | None) -> Arm:
    """As `hf_generate_arm`; on CUDA the faster of default generate and generate compiled with a static cache."""
    plain = hf_generate_arm(pair, batch_size, pass_bytes)
    if pair.device.type != "cuda":
        return plain
    assume_unchanged()  # or its compiled step would be cut at every joint product
    static = hf_generate_arm(pair, batch_size, pass_bytes, cache_implementation="static")
    return FastestOf({"dynamic": plain, "static": static})


def as_generator(function: Callable[[Pause], list[Generation]]) -> Rounds:
    """A function that cannot yield, as a generator: its calls of `Pause` yield their argument.

    torch's modes are per thread: decorate the generator with the mode that the function runs in.
    """
    from greenlet import GreenletExit, greenlet  # late: only needed for pauses

    running = greenlet(function)
    try:
        value = running.switch(lambda tokens: running.parent.switch(tokens))
        while not running.dead:
            yield value
            value = running.switch()
        return value
    finally:
        if not running.dead:
            running.throw(GreenletExit)


@contextmanager
def neutral(model: Any) -> Iterator[None]:
    """Within, generate ignores the checkpoint's own generation settings, such as a repetition penalty."""
    usual, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = usual


@contextmanager
def usual_experts(model: Any, usual: dict[str, str]) -> Iterator[None]:
    """Within, experts are computed as outside of generate, which switches their implementation on a GPU."""
    if (decoding := model.get_experts_implementation()) == usual:
        yield
        return
    model.set_experts_implementation(usual)
    try:
        yield
    finally:
        model.set_experts_implementation(decoding)


def hf_generate_arm(pair: Pair, batch_size: int = 1, pass_bytes: int | None = 0, **options: Any) -> Arm:
    """The generate of transformers on the same target: the reference that our baseline must not be slower than.

    Args:
        pair: with the target.
        batch_size: requests that it gets at once, padded on the left; their seconds are shared equally.
        pass_bytes: bytes of weights that one pass reads, for the steps; None if that cannot be known.
        **options: more arguments for `generate`, such as `assistant_model`, or settings of the generation.
    """
    clock = Clock(pair.device)
    target: Any = pair.target
    pad = min(pair.stop_ids, default=0)
    settings = {name: value for name, value in options.items() if hasattr(GenerationConfig(), name)}
    others = {name: value for name, value in options.items() if name not in settings}
    # A static cache is kept from call to call, and what is captured reads it: no tensor of one call alone.
    without_gradients = torch.no_grad() if "cache_implementation" in options else torch.inference_mode()

    def generate(requests: list[Request], pause: Pause) -> list[Generation]:
        decoding = requests[0].decoding
        names = "temperature", "top_k", "top_p"
        sampling = {} if decoding.greedy else dict(zip(names, decoding.distribution))
        config = GenerationConfig(
            max_new_tokens=max(request.decoding.max_new_tokens for request in requests),
            do_sample=not decoding.greedy,
            eos_token_id=sorted(pair.stop_ids) or None,
            pad_token_id=pad,
            **sampling,
            **settings,
        )
        torch.manual_seed(requests[0].seed)
        experts = target.get_experts_implementation()
        clock.synchronize()
        longest = max(len(r.prompt) for r in requests)
        begins, ends, lengths = [clock.mark()], [], [longest]
        stops = torch.zeros(len(requests), dtype=torch.bool, device=pair.device)  # none of the answers

        def end_step(ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            """Ends a step, the first of which is the prefill; ids: [batch, n] so far."""
            ends.append(clock.mark())
            lengths.append(ids.shape[1])
            with usual_experts(target, experts):
                pause(len(ids) * (lengths[-1] - lengths[-2]))
            begins.append(clock.mark())
            return stops

        padding = [longest - len(r.prompt) for r in requests]
        ids = torch.tensor([[pad] * n + r.prompt for n, r in zip(padding, requests)], device=pair.device)
        mask = torch.tensor([[0] * n + [1] * (longest - n) for n in padding], device=pair.device)
        with neutral(target):
            output = target.generate(
                ids, attention_mask=mask, generation_config=config, stopping_criteria=[end_step], **others
            )
        new = output[:, longest:].tolist()
        ends.append(clock.mark())  # after the last step
        clock.synchronize()
        seconds = [clock.seconds(begin, end) for begin, end in zip(begins, ends)]
        answers = [
            truncate_at_stop(tokens[: request.decoding.max_new_tokens], pair.stop_ids)
            for tokens, request in zip(new, requests)
        ]
        share = sum(seconds) / len(requests)
        return [_generation(tokens, seconds, share) for tokens in answers]

    def _generation(tokens: list[int], seconds: list[float], share: float) -> Generation:
        finish = "stop" if tokens[-1] in pair.stop_ids else "length"
        # In a batch, or with a drafter, a step is not one token of this answer. What a batch leaves over for a single
        # request is no exception: its prefill and its rounds would stand for all.
        if batch_size > 1 or len(seconds) != len(tokens) + 1:
            return Generation(tokens, None, share, finish)
        rounds = [Step(0, 0, 1, 0, 0.0, spent, 0.0, 0, pass_bytes) for spent in seconds[1 : len(tokens)]]
        return Generation(tokens, seconds[0], share, finish, rounds)

    def fits(chunk: list[Request]) -> bool:
        """Whether a chunk is not too large, and padding makes no prompt too long for the context."""
        longest, cap = max(len(r.prompt) for r in chunk), max(r.decoding.max_new_tokens for r in chunk)
        return len(chunk) <= batch_size and longest + cap <= pair.context_length

    def in_batches(requests: list[Request], pause: Pause) -> list[Generation]:
        chunks: list[list[Request]] = []
        for request in requests:
            if not chunks or not fits([*chunks[-1], request]):
                chunks.append([])
            chunks[-1].append(request)
        return [generation for chunk in chunks for generation in generate(chunk, pause)]

    @without_gradients
    def rounds(requests: list[Request]) -> Rounds:
        return (yield from as_generator(partial(in_batches, requests)))

    return rounds
