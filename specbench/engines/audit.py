"""Judges answers of any engine by a referee: the target itself, which is fed each answer and asked at every place.

A greedy answer is right if each token is the referee's best one, within rounding. A drawn answer is right if its tokens
are as likely as tokens drawn from the referee's distributions.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy import stats

from specbench.decoding.sampling import truncate_at_stop
from specbench.measure.likelihood import (
    BLOCK,
    Likelihood,
    is_blurred,
    most_changed,
    of_logits,
    token_logprobs,
    with_stop,
)
from specbench.measure.metrics.drawn import judgement
from specbench.measure.metrics.metrics import EXACT, TIE, VIOLATION
from specbench.measure.numeric_noise import ENGINE_NOISE, forced_logits, foreign_noise, shape_noise
from specbench.measure.truncation import LEAST_NOISE, left_in

if TYPE_CHECKING:
    from specbench.decoding.model.staged_model import StagedModel
    from specbench.decoding.sampling import SamplingParams
    from specbench.engines.answer_files import Answered
    from specbench.models.pairs import Pair

SAMPLES, SAMPLE_TOKENS = 4, 32  # answers, and tokens of each, on which the rounding noise is measured
SEEDS = 30  # answers to one prompt whose first tokens are compared with the referee's distribution
EXPECTED = 5.0  # least expected count of a token among them; rarer tokens are counted together
LEAST_ROUNDED, FAR = 3, 8.0  # fewest departures that show rounding; most times their median that it explains


@dataclass(frozen=True)
class Departure:
    """A position at which an answer differs from the referee's.

    Attributes:
        index: of the first differing token, counted from the first new one.
        token: the answer's token; None if the answer ends there.
        best: the referee's token.
        margin: how much better the referee rates its own token, in logits; None if they cannot be compared.
        reason: in words.
    """

    index: int
    token: int | None
    best: int | None
    margin: float | None
    reason: str


@dataclass(frozen=True)
class Judged:
    """The referee's judgement of one answer.

    Attributes:
        answer: the judged answer.
        margins: [n] how much better its best token is than the answer's, in logits, at each position.
        best: [n + 1] its best tokens, also after the last.
        end_margin: how much better its best token is than the best stop token after the last, in logits.
        likely: likelihood of the drawn tokens, the end of the answer included.
        logprob: sum of log p.
        room: tokens of an answer that the context has room for.
        logprob_error: mean distance of the engine's own log p from the referee's; None if it reported none.
    """

    answer: Answered
    margins: np.ndarray
    best: list[int]
    end_margin: float
    likely: Likelihood
    logprob: float
    logprob_error: float | None
    room: int


def limit_of(answer: Answered, cap: int | None, room: int) -> int:
    """Most tokens that an answer may have: its own limit, or else `cap`, but no more than there is room for."""
    return min(answer.max_new_tokens or cap or room, room)


class Referee:
    """The target, which judges answers by what it would have answered.

    Args:
        pair: with the target.
        decoding: how the answers were chosen; each has a limit of its own.
    """

    def __init__(self, pair: Pair, decoding: SamplingParams):
        self.pair, self.decoding = pair, decoding
        self.target: StagedModel = pair.staged

    def judge(
        self, answer: Answered, cap: int | None = None, noise: float = 0.0, edge_noise: float = 0.0
    ) -> Judged:
        """Feeds an answer to the target.

        Args:
            answer: of an engine.
            cap: most tokens of it, if it has no limit of its own.
            noise: as in `of_logits`.
            edge_noise: likewise.
        """
        tokens, device = answer.tokens, self.target.device
        # One token more, for the logits after the last one.
        logits = forced_logits(self.target, answer.prompt, [*tokens, 0], BLOCK)
        ids = torch.tensor(tokens, dtype=torch.long, device=device).unsqueeze(1)
        highest, best = logits.max(-1)
        margins = highest[:-1] - logits[:-1].gather(1, ids).squeeze(1)
        stops = torch.tensor(sorted(self.pair.stop_ids), device=device)
        end_margin = (highest[-1] - logits[-1, stops].max()).item() if len(stops) else math.inf
        room = self.pair.context_length - len(answer.prompt)
        drawn = with_stop(tokens, limit_of(answer, cap, room), self.pair.stop_ids, logits[-1])
        likely = of_logits(logits[: len(drawn)], drawn, self.decoding, noise, edge_noise)
        of_answer = likely if drawn is tokens else of_logits(logits[:-1], tokens, self.decoding)
        error = None
        if answer.logprobs is not None and tokens:
            logprobs = torch.tensor(answer.logprobs, dtype=torch.double, device=device)
            ours = token_logprobs(logits[:-1], self.decoding.temperature).gather(1, ids).squeeze(1)
            error = (logprobs - ours).abs().mean().item()
        return Judged(
            answer,
            margins.cpu().numpy(),
            best.tolist(),
            end_margin,
            likely,
            of_answer.logprob,
            error,
            room,
        )

    def noise(self, answers: Sequence[Answered]) -> float:
        """The rounding noise between the referee and any other program on some of the answers, in logits."""
        samples = [(a.prompt, a.tokens[:SAMPLE_TOKENS]) for a in answers if a.tokens]
        # The longest ones, earlier ones first.
        samples = sorted(samples, key=lambda sample: -len(sample[1]))[:SAMPLES]
        return max(shape_noise(self.target, samples), foreign_noise(self.target, samples)) if samples else 0.0

    @torch.inference_mode()
    def first_tokens(self, prompt: list[int], noise: float) -> FirstTokens:
        """Evaluates the first token after a prompt; noise: the `edge_noise` of `of_logits`."""
        logits = forced_logits(self.target, prompt, [0], BLOCK)[0].cpu()
        probs = (logits / (self.decoding.temperature or 1.0)).softmax(-1).double()
        always, ever = left_in(logits, self.decoding, max(noise, LEAST_NOISE))
        return FirstTokens(probs.numpy(), always.numpy(), ever.numpy())


@dataclass(frozen=True)
class FirstTokens:
    """The referee's distribution of the first token after a prompt.

    Attributes:
        probs: [vocab] of the whole vocabulary.
        always: [vocab] the tokens that top_k and top_p do not leave out, whatever rounding does.
        ever: [vocab] those that they may not leave out.
    """

    probs: np.ndarray
    always: np.ndarray
    ever: np.ndarray

    def p_value(self, counts: np.ndarray, odds: float) -> float:
        """As `multinomial_p`, for draws with top_k and top_p.

        Tokens that rounding may let in or leave out say nothing, so the others are judged given that it is one of them.
        """
        if counts[~self.ever].any():
            return 0.0
        counts, probs = counts * self.always, self.probs * self.always
        return multinomial_p(counts, probs / probs.sum(), odds) if counts.any() else 1.0


@dataclass(frozen=True)
class Arm:
    """An engine's answers in one configuration, with the referee's judgements.

    Attributes:
        name: of the arm.
        judged: its answers.
        bound: logits within which a departure is rounding.
        stop_ids: that end an answer.
        cap: most tokens of an answer, if its line has no limit.
        drawn: whether the answers were drawn: their ends are then judged with their likelihood.
        blur: rounding noise of the logits that they were drawn from; 0 in float32 without top_k and top_p, where it is
            negligible.
    """

    name: str
    judged: list[Judged]
    bound: float
    stop_ids: frozenset[int]
    cap: int | None
    drawn: bool = False
    blur: float = 0.0

    def departure(self, judged: Judged) -> Departure | None:
        """The first position at which an answer differs from the referee's, violations first; None if it is exact."""
        answer, margins = judged.answer, judged.margins
        wrong = np.flatnonzero(margins > self.bound)
        if len(wrong):
            return self._at(judged, int(wrong[0]), "a token that the referee would not say")
        end = self.wrong_end(judged)
        if end is not None:
            return end
        other = np.flatnonzero(np.array(judged.best[:-1]) != np.array(answer.tokens, dtype=int))
        if len(other):
            return self._at(judged, int(other[0]), "rounding")
        # It ends where the referee's stop token is nearly its best.
        if not self.drawn and judged.end_margin > 0 and self._ends_openly(judged):
            return Departure(len(answer.tokens), None, judged.best[-1], judged.end_margin, "rounding")
        return None

    def verdict(self, judged: Judged) -> str:
        """exact, tie or violation."""
        departure = self.departure(judged)
        if departure is None:
            return EXACT
        return TIE if departure.margin is not None and departure.margin <= self.bound else VIOLATION

    @cached_property
    def verdicts(self) -> Counter[str]:
        """How many answers have each verdict."""
        return Counter(map(self.verdict, self.judged))

    @property
    def tokens(self) -> int:
        """Number of tokens of all answers."""
        return sum(len(one.margins) for one in self.judged)

    @property
    def logprob(self) -> float:
        """Mean log p of a token."""
        return sum(one.logprob for one in self.judged) / max(self.tokens, 1)

    @cached_property
    def judgement(self) -> dict[str, float | None]:
        """Whether the answers are drawn from the target's distributions, see `judgement`."""
        return judgement([asdict(one.likely) for one in self.judged])

    @property
    def logprob_error(self) -> float | None:
        """Mean distance of the engine's log p from the referee's, over the answers that have any."""
        errors = [one.logprob_error for one in self.judged if one.logprob_error is not None]
        return float(np.mean(errors)) if errors else None

    def _at(self, judged: Judged, index: int, reason: str) -> Departure:
        margin = float(judged.margins[index])
        return Departure(index, judged.answer.tokens[index], judged.best[index], margin, reason)

    @property
    def wrong_ends(self) -> int:
        """Number of answers that continue after their end, or end where nothing ends them."""
        return sum(self.wrong_end(one) is not None for one in self.judged)

    def wrong_end(self, judged: Judged) -> Departure | None:
        """The departure of an answer that continues after its end, or ends where nothing ends it."""
        answer, n = judged.answer, len(judged.answer.tokens)
        ended = len(truncate_at_stop(answer.tokens, self.stop_ids))
        if ended < n:
            return Departure(ended, answer.tokens[ended], None, None, "continues after a stop token")
        limit = limit_of(answer, self.cap, judged.room)
        if n > limit:
            return Departure(limit, answer.tokens[limit], None, None, "continues after its limit")
        # Some engines leave the stop token out.
        may_end = judged.end_margin <= self.bound or (self.drawn and self.stop_ids)
        if may_end or not self._ends_openly(judged):
            return None
        return Departure(n, None, judged.best[-1], None, "ends early")

    def _ends_openly(self, judged: Judged) -> bool:
        """Whether an answer ends neither with a stop token nor at its limit."""
        tokens = judged.answer.tokens
        stopped = bool(tokens) and tokens[-1] in self.stop_ids
        return not stopped and len(tokens) != limit_of(judged.answer, self.cap, judged.room)


def arms_of(
    referee: Referee, answers_by_arm: dict[str, list[Answered]], cap: int | None, tolerance: float | None
) -> list[Arm]:
    """Judges the answers of each arm; the first one is the plain one, if there are several.

    Args:
        referee: judges.
        answers_by_arm: an engine's answers, by the name of its configuration.
        cap: tokens of an answer at most; None: the longest answer's.
        tolerance: logits within which a departure is rounding; None: the noise that the referee measures, or what the
            plain arm's rounding explains (`largest_rounding`), if that is more.
    """
    everything = [answer for answers in answers_by_arm.values() for answer in answers]
    if cap is None:
        cap = max(1, *(len(answer.tokens) for answer in everything))
    bound = referee.noise(everything) if tolerance is None else tolerance
    drawn = not referee.decoding.greedy
    blur = bound if drawn and is_blurred(referee.target.dtype, referee.decoding) else 0.0
    judged = {
        name: [referee.judge(a, cap, blur, bound) for a in answers]
        for name, answers in answers_by_arm.items()
    }
    stop_ids = referee.pair.stop_ids
    if tolerance is None and len(judged) > 1 and not drawn:
        bound = max(bound, largest_rounding(next(iter(judged.values()))))
    return [Arm(name, ones, bound, stop_ids, cap, drawn, blur) for name, ones in judged.items()]


def largest_rounding(judged: Sequence[Judged]) -> float:
    """The largest margin of some answers that rounding may explain, in logits.

    Rounding makes tokens differ at several positions, by amounts of similar size. A single departure, or one far beyond
    the others, is a fault: it must not become the bound for the other arm.
    """
    margins = np.concatenate([one.margins for one in judged])
    margins = margins[(margins > 0.0) & (margins <= ENGINE_NOISE)]
    if len(margins) < LEAST_ROUNDED:
        return 0.0
    return float(min(margins.max(), FAR * np.median(margins)))


@dataclass(frozen=True)
class Likelihoods:
    """How likely the tokens of two arms are, prompt by prompt.

    Attributes:
        prompts: number of prompts that both answered.
        difference: of the mean log p of a token, the second arm's less the first's.
        low: of its 95 % interval; None with one prompt.
        high: see `low`.
    """

    prompts: int
    difference: float
    low: float | None
    high: float | None


def likelihoods(first: Arm, second: Arm) -> Likelihoods | None:
    """Compares the second arm's tokens with the first's, paired by prompt (t interval); None without common prompts."""

    def means(arm: Arm) -> dict[tuple[int, ...], float]:
        sums: dict[tuple[int, ...], list[tuple[float, int]]] = defaultdict(list)
        for one in arm.judged:
            if one.answer.tokens:
                sums[tuple(one.answer.prompt)].append((one.logprob, len(one.answer.tokens)))
        return {prompt: sum(x for x, _ in s) / sum(n for _, n in s) for prompt, s in sums.items()}

    plain, other = means(first), means(second)
    differences = np.array([other[prompt] - plain[prompt] for prompt in plain.keys() & other.keys()])
    if not len(differences):
        return None
    if len(differences) == 1 or np.ptp(differences) == 0.0:
        same = None if len(differences) == 1 else float(differences[0])
        return Likelihoods(len(differences), float(differences.mean()), same, same)
    interval = stats.ttest_1samp(differences, 0.0).confidence_interval(0.95)
    return Likelihoods(len(differences), float(differences.mean()), float(interval.low), float(interval.high))


def first_tokens(referee: Referee, arm: Arm) -> Iterator[tuple[Answered, int, float]]:
    """Yields, for each prompt with many answers: one of them, their number, and the p value of their first tokens.

    The p value is the least one of exact binomial tests of the count of all frequent tokens and of each of these, times
    their number (Bonferroni). Chi-square tests of cells with five expected answers have too small p values.
    """
    by_prompt: dict[tuple[int, ...], list[Answered]] = defaultdict(list)
    for one in arm.judged:
        if one.answer.tokens or arm.stop_ids:
            by_prompt[tuple(one.answer.prompt)].append(one.answer)
    for answers in by_prompt.values():
        n = len(answers)
        if n < SEEDS:
            continue
        first = referee.first_tokens(answers[0].prompt, arm.bound)
        # That an empty answer left out.
        stop = max(arm.stop_ids, key=lambda token: first.probs[token], default=0)
        counts = np.bincount([(answer.tokens or [stop])[0] for answer in answers], minlength=len(first.probs))
        yield answers[0], n, first.p_value(counts, most_changed(arm.blur, referee.decoding.temperature))


def multinomial_p(counts: np.ndarray, probs: np.ndarray, odds: float = 1.0) -> float:
    """The p value of counts [vocabulary] of independent draws from probs [vocabulary]; no lower than the exact one.

    odds: factor by which rounding may change the odds of a token: the share that fits best counts.
    """
    n, often = int(counts.sum()), probs * counts.sum() >= EXPECTED
    cells = [
        (int(counts[often].sum()), float(probs[often].sum())),
        *zip(counts[often].tolist(), probs[often].tolist()),
    ]

    def p_value(seen: int, share: float) -> float:
        low, high = (min(share * odd / (1.0 - share + share * odd), 1.0) for odd in (1.0 / odds, odds))
        return stats.binomtest(seen, n, min(max(seen / n, low), high)).pvalue

    return min(1.0, len(cells) * min(p_value(seen, min(share, 1.0)) for seen, share in cells))


def same_answers(first: Arm, second: Arm) -> tuple[int, int]:
    """Number of answers to common prompts that are equal in two arms up to their end, and of all answers compared."""
    queues: dict[tuple[int, ...], list[list[int]]] = defaultdict(list)
    for one in first.judged:
        queues[tuple(one.answer.prompt)].append(truncate_at_stop(one.answer.tokens, first.stop_ids))
    same = both = 0
    for one in second.judged:
        if queue := queues[tuple(one.answer.prompt)]:
            both += 1
            same += queue.pop(0) == truncate_at_stop(one.answer.tokens, second.stop_ids)
    return same, both
