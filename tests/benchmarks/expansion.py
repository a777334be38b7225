"""Do expanded pairs say and accept what the embedded one does? `python -m tests.benchmarks.expansion`.

For every shape of `tests.support.expanded` and for `tiny_wide`: on how many questions of the benchmark the greedy
answer is the embedded pair's own, and by how much a logit differs; then, on some questions of each task, how many
answers of each method are those of autoregressive decoding, and its acceptance beside that on the embedded pair.
"""

from __future__ import annotations

import argparse
from contextlib import closing

import torch
from omegaconf import DictConfig
from tqdm import tqdm

from specbench.data.questions import load_questions
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.trace import Generation
from specbench.measure.bench import Bench
from specbench.measure.runner import prepare
from specbench.models.pairs import load_pair
from tests.support.expanded import SHAPES, expanded_config

METHODS = {
    **{name: () for name in ("pld", "sps", "kangaroo", "s2d", "vocabtrim")},
    **{name: ("method.placement=inline",) for name in ("mirror_sd", "mirror_ss", "ssd")},
}
WIDE = "tiny_wide"


def config_of(shape: str | None, *overrides: str) -> DictConfig:
    """The configuration of a run on a shape, on `tiny_wide`, or on the embedded pair (None)."""
    if shape == WIDE:
        return expanded_config(None, "pair=tiny_wide", *overrides)
    return expanded_config(shape, *overrides)


def prompts(bench: Bench, cfg: DictConfig) -> list[list[int]]:
    """Token ids of the first turn of every question."""
    return [bench.protocol.prompt(question, []) for question in load_questions(cfg.data, cfg.task)]


def answers(bench: Bench, drafter: Drafter, asked: list[list[int]], tokens: int) -> list[Generation]:
    """What a drafter makes of some prompts."""
    setup = bench.setup
    engine = Engine(setup.target, drafter, setup.pair.stop_ids, context_length=setup.pair.context_length)
    return [engine.answer(prompt, SamplingParams(tokens)) for prompt in tqdm(asked, leave=False)]


def acceptance(generations: list[Generation]) -> float:
    """Accepted draft tokens over drafted ones."""
    steps = [step for one in generations for step in one.steps]
    return sum(step.accepted for step in steps) / max(1, sum(step.drafted for step in steps))


@torch.inference_mode()
def forced(model: torch.nn.Module, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Logits [len(answer), vocab] in front of each token of an answer."""
    logits = model(torch.tensor([prompt + answer[:-1]]), logits_to_keep=len(answer)).logits[0]
    return logits.float()


def text_table(limit: str, tokens: int, shapes: list[str], dtype: str) -> None:
    """One line for each shape: answers, those that are the embedded pair's, the largest difference of a logit."""
    overrides = "method=ar", f"data.limit={limit}", f"pair.dtype={dtype}"
    cfg = config_of(None, *overrides)
    bench = prepare(cfg)
    asked = prompts(bench, cfg)
    said = [one.tokens for one in answers(bench, Drafter(), asked, tokens)]
    print(f"\n{'shape':20}{'answers':>8}{'equal':>8}{'tokens':>8}{'logits within':>16}", flush=True)
    for shape in shapes:
        pair = load_pair(config_of(shape, *overrides).pair, 0, with_draft=False)
        equal, largest = 0, 0.0
        for prompt, answer in zip(tqdm(asked, leave=False), said):
            logits, own = forced(pair.target, prompt, answer), forced(bench.setup.pair.target, prompt, answer)
            equal += logits.argmax(-1).tolist() == answer
            largest = max(largest, (logits[:, : own.shape[1]] - own).abs().max().item())
        print(f"{shape:20}{len(said):8}{equal:8}{sum(map(len, said)):8}{largest:16.1e}", flush=True)


def method_table(limit: str, tokens: int, shapes: list[str], dtype: str, methods: list[str]) -> None:
    """One line for each method and shape: answers, those that are the baseline's, acceptance, the embedded pair's."""
    print(
        f"\n{'method':12}{'shape':20}{'answers':>8}{'equal':>8}{'acceptance':>12}{'embedded':>10}", flush=True
    )
    plain: dict[str, list[list[int]]] = {}
    for method in methods:
        overrides = f"method={method}", f"data.limit={limit}", f"pair.dtype={dtype}", *METHODS[method]
        embedded = None
        for shape in (None, *shapes):
            cfg = config_of(shape, *overrides)
            bench = prepare(cfg)
            with closing(bench.setup.drafter):
                asked = prompts(bench, cfg)
                found = answers(bench, bench.setup.drafter, asked, tokens)
                if shape is None:
                    embedded = acceptance(found)
                    continue
                if shape not in plain:
                    plain[shape] = [one.tokens for one in answers(bench, Drafter(), asked, tokens)]
            equal = sum(one.tokens == other for one, other in zip(found, plain[shape]))
            print(
                f"{method:12}{shape:20}{len(found):8}{equal:8}{acceptance(found):12.4f}{embedded:10.4f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--limit", default="null", help="questions per task whose text is compared (null: all)"
    )
    parser.add_argument("--method-limit", default="2", help="questions per task that each method answers")
    parser.add_argument("--tokens", type=int, default=64, help="cap of an answer")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--shapes", nargs="+", default=[*SHAPES, WIDE], choices=[*SHAPES, WIDE])
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text_table(options.limit, options.tokens, options.shapes, options.dtype)
    method_table(options.method_limit, options.tokens, options.shapes, options.dtype, options.methods)


if __name__ == "__main__":
    main()
