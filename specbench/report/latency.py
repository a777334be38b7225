"""How long one user waits: `specbench latency RUNS`, from the times that runs recorded.

A speedup is about whole answers. A user also sees how soon an answer begins, how fast it goes on, and how evenly. A
method that emits several tokens at once has larger gaps between its chunks and still needs less time per token; and
a drafter that reads the prompt, too, delays the first token.

Only runs of one sequence at a time have such times. Arms alternate within answers, and only an arm's own time counts.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specbench.config.spec import BASELINE, METHOD, POOL
from specbench.measure.metrics.dataframes import generations_frame, steps_frame
from specbench.measure.metrics.statistics import Estimate, speedup
from specbench.measure.metrics.timing import columns_of, paired_seconds, question_sums, turn_means
from specbench.report.cells import NUMBER, UNKNOWN, PlainTable, console, ratio_text
from specbench.report.decision import ENGINE
from specbench.report.labels import method_label
from specbench.report.remarks import title_text
from specbench.report.tables import print_notes, runs_of_command
from specbench.system.errors import UserError, file_errors, one_line_errors

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from specbench.report.runs import Run

# A percentile, and how many times it needs: at least one should lie beyond it.
PERCENTILES = {50: 2, 95: 20, 99: 100}
FIRST, LATER, CHUNKS, ANSWER = "first token", "per later token", "between chunks", "whole answer"


@dataclass(frozen=True)
class Latency:
    """One kind of waiting.

    Attributes:
        name: of the kind.
        seconds: by arm, every time that was measured.
        ratio: the baseline's mean / the method's, with an interval over questions; None if it would mean nothing.
    """

    name: str
    seconds: dict[str, pd.Series]
    ratio: Estimate | None


def latencies(run: Run) -> list[Latency]:
    """What a user of one sequence waited for; a time that was not measured has no entries.

    Args:
        run: of one sequence at a time, with its records.
    """
    answers = generations_frame(run.records)
    decoding = answers["seconds"] - answers["prefill_seconds"]
    answers[FIRST] = answers["prefill_seconds"]
    answers[LATER] = decoding / (answers["tokens"] - 1).where(answers["tokens"] > 1)
    answers[ANSWER] = answers["seconds"]
    rounds = steps_frame(run.records)
    parts = [name for name in rounds if name.endswith("_seconds")]
    rounds[CHUNKS] = rounds[parts].sum(axis=1)  # another engine reports only whole rounds
    return [
        Latency(name, _by_arm(frame, name), None if name == CHUNKS else _ratio(frame, name))
        for name, frame in ((FIRST, answers), (LATER, answers), (CHUNKS, rounds), (ANSWER, answers))
    ]


def _by_arm(frame: pd.DataFrame, name: str) -> dict[str, pd.Series]:
    """The times of the baseline and of the method."""
    return {arm: frame.loc[frame["arm"] == arm, name].dropna() for arm in (BASELINE, METHOD)}


def _ratio(answers: pd.DataFrame, name: str) -> Estimate:
    """The baseline's times / the method's, as means over the turns that have both; whole answers at equal lengths."""

    def columns(some: pd.DataFrame) -> list[list[float]]:
        if name == ANSWER:
            return columns_of(paired_seconds(turn_means(some), BASELINE))
        turns = some.groupby(["question_id", "turn", "arm"])[name].mean().unstack("arm")
        return columns_of(question_sums(turns.reindex(columns=[BASELINE, METHOD]).dropna()))

    processes = [columns(part) for _, part in answers.groupby("process")]
    return speedup(*columns(answers), processes=processes if len(processes) > 1 else ())


def latency_table(run: Run) -> Table:
    """Two rows for each kind of waiting: the baseline's times in milliseconds, and the method's."""
    caption = (
        f"milliseconds; {BASELINE} / {METHOD}: of the means, above 1 if the method is faster, of "
        "whole answers with the method's decoding scaled to the baseline's number of tokens; a percentile is shown if "
        "so many times were measured that one should lie beyond it"
    )
    if run.summary["baseline"]["quoted_against"] != ENGINE:
        caption += "; the run's speedup is against generate of transformers, whose times are not shown here"
    table = PlainTable(title_text(run.summary), caption)
    table.add_columns("waiting", "arm")
    heads = ("times", "mean", *(f"p{percent}" for percent in PERCENTILES), f"{BASELINE} / {METHOD}")
    table.add_columns(*heads, **NUMBER)
    arms = {BASELINE: BASELINE, METHOD: method_label(run.summary)}
    for one in latencies(run):
        for arm, label in arms.items():
            times, ratio = 1e3 * one.seconds[arm], one.ratio if arm == METHOD else None
            shares = [
                _number(times.quantile(percent / 100) if len(times) >= least else None)
                for percent, least in PERCENTILES.items()
            ]
            cells = (str(len(times)), _number(times.mean() if len(times) else None), *shares)
            compared = "" if ratio is None else ratio_text(ratio.value, ratio.low, ratio.high)
            table.add_row(one.name if arm == BASELINE else "", label, *cells, compared)
    return table


def _number(milliseconds: float | None) -> str:
    """A time with three digits, or more if it has that many in front of its point."""
    if milliseconds is None:
        return UNKNOWN
    return f"{milliseconds:.{0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2}f}"


@one_line_errors()
@file_errors()
def main() -> int:
    """Prints a table for each run of the command line that measured single sequences; returns the exit code."""
    runs = runs_of_command("specbench latency", __doc__, with_records=True)
    single = [run for run in runs if run.summary["unit"] != POOL]
    if not single:
        raise UserError("no run has times of single answers: give runs without a scheduler")
    if pools := len(runs) - len(single):
        print_notes(
            [f"runs of batches left out: {pools}; sequences that share rounds have no times of their own"]
        )
    for run in single:
        console().print(latency_table(run))
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
