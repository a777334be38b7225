"""What the timed comparisons have in common: the pair with requests for it, and how ratios are printed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tqdm import tqdm

from specbench.data.questions import load_questions, warmup_questions
from specbench.decoding.engine import exhaust
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import Request
from specbench.decoding.trace import Generation
from specbench.measure.arms import Arm
from specbench.measure.metrics.statistics import Estimate
from specbench.models.pairs import Pair, load_pair
from specbench.system.threads import use_threads
from tests.support.conf import composed


def pair_and_requests(
    name: str, limit: int, *overrides: str, warmup: bool = False
) -> tuple[Pair, list[Request]]:
    """A pair with its draft model, as `overrides` of the configuration say, and the first turns of `limit`
    questions per task; or of the warm-up questions, which are there to choose settings by."""
    cfg = composed("bench", f"pair={name}", f"data.limit={limit}", *overrides)
    pair = load_pair(cfg.pair, cfg.seed, with_draft=True)
    decoding = SamplingParams(cfg.decoding.max_new_tokens)
    questions = warmup_questions(cfg.data) if warmup else load_questions(cfg.data, cfg.task)
    return pair, [
        Request(pair.prompt_ids([{"role": "user", "content": q.turns[0]}]), decoding) for q in questions
    ]


@dataclass
class Interleaved:
    """What came of arms that took turns: seconds by arm, summed over the repeats of each request; the answers by arm;
    and on how many requests not all said the same."""

    seconds: dict[str, list[float]]
    answers: dict[str, list[Generation]]
    differing: int = 0


def interleave(arms: dict[str, Arm], requests: list[Request], repeats: int = 1) -> Interleaved:
    """Every arm on every request, one after the other, in an order that rotates; after one request as warm-up."""
    chosen = use_threads(None, lambda: [exhaust(arm(requests[:1])) for arm in arms.values()])
    print(f"{chosen.threads} threads of torch, by {chosen.chosen_by}")
    for arm in arms.values():
        exhaust(arm(requests[:1]))
    names = list(arms)
    found = Interleaved({name: [0.0] * len(requests) for name in names}, {name: [] for name in names})
    for place, request in enumerate(tqdm(requests, unit="prompt")):
        for repeat in range(repeats):
            shift = (place + repeat) % len(names)
            said = set()
            for name in names[shift:] + names[:shift]:
                start = time.perf_counter()
                answer = exhaust(arms[name]([request]))[0]
                found.seconds[name][place] += time.perf_counter() - start
                found.answers[name].append(answer)
                said.add(tuple(answer.tokens))
            found.differing += len(said) > 1
    return found


def print_ratios(
    seconds: dict[str, list[float]],
    compared: tuple[tuple[str, str], ...],
    speedup: Callable[[list[float], list[float]], Estimate],
) -> None:
    """One line per (slow, fast) pair of arms: how much faster the second is, with its interval."""
    for slow, fast in compared:
        ratio = speedup(seconds[slow], seconds[fast])
        print(f"{fast} against {slow}: times as fast: {ratio_text(ratio, 2)}")


def ratio_text(ratio: Estimate, digits: int = 3) -> str:
    """A ratio with its interval, as far as so many requests or repeats allow one."""
    if ratio.value is None:
        return "no ratio"
    if ratio.low is None or ratio.high is None:
        return f"{ratio.value:.{digits}f} (too few for an interval)"
    return f"{ratio.value:.{digits}f} [{ratio.low:.{digits}f}, {ratio.high:.{digits}f}]"
