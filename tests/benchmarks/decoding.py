"""Our loop against transformers' own, interleaved in one run: `make benchmarks`.

1. autoregressive: the engine with an empty draft against `generate`.
2. assisted: `sps` with a constant draft length of 5 against `generate(assistant_model=...)` with the same draft
   model, the same constant length and no confidence threshold (set on the assistant's generation config: given to
   generate it is ignored).
Ratios of summed seconds over the questions with a 95 % interval; every answer must be the same in all four.
"""

from __future__ import annotations

import argparse

import torch

from methods.sps import SpeculativeSampling
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.measure.arms import Arm, hf_generate_arm
from specbench.measure.metrics.statistics import speedup
from tests.benchmarks.common import interleave, pair_and_requests, print_ratios

DRAFT_TOKENS = 5


def assisted_arm(pair) -> Arm:
    """`generate` with the pair's draft model, a constant draft length and no confidence threshold."""
    own = pair.draft.generation_config
    own.num_assistant_tokens = DRAFT_TOKENS
    own.num_assistant_tokens_schedule = "constant"
    own.assistant_confidence_threshold = 0.0
    return hf_generate_arm(pair, assistant_model=pair.draft)


def engine_arm(pair, drafter: Drafter) -> Arm:
    """Our loop with a drafter."""
    target = StagedModel(pair.target)
    return Engine(target, drafter, pair.stop_ids, context_length=pair.context_length).rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", default="tiny")
    parser.add_argument("--limit", type=int, default=4, help="questions per task")
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    pair, requests = pair_and_requests(options.pair, options.limit)
    arms = {
        "generate": hf_generate_arm(pair),
        "engine": engine_arm(pair, Drafter()),
        "assisted generate": assisted_arm(pair),
        "engine, sps": engine_arm(pair, SpeculativeSampling(pair, DRAFT_TOKENS)),
    }
    found = interleave(arms, requests, options.repeats)
    print(f"pair {pair.name}, {len(requests)} prompts x {options.repeats}, {torch.get_num_threads()} threads")
    print(f"prompts on which the four did not agree: {found.differing}")
    compared = (
        ("generate", "engine"),
        ("assisted generate", "engine, sps"),
        ("engine", "engine, sps"),
    )
    print_ratios(found.seconds, compared, speedup)


if __name__ == "__main__":
    main()
