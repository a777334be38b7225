"""What a drafter hands over (`Draft`), is told (`Context`) and needs (`Needs`), and the `Drafter` itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from specbench.decoding.batch import Rows
    from specbench.decoding.kv_cache import RowCache
    from specbench.decoding.sampling import Decoding
    from specbench.decoding.target import Prefill, Target
    from specbench.decoding.trace import Beside


@dataclass(frozen=True, slots=True)
class Resume:
    """Work on the target that the drafter has already done: its first `layer` layers, over the pending token and
    every draft token. hidden: [1, 1 + drafted, hidden_size].
    """

    layer: int
    hidden: torch.Tensor


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens to verify.

    tokens: [k] int64. probs: [k, vocab] the distribution each token was drawn from, None when the tokens were chosen
    without chance (greedy, prompt lookup): acceptance then treats each as certain under the drafter.
    parents: None for a chain; for a tree [k], the index of each token's parent, -1 for the pending token; parents
    stand before their children. bytes_read: weights read to make this draft. exits: for a drafter that can leave its
    model at several depths, after how many layers it left for each token. beside: of a drafter that works beside the
    target, how this draft came to be.

    For a batch of b sequences tokens are [b, k], probs [b, k, vocab], hidden states [b, 1 + k, hidden_size], exits
    [b, k], and counts [b] says how many of the k tokens each sequence has really drafted; None: all of them.
    """

    tokens: torch.Tensor
    probs: torch.Tensor | None = None
    parents: torch.Tensor | None = None
    resume: Resume | None = None
    bytes_read: int = 0
    exits: tuple[int, ...] | torch.Tensor = ()
    counts: torch.Tensor | None = None
    beside: Beside | None = None


@dataclass(slots=True)
class Context:
    """The state of one generation as a drafter sees it.

    tokens: [capacity] int64 on the device, of which the first `length` are known; the last known one is pending: no
    layer of the target has seen it; `following` is that token as the host knows it. max_draft: the longest draft that
    can still be used.
    """

    tokens: torch.Tensor
    length: int
    max_draft: int
    decoding: Decoding
    generator: torch.Generator | None
    following: int = -1

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
    of this drafter holds beyond its longest path (0: chains only). max_draft_tokens: the longest draft, which a drafter
    that can batch must know. launch_layer: for a drafter that works beside the target, the number of layers whose
    states it is launched with, while the target goes on through the others; `draft` then collects what came of it.
    """

    needs = Needs()
    taps: tuple[int, ...] = ()
    tree_nodes = 0
    max_draft_tokens = 0
    launch_layer: int | None = None

    def begin(self, context: Context, prefill: Prefill, target: Target, cache) -> None:
        """A prompt was prefilled; its first new token is known and pending."""

    def draft(self, context: Context) -> Draft:
        """Up to `context.max_draft` tokens to follow the pending one; an empty draft means plain decoding."""
        return Draft(context.tokens[:0])

    def launch(self, context: Context, draft: Draft, states: torch.Tensor) -> None:
        """The verification of `draft` has reached `launch_layer`; states: [1 + k, d] of the pending token and the draft
        tokens there. Work for the next draft can start now, beside the rest of the pass; this must not wait for it.
        """

    def commit(self, context: Context, accepted: int) -> None:
        """`accepted` draft tokens and one token of the target joined the context, which is already up to date."""

    def end(self) -> None:
        """The answer is complete, or was given up: nothing may go on working for it. Called at least once."""

    def close(self) -> None:
        """Gives back what outlives an answer, such as processes; the drafter is of no use afterwards."""

    # -- the same for many sequences at once, for drafters with `needs.batching`

    def open_rows(self, rows: int, capacity: int, target: Target, cache: RowCache) -> None:
        """From now on there are `rows` places for sequences of up to `capacity` tokens; cache: the target's."""

    def begin_row(self, row: int, prompt: torch.Tensor, prefill: Prefill, target: Target) -> None:
        """As `begin`, for the sequence that takes the place `row`; prompt: [1, n], without the pending token."""

    def draft_rows(self, rows: Rows) -> Draft:
        """As `draft`, for the sequences in the first places; up to `rows.max_draft` tokens each."""
        return Draft(rows.tokens[: rows.known.shape[0], :0])

    def commit_rows(self, rows: Rows, accepted: torch.Tensor) -> None:
        """`accepted` [b] draft tokens of each of them and one token of the target were kept; `rows` is as before."""

    def move_rows(self, sources: list[int], destinations: list[int], reach: int) -> None:
        """What belongs to the places `sources` is copied to the places `destinations`, all at once. reach: a bound on
        the lengths of the sequences there.
        """
