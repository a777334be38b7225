"""From journal records to the numbers of a summary.

Nothing else in the project computes a metric but `rounds.py` (those that rounds have without a baseline), `machine.py`
(what was seen of the machine), and what a method makes of its own statistics. Every function is pure. A number that
could not be measured is None. Totals (tokens, seconds) are over all repeats; comparisons take the mean of a question's
repeats first, so that the jackknife of an interval drops questions.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import pandas as pd

from specbench import values
from specbench.measure.equivalence import VERDICTS
from specbench.measure.frames import GENERATION_COLUMNS, failed_questions, generations_frame, steps_frame
from specbench.measure.machine import machine
from specbench.measure.of_method import classes, describe, of_method
from specbench.measure.rounds import (
    BATCHING,
    acceptance_by_position,
    acceptance_length,
    acceptance_rate,
    batching,
    mbsu,
    ratio,
    total,
)
from specbench.measure.statistics import Speedup, over_passes, ratio_of_means, speedup

if TYPE_CHECKING:
    from collections.abc import Sequence

SCHEMA = 4
ARMS = {"engine": "baseline", "hf_generate": "hf_generate"}  # what a speedup can be quoted against: its arm
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
    failed = failed_questions(records)
    tasks: dict[str, list[dict]] = {}
    for record in sorted(records, key=lambda record: record["question_id"]):
        tasks.setdefault(record["task"], [])
        if record["question_id"] not in failed:
            tasks[record["task"]].append(record)
    total_records, records = len(records), [record for of_task in tasks.values() for record in of_task]
    baseline = baseline_numbers(records, facts)
    reference = ARMS[baseline["quoted_against"]]
    batch_size = config["batch_size"] if facts["batched"] else None
    owners = classes(config, facts["batched"])
    overall = numbers(records, facts, reference, batch_size, owners=owners)
    settings = values.settings(config["method"])
    if facts["batched"]:
        settings |= {f"drafter.{key}": value for key, value in values.settings(config["drafter"]).items()}
    return {
        "schema": SCHEMA,
        "status": "failed" if failed else "complete",
        "failed": len(failed),
        "records": total_records,
        "method": config["method"]["name"],
        "drafter": config["drafter"]["name"] if batch_size else None,
        "settings": settings,
        "pair": config["pair"]["name"],
        "data": config["data"]["name"],
        "task": config["task"]["name"],
        "temperature": config["decoding"]["temperature"],
        "batch_size": config["batch_size"],
        "repeats": len(repeats(records)) or config["repeats"],
        "processes": len({record.get("process", 0) for record in records}),
        "experiment": config["experiment"],
        "protocol": config["protocol"],
        "dtype": facts["dtype"],
        "device": facts["device"],
        "threads": facts.get("threads"),
        "slice_seconds": facts.get("slice_seconds"),
        "weights": facts["weights"],
        "anatomy": facts.get("anatomy"),
        "training": facts.get("training", {}),
        "target_pass_bytes": facts["target_pass_bytes"],
        "peak_memory_bytes": facts["peak_memory_bytes"],
        "overall": overall,
        "machine": machine(records),
        "tasks": {
            task: numbers(of_task, facts, reference, batch_size, False, owners)
            for task, of_task in tasks.items()
        },
        "notes": describe(owners, overall["stats"]),
        "equivalence": overall["equivalence"],
        "baseline": baseline,
    }


def numbers(
    records: list[dict],
    facts: dict,
    reference: str,
    batch_size: int | None = None,
    whole_run: bool = True,
    owners: Sequence[type] = (),
) -> dict:
    """The metrics of the method over some questions.

    Args:
        records: of the journal.
        facts: of the run, as `facts.json` holds them.
        reference: the arm that speedups are against.
        batch_size: None for a method that decodes one sequence at a time.
        whole_run: whether these are all questions that were measured.
        owners: classes of the method and of its drafter, which summarise numbers of their own.
    """
    generations, steps = generations_frame(records), steps_frame(records)
    method = generations[generations["arm"] == "method"]
    rounds = steps[steps["arm"] == "method"]
    turns = turn_means(generations)
    whole = paired_seconds(turns, reference)
    decoding = paired_seconds(turns, reference, with_prefill=False)
    rate = ratio(method["tokens"].sum(), method["seconds"].sum())
    if whole_run or not batch_size:
        faster, by_passes = speedups(generations, reference, whole, bool(batch_size))
    else:  # a round belongs to all its rows: a task has no time of its own
        faster = by_passes = Speedup(None, None, None)
        rate, decoding = None, decoding.iloc[:0]
    return {
        "questions": method["question_id"].nunique(),
        "pools": method["pool"].nunique() if batch_size else None,
        "tokens": total(method["tokens"]),
        "seconds": total(method["seconds"]),
        "tokens_per_second": rate,
        "speedup": faster.value,
        "speedup_low": faster.low,
        "speedup_high": faster.high,
        "speedup_questions": len(whole),
        "passes_low": by_passes.low,
        "passes_high": by_passes.high,
        "decode_speedup": ratio(decoding["reference"].sum(), decoding["method"].sum()),
        "spec_bench_speedup": None if batch_size else spec_bench_speedup(turns, reference),
        "acceptance_length": acceptance_length(rounds),
        "acceptance_rate": acceptance_rate(rounds),
        **acceptance_by_position(rounds),
        "mbsu": mbsu(rounds, facts["target_pass_bytes"]),
        "bandwidth_fraction": bandwidth_fraction(rate, facts),
        "prefill_seconds": total(method["prefill_seconds"]),
        "draft_seconds": total(rounds["draft_seconds"]),
        "verify_seconds": total(rounds["verify_seconds"]),
        "other_seconds": total(rounds["other_seconds"]),
        **(batching(method, rounds, batch_size) if batch_size else dict.fromkeys(BATCHING)),
        "stats": of_method(owners, rounds),
        "equivalence": equivalence(records),
    }


def by_question(records: list[dict], reference: str, batched: bool) -> pd.DataFrame:
    """One row per question, in the order of their ids: QUESTION_COLUMNS.

    tokens: of the method, summed over the turns, mean of the repeats. baseline_seconds (of the arm `reference`),
    method_seconds: those that a speedup compares (see `paired_seconds`); their sums over all questions give the overall
    one. verdict: the worst of its turns. A question that failed has its `error`, and no numbers.

    Args:
        records: of the journal.
        reference: the arm that speedups are against.
        batched: whether a round belongs to several sequences, so that a question has no time of its own.
    """
    generations, steps = generations_frame(records), steps_frame(records)
    turns = turn_means(generations)
    tokens = turns["tokens", "method"].groupby("question_id").sum(min_count=1)
    seconds = paired_seconds(turns, reference)
    rounds = dict(list(steps[steps["arm"] == "method"].groupby("question_id")))
    of_question: dict[int, list[dict]] = {}
    for record in records:
        of_question.setdefault(record["question_id"], []).append(record)
    rows = []
    for number, repeats_of_it in sorted(of_question.items()):
        timed = number in seconds.index and not batched
        baseline = method = faster = None
        if timed:
            baseline, method = seconds.loc[number]
            faster = ratio(baseline, method)
        own = rounds.get(number, steps.iloc[:0])
        verdicts = [turn["equivalence"]["verdict"] for record in repeats_of_it for turn in record["turns"]]
        rows.append(
            (
                number,
                repeats_of_it[0]["task"],
                tokens.get(number),
                baseline,
                method,
                faster,
                acceptance_length(own),
                acceptance_rate(own),
                max(filter(None, verdicts), key=VERDICTS.index, default=None),
                next((record["error"] for record in repeats_of_it if record["error"]), None),
            )
        )
    return pd.DataFrame(rows, columns=list(QUESTION_COLUMNS), dtype=object).astype(QUESTION_COLUMNS)


def baseline_numbers(records: list[dict], facts: dict) -> dict:
    """What the method is measured against: our autoregressive baseline, or transformers' generate if it is faster.

    Both rates are over the turns that both arms answered, where there are any: only those compare.
    `bandwidth_fraction` is that of the quoted one; `equivalence` holds the answers of one against the other.
    """
    generations = generations_frame(records)
    turns = turn_means(generations)
    shared = turns["seconds"][list(ARMS.values())].notna().all(axis=1)
    sums = (turns[shared] if shared.any() else turns).sum()
    rates = {name: ratio(sums["tokens", arm], sums["seconds", arm]) for name, arm in ARMS.items()}
    quoted = max(ARMS, key=lambda name: rates[name] or 0.0)
    return {
        "tokens_per_second": rates["engine"],
        "hf_generate_tokens_per_second": rates["hf_generate"],
        "quoted_against": quoted,
        "single_tokens_per_second": single_rate(generations)
        or (rates["engine"] if facts["batched"] else None),
        "bandwidth_fraction": bandwidth_fraction(rates[quoted], facts),
        "equivalence": equivalence(records, "baseline_equivalence"),
    }


def single_rate(generations: pd.DataFrame) -> float | None:
    """Tokens per second of autoregressive decoding at batch size 1; None where it is the baseline and no own arm."""
    single = generations[generations["arm"] == "single"]
    return ratio(single["tokens"].sum(), single["seconds"].sum())


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
    tokens, prefill + decoding * (n_reference - 1) / (n_method - 1), as the prefill gives the first token. A
    question is left out if one of its turns has no time in either arm, or cannot be scaled (a method's answer
    of one token).
    """
    tokens, seconds, prefill = turns["tokens"], turns["seconds"], turns["prefill_seconds"]
    equal = tokens[reference] == tokens["method"]
    factor = (tokens[reference] - 1) / (tokens["method"] - 1).where(tokens["method"] > 1)
    decoding = (seconds["method"] - prefill["method"]) * factor.where(~equal, 1.0)
    if with_prefill:
        method = seconds["method"].where(equal, prefill["method"] + decoding)
        pair = pd.DataFrame({"reference": seconds[reference], "method": method})
    else:
        pair = pd.DataFrame({"reference": seconds[reference] - prefill[reference], "method": decoding})
    return _complete_questions(pair).groupby("question_id").sum()


def paired_seconds_by(by: list[str], generations: pd.DataFrame, reference: str) -> dict[tuple, pd.DataFrame]:
    """`paired_seconds` of each group of generations; by: columns, whose values are the keys."""
    groups = generations.groupby(by)
    return {key: paired_seconds(turn_means(group), reference) for key, group in groups}


def pool_seconds(generations: pd.DataFrame, reference: str) -> pd.DataFrame:
    """As `paired_seconds`, but for each run of a pool (pool, repeat): the questions that were decoded together.

    A run in which one of the arms was not timed is left out: older folders hold one repeat only of
    autoregressive decoding at batch size 1.
    """
    by = ["pool", "repeat"]
    runs = paired_seconds_by(by, generations, reference)
    if not runs:
        empty = pd.MultiIndex.from_arrays([[], []], names=by)
        return pd.DataFrame(columns=["reference", "method"], index=empty, dtype=float)
    return pd.concat(runs, names=by).groupby(level=by).sum()


def repeats(records: list[dict]) -> set[int]:
    """Numbers of the passes that were made over the questions; records of older folders hold several."""
    return {
        record.get("repeat", 0) + i
        for record in records
        for turn in record["turns"]
        for i in range(len(turn["arms"]["method"]))
    }


def speedups(
    generations: pd.DataFrame, reference: str, questions: pd.DataFrame, batched: bool
) -> tuple[Speedup, Speedup]:
    """The speedup with its interval over questions or pools, and that with its interval over passes.

    Args:
        generations: of all arms.
        reference: the arm that they are against.
        questions: as `paired_seconds` gives them.
        batched: whether the questions were decoded in pools.
    """
    passes = passes_seconds(generations, reference)
    several = passes.index.name == "process"
    processes = [([a], [b]) for a, b in zip(passes["reference"], passes["method"])] if several else []
    runs = pool_seconds(generations, reference) if batched else questions
    pools = runs.index.get_level_values("pool") if batched else None
    return (
        speedup(runs["reference"], runs["method"], pools, processes),
        over_passes(passes["reference"], passes["method"]),
    )


def speedup_over_passes(records: list[dict], facts: dict) -> Speedup:
    """The overall speedup, with the interval over passes of `passes_seconds`."""
    reference = ARMS[baseline_numbers(records, facts)["quoted_against"]]
    passes = passes_seconds(generations_frame(records), reference)
    return over_passes(passes["reference"], passes["method"])


def passes_seconds(generations: pd.DataFrame, reference: str) -> pd.DataFrame:
    """Seconds of all questions in each pass, or, where several processes measured, on average in each process.

    Only questions that were answered in all passes count. The index is named `repeat` or `process`, and the columns are
    those of `paired_seconds`.
    """
    unit = "process" if generations["process"].nunique() > 1 else "repeat"
    seconds = paired_seconds_by([unit], generations, reference)
    if not seconds:
        return pd.DataFrame({"reference": [], "method": []}, dtype=float)
    shared = set.intersection(*(set(one.index) for one in seconds.values()))
    sums = {key: one[one.index.isin(shared)].sum() for (key,), one in seconds.items()}
    return pd.DataFrame(sums).T.rename_axis(index=unit)


class Relative(NamedTuple):
    """A ratio of two runs, and what it rests on.

    Attributes:
        ratio: with its interval.
        count: so many of a unit.
        unit: "question", "pool", or "repeat" of one pool.
    """

    ratio: Speedup
    count: int  # type: ignore[assignment] # hides the count() that a tuple has, which nothing calls
    unit: str


def relative(first: list[pd.DataFrame], second: list[pd.DataFrame], batched: bool = False) -> Relative:
    """Mean of a number over the runs `second` / its mean over the runs `first`.

    Each run as `parts` gives it; only the questions (batched: runs of pools) that are in all of them count.
    """
    shared = set.intersection(*(set(run.index) for run in (*first, *second)))
    kept = [[run.loc[run.index.isin(shared)].sort_index() for run in runs] for runs in (first, second)]
    ours, theirs = ([(run["above"].to_numpy(), run["below"].to_numpy()) for run in runs] for runs in kept)
    if not batched:
        return Relative(ratio_of_means(ours, theirs), len(shared), "question")
    pools = [pool for pool, _ in sorted(shared)]
    several = len(set(pools)) > 1
    found = ratio_of_means(ours, theirs, pools)
    return Relative(found, len(set(pools) if several else shared), "pool" if several else "repeat")


def parts(records: list[dict], what: str, batched: bool) -> pd.DataFrame:
    """The parts of a number of a run, by question, or in a run of batches by run of a pool.

    Args:
        records: of the journal.
        what: "speedup": seconds of the autoregressive baseline of this run / of the method. "throughput": the same
            against it at batch size 1. "mbsu": bytes of weights that autoregressive decoding would have read / that
            were read. "acceptance_length": tokens emitted by draft-verify rounds / target passes.
        batched: whether it is a run of batches.

    Returns:
        Two columns, `above` and `below`, whose sums' ratio is the number; indexed by question_id or (pool, repeat).
    """
    if what in ("mbsu", "acceptance_length"):
        steps = steps_frame(records)
        rounds = steps[steps["arm"] == "method"]
        by = [rounds["pool"], rounds["repeat"]] if batched else rounds["question_id"]
        if what == "acceptance_length":
            return pd.DataFrame({"above": rounds["emitted"], "below": 1}).groupby(by).sum()
        # As a float: tokens are counted in 32 bits, which bytes of several overflow.
        whole_pass = float(steps.loc[steps["arm"] == ARMS["engine"], "target_bytes"].max())
        read = (rounds["draft_bytes"] + rounds["target_bytes"]) / rounds["rows"]
        return pd.DataFrame({"above": rounds["emitted"] * whole_pass, "below": read}).groupby(by).sum()
    generations = generations_frame(records)
    single = what == "throughput" and (generations["arm"] == "single").any()
    reference = "single" if single else ARMS["engine"]
    turns = None if batched else turn_means(generations)
    seconds = pool_seconds(generations, reference) if turns is None else paired_seconds(turns, reference)
    return seconds.rename(columns={"reference": "above", "method": "below"})


def spec_bench_speedup(turns: pd.DataFrame, reference: str) -> float | None:
    """Mean over questions of the method's tokens/s, divided by that of the reference (Spec-Bench's speed.py).

    Tokens are generated ids in both arms; Spec-Bench counts the baseline's from its text, which favours the
    method.
    """
    timed = turns[["tokens", "seconds"]].loc[:, (slice(None), [reference, "method"])]
    sums = _complete_questions(timed).groupby("question_id").sum()
    rates = sums["tokens"] / sums["seconds"]
    return ratio(rates["method"].sum(), rates[reference].sum())


def bandwidth_fraction(tokens_per_second: float | None, facts: dict) -> float | None:
    """A speed as a fraction of that of autoregressive decoding if it did nothing but read the target's weights.

    Above 1: faster than any autoregressive decoding from memory on this machine. Weights that fit into the caches can
    be read faster than memory; keys and values are not counted.
    """
    bandwidth = facts["bandwidth_bytes_per_second"]
    if tokens_per_second is None or bandwidth is None:
        return None
    return tokens_per_second * facts["target_pass_bytes"] / bandwidth


def equivalence(records: list[dict], key: str = "equivalence") -> dict:
    """Counts of the verdicts, each the worst of an answer's repeats.

    `answers` were judged; where none was (sampling) the counts are None.
    """
    worst: dict[tuple[int, int], dict] = {}  # of the repeats of an answer
    for record in records:
        for turn in record["turns"]:
            found, answer = turn.get(key), (record["question_id"], turn["turn"])
            if not found or found["verdict"] is None:
                continue
            if answer not in worst or VERDICTS.index(found["verdict"]) > VERDICTS.index(
                worst[answer]["verdict"]
            ):
                worst[answer] = found
    judged = [*worst.values()]
    divergences = [c["first_divergence"] for c in judged if c["first_divergence"] is not None]
    counts = {name: sum(c["verdict"] == name for c in judged) if judged else None for name in VERDICTS}
    return {
        "answers": len(judged),
        **counts,
        "first_divergence_median": float(median(divergences)) if divergences else None,
    }


def _complete_questions(turns: pd.DataFrame) -> pd.DataFrame:
    """The rows of the questions that have a number in every column of every turn."""
    return turns[turns.notna().all(axis=1).groupby("question_id").transform("all")]
