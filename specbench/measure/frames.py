"""Journal records as tables: one row per generation, one row per draft-verify round."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

if TYPE_CHECKING:
    from collections.abc import Iterator

# The columns of decoding.trace.Step; seconds and bytes as there. (Not imported: that would load torch.)
STEP_COLUMNS = {
    "drafted": "int32",
    "accepted": "int32",
    "emitted": "int32",
    "depth": "int32",
    "draft_seconds": "float64",
    "verify_seconds": "float64",
    "other_seconds": "float64",
    "draft_bytes": "int64",
    "target_bytes": "int64",
    "exits": "object",
    "rows": "int32",
    "align_seconds": "float64",
    "grouped": "object",
    "exit_seconds": "float64",
    "hit": "object",
    "early_seconds": "float64",
    "beside_seconds": "float64",
    "after_seconds": "float64",
    "idle_seconds": "float64",
    "handover_seconds": "float64",
}
KEYS = {
    "question_id": "int64",
    "task": "str",
    "category": "str",
    "pool": "int32",
    "turn": "int32",
    "arm": "str",
    "repeat": "int32",
    "process": "int32",
}
# New tokens, and seconds as in decoding.trace.Generation.
GENERATION_COLUMNS = {"tokens": "int64", "prefill_seconds": "float64", "seconds": "float64"}


def generations_frame(records: list[dict]) -> pd.DataFrame:
    """One row per turn, arm and repeat: KEYS, GENERATION_COLUMNS (NaN for a prefill that was not timed)."""
    rows = [
        (*keys, len(generation["tokens"]), generation["prefill_seconds"], generation["seconds"])
        for keys, generation in _generations(records)
    ]
    types = KEYS | GENERATION_COLUMNS
    return pd.DataFrame(rows, columns=list(types)).astype(types)


def steps_frame(records: list[dict]) -> pd.DataFrame:
    """One row per round of every generation: KEYS, `step` (from 0 in its generation), STEP_COLUMNS."""
    rows = [
        (*keys, step, *values)
        for keys, generation in _generations(records)
        for step, values in enumerate(zip(*(generation["steps"][name] for name in STEP_COLUMNS), strict=True))
    ]
    types = KEYS | {"step": "int32"} | STEP_COLUMNS
    return pd.DataFrame(rows, columns=list(types)).astype(types)


def failed_questions(records: list[dict]) -> set[int]:
    """Ids of the questions that failed in any pass."""
    return {record["question_id"] for record in records if record["error"] is not None}


def _generations(records: list[dict]) -> Iterator[tuple[tuple, dict]]:
    """Every generation of the questions that failed in no pass, with its KEYS.

    A record holds one repeat; those of older folders hold all of them.
    """
    failed = failed_questions(records)
    for record in records:
        for turn in record["turns"] if record["question_id"] not in failed else ():
            for arm, repeats in turn["arms"].items():
                for repeat, generation in enumerate(repeats, start=record.get("repeat", 0)):
                    keys = (
                        record["question_id"],
                        record["task"],
                        record["category"],
                        record["pool"],
                        turn["turn"],
                        arm,
                        repeat,
                        record.get("process", 0),
                    )
                    yield keys, generation
