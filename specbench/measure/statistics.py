"""How sure a speedup is: a paired bootstrap over questions, or for batches a paired t-interval over runs of pools."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 9999
# With fewer questions than six they all lie on one side of the truth more often than once in twenty (2 * 2^-5), and
# what is drawn from them again and again never shows the other side.
LEAST_QUESTIONS = 6
LEAST_RUNS = 2  # of pools
SEED = 0  # fixed: the same records always give the same interval


@dataclass(frozen=True, slots=True)
class Speedup:
    """Sum of reference seconds / sum of method seconds, and its 95 % interval (None of fewer than 6 questions, or 2
    runs of pools)."""

    value: float | None
    low: float | None
    high: float | None


def speedup(reference_seconds: np.ndarray, method_seconds: np.ndarray) -> Speedup:
    """Ratio of sums over questions, with a bias-corrected, accelerated bootstrap interval (BCa, Efron 1987).

    Both arrays are [questions], in seconds and in the same order: a question is resampled with its two times
    together, so that what is common to them (a long answer) cancels. Where BCa is not defined (all ratios
    alike), percentiles take its place. Without a question, or without any time, everything is None.
    """
    reference, method = np.asarray(reference_seconds, float), np.asarray(method_seconds, float)
    if reference.shape != method.shape or reference.ndim != 1:
        raise ValueError(f"expected two arrays of one length, not {reference.shape} and {method.shape}")
    if not (reference.sum() > 0 and method.sum() > 0):
        return Speedup(None, None, None)
    value = float(_ratio_of_sums(reference, method))
    if len(reference) < LEAST_QUESTIONS:
        return Speedup(value, None, None)
    return _bootstrapped(value, [reference, method], _ratio_of_sums)


def pooled_speedup(reference_seconds: np.ndarray, method_seconds: np.ndarray) -> Speedup:
    """Ratio of sums over runs of pools, with a t-interval of the logarithms of the runs' own ratios.

    Both arrays are [runs]: the seconds of all questions that were decoded together, each time they were. What disturbs
    a run disturbs all its questions, so they are no sample of their own; and of the few runs a bootstrap would make too
    much. The interval is None below 2 runs.
    """
    reference, method = np.asarray(reference_seconds, float), np.asarray(method_seconds, float)
    if not (len(reference) and reference.min() > 0 and method.min() > 0):
        return Speedup(None, None, None)
    value = float(_ratio_of_sums(reference, method))
    if len(reference) < LEAST_RUNS:
        return Speedup(value, None, None)
    return _t_interval(value, np.log(reference / method))


Run = tuple[np.ndarray, np.ndarray]  # above and below the line of a ratio, [questions]


def ratio_of_means(first: Sequence[Run], second: Sequence[Run], pools: bool = False) -> Speedup:
    """Mean of the ratios of the runs `second` / mean of those of the runs `first`, with a 95 % interval.

    Each run is the seconds of its own baseline and of the method, over the same questions in the same order: so that a
    machine that was slower during one of them cancels out. A question is resampled with all its times together. pools:
    the arrays are [runs of pools], with an interval as in `pooled_speedup`; only for one run against one.
    """
    arrays = [np.asarray(column, float) for run in (*first, *second) for column in run]
    if len({array.shape for array in arrays}) != 1 or arrays[0].ndim != 1:
        raise ValueError(f"expected arrays of one length, not {[array.shape for array in arrays]}")
    if pools and len(arrays) != 4:
        raise ValueError("runs of pools have an interval only for one run against one")
    if not all(array.sum() > 0 and (not pools or array.min() > 0) for array in arrays):
        return Speedup(None, None, None)

    def statistic(*columns: np.ndarray, axis: int = -1) -> np.ndarray:
        ratios = [_ratio_of_sums(*run, axis) for run in zip(columns[::2], columns[1::2])]
        return np.mean(ratios[len(first) :], axis=0) / np.mean(ratios[: len(first)], axis=0)

    value = float(statistic(*arrays))
    if len(arrays[0]) < (LEAST_RUNS if pools else LEAST_QUESTIONS):
        return Speedup(value, None, None)
    if pools:
        return _t_interval(value, np.log(arrays[2] / arrays[3]) - np.log(arrays[0] / arrays[1]))
    return _bootstrapped(value, arrays, statistic)


def verdict(low: float | None, high: float | None) -> str | None:
    """What an interval says of a method; None when there is no interval."""
    if low is None or high is None:
        return None
    if low > 1:
        return "faster"
    return "slower" if high < 1 else "no difference"


def _ratio_of_sums(reference: np.ndarray, method: np.ndarray, axis: int = -1) -> np.ndarray:
    return reference.sum(axis=axis) / method.sum(axis=axis)


def _t_interval(value: float, logs: np.ndarray) -> Speedup:
    """A ratio with the t-interval of the logarithms of the runs' own ratios."""
    from scipy.stats import sem, t  # here, as in `_interval`

    half = float(t.ppf(0.5 + CONFIDENCE / 2, len(logs) - 1) * sem(logs))
    low, high = np.exp(logs.mean() - half), np.exp(logs.mean() + half)
    return Speedup(value, min(float(low), value), max(float(high), value))


def _bootstrapped(value: float, columns: Sequence[np.ndarray], statistic: Callable) -> Speedup:
    """A ratio with its bootstrap interval: BCa, or percentiles where that is not defined."""
    low, high = _interval(columns, statistic, "BCa")
    if not np.isfinite([low, high]).all():
        low, high = _interval(columns, statistic, "percentile")
    # Questions of one same ratio give an interval of no width, which rounding may shift off its own point.
    return Speedup(value, min(low, value), max(high, value))


def _interval(columns: Sequence[np.ndarray], statistic: Callable, kind: str) -> tuple[float, float]:
    # Here, for it takes a second, and who only reads a summary needs none of it.
    from scipy.stats import DegenerateDataWarning, bootstrap

    with warnings.catch_warnings(), np.errstate(invalid="ignore"):  # the NaN that comes back says the same
        warnings.simplefilter("ignore", DegenerateDataWarning)
        interval = bootstrap(
            tuple(columns),
            statistic,
            paired=True,
            vectorized=True,
            method=kind,
            confidence_level=CONFIDENCE,
            n_resamples=RESAMPLES,
            rng=SEED,
        ).confidence_interval
    return float(interval.low), float(interval.high)
