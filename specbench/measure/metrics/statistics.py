"""How sure a speedup is: t-intervals on the jackknifed logarithm of a ratio.

Over questions (batches: pools) such an interval shows how far the figure would move with other questions; over passes
or processes, how far it would move if the same ones were measured again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

CONFIDENCE = 0.95
# For n < 6, P(all samples on one side of the median) = 2 * 2^-n > 5 %, so that an interval covers too little.
LEAST_QUESTIONS = 6
# Or repeats of one pool: enough for a standard error, and Student's t is as wide as so few need.
LEAST_POOLS = 2
LEAST_PASSES = 2


Run = Sequence[Sequence[float]]  # the columns of `quotient`, [questions] or [runs] each


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and the bounds of its 95 % interval: a speedup, another ratio of runs, or a share.

    The bounds are None for what needs no interval, and for fewer than 6 questions, or 2 pools. `freedom` are the
    degrees of freedom of their Student's t; for a joined interval, by Welch and Satterthwaite.
    """

    value: float | None
    low: float | None
    high: float | None
    freedom: float | None = field(default=None, compare=False)

    @property
    def width(self) -> float | None:
        """Of the interval; None without one."""
        return None if self.low is None or self.high is None else self.high - self.low


def quotient(
    above: np.ndarray,
    below: np.ndarray,
    decoding: np.ndarray | float = 0.0,
    reference_tokens: np.ndarray | float = 1.0,
    tokens: np.ndarray | float = 1.0,
) -> np.ndarray:
    """The ratio of the sums of a run's columns, with the method's decoding scaled to the reference's number of tokens.

    above / (below + decoding * (reference_tokens / tokens - 1))

    Args:
        above: seconds of the reference, or another numerator.
        below: seconds of the method, or another denominator.
        decoding: those of the method's seconds in which it emitted `tokens`.
        reference_tokens: that the reference emitted in the same part of its answers.
        tokens: of the method.

    Returns:
        Not finite, or not above 0, if there is no time, or no token of the method to scale by.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        excess = np.where(np.equal(reference_tokens, tokens), 0.0, np.divide(reference_tokens, tokens) - 1)
        return above / (below + decoding * excess)


def speedup(*run: Sequence[float], pools: Sequence | None = None, processes: Sequence[Run] = ()) -> Estimate:
    """Ratio of sums, with a t-interval on the delete-one jackknife of its logarithm (Efron and Tibshirani 1993, 11).

    A question is dropped with all its times, so that what they share (a long answer) cancels. For times of 6 to 36
    questions that vary like real ones the interval covers the truth in about 0.90 to 0.95 of all runs, least for few
    questions and heavy tails (`python -m tests.benchmarks.coverage`); a bootstrap (BCa) does in 0.80 to 0.90.

    Args:
        run: the columns of `quotient`, [questions] each: seconds of the reference, seconds of the method, and more
            if the lengths of their answers differ.
        pools: for batches, [runs]: the pool of each run; the arrays are then the seconds of all questions that were
            decoded together. A disturbance affects all questions of a run, and what is special about a pool all its
            repeats: so the mean of a pool's repeats is dropped as a whole. With one pool alone each repeat is dropped,
            and the interval covers timing noise only.
        processes: if several measured, the columns of each. The interval over processes, as in `over_passes`, and
            that over questions are then joined: the squares of their half widths (of the logarithm) are added. Noise
            that both hold counts twice. Repeats of one pool and processes show the same noise: the latter count alone.

    Returns:
        All None without any time; no interval for fewer than 6 questions or 2 pools (or repeats of one pool), or if a
        single one holds all the time.

    Raises:
        ValueError: arrays that are not of one length.
    """
    sums = np.array([[np.sum(column) for column in process] for process in processes]).T
    return _jackknife([run], _only, pools, [sums])


def over_passes(*run: Sequence[float]) -> Estimate:
    """Ratio of sums, with a t-interval over passes (or processes) on the same questions.

    It shows how far the figure would move if the same questions were measured again; others are not covered.

    Args:
        run: the columns of `quotient`, [passes] each, sums over all questions.

    Returns:
        No interval of fewer than two passes.

    Raises:
        ValueError: arrays that are not of one length.
    """
    return _jackknife([run], _only, None, least=LEAST_PASSES)


def ratio_of_means(
    first: Sequence[Run],
    second: Sequence[Run],
    pools: Sequence | None = None,
    processes: Sequence[Run] = (),
) -> Estimate:
    """Mean of the ratios of the runs `second` / mean of those of the runs `first`, with an interval as in `speedup`.

    Each run holds the seconds of its own baseline and of the method, over the same questions in the same order: so that
    a machine that was slower during one of them cancels out. A question is dropped with all its times.

    Args:
        first: runs, each the columns of `quotient`, [questions].
        second: as `first`.
        pools: as in `speedup`.
        processes: of each run of `first` and then of `second`, its columns [processes], the sums of each process. Their
            jackknife variances are joined with that over questions, as in `speedup`, since processes of different runs
            are independent. A run of one process adds nothing: how far processes differ is not known.

    Returns:
        As `speedup`.

    Raises:
        ValueError: arrays that are not of one length.
    """

    def statistic(ratios: Sequence[np.ndarray]) -> np.ndarray:
        return np.mean(ratios[len(first) :], axis=0) / np.mean(ratios[: len(first)], axis=0)

    return _jackknife([*first, *second], statistic, pools, [np.array(run, float) for run in processes])


def verdict(low: float | None, high: float | None) -> str | None:
    """Whether a method is "faster", "slower", or neither, by its interval; None when there is no interval."""
    if low is None or high is None:
        return None
    if low > 1:
        return "faster"
    return "slower" if high < 1 else "no difference"


def _only(ratios: Sequence[np.ndarray]) -> np.ndarray:
    """The statistic of one run: its ratio."""
    return ratios[0]


def _jackknife(
    runs: Sequence[Run],
    statistic: Callable[[Sequence[np.ndarray]], np.ndarray],
    pools: Sequence | None,
    between: Sequence[np.ndarray] = (),
    least: int = LEAST_QUESTIONS,
) -> Estimate:
    """A statistic of the runs' ratios, with the interval that `speedup` describes.

    Args:
        runs: the columns of `quotient`, [questions] each.
        statistic: ratios [n] of every run -> [n].
        pools: as in `speedup`.
        between: of each run [columns, processes], the sums of each process; runs of fewer than two are skipped.
        least: entries that an interval needs.
    """
    columns = [[np.asarray(column, float) for column in run] for run in runs]
    if len(shapes := {column.shape for run in columns for column in run}) != 1 or len(min(shapes)) != 1:
        raise ValueError(f"expected arrays of one length, not {sorted(shapes)}")
    arrays = [np.stack(run) if pools is None else _by_pool(np.stack(run), pools) for run in columns]
    sums, count = [array.sum(axis=1, keepdims=True) for array in arrays], arrays[0].shape[1]
    ratios = [quotient(*total) for total in sums]
    if not _are_ratios(ratios):
        return Estimate(None, None, None)
    value = float(statistic(ratios)[0])
    if count < (least if pools is None else LEAST_POOLS):
        return Estimate(value, None, None)
    rests = [[quotient(*(total - array)) for total, array in zip(sums, arrays)]]
    for run, parts in enumerate(between):
        if parts.ndim == 2 and parts.shape[1] >= LEAST_PASSES:
            # One run varies; the ratios of the others are constant.
            one = quotient(*(parts.sum(axis=1, keepdims=True) - parts))
            rests.append([np.broadcast_to(ratio, one.shape) for ratio in ratios])
            rests[-1][run] = one
    if pools is not None and len({*pools}) == 1 and len(rests) == 1 + len(runs):
        del rests[0]
    if not all(map(_are_ratios, rests)):
        return Estimate(value, None, None)
    from scipy.special import stdtrit  # late: who only reads a summary does not need it

    variances = np.array([_variance(statistic(rest)) for rest in rests])
    degrees = np.array([rest[0].size - 1 for rest in rests])
    factor = float(np.exp(np.sqrt((variances * stdtrit(degrees, 0.5 + CONFIDENCE / 2) ** 2).sum())))
    spread = np.square(variances).sum()
    freedom = variances.sum() ** 2 / (np.square(variances) / degrees).sum() if spread else degrees.min()
    return Estimate(value, value / factor, value * factor, float(freedom))


def widened(interval: Estimate, count: int) -> Estimate:
    """A 95 % interval at the level that one of `count` intervals needs (Bonferroni), widened in its logarithm."""
    value, low, high, freedom = interval.value, interval.low, interval.high, interval.freedom
    if value is None or low is None or high is None:
        return interval
    from scipy.special import stdtrit  # as above

    tail = (1 - CONFIDENCE) / 2
    t = stdtrit(np.inf if freedom is None else freedom, [1 - tail, 1 - tail / count])
    wider = float(t[1] / t[0])
    return Estimate(value, value * (low / value) ** wider, value * (high / value) ** wider, freedom)


def _are_ratios(ratios: Sequence[np.ndarray]) -> bool:
    """Whether all are finite and above 0: they are not without time, or if one entry holds all of it."""
    return all(bool((np.isfinite(ratio) & (ratio > 0)).all()) for ratio in ratios)


def _variance(without: np.ndarray) -> float:
    """The jackknife variance of a statistic's logarithm, from its values [n] without one of n entries each."""
    logs = np.log(without)
    return float((len(logs) - 1) / len(logs) * np.square(logs - logs.mean()).sum())


def _by_pool(seconds: np.ndarray, pools: Sequence) -> np.ndarray:
    """[columns, runs] -> [columns, pools], means of the repeats; unchanged if all are of one pool."""
    names, pool_index = np.unique(np.asarray(pools), return_inverse=True)
    if len(names) == 1:
        return seconds
    return np.stack([np.bincount(pool_index, column, len(names)) for column in seconds]) / np.bincount(
        pool_index
    )
