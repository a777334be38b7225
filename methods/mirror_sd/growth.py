"""Drafts that grow together, a pass at a time: their visibility, and what was written after each."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Written:
    """What one pass adds to m continuations.

    Attributes:
        tokens: [m, v] what follows each token that was fed, as ids.
        rows: [m, v] the same as rows of the head.
        logits: [m, v, head rows] that they were chosen from.
        taken: [m] how many of the v are kept; None without streams: all of them.
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    logits: torch.Tensor
    taken: torch.Tensor | None

    def of(self, which: slice) -> Written:
        """The same of some of the continuations."""
        taken = None if self.taken is None else self.taken[which]
        return Written(self.tokens[which], self.rows[which], self.logits[which], taken)


@dataclass(slots=True)
class Growth:
    """m continuations that grow together after `base` positions that are visible to all.

    One that is a plain sequence has no `seen`; its base, offsets and columns are not used.

    Attributes:
        base: positions before them.
        last_tokens: [m] the token of each that was not fed yet.
        offsets: [m] its position after base.
        guesses: [m, w] what may follow it.
        seen: [m, c] which of the columns from base on each attends to.
        columns: [c] the offsets of these columns.
        ahead: [n] tokens at the end of `columns` that the next pass has to feed first.
        written: what was added, pass by pass.
        counts: [m] tokens that each has.
        passes: so far.
    """

    base: int
    last_tokens: torch.Tensor
    offsets: torch.Tensor
    guesses: torch.Tensor
    seen: torch.Tensor | None
    columns: torch.Tensor
    ahead: torch.Tensor
    written: list[Written]
    counts: torch.Tensor
    passes: int = 0

    def of(self, branch: int) -> list[Written]:
        """What was written after one continuation."""
        one = slice(branch, branch + 1)
        return [w.of(one) for w in self.written]


def joined(written: list[Written]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a single continuation: its tokens [n], their rows [n], and the logits [n, head rows] of each."""
    taken = [w.taken for w in written if w.taken is not None]
    counts = torch.cat(taken).tolist() if taken else [1] * len(written)
    parts = [(w.tokens[0, :n], w.rows[0, :n], w.logits[0, :n]) for w, n in zip(written, counts)]
    tokens, rows, logits = (torch.cat(each) for each in zip(*parts))
    return tokens, rows, logits
