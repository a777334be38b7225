"""Summaries and run folders made by hand."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path

from specbench.measure.metrics.metrics import METRICS
from specbench.measure.metrics.summary import SCHEMA, summarise
from specbench.measure.records import run_folder as store
from specbench.measure.records.migrate import LATER_COUNTS, migrated_summary
from specbench.report.runs import Run, read_run
from specbench.system.files import finite, write_json
from tests.support.synthetic import CONFIG, FACTS, record

# A metric that is not named here is one that was not measured.
NUMBERS = dict.fromkeys(METRICS) | {
    "questions": 80,
    "pools": None,
    "tokens": 20000,
    "seconds": 100.0,
    "tokens_per_second": 1200.0,
    "speedup": 1.52,
    "speedup_low": 1.47,
    "speedup_high": 1.58,
    "speedup_questions": 80,
    "speedup_freedom": 79,
    "passes_low": None,
    "passes_high": None,
    "decode_speedup": 1.6,
    "decode_speedup_low": 1.55,
    "decode_speedup_high": 1.66,
    "spec_bench_speedup": 1.55,
    "acceptance_length": 3.21,
    "acceptance_length_by_answer": 3.3,
    "acceptance_rate": 0.61,
    "accepted_per_verified": 0.7,
    "acceptance_by_position": [0.8, 0.6],
    "acceptance_by_position_conditional": [0.8, 0.75],
    "judged_by_position": [1000, 800],
    "acceptance_by_place": [3.5, 3.1, 2.9],
    "rounds_by_place": [90, 70, 3],
    "acceptance_by_context": [3.4, 3.0],
    "rounds_by_context": [80, 83],
    "distinct_4grams": None,
    "stats": {},
    "mbsu": 1.9,
    "bandwidth_fraction": 0.9,
    "prefill_seconds": 4.0,
    "draft_seconds": 30.0,
    "verify_seconds": 60.0,
    "other_seconds": 5.0,
    "align_seconds": None,
    "occupancy": None,
    "alignment_share": None,
    "equivalence": LATER_COUNTS
    | {"answers": 80, "exact": 79, "tie": 1, "violation": 0, "first_divergence_median": 12.0},
}
UNCLEAR = NUMBERS | {"speedup": 1.01, "speedup_low": 0.97, "speedup_high": 1.05}
WRONG = NUMBERS | {
    "equivalence": LATER_COUNTS
    | {"answers": 80, "exact": 77, "tie": 0, "violation": 3, "first_divergence_median": 4.0}
}
BASELINE = {
    "tokens_per_second": 41.2,
    "hf_generate_tokens_per_second": 36.0,
    "single_tokens_per_second": None,
    "quoted_against": "engine",
    "bandwidth_fraction": 0.71,
    "ceiling_tokens_per_second": 61.5,
    "equivalence": LATER_COUNTS
    | {"answers": 80, "exact": 80, "tie": 0, "violation": 0, "first_divergence_median": None},
}
SUMMARY = migrated_summary(
    {
        "schema": SCHEMA,
        "engine": None,
        "likelihood": {},
        "status": "complete",
        "failed": 0,
        "records": 160,
        "machine": {"speed": None},
        "method": "kangaroo",
        "drafter": None,
        "unit": "question",
        "settings": {"max_draft_tokens": 6, "exit_layer": 2, "confidence_threshold": 0.6},
        "pair": "tiny",
        "target": "models/target",
        "data": "spec_bench",
        "task": "all",
        "temperature": 0.0,
        "max_new_tokens": 64,
        "questions_sha256": "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04",
        "limit": None,
        "seed": 0,
        "batch_size": 1,
        "repeats": 1,
        "experiment": None,
        "protocol": "paired",
        "dtype": "float32",
        "device": "cpu",
        "processor": "EPYC",
        "weights": "pretrained",
        "peak_memory_bytes": None,
        "overall": NUMBERS | {"questions": 160, "speedup_questions": 160, "speedup_freedom": 159},
        "tasks": {"math_reasoning": NUMBERS, "qa": UNCLEAR},
        "equivalence": NUMBERS["equivalence"],
        "baseline": BASELINE,
    }
)
# What another engine did beside the method.
ENGINE = {
    "name": "llama_cpp",
    "version": "xllamacpp==1",
    "plain": {"cache_type_k": "f16"},
    "faults": [],
    "again": {"speedup": 1.0, "low": 0.98, "high": 1.02},
    "again_equivalence": NUMBERS["equivalence"],
    "own_tokens_per_second": 37.5,
}
PROVENANCE = {
    "time": "2026-01-02T03:04:05+0000",
    "command": ["python", "-m", "specbench", "run", "method=kangaroo"],
    "config": {
        "method": {"name": "kangaroo"},
        "pair": {"target": "models/target", "dtype": "float32", "parts": {}},
        "batch_size": 1,
    },
    "versions": {"python": "3.11.7", "torch": "2.13"},
    "machine": {"os": "Linux", "cpu": "EPYC", "cores": 4, "usable_cores": 2, "memory_gib": 24, "gpus": []},
    "load_average": [0.1, 0.2, 0.3],
    "threads": {"torch": 2, "interop": 2, "cuda": None},
    "environment": {},
    "source_sha256": "a" * 64,
    "git": {"commit": "c" * 40, "diff_sha256": "d" * 64, "diff": ""},
    "questions": {"path": "questions.jsonl", "sha256": "e" * 64},
    "weights": {"target": {"source": "models/target", "files": {"model.safetensors": "f" * 64}}},
}


def changed(value: dict, **changes) -> dict:
    """A copy with other values; a name's two underscores lead into nested dictionaries: overall__speedup=2."""
    value = copy.deepcopy(value)
    for name, change in changes.items():
        *path, last = name.split("__")
        inner = value
        for key in path:
            inner = inner[key]
        inner[last] = change
    return value


def faster(speedup: float | None, **changes) -> dict:
    """A summary with another overall speedup, with and without prefill, and an interval of a tenth to each side."""
    ends = (None, None) if speedup is None else (speedup - 0.1, speedup + 0.1)
    names = [f"{name}{end}" for name in ("speedup", "decode_speedup") for end in ("", "_low", "_high")]
    overall = dict(zip(names, (speedup, *ends) * 2))
    return changed(SUMMARY | {"overall": SUMMARY["overall"] | overall}, **changes)


def wrong() -> dict:
    """Three answers of rag are not the target's own."""
    tasks = {"math_reasoning": NUMBERS, "rag": WRONG}
    return SUMMARY | {"tasks": tasks, "overall": WRONG, "equivalence": WRONG["equivalence"]}


def nothing(summary: dict = SUMMARY) -> dict:
    """The same summary with null for every number of its tasks."""
    judged = dict.fromkeys(NUMBERS["equivalence"]) | {"answers": 0}
    positions = {key: [] for key in NUMBERS if "_by_position" in key}
    empty = (
        dict.fromkeys(NUMBERS) | {"questions": 0, "speedup_questions": 0, "equivalence": judged} | positions
    )
    baseline = dict.fromkeys(BASELINE) | {"quoted_against": "engine", "equivalence": judged}
    return summary | {"overall": empty, "tasks": {"qa": empty}, "equivalence": judged, "baseline": baseline}


def batched(method: str = "exspec", drafter: str = "sps", batch_size: int = 8, **numbers) -> dict:
    """A run of a batch method."""
    overall = (
        NUMBERS | {"pools": 2, "speedup_freedom": 1, "occupancy": 0.94, "alignment_share": 0.031} | numbers
    )
    return SUMMARY | {
        "method": method,
        "drafter": drafter,
        "unit": "pool",
        "batch_size": batch_size,
        "settings": {"window": 32, "drafter.max_draft_tokens": 5},
        "overall": overall,
        "baseline": BASELINE | {"single_tokens_per_second": 300.0},
        "peak_memory_bytes": 1_230_000_000,
    }


def summarised(records: list[dict], facts: dict = FACTS, config: dict = CONFIG) -> dict:
    """The summary of a run of these records as its file holds it, made once for equal ones: each takes 0.2 s."""
    return copy.deepcopy(_summarised(json.dumps([records, facts, config])))


@cache
def _summarised(inputs: str) -> dict:
    return finite(summarise(*json.loads(inputs)))


def write_run(
    folder: Path,
    name: str,
    summary: dict = SUMMARY,
    provenance: dict | None = PROVENANCE,
    records: list[dict] | None = None,
) -> Path:
    """A finished run folder. records: None for as many empty ones as the summary counts; else it counts these."""
    run_dir = folder / name
    run_dir.mkdir(parents=True)
    write_json(run_dir / store.CODE, {"source_sha256": "a" * 64})
    if provenance is not None:
        write_json(run_dir / store.PROVENANCE, provenance)
    if records is None:
        records = [record(i) for i in range(summary["overall"]["questions"] + summary["failed"])]
    else:
        failed = sum(one["error"] is not None for one in records)
        count = len(records) - failed
        summary = changed(summary, failed=failed, overall__questions=count, overall__speedup_questions=count)
    (run_dir / store.RECORDS).write_text("".join(f"{json.dumps(one)}\n" for one in records))
    write_json(run_dir / store.SUMMARY, summary | {"records": len(records)})
    return run_dir


def run_of(folder: Path, name: str, *arguments, **options) -> Run:
    """As `write_run`, read again."""
    return read_run(write_run(folder, name, *arguments, **options))


def runs_of(**summaries: dict) -> list[Run]:
    """Runs without a folder, for what reads summaries alone."""
    return [Run(Path("runs") / name, summary) for name, summary in summaries.items()]
