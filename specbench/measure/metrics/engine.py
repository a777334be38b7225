"""What a run of another engine holds beside its method: the engine against itself, and against this project."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbench.config.spec import AGAIN, BASELINE, METHOD, OWN_LOOP
from specbench.measure.metrics.acceptance import ratio
from specbench.measure.metrics.metrics import equivalence, speedups

if TYPE_CHECKING:
    import pandas as pd


def engine_numbers(records: list[dict], generations: pd.DataFrame, facts: dict) -> dict | None:
    """Name, version and faults of the engine, and numbers of its plain arm; None for this project's own.

    - again: the plain arm's second answer as if it were a method: speedup, low and high are noise.
    - again_equivalence: verdicts on it.
    - own_tokens_per_second: of this project's autoregressive decoding.

    Args:
        records: of the journal, failed questions included.
        generations: the answers of the others, as from `generations_frame`.
        facts: of the run.
    """
    engine = facts["engine"]
    if engine is None:
        return None
    twice = generations[generations["arm"].isin([BASELINE, AGAIN])]
    again, _ = speedups(twice.replace({"arm": {AGAIN: METHOD}}), BASELINE, facts["unit"])
    loop = generations[generations["arm"] == OWN_LOOP]
    return engine | {
        "again": {"speedup": again.value, "low": again.low, "high": again.high},
        "again_equivalence": equivalence(records, "again_equivalence"),
        "own_tokens_per_second": ratio(loop["tokens"].sum(), loop["seconds"].sum()),
    }
