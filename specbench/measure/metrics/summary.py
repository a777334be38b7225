"""From journal records to the numbers of a summary.

Nothing else in the project computes a metric but `acceptance` (those that rounds have without a baseline), `machine`
(what was seen of the machine), and what a method makes of its own statistics. Every function is pure. A number that
could not be measured is None. Totals (tokens, seconds) are over all repeats; comparisons take the mean of a question's
repeats first, so that the jackknife of an interval drops questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import pandas as pd

from specbench.config.spec import BASELINE, METHOD, POOL, QUESTION, SINGLE, RunSpec
from specbench.data.contamination import uncleared_lines
from specbench.data.warm_start import warm_lines
from specbench.measure.metrics.acceptance import (
    acceptance_length,
    acceptance_rate,
    changed_drafts,
    mbsu_parts,
    ratio,
)
from specbench.measure.metrics.dataframes import failed_questions, generations_frame, steps_frame
from specbench.measure.metrics.drift import drift, drift_lines
from specbench.measure.metrics.engine import engine_numbers, likelihoods
from specbench.measure.metrics.machine import machine, speed
from specbench.measure.metrics.metrics import (
    VERDICTS,
    MetricInput,
    bandwidth_fraction,
    ceiling_rate,
    equivalence,
    numbers,
    speedups,
    ties,
)
from specbench.measure.metrics.statistics import LEAST_PASSES, Speedup, ratio_of_means, speedup
from specbench.measure.metrics.timing import (
    ARMS,
    columns_of,
    paired_seconds,
    pools_of,
    turn_means,
    unit_seconds,
)
from specbench.system.settings import CONSTANT

if TYPE_CHECKING:
    from specbench.measure.metrics.statistics import Run

SCHEMA = 4
REPEAT = "repeat"  # of one pool
COUNTED = ("mbsu", "acceptance_length")  # numbers that are counted, not timed
# What a summary holds of the facts of its run, and what older folders lack of it.
OF_FACTS = ("dtype", "device", "weights", "target_pass_bytes", "peak_memory_bytes")
LATER_FACTS = (
    *("threads", "kernels", "tiles", "beyond_kernels", "compiled", "graphs", "uncompiled"),
    *("extra_cores", "cores", "slice_seconds", "anatomy", "weights_source", "round_costs"),
    *("draft", "engine_target", "prompting", "baseline_by_threads"),
    *("reference_answer", "any_length", "longest_path", "max_nodes", "training", "trained_weights"),
)
OF_DECODING = ("temperature", "top_k", "top_p", "max_new_tokens", "verification", "draft_length")
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


def summary(records: list[dict], facts: dict, config: dict) -> dict:
    """The content of summary.json: the numbers over all questions (`overall`) and over each task."""
    failed, probed = failed_questions(records), speed(records, facts)
    in_order = [record for record in records if record["question_id"] not in failed]
    tasks: dict[str, list[dict]] = {}
    for record in sorted(records, key=lambda record: record["question_id"]):
        tasks.setdefault(record["task"], [])
        if record["question_id"] not in failed:
            tasks[record["task"]].append(record)
    every, records = records, [record for of_task in tasks.values() for record in of_task]
    generations, steps = generations_frame(records), steps_frame(records)
    baseline = baseline_numbers(generations, steps, facts)
    spec = RunSpec.of(config, facts["unit"])
    measured = MetricInput(records, generations, steps, facts, ARMS[baseline["quoted_against"]], spec)
    overall = numbers(measured) | _judged(every)
    by_third = drift(in_order, measured) if spec.learns else {}
    decoding = config["decoding"]
    source = config.get("settings_source") or {}  # only a configuration that a command checked has it
    return {
        "schema": SCHEMA,
        "status": "failed" if failed else "complete",
        "failed": len(failed),
        "records": len(every),
        "method": spec.groups["method"]["name"],
        "drafter": spec.groups.get("drafter", {}).get("name"),
        "unit": spec.unit,
        "settings": spec.settings,
        "settings_source": source.get("source"),
        "settings_tuned_on": source.get("pair"),
        "settings_published": source.get("published", {}),
        **{group: config[group]["name"] for group in ("pair", "data", "task")},
        "target": config["pair"].get("target"),
        "verify_width": decoding["verify_width"],
        **{key: config[key] for key in ("batch_size", "experiment", "protocol", "seed")},
        **{key: decoding[key] for key in OF_DECODING},
        **{key: config["data"].get(key) for key in ("limit", "split", "turns")},
        "pool": config["pool"] if spec.unit == POOL else None,
        "questions_sha256": facts["questions"],
        "processor": facts["processor"],
        "set_round_costs": decoding["round_costs"],  # None: measured, or not needed
        "repeats": len({record["repeat"] for record in every}) or config["repeats"],
        "processes": len({record["process"] for record in every}) or None,
        **{key: facts[key] for key in (*OF_FACTS, *LATER_FACTS)},
        "engine": engine_numbers(every, generations, facts),
        "likelihood": likelihoods(every),
        "ties": ties(every),
        "changed_drafts": changed_drafts(measured.rounds) if drafts_alike(config, facts, spec) else None,
        "overall": overall,
        "machine": machine(records) | {"speed": probed},
        "tasks": {
            task: numbers(measured.part(of_task))
            | _judged([record for record in every if record["task"] == task])
            for task, of_task in tasks.items()
        },
        "learns": spec.learns,
        "drift": by_third,
        "notes": [
            *(line for owner in spec.owners for line in owner.describe(overall["stats"])),
            *warm_lines(facts["training"]),
            *uncleared_lines(facts["training"], facts["questions"]),
            *drift_lines(by_third),
        ],
        "equivalence": overall["equivalence"],
        "baseline": baseline | _judged(every, "baseline_equivalence"),
    }


def drafts_alike(config: dict, facts: dict, spec: RunSpec) -> bool:
    """Whether drafts depend only on the text before them: not on chance, on times, or on other sequences."""
    decoding = config["decoding"]
    fixed = decoding["temperature"] == 0 and decoding["draft_length"] == CONSTANT
    return fixed and spec.engine is None and spec.unit == QUESTION and not facts["extra_cores"]


def _judged(records: list[dict], key: str = "equivalence") -> dict:
    """The verdicts of all answers: a wrong one counts even if its question failed elsewhere."""
    return {"equivalence": equivalence(records, key)}


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


def baseline_numbers(generations: pd.DataFrame, steps: pd.DataFrame, facts: dict) -> dict:
    """What the method is measured against: our autoregressive baseline, or transformers' generate if it is faster.

    `bandwidth_fraction` and its ceiling are those of the quoted one.

    Args:
        generations: the answers, as from `generations_frame`.
        steps: their rounds, as from `steps_frame`; in a batch they show what shares a pass.
        facts: of the run.
    """
    quoted, rates, compared = faster_baseline(generations)
    ceiling = ceiling_rate(steps[steps["arm"] == ARMS[quoted]], facts)
    return {
        "tokens_per_second": rates["engine"],
        "hf_generate_tokens_per_second": rates["hf_generate"],
        "quoted_against": quoted,
        "single_tokens_per_second": single_rate(generations)
        or (rates["engine"] if facts["unit"] == POOL else None),
        "bandwidth_fraction": bandwidth_fraction(compared.xs(ARMS[quoted], axis=1, level=1), ceiling),
        "ceiling_tokens_per_second": ceiling,
    }


def faster_baseline(generations: pd.DataFrame) -> tuple[str, dict[str, float | None], pd.DataFrame]:
    """Finds the faster one of `ARMS`.

    Args:
        generations: as from `generations_frame`.

    Returns:
        Its name; tokens per second of each; their `turn_means`: of the turns that both answered, if there
        are any, as only those compare.
    """
    turns = turn_means(generations)
    shared = turns["seconds"][list(ARMS.values())].notna().all(axis=1)
    compared = turns[shared] if shared.any() else turns
    sums = compared.sum()
    rates = {name: ratio(sums["tokens", arm], sums["seconds", arm]) for name, arm in ARMS.items()}
    return max(ARMS, key=lambda name: rates[name] or 0.0), rates, compared


def single_rate(generations: pd.DataFrame) -> float | None:
    """Tokens per second of autoregressive decoding at batch size 1; None if it is the baseline, not a separate arm."""
    single = generations[generations["arm"] == SINGLE]
    return ratio(single["tokens"].sum(), single["seconds"].sum())


def speedup_over_passes(records: list[dict], facts: dict) -> Speedup:
    """The overall speedup of the passes so far, with its interval over them."""
    generations = generations_frame(records)
    quoted, *_ = faster_baseline(generations)
    return speedups(generations, ARMS[quoted], facts["unit"])[1]


class Relative(NamedTuple):
    """A ratio of two runs, and its basis.

    Attributes:
        ratio: with its interval.
        count: number of units.
        unit: "question", "pool", or "repeat" of one pool.
    """

    ratio: Speedup
    count: int  # type: ignore[assignment] # hides the count() that a tuple has, which nothing calls
    unit: str


def relative(
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
    ratio = Speedup(quotient.value, None, None) if counted else quotient
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
