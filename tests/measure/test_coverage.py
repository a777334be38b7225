"""What a 95 % interval covers, by simulation: `tests/benchmarks/coverage.py` prints the same beside a bootstrap's."""

import numpy as np
import pytest

from specbench.measure.metrics.statistics import over_passes, ratio_of_means, speedup
from tests.benchmarks.coverage import (
    SIZES,
    SPREADS,
    misses,
    pools,
    processes,
    runs,
    runs_against_itself,
    sampled,
)

pytestmark = pytest.mark.slow

COUNT = 3000  # the standard error of a coverage of 0.9 is 0.0055
LEAST = 0.02  # an interval that misses the truth less often is wider than need be
CELLS = [(kind, spread, questions) for kind in ("normal", "t3") for spread in SPREADS for questions in SIZES]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("kind", "spread", "questions"), CELLS)
def test_questions(kind, spread, questions):
    seconds, truth = runs(kind, spread, questions, COUNT)
    above, below = misses([speedup(*run) for run in seconds], truth)
    assert LEAST <= above + below <= 0.1
    assert above <= 0.08  # intervals that flatter the method: nominal 0.025, a bootstrap's 0.1 to 0.15 of six


@pytest.mark.parametrize(("kind", "spread", "questions"), CELLS)
def test_a_method_against_itself_is_seldom_called_faster_or_slower(kind, spread, questions):
    seconds = runs_against_itself(kind, spread, questions, COUNT)
    faster, slower = misses([speedup(*run) for run in seconds], 1.0)
    assert LEAST <= faster + slower <= 0.07 and max(faster, slower) <= 0.045


@pytest.mark.parametrize("questions", SIZES)
def test_a_ratio_of_two_runs(questions):
    """Of one method on the same questions, each with timing noise of its own."""
    seconds, _ = runs("normal", 0.2, questions, COUNT)
    first, second = seconds * np.random.default_rng(1).lognormal(0, 0.05, (2, *seconds.shape))
    found = [ratio_of_means([one], [other]) for one, other in zip(first, second)]
    assert LEAST <= sum(misses(found, 1.0)) <= 0.1


@pytest.mark.parametrize("mean", [3, 10, 100])
def test_sampled_answers_of_any_length(mean):
    """Neither arm wins by drawing shorter answers, and short ones belittle none."""
    runs, truth = sampled(36, COUNT, mean)
    answers = [speedup(*run) for run in runs]
    assert np.mean([one.value for one in answers]) == pytest.approx(truth, rel=0.02)
    assert LEAST <= sum(misses(answers, truth)) <= 0.09


@pytest.mark.one_in(3)
@pytest.mark.parametrize("count", [2, 4, 10])
def test_pools(count):
    """Three repeats each: what is special about a pool (6 %) is in all of them, timing noise (2 %) is not."""
    seconds, names = pools(count, 3, COUNT)
    for found in (
        [speedup(*run, pools=names) for run in seconds],
        [ratio_of_means([(run[0], run[0])], [tuple(run)], names) for run in seconds],
    ):
        assert LEAST <= sum(misses(found, 1.0)) <= 0.1


def test_repeats_of_one_pool_cover_what_they_vary_by():
    seconds, names = pools(1, 3, COUNT, between=0.0)
    assert LEAST <= sum(misses([speedup(*run, pools=names) for run in seconds], 1.0)) <= 0.1


@pytest.mark.one_in(3)
@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("own", [0.02, 0.2])
def test_processes(count, own):
    """What differs between processes (5 %) is in the interval over questions and processes, and in that over processes.

    An interval over the questions alone misses it, where questions vary little themselves.
    """
    draws = processes(36, count, COUNT, own)
    found = [speedup(*run.mean(axis=0), processes=[tuple(one) for one in run]) for run in draws]
    assert sum(misses(found, 1.0)) <= 0.07
    over_questions = sum(misses([speedup(*run.mean(axis=0)) for run in draws], 1.0))
    assert over_questions > 0.3 or own > 0.1


@pytest.mark.nightly
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("own", [0.02, 0.2])
def test_a_ratio_of_two_runs_of_several_processes(count, own):
    """Of one method on the same questions: what differs between processes is each run's own."""
    draws = processes(36, 2 * count, COUNT, own).reshape(COUNT, 2, count, 2, 36)
    found, over_questions = [], []
    for run in draws:
        whole = [tuple(one.mean(axis=0)) for one in run]
        found.append(
            ratio_of_means(whole[:1], whole[1:], processes=[tuple(one.sum(axis=2).T) for one in run])
        )
        over_questions.append(ratio_of_means(whole[:1], whole[1:]))
    assert sum(misses(found, 1.0)) <= 0.07
    assert sum(misses(over_questions, 1.0)) > 0.3 or own > 0.1


@pytest.mark.parametrize("count", [2, 3, 5])
def test_passes_on_the_same_questions(count):
    """The truth is the ratio of these very questions, to which passes add noise of their own."""
    questions = processes(36, 1, COUNT, shift=0.0, noise=0.0)  # [runs, 1, arms, questions]
    passes = np.repeat(questions, count, axis=1).sum(axis=3)
    passes[:, :, 1] *= np.random.default_rng(1).lognormal(0, 0.03, (COUNT, count))
    truth = questions[:, 0, 0].sum(axis=1) / questions[:, 0, 1].sum(axis=1)
    found = [over_passes(run[:, 0], run[:, 1]) for run in passes]
    missed = [not one.low <= true <= one.high for one, true in zip(found, truth)]
    assert LEAST <= np.mean(missed) <= 0.08
