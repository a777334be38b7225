"""Two checkouts against each other: `python -m tests.benchmarks.versions OLD_CHECKOUT [--method NAME ...]`.

Each checkout has a process of its own. Both answer the same prompt one right after the other, in an order that
alternates, so that the ratio is of one run. The checkouts' own configuration makes the arms.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).parents[2]
# Runs in either checkout, so it uses what both have.
WORKER = """
import json, sys, time
from dataclasses import replace
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from specbench.measure import runner
try:
    from specbench.config.compose import CONF
    from specbench.data.questions import load_questions
    from specbench.decoding.state import Request
except ImportError:  # before the package had rooms
    from specbench.compose import CONF
    from specbench.questions import load_questions
    from specbench.decoding.draft import Request
try:
    from specbench.decoding.engine import exhaust
except ImportError:  # before arms were generators
    exhaust = list

with initialize_config_dir(str(CONF), version_base="1.3"):
    cfg = compose("bench", overrides=sys.argv[1:])
OmegaConf.resolve(cfg)
bench = runner.prepare(cfg)
torch.set_num_threads(1)
if hasattr(runner, "choose"):  # checkouts of before 28 November chose the forms of weights, too
    runner.choose(bench, OmegaConf.merge(cfg, {"threads": 1}), {})
setup, protocol = (bench.setup, bench.protocol) if hasattr(bench, "setup") else (bench, bench)
prompts = [protocol.prompt(q, []) for q in load_questions(cfg.data, cfg.task)]
requests = [Request(prompt, protocol.capped(prompt)) for prompt in prompts]
try:
    size = setup.spec.batch_size
except AttributeError:  # before a run had a spec
    size = cfg.batch_size if setup.batch_size else 1
groups = [requests[i : i + size] for i in range(0, len(requests), size)]
print(json.dumps(len(groups)), flush=True)
for line in sys.stdin:
    arm, group = json.loads(line)
    begun = time.perf_counter()
    answers = exhaust(setup.arms[arm](groups[group]))
    seconds = time.perf_counter() - begun
    print(json.dumps([seconds, [a.tokens for a in answers]]), flush=True)
"""


class Worker:
    """A checkout that answers prompts."""

    def __init__(self, checkout: Path, overrides: list[str]):
        environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, *overrides],
            cwd=checkout,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def hear(self) -> object:
        """The next line that it says."""
        for line in self.process.stdout or ():
            if line[0] in "0123456789[":
                return json.loads(line)
        raise SystemExit("a checkout ended early: run its worker by hand")

    def ask(self, arm: str, group: int) -> tuple[float, list]:
        """Seconds and answers of an arm."""
        self.process.stdin.write(json.dumps([arm, group]) + "\n")  # type: ignore[union-attr] # a pipe
        self.process.stdin.flush()  # type: ignore[union-attr]
        return tuple(self.hear())  # type: ignore[arg-type, return-value] # as the worker prints it


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("--method", nargs="+", default=["ar", "sps", "kangaroo", "ragged"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--overrides", nargs="+", default=["data.limit=2", "generate=false"])
    options = parser.parse_args()
    from specbench.measure.metrics.statistics import speedup

    for method in options.method:
        overrides = [f"method={method}", *options.overrides]
        workers = {
            "old": Worker(options.old.resolve(), overrides),
            "new": Worker(Path(os.environ.get("SPECBENCH_NEW", ROOT)), overrides),
        }
        groups = int({worker.hear() for worker in workers.values()}.pop())  # type: ignore[call-overload] # a number
        seconds = {name: [0.0] * groups for name in workers}
        differing = 0
        for repeat in tqdm(range(options.repeats + 1), desc=method):
            for group in range(groups):
                names = list(workers)[:: 1 if (group + repeat) % 2 else -1]
                found = {name: workers[name].ask("method", group) for name in names}
                differing += found["old"][1] != found["new"][1]
                if repeat:  # the first one warms up
                    for name, (spent, _) in found.items():
                        seconds[name][group] += spent
        ratio = speedup(seconds["old"], seconds["new"])
        interval = "" if ratio.low is None else f" [{ratio.low:.3f}, {ratio.high:.3f}]"
        print(
            f"{method}: new is {ratio.value:.3f}{interval} times as fast as old; {differing} groups of answers differ"
        )
        for worker in workers.values():
            worker.process.kill()


if __name__ == "__main__":
    main()
