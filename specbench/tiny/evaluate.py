"""How well the family speculates, on held-out questions, before any method is run.

    python -m specbench.tiny.evaluate [--weights DIR] [--target NAME] [--draft NAME] [--limit N] [--show]

Per task: the share of positions where the draft's most probable token, given the target's own greedy answer
so far, is the target's token; the same for a linear reading of the target's layer 2 (what an early exit has
to work with); how long the answers are, how many end by themselves and how many loop. Held-out losses come last.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from specbench.data.ngrams import ngrams
from specbench.tiny import models, world
from specbench.tiny.tokenizer import load_tokenizer
from specbench.tiny.train import MODELS, SHIPPED, held_out_loss

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

EXIT_LAYER = 2


@torch.no_grad()
def greedy(
    target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, chats: list[list[dict]], limit: int
) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, answer ids and the end token if it came) per conversation, answered in one batch."""
    prompts = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]
    batch = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
    out = target.generate(**batch, max_new_tokens=limit, do_sample=False)
    answers = out[:, batch["input_ids"].shape[1] :].tolist()
    end = tokenizer.eos_token_id
    cut = [ids[: ids.index(end) + 1] if end in ids else ids for ids in answers]
    return list(zip(prompts, cut, strict=True))


def target_answers(
    target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, examples: list[world.Example], limit: int
) -> list[tuple[list[int], list[int]]]:
    """Greedy answers to every turn of `examples`; a second turn follows the target's own first answer."""
    found = []
    chats: list[list[dict]] = [[] for _ in examples]
    for turn in range(max(len(e.turns) for e in examples)):
        active = [i for i, e in enumerate(examples) if turn < len(e.turns)]
        for i in active:
            chats[i].append({"role": "user", "content": examples[i].turns[turn]})
        answers = greedy(target, tokenizer, [chats[i] for i in active], limit)
        for i, (_, answer) in zip(active, answers, strict=True):
            chats[i].append(
                {"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)}
            )
        found += answers
    return found


@torch.no_grad()
def agreement(model: LlamaForCausalLM, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Bool [len(answer)]: whether `model`, teacher-forced, would have drafted each token of `answer`."""
    ids = torch.tensor([prompt + answer])
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.argmax(-1) == ids[0, len(prompt) :]


def loops(answer: list[int]) -> bool:
    """Whether the same four tokens in a row come three times or more."""
    return max(Counter(ngrams(answer, 4)).values(), default=0) >= 3


@torch.no_grad()
def exit_pairs(
    target: LlamaForCausalLM, prompt: list[int], answer: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """States after layer `EXIT_LAYER` and after the final norm at the answer's positions, each [T, H]."""
    states = target.model(
        torch.tensor([prompt + answer]), use_cache=False, output_hidden_states=True
    ).hidden_states
    rows = slice(len(prompt) - 1, -1)
    return states[EXIT_LAYER][0, rows], states[-1][0, rows]


@torch.no_grad()
def exit_agreement(target: LlamaForCausalLM, answered: dict[str, list]) -> dict[str, float]:
    """Share per task where a linear map from the exit layer to the last state finds the target's token.

    The map is a least-squares fit on every other answer, read on the others.
    """
    pairs = {task: [(*exit_pairs(target, p, a), a) for p, a in found] for task, found in answered.items()}
    fit = [pair for found in pairs.values() for pair in found[::2]]
    early, late = torch.cat([e for e, _, _ in fit]), torch.cat([f for _, f, _ in fit])
    ridge = 1e-3 * early.square().mean() * len(early) * torch.eye(early.shape[1])
    weights = torch.linalg.solve(early.mT @ early + ridge, early.mT @ late)
    shares = {}
    for task, found in pairs.items():
        hits = [
            (target.lm_head(e @ weights).argmax(-1) == torch.tensor(a)).float() for e, _, a in found[1::2]
        ]
        shares[task] = torch.cat(hits).mean().item() if hits else float("nan")
    return shares


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m specbench.tiny.evaluate", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--weights", type=Path, default=SHIPPED / "weights", help="folder of the family")
    parser.add_argument("--target", default="target")
    parser.add_argument("--draft", default="draft")
    parser.add_argument(
        "--limit", type=int, default=8, help="questions per task (per category in conversations: a quarter)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--show", action="store_true", help="print one answer per category")
    options = parser.parse_args(arguments)
    tokenizer = load_tokenizer(options.weights / "tokenizer")
    target, draft = (
        models.load(options.weights / options.target),
        models.load(options.weights / options.draft),
    )

    answered: dict[str, list] = defaultdict(list)
    for category in tqdm([*world.MT_BENCH, *world.TASKS], desc="answers", unit="category"):
        count = max(1, options.limit // 4) if category in world.MT_BENCH else options.limit
        examples = [world.make_example(category, world.HELD_OUT_SEED, i) for i in range(count)]
        found = target_answers(target, tokenizer, examples, options.max_new_tokens)
        answered[examples[0].task] += found
        if options.show:
            print(f"\n== {category}\nQ: {examples[0].turns[0]}\nA: {tokenizer.decode(found[0][1])}")
            print(f"reference: {examples[0].answers[0]}")

    exits = exit_agreement(target, answered)
    print(f"{'task':16} {'draft':>7} {'layer 2':>8} {'tokens':>7} {'ended':>6} {'loops':>6}")
    pooled = []
    for task in world.TASK_NAMES:
        hits = torch.cat([agreement(draft, p, a) for p, a in answered[task]]).float()
        pooled.append(hits)
        lengths = [len(a) for _, a in answered[task]]
        ended = sum(a[-1] == tokenizer.eos_token_id for _, a in answered[task]) / len(lengths)
        mean = sum(lengths) / len(lengths)
        looping = sum(loops(a) for _, a in answered[task]) / len(lengths)
        print(
            f"{task:16} {hits.mean().item():7.3f} {exits[task]:8.3f} {mean:7.1f} {ended:6.2f} {looping:6.2f}"
        )
    print(f"{'overall':16} {torch.cat(pooled).mean().item():7.3f}")
    for name in (*MODELS, options.draft):
        if (options.weights / name).exists():
            print(f"{name}: held-out loss {held_out_loss(options.weights, name):.3f} nats per answer token")
    return 0


if __name__ == "__main__":
    sys.exit(main())
