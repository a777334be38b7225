"""Seconds of the arms, paired question by question, pool by pool and pass by pass: what speedups are ratios of."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from specbench.config.spec import BASELINE, HF, METHOD, POOL, QUESTION, SINGLE
from specbench.measure.metrics.dataframes import GENERATION_COLUMNS

ARMS = {"engine": BASELINE, "hf_generate": HF}  # what a speedup can be quoted against: its arm


def turn_means(generations: pd.DataFrame, by: Sequence[str] = ()) -> pd.DataFrame:
    """Means over the repeats: one row per (*by, question_id, turn), one column per (tokens | *seconds, arm).

    NaN where an arm did not answer, or if its prefill was not timed. by: columns whose values stay apart.
    """
    wide = generations.groupby([*by, "question_id", "turn", "arm"])[list(GENERATION_COLUMNS)].mean()
    return wide.unstack("arm").reindex(
        columns=pd.MultiIndex.from_product([GENERATION_COLUMNS, [*ARMS.values(), SINGLE, METHOD]])
    )


def paired_seconds(turns: pd.DataFrame, reference: str, with_prefill: bool = True) -> pd.DataFrame:
    """The columns of `statistics.quotient` for a speedup, question by question.

    If sampling or a near-tie made the lengths of answers differ, the shorter answer would win by being short. So the
    method's decoding is scaled to the reference's number of tokens, by one factor for all that is summed: the sum of
    n_reference - 1 / the sum of n_method - 1, as the prefill gives the first token. (A factor for each answer would be
    biased if answers are short: the few tokens of one would count for the many of the other.) All of the method's
    time is scaled if the prefill was not timed (batches of another engine). A question is left out if one of its
    turns has no time in either arm.

    Args:
        turns: as returned by `turn_means`.
        reference: the arm that the method is paired with.
        with_prefill: whether the prefills count.

    Returns:
        The rows of `turns`, summed over the turns: seconds of the `reference` and of the `method`; those of `decoding`,
        which are in the latter; `reference_tokens` and `method_tokens` after the prefill.
    """
    tokens, seconds, prefill = turns["tokens"], turns["seconds"], turns["prefill_seconds"]
    untimed = prefill[METHOD].isna() & with_prefill
    columns = {
        "reference": seconds[reference] - (0.0 if with_prefill else prefill[reference]),
        "method": seconds[METHOD] - (0.0 if with_prefill else prefill[METHOD]),
        "decoding": seconds[METHOD] - prefill[METHOD].where(~untimed, 0.0),
        "reference_tokens": tokens[reference] - 1 + untimed,
        "method_tokens": tokens[METHOD] - 1 + untimed,
    }
    return question_sums(pd.DataFrame(columns))


def question_sums(turns: pd.DataFrame) -> pd.DataFrame:
    """Sums over the turns, of the questions that have a number in every column of every turn."""
    levels = [name for name in turns.index.names if name != "turn"]
    complete = turns.notna().all(axis=1).groupby(level=levels).transform("all")
    return turns[complete].groupby(level=levels).sum()


def unit_seconds(
    generations: pd.DataFrame, reference: str, unit: str, with_prefill: bool = True
) -> pd.DataFrame:
    """`paired_seconds` by question or by pool.

    Args:
        generations: of all arms.
        reference: the arm that the method is paired with.
        unit: "question", or "pool": the questions that were decoded together.
        with_prefill: whether the prefills count.

    Returns:
        Indexed by question_id, the means of its repeats; or by (pool, repeat), each run of a pool, less those in which
        one of the arms was not timed.
    """
    if unit == QUESTION:
        return paired_seconds(turn_means(generations), reference, with_prefill)
    by = [POOL, "repeat"]
    return paired_seconds(turn_means(generations, by), reference, with_prefill).groupby(level=by).sum()


def columns_of(frame: pd.DataFrame) -> list[list[float]]:
    """The columns of a frame, as arguments of `statistics.quotient`."""
    return [frame[name].tolist() for name in frame]


def pools_of(seconds: pd.DataFrame) -> pd.Index | None:
    """The pool of each row of a result of `unit_seconds`; None if the rows are questions."""
    return seconds.index.get_level_values(POOL) if POOL in seconds.index.names else None


def passes_seconds(generations: pd.DataFrame, reference: str, with_prefill: bool = True) -> pd.DataFrame:
    """Seconds of all questions in each pass, or, if several processes measured, on average in each process.

    Only questions that were answered in all passes count. The index is named `repeat` or `process`, and the columns are
    those of `paired_seconds`.
    """
    unit = "process" if generations["process"].nunique() > 1 else "repeat"
    seconds = paired_seconds(turn_means(generations, [unit]), reference, with_prefill)
    passes_of_it = seconds["method"].groupby(level="question_id").transform("size")
    return seconds[passes_of_it == generations[unit].nunique()].groupby(level=unit).sum()
