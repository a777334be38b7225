"""What the training of a method's own part shares: batches of conversations, a teacher's loss, a loop that resumes.

Several GPUs: `accelerate launch -m methods.<method>.train ...`; each process then reads its own share of the batches.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator
from omegaconf import DictConfig
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from specbench.conversations import Tokens, batched, conversations, packed_rows, tokenizer_of
from specbench.errors import UserError

CHUNK = 512  # positions whose logits exist at a time
HELD_OUT_BATCHES = 8
TOO_MANY = 10_000  # conversations in a row without anything to learn from
LOG = "train_log.jsonl"

Batch = dict[str, torch.Tensor]


def batches(cfg: DictConfig, pair, held_out: bool = False) -> Iterator[Batch]:
    """Endless batches of packed conversations; see `specbench.conversations`."""
    tokenize = tokenizer_of(pair, cfg.prompt_weight)
    stream = conversations(cfg.conversations, cfg.pair, cfg.seed, held_out, cfg.split)
    cut = ((ids[: cfg.length], weights[: cfg.length]) for ids, weights in map(tokenize, stream))
    rows = _answered(cut, cfg.length)
    pad_id = pair.tokenizer.pad_token_id
    return batched(
        packed_rows(rows, cfg.length, min(pair.stop_ids) if pad_id is None else pad_id), cfg.batch_size
    )


def _answered(rows: Iterator[Tokens], length: int) -> Iterator[Tokens]:
    """The rows in which the assistant says something. Raises UserError where none comes for long."""
    skipped = 0
    for row in rows:
        skipped = 0 if 1.0 in row[1] else skipped + 1
        if not skipped:
            yield row
        elif skipped > TOO_MANY:
            raise UserError(f"the conversations hold nothing that the assistant says within {length} tokens")


def held_out_batches(cfg: DictConfig, pair) -> list[Batch]:
    """A few batches of conversations that are never trained on, on the pair's device."""
    chosen = islice(batches(cfg, pair, held_out=True), HELD_OUT_BATCHES)
    return [{name: tensor.to(pair.device) for name, tensor in batch.items()} for batch in chosen]


def predicting(states: torch.Tensor, batch: Batch, weight: float | None = None) -> torch.Tensor:
    """States [B, T, d] -> [n, d] at the positions before each token that weighs anything (or just `weight`)."""
    weights = batch["loss_weight"][:, 1:]
    return states[:, :-1][weights > 0 if weight is None else weights == weight]


def soft_cross_entropy(
    student: torch.Tensor, student_head: Callable, teacher: torch.Tensor, teacher_head: Callable, batch: Batch
) -> torch.Tensor:
    """Mean cross-entropy [] of the student against the teacher's own next-token distribution, weighted.

    student, teacher: states [B, T, d] that their heads turn into logits, a chunk of positions at a time.
    """
    weights = batch["loss_weight"][:, 1:]
    weights = weights[weights > 0]
    total = torch.zeros((), device=weights.device)
    parts = (predicting(student, batch), predicting(teacher, batch), weights)
    for states, goals, weight in zip(*(part.split(CHUNK) for part in parts)):
        logits = student_head(states).float()
        with torch.no_grad():
            goal = teacher_head(goals).float()
            width = min(logits.shape[-1], goal.shape[-1])  # one of the heads may be padded further
            goal = torch.softmax(goal[:, :width], dim=-1)
        total = total + weight @ cross_entropy(logits[:, :width], goal, reduction="none")
    return total / weights.sum()


@torch.no_grad()
def agreement(choices: Callable[[Batch], tuple[torch.Tensor, torch.Tensor]], held_out: list[Batch]) -> float:
    """Share of positions at which student and target have the same first choice, which is what greedy drafts live on.

    choices(batch) -> both choices, [n] each, at the positions before each token that the assistant says.
    """
    pairs = [choices(batch) for batch in held_out]
    return torch.cat([student == target for student, target in pairs]).float().mean().item()


def train_part(
    module: torch.nn.Module,
    batches: Iterator[Batch],
    evaluate: Callable[[], dict[str, float]],
    save: Callable[[Path, dict[str, float]], None],
    cfg: DictConfig,
) -> Path:
    """Trains `module`, which turns a batch into a loss, in place with AdamW as conf/train.yaml says, the learning rate
    rising over 5 % of the steps and then falling to 0; returns the folder of what was trained.

    evaluate() -> figures on held-out text, taken and logged whenever a state is saved, and at the end.
    save(folder, figures) writes the finished part; of several processes one alone does it. A run that was stopped goes
    on from its last state with the batch that follows.
    """
    accelerator = Accelerator(mixed_precision=cfg.precision)
    out = Path(cfg.out)
    checkpoints = out / "checkpoints"
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=cfg.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    warmup = max(1, cfg.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (cfg.steps - step) / max(1, cfg.steps - warmup))
    )
    wrapped, optimizer = accelerator.prepare(module, optimizer)
    accelerator.register_for_checkpointing(schedule)
    done = _resume(accelerator, checkpoints)
    world, rank = accelerator.num_processes, accelerator.process_index
    mine = islice(batches, done * cfg.accumulate * world + rank, None, world)
    main = accelerator.is_main_process
    bar = tqdm(total=cfg.steps, initial=done, desc="train", unit="step", disable=not main)
    figures: dict[str, float] = {}
    losses = []
    for step in range(done + 1, cfg.steps + 1):
        wrapped.train()
        for part in range(1, cfg.accumulate + 1):
            batch = {k: v.to(accelerator.device) for k, v in next(mine).items()}
            with nullcontext() if part == cfg.accumulate else accelerator.no_sync(wrapped):
                loss = wrapped(batch)
                accelerator.backward(loss / cfg.accumulate)
            losses.append(loss.detach())
        accelerator.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        bar.update()
        if step % cfg.save_every != 0 and step != cfg.steps:
            continue
        module.eval()
        with accelerator.autocast():
            figures = {"loss": torch.stack(losses).mean().item(), **evaluate()}
        losses.clear()
        bar.set_postfix({name: f"{value:.3f}" for name, value in figures.items()})
        if main:
            _log(out / LOG, {"step": step, **figures})
        if step < cfg.steps:
            accelerator.save_state(str(checkpoints / "state.new"))
            if main:
                _replace(checkpoints, step)
            accelerator.wait_for_everyone()
    bar.close()
    if main:
        save(out, figures)
        shutil.rmtree(checkpoints, ignore_errors=True)  # of no use once the part itself is there
        print(", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in figures.items()))
        print(out)
    accelerator.wait_for_everyone()
    return out


def _log(path: Path, row: dict) -> None:
    """Adds a line; one for the same step, written before a stop, stays above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


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
