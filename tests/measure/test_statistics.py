import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from specbench.measure.metrics.statistics import (
    LEAST_QUESTIONS,
    Estimate,
    over_passes,
    ratio_of_means,
    speedup,
    verdict,
    widened,
)

pairs = st.integers(LEAST_QUESTIONS, 12).flatmap(
    lambda n: arrays(float, (2, n), elements=st.floats(1e-3, 1e3))
)


@settings(deadline=None, max_examples=60)
@given(pairs)
def test_the_interval_holds_the_point(times):
    found = speedup(*times)
    assert found.value == pytest.approx(times[0].sum() / times[1].sum())
    assert found.low <= found.value <= found.high
    assert found.value / found.low == pytest.approx(found.high / found.value)


def test_the_interval_by_hand():
    """Without one question each: logarithms of the ratios of what is left, their spread times 5/6, Student's t of 5."""
    reference, method = np.array([3.0, 1, 4, 1, 5, 9]), np.array([2.0, 1, 3, 1, 4, 4])
    left = [np.log(np.delete(reference, i).sum() / np.delete(method, i).sum()) for i in range(6)]
    half = 2.57058 * np.sqrt(5 * np.var(left))
    found = speedup(reference, method)
    assert (found.low, found.high) == pytest.approx(
        (23 / 15 * np.exp(-half), 23 / 15 * np.exp(half)), rel=1e-5
    )


def test_one_question_that_holds_all_the_time_gives_no_interval():
    """Without it nothing is left to compare."""
    alone = [0.0, 0.0, 6.0, 0.0, 0.0, 0.0]
    assert speedup(alone, np.ones(6)) == Estimate(1.0, None, None)
    assert speedup(np.ones(6), alone) == Estimate(1.0, None, None)


@settings(deadline=None, max_examples=30)
@given(pairs, st.sampled_from([0.5, 2.0, 1024.0]))
def test_the_unit_of_time_does_not_matter(times, unit):
    assert speedup(*times) == speedup(*(times * unit))


@settings(deadline=None, max_examples=20)
@given(pairs)
def test_an_arm_against_itself_is_no_difference(times):
    assert speedup(times[0], times[0]) == Estimate(1.0, 1.0, 1.0)


def test_noise_alone_is_no_difference_about_19_times_in_20():
    rng = np.random.default_rng(0)
    questions = rng.lognormal(size=40)
    held = 0
    for _ in range(100):
        found = speedup(*(questions * rng.normal(1, 0.05, (2, 40))))
        held += found.low <= 1 <= found.high
    assert 88 <= held < 100


def test_pairing_cancels_what_the_arms_share():
    rng = np.random.default_rng(0)
    questions = rng.lognormal(sigma=2, size=50)
    found = speedup(1.1 * questions * rng.normal(1, 0.01, 50), questions)
    assert verdict(found.low, found.high) == "faster" and found.high - found.low < 0.05


def test_too_few_questions_give_no_interval():
    """However alike they are: five of five lie on one side of the truth in one case of sixteen."""
    twice, once = np.full(6, 2.0), np.ones(6)
    for n in range(1, 6):
        assert speedup(twice[:n], once[:n]) == Estimate(2.0, None, None)
        found = ratio_of_means([(once[:n], once[:n])], [(twice[:n], once[:n])])
        assert found == Estimate(2.0, None, None)
    assert speedup(twice, once) == Estimate(2.0, 2.0, 2.0)
    assert speedup([], []) == Estimate(None, None, None)
    assert speedup([1.0, 1.0], [0.0, 0.0]) == Estimate(None, None, None)
    with pytest.raises(ValueError, match="one length"):
        speedup([1.0], [1.0, 2.0])


def test_verdicts():
    assert verdict(1.01, 1.2) == "faster"
    assert verdict(0.8, 0.99) == "slower"
    assert verdict(0.99, 1.01) == verdict(1.0, 1.2) == verdict(0.9, 1.0) == "no difference"
    assert verdict(None, None) is None


def test_repeats_of_one_pool_have_an_interval_as_wide_as_they_differ():
    """By hand: without one of two runs, with ratios 2 and 8, the other is left; one degree of freedom."""
    found = speedup([2.0, 8.0], [1.0, 1.0], pools=[3, 3])
    factor = np.exp(12.7062 * np.log(2))
    assert (found.value, found.low, found.high) == pytest.approx((5, 5 / factor, 5 * factor), rel=1e-4)
    assert speedup([3.0], [2.0], pools=[0]) == Estimate(1.5, None, None)
    assert speedup([], [], pools=[]) == Estimate(None, None, None)
    assert speedup([3.0, 3.0], [2.0, 2.0], pools=[0, 0]) == Estimate(1.5, 1.5, 1.5)


def test_repeats_of_one_pool_in_a_process_each_count_once():
    """Both would be the same noise."""
    above, below = [2.0, 4.0, 8.0], [1.0, 1.1, 1.0]
    processes = [([one], [other]) for one, other in zip(above, below)]
    joined = speedup(above, below, pools=[0, 0, 0], processes=processes)
    assert joined == speedup(above, below, pools=[0, 0, 0]) and joined.freedom == pytest.approx(2)
    apart = speedup(above, below, pools=[0, 1, 2], processes=processes)
    assert apart.width > 1.2 * joined.width


def test_repeats_of_a_pool_are_no_sample_of_pools():
    """Two pools that differ, whose repeats do not: as one run of each, however often they are repeated."""
    once = speedup([2.0, 8.0], [1.0, 1.0], pools=[0, 1])
    repeated = speedup([2.0, 2.0, 2.0, 8.0, 8.0, 8.0], np.ones(6), pools=[0, 0, 0, 1, 1, 1])
    assert repeated == once and once.high > 100
    apart = speedup([1.0, 3.0, 8.0, 8.0], np.ones(4), pools=["a", "a", "b", "b"])  # repeats are averaged
    assert apart == once
    assert (
        speedup([2.0, 2.0, 2.0, 8.0], np.ones(4), pools=[0, 0, 0, 1]) == once
    )  # not weighed by their number


@settings(deadline=None, max_examples=20)
@given(pairs)
def test_against_a_run_that_gains_nothing_a_ratio_is_the_speedup(times):
    plain = (times[0], times[0])
    found = ratio_of_means([plain], [tuple(times)])
    expected = speedup(*times)
    assert found.value == pytest.approx(expected.value)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


@settings(deadline=None, max_examples=20)
@given(pairs, st.floats(0.1, 10))
def test_a_machine_that_was_slower_for_a_whole_run_cancels_out(times, slower):
    run = tuple(times)
    found = ratio_of_means([run], [(slower * run[0], slower * run[1])])
    assert (found.value, found.low, found.high) == pytest.approx((1, 1, 1))


def test_a_ratio_of_means_by_hand():
    """Ratios 2 and 1 on average 1.5, against 1 and 0.5 on average 0.75."""
    ones = np.ones(6)
    found = ratio_of_means([(ones, ones), (ones, 2 * ones)], [(2 * ones, ones), (ones, ones)])
    assert found == Estimate(2.0, 2.0, 2.0)


def test_two_runs_of_one_method_differ_about_1_time_in_20():
    rng = np.random.default_rng(1)
    questions, gain = rng.lognormal(size=40), rng.uniform(1, 2, 40)
    held = 0
    for _ in range(100):
        (a, b), (c, d) = (
            (questions * rng.normal(1, 0.05, 40), questions / gain * rng.normal(1, 0.05, 40))
            for _ in range(2)
        )
        found = ratio_of_means([(a, b)], [(c, d)])
        held += found.low <= 1 <= found.high
    assert 88 <= held < 100


def test_a_ratio_of_means_over_pools():
    ones = np.ones(4)
    plain, gains = (ones, ones), (np.array([2.0, 2.0, 8.0, 8.0]), ones)
    for pools in ([0, 0, 1, 1], [0, 0, 0, 0]):
        assert ratio_of_means([plain], [gains], pools) == speedup(*gains, pools=pools)
    drifting = (np.array([3.0, 5.0]), np.array([1.5, 2.5]))
    found = ratio_of_means([drifting], [(2 * drifting[0], drifting[1])], pools=[0, 0])
    assert (found.value, found.low, found.high) == pytest.approx((2, 2, 2))
    one = ones[:1]
    assert ratio_of_means([(one, one)], [(2 * one, one)], pools=[0]) == Estimate(2.0, None, None)


def test_what_has_no_ratio_of_means():
    ones = np.ones(3)
    assert ratio_of_means([(ones, ones)], [(ones, 0 * ones)]) == Estimate(None, None, None)
    assert ratio_of_means([(ones[:0], ones[:0])], [(ones[:0], ones[:0])]) == Estimate(None, None, None)
    with pytest.raises(ValueError, match="one length"):
        ratio_of_means([(ones, ones)], [(ones[:2], ones[:2])])


def test_what_differs_between_processes_widens_the_interval():
    """By hand: the squares of both half widths are added."""
    rng = np.random.default_rng(4)
    runs = rng.lognormal(size=(3, 2, 8))
    sums = runs.sum(axis=2)

    def variance(times: np.ndarray) -> float:
        left = [np.log(np.delete(times, i, axis=1).sum(axis=1)) for i in range(times.shape[1])]
        logs = np.array([above - below for above, below in left])
        return (len(logs) - 1) * np.var(logs)

    a, b = variance(runs.sum(axis=0)), variance(sums.T)
    half = np.sqrt(a * stats.t.ppf(0.975, 7) ** 2 + b * stats.t.ppf(0.975, 2) ** 2)
    found = speedup(*runs.sum(axis=0), processes=[tuple(run) for run in runs])
    value = sums[:, 0].sum() / sums[:, 1].sum()
    assert found.value == pytest.approx(value)
    assert (found.low, found.high) == pytest.approx((value * np.exp(-half), value * np.exp(half)))


def test_one_process_adds_nothing():
    times = np.random.default_rng(0).lognormal(size=(2, 8))
    assert speedup(*times, processes=[tuple(times)]) == speedup(*times)


def test_an_interval_over_passes_takes_two():
    alone = over_passes([3.0], [2.0])
    assert alone == Estimate(1.5, None, None) and alone.width is None
    found = over_passes([3.0, 3.0], [2.0, 2.1])
    assert found.value == pytest.approx(6 / 4.1) and found.low < found.value < found.high
    assert over_passes([3.0, 6.0], [2.0, 4.0]) == Estimate(1.5, 1.5, 1.5)
    assert Estimate(1.5, 1.25, 2.0).width == 0.75


def test_a_widened_interval_is_that_of_its_level():
    """Ten of six questions each: Student's t of five degrees at 5 % / 10, not a normal distribution's ratio."""
    rng = np.random.default_rng(0)
    reference, method = rng.lognormal(0, 0.1, 6), rng.lognormal(0, 0.1, 6)
    measured = speedup(reference, method)
    assert measured.freedom == pytest.approx(5)
    wide = widened(measured, 10)
    share = np.log(wide.high / wide.value) / np.log(measured.high / measured.value)
    assert share == pytest.approx(stats.t.isf(0.0025, 5) / stats.t.isf(0.025, 5))
    assert wide.low == pytest.approx(wide.value**2 / wide.high) and widened(measured, 1) == measured
    none = Estimate(1.2, None, None)
    assert widened(none, 10) is none
    assert 1.05 < widened(Estimate(1.2, 1.1, 1.3), 10).low < 1.07  # of many degrees of freedom


def test_the_freedom_of_two_parts_lies_between_theirs():
    rng = np.random.default_rng(1)
    columns = [rng.lognormal(0, 0.1, 20), rng.lognormal(0, 0.1, 20)]
    processes = [[part[:10], part[10:]] for part in columns]
    joined = speedup(*columns, processes=[[a[i] for a in processes] for i in range(2)])
    assert 1 <= joined.freedom < 20 and joined.width > speedup(*columns).width
