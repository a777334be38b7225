"""What the training of a method's own part shares: conversations as batches, and a loop that resumes.

Several GPUs: `accelerate launch -m methods.<method>.train ...`; each process then reads its own share of the batches.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator
from tqdm import tqdm

from specbench.errors import UserError

ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names


def conversation_batches(
    tokenize: Callable[[list[dict]], tuple[list[int], list[float]]],
    file: str | Path,
    batch_size: int,
    length: int,
    seed: int,
) -> Iterator[dict[str, torch.Tensor]]:
    """Endless batches {"input_ids": [B, T] int64, "loss_weight": [B, T] float32} of conversations cut at `length`.

    file: JSON lines with `messages` ({role, content}) or ShareGPT's `conversations` ({from, value}). loss_weight[b, t]
    weighs the prediction of token t: 1 for what the assistant says, else 0. Raises UserError naming a bad line.
    """
    rows = [tokenize(messages) for messages in _read_conversations(Path(file))]
    rows = [(ids[:length], weights[:length]) for ids, weights in rows if any(weights[:length])]
    if not rows:
        raise UserError(
            f"'{file}' holds no conversation in which the assistant says anything within {length} tokens"
        )
    rng = random.Random(seed)
    while True:
        batch = rng.choices(rows, k=batch_size)
        longest = max(len(ids) for ids, _ in batch)
        yield {
            "input_ids": torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in batch]),
            "loss_weight": torch.tensor([weights + [0.0] * (longest - len(weights)) for _, weights in batch]),
        }


def assistant_tokens(pair) -> Callable[[list[dict]], tuple[list[int], list[float]]]:
    """A tokenizer of whole conversations for `conversation_batches`: ids as the pair prompts them, 1 on each token the
    assistant says (its stop token included) and 0 elsewhere."""
    stop = sorted(pair.stop_ids)[:1]

    def tokenize(messages: list[dict]) -> tuple[list[int], list[float]]:
        ids: list[int] = []
        weights: list[float] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = pair.prompt_ids(messages[:i])
            answer = pair.tokenizer.encode(message["content"], add_special_tokens=False) + stop
            # The prompt is templated anew for every turn; what it shares with the ids so far keeps its weights.
            weights = weights[: len(prompt)] + [0.0] * (len(prompt) - len(weights)) + [1.0] * len(answer)
            ids = prompt + answer
        return ids, weights

    return tokenize


def train_part(
    module: torch.nn.Module,
    loss: Callable[[torch.nn.Module, dict[str, torch.Tensor]], torch.Tensor],
    batches: Iterator[dict[str, torch.Tensor]],
    steps: int,
    learning_rate: float,
    checkpoints: Path,
    save_every: int,
) -> torch.nn.Module:
    """Trains `module` for `steps` batches with AdamW (warm-up over 5 %, then linear decay to 0); returns it.

    loss(module, batch) -> scalar. The state is saved under `checkpoints` every `save_every` steps; a run that was
    stopped goes on from there with the batch that follows.
    """
    accelerator = Accelerator()
    optimizer = torch.optim.AdamW(module.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))
    )
    module, optimizer = accelerator.prepare(module, optimizer)
    accelerator.register_for_checkpointing(schedule)
    done = _resume(accelerator, checkpoints)
    mine = islice(
        batches, done * accelerator.num_processes + accelerator.process_index, None, accelerator.num_processes
    )
    bar = tqdm(
        total=steps, initial=done, desc="train", unit="step", disable=not accelerator.is_local_main_process
    )
    for step in range(done, steps):
        batch = {k: v.to(accelerator.device) for k, v in next(mine).items()}
        value = loss(module, batch)
        accelerator.backward(value)
        accelerator.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        bar.update()
        if step % 10 == 0:
            bar.set_postfix(loss=f"{value.item():.3f}")
        if (step + 1) % save_every == 0 and step + 1 < steps:
            accelerator.save_state(str(checkpoints / "state.new"))
            if accelerator.is_main_process:
                _replace(checkpoints, step + 1)
            accelerator.wait_for_everyone()
    bar.close()
    return accelerator.unwrap_model(module)


def _replace(checkpoints: Path, step: int) -> None:
    """Puts the state just written in place of the older ones; a kill at any moment leaves one whole state."""
    fresh = checkpoints / "state.new"
    fresh.rename(checkpoints / f"state-{step}")
    for old in checkpoints.glob("state-*"):
        if old.name != f"state-{step}":
            for file in old.iterdir():
                file.unlink()
            old.rmdir()


def _resume(accelerator: Accelerator, checkpoints: Path) -> int:
    """Loads the newest whole state, if there is one; returns the steps that it has seen."""
    steps = [int(folder.name.removeprefix("state-")) for folder in checkpoints.glob("state-*")]
    if not steps:
        return 0
    accelerator.load_state(str(checkpoints / f"state-{max(steps)}"))
    return max(steps)


def _read_conversations(file: Path) -> Iterator[list[dict]]:
    if not file.is_file():
        raise UserError(f"no conversations file '{file}'")
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                if "messages" in row:
                    messages = [{"role": m["role"], "content": m["content"]} for m in row["messages"]]
                else:
                    turns = row["conversations"]
                    messages = [
                        {"role": ROLES.get(m["from"], m["from"]), "content": m["value"]} for m in turns
                    ]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{file}, line {number}: not a conversation ({error!r})") from error
            yield messages
