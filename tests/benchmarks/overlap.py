"""Drafting during verification against serial drafting, interleaved in one run: `python -m tests.benchmarks.overlap`.

One draft model for all arms (the first `--layers` of the folder `--draft`; by default the embedded family's sorted one
as far as its second exit): autoregressive decoding, speculative sampling at several draft lengths, SSD, Mirror-SD with
each kind of guess, and streams where it was trained to have them. Ratios of summed seconds over the questions with a
95 % interval; every answer must be the same.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from methods.mirror_sd import MirrorSD, StreamingSampling
from methods.mirror_sd.streams import FILE
from methods.sps import SpeculativeSampling
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.measure.metrics.statistics import speedup
from specbench.system.paths import packaged
from tests.benchmarks.common import interleave, pair_and_requests, print_ratios

SORTED, MAP = "specbench/tiny/weights/s2d", "specbench/tiny/weights/vocab_map"


def mean(steps: list, name: str) -> float:
    """Milliseconds a step."""
    return 1e3 * sum(getattr(step, name, None) or step.stats.get(name) or 0.0 for step in steps) / len(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", default="tiny")
    parser.add_argument("--draft", default=SORTED, help="folder of the draft model")
    parser.add_argument("--layers", type=int, default=4, help="so many of its first layers; 0: all")
    parser.add_argument("--limit", type=int, default=2, help="questions per task")
    parser.add_argument(
        "--serial", type=int, nargs="+", default=[3, 4, 5], help="draft lengths of serial arms"
    )
    parser.add_argument("--tokens", type=int, default=4, help="draft length of the others")
    parser.add_argument("--kappa", type=int, default=12)
    parser.add_argument("--branches", type=int, default=24)
    parser.add_argument(
        "--floor", type=float, default=0.01, help="least probability of a decision drafted after"
    )
    parser.add_argument("--ssd-floor", type=float, default=0.005)
    parser.add_argument("--exit-layers", type=int, nargs="+", default=[5])
    parser.add_argument(
        "--vocab", type=int, default=4096, help="tokens of the trimmed head; 0: the whole one"
    )
    parser.add_argument("--warmup", action="store_true", help="the warm-up questions, to choose settings by")
    options = parser.parse_args()
    folder = packaged(options.draft)
    layers = options.layers or "null"
    overrides = f"pair.draft={folder}", f"pair.draft_layers={layers}"
    pair, requests = pair_and_requests(options.pair, options.limit, *overrides, warmup=options.warmup)
    if options.vocab:
        pair = replace(pair, trimmed=(MAP, options.vocab))
    limits = {name: getattr(options, name) for name in ("kappa", "branches", "floor")}
    own = {"max_draft_tokens": options.tokens, **limits}
    alone = own | {"floor": options.ssd_floor}
    drafters: dict[str, Drafter] = {"plain": Drafter()}
    for n in options.serial:
        drafters[f"sps, {n}"] = SpeculativeSampling(pair, n)
    drafters["ssd"] = MirrorSD(pair, candidates="draft", **alone)
    for layer in options.exit_layers:
        for kind in ("exit", "both"):
            drafters[f"mirror, {kind} at {layer}"] = MirrorSD(pair, candidates=kind, exit_layer=layer, **own)
    if (folder / FILE).is_file():
        serial = {"max_draft_tokens": options.tokens, "weights": str(folder)}
        drafters["sps with streams"] = StreamingSampling(pair, **serial)
        streams = {"weights": str(folder), **own}
        drafters["mirror with streams"] = MirrorSD(
            pair, candidates="both", exit_layer=options.exit_layers[0], **streams
        )
    target = StagedModel(pair.target)
    arms = {
        n: Engine(target, d, pair.stop_ids, context_length=pair.context_length).rounds
        for n, d in drafters.items()
    }
    found = interleave(arms, requests)
    seconds, names = found.seconds, list(arms)
    print(
        f"pair {pair.name}, draft model {folder.name}, {len(requests)} prompts, {torch.get_num_threads()} threads"
    )
    print(f"prompts on which they did not agree: {found.differing}")
    for name, answers in found.answers.items():
        own_steps = [step for answer in answers for step in answer.steps]
        looked = [step.stats["hit"] for step in own_steps if step.stats.get("hit") is not None]
        tokens = sum(step.emitted for step in own_steps) / len(own_steps)
        drafting, verifying = mean(own_steps, "draft_seconds"), mean(own_steps, "verify_seconds")
        line = f"{name:22} {tokens:4.2f} acceptance length; ms a round: draft {drafting:5.2f}, verify {verifying:5.2f}"
        if looked:
            meanwhile = mean(own_steps, "overlapped_before_exit_seconds") + mean(
                own_steps, "overlapped_behind_exit_seconds"
            )
            line += f"; beside {meanwhile:5.2f}, after {mean(own_steps, 'exposed_seconds'):5.2f}"
            line += f", miss rate {looked.count(False) / len(looked):.0%}"
        print(line)
    serial = min((n for n in names if n.startswith("sps")), key=lambda n: sum(seconds[n]))
    print_ratios(seconds, tuple(("plain", name) for name in names[1:]), speedup)
    print_ratios(seconds, tuple((serial, name) for name in names[1:] if not name.startswith("sps")), speedup)
    for drafter in drafters.values():
        drafter.close()


if __name__ == "__main__":
    main()
