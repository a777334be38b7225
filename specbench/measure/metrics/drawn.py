"""Whether drawn answers follow the target's distributions: the likelihood of their tokens, and tests of it."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from specbench.measure.metrics.acceptance import ratio

SURPRISE = 4.0  # standard errors: by chance beyond them once in 16,000 times
UNLIKELY = 1e-4  # p value, below which answers are not right ones
GRAIN = 2.0**-24  # how often a random number in single precision is exactly 0, which draws any first token
TINY = 1e-12  # in place of no variance
MOMENTS = ("surprise", "variance", "third", "blurred_surprise", "blurred_variance", "blurred_third")


def likelihoods(records: list[dict]) -> dict[str, dict]:
    """By arm, the likelihood of its drawn tokens under the target; {} for greedy answers.

    The method is among the arms if it draws other random numbers than the baseline; else its tokens are compared.

    - logprob: mean log p of a token.
    - standard_errors, rare_p, spread_p: as `judgement` has them.
    - lean: standard errors of the method's lean towards its drafts, or away (negative); None if no chain was drawn.
    """
    turns = (turn.get("likelihood") for record in records for turn in record["turns"])
    drawn = list(filter(None, turns))
    if not drawn:
        return {}
    by_arm = {}
    for arm in drawn[0]:
        answers = [{key: _number(value) for key, value in one[arm].items()} for one in drawn]
        logprob, tokens = (sum(one[key] for one in answers) for key in ("logprob", "tokens"))
        leans = [
            one.get("lean") or {"total": 0.0, "variance": 0.0} for one in answers
        ]  # older records lack it
        total, variance = (sum(one[key] for one in leans) for key in ("total", "variance"))
        by_arm[arm] = {
            "logprob": ratio(logprob, tokens),
            **judgement(answers),
            "lean": total / math.sqrt(variance) if variance > 0.0 else None,
        }
    return by_arm


def _number(value: Any) -> Any:
    """NaN for null, as which the journal holds what is no number; also in a list."""
    if isinstance(value, list):
        return [_number(one) for one in value]
    return math.nan if value is None else value


def judgement(likelihoods: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Three tests of whether answers are drawn from the target's distributions.

    - standard_errors: by which all tokens are less likely than drawn ones (negative), or likelier.
    - rare_p: p value of the least likely tokens; None in older records.
    - spread_p: p value of the answers' own distances: opposite errors of several answers cancel in the sum of all.

    Args:
        likelihoods: of the answers, as `Likelihood` has them.
    """
    return {
        "standard_errors": errors_of(likelihoods),
        "rare_p": rare_p(likelihoods) if all("rarest" in one for one in likelihoods) else None,
        "spread_p": spread_p(likelihoods),
    }


def errors_of(likelihoods: Sequence[Mapping[str, float]]) -> float:
    """As `standard_errors`, over all tokens of the answers with these likelihoods.

    Rounding may blur the distributions that they were drawn from by all of the noise, or by nothing. A sum between the
    two expected sums counts as 0; any other is measured from the nearer one.
    """
    sums = {key: sum(one.get(key, 0.0) for one in likelihoods) for key in MOMENTS}  # older records lack some
    surprise, variance, third, *blurred = sums.values()
    errors = standard_errors(surprise, variance, third)
    if not any(blurred):
        return errors
    expected, variance, third = blurred
    others = standard_errors(surprise - expected, variance, third)
    return 0.0 if errors * others < 0 else min(errors, others, key=abs)


def rare_p(likelihoods: Sequence[Mapping[str, Any]]) -> float:
    """Probability that drawn tokens include some as unlikely as the least likely ones of these answers.

    For each of the few least likely ones: the binomial probability that as many of all tokens are as unlikely. The
    least of these p values counts.

    Args:
        likelihoods: of the answers, as `Likelihood` has them.
    """
    tokens = sum(one["tokens"] for one in likelihoods)
    most = max(len(one["rarest"]) for one in likelihoods)
    rarest = sorted(chance for one in likelihoods for chance in one["rarest"])[:most]
    if not rarest:
        return 1.0
    from scipy import stats  # late, as below

    # A token that is left out has no chance at all.
    chances = (chance and min(chance + GRAIN, 1.0) for chance in rarest)
    return min(float(stats.binom.sf(rarer, tokens, chance)) for rarer, chance in enumerate(chances))


def spread_p(likelihoods: Sequence[Mapping[str, Any]]) -> float:
    """Probability that drawn answers are on the whole as far off, each by itself, as these.

    The squares of each answer's standard errors have a sum with a chi-square distribution, or a narrower one: few
    tokens, of which the most likely one is nearly certain, have less than one standard error.

    Args:
        likelihoods: of the answers, as `Likelihood` has them.
    """
    from scipy import stats  # late, as below

    squares = sum(errors_of([one]) ** 2 for one in likelihoods)
    return float(stats.chi2.sf(squares, len(likelihoods)))


def is_off(judged: Mapping[str, Any]) -> bool:
    """Whether tokens are not drawn from the target's distributions; True for no number, from invalid logits.

    Args:
        judged: as from `judgement`, with the standard errors of a `lean` towards the drafts if that was measured.
    """
    errors = judged["standard_errors"], judged.get("lean") or 0.0
    p_values = (judged[key] for key in ("rare_p", "spread_p") if judged[key] is not None)
    return not (
        all(one is not None and abs(one) <= SURPRISE for one in errors)
        and all(p >= UNLIKELY for p in p_values)
    )


def rarities(judged: Mapping[str, Any]) -> list[str]:
    """What `is_off` found beside the sum of all tokens, in words."""
    words = {"rare_p": "tokens that are hardly ever drawn", "spread_p": "single answers too far off"}
    p_values = ((what, judged[key]) for key, what in words.items())
    return [f"{what} (p = {p:.1g})" for what, p in p_values if p is not None and p < UNLIKELY]


def standard_errors(surprise: float, variance: float, third: float = 0.0) -> float:
    """Standard errors by which tokens are less likely than drawn ones (negative), or likelier.

    The sum is skewed: of few tokens, or at a low temperature, one unlikely token moves it far. The result is therefore
    the distance at which a normal distribution is as rare as a Pearson type III with the sum's own three moments is at
    the sum. On its short side that curve ends before the sum does: there the normal distribution is used.

    Args:
        surprise: the sum.
        variance: of it.
        third: its third central moment; 0: a normal distribution.
    """
    deviation = math.sqrt(max(variance, TINY))
    errors, skew = surprise / deviation, third / deviation**3
    if not math.isfinite(errors) or abs(skew) < 1e-3 or errors * skew < 0:
        return errors
    from scipy import stats  # late: it takes a second

    of_sum = stats.pearson3(skew)
    rare = float(of_sum.cdf(errors) if errors < 0 else of_sum.sf(errors))
    return math.copysign(float(stats.norm.isf(max(rare, sys.float_info.min))), errors)
