"""How a number of some runs compares with that of others, question by question."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import pandas as pd

from specbench.config.spec import BASELINE, METHOD, POOL, QUESTION, SINGLE
from specbench.measure.metrics.acceptance import mbsu_parts
from specbench.measure.metrics.dataframes import generations_frame, steps_frame
from specbench.measure.metrics.statistics import LEAST_PASSES, Estimate, ratio_of_means
from specbench.measure.metrics.timing import columns_of, pools_of, unit_seconds

if TYPE_CHECKING:
    from specbench.measure.metrics.statistics import Run

REPEAT = "repeat"  # of one pool
COUNTED = ("mbsu", "acceptance_length")  # numbers that are counted, not timed


class Relative(NamedTuple):
    """A ratio of two runs, and its basis.

    Attributes:
        ratio: with its interval.
        count: number of units.
        unit: "question", "pool", or "repeat" of one pool.
    """

    ratio: Estimate
    count: int  # type: ignore[assignment] # hides the count() that a tuple has, which nothing calls
    unit: str


def ratio_of_runs(
    first: list[pd.DataFrame],
    second: list[pd.DataFrame],
    processes: Sequence[list[pd.DataFrame]] = (),
    counted: bool = False,
) -> Relative:
    """Mean of a number over the runs `second` / its mean over the runs `first`.

    Only the questions, or runs of pools, that are in all runs count.

    Args:
        first: runs, each as returned by `parts`, all of one unit.
        second: likewise.
        processes: of each run of `first` and then of `second`, as returned by `parts_by_process`.
        counted: whether the number is a count, not a time: repeats of one pool then do not show how it varies.
    """
    shared = set.intersection(*(set(run.index) for run in (*first, *second)))
    frames = [[run.loc[run.index.isin(shared)].sort_index() for run in runs] for runs in (first, second)]
    ours, theirs = ([columns_of(run) for run in runs] for runs in frames)
    pools = pools_of(frames[0][0])
    units = shared if pools is None else set(pools)
    quotient = ratio_of_means(ours, theirs, pools, [_process_sums(run, units) for run in processes])
    if pools is None or len(units) != 1:
        return Relative(quotient, len(units), QUESTION if pools is None else POOL)
    ratio = Estimate(quotient.value, None, None) if counted else quotient
    return Relative(ratio, len(shared), REPEAT)


def _process_sums(frames: list[pd.DataFrame], shared: set) -> Run:
    """The columns' sums [processes] over the questions, or pools, that all processes answered.

    Repeats of a pool are shared out among processes: what they have in common are pools.
    """
    frames = [frame if pools_of(frame) is None else frame.groupby(POOL).mean() for frame in frames]
    common = shared.intersection(*(set(frame.index) for frame in frames))
    return columns_of(pd.DataFrame([frame[frame.index.isin(common)].sum() for frame in frames]))


def parts_by_process(records: list[dict], what: str, unit: str) -> list[pd.DataFrame]:
    """The parts of a number of a run as each of its processes measured them; see `parts`.

    Empty for what is counted, which is the same in every process, and for a run of one process.
    """
    processes = sorted({record["process"] for record in records})
    if what in COUNTED or len(processes) < LEAST_PASSES:
        return []
    return [parts([one for one in records if one["process"] == process], what, unit) for process in processes]


def parts(records: list[dict], what: str, unit: str, target_pass_bytes: int | None = None) -> pd.DataFrame:
    """The parts of a number of a run, by question or by run of a pool.

    Args:
        records: of the journal.
        what: "speedup": against the autoregressive baseline of this run. "throughput": against it at batch size 1.
            "mbsu": bytes of weights that autoregressive decoding would have read / that were read. "acceptance_length":
            tokens emitted by draft-verify rounds / target passes.
        unit: what is timed, "question" or "pool".
        target_pass_bytes: bytes of weights that a pass of one token through the target reads, as the summary holds
            them; None for those of the largest pass of autoregressive decoding.

    Returns:
        Columns `above` and `below`, for times more: `statistics.quotient` of their sums is the number. Indexed by
        question_id or (pool, repeat).
    """
    if what in COUNTED:
        steps = steps_frame(records)
        rounds = steps[steps["arm"] == METHOD]
        if what == "mbsu" and rounds[["draft_bytes", "target_bytes"]].isna().any(axis=None):
            rounds = rounds.iloc[:0]  # as in the summary: those whose bytes are known are rounds of one kind
        by = [rounds[name] for name in (("pool", "repeat") if unit == POOL else ("question_id",))]
        if what == "acceptance_length":
            return pd.DataFrame({"above": rounds["emitted"], "below": 1}).groupby(by).sum()
        whole_pass = target_pass_bytes or steps.loc[steps["arm"] == BASELINE, "target_bytes"].max()
        return mbsu_parts(rounds, whole_pass).groupby(by).sum()
    generations = generations_frame(records)
    single = what == "throughput" and (generations["arm"] == SINGLE).any()
    reference = SINGLE if single else BASELINE
    seconds = unit_seconds(generations, reference, unit)
    return seconds.rename(columns={"reference": "above", "method": "below"})
