"""What turns by slices cost and what they gain, by the length of a slice: `python -m tests.benchmarks.slices`.

Two arms of autoregressive decoding (or a method beside it) answer every prompt once for each length of a slice, in an
order that rotates. Printed by length: both arms' seconds against those by whole answers, which is the cost of
switching, and the spread of the single questions' ratios between the arms, which is the noise that slices are there to
take out.
"""

from __future__ import annotations

import argparse
import math

import numpy as np
from tqdm import tqdm

from methods.sps import SpeculativeSampling
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine, exhaust
from specbench.decoding.model.staged_model import StagedModel
from specbench.measure.interleave import Interleaver
from specbench.measure.metrics.statistics import speedup
from specbench.system.threads import use_threads
from tests.benchmarks.common import pair_and_requests, ratio_text

WHOLE = "whole answers"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", default="tiny")
    parser.add_argument("--limit", type=int, default=6, help="questions per task")
    parser.add_argument("--sps", action="store_true", help="let the second arm draft")
    parser.add_argument("--milliseconds", type=float, nargs="+", default=[5, 20, 50, 200])
    options = parser.parse_args()
    pair, requests = pair_and_requests(options.pair, options.limit)
    target = StagedModel(pair.target)
    drafters = [Drafter(), SpeculativeSampling(pair) if options.sps else Drafter()]
    engines = [
        Engine(target, drafter, pair.stop_ids, context_length=pair.context_length) for drafter in drafters
    ]

    def arms(number: int) -> list:
        return [engine.rounds([requests[number]]) for engine in engines]

    chosen = use_threads(None, lambda: [exhaust(arm) for arm in arms(0)])
    print(f"{chosen.threads} threads of torch, by {chosen.chosen_by}")
    ways = {f"{ms:g} ms": ms / 1e3 for ms in options.milliseconds} | {WHOLE: math.inf}
    seconds = {name: np.zeros((2, len(requests))) for name in ways}
    names = list(ways)
    for number in tqdm(range(len(requests)), unit="prompt"):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            order = arms(number)[:: -1 if number % 2 else 1]
            answers = Interleaver(engines[0].clock, ways[name]).run(order)[:: -1 if number % 2 else 1]
            seconds[name][:, number] = [answer.seconds for (answer,) in answers]
    for name in names:
        first, second = seconds[name]
        ratio, cost = speedup(first, second), speedup(first + second, seconds[WHOLE].sum(axis=0))
        print(
            f"{name:14} first against second arm {ratio_text(ratio)}, standard deviation of the questions "
            f"{np.std(first / second, ddof=1):.3f}; seconds against {WHOLE}: {ratio_text(cost)}"
        )


if __name__ == "__main__":
    main()
