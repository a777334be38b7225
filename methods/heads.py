"""A drafter's head: from normed states to draft tokens, over the whole vocabulary or over some rows of it.

A trimmed head (VocabTrim, Goel et al. 2025; FR-Spec, Zhao et al. 2025) holds copies of the rows of likely tokens, so a
draft pass reads fewer bytes. The target still scores every token, and a token outside the trimmed vocabulary has draft
probability 0, so that acceptance over the full vocabulary stays exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

from methods.vocab_trim.vocab_map import kept_ids
from specbench.decoding.layers import by_columns, weight_bytes

if TYPE_CHECKING:
    from specbench.decoding.sampling import Decoding
    from specbench.decoding.target import Target


class DraftHead:
    """The head of `model` as a drafter uses it.

    vocab_size: ids that the target has, the width of the probabilities handed to verification. kept: [k] token ids in
    ascending order whose rows are copied; None for the head as it is. bytes: weights that one use of it reads, the
    norm in front of it included.
    """

    def __init__(self, model: Target, vocab_size: int, kept: torch.Tensor | None = None):
        self.model, self.vocab_size, self.kept = model, vocab_size, kept
        if kept is None:
            self.bytes = model.pass_bytes(0, 0)
            return
        head = model.lm_head
        self.weight = by_columns(head.weight[kept])  # a copy: the rows of a tied embedding stay whole
        self.bias = None if head.bias is None else head.bias[kept].clone()
        parts = [self.weight] if self.bias is None else [self.weight, self.bias]
        self.bytes = weight_bytes(model.norm) + sum(p.nbytes for p in parts)

    @property
    def rows(self) -> int:
        """How many tokens it scores."""
        return self.model.vocab_size if self.kept is None else self.kept.shape[0]

    def ids(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the head, of any shape -> token ids of the target."""
        return rows if self.kept is None else self.kept[rows]

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Normed states [..., d] -> logits over the head's own rows."""
        if self.kept is None:
            return self.model.unembed(normed)
        return linear(normed, self.weight, self.bias)

    def draw(
        self,
        logits: torch.Tensor,
        decoding: Decoding,
        generator: torch.Generator | None = None,
        uniforms: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [n, rows] -> chosen rows [n] and, when sampling, the distribution [n, rows] they were drawn from.
        generator, uniforms: what to draw with, as in `Decoding.select`.
        """
        rows, probs = decoding.select(logits, generator, uniforms)
        if (
            uniforms is not None
        ):  # a row is looked up before anybody asks whether it was drawn; its NaN are in `probs`
            rows = rows.clamp(min=0)
        return rows, probs

    def choose(
        self,
        logits: torch.Tensor,
        decoding: Decoding,
        generator: torch.Generator | None = None,
        uniforms: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `draw`, with token ids [n] of the target in place of rows."""
        rows, probs = self.draw(logits, decoding, generator, uniforms)
        return self.ids(rows), probs

    def spread(self, probs: list[torch.Tensor | None]) -> torch.Tensor | None:
        """What `choose` gave for each of the k tokens of a draft, [n, rows] each, as probabilities over the target's
        vocabulary: [k, vocab_size] for one sequence (n = 1); None for a greedy draft.
        """
        return self._spread(torch.cat(probs)) if probs and probs[0] is not None else None

    def spread_rows(self, probs: list[torch.Tensor | None]) -> torch.Tensor | None:
        """The same for the n sequences of a batch: [n, k, vocab_size]."""
        return self._spread(torch.stack(probs, dim=1)) if probs and probs[0] is not None else None

    def _spread(self, rows: torch.Tensor) -> torch.Tensor:
        whole = rows.new_zeros(*rows.shape[:-1], self.vocab_size)
        if self.kept is None:
            whole[..., : rows.shape[-1]] = rows
        else:
            whole[..., self.kept] = rows
        return whole


def draft_head(pair, model: Target, vocab_map: str | None, vocab_size: int | None) -> DraftHead:
    """The head of `model` for drafting in `pair`, trimmed to the first `vocab_size` tokens of a map if one is given."""
    kept = None
    if vocab_map is not None:
        kept = torch.tensor(kept_ids(vocab_map, pair, vocab_size), device=model.device)
    return DraftHead(model, target_ids(pair), kept)


def target_ids(pair) -> int:
    """Ids that the target of a pair can say, padding included."""
    return pair.target.get_output_embeddings().weight.shape[0]


def confidence(logits: torch.Tensor) -> torch.Tensor:
    """Top-1 probability [n] of logits [n, rows] at temperature 1, whatever the temperature of the draw."""
    return torch.softmax(logits.float(), dim=-1).amax(-1)


def unsure(logits: torch.Tensor, threshold: float) -> bool:
    """Whether drafting stops behind this token; a threshold of 0 never does, and never waits for the device."""
    return threshold > 0 and bool(confidence(logits) < threshold)


class Going:
    """Which sequences of a batch still draft: the batch goes on until the last one is unsure.

    threshold: as in `unsure`; counts: [n] tokens that each has drafted, its first unsure one the last; None when the
    threshold is 0, which never stops anyone and never waits for the device.
    """

    def __init__(self, threshold: float):
        self.threshold = threshold
        self.counts: torch.Tensor | None = None
        self._going: torch.Tensor | bool = True

    def drafted(self, logits: torch.Tensor) -> bool:
        """A token was drafted from logits [n, rows]; returns whether any sequence goes on."""
        if self.threshold <= 0:
            return True
        if self.counts is None:
            self._going = torch.ones(logits.shape[0], dtype=torch.bool, device=logits.device)
            self.counts = self._going.long() * 0
        self.counts = self.counts + self._going
        self._going = self._going & (confidence(logits) >= self.threshold)
        return bool(self._going.any())
