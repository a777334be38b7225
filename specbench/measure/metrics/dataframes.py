"""Journal records as tables: one row per generation, one row per draft-verify round."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import pandas as pd

# The columns of decoding.trace.Step; seconds and bytes as there. (Not imported: that would load torch.)
STEP_COLUMNS = {
    "drafted": "int64",
    "accepted": "int64",
    "emitted": "int64",
    "depth": "int64",
    "draft_seconds": "float64",
    "verify_seconds": "float64",
    "other_seconds": "float64",
    "draft_bytes": "float64",
    "target_bytes": "float64",
    "sequences": "int64",
    "align_seconds": "float64",
    "stats": "object",
}
UNTOLD = ("drafted", "depth")  # not reported by some engines
KEYS = {
    "question_id": "int64",
    "task": "str",
    "category": "str",
    "pool": "int64",
    "turn": "int64",
    "arm": "str",
    "repeat": "int64",
    "process": "int64",
}
# Of a round: its number in its answer, from 0; the number of new tokens, and of all tokens, before it.
PLACE_COLUMNS = {"step": "int64", "place": "int64", "context": "int64"}
# New tokens, and seconds as in decoding.trace.Generation.
GENERATION_COLUMNS = {"tokens": "int64", "prefill_seconds": "float64", "seconds": "float64"}


def generations_frame(records: list[dict]) -> pd.DataFrame:
    """One row per turn, arm and repeat: KEYS, GENERATION_COLUMNS (NaN for a prefill that was not timed)."""
    rows = [
        (*keys, len(generation["tokens"]), generation["prefill_seconds"], generation["seconds"])
        for keys, _, generation in _generations(records)
    ]
    types = KEYS | GENERATION_COLUMNS
    return pd.DataFrame(rows, columns=list(types)).astype(types)


def steps_frame(records: list[dict]) -> pd.DataFrame:
    """One row per round of every generation: KEYS, PLACE_COLUMNS, STEP_COLUMNS.

    Counts of drafts that an engine does not report are NaN, and their columns then float64.
    """
    rows: list[tuple] = []
    for keys, turn, generation in _generations(records):
        # Older runs have one number for all arms.
        prompt = generation.get("prompt_tokens", turn["prompt_tokens"])
        steps = generation["steps"]
        # New tokens before each round; the first of an answer comes from the prefill.
        places = accumulate(steps["emitted"], initial=1)
        rounds = zip(places, zip(*(steps[name] for name in STEP_COLUMNS), strict=True))
        rows += [(*keys, i, place, prompt + place, *values) for i, (place, values) in enumerate(rounds)]
    types = KEYS | PLACE_COLUMNS | STEP_COLUMNS
    frame = pd.DataFrame(rows, columns=list(types))
    types |= {name: "float64" for name in UNTOLD if frame[name].isna().any()}
    return frame.astype(types)


def failed_questions(records: list[dict]) -> set[int]:
    """Ids of the questions that failed in any pass."""
    return {record["question_id"] for record in records if record["error"] is not None}


def _generations(records: list[dict]) -> Iterator[tuple[tuple, dict, dict]]:
    """Every generation of the questions that failed in no pass, with its KEYS and its turn in front."""
    failed = failed_questions(records)
    for record in records:
        for turn in record["turns"] if record["question_id"] not in failed else ():
            for arm, [generation] in turn["arms"].items():
                keys = record | turn | {"arm": arm}
                yield tuple(keys[name] for name in KEYS), turn, generation
