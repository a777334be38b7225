"""Seconds of the arms, paired question by question, pool by pool and pass by pass: what speedups are ratios of."""

from __future__ import annotations

import pandas as pd

from specbench.config.spec import POOL, QUESTION
from specbench.measure.metrics.dataframes import GENERATION_COLUMNS

ARMS = {"engine": "baseline", "hf_generate": "hf_generate"}  # what a speedup can be quoted against: its arm


def turn_means(generations: pd.DataFrame) -> pd.DataFrame:
    """Means over the repeats: one row per (question_id, turn), one column per (tokens | *seconds, arm).

    NaN where an arm did not answer, or where its prefill was not timed.
    """
    wide = generations.groupby(["question_id", "turn", "arm"])[list(GENERATION_COLUMNS)].mean().unstack("arm")
    return wide.reindex(
        columns=pd.MultiIndex.from_product([GENERATION_COLUMNS, [*ARMS.values(), "single", "method"]])
    )


def paired_seconds(turns: pd.DataFrame, reference: str, with_prefill: bool = True) -> pd.DataFrame:
    """Seconds per question of the arm `reference` and of the method: columns `reference` and `method`.

    Answers of one length are compared as timed. Where a near-tie or sampling made the lengths differ, the
    shorter answer would win by being short; so the method's decoding is scaled to the reference's number of
    tokens, prefill + decoding * (n_reference - 1) / (n_method - 1), as the prefill gives the first token; all of
    its time is, where the prefill was not timed (batches of another engine). A question is left out if one of
    its turns has no time in either arm, or cannot be scaled (a method's answer of one token).
    """
    tokens, seconds, prefill = turns["tokens"], turns["seconds"], turns["prefill_seconds"]
    equal = tokens[reference] == tokens["method"]
    factor = (tokens[reference] - 1) / (tokens["method"] - 1).where(tokens["method"] > 1)
    decoding = (seconds["method"] - prefill["method"]) * factor.where(~equal, 1.0)
    if with_prefill:
        every = seconds["method"] * tokens[reference] / tokens["method"]
        scaled = (prefill["method"] + decoding).where(prefill["method"].notna(), every)
        method = seconds["method"].where(equal, scaled)
        pair = pd.DataFrame({"reference": seconds[reference], "method": method})
    else:
        pair = pd.DataFrame({"reference": seconds[reference] - prefill[reference], "method": decoding})
    return complete_questions(pair).groupby("question_id").sum()


def paired_seconds_by(
    by: list[str], generations: pd.DataFrame, reference: str, with_prefill: bool = True
) -> dict[tuple, pd.DataFrame]:
    """`paired_seconds` of each group of generations; by: columns, whose values are the keys."""
    groups = generations.groupby(by)
    return {key: paired_seconds(turn_means(group), reference, with_prefill) for key, group in groups}


def unit_seconds(
    generations: pd.DataFrame, reference: str, unit: str, with_prefill: bool = True
) -> pd.DataFrame:
    """`paired_seconds` of what has times of its own.

    Args:
        generations: of all arms.
        reference: the arm that the method is paired with.
        unit: "question", or "pool": the questions that were decoded together.
        with_prefill: whether the prefills count.

    Returns:
        Indexed by question_id, the means of its repeats; or by (pool, repeat), each run of a pool, less those in which
        one of the arms was not timed: older folders hold one repeat only of autoregressive decoding at batch size 1.
    """
    if unit == QUESTION:
        return paired_seconds(turn_means(generations), reference, with_prefill)
    by = [POOL, "repeat"]
    runs = paired_seconds_by(by, generations, reference, with_prefill)
    if not runs:
        empty = pd.MultiIndex.from_arrays([[], []], names=by)
        return pd.DataFrame(columns=["reference", "method"], index=empty, dtype=float)
    return pd.concat(runs, names=by).groupby(level=by).sum()


def pools_of(seconds: pd.DataFrame) -> pd.Index | None:
    """The pool of each row of what `unit_seconds` gives; None where the rows are questions."""
    return seconds.index.get_level_values(POOL) if POOL in seconds.index.names else None


def passes_seconds(generations: pd.DataFrame, reference: str, with_prefill: bool = True) -> pd.DataFrame:
    """Seconds of all questions in each pass, or, where several processes measured, on average in each process.

    Only questions that were answered in all passes count. The index is named `repeat` or `process`, and the columns are
    those of `paired_seconds`.
    """
    unit = "process" if generations["process"].nunique() > 1 else "repeat"
    seconds = paired_seconds_by([unit], generations, reference, with_prefill)
    if not seconds:
        return pd.DataFrame({"reference": [], "method": []}, dtype=float)
    shared = set.intersection(*(set(one.index) for one in seconds.values()))
    sums = {key: one[one.index.isin(shared)].sum() for (key,), one in seconds.items()}
    return pd.DataFrame(sums).T.rename_axis(index=unit)


def complete_questions(turns: pd.DataFrame) -> pd.DataFrame:
    """The rows of the questions that have a number in every column of every turn."""
    return turns[turns.notna().all(axis=1).groupby("question_id").transform("all")]
