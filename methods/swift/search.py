"""Which sublayers to leave out, found while decoding: random sets, and now and then one that a model suggests.

A set is scored by how often the target without it predicts the target's tokens (`matchness`, paper, section 4.2). All
sets leave out the same number of sublayers; the first and the last layer stay whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.spatial.distance import cdist

KAPPA, NOISE = 2.5, 1e-2  # of the upper confidence bound; of the kernel's diagonal (the authors' code)
SUGGESTIONS = 2048  # points among which the bound is maximised
LENGTHS = (0.3, 1.0, 3.0, 10.0)  # length scales of the kernel, of which the likeliest is taken
SQRT5 = 5**0.5


@dataclass(frozen=True)
class Skipped:
    """The layers whose attention, and those whose feed-forward part, are left out."""

    attention: frozenset[int]
    mlp: frozenset[int]


@dataclass
class LayerSearch:
    """The search for one target.

    Attributes:
        layers: of the target.
        ratio: share of the sublayers between the first and the last layer that is left out.
        bayes_interval: the Gaussian process suggests every n-th proposal; None: none.
        max_steps: most proposals.
        patience: most proposals in a row that were no better than the best.
        enough: score above which the search ends.
        seed: of the proposals.
        best: the best set so far; at first every second layer, as nothing was scored yet.
        score: of the best set.
        steps: proposals that were scored.
        without_gain: how many of the last ones were no better.
    """

    layers: int
    ratio: float
    bayes_interval: int | None
    max_steps: int
    patience: int
    enough: float
    seed: int = 0
    best: Skipped = field(init=False)
    score: float = 0.0
    steps: int = 0
    without_gain: int = 0
    _points: list[np.ndarray] = field(default_factory=list)
    _scores: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        every_second = frozenset(range(1, self.layers - 1, 2))
        self.best = Skipped(every_second, every_second)
        self._random = np.random.default_rng(self.seed)
        self._proposed: tuple[Skipped, np.ndarray] | None = None

    @property
    def sublayers(self) -> int:
        """Number that may be left out."""
        return 2 * (self.layers - 2)

    @property
    def done(self) -> bool:
        """Whether the search has ended."""
        ended = self.steps >= self.max_steps or self.without_gain > self.patience
        return ended or self.score > self.enough or self.sublayers <= 0

    def propose(self) -> Skipped:
        """The next set to score, with `tell`."""
        count = int(self.sublayers * self.ratio)
        if self.bayes_interval and self._scores and (self.steps + 1) % self.bayes_interval == 0:
            point = self._suggested()
            chosen = np.argsort(-point, kind="stable")[:count]
        else:
            chosen = self._random.choice(self.sublayers, count, replace=False)
            point = np.zeros(self.sublayers)
            point[chosen] = 1.0
        inner = self.layers - 2
        skipped = Skipped(
            frozenset(int(i) + 1 for i in chosen if i < inner),
            frozenset(int(i) - inner + 1 for i in chosen if i >= inner),
        )
        self._proposed = skipped, point
        return skipped

    def tell(self, score: float) -> None:
        """Records the score of the last proposal."""
        assert self._proposed is not None
        skipped, point = self._proposed
        self._points.append(point)
        self._scores.append(score)
        self.steps += 1
        self.without_gain += 1
        if score > self.score:
            self.best, self.score, self.without_gain = skipped, score, 0

    def _suggested(self) -> np.ndarray:
        """The point [sublayers] with the highest upper confidence bound among some drawn at random."""
        points, scores = np.stack(self._points), np.array(self._scores)
        spread = scores.std() or 1.0
        targets = (scores - scores.mean()) / spread
        length = max(LENGTHS, key=lambda one: _evidence(points, targets, one))
        factor = cho_factor(_kernel(points, points, length) + NOISE * np.eye(len(points)), lower=True)
        drawn = self._random.random((SUGGESTIONS, self.sublayers))
        across = _kernel(drawn, points, length)
        mean = across @ cho_solve(factor, targets)
        variance = 1.0 - (across * cho_solve(factor, across.T).T).sum(axis=1)
        return drawn[np.argmax(mean + KAPPA * np.sqrt(variance.clip(min=0.0)))]


def _kernel(first: np.ndarray, second: np.ndarray, length: float) -> np.ndarray:
    """Matern's kernel of order 5/2 between points [n, d] and [m, d] -> [n, m]."""
    scaled = SQRT5 * cdist(first, second) / length
    return (1.0 + scaled + scaled**2 / 3.0) * np.exp(-scaled)


def _evidence(points: np.ndarray, targets: np.ndarray, length: float) -> float:
    """Log marginal likelihood of targets [n] at points [n, d], up to a constant."""
    lower, _ = factor = cho_factor(_kernel(points, points, length) + NOISE * np.eye(len(points)), lower=True)
    return float(-0.5 * targets @ cho_solve(factor, targets) - np.log(np.diag(lower)).sum())
