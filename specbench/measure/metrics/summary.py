"""From journal records to the numbers of a summary.

Nothing else in the project computes a metric but `acceptance` (those that rounds have without a baseline), `machine`
(what was seen of the machine), and what a method makes of its own statistics. Every function is pure. A number that
could not be measured is None. Totals (tokens, seconds) are over all repeats; comparisons take the mean of a question's
repeats first, so that the jackknife of an interval drops questions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbench.config.spec import POOL, QUESTION, SINGLE, RunSpec
from specbench.data.contamination import uncleared_lines
from specbench.data.warm_start import warm_lines
from specbench.measure.metrics.acceptance import changed_drafts, ratio
from specbench.measure.metrics.dataframes import failed_questions, generations_frame, steps_frame
from specbench.measure.metrics.drawn import likelihoods
from specbench.measure.metrics.drift import drift, drift_lines
from specbench.measure.metrics.engine import engine_numbers
from specbench.measure.metrics.machine import machine, speed
from specbench.measure.metrics.metrics import (
    MetricInput,
    bandwidth_fraction,
    ceiling_rate,
    equivalence,
    numbers,
    speedups,
    ties,
)
from specbench.measure.metrics.timing import ARMS, turn_means
from specbench.system.settings import CONSTANT

if TYPE_CHECKING:
    import pandas as pd

    from specbench.measure.metrics.statistics import Estimate

SCHEMA = 4
# What a summary holds of the facts of its run, and what older folders lack of it.
OF_FACTS = ("dtype", "device", "weights", "target_pass_bytes", "peak_memory_bytes")
LATER_FACTS = (
    *("threads", "kernels", "tiles", "beyond_kernels", "compiled", "graphs", "uncompiled"),
    *("extra_cores", "cores", "slice_seconds", "anatomy", "weights_source", "round_costs"),
    *("draft", "engine_target", "prompting", "baseline_by_threads"),
    *("reference_answer", "any_length", "longest_path", "max_nodes", "training", "trained_weights"),
)
OF_DECODING = ("temperature", "top_k", "top_p", "max_new_tokens", "verification", "draft_length")


def summarise(records: list[dict], facts: dict, config: dict) -> dict:
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


def speedup_over_passes(records: list[dict], facts: dict) -> Estimate:
    """The overall speedup of the passes so far, with its interval over them."""
    generations = generations_frame(records)
    quoted, *_ = faster_baseline(generations)
    return speedups(generations, ARMS[quoted], facts["unit"])[1]
