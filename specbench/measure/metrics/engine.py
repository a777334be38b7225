"""What a run of another engine holds beside its method: the engine against itself, and against this project."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

from specbench.config.spec import AGAIN, BASELINE, METHOD, OWN_LOOP
from specbench.measure.metrics.acceptance import ratio
from specbench.measure.metrics.metrics import equivalence, speedups

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

SURPRISE = 4.0  # standard errors: by chance beyond them once in 16,000 times
RARE = 1e-4  # p value of the least likely tokens
GRAIN = 2.0**-24  # how often a random number in single precision is exactly 0, which draws any first token
TINY = 1e-12  # in place of no variance
MOMENTS = ("surprise", "variance", "third", "blurred_surprise", "blurred_variance", "blurred_third")


def engine_numbers(records: list[dict], generations: pd.DataFrame, facts: dict) -> dict | None:
    """Name, version and faults of the engine, and numbers of its plain arm; None for this project's own.

    - again: the plain arm's second answer as if it were a method: speedup, low and high are noise.
    - again_equivalence: verdicts on it.
    - own_tokens_per_second: of this project's autoregressive decoding.

    Args:
        records: of the journal, failed questions included.
        generations: the answers of the others, as from `generations_frame`.
        facts: of the run.
    """
    engine = facts.get("engine")
    if engine is None:
        return None
    twice = generations[generations["arm"].isin([BASELINE, AGAIN])]
    again, _ = speedups(twice.replace({"arm": {AGAIN: METHOD}}), BASELINE, facts["unit"])
    loop = generations[generations["arm"] == OWN_LOOP]
    return engine | {
        "again": {"speedup": again.value, "low": again.low, "high": again.high},
        "again_equivalence": equivalence(records, "again_equivalence"),
        "own_tokens_per_second": ratio(loop["tokens"].sum(), loop["seconds"].sum()),
    }


def likelihoods(records: list[dict]) -> dict[str, dict]:
    """By arm, the likelihood of its drawn tokens under the target; {} if answers are judged by their tokens.

    - logprob: mean log p of a token.
    - standard_errors: by which the tokens are less likely than drawn ones (negative), or likelier.
    - rare_p: p value of the least likely tokens, as `rare_p` has it; None in older records.
    - lean: standard errors of the method's lean towards its drafts, or away (negative); None if no chain was drawn.
    """
    turns = (turn.get("likelihood") for record in records for turn in record["turns"])
    drawn = list(filter(None, turns))
    if not drawn:
        return {}
    by_arm = {}
    for arm in (BASELINE, METHOD):
        answers = [one[arm] for one in drawn]
        logprob, tokens = (sum(one[key] for one in answers) for key in ("logprob", "tokens"))
        leans = [
            one.get("lean") or {"total": 0.0, "variance": 0.0} for one in answers
        ]  # older records lack it
        total, variance = (sum(one[key] for one in leans) for key in ("total", "variance"))
        by_arm[arm] = {
            "logprob": ratio(logprob, tokens),
            "standard_errors": errors_of(answers),
            "rare_p": rare_p(answers) if all("rarest" in one for one in answers) else None,
            "lean": total / math.sqrt(variance) if variance > 0.0 else None,
        }
    return by_arm


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

    chances = (min(chance + GRAIN, 1.0) for chance in rarest)
    return min(float(stats.binom.sf(rarer, tokens, chance)) for rarer, chance in enumerate(chances))


def is_off(errors: float, rare: float | None, lean: float | None = None) -> bool:
    """Whether tokens are not drawn from the target's distributions; True for NaN, from invalid logits.

    Args:
        errors: standard errors off.
        rare: p value of the least likely tokens, if there is one.
        lean: standard errors of a lean towards the drafts, if it was measured.
    """
    return not (abs(errors) <= SURPRISE and abs(lean or 0.0) <= SURPRISE and (rare is None or rare >= RARE))


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
