"""What a drafter hands over (`Draft`), is told (`Context`) and needs (`Needs`), and the `Drafter` itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specbench.decoding.sampling import Decoding
from specbench.decoding.target import Prefill, Target


@dataclass(frozen=True, slots=True)
class Resume:
    """Work on the target that the drafter has already done: its first `layer` layers, over the pending token and
    every draft token. hidden: [1, 1 + drafted, hidden_size]."""

    layer: int
    hidden: torch.Tensor


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens to verify.

    tokens: [k] int64. probs: [k, vocab] the distribution each token was drawn from, None when the tokens were chosen
    without chance (greedy, prompt lookup): acceptance then treats each as certain under the drafter.
    parents: None for a chain; for a tree [k], the index of each token's parent, -1 for the pending token; parents
    stand before their children. bytes_read: weights read to make this draft. exits: for a drafter that can leave its
    model at several depths, after how many layers it left for each token.
    """

    tokens: torch.Tensor
    probs: torch.Tensor | None = None
    parents: torch.Tensor | None = None
    resume: Resume | None = None
    bytes_read: int = 0
    exits: tuple[int, ...] = ()


@dataclass(slots=True)
class Context:
    """The state of one generation as a drafter sees it.

    tokens: [capacity] int64 on the device, of which the first `length` are known; the last known one is pending: no
    layer of the target has seen it. max_draft: the longest draft that can still be used.
    """

    tokens: torch.Tensor
    length: int
    max_draft: int
    decoding: Decoding
    generator: torch.Generator | None

    def known(self) -> torch.Tensor:
        """[length] every token so far, prompt included."""
        return self.tokens[: self.length]

    def pending(self) -> torch.Tensor:
        """[1, 1] the newest token."""
        return self.tokens[self.length - 1 : self.length].unsqueeze(0)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter requires, as data, so that a combination is refused before a weight is loaded.

    draft_model: a draft model in the pair. part: a trained part in the pair's `parts`, by that name; with `draft_model`
    that part is the draft model, in place of the pair's own.
    sampling: whether it can draft at temperature > 0. batching: whether it can serve more than one row.
    """

    draft_model: bool = False
    part: str | None = None
    sampling: bool = True
    batching: bool = False

    def draft_of(self, pair_cfg) -> str | None:
        """The draft model that a pair's configuration has for this drafter, None if it has none or none is needed."""
        if not self.draft_model:
            return None
        return pair_cfg.draft if self.part is None else pair_cfg.parts.get(self.part)


class Drafter:
    """Base of every method: `Method(pair, **parameters)`. One instance serves many generations; `begin` starts each.

    The base itself drafts nothing, which is plain autoregressive decoding.

    taps: layers of the target whose input states the prefill must hand over. tree_nodes: the most nodes that a tree
    of this drafter holds beyond its longest path (0: chains only).
    """

    needs = Needs()
    taps: tuple[int, ...] = ()
    tree_nodes = 0

    def begin(self, context: Context, prefill: Prefill, target: Target, cache) -> None:
        """A prompt was prefilled; its first new token is known and pending."""

    def draft(self, context: Context) -> Draft:
        """Up to `context.max_draft` tokens to follow the pending one; an empty draft means plain decoding."""
        return Draft(context.tokens[:0])

    def commit(self, context: Context, accepted: int) -> None:
        """`accepted` draft tokens and one token of the target joined the context, which is already up to date."""
