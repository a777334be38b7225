"""How long a report of many runs takes: `python -m tests.benchmarks.report [--runs 1000] [--profile]`.

Makes the run folders by a seeded script, each as of 480 questions: a summary, provenance with a diff of 50 kB, a
configuration. Of the records a report counts the lines (`compare` and `claims` read them). Then times
`python -m specbench.report` on them in a process of its own. The first half of the runs sweep two settings of four
methods on two pairs, the rest are batches of all sizes; one folder in a hundred is damaged.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from specbench.data.question_files import TASKS
from specbench.data.questions import find_questions_file
from specbench.measure.machine import provenance
from specbench.measure.metrics.summary import summarise
from specbench.measure.records import run_folder as store
from specbench.system.files import finite, write_json
from tests.support.conf import composed
from tests.support.synthetic import CONFIG, FACTS, answered

QUESTIONS = 480
DIFF = "".join(
    f"-    old line {i} of some module = {i}\n+    new line {i} of it = {i + 1}\n" for i in range(700)
)
PAIRS = ("tiny", "tiny_shallow")
SINGLE = ("kangaroo", "sps", "pld", "s2d")
BATCHED = ("exspec", "ragged")
SETTINGS = [
    {"max_draft_tokens": tokens, "confidence_threshold": threshold / 10}
    for tokens in range(1, 9)
    for threshold in range(8)
]
SIZES = (1, 2, 4, 8, 16)


def example() -> tuple[dict, dict]:
    """The summary of 480 made-up questions, and what a run on this machine would note of itself."""
    draw = random.Random(0)
    tasks = [task for task in TASKS for _ in range(QUESTIONS // len(TASKS))]
    records = [
        answered(
            i, task, [draw.randrange(6) for _ in range(20)], draw.uniform(0.8, 2.5), 1 + (task == "mt_bench")
        )
        for i, task in enumerate(tasks)
    ]
    config = OmegaConf.to_container(composed("bench"), resolve=True)
    noted = provenance.collect(config, config["method"], find_questions_file(config["data"]))
    if noted["git"]:
        noted["git"]["diff"] = DIFF
    return finite(summarise(records, FACTS, CONFIG)), noted


def variants(count: int) -> list[dict]:
    """What the runs differ in."""
    single = [
        {"method": method, "pair": pair, "settings": settings}
        for method, pair, settings in product(SINGLE, PAIRS, SETTINGS)
    ]
    batched = [
        {
            "method": method,
            "pair": pair,
            "drafter": "sps",
            "unit": "pool",
            "batch_size": size,
            "settings": settings | {"window": window},
        }
        for method, pair, size, settings, window in product(
            BATCHED, PAIRS, SIZES, SETTINGS[:3], range(8, 80, 4)
        )
    ]
    return [*single[: count // 2], *batched][:count]


def make_runs(root: Path, count: int) -> None:
    """Writes the run folders."""
    summary, noted = example()
    draw = random.Random(1)
    config = yaml.safe_dump(noted["config"], sort_keys=False)
    for number, variant in enumerate(variants(count)):
        one = copy.deepcopy(summary) | variant
        factor = draw.uniform(0.7, 1.6)
        for block in (one["overall"], *one["tasks"].values()):
            for key in ("speedup", "speedup_low", "speedup_high", "tokens_per_second"):
                block[key] *= factor
        folder = root / f"2026-01-01_{number:06}_{one['method']}_{one['pair']}_all_{number:08x}"
        folder.mkdir()
        (folder / store.CONFIG).write_text(config)
        (folder / store.RECORDS).write_text("{}\n" * QUESTIONS)
        write_json(folder / store.CODE, {"source_sha256": noted["source_sha256"]})
        (folder / store.PROVENANCE).write_text(json.dumps(noted | {"time": f"run {number}"}, indent=2))
        text = json.dumps(one, indent=2)
        (folder / store.SUMMARY).write_text(text if number % 100 != 50 else text[:-100])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--profile", action="store_true", help="also print where the time goes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root, out = Path(scratch) / "runs", Path(scratch) / "report"
        root.mkdir()
        make_runs(root, options.runs)
        size = {
            name: (next(root.iterdir()) / name).stat().st_size for name in (store.SUMMARY, store.PROVENANCE)
        }
        command = ["-m", "specbench.report", str(root), "--out", str(out)]
        start = time.perf_counter()
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - start
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            sys.exit(done.stderr)
        written = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
        page, work = (out / "index.html").stat().st_size, used.ru_utime + used.ru_stime
        print(f"{options.runs} runs {size}: {seconds:.1f} s, {work:.1f} of them at work")
        print(
            f"{len(done.stdout.splitlines())} lines printed; {written / 1e6:.1f} MB, page {page / 1e6:.1f} MB"
        )
        if options.profile:
            profile = [sys.executable, "-m", "cProfile", "-s", "cumulative", *command]
            print(
                subprocess.run(profile, capture_output=True, text=True, check=True).stdout[
                    len(done.stdout) :
                ][:12000]
            )


if __name__ == "__main__":
    main()
