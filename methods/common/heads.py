"""A drafter's head: from normed states to draft tokens, over the whole vocabulary or over some rows of it.

A trimmed head (VocabTrim, Goel et al. 2025; FR-Spec, Zhao et al. 2025) holds copies of the rows of likely tokens, so a
draft pass reads fewer bytes. The target still scores every token, and a token outside the trimmed vocabulary has draft
probability 0, so that acceptance over the full vocabulary stays exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from methods.common.vocab_map import kept_ids
from specbench.decoding.cpu.packed_linear import packed_linear
from specbench.decoding.model.cost import weight_bytes
from specbench.system.errors import UserError

if TYPE_CHECKING:
    from methods.common.draft_layer import CachedLayer
    from specbench.decoding.model.staged_model import StagedModel
    from specbench.decoding.state import Batch
    from specbench.models.pairs import Pair


# Token ids [b, k] of the target and, when they were drawn, the distributions [b, k, vocab] that they were drawn from.
Chosen = tuple[torch.Tensor, torch.Tensor | None]
UNTRIMMED = "the drafter's weights score only some tokens, by a map of their own: set vocab=full"


class DraftHead:
    """A head as a drafter uses it; `bytes` of weights are read by one use, the norm in front included.

    Args:
        model: whose head it is.
        target_vocab: ids that the target has, the width of the probabilities handed to verification.
        token_ids: [k] token ids in ascending order, the only ones that are scored; None: all.
        layers: drafting layers; if they have a head, it is used, and its weights are counted with theirs.
    """

    def __init__(
        self,
        model: StagedModel,
        target_vocab: int,
        token_ids: torch.Tensor | None = None,
        layers: CachedLayer | None = None,
    ):
        self.model, self.layers, self.target_vocab, self.token_ids = model, layers, target_vocab, token_ids
        if token_ids is None:
            self.bytes = model.pass_bytes(0, 0)
            return
        if layers is not None:
            self.bytes = 0.0
            return
        head = model.lm_head
        if not isinstance(head, torch.nn.Linear) or type(head.weight) is not torch.nn.Parameter:
            raise UserError("a head with quantised weights cannot be trimmed: set vocab=full")
        # A copy on the drafter's device: a tied embedding keeps its rows, and the head may be on another GPU.
        rows = token_ids.to(head.weight.device)
        bias = None if head.bias is None else head.bias[rows].to(model.device)
        self.trimmed = packed_linear(head.weight[rows].to(model.device), bias)
        self.bytes = weight_bytes(model.norm) + weight_bytes(self.trimmed)

    @property
    def rows(self) -> int:
        """The number of tokens that it scores."""
        return self.model.vocab_size if self.token_ids is None else self.token_ids.shape[0]

    def ids(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the head, of any shape -> token ids of the target."""
        return rows if self.token_ids is None else self.token_ids[rows]

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Normed states [..., d], or outputs of drafting layers with a head of their own -> logits [..., rows]."""
        if self.token_ids is None:
            return self.model.unembed(normed)
        if self.layers is not None:
            return self.layers.logits(normed)
        return self.model.finish_logits(self.trimmed(normed))

    def choose(
        self, logits: torch.Tensor, batch: Batch, place: int, candidates: torch.Tensor | None = None
    ) -> Chosen:
        """Chooses a token of each draft.

        Args:
            logits: [b, rows] of this head; or those of the candidates.
            batch: the running sequences.
            place: of the token in the draft, from 0 on.
            candidates: [b, count] the rows to choose among, in ascending order; None: all.

        Returns:
            Token ids [b] of the target and, when sampling, the distributions [b, rows] they were drawn from.
        """
        uniforms = batch.draws(place)
        rows, probs = batch.decoding.select(logits, uniforms)
        rows = rows if uniforms is None else drawable(rows)
        if candidates is not None:
            rows = candidates.gather(1, rows.unsqueeze(1)).squeeze(1)
            if probs is not None:
                probs = probs.new_zeros(len(probs), self.rows).scatter(1, candidates, probs)
        return self.ids(rows), probs

    def spread(self, probs: list[torch.Tensor | None]) -> torch.Tensor | None:
        """Probabilities of a draft over the target's vocabulary.

        Args:
            probs: from `choose`, for each of the k tokens: [b, rows] each, or None when greedy.

        Returns:
            [b, k, target_vocab]; None for a greedy draft.
        """
        if not probs or probs[0] is None:
            return None
        return self.widen(torch.stack(probs, dim=1))  # type: ignore[arg-type] # all or none

    def widen(self, rows: torch.Tensor) -> torch.Tensor:
        """Probabilities [..., rows] of this head -> [..., target_vocab]."""
        if self.token_ids is None and rows.shape[-1] == self.target_vocab:
            return rows
        widened = rows.new_zeros(*rows.shape[:-1], self.target_vocab)
        if self.token_ids is None:
            widened[..., : rows.shape[-1]] = rows
        else:
            widened[..., self.token_ids] = rows
        return widened


def chosen_at_once(head: DraftHead, logits: torch.Tensor, batch: Batch) -> Chosen:
    """Chooses all tokens of drafts that were guessed in one pass, each independently of the others.

    Args:
        head: of the drafter, or a replacement.
        logits: [b, k, rows] of it.
        batch: the running sequences.

    Returns:
        The first fields of a `Draft`.
    """
    return chosen_in_turn(head, batch, logits.shape[1], lambda place, _: logits[:, place])


def chosen_in_turn(
    head: DraftHead,
    batch: Batch,
    k: int,
    after: Callable[[int, torch.Tensor], torch.Tensor],
    candidates: torch.Tensor | None = None,
) -> Chosen:
    """Chooses tokens of drafts one after the other; the logits of each depend on the token before it.

    Args:
        head: as in `chosen_at_once`.
        batch: the running sequences.
        k: draft length.
        after: (position, from 0 on, and tokens [b] before it) -> its logits, as for `DraftHead.choose`.
        candidates: [b, k, count] of each position, as there.

    Returns:
        As `chosen_at_once`.
    """
    chosen, token = [], batch.last_tokens(1)[:, 0]
    for j in range(k):
        among = None if candidates is None else candidates[:, j]
        token, probs = head.choose(after(j, token), batch, j, among)
        chosen.append((token, probs))
    return torch.stack([some for some, _ in chosen], dim=1), head.spread([q for _, q in chosen])


def drawable(rows: torch.Tensor) -> torch.Tensor:
    """Rows drawn by `SamplingParams.select` with uniforms; row 0 if nothing could be drawn (`NOT_DRAWN`).

    Rows are looked up before `check_sampled` is called. The target's own draw then fails, as NaN stay in the
    distribution.
    """
    return rows.clamp(min=0)


def draft_head(
    pair: Pair,
    model: StagedModel,
    token_ids: torch.Tensor | None = None,
    layers: CachedLayer | None = None,
) -> DraftHead:
    """Returns the head that a drafter of a pair uses, trimmed if the run trims heads (`vocab=trim`).

    Args:
        pair: with the target.
        model: whose head it is.
        token_ids: [k] the tokens that a trained part scores, if not all.
        layers: drafting layers; their own head is used if they have one.

    Raises:
        UserError: the map cannot be used, or a head that scores only some tokens would be trimmed.
    """
    scored = token_ids if layers is None else layers.token_ids
    if pair.trimmed is None:
        return DraftHead(model, target_ids(pair), scored, layers)
    if scored is not None:
        raise UserError(UNTRIMMED)
    vocab_map, size = pair.trimmed
    return DraftHead(
        model, target_ids(pair), torch.tensor(kept_ids(vocab_map, pair, size), device=model.device)
    )


def target_ids(pair: Pair) -> int:
    """The number of ids that the target of a pair scores, padding included."""
    head: Any = pair.target.get_output_embeddings()
    return head.out_features


def confidence(logits: torch.Tensor) -> torch.Tensor:
    """Top-1 probability [n] of logits [n, rows] at temperature 1, whatever the temperature of the draw."""
    return torch.softmax(logits.float(), dim=-1).amax(-1)


class StopTracker:
    """Which sequences of a batch still draft: the batch continues until all have stopped.

    `counts` are the tokens [b] that each has drafted, up to and including its first unsure one; None if all are equal.
    A threshold of 0 never stops a sequence, and never waits for the device.

    Args:
        threshold: a sequence stops after a token whose probability (top-1, temperature 1) is below it.
    """

    def __init__(self, threshold: float):
        self.threshold = threshold
        self.counts: torch.Tensor | None = None
        self._going: torch.Tensor | bool = True

    def continues(self, logits: torch.Tensor, is_last: bool) -> bool:
        """Counts a token drafted from logits [b, rows]; arguments and result are those of `continues_at`."""
        return self.threshold <= 0 or self.continues_at(confidence(logits), is_last)

    def continues_at(self, likely: torch.Tensor, is_last: bool) -> bool:
        """Counts a token, or a level of a tree.

        Args:
            likely: its confidence [b].
            is_last: whether the draft ends after it anyway; if so, the host does not wait for the device.

        Returns:
            Whether any sequence continues.
        """
        if self.threshold <= 0:
            return True
        if likely.shape[0] == 1:
            return not is_last and not bool(likely < self.threshold)
        if self.counts is None:
            self._going = torch.ones(likely.shape[0], dtype=torch.bool, device=likely.device)
            self.counts = self._going.long() * 0
        self.counts = self.counts + self._going
        self._going = self._going & (likely >= self.threshold)
        return not is_last and bool(self._going.any())
