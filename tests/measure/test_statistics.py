import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from specbench.measure.statistics import Speedup, speedup, verdict

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
