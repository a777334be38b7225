"""How often a 95 % interval holds the truth, simulated: `python -m tests.benchmarks.coverage`.

The interval of `measure.statistics` against a paired bootstrap over questions (BCa, Efron 1987) on the same draws. The
simulation is that of `tests/measure/test_coverage.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
from tqdm import tqdm

from specbench.measure.metrics.statistics import Estimate, speedup

SIZES = (6, 12, 36)  # questions
SPREADS = (0.2, 0.35)  # standard deviation of the logarithm of a question's own ratio
LENGTHS = 0.6  # and of its seconds
CLIPPED = 4.0  # standard deviations: at 0.35 a question's ratio is at most four times the usual one
RESAMPLES = 1999


def noise(kind: str, spread: float, shape: tuple, draw: np.random.Generator) -> np.ndarray:
    """Logarithms of the shape around 0: "normal", or "t3", Student's t with 3 degrees of freedom, clipped."""
    if kind == "normal":
        return spread * draw.standard_normal(shape)
    unit = draw.standard_t(3, shape) / np.sqrt(3)
    return spread * np.clip(unit, -CLIPPED, CLIPPED)


def runs(kind: str, spread: float, questions: int, count: int, seed: int = 0) -> tuple[np.ndarray, float]:
    """Seconds [count, 2, questions] of reference and method in so many runs, and the true ratio of their sums."""
    draw = np.random.default_rng(seed)
    reference = draw.lognormal(0, LENGTHS, (count, questions))
    method = reference * np.exp(-noise(kind, spread, reference.shape, draw))
    truth = 1 / np.exp(noise(kind, spread, (2_000_000,), draw)).mean()
    return np.stack([reference, method], axis=1), truth


def runs_against_itself(kind: str, spread: float, questions: int, count: int, seed: int = 0) -> np.ndarray:
    """As `runs`, of one method in both arms: what differs is noise of its own in each."""
    draw = np.random.default_rng(seed)
    lengths = draw.lognormal(0, LENGTHS, (count, 1, questions))
    return lengths * np.exp(noise(kind, spread / np.sqrt(2), (count, 2, questions), draw))


def pools(
    pools: int, repeats: int, count: int, between: float = 0.06, within: float = 0.02, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds [count, 2, pools * repeats] of reference and method in so many batch runs, and the pool of each column.
    The true ratio is 1; its logarithm varies by `between` from pool to pool and by `within` in each repeat."""
    draw = np.random.default_rng(seed)
    own = draw.normal(0, between, (count, pools, 1)) + draw.normal(0, within, (count, pools, repeats))
    method = np.exp(own).reshape(count, -1)
    return np.stack([np.ones_like(method), method], axis=1), np.repeat(np.arange(pools), repeats)


def processes(
    questions: int,
    processes: int,
    count: int,
    own: float = 0.2,
    shift: float = 0.05,
    noise: float = 0.02,
    seed: int = 0,
) -> np.ndarray:
    """Seconds [count, processes, 2, questions] of reference and method. The true ratio is 1; its logarithm varies by
    `own` from question to question, by `shift` from process to process, and by `noise` in each time."""
    draw = np.random.default_rng(seed)
    lengths = draw.lognormal(0, LENGTHS, (count, 1, questions))
    ratios = draw.normal(0, own, (count, 1, questions)) + draw.normal(0, shift, (count, processes, 1))
    ratios -= (own**2 + shift**2 + noise**2) / 2  # the mean of a lognormal number lies above its median
    method = lengths * np.exp(ratios + draw.normal(0, noise, (count, processes, questions)))
    return np.stack([np.broadcast_to(lengths, method.shape), method], axis=2)


def sampled(questions: int, count: int, mean: float, seed: int = 0) -> tuple[np.ndarray, float]:
    """The columns of a speedup [count, 5, questions] of so many sampled runs, and the true ratio.

    Each arm draws the length of its answer for itself, up to 128 tokens, and a question's own ratio varies by 0.2. The
    prefill
    takes as long as ten tokens."""
    draw = np.random.default_rng(seed)
    usual = mean * draw.lognormal(0, LENGTHS, (count, 1, questions))
    reference, method = np.minimum(draw.geometric(1 / (1 + usual), (count, 2, questions)), 128).swapaxes(0, 1)
    ratios = draw.normal(0, 0.2, reference.shape)
    decoding = (method - 1) * np.exp(-ratios - 0.2**2 / 2) / 1.5
    prefill = np.full(reference.shape, 10.0)
    truth = (10 + (reference - 1).mean()) / (10 + (reference - 1).mean() / 1.5)
    return np.stack(
        [prefill + reference - 1, prefill + decoding, decoding, reference - 1, method - 1], axis=1
    ), truth


def misses(found: list[Estimate], truth: float) -> tuple[float, float]:
    """Shares of the intervals that lie wholly above the truth (flattering), and wholly below it."""
    return np.mean([one.low > truth for one in found]), np.mean([one.high < truth for one in found])


def bootstrapped(reference: np.ndarray, method: np.ndarray) -> Estimate:
    """Ratio of sums with a paired BCa interval over questions."""
    from scipy.stats import bootstrap

    def statistic(above: np.ndarray, below: np.ndarray, axis: int = -1) -> np.ndarray:
        return above.sum(axis=axis) / below.sum(axis=axis)

    interval = bootstrap(
        (reference, method), statistic, paired=True, vectorized=True, n_resamples=RESAMPLES, rng=0
    ).confidence_interval
    return Estimate(reference.sum() / method.sum(), interval.low, interval.high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=600, help="simulated runs of each kind and size")
    options = parser.parse_args()
    ways: dict[str, Callable] = {"BCa": bootstrapped, "t, jackknife": speedup}
    print(
        f"{'ratios of questions':22}{'questions':>10}", *(f"{name + ', above, below':>30}" for name in ways)
    )
    cells = [(kind, spread, n) for kind in ("normal", "t3") for spread in SPREADS for n in SIZES]
    for kind, spread, questions in tqdm(cells, unit="cell"):
        seconds, truth = runs(kind, spread, questions, options.draws)
        said = []
        for way in ways.values():
            above, below = misses([way(*run) for run in seconds], truth)
            said.append(f"{1 - above - below:.3f}, {above:.3f}, {below:.3f}")
        tqdm.write(f"{kind + f', sd {spread}':22}{questions:10}" + "".join(f"{text:>31}" for text in said))
    print(f"\n{'against itself':22}{'questions':>10}", *(f"{name + ', not 1':>30}" for name in ways))
    for kind, spread, questions in tqdm(cells, unit="cell"):
        seconds = runs_against_itself(kind, spread, questions, options.draws)
        said = [f"{sum(misses([way(*run) for run in seconds], 1.0)):.3f}" for way in ways.values()]
        tqdm.write(f"{kind + f', sd {spread}':22}{questions:10}" + "".join(f"{text:>31}" for text in said))


if __name__ == "__main__":
    main()
