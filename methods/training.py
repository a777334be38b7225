"""What the training of trained parts shares: batches of conversations, a teacher's loss, a loop that resumes.

Several GPUs: `accelerate launch -m methods.<method>.train ...`; each process then reads its own share of the batches.
"""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import torch
from omegaconf import DictConfig, OmegaConf
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from specbench.conversations import Tokens, batched, conversations, packed_rows, tokenizer_of
from specbench.errors import UserError
from specbench.pairs import Pair, draft_of, load_pair
from specbench.threads import Threads, use_threads
from specbench.values import Count, NotNegative, Positive, Range, Seed, plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from accelerate import Accelerator
    from transformers import PreTrainedModel

CHUNK = 512  # positions whose logits exist at a time
HELD_OUT_BATCHES = 8
TOO_MANY = 10_000  # conversations in a row without anything to learn from
LOG, CONDITIONS = "train_log.jsonl", "conditions.json"
FREE = ("out", "save_every", "save_dtype")  # settings that a training may go on with when they have changed
PLAIN = ("NO", "MULTI_GPU", "MULTI_CPU")  # accelerate's names

# What the settings of every trainer take.
SETTINGS = {
    **{
        "steps": Count,
        "accumulate": Count,
        "batch_size": Count,
        "save_every": Count,
        "seed": Seed,
        "threads": Count | None,
    },
    **{"length": Annotated[int, Range(2)], "learning_rate": Positive, "prompt_weight": NotNegative},
    **{"precision": Literal["no", "bf16"], "save_dtype": Literal["float32", "bfloat16", "float16"]},
}

Batch = dict[str, torch.Tensor]


def batches(cfg: DictConfig, pair: Pair, held_out: bool = False) -> Iterator[Batch]:
    """Endless batches of packed conversations; see `specbench.conversations`."""
    tokenize = tokenizer_of(pair, cfg.prompt_weight)
    stream = conversations(cfg.conversations, cfg.pair, cfg.seed, held_out, cfg.split)
    whole = (row for messages in stream for row in tokenize(messages))
    cut = ((ids[: cfg.length], weights[: cfg.length]) for ids, weights in whole)
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


def pair_to_train(cfg: DictConfig) -> Pair:
    """The pair of a trainer whose draft model learns: `cfg.draft` or the pair's own, in float32, with gradients."""
    pair_cfg = cfg.pair if cfg.draft is None else _changed(cfg.pair, draft=cfg.draft)
    pair = load_pair(training_pair(pair_cfg), cfg.seed, with_draft=True)
    torch.manual_seed(cfg.seed)
    draft = draft_of(pair)
    draft.float().requires_grad_(True)
    if cfg.gradient_checkpointing:
        draft.gradient_checkpointing_enable()
    return pair


def save_model(model: PreTrainedModel, pair: Pair, cfg: DictConfig, out: Path) -> None:
    """Writes a finished draft model as configured.

    The tokenizer is written too, so that it can be checked against a target's, unless the pair names one of its own
    folder.
    """
    module: Any = model
    module.to(getattr(torch, cfg.save_dtype)).save_pretrained(out)
    if cfg.pair.tokenizer is None:
        pair.tokenizer.save_pretrained(out)


def training_pair(pair_cfg: DictConfig) -> DictConfig:
    """The pair as trainers load it: in bfloat16 where it is float16, in which gradients through the head vanish."""
    return _changed(pair_cfg, dtype="bfloat16") if pair_cfg.dtype == "float16" else pair_cfg


def _changed(cfg: DictConfig, **settings: object) -> DictConfig:
    """A configuration with some of its settings changed."""
    return cast("DictConfig", OmegaConf.merge(cfg, settings))


def held_out_batches(cfg: DictConfig, pair: Pair) -> list[Batch]:
    """A few batches of conversations that are never trained on, on the pair's device."""
    chosen = islice(batches(cfg, pair, held_out=True), HELD_OUT_BATCHES)
    return [{name: tensor.to(pair.device) for name, tensor in batch.items()} for batch in chosen]


def predicting(states: torch.Tensor, batch: Batch, weight: float | None = None) -> torch.Tensor:
    """States [B, T, d] -> [n, d] at the positions before each token of any weight (or of just `weight`)."""
    weights = batch["loss_weight"][:, 1:]
    return states[:, :-1][weights > 0 if weight is None else weights == weight]


def soft_cross_entropy(
    student: torch.Tensor, student_head: Callable, teacher: torch.Tensor, teacher_head: Callable, batch: Batch
) -> torch.Tensor:
    """Weighted sum of the student's cross-entropies against the teacher's own next-token distribution.

    Args:
        student: states [B, T, d].
        student_head: states [n, d] -> logits [n, vocab]; called with a chunk of positions at a time.
        teacher: states [B, T, D].
        teacher_head: as `student_head`.
        batch: tokens and their weights in the loss.

    Returns:
        A scalar [].
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
    return total


@torch.no_grad()
def agreement(choices: Callable[[Batch], tuple[torch.Tensor, torch.Tensor]], held_out: list[Batch]) -> Any:
    """Share of positions at which student and target have the same first choice, which a greedy draft depends on.

    Args:
        choices: batch -> both choices at the positions before each token that the assistant says: the student's [n],
            or [k, n] of k students, and the target's [n].
        held_out: batches to measure on.

    Returns:
        A float, or a list of k of them.
    """
    pairs = [choices(batch) for batch in held_out]
    return torch.cat([student == target for student, target in pairs], dim=-1).float().mean(-1).tolist()


def train_part(
    module: torch.nn.Module,
    batches: Iterator[Batch],
    evaluate: Callable[[], dict[str, float]],
    save: Callable[[Path, dict[str, float]], None],
    cfg: DictConfig,
) -> Path:
    """Trains `module` in place with AdamW as conf/train.yaml says.

    The learning rate rises over 5 % of the steps and then falls to 0. A step divides the loss by the weight of all
    batches in it, of every process, so that each token counts the same. A run that was stopped goes on from its last
    state with the batch that follows.

    Args:
        module: batch -> the sum of the weighted losses.
        batches: endless.
        evaluate: returns figures on held-out text; called and logged whenever a state is saved, and at the end.
        save: writes the finished part with its figures to a folder; of several processes one alone calls it.
        cfg: settings of the trainer.

    Returns:
        The folder of what was trained.

    Raises:
        UserError: the kind of parallelism is not supported, or the state is that of another training.
    """
    from accelerate import Accelerator  # late: it takes seconds to import

    parameters = [p for p in module.parameters() if p.requires_grad]
    accelerator = Accelerator(mixed_precision=cfg.precision, cpu=parameters[0].device.type == "cpu")
    if accelerator.distributed_type not in PLAIN:
        raise UserError(
            f"{accelerator.distributed_type} is not supported: launch without it (plain data parallelism)"
        )
    out = Path(cfg.out)
    checkpoints = out / "checkpoints"
    optimizer = torch.optim.AdamW(parameters, lr=cfg.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    warmup = max(1, cfg.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (cfg.steps - step) / max(1, cfg.steps - warmup))
    )
    wrapped, optimizer = accelerator.prepare(module, optimizer)
    accelerator.register_for_checkpointing(schedule)
    done = _resume(accelerator, checkpoints, cfg)
    world, rank = accelerator.num_processes, accelerator.process_index
    mine: Iterator[Batch] = islice(batches, done * cfg.accumulate * world + rank, None, world)
    main = accelerator.is_main_process
    if not done:
        first = next(mine)
        mine = chain([first], mine)
        chosen = _use_threads(cfg.threads, accelerator, wrapped, first)
        if main:
            print(f"{chosen.threads} threads of torch, by {chosen.chosen_by}")
    bar = tqdm(total=cfg.steps, initial=done, desc="train", unit="step", disable=not main)
    figures: dict[str, float] = {}
    losses: list[torch.Tensor] = []
    for step in range(done + 1, cfg.steps + 1):
        wrapped.train()
        losses += _accumulated(accelerator, wrapped, list(islice(mine, cfg.accumulate)))
        accelerator.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        bar.update()
        if step % cfg.save_every != 0 and step != cfg.steps:
            continue
        module.eval()
        with accelerator.autocast():
            loss = accelerator.reduce(torch.stack(losses).sum(), "mean") * cfg.accumulate / len(losses)
            figures = {"loss": loss.item(), **evaluate()}
        losses.clear()
        bar.set_postfix({name: f"{value:.3f}" for name, value in figures.items()})
        if main:
            _log(out / LOG, {"step": step, "threads": torch.get_num_threads(), **figures})
        if step < cfg.steps:
            accelerator.save_state(str(checkpoints / "state.new"))
            accelerator.wait_for_everyone()
            if main:
                conditions = _conditions(accelerator, cfg) | {"torch_threads": torch.get_num_threads()}
                (checkpoints / "state.new" / CONDITIONS).write_text(json.dumps(conditions))
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


def _accumulated(
    accelerator: Accelerator, module: torch.nn.Module, batches: list[Batch]
) -> list[torch.Tensor]:
    """Adds the gradients of the batches of one step; returns the loss [] of each, as it counts in the step."""
    parts = [{k: v.to(accelerator.device) for k, v in batch.items()} for batch in batches]
    weight = accelerator.reduce(sum(part["loss_weight"][:, 1:].sum() for part in parts))
    losses = []
    for number, part in enumerate(parts, 1):
        with nullcontext() if number == len(parts) else accelerator.no_sync(module):
            # Gradients are averaged over the processes.
            loss = module(part) * (accelerator.num_processes / weight)
            accelerator.backward(loss)
        losses.append(loss.detach())
    return losses


def _use_threads(
    asked: int | None, accelerator: Accelerator, module: torch.nn.Module, batch: Batch
) -> Threads:
    """Sets torch's threads for a training that begins: `asked`, or as many as a step on `batch` is fastest with.

    Several processes would disturb each other's measurement: they take what torch gives them.
    """

    def work() -> None:
        with torch.random.fork_rng(devices=[]):
            accelerator.backward(module({k: v.to(accelerator.device) for k, v in batch.items()}))
        module.zero_grad(set_to_none=True)

    alone_on_a_cpu = accelerator.num_processes == 1 and accelerator.device.type == "cpu"
    return use_threads(asked, work if alone_on_a_cpu else None)


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


def _conditions(accelerator: Accelerator, cfg: DictConfig) -> dict:
    """What must be the same for a training to go on where it stopped."""
    own = {key: value for key, value in plain(cfg).items() if key not in FREE}
    return own | {"processes": accelerator.num_processes}


def _resume(accelerator: Accelerator, checkpoints: Path, cfg: DictConfig) -> int:
    """Loads the newest whole state, if there is one, with its number of threads, which changes the rounding of sums.

    Returns:
        The steps that it has seen; 0 where there is none.

    Raises:
        UserError: that training was another one.
    """
    steps = [int(folder.name.removeprefix("state-")) for folder in checkpoints.glob("state-*")]
    if not steps:
        return 0
    state = checkpoints / f"state-{max(steps)}"
    then, now = json.loads((state / CONDITIONS).read_text()), _conditions(accelerator, cfg)
    for key in sorted((then.keys() | now.keys()) - {"torch_threads"}):
        if then.get(key) != now.get(key):
            raise UserError(
                f"{checkpoints} holds a training with {key}={then.get(key)}, not {now.get(key)}: "
                "give its settings to go on, remove it to start anew, or name another folder with out="
            )
    accelerator.load_state(str(state))
    torch.set_num_threads(then["torch_threads"])
    return max(steps)
