"""Claims of papers, and the runs and journals that they are checked on."""

from __future__ import annotations

import numpy as np
import yaml

from specbench.report import claims
from tests.support.samples import faster
from tests.support.synthetic import EXACT, TIE, VIOLATION, columns, generation, record, turn

KNOWN = yaml.safe_load(claims.FILE.read_text())


def published(speedup: float, **changes) -> dict:
    """A summary with the published settings of its method."""
    return faster(speedup, **changes) | {"settings_source": "published"}


def found(claim: dict, runs: list) -> claims.Finding:
    return claims.find({"name": "a claim", "paper": {"figure": "2 times", "source": "Table 1"}} | claim, runs)


def journal(speedup: float, seed: int = 0, read: int = 100) -> list[dict]:
    """30 questions; read: bytes of weights that a draft token reads."""
    draw = np.random.default_rng(seed)
    found = []
    for question in range(30):
        plain = 1 + question % 5
        rounds = columns([{"accepted": 3, "draft_bytes": 5 * read}] * 5)
        method = generation([3] * 5, plain / speedup * draw.normal(1, 0.02), 0.01) | {"steps": rounds}
        found.append(
            record(
                question, turns=[turn(baseline=generation([0] * 20, plain, 0.01, drafted=0), method=method)]
            )
        )
    return found


def judged(exact: int, ties: int = 0, violations: int = 0, first: int = 0) -> list[dict]:
    """A question for each answer, with ids from `first` on; violations come first, and then ties."""
    certificates = [VIOLATION] * violations + [TIE] * ties + [EXACT] * exact
    return [
        record(first + i, turns=[turn(equivalence=one, baseline=generation([0]), method=generation([1]))])
        for i, one in enumerate(certificates)
    ]


AGAINST = {
    "measure": "relative",
    "of": {"method": "ours"},
    "against": [{"method": "weak"}, {"method": "strong"}],
    "at_least": 1.1,
}
