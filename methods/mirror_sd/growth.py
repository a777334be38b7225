"""Drafts that grow together, a pass at a time: what each of them sees, and what was written behind it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Written:
    """What one pass adds to m continuations. tokens, rows: [m, v] what follows each token that was fed, as ids and as
    rows of the head; logits: [m, v, head rows] that they were chosen from. taken: [m] how many of the v stand; None
    without streams, where each takes the one.
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
    """m continuations that grow together behind `base` positions that they all see; or one that is a plain sequence:
    then `seen` is None, and so are base, offsets and columns of no use.

    newest: [m] the token of each that no pass has seen, `offsets` [m] positions behind base. guesses: [m, w] what may
    follow it. seen: [m, c] which of the columns from base on each sees, `columns` [c] their offsets. ahead: [n] tokens
    at the end of `columns` that the next pass has to feed first.

    written: pass by pass. counts: [m] tokens that each has. passes: so far.
    """

    base: int
    newest: torch.Tensor
    offsets: torch.Tensor
    guesses: torch.Tensor
    seen: torch.Tensor | None
    columns: torch.Tensor
    ahead: torch.Tensor
    written: list[Written]
    counts: torch.Tensor
    passes: int = 0

    def of(self, branch: int) -> list[Written]:
        """What was written behind one of them."""
        one = slice(branch, branch + 1)
        return [w.of(one) for w in self.written]


def joined(written: list[Written]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a single continuation: its tokens [n], their rows [n], and the logits [n, head rows] of each."""
    counts = [1] * len(written)
    if written[0].taken is not None:
        counts = torch.cat([w.taken for w in written]).tolist()
    parts = [(w.tokens[0, :n], w.rows[0, :n], w.logits[0, :n]) for w, n in zip(written, counts)]
    return tuple(torch.cat(each) for each in zip(*parts))
