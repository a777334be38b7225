"""What the training of trained parts shares beside the loop of `specbench.training`: batches, a teacher's loss."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import torch
from omegaconf import DictConfig, OmegaConf
from torch.nn.functional import cross_entropy

from specbench.conversations import Tokens, batched, conversations, packed_rows, tokenizer_of
from specbench.decoding.draft import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.sampling import Decoding
from specbench.decoding.target import finished, logit_steps
from specbench.errors import UserError
from specbench.pairs import Pair, draft_of, load_pair
from specbench.values import Count, NotNegative, Positive, Range, Seed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from transformers import PreTrainedModel

    from specbench.decoding.target import StagedModel
    from specbench.training import Batch

Answered = tuple[list[int], list[int]]  # token ids of a prompt and of its answer

CHUNK = 512  # positions whose logits exist at a time
HELD_OUT_BATCHES = 8
TOO_MANY = 10_000  # conversations in a row without anything to learn from

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


def answered(cfg: DictConfig, pair: Pair, model: StagedModel, held_out: bool = False) -> Iterator[Answered]:
    """A model's own answers to the prompts of endless conversations: token ids of each prompt and of its answer."""
    engine = Engine(model, Drafter(), pair.stop_ids, context_length=pair.context_length)
    texts = conversations(cfg.conversations, cfg.pair, cfg.seed, held_out, cfg.split)
    asked = (c[:i] for c in texts for i, m in enumerate(c) if m["role"] == "assistant")
    for number, messages in enumerate(asked):
        prompt = pair.prompt_ids(messages)
        room = min(cfg.max_new_tokens, pair.context_length - len(prompt))
        if room > 0:
            decoding = Decoding(room, cfg.temperature)
            yield prompt, engine.answer(prompt, decoding, seed=cfg.seed + number).tokens


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


def head_of(model: PreTrainedModel) -> Callable[[torch.Tensor], torch.Tensor]:
    """A model's own head: states [n, d] behind its final norm -> logits [n, vocab], scaled or capped as the model's."""
    head: Any = model.get_output_embeddings()
    steps = logit_steps(model.config.get_text_config())
    return lambda states: finished(head(states), steps)


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
