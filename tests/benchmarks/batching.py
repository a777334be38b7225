"""Ways to decode a batch, interleaved in one run: `python -m tests.benchmarks.batching`, part of `make benchmarks`.

AR batches, EQSPEC, EXSPEC and ragged batches of one size, some at batch 1, too, on one pool of embedded questions.
Ratios of seconds with a 95 % interval over the repeats, of timing noise alone; every answer must be that of
autoregressive decoding.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict

import torch
from tqdm import tqdm

from methods.ar import Autoregressive
from methods.eqspec import EqSpec
from methods.exspec import ExSpec
from methods.ragged import RaggedBatch
from methods.sps import SpeculativeSampling
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.measure.metrics.statistics import speedup
from specbench.system.threads import use_threads
from tests.benchmarks.common import pair_and_requests, print_ratios

KINDS = {"eqspec": EqSpec, "exspec": ExSpec, "ragged": RaggedBatch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", default="tiny")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--limit", type=int, default=6, help="questions per task")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--draft", type=int, nargs="+", default=[5], help="draft lengths of the ragged batches"
    )
    options = parser.parse_args()
    pair, requests = pair_and_requests(options.pair, options.limit)
    target = StagedModel(pair.target)
    random.Random(0).shuffle(requests)

    def engine(drafter, scheduler) -> Engine:
        return Engine(target, drafter, pair.stop_ids, scheduler, pair.context_length)

    first = options.draft[0]
    engines = {
        "ar at 1": engine(Autoregressive(pair), RaggedBatch(1)),
        "ar": engine(Autoregressive(pair), RaggedBatch(options.rows)),
        "exspec at 1": engine(SpeculativeSampling(pair, first), ExSpec(1)),
        "ragged at 1": engine(SpeculativeSampling(pair, first), RaggedBatch(1)),
    }
    for name, kind in KINDS.items():
        for draft in options.draft if name == "ragged" else [first]:
            label = name if draft == first else f"{name}, {draft} tokens"
            engines[label] = engine(SpeculativeSampling(pair, draft), kind(options.rows))

    def warm_up() -> None:
        for arm in engines.values():
            arm.generate(requests[: options.rows])

    use_threads(None, warm_up)
    warm_up()
    answers, seconds = {}, defaultdict(list)
    names = list(engines)
    for repeat in tqdm(range(options.repeats), unit="repeat"):
        for name in names if repeat % 2 == 0 else names[::-1]:
            answers[name] = engines[name].generate(requests)
            seconds[name].append(sum(answer.seconds for answer in answers[name]))
    own = [a.tokens for a in answers["ar at 1"]]
    print(
        f"pair {pair.name}, {len(requests)} prompts x {options.repeats}, batches of {options.rows}, "
        f"{torch.get_num_threads()} threads"
    )
    for name in names:
        steps = [step for answer in answers[name] for step in answer.steps]
        rounds = sum(1 / step.sequences for step in steps)
        rate = options.repeats * sum(map(len, own)) / sum(seconds[name])
        align = sum(step.align_seconds for step in steps) / sum(a.seconds for a in answers[name])
        differing = sum(a.tokens != tokens for a, tokens in zip(answers[name], own))
        print(
            f"{name:18} {rate:7.1f} tokens/s, {len(steps) / rounds:5.2f} sequences a round, {align:5.1%} alignment, "
            f"{differing} answers differ"
        )
    compared = (
        ("exspec at 1", "exspec"),
        ("ragged at 1", "ragged"),
        ("ar", "ragged"),
        ("ar", "exspec"),
        ("ar", "eqspec"),
        ("exspec", "ragged"),
        ("eqspec", "exspec"),
        ("ar at 1", "ar"),
    )
    one_pool = [0] * options.repeats
    print_ratios(seconds, compared, lambda slow, fast: speedup(slow, fast, pools=one_pool))


if __name__ == "__main__":
    main()
