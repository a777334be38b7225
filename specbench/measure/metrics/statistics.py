"""How sure a speedup is: t-intervals on the jackknifed logarithm of a ratio.

Over questions (batches: pools) such an interval tells how far the figure would move with other questions; over passes
or processes, how far it would move if the same ones were measured again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
# For n < 6, P(all samples on one side of the median) = 2 * 2^-n > 5 %, so that an interval covers too little.
LEAST_QUESTIONS = 6
# Or repeats of one pool: enough for a standard error, and Student's t is as wide as so few need.
LEAST_POOLS = 2
LEAST_PASSES = 2


Run = tuple[Sequence[float], Sequence[float]]  # numerator and denominator of a ratio, [questions] or [runs]


@dataclass(frozen=True, slots=True)
class Speedup:
    """Sum of reference seconds / sum of method seconds, and the bounds of its 95 % interval.

    The bounds are None of fewer than 6 questions, or 2 pools.
    """

    value: float | None
    low: float | None
    high: float | None

    @property
    def width(self) -> float | None:
        """Of the interval; None without one."""
        return None if self.low is None or self.high is None else self.high - self.low


def speedup(
    reference_seconds: Sequence[float],
    method_seconds: Sequence[float],
    pools: Sequence | None = None,
    processes: Sequence[Run] = (),
) -> Speedup:
    """Ratio of sums, with a t-interval on the delete-one jackknife of its logarithm (Efron and Tibshirani 1993, 11).

    A question is dropped with both its times, so that what they share (a long answer) cancels. For times of 6 to 36
    questions that vary like real ones the interval covers the truth in about 0.90 to 0.95 of all runs, least for few
    questions and heavy tails (`python -m tests.benchmarks.coverage`); a bootstrap (BCa) does in 0.80 to 0.90.

    Args:
        reference_seconds: [questions], seconds.
        method_seconds: [questions], seconds, in the same order.
        pools: for batches, [runs]: the pool of each run; the arrays are then the seconds of all questions that were
            decoded together. What disturbs a run disturbs all its questions, and what is special about a pool all its
            repeats: so the mean of a pool's repeats is dropped as a whole. Of one pool alone each repeat is, and the
            interval covers timing noise only.
        processes: where several measured, the seconds of each, [questions] of the reference and of the method. The
            interval over processes, as in `over_passes`, and that over questions are then joined: the squares of
            their half widths (of the logarithm) are added. Noise that both hold counts twice.

    Returns:
        All None without any time; no interval of fewer than 6 questions or 2 pools (or repeats of one pool), or where
        a single one holds all the time.

    Raises:
        ValueError: arrays that are not of one length.
    """
    between = [np.array([[np.sum(part) for part in process] for process in processes]).T]
    return _jackknife([reference_seconds, method_seconds], np.divide, pools, between)


def over_passes(reference_seconds: Sequence[float], method_seconds: Sequence[float]) -> Speedup:
    """Ratio of sums, with a t-interval over passes (or processes) on the same questions.

    It tells how far the figure would move if the same questions were measured again, and says nothing of others.

    Args:
        reference_seconds: [passes], seconds of all questions.
        method_seconds: [passes], seconds.

    Returns:
        No interval of fewer than two passes.

    Raises:
        ValueError: arrays that are not of one length.
    """
    return _jackknife([reference_seconds, method_seconds], np.divide, None, least=LEAST_PASSES)


def ratio_of_means(
    first: Sequence[Run],
    second: Sequence[Run],
    pools: Sequence | None = None,
    processes: Sequence[Run] = (),
) -> Speedup:
    """Mean of the ratios of the runs `second` / mean of those of the runs `first`, with an interval as in `speedup`.

    Each run is the seconds of its own baseline and of the method, over the same questions in the same order: so that a
    machine that was slower during one of them cancels out. A question is dropped with all its times.

    Args:
        first: runs, each two arrays [questions], seconds.
        second: as `first`.
        pools: as in `speedup`.
        processes: of each run of `first` and then of `second`, two arrays [processes], the sums of each process. Their
            jackknife variances are joined with that over questions, as in `speedup`, since a run's processes have
            nothing to do with another's. A run of one process adds nothing: how far processes differ is not known.

    Returns:
        As `speedup`.

    Raises:
        ValueError: arrays that are not of one length.
    """

    def statistic(*totals: np.ndarray) -> np.ndarray:
        ratios = [above / below for above, below in zip(totals[::2], totals[1::2])]
        return np.mean(ratios[len(first) :], axis=0) / np.mean(ratios[: len(first)], axis=0)

    columns = [column for run in (*first, *second) for column in run]
    return _jackknife(columns, statistic, pools, [np.array(run, float) for run in processes])


def verdict(low: float | None, high: float | None) -> str | None:
    """Whether a method is "faster", "slower", or neither, by its interval; None when there is no interval."""
    if low is None or high is None:
        return None
    if low > 1:
        return "faster"
    return "slower" if high < 1 else "no difference"


def _jackknife(
    columns: Sequence[Sequence[float]],
    statistic: Callable[..., np.ndarray],
    pools: Sequence | None,
    between: Sequence[np.ndarray] = (),
    least: int = LEAST_QUESTIONS,
) -> Speedup:
    """A statistic of the columns' sums, with the interval that `speedup` describes.

    Args:
        columns: [questions] each, two for a run.
        statistic: sums [n] of every column -> [n].
        pools: as in `speedup`.
        between: of each run [2, processes], the sums of each process; those of fewer than two are passed over.
        least: entries that an interval takes.
    """
    arrays = [np.asarray(column, float) for column in columns]
    if len({array.shape for array in arrays}) != 1 or arrays[0].ndim != 1:
        raise ValueError(f"expected arrays of one length, not {[array.shape for array in arrays]}")
    seconds = np.stack(arrays) if pools is None else _by_pool(np.stack(arrays), pools)
    sums, count = seconds.sum(axis=1, keepdims=True), seconds.shape[1]
    if not (sums > 0).all():
        return Speedup(None, None, None)
    value = float(statistic(*sums)[0])
    if count < (least if pools is None else LEAST_POOLS):
        return Speedup(value, None, None)
    variances = [_variance(sums - seconds, statistic)]
    for run, parts in enumerate(between):
        if parts.ndim == 2 and parts.shape[1] >= LEAST_PASSES:
            # One run varies; the others, whose ratios do not, are as they are.
            rest = np.repeat(sums, parts.shape[1], axis=1)
            rest[2 * run : 2 * run + 2] = parts.sum(axis=1, keepdims=True) - parts
            variances.append(_variance(rest, statistic))
    estimates = [estimate for estimate in variances if estimate is not None]
    if len(estimates) < len(variances):
        return Speedup(value, None, None)
    from scipy.special import stdtrit  # here, for who only reads a summary needs none of it

    squares = [variance * stdtrit(freedom, 0.5 + CONFIDENCE / 2) ** 2 for variance, freedom in estimates]
    factor = float(np.exp(np.sqrt(sum(squares))))
    return Speedup(value, value / factor, value * factor)


def _variance(rest: np.ndarray, statistic: Callable[..., np.ndarray]) -> tuple[float, int] | None:
    """The jackknife variance of the statistic's logarithm, and n - 1.

    rest: [columns, n], sums without one of n entries each. None where one entry holds all the time.
    """
    count = rest.shape[1]
    if not (rest > 0).all():
        return None
    logs = np.log(statistic(*rest))
    return float((count - 1) / count * np.square(logs - logs.mean()).sum()), count - 1


def _by_pool(seconds: np.ndarray, pools: Sequence) -> np.ndarray:
    """[columns, runs] -> [columns, pools], means of the repeats; as they are where all are of one pool."""
    names, pool_index = np.unique(np.asarray(pools), return_inverse=True)
    if len(names) == 1:
        return seconds
    return np.stack([np.bincount(pool_index, column, len(names)) for column in seconds]) / np.bincount(
        pool_index
    )
