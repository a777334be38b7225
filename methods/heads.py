"""A drafter's head: from normed states to draft tokens, over the whole vocabulary or over some rows of it.

A trimmed head (VocabTrim, Goel et al. 2025; FR-Spec, Zhao et al. 2025) holds copies of the rows of likely tokens, so a
draft pass reads fewer bytes. The target still scores every token, and a token outside the trimmed vocabulary has draft
probability 0, so that acceptance over the full vocabulary stays exact.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from methods.vocab_trim.vocab_map import kept_ids
from specbench.decoding.sampling import Decoding
from specbench.decoding.target import Target, by_columns, weight_bytes


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

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Normed states [..., d] -> logits over the head's own rows."""
        if self.kept is None:
            return self.model.unembed(normed)
        return linear(normed, self.weight, self.bias)

    def choose(
        self, logits: torch.Tensor, decoding: Decoding, generator: torch.Generator | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [n, rows] -> token ids [n] of the target and, when sampling, their distribution over the rows."""
        rows, probs = decoding.select(logits, generator)
        return (rows if self.kept is None else self.kept[rows]), probs

    def spread(self, probs: list[torch.Tensor | None]) -> torch.Tensor | None:
        """What `choose` gave for each token of a draft, as probabilities [k, vocab_size]; None for a greedy draft."""
        if not probs or probs[0] is None:
            return None
        rows = torch.cat(probs)
        whole = rows.new_zeros(rows.shape[0], self.vocab_size)
        if self.kept is None:
            whole[:, : rows.shape[1]] = rows
        else:
            whole[:, self.kept] = rows
        return whole


def draft_head(pair, model: Target, vocab_map: str | None, vocab_size: int | None) -> DraftHead:
    """The head of `model` for drafting in `pair`, trimmed to the first `vocab_size` tokens of a map if one is given."""
    target_vocab = pair.target.get_output_embeddings().weight.shape[0]
    kept = None
    if vocab_map is not None:
        kept = torch.tensor(kept_ids(vocab_map, pair, vocab_size), device=model.device)
    return DraftHead(model, target_vocab, kept)


def confidence(logits: torch.Tensor) -> torch.Tensor:
    """Top-1 probability [] of logits [1, rows] at temperature 1, whatever the temperature of the draw."""
    return torch.softmax(logits.float(), dim=-1).max()


def unsure(logits: torch.Tensor, threshold: float) -> bool:
    """Whether drafting stops behind this token; a threshold of 0 never does, and never waits for the device."""
    return threshold > 0 and bool(confidence(logits) < threshold)
