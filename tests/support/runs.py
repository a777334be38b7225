"""Runs of a method on a small saved pair, in this process."""

from __future__ import annotations

from pathlib import Path

from specbench.config.checks import check
from specbench.measure import runner
from specbench.measure.records import run_folder as store
from specbench.system.files import read_json
from tests.support.conf import composed

CATEGORIES = ["writing", "coding", "translation", "summarization", "qa", "math_reasoning", "rag"]
SAMPLED = ("decoding=sample", "decoding.max_new_tokens=8")


def overrides(workplace: Path, method: str, runs: Path) -> list[str]:
    return [
        f"method={method}",
        "pair=tiny",
        f"pair.target={workplace}/target",
        f"pair.draft={workplace}/draft",
        f"pair.tokenizer={workplace}/target",
        f"pair.parts.kangaroo={workplace}/kangaroo",
        f"data.path={workplace}/questions.jsonl",
        f"data.warmup={workplace}/warmup.jsonl",
        "data.limit=null",
        "decoding.max_new_tokens=12",
        "generate=false",
        "pair.device=cpu",
        "remeasure=0",  # other tests run at the same time
        f"runs_root={runs}",
    ]


def start(workplace: Path, method: str, runs: Path, *more: str) -> Path:
    """The folder of a run that is yet to be measured."""
    cfg = composed("bench", *overrides(workplace, method, runs), *more)
    check(cfg)
    return store.find_or_create(cfg)


def measured(workplace: Path, method: str, runs: Path, *more: str) -> tuple[int, dict, list[dict]]:
    """Exit code, summary and records of a run in this process."""
    run_dir = start(workplace, method, runs, *more)
    code = to_the_end(run_dir)[-1]
    return code, read_json(run_dir / store.SUMMARY), store.read_records(run_dir)


def to_the_end(run_dir: Path) -> list[int]:
    """Exit codes of the processes that measure a folder one after the other; here they are all this one."""
    codes = [runner.run(run_dir)]
    while codes[-1] == store.EXIT_CONTINUE:
        codes.append(runner.run(run_dir))
    return codes
