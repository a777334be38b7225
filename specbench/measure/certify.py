"""Is the answer of a method the answer of the target? Judged on token ids, never on text."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch

from specbench.config.spec import AGAIN, BASELINE, HF, METHOD, OWN_LOOP, POOL
from specbench.decoding.sampling import TARGET, position_uniforms, truncate_at_stop
from specbench.measure.engine_referee import EngineReferee, NotReportedError
from specbench.measure.lean import Lean, leans
from specbench.measure.likelihood import Likelihood, is_blurred, is_judged_by_ours, likelihood
from specbench.measure.metrics.metrics import EXACT, TIE, VERDICTS, VIOLATION
from specbench.measure.numeric_noise import (
    BLOCKS,
    ShapeChanges,
    batch_noise,
    drawn_margin,
    engine_noise,
    forced_logits,
    foreign_noise,
    next_logits,
    shape_changes,
    shape_noise,
    tie_chance,
)
from specbench.system.settings import TOKEN

if TYPE_CHECKING:
    from specbench.decoding.state import Request
    from specbench.decoding.trace import Generation
    from specbench.measure.arms import Setup
    from specbench.measure.protocol import Protocol

NOISE_TOKENS = 32  # of each warm-up question, on which the rounding noise is measured


@dataclass(frozen=True, slots=True)
class Certificate:
    """The verdict on one answer (None: not judged by its tokens, for example if a drafter draws), and its basis.

    first_divergence: index of the first difference, counted from the first new token; None when exact.
    margin: how far apart the two tokens are there for the target, in logits. Greedy: the logit of the reference's token
    minus that of the answer's. Sampling: see `drawn_margin`. If the reference's own token is further from the target's
    choice, this distance; if only later tokens are wrong, the largest distance of theirs. None if there are no two
    tokens to compare.
    noise: the rounding noise that the margin was compared with, in logits; None without a margin.
    """

    verdict: str | None
    first_divergence: int | None
    margin: float | None
    noise: float | None


def certify(
    reference: Sequence[int],
    answer: Sequence[int],
    stop_ids: Collection[int],
    margin_at: Callable[[int, int, int], float],
    noise: Callable[[], float],
    worst_after: Callable[[list[int], int], float] | None = None,
) -> Certificate:
    """Compares an answer with the reference: new token ids of both, cut after the first stop token.

    At the first differing token `margin_at(index, reference_token, answer_token)` returns the target's margin between
    the two after the common prefix: within `noise()` it is a tie, a choice that rounding alone can change. From there
    on the texts differ, so `worst_after(answer, index)` returns how far the answer departs from the target's choices
    after that very text. Everything else is a violation, including an answer that is shorter or longer than the
    reference without a differing token: the token that ends an answer is a token, so no near-tie explains a missing
    one. An answer that continues after its stop token is a violation, too.
    """
    ours, theirs = truncate_at_stop(answer, stop_ids), truncate_at_stop(reference, stop_ids)
    for index, (reference_token, answer_token) in enumerate(zip_longest(theirs, ours)):
        if reference_token == answer_token:
            continue
        if reference_token is None or answer_token is None:
            return Certificate(VIOLATION, index, None, None)
        margin, limit = margin_at(index, reference_token, answer_token), noise()
        if not abs(margin) <= limit or len(answer) > len(ours):
            return Certificate(VIOLATION, index, margin, limit)
        after = 0.0 if worst_after is None else worst_after(ours, index)
        if not after <= limit:
            return Certificate(VIOLATION, index, after, limit)
        return Certificate(TIE, index, margin, limit)
    if len(answer) > len(ours):
        return Certificate(VIOLATION, len(ours), None, None)
    return Certificate(EXACT, None, None, None)


def worst(certificates: Iterable[Certificate]) -> Certificate:
    """The worst certificate; one without a verdict is the best."""
    return max(certificates, key=lambda one: -1 if one.verdict is None else VERDICTS.index(one.verdict))


def greedy_margin(logits: torch.Tensor, tokens: Collection[int]) -> float:
    """The largest of the logits [vocab] minus the largest logit of `tokens`."""
    return float(logits.max()) - max((float(logits[token]) for token in tokens), default=-math.inf)


class Certifier:
    """Judges the answers of a run by the reference's first answer to the same prompt.

    Args:
        setup: models and arms.
        protocol: with the warm-up questions, on which the rounding noise is measured.
    """

    def __init__(self, setup: Setup, protocol: Protocol):
        self.setup, self.protocol = setup, protocol
        self._first: dict[tuple[int, int, str, int], list[int]] = {}

    def recall(self, records: list[dict]) -> None:
        """Takes the answers of earlier repeats from the journal: later ones are certified against the first."""
        for record in records:
            for turn in record["turns"]:
                self.first_answer(record["question_id"], record["repeat"], turn)

    def first_answer(self, question_id: int, repeat: int, turn: dict) -> list[int]:
        """The reference's first answer to a prompt: that of `turn`, a journal record, if there is no earlier one."""
        # When sampling, every repeat has a text of its own.
        key = question_id, turn["turn"], turn["prompt_sha256"], 0 if self.protocol.decoding.greedy else repeat
        return self._first.setdefault(key, turn["arms"][self.setup.reference][0]["tokens"])

    def judge(
        self, arm: str, requests: dict[str, Request], answers: dict[str, list[Generation]], first: list[int]
    ) -> Certificate:
        """The worst certificate of an arm's answers to a question, and of the reference's, against the first answer.

        With another engine, later answers of the reference are judged with the arm that repeats its plain answers: if
        they differ, the engine is not stable, whatever the method does.

        Answers to other prompts are not judged, nor those drawn with other random numbers than the reference's (by
        transformers, by another engine, or with a drafter that draws), unless they continue after their end. Where our
        loop's answer differs from another engine's, it is that engine's that is followed to its end. An engine that
        decodes with a file of its own is judged by its plain server.

        Args:
            arm: its name.
            requests: of each arm.
            answers: of each arm, in every attempt: an attempt whose times are discarded must be right, too.
            first: the reference's first answer.
        """
        setup, request = self.setup, requests[self.setup.reference]
        stop_ids = setup.pair.stop_ids
        if setup.served is None:
            judged = {arm, setup.reference}
        else:
            judged = {AGAIN, BASELINE, setup.reference} if arm == AGAIN else {arm}
        texts = {tuple(answer.tokens) for name in judged for answer in answers[name]}
        if setup.served is not None and arm == OWN_LOOP:
            texts, first = {tuple(first)}, answers[OWN_LOOP][0].tokens
        same_draws = (
            request.decoding.greedy or arm == BASELINE or (arm == METHOD and setup.drafter.deterministic)
        )
        if not same_draws or requests[arm].prompt != request.prompt:
            late = any(
                truncate_at_stop(one.tokens[: requests[name].decoding.max_new_tokens], stop_ids) != one.tokens
                for name in judged
                for one in answers[name]
            )
            return Certificate(VIOLATION if late else None, None, None, None)

        if self.engine_referee is not None:
            return self._judge_by_engine(self.engine_referee, arm, request, first, texts)
        return self._judge_by_target(arm, request, first, texts)

    def _judge_by_target(
        self, arm: str, request: Request, first: list[int], texts: set[tuple[int, ...]]
    ) -> Certificate:
        """As `judge`, for the distinct `texts` of an arm."""
        setup, prompt, decoding = self.setup, request.prompt, request.decoding
        stop_ids = setup.pair.stop_ids

        def margin(logits: torch.Tensor, token: int, index: int) -> float:
            if decoding.greedy:
                return greedy_margin(logits, [token])
            draws = position_uniforms(request.seed, decoding.max_new_tokens, 1, setup.pair.device)
            return drawn_margin(logits, token, decoding, float(draws[index, TARGET]))

        def margin_at(index: int, preferred: int, other: int) -> float:
            logits = next_logits(setup.target, prompt, first, index)
            apart = (
                float(logits[preferred] - logits[other]) if decoding.greedy else margin(logits, other, index)
            )
            # The reference may be what is wrong.
            return max(apart, margin(logits, preferred, index), key=abs)

        def worst_after(answer: list[int], index: int) -> float:
            if len(answer) > decoding.max_new_tokens:
                return math.inf
            logits = forced_logits(setup.target, prompt, [*answer, 0], max(BLOCKS))
            margins = [margin(logits[i], answer[i], i) for i in range(index + 1, len(answer))]
            if answer[-1] not in stop_ids and len(answer) < decoding.max_new_tokens:
                # Only a stop token that the engine omitted can have ended it; whether it was drawn is unknown.
                margins.append(greedy_margin(logits[-1], stop_ids) if decoding.greedy else math.inf)
            return max(margins, key=lambda one: math.inf if math.isnan(one) else one, default=0.0)

        return worst(
            certify(first, list(text), stop_ids, margin_at, lambda: self.noise(arm), worst_after)
            for text in texts
        )

    def _judge_by_engine(
        self,
        referee: EngineReferee,
        arm: str,
        request: Request,
        first: list[int],
        texts: set[tuple[int, ...]],
    ) -> Certificate:
        """As `judge`, if only the engine has the target's weights: our loop's answers are another target's then."""
        if arm == OWN_LOOP:
            return Certificate(None, None, None, None)
        noise = referee.noise if texts != {tuple(first)} else 0.0
        margin_at, worst_after = referee.margin_at(request, first), referee.worst_after(request)
        stop_ids = self.setup.pair.stop_ids
        where = ": its answers that differ" if noise is None else " where some answers differ: they"

        def noise_of() -> float:
            if noise is None:
                raise NotReportedError
            return noise

        def judged(text: tuple[int, ...]) -> Certificate:
            try:
                return certify(first, list(text), stop_ids, margin_at, noise_of, worst_after)
            except NotReportedError:
                referee.served.note(f"{arm}: it reports no log-probabilities{where} are not judged")
                return Certificate(None, None, None, None)

        return worst(map(judged, texts))

    @cached_property
    def engine_referee(self) -> EngineReferee | None:
        """The judge of an engine whose target's weights only it has; None if the pair's target judges."""
        served = self.setup.served
        if served is None or not served.has_own_file:
            return None
        return EngineReferee(served, self.protocol.warm_up_requests(NOISE_TOKENS), self.setup.pair.stop_ids)

    @property
    def by_likelihood(self) -> tuple[str, ...]:
        """The arms whose drawn answers are judged by their likelihood.

        These are the baseline, which transformers draws with other random numbers, and a method that does so as well.
        """
        if self.protocol.decoding.greedy:
            return ()
        same_draws = self.setup.served is None and self.setup.drafter.deterministic
        return (BASELINE,) if same_draws else (BASELINE, METHOD)

    def likelihood(self, request: Request, tokens: list[int]) -> Likelihood:
        """The likelihood of a drawn answer under the target."""
        target, decoding, stop_ids = self.setup.target, request.decoding, self.setup.pair.stop_ids
        noise = edge_noise = 0.0
        if is_blurred(target.dtype, decoding):
            noise = self.noise(METHOD)
            if not is_judged_by_ours(target):  # but by the model's own passes, as another program's are
                noise = max(noise, self._noise_of_others)
        if decoding.truncation:
            edge_noise = max(noise, self._noise_of_others)
        return likelihood(target, request.prompt, tokens, decoding, stop_ids, noise, edge_noise)

    def leans(self, requests: list[Request]) -> list[Lean]:
        """How far the method's sampled answers lean towards their drafts; [] if that cannot be measured.

        It cannot with another engine, or if drafts are verified as a block: which places are judged then depends on
        later tokens.
        """
        drafter, decoding = self.setup.drafter, self.protocol.decoding
        if METHOD not in self.by_likelihood or drafter.deterministic or decoding.verification != TOKEN:
            return []
        engine = next((one for one in self.setup.engines if one.drafter is drafter), None)
        return [] if engine is None else leans(engine, requests)

    def tie_chance(self, request: Request, first: list[int]) -> float | None:
        """Probability that rounding makes a method's answer differ from the reference's; None if not computed.

        It is not computed for sampled answers, batches, other engines, passes of one width, and float32, where ties
        are so few that each is worth a look.
        """
        setup, target = self.setup, self.setup.target
        alone = setup.served is None and setup.spec.unit != POOL and target.width is None
        if not alone or target.dtype == torch.float32 or not self.protocol.decoding.greedy:
            return None
        return tie_chance(target, request.prompt, first, self._rounding)

    def noise(self, arm: str) -> float:
        """The rounding noise in logits between an arm and the reference, on its answers to the warm-up questions.

        It is measured on first use: the first answer that differs waits for it, not the first question.
        """
        bounds = [self._noise_of_shapes]
        if self.setup.served is not None:
            bounds.append(self._noise_of_served)
        if self.setup.served is not None or arm == HF:
            bounds.append(self._noise_of_others)
        return max(bounds)

    @cached_property
    def _samples(self) -> list[tuple[list[int], list[int]]]:
        """Prompts of the warm-up questions and the reference's answers."""
        requests = self.protocol.warm_up_requests(NOISE_TOKENS)
        answers = self.setup.answers(self.setup.reference, requests)
        return [(request.prompt, answer.tokens) for request, answer in zip(requests, answers)]

    @cached_property
    def _noise_of_shapes(self) -> float:
        """Between passes of ours of different shapes."""
        setup, changes = self.setup, self._changes_of_shapes
        trees, widest = setup.drafter.max_nodes > 0, setup.verify_tokens
        rows = setup.spec.batch_size if setup.spec.unit == POOL else 1
        noise = shape_noise(setup.target, self._samples, trees, widest, rows, changes)
        if setup.spec.unit == POOL:
            noise = max(noise, batch_noise(setup.target, self._samples, rows, widest))
        return noise

    @cached_property
    def _changes_of_shapes(self) -> ShapeChanges:
        """Changes between such passes, by place."""
        setup = self.setup
        return shape_changes(setup.target, self._samples, setup.drafter.max_nodes > 0, setup.verify_tokens)

    @cached_property
    def _rounding(self) -> torch.Tensor:
        """Those changes, capped at half the noise, and an unseen one as large as the noise."""
        changes, noise = self._changes_of_shapes.values, self._noise_of_shapes
        return torch.cat([changes.clamp(max=noise / 2), changes.new_tensor([noise])])

    @cached_property
    def _noise_of_served(self) -> float:
        """Between our passes and those of another engine."""
        served = self.setup.served
        assert served is not None
        drawn = self.protocol.warm_up_requests(NOISE_TOKENS)
        # Greedy: if a server returns no probabilities, a drawn token would pass for rounding.
        requests = [replace(one, decoding=one.decoding.greedily()) for one in drawn]
        answers = [(request.prompt, *served.tops(request)) for request in requests]
        return engine_noise(self.setup.target, answers)

    @cached_property
    def _noise_of_others(self) -> float:
        """Between our passes and those of any other program."""
        return foreign_noise(self.setup.target, self._samples)
