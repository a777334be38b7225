import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from specbench.measure.statistics import (
    LEAST_QUESTIONS,
    Speedup,
    pooled_speedup,
    ratio_of_means,
    speedup,
    verdict,
)

pairs = st.integers(LEAST_QUESTIONS, 12).flatmap(
    lambda n: arrays(float, (2, n), elements=st.floats(1e-3, 1e3))
)


@settings(deadline=None, max_examples=60)
@given(pairs)
def test_the_interval_holds_the_point_and_lies_within_the_ratios(times):
    found = speedup(*times)
    ratios = times[0] / times[1]
    assert found.value == pytest.approx(times[0].sum() / times[1].sum())
    assert found.low <= found.value <= found.high
    assert ratios.min() * (1 - 1e-9) <= found.low and found.high <= ratios.max() * (1 + 1e-9)


@settings(deadline=None, max_examples=30)
@given(pairs, st.sampled_from([0.5, 2.0, 1024.0]))
def test_the_unit_of_time_does_not_matter(times, unit):
    assert speedup(*times) == speedup(*(times * unit))


@settings(deadline=None, max_examples=20)
@given(pairs)
def test_an_arm_against_itself_is_no_difference(times):
    assert speedup(times[0], times[0]) == Speedup(1.0, 1.0, 1.0)


def test_noise_alone_is_no_difference_about_19_times_in_20():
    rng = np.random.default_rng(0)
    questions = rng.lognormal(size=40)
    held = 0
    for _ in range(100):
        found = speedup(*(questions * rng.normal(1, 0.05, (2, 40))))
        held += found.low <= 1 <= found.high
    assert 88 <= held <= 100


def test_pairing_cancels_what_the_arms_share():
    rng = np.random.default_rng(0)
    questions = rng.lognormal(sigma=2, size=50)
    found = speedup(1.1 * questions * rng.normal(1, 0.01, 50), questions)
    assert verdict(found.low, found.high) == "faster" and found.high - found.low < 0.05


def test_too_few_questions_give_no_interval():
    """However alike they are: five of five lie on one side of the truth in one case of sixteen."""
    twice, once = np.full(6, 2.0), np.ones(6)
    for n in range(1, 6):
        assert speedup(twice[:n], once[:n]) == Speedup(2.0, None, None)
        found = ratio_of_means([(once[:n], once[:n])], [(twice[:n], once[:n])])
        assert found == Speedup(2.0, None, None)
    assert speedup(twice, once) == Speedup(2.0, 2.0, 2.0)
    assert speedup([], []) == Speedup(None, None, None)
    assert speedup([1.0, 1.0], [0.0, 0.0]) == Speedup(None, None, None)
    with pytest.raises(ValueError, match="one length"):
        speedup([1.0], [1.0, 2.0])


def test_verdicts():
    assert verdict(1.01, 1.2) == "faster"
    assert verdict(0.8, 0.99) == "slower"
    assert verdict(0.99, 1.01) == verdict(1.0, 1.2) == verdict(0.9, 1.0) == "no difference"
    assert verdict(None, None) is None


def test_pools_have_an_interval_as_wide_as_their_runs_differ():
    """By hand: two runs with ratios 2 and 8, logarithms ln 4 -+ ln 2, one degree of freedom."""
    found = pooled_speedup([2.0, 8.0], [1.0, 1.0])
    half = 12.7062 * np.log(2)
    assert found.value == 5.0
    assert (found.low, found.high) == pytest.approx((4 * np.exp(-half), 4 * np.exp(half)), rel=1e-4)
    assert pooled_speedup([3.0], [2.0]) == Speedup(1.5, None, None)
    assert pooled_speedup([], []) == Speedup(None, None, None)
    assert pooled_speedup([3.0, 3.0], [2.0, 2.0]) == Speedup(1.5, 1.5, 1.5)
    noise = np.random.default_rng(0).normal(0, 0.05, (400, 2, 3))
    held = [pooled_speedup(*np.exp(run)) for run in noise]
    assert 0.9 < np.mean([found.low <= 1 <= found.high for found in held]) < 0.99


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
    assert found == Speedup(2.0, 2.0, 2.0)


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
    assert 88 <= held <= 100


def test_runs_of_pools_have_a_t_interval():
    """By hand: logarithms of the ratios of ratios are ln 2 and ln 8, as in `pooled_speedup`'s test."""
    ones = np.ones(2)
    found = ratio_of_means([(ones, ones)], [(np.array([2.0, 8.0]), ones)], pools=True)
    assert found == pooled_speedup([2.0, 8.0], [1.0, 1.0])
    drifting = (np.array([3.0, 5.0]), np.array([1.5, 2.5]))
    found = ratio_of_means([drifting], [(2 * drifting[0], drifting[1])], pools=True)
    assert (found.value, found.low, found.high) == pytest.approx((2, 2, 2))
    assert ratio_of_means([(ones[:1], ones[:1])], [(2 * ones[:1], ones[:1])], pools=True) == Speedup(
        2.0, None, None
    )


def test_what_has_no_ratio_of_means():
    ones, zero = np.ones(3), np.array([1.0, 1.0, 0.0])
    assert ratio_of_means([(ones, ones)], [(ones, 0 * ones)]) == Speedup(None, None, None)
    assert ratio_of_means([(ones[:0], ones[:0])], [(ones[:0], ones[:0])]) == Speedup(None, None, None)
    assert ratio_of_means([(ones, ones)], [(ones, zero)], pools=True) == Speedup(None, None, None)
    with pytest.raises(ValueError, match="one length"):
        ratio_of_means([(ones, ones)], [(ones[:2], ones[:2])])
    with pytest.raises(ValueError, match="one run against one"):
        ratio_of_means([(ones, ones)] * 2, [(ones, ones)] * 2, pools=True)
