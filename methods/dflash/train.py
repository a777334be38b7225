"""Trains the drafting model of DFlash, DSpark or DFlash2: `specbench train dflash pair=... [head=markov]`.

Blocks begin at tokens of a text that the assistant says, drawn anew for each batch. Each holds that token and masks; it
sees the target's states of what is in front of it, and itself. Place j is judged against the target's own distribution
of the token that it guesses, with the weight exp(-j / decay). With the Markov head the logits are corrected by the
text's own token in front (arXiv 2602.06036; DeepSpec's training).

What is judged is the cross-entropy; of `distance_share`, the L1 distance of both distributions in place of it. The
estimate of acceptance learns 1 minus half that distance, which is how likely the target accepts the token. DFlash2's
selector learns beside it which of a place's candidates the target chooses, after the text's own token in front; where
it is not among them, it takes the place of the least likely one (speculators' training).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, linear
from torch.utils.checkpoint import checkpoint

from methods.common.checkpoints import layer_sizes
from methods.common.initialisation import UNSURE, scale_of
from methods.common.losses import (
    ALL,
    CHUNK,
    Distribution,
    Goals,
    Head,
    Loss,
    Scored,
    cross_entropies,
    first_choices,
    teacher_of,
)
from methods.common.training import (
    SETTINGS,
    check_length,
    held_out_figures,
    mask_to_fill,
    target_pair,
    target_states,
    train_part,
    trainer,
)
from methods.dflash.kinds import MARKOV, SELECTOR
from specbench.config.compose import program
from specbench.decoding.state import NORMED
from specbench.system.errors import UserError
from specbench.system.settings import Count, Natural, Positive, Probability, Range

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from methods.dflash.model import BlockModel, CandidateSelector
    from specbench.data.training import Batch
    from specbench.decoding.model.staged_model import StagedModel

BEGINS = "random weights, the target's norm"
EVERY = 4  # in held-out text every `EVERY`-th token begins a block
CANDIDATES, SIZE, GROUP = 16, 2, 16  # of DFlash2, as published: of its selector, and of its convolutions


class Injected:
    """In place of a cache: keys and values of a text in every layer, in front of those of blocks."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        self.keys, self.values = keys, values

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [b, kv_heads, n, head_dim] of blocks -> [b, kv_heads, T + n, head_dim]."""
        return torch.cat([self.keys[layer_idx], keys], 2), torch.cat([self.values[layer_idx], values], 2)


class BlockDistillation(torch.nn.Module):
    """batch -> loss of a drafting model's blocks against the frozen target.

    Args:
        model: is trained.
        target: frozen.
        blocks: of each row.
        decay: places after which a place's weight is 1 / e.
        distance_share: see the module.
        loss: what of the vocabulary is computed.
    """

    def __init__(
        self,
        model: BlockModel,
        target: StagedModel,
        blocks: int,
        decay: float,
        distance_share: float,
        loss: Loss = ALL,
    ):
        super().__init__()
        self.model, self.target, self.blocks = model, target, blocks
        self.distance_share, self.loss = distance_share, loss
        self.head = Head.of(target.model)
        self.guesses = model.config.most_guesses
        self.candidates = min(model.config.selector_top_k, len(self.head.weight))
        self.weights = torch.exp(-torch.arange(self.guesses, device=target.device) / decay)

    def forward(self, batch: Batch) -> torch.Tensor:
        """The loss [] of a batch: a mean by place times the batch's weight, scaled as that of one token ahead."""
        starts = self.drawn(batch)
        states, finals = self.states(batch, starts)
        every = self.goals(batch, starts)
        # Tokens that are not judged may have no distribution.
        judged = every.weights.nonzero().squeeze(1)
        goals = Goals(every.batch_index[judged], every.positions[judged], every.weights[judged])
        teacher = teacher_of(batch, self.head, finals)
        before = batch["input_ids"][goals.batch_index, goals.positions - 1]
        flat = states.flatten(0, 2)[judged]
        total = torch.zeros((), device=finals.device)
        for chunk, some, token in zip(goals.split(), flat.split(CHUNK), before.split(CHUNK)):
            # The distributions, too, are recomputed for the gradient.
            loss: Any = checkpoint(self.judged, teacher, chunk, some, token, use_reentrant=False)
            total = total + chunk.weights @ loss
        if not len(judged):
            return 0.0 * states.sum()  # every parameter has a gradient in every step
        return total / goals.weights.sum() * batch["loss_weight"].sum()

    def drawn(self, batch: Batch) -> torch.Tensor:
        """[B, blocks] the tokens that begin blocks: any whose next token is judged."""
        judged = batch["loss_weight"][:, 1:] > 0
        # A row without any gets blocks that weigh nothing.
        return torch.multinomial(judged + 1e-9, self.blocks, replacement=True)

    def goals(self, batch: Batch, starts: torch.Tensor) -> Goals:
        """The B * blocks * guesses tokens that blocks guess; no weight beyond a row's end or a token without weight."""
        rows, length = batch["loss_weight"].shape
        positions = starts.unsqueeze(-1) + 1 + torch.arange(self.guesses, device=starts.device)
        batch_index = torch.arange(rows, device=starts.device).view(-1, 1, 1).expand_as(positions)
        inside = positions < length
        positions = positions.clamp(max=length - 1)
        weights = batch["loss_weight"][batch_index, positions] * inside
        weights = weights * (weights > 0).long().cumprod(-1) * self.weights
        return Goals(batch_index.flatten(), positions.flatten(), weights.flatten())

    def states(self, batch: Batch, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Fills blocks.

        Args:
            batch: B rows of T tokens.
            starts: [B, blocks] the token that each block begins with.

        Returns:
            Normed states [B, blocks, guesses, d] of the places that guess, and the target's [B, T, d] after its norm.
        """
        model, config, ids = self.model, self.model.config, batch["input_ids"]
        (rows, length), blocks = ids.shape, starts.shape[1]
        dtype, device = model.fc.weight.dtype, ids.device
        by_tap = target_states(self.target, batch, (*model.taps, NORMED))
        features = model.features({tap: by_tap[tap].to(dtype) for tap in model.taps})
        positions = torch.arange(length, device=device).unsqueeze(0)
        keys, values = model.context(features, model.rope(positions, features))
        places = config.block_size
        fed = ids.new_full((rows, blocks, places), config.mask_token_id)
        fed[..., 0] = ids.gather(1, starts)
        with torch.no_grad():
            hidden = self.target.embed(fed.flatten(1)).to(dtype)
        at = (starts.unsqueeze(-1) + torch.arange(places, device=device)).flatten(1)
        in_front = positions < starts.repeat_interleave(places, 1).unsqueeze(-1)
        block = torch.arange(blocks, device=device).repeat_interleave(places)
        within = (block.unsqueeze(1) == block).expand(rows, -1, -1)
        mask = torch.cat([in_front, within], dim=-1).unsqueeze(1)
        context = {"position_embeddings": model.rope(at, hidden), "past_key_values": Injected(keys, values)}
        out = model(hidden, places, attention_mask=mask, **context)
        return out.unflatten(1, (blocks, places))[:, :, config.fills_in :], by_tap[NORMED]

    def judged(
        self,
        teacher: Callable[[Goals], Distribution],
        goals: Goals,
        states: torch.Tensor,
        before: torch.Tensor,
    ) -> torch.Tensor:
        """The losses [n] of normed states [n, d] that guess n goals, with the tokens [n] in front of these."""
        scored, truth = self.loss.scored(teacher(goals), len(self.head.weight))
        raw, embedded = self.logits(states, before, scored.ids)
        logits = scored.raised(raw)
        loss = (1 - self.distance_share) * cross_entropies(logits, truth)
        if self.model.candidate_selector is not None:
            loss = loss + self.chosen(raw, scored, truth, states, before)
        if not self.distance_share and embedded is None:
            return loss
        guessed = logits.softmax(-1)
        if truth.ids is None:
            accepted = torch.minimum(guessed, truth.probs).sum(-1)
        else:
            accepted = torch.minimum(guessed.gather(1, truth.ids), truth.probs).sum(-1)
        loss = loss + self.distance_share * 2 * (1 - accepted)
        if embedded is not None and self.model.confidence_head is not None:
            estimate = self.model.confidence(states, embedded).float()
            goal = accepted.detach().clamp(0, 1)
            loss = loss + binary_cross_entropy_with_logits(estimate, goal, reduction="none")
        return loss

    def chosen(
        self,
        logits: torch.Tensor,
        scored: Scored,
        truth: Distribution,
        states: torch.Tensor,
        before: torch.Tensor,
    ) -> torch.Tensor:
        """The losses [n] of the selector, with the logits [n, c] of the tokens that are scored; else as `judged`."""
        first = truth.probs.argmax(-1, keepdim=True)
        first = first if truth.ids is None else truth.ids.gather(1, first)
        candidates = logits.topk(min(self.candidates, logits.shape[1])).indices
        missing = ~(candidates == first).any(-1, keepdim=True)
        candidates = torch.cat([candidates[:, :-1], torch.where(missing, first, candidates[:, -1:])], dim=1)
        tokens = candidates if scored.ids is None else scored.ids[candidates]
        scores = logits.gather(1, candidates) + self.selected(states, before, tokens)
        return cross_entropy(scores, (candidates == first).long().argmax(-1), reduction="none")

    def selected(self, states: torch.Tensor, before: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """What the selector adds [n, count] to the logits of candidates [n, count]."""
        selector = cast("CandidateSelector", self.model.candidate_selector)
        successors = selector.successor_codebook[candidates]
        return selector.scores(selector.hidden_projection(states), before, successors).float()

    def logits(
        self, states: torch.Tensor, before: torch.Tensor, ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits without the selector, and how the Markov head embeds the tokens in front.

        Args:
            states: [n, d] normed ones.
            before: [n] the tokens in front.
            ids: [c] tokens whose logits are computed; None: all.

        Returns:
            [n, c or vocab], and [n, rank] or None.
        """
        logits, markov = self.head(states, ids).float(), self.model.markov_head
        if markov is None:
            return logits, None
        embedded = markov.markov_w1(before)
        weight = markov.markov_w2.weight
        return logits + linear(embedded, weight if ids is None else weight[ids]).float(), embedded

    def guessed(self, states: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """First choices [n] of the drafting model; the rest is as in `logits`."""
        logits, _ = self.logits(states, before)
        if self.model.candidate_selector is None:
            return logits.argmax(-1)
        likeliest, candidates = logits.topk(self.candidates)
        best = (likeliest + self.selected(states, before, candidates)).argmax(-1, keepdim=True)
        return candidates.gather(1, best).squeeze(1)

    def choices(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """First choices [guesses, n] of drafting model and target; the model's are after its own tokens before.

        Blocks begin at every `EVERY`-th token whose next `guesses` tokens are the assistant's.
        """
        ids, k = batch["input_ids"], self.guesses
        starts = torch.arange(0, ids.shape[1] - k, EVERY, device=ids.device).expand(len(ids), -1)
        states, finals = self.states(batch, starts)
        goals = self.goals(batch, starts)
        is_assistant = batch["loss_weight"] == 1.0
        among = is_assistant[goals.batch_index, goals.positions].view(-1, k).all(-1)
        states = states.flatten(0, 1)[among]
        index, positions = (part.view(-1, k)[among] for part in (goals.batch_index, goals.positions))
        truth = [first_choices(self.head, finals[index[:, j], positions[:, j] - 1]) for j in range(k)]
        before, student = ids[index[:, 0], positions[:, 0] - 1], []
        for j in range(k):
            parts = zip(states[:, j].split(CHUNK), before.split(CHUNK))
            before = torch.cat([self.guessed(*part) for part in parts])
            student.append(before)
        return torch.stack(student), torch.stack(truth)


def fresh_model(cfg: DictConfig, target: StagedModel, mask: int) -> BlockModel:
    """A drafting model to train, of the target's width and heads: random weights, and the target's norm, smaller.

    The authors begin at random everywhere. With embeddings as large as the embedded family's, which are also its head,
    logits would then be in the hundreds.
    """
    from methods.dflash.model import BlockConfig, BlockModel, default_taps  # late: it takes seconds to import

    markov, selects = cfg.head == MARKOV, cfg.head == SELECTOR
    if selects and target.hidden_size % GROUP:
        raise UserError(f"head={SELECTOR} is for targets whose width is a multiple of {GROUP}")
    config = BlockConfig(
        **layer_sizes(target) | {"num_hidden_layers": cfg.draft_layers},
        block_size=cfg.block_size,
        mask_token_id=mask,
        fills_in=not markov,
        markov_rank=cfg.rank if markov else 0,
        confidence=markov,
        conv_kernel_size=SIZE if selects else 0,
        conv_group_size=GROUP,
        selector_rank=cfg.rank if selects else 0,
        selector_top_k=CANDIDATES,
    )
    layers = len(target.layers)
    taps = default_taps(layers, cfg.taps) if isinstance(cfg.taps, int) else tuple(cfg.taps)
    if not taps or not 0 <= min(taps) <= max(taps) < layers:
        raise UserError(f"taps must be depths of the target, 0 to {layers - 1}, or a count, not {[*taps]}")
    model = BlockModel(config, taps).to(target.device)
    with torch.no_grad():
        model.norm.weight.copy_(UNSURE * scale_of(target.norm))
        if model.markov_head is not None:
            model.markov_head.markov_w2.weight.zero_()  # at first nothing is corrected
        if model.candidate_selector is not None:
            model.candidate_selector.predecessor_codebook.normal_()
            model.candidate_selector.successor_codebook.zero_()  # likewise
    return model


@trainer(
    SETTINGS
    | {
        "head": Literal["independent", "markov", "selector"],
        "block_size": Annotated[int, Range(2)],
        "draft_layers": Count,
        "taps": Count | list[int],
        "blocks": Count,
        "decay": Positive,
        "rank": Count,
        "distance_share": Probability,
        "mask_token": Natural | None,
        "loss_tokens": NoneType,  # all tokens of the blocks are judged
    },
)
def train(cfg: DictConfig) -> Path:
    """Trains as configured (conf/train_dflash.yaml) and returns the folder of the finished drafting model."""
    check_length(cfg, "block_size", 1)
    pair = target_pair(cfg)
    target = pair.staged
    model = fresh_model(cfg, target, mask_to_fill(cfg, pair, target.embed_tokens.weight.shape[0]))
    from methods.dflash.checkpoint import save_blocks  # late, as above

    module = BlockDistillation(model, target, cfg.blocks, cfg.decay, cfg.distance_share, Loss.of(cfg))

    figures = held_out_figures(module.choices, "place")
    return train_part(module, figures, partial(save_blocks, model), cfg, pair, BEGINS, model.taps)


main = program("train_dflash", train)
