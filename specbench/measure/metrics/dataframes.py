"""Journal records as tables: one row per generation, one row per draft-verify round."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

if TYPE_CHECKING:
    from collections.abc import Iterator

# Columns of older journals, which are numbers of single methods: `stats` holds them now.
OWN_COLUMNS = (
    *("exits", "grouped", "exit_seconds", "hit"),
    *("early_seconds", "beside_seconds", "after_seconds", "idle_seconds", "handover_seconds"),
)
# The columns of decoding.trace.Step; seconds and bytes as there. (Not imported: that would load torch.)
STEP_COLUMNS = {
    "drafted": "int32",
    "accepted": "int32",
    "emitted": "int32",
    "depth": "int32",
    "draft_seconds": "float64",
    "verify_seconds": "float64",
    "other_seconds": "float64",
    "draft_bytes": "float64",
    "target_bytes": "float64",
    "sequences": "int32",
    "align_seconds": "float64",
    "stats": "object",
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
        for step, values in enumerate(_rounds(generation["steps"]))
    ]
    types = KEYS | {"step": "int32"} | STEP_COLUMNS
    return pd.DataFrame(rows, columns=list(types)).astype(types)


def stat(rounds: pd.DataFrame, name: str) -> pd.Series:
    """One of the numbers that a method keeps of its rounds, see `Draft.stats`; None where a round has none."""
    return rounds["stats"].map(lambda stats: stats.get(name) if stats else None).astype(object)


def _rounds(steps: dict[str, list]) -> Iterator[tuple]:
    """The values of STEP_COLUMNS of each round; older journals have other names."""
    if "sequences" not in steps:
        steps = steps | {"sequences": steps["rows"]}
    if "stats" not in steps:
        own = [
            {name: steps[name][i] for name in OWN_COLUMNS if name in steps}
            for i in range(len(steps["sequences"]))
        ]
        kept = [{k: v for k, v in one.items() if v is not None and v != []} for one in own]
        # Of a draft that nothing was launched for it is known, too.
        for one, every in zip(kept, own):
            if "exit_seconds" in one or "idle_seconds" in one:
                one["hit"] = every["hit"]
        steps = steps | {"stats": [one or None for one in kept]}
    return zip(*(steps[name] for name in STEP_COLUMNS), strict=True)


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
