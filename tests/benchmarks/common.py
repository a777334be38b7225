"""What the timed comparisons have in common: the pair with requests for it, and how ratios are printed."""

from __future__ import annotations

from collections.abc import Callable

from hydra import compose, initialize_config_dir

from specbench.bench import CONF
from specbench.decoding.batch import Request
from specbench.decoding.sampling import Decoding
from specbench.measure.statistics import Speedup
from specbench.pairs import Pair, load_pair
from specbench.questions import load_questions, warmup_questions


def pair_and_requests(name: str, limit: int, warmup: bool = False) -> tuple[Pair, list[Request]]:
    """A pair with its draft model, and the first turns of `limit` questions per task; or of the warm-up questions,
    which are there to choose settings by."""
    with initialize_config_dir(str(CONF), version_base=None):
        cfg = compose("bench", overrides=[f"pair={name}", f"data.limit={limit}"])
    pair = load_pair(cfg.pair, cfg.seed, with_draft=True)
    decoding = Decoding(cfg.decoding.max_new_tokens)
    questions = warmup_questions(cfg.data) if warmup else load_questions(cfg.data, cfg.task)
    return pair, [
        Request(pair.prompt_ids([{"role": "user", "content": q.turns[0]}]), decoding) for q in questions
    ]


def print_ratios(
    seconds: dict[str, list[float]],
    compared: tuple[tuple[str, str], ...],
    speedup: Callable[[list[float], list[float]], Speedup],
) -> None:
    """One line per (slow, fast) pair of arms: how much faster the second is, with its interval."""
    for slow, fast in compared:
        ratio = speedup(seconds[slow], seconds[fast])
        print(f"{fast} against {slow}: {ratio.value:.2f} times as fast [{ratio.low:.2f}, {ratio.high:.2f}]")
