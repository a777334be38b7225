"""What trainers share beside the loop of `specbench.data.training`: batches, the target's states, a teacher's loss."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial, wraps
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import torch
from omegaconf import DictConfig, OmegaConf

from methods.common.losses import Guess, Head, Loss, first_choices, teacher_of
from methods.common.stored_states import (
    FINALS,
    HIDDEN,
    arrays_for,
    batches_of_states,
    check_context,
    check_states,
    command_for,
    key_of,
    rows_of,
    states_of,
    wanted,
)
from specbench.data import training
from specbench.data.conversations import (
    batched,
    check_conversations,
    check_prompt_weight,
    check_source,
    conversations,
    watched,
)
from specbench.data.training import training_pair
from specbench.data.training_folder import check_stopped, is_finished, saved
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.model.anatomy import window_of
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.scheduler import Scheduler
from specbench.decoding.state import NORMED, Request
from specbench.models.pairs import Pair, draft_of, load_pair
from specbench.models.surgery import SHARED, cut, embedding_names, saved_weights, shares_embeddings
from specbench.system.errors import UserError, stoppable
from specbench.system.files import share_weights
from specbench.system.settings import Count, NotNegative, Positive, Range, Seed, Threads, check_all

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specbench.data.training import Batch
    from specbench.decoding.model.staged_model import StagedModel

    Trainer = Callable[[DictConfig], Path]

Answered = tuple[list[int], list[int]]  # token ids of a prompt and of its answer

HELD_OUT_BATCHES = 8
ANSWERS = 64  # generated together, a quarter of them at a time

# Types of the settings of every trainer.
SETTINGS = {
    "conversations": str | None,
    "steps": Count,
    "accumulate": Count,
    "batch_size": Count,
    "save_every": Count,
    "seed": Seed,
    "threads": Threads | None,
    "length": Annotated[int, Range(2)],
    "learning_rate": Positive,
    "prompt_weight": NotNegative,
    "loss_tokens": Count | None,
    "vocab_sample": Count | None,
    "states": str | None,
    "precision": Literal["no", "bf16"],
    "save_dtype": Literal["float32", "bfloat16", "float16"],
}
# And those of a draft model.
DRAFT_SETTINGS = SETTINGS | {
    "layers": Count | list[int] | None,
    "share_embeddings": bool,
    "gradient_checkpointing": bool,
}


def trainer(kinds: Mapping[str, Any]) -> Callable[[Trainer], Trainer]:
    """Makes a trainer check its configuration before it loads a weight, and skip finished work.

    Args:
        kinds: its settings and their types.
    """

    def decorate(train: Trainer) -> Trainer:
        @wraps(train)
        def checked(cfg: DictConfig) -> Path:
            with stoppable(lambda: saved(cfg)):
                check_trainer(cfg, kinds)
                if is_finished(cfg):
                    return Path(cfg.out)
                check_stopped(cfg)
                return train(cfg)

        return checked

    return decorate


def check_trainer(cfg: DictConfig, kinds: Mapping[str, Any]) -> None:
    """Checks a trainer's configuration as far as possible without weights; the rest is as in `trainer`.

    Raises:
        UserError: a setting cannot work, or the conversations or states are missing or do not fit.
    """
    check_all(cfg, kinds)
    if cfg.vocab_sample is not None and cfg.states is None:
        raise UserError(
            f"vocab_sample needs the target's likeliest tokens: give states=FOLDER, made with `{command_for(cfg)}`"
        )
    if cfg.gradient_checkpointing and "gradient_checkpointing" not in kinds:
        raise UserError("gradient_checkpointing=true is for draft models: set it to false")
    check_prompt_weight(cfg.prompt_weight)
    if cfg.states is None:
        check_conversations(cfg)
        return
    check_source(cfg.conversations, cfg.pair)
    check_states(cfg)


def batches(
    cfg: DictConfig,
    pair: Pair,
    held_out: bool = False,
    start: int = 0,
    stride: int = 1,
    arrays: Collection[str] | None = FINALS,
) -> Iterator[Batch]:
    """Endless batches of packed conversations; see `specbench.data.conversations`.

    With `cfg.states` they come from that folder, with the target's states; see `batches_of_states` for the arguments.
    """
    if cfg.states is not None:
        return batches_of_states(cfg, pair, held_out, start, stride, arrays)
    return islice(batched(rows_of(cfg, pair, held_out), cfg.batch_size), start, None, stride)


def batches_on(
    cfg: DictConfig, pair: Pair, held_out: bool = False, arrays: Collection[str] = FINALS
) -> Iterator[Batch]:
    """As `batches`, on the pair's device."""
    for batch in batches(cfg, pair, held_out, arrays=arrays):
        yield {name: tensor.to(pair.device) for name, tensor in batch.items()}


def answered(cfg: DictConfig, pair: Pair, model: StagedModel, held_out: bool = False) -> Iterator[Answered]:
    """A model's own answers to the prompts of endless conversations: token ids of each prompt and of its answer."""
    engine = Engine(model, Drafter(), pair.stop_ids, Scheduler(ANSWERS // 4), pair.context_length)
    texts = conversations(cfg, held_out)
    prompts = (pair.prompt_ids(c[:i]) for c in texts for i, m in enumerate(c) if m["role"] == "assistant")
    requests = (
        Request(prompt, SamplingParams(min(cfg.max_new_tokens, room), cfg.temperature), cfg.seed + number)
        for number, prompt, room in _with_room(prompts, pair.context_length)
    )
    while some := list(islice(requests, ANSWERS)):
        for request, answer in zip(some, engine.generate(some)):
            yield request.prompt, answer.tokens


def _with_room(prompts: Iterable[list[int]], context: int) -> Iterator[tuple[int, list[int], int]]:
    """Number, ids and room for an answer of each prompt that has any. Raises UserError if none comes for long."""
    lacking = f"no prompt of the conversations leaves room for an answer in {context} tokens"
    for number, prompt in wanted(enumerate(prompts), lambda one: len(one[1]) < context, lacking):
        yield number, prompt, context - len(prompt)


def check_window(cfg: DictConfig, draft: PreTrainedModel) -> None:
    """Raises UserError if rows are longer than the attention window of a draft model's layers.

    Trainers with their own mask let a token see its whole row.
    """
    config = draft.config.get_text_config()
    windows = {window_of(config, layer) for layer in range(config.num_hidden_layers)} - {None}
    if windows and cfg.length > (least := min(cast("set[int]", windows))):
        raise UserError(
            f"length={cfg.length}, and layers of the draft model see {least} tokens: set length={least}"
        )


def target_pair(cfg: DictConfig) -> Pair:
    """Returns the pair of a trainer with a frozen target, without a draft model; sets torch's seed."""
    pair = load_pair(training_pair(cfg.pair), cfg.seed, with_draft=False)
    check_context(cfg, pair)
    torch.manual_seed(cfg.seed)
    return pair


def pair_to_train(cfg: DictConfig) -> Pair:
    """The pair of a trainer whose draft model learns, in float32, with gradients.

    It begins as layers `cfg.layers` of the target, as `cfg.draft`, or as the pair's own draft model.
    """
    if cfg.layers is not None:
        if cfg.draft is not None:
            raise UserError("a draft model begins as draft=FOLDER or as layers of the target, not as both")
        pair = target_pair(cfg)
        pair.draft = cut_from(pair, cfg)
        return pair
    pair_cfg = OmegaConf.merge(
        cfg.pair, {} if cfg.draft is None else {"draft": cfg.draft, "draft_revision": None}
    )
    pair = load_pair(training_pair(cast("DictConfig", pair_cfg)), cfg.seed, with_draft=True)
    check_context(cfg, pair)
    draft = draft_of(pair)
    if shares_embeddings(draft):  # copies: those of the target keep its dtype
        both: Any = draft.get_input_embeddings(), draft.get_output_embeddings()
        embeddings, head = copy.deepcopy(both)
        draft.set_input_embeddings(embeddings)
        draft.set_output_embeddings(head)
    elif cfg.share_embeddings:
        raise UserError(
            "share_embeddings=true is for a draft model that begins as layers of its target: layers=[0,1]"
        )
    _prepare(draft, cfg)
    return pair


def cut_from(pair: Pair, cfg: DictConfig) -> PreTrainedModel:
    """A draft model that begins as layers `cfg.layers` of a pair's target: the number of first ones, or a list.

    With `cfg.share_embeddings` its embeddings and its head stay those of the target.

    Raises:
        UserError: the target does not have these layers.
    """
    check_layers(cfg, pair)
    model = cut(pair.target, layers_of(cfg))
    setattr(model.config, SHARED, cfg.share_embeddings)
    _prepare(model, cfg)
    return model


def check_length(cfg: DictConfig, setting: str, beside: int = 2) -> None:
    """Raises UserError if rows have no room for `cfg[setting]` guesses and `beside` more tokens."""
    if cfg.length < cfg[setting] + beside:
        raise UserError(f"length={cfg.length} leaves no room for {setting}={cfg[setting]}")


def check_layers(cfg: DictConfig, pair: Pair) -> None:
    """Raises UserError if the target does not have the layers `cfg.layers`."""
    layers, depth = layers_of(cfg), pair.target.config.get_text_config().num_hidden_layers
    if not layers or not all(0 <= i < depth for i in layers) or len({*layers}) < len(layers):
        raise UserError(
            f"layers must be some of the target's, 0 to {depth - 1}, each once, or a count of its first, not {layers}"
        )


def check_like_layer(layer: int | None, target: StagedModel) -> None:
    """Raises UserError if the target does not have the layer that a part is to begin like."""
    if layer is not None and layer >= len(target.layers):
        raise UserError(
            f"like_layer must be a layer of the target, 0 to {len(target.layers) - 1}, not {layer}"
        )


def layers_of(cfg: DictConfig) -> list[int]:
    """The layers of the target that a draft model begins as."""
    return list(range(cfg.layers)) if isinstance(cfg.layers, int) else list(cfg.layers)


def _prepare(draft: PreTrainedModel, cfg: DictConfig) -> None:
    """Prepares a draft model for training; embeddings and head that it shares with its target are frozen."""
    torch.manual_seed(cfg.seed)
    draft.float()
    # torch gives the padding token's row no gradient as an input, and that token may be the mask or end an answer.
    embedding: Any = draft.get_input_embeddings()
    embedding.padding_idx = None
    shared = embedding_names(draft) if shares_embeddings(draft) else ()
    for name, weight in draft.named_parameters():
        weight.requires_grad_(name not in shared)
    if cfg.gradient_checkpointing:
        draft.gradient_checkpointing_enable()


def begins_as(cfg: DictConfig) -> tuple[str, str | None]:
    """Returns what `pair_to_train`'s draft model begins as: its name, for the record, and its folder."""
    if cfg.layers is not None:
        shared = ", kept as they are" if cfg.share_embeddings else ""
        return (
            f"layers {', '.join(map(str, layers_of(cfg)))} of the target, its norm, its embeddings and head{shared}",
            None,
        )
    draft = cfg.draft or cfg.pair.draft
    return Path(draft).name, draft


def save_model(model: PreTrainedModel, pair: Pair, cfg: DictConfig, out: Path) -> None:
    """Writes a finished draft model as configured, without embeddings and head if it shares the target's.

    The tokenizer is written too, so that it can be checked against a target's, unless the pair names a tokenizer,
    or the draft model shares the target's embeddings.
    """
    module: Any = model
    module.to(getattr(torch, cfg.save_dtype)).save_pretrained(out, state_dict=saved_weights(model))
    share_weights(out)
    if cfg.pair.tokenizer is None and not shares_embeddings(model):
        pair.tokenizer.save_pretrained(out)


def mask_to_fill(cfg: DictConfig, pair: Pair, embedded: int) -> int:
    """The mask token of a drafter that fills masks.

    Args:
        cfg: its `mask_token`, or None: the tokenizer's unknown, else its padding token.
        pair: that is trained for.
        embedded: number of ids with an embedding.

    Raises:
        UserError: there is no such token, or no embedding of it.
    """
    tokenizer, mask = pair.tokenizer, cfg.mask_token
    if mask is None:
        mask = tokenizer.pad_token_id if tokenizer.unk_token_id is None else tokenizer.unk_token_id
    if mask is None:
        raise UserError("the tokenizer has neither an unknown nor a padding token: set mask_token=ID")
    if mask >= embedded:
        raise UserError(f"mask_token={mask}: there are embeddings of {embedded} tokens")
    return int(mask)


def held_out_batches(cfg: DictConfig, pair: Pair, arrays: Collection[str] = FINALS) -> list[Batch]:
    """A few batches of conversations that are never trained on, on the pair's device."""
    return list(islice(batches_on(cfg, pair, True, arrays), HELD_OUT_BATCHES))


def predicting(states: torch.Tensor, batch: Batch, weight: float | None = None) -> torch.Tensor:
    """States [B, T, d] -> [n, d] at the positions before each token of any weight (or of just `weight`)."""
    weights = batch["loss_weight"][:, 1:]
    return states[:, :-1][weights > 0 if weight is None else weights == weight]


def target_states(target: StagedModel, batch: Batch, taps: Iterable[int]) -> dict[int, torch.Tensor]:
    """The target's states [B, T, d] of each tap, as in `Drafter`: from the batch if it holds any, or computed.

    Raises:
        UserError: states were stored, but not of all taps.
    """
    taps = list(taps)
    missing = [tap for tap in taps if key_of(tap) not in batch]
    if not missing:
        return {tap: batch[key_of(tap)] for tap in taps}
    if any(name.startswith(HIDDEN) for name in batch):
        raise UserError(
            f"the stored states lack the depths {sorted(missing)}, which this trainer reads: "
            f"make them with `specbench states taps=[{','.join(map(str, sorted(taps)))}]`, or set a depth that they "
            "have, if this training has a setting for it (`exit_layer`, `taps`)"
        )
    with torch.no_grad():
        return states_of(target.model.get_decoder(), batch["input_ids"], taps)


def finals_of(target: StagedModel, batch: Batch) -> torch.Tensor:
    """The target's states [B, T, d] after its final norm, as `target_states`."""
    return target_states(target, batch, (NORMED,))[NORMED]


class NextToken(torch.nn.Module):
    """batch -> cross-entropy of a student's next tokens against the frozen target.

    Args:
        head: the student's.
        target: frozen.
        loss: what of a batch is judged.
    """

    def __init__(self, head: Head, target: StagedModel, loss: Loss):
        super().__init__()
        self.target, self.loss = target, loss
        self.heads = (head, Head.of(target.model))

    def finals(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """States for the heads: the student's [B, T, d] and the target's [B, T, D]."""
        raise NotImplementedError

    def forward(self, batch: Batch) -> torch.Tensor:
        """The weighted sum [] of the cross-entropies of a batch."""
        (student, teacher), (head, target_head) = self.finals(batch), self.heads
        truth = teacher_of(batch, target_head, teacher)
        return self.loss(batch, self.loss.goals(batch), [Guess(1.0, student, head)], truth)

    def choices(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """First choices [n] of student and target before each assistant token."""
        both = zip(self.heads, self.finals(batch))
        student, teacher = (first_choices(head, predicting(states, batch, 1.0)) for head, states in both)
        return student, teacher


@torch.no_grad()
def agreement(choices: Callable[[Batch], tuple[torch.Tensor, torch.Tensor]], held_out: list[Batch]) -> Any:
    """Share of positions at which student and target have the same first choice, which a greedy draft depends on.

    Args:
        choices: batch -> both choices at the positions before each assistant token: the student's [n],
            or [k, n] of k students, and the target's [n].
        held_out: batches to measure on.

    Returns:
        A float, or a list of k of them.
    """
    pairs = [choices(batch) for batch in watched(held_out, "held-out text", "batch")]
    return torch.cat([student == target for student, target in pairs], dim=-1).float().mean(-1).tolist()


def agreements(name: str, shares: list[float]) -> dict[str, float]:
    """Returns the figures of guesses one token ahead, two, ...; the first is also the held-out agreement."""
    return {"held_out_agreement": shares[0]} | {
        f"{name}_{i + 1}_agreement": share for i, share in enumerate(shares)
    }


def held_out_figures(
    choices: Callable[[Batch], tuple[torch.Tensor, torch.Tensor]], name: str | None = None
) -> Callable[[list[Batch]], dict[str, float]]:
    """Returns a function: held-out text -> figures: `agreement` of one guess, or `agreements` of several, by `name`."""

    def evaluate(held_out: list[Batch]) -> dict[str, float]:
        shares = agreement(choices, held_out)
        return {"held_out_agreement": shares} if name is None else agreements(name, shares)

    return evaluate


def train_part(
    module: torch.nn.Module,
    evaluate: Callable[[list[Batch]], dict[str, float]],
    save_part: Callable[..., None],
    cfg: DictConfig,
    pair: Pair,
    begins: str,
    taps: Collection[int] = (),
    earlier: str | None = None,
) -> Path:
    """Trains a part as configured, and returns its folder.

    Args:
        module: batch -> loss.
        evaluate: held-out text -> the figures of the training.
        save_part: called with a folder, a dtype and, by name, the figures.
        cfg: settings of the trainer.
        pair: with the target.
        begins: description of the initial weights, for the record.
        taps: depths whose states it reads, beside those after the final norm.
        earlier: folder of the initial weights if they were trained here.
    """
    arrays, dtype = arrays_for(taps), getattr(torch, cfg.save_dtype)
    held_out, text = held_out_batches(cfg, pair, arrays), partial(batches, cfg, pair, arrays=arrays)

    def save(out: Path, figures: dict[str, float]) -> None:
        save_part(out, dtype, **figures)

    return training.train(module, text, lambda: evaluate(held_out), save, cfg, begins, earlier)


def train_draft(
    module: torch.nn.Module,
    draft: PreTrainedModel,
    evaluate: Callable[[list[Batch]], dict[str, float]],
    cfg: DictConfig,
    pair: Pair,
    save_beside: Callable[[Path], None] = lambda _: None,
) -> Path:
    """Trains a draft model with a module's loss as configured, and returns its folder.

    Args:
        module: batch -> loss.
        draft: is saved as it is.
        evaluate: held-out text -> the figures of the training.
        cfg: settings of the trainer.
        pair: with the target.
        save_beside: writes further files of the draft model into the folder.
    """

    def save(out: Path, _dtype: torch.dtype, **_figures: float) -> None:
        save_model(draft, pair, cfg, out)
        save_beside(out)

    begins, earlier = begins_as(cfg)
    return train_part(module, evaluate, save, cfg, pair, begins, earlier=earlier)
