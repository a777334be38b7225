"""The numbers of each question of a run."""

from __future__ import annotations

import pandas as pd

from specbench.config.spec import METHOD, QUESTION
from specbench.measure.metrics.acceptance import acceptance_length, acceptance_rate
from specbench.measure.metrics.dataframes import generations_frame, steps_frame
from specbench.measure.metrics.metrics import VERDICTS
from specbench.measure.metrics.statistics import speedup
from specbench.measure.metrics.timing import columns_of, paired_seconds, turn_means

QUESTION_COLUMNS = {
    "question_id": "int64",
    "task": "str",
    "tokens": "float64",
    "baseline_seconds": "float64",
    "method_seconds": "float64",
    "speedup": "float64",
    "acceptance_length": "float64",
    "acceptance_rate": "float64",
    "verdict": "object",
    "error": "object",
}


def by_question(records: list[dict], reference: str, unit: str) -> pd.DataFrame:
    """One row per question, in the order of their ids: QUESTION_COLUMNS.

    tokens: of the method, summed over the turns, mean of the repeats. baseline_seconds (of the arm `reference`),
    method_seconds: those that a speedup compares (see `paired_seconds`), the method's scaled to the reference's number
    of tokens in this question. verdict: the worst of its turns. A question that failed has its `error`, and no numbers.

    Args:
        records: of the journal.
        reference: the arm that speedups are against.
        unit: what is timed; in a "pool" questions have no times.
    """
    generations, steps = generations_frame(records), steps_frame(records)
    turns = turn_means(generations)
    tokens = turns["tokens", METHOD].groupby("question_id").sum(min_count=1)
    seconds = paired_seconds(turns, reference) if unit == QUESTION else pd.DataFrame()
    rounds = dict(list(steps[steps["arm"] == METHOD].groupby("question_id")))
    of_question: dict[int, list[dict]] = {}
    for record in records:
        of_question.setdefault(record["question_id"], []).append(record)
    rows = []
    for number, repeats_of_it in sorted(of_question.items()):
        baseline = method = faster = None
        if number in seconds.index:
            baseline = seconds.loc[number, "reference"]
            faster = speedup(*columns_of(seconds.loc[[number]])).value
            method = None if faster is None else baseline / faster
        question_rounds = rounds.get(number, steps.iloc[:0])
        verdicts = [turn["equivalence"]["verdict"] for record in repeats_of_it for turn in record["turns"]]
        rows.append(
            (
                number,
                repeats_of_it[0]["task"],
                tokens.get(number),
                baseline,
                method,
                faster,
                acceptance_length(question_rounds),
                acceptance_rate(question_rounds),
                max(filter(None, verdicts), key=VERDICTS.index, default=None),
                next((record["error"] for record in repeats_of_it if record["error"]), None),
            )
        )
    return pd.DataFrame(rows, columns=list(QUESTION_COLUMNS), dtype=object).astype(QUESTION_COLUMNS)
