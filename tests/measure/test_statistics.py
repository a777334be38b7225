import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from specbench.measure.statistics import Speedup, pooled_speedup, speedup, verdict

pairs = st.integers(2, 12).flatmap(lambda n: arrays(float, (2, n), elements=st.floats(1e-3, 1e3)))


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
    assert speedup([2.0], [1.0]) == Speedup(2.0, None, None)
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
