"""What a run of another engine holds beside its method: the engine against itself, and against this project."""

from __future__ import annotations

from specbench.config.spec import QUESTION
from specbench.measure.metrics.acceptance import ratio
from specbench.measure.metrics.dataframes import generations_frame
from specbench.measure.metrics.metrics import equivalence, speedups
from specbench.measure.metrics.timing import ARMS

AGAIN, OWN_LOOP = "again", "own_loop"  # arms


def engine_numbers(records: list[dict], facts: dict) -> dict | None:
    """Name, version and faults of the engine, and what its plain arm did; None of this project's own.

    - again: the plain arm's second answer as if it were a method: speedup, low and high are noise.
    - again_equivalence: verdicts on it.
    - own_tokens_per_second: of this project's autoregressive decoding.
    """
    engine = facts.get("engine")
    if engine is None:
        return None
    generations = generations_frame(records)
    twice = generations[generations["arm"].isin([ARMS["engine"], AGAIN])]
    again, _ = speedups(twice.replace({"arm": {AGAIN: "method"}}), ARMS["engine"], QUESTION)
    loop = generations[generations["arm"] == OWN_LOOP]
    return engine | {
        "again": {"speedup": again.value, "low": again.low, "high": again.high},
        "again_equivalence": equivalence(records, "again_equivalence"),
        "own_tokens_per_second": ratio(loop["tokens"].sum(), loop["seconds"].sum()),
    }
