"""The interface of drafters: `Drafter`, its output (`Draft`), its input (`Context`), its requirements (`Needs`)."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specbench.values import WRAPPED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from omegaconf import DictConfig

    from specbench.decoding.batch import Rows
    from specbench.decoding.kv_cache import KVCache, RowCache
    from specbench.decoding.sampling import Decoding
    from specbench.decoding.target import Prefill, Target
    from specbench.decoding.trace import Beside


@dataclass(frozen=True, slots=True)
class Resume:
    """The target's first layers, which the drafter has already run over the pending token and every draft token.

    Attributes:
        layer: how many layers were run.
        hidden: [1, 1 + drafted, hidden_size] the states behind them; for a batch [b, 1 + k, hidden_size].
    """

    layer: int
    hidden: torch.Tensor


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens to verify; shapes are those of one sequence, with those of a batch of b sequences in brackets.

    Attributes:
        tokens: [k] ([b, k]) int64.
        probs: [k, vocab] ([b, k, vocab]) the distribution each token was drawn from; None when the tokens were chosen
            without chance (greedy, prompt lookup): acceptance then treats each as certain under the drafter.
        parents: None for a chain; for a tree [k], the index of each token's parent, -1 for the pending token. Parents
            stand before their children.
        resume: None unless the drafter has already run the target's first layers.
        bytes_read: bytes of weights read to make this draft.
        exits: for a drafter that can leave its model at several depths, the number of layers that each token went
            through: a tuple (a tensor [b, k]).
        counts: for a batch [b], how many of the k tokens each sequence has really drafted; None: all of them.
        beside: of a drafter that works during verification, how this draft came to be.
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
    """The state of one generation, as drafters get it.

    Attributes:
        tokens: [capacity] int64 on the device, of which the first `length` are known; the last known one is pending: no
            layer of the target has processed it.
        length: known tokens, the pending one included.
        max_draft: the longest draft that can still be used.
        decoding: how tokens are chosen.
        uniforms: [capacity, 1 + 2 * siblings] the numbers of `position_draws` by position; None when greedy.
        siblings: as in `Drafter`.
        seed: of the answer, for a drafter that draws elsewhere.
        following: the pending token on the host.
    """

    tokens: torch.Tensor
    length: int
    max_draft: int
    decoding: Decoding
    uniforms: torch.Tensor | None = None
    siblings: int = 1
    seed: int = 0
    following: int = -1

    def draws(self, offset: int, n: int = 1) -> torch.Tensor | None:
        """[n] numbers to draw n siblings with, `offset` positions behind the pending token; None when greedy."""
        if self.uniforms is None:
            return None
        return self.uniforms[self.length + offset, 1 + self.siblings :][:n]

    def known(self) -> torch.Tensor:
        """[length] every token so far, prompt included."""
        return self.tokens[: self.length]

    def pending(self) -> torch.Tensor:
        """[1, 1] the newest token."""
        return self.tokens[self.length - 1 : self.length].unsqueeze(0)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter requires, as data, so that a combination is refused before a weight is loaded.

    Attributes:
        draft_model: a draft model in the pair.
        part: a trained part in the pair's `parts`, by that name; with `draft_model` that part is the draft model, in
            place of the pair's own.
        sampling: whether it can draft at temperature > 0.
        batching: whether it can serve more than one sequence.
        continuation: the target's own greedy answer to a prompt, which `Drafter.foretell` is given before it is timed.
    """

    draft_model: bool = False
    part: str | None = None
    sampling: bool = True
    batching: bool = False
    continuation: bool = False

    def around(self, inner: Needs) -> Needs:
        """What a drafter with these needs requires when it wraps one that needs `inner`."""
        return replace(
            inner,
            sampling=self.sampling and inner.sampling,
            batching=self.batching and inner.batching,
            continuation=self.continuation or inner.continuation,
        )

    def draft_of(self, pair_cfg: DictConfig) -> str | None:
        """The draft model that a pair's configuration has for this drafter, None if it has none or none is needed."""
        if not self.draft_model:
            return None
        return pair_cfg.draft if self.part is None else pair_cfg.parts.get(self.part)


def needs_of(group: Mapping) -> Needs:
    """What the drafter of a configuration requires, together with the drafter that it wraps, if it does.

    Args:
        group: with `_target_`; `drafter` holds the configuration of the wrapped one.
    """
    own = pkgutil.resolve_name(group["_target_"]).needs
    return own.around(needs_of(group[WRAPPED])) if WRAPPED in group else own


class Drafter:
    """Base of every method: `Method(pair, **parameters)`. One instance serves many generations; `begin` starts each.

    The base itself drafts nothing, which is plain autoregressive decoding.

    Attributes:
        needs: what it requires.
        taps: layers of the target whose input states the prefill must hand over.
        siblings: the most tokens of a tree that were drawn by chance behind one and the same token; 1 for chains.
        certain: whether it drafts without chance at any temperature. Its answers are then those of autoregressive
            decoding with the same seed, token by token.
        tree_nodes: the most nodes that a tree of this drafter holds beyond its longest path (0: chains only).
        max_draft_tokens: the longest draft; a drafter that can batch must set it.
        launch_layer: for a drafter that works during verification, the number of layers whose states it is launched
            with, while the target goes on through the others; `draft` then collects the result. None for others.
        uninterrupted: whether it works, or holds cores, between its rounds: no other arm may then run in between.
    """

    needs = Needs()
    taps: tuple[int, ...] = ()
    siblings = 1
    certain: bool = False
    tree_nodes = 0
    max_draft_tokens = 0
    launch_layer: int | None = None
    uninterrupted: bool = False

    def foretell(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> None:
        """For a drafter with `needs.continuation`: the answers to the prompts that come next, outside of what is timed.

        Args:
            prompts: token ids.
            answers: to each of them the new token ids of the target's own greedy decoding.
        """

    def begin(self, context: Context, prefill: Prefill, target: Target, cache: KVCache) -> None:
        """Starts a generation: the prompt was prefilled, and its first new token is known and pending.

        Args:
            context: the state of the generation; the same object in every later call.
            prefill: the prompt's logits, and hidden states of the `taps`.
            target: the model that verifies.
            cache: the target's, which holds the prompt.
        """

    def draft(self, context: Context) -> Draft:
        """Drafts up to `context.max_draft` tokens to follow the pending one; none makes the round autoregressive."""
        return Draft(context.tokens[:0])

    def launch(self, context: Context, draft: Draft, states: torch.Tensor) -> None:
        """Starts work for the next draft, during the rest of the verification pass. It must not wait for that work.

        Args:
            context: the state of the generation, without what this verification will accept.
            draft: the draft that is being verified.
            states: [1 + k, d] of the pending token and the draft tokens at `launch_layer`.
        """

    def commit(self, context: Context, accepted: int) -> None:
        """Notes that `accepted` draft tokens and one of the target joined the context, which is already up to date."""

    def end(self) -> None:
        """Stops all work for the current answer, which is complete or was given up. Called at least once per answer."""

    def close(self) -> None:
        """Releases what is kept between answers, such as processes. The drafter must not be used afterwards."""

    # -- the same for many sequences at once, for drafters with `needs.batching`

    def open_rows(self, rows: int, capacity: int, target: Target, cache: RowCache) -> None:
        """Makes room for `rows` sequences of up to `capacity` tokens; cache: the target's."""

    def begin_row(self, row: int, prompt: torch.Tensor, prefill: Prefill, target: Target) -> None:
        """Starts the sequence in slot `row`, as `begin`; prompt: [1, n], without the pending token."""

    def draft_rows(self, rows: Rows) -> Draft:
        """Drafts for the running sequences, as `draft`; up to `rows.max_draft` tokens each."""
        return Draft(rows.tokens[: rows.known.shape[0], :0])

    def commit_rows(self, rows: Rows, accepted: torch.Tensor) -> None:
        """Notes that `accepted` [b] draft tokens and one token of the target were kept; `rows` is as before."""

    def move_rows(self, sources: list[int], destinations: list[int], reach: int) -> None:
        """Copies all that belongs to the slots `sources` to the slots `destinations`, all at once.

        Args:
            sources: slots to copy from.
            destinations: slots to copy to, as many.
            reach: a bound on the lengths of the sequences there.
        """
