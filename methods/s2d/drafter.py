"""S2D's drafter: a sorted draft model that leaves, token by token, at the shallowest exit that is confident enough.

Every exit (the first k layers) shares the final norm and the head, and was trained to be a draft model of its own
(Kavehzadeh et al. 2024). A token that left early has no keys and values in the deeper layers; they are computed when a
later token goes that deep, from the states with which the token left. Those states are stored by absolute position, so
a roll-back only shortens the caches: entries beyond their length are written anew before they are read.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from methods.common.heads import confidence
from methods.sps import SpeculativeSampling
from specbench.decoding.device import on_device
from specbench.decoding.drafter import Needs
from specbench.decoding.kv_cache import ForwardContext
from specbench.measure.metrics.acceptance import stat
from specbench.models.pairs import Pair
from specbench.system.errors import UserError
from specbench.system.settings import Count, Probability

if TYPE_CHECKING:
    import pandas as pd

    from specbench.decoding.model.staged_model import StagedModel
    from specbench.decoding.slots import Slots
    from specbench.decoding.state import Batch, Draft, Prefill, SequenceState, Verified


class SortedDraft(SpeculativeSampling):
    """S2D; the draft model is the pair's part `s2d`, whose config.json names its `exits`.

    Not as in the paper, whose code follows the heuristic schedule of transformers' assisted generation: drafts of 5
    tokens, 2 more after one that was accepted completely and else 1 less. Here the draft length is constant. When
    sampling, the authors draft the likeliest token and verify it as if it were drawn from the exit's distribution,
    which does not keep the target's; here tokens are drawn from the distribution that they are verified with.

    Args:
        pair: with a draft model.
        exits: those to use; None for all.
        only: one of these exits alone, 1 for the first: the fixed-exit draft with which the paper compares.
        thresholds: for each exit but the last, the top-1 probability (temperature 1) above which a token leaves there;
            the last exit takes every token. None: 0.5 everywhere.
        max_draft_tokens: as in `SpeculativeSampling`.
        confidence_threshold: as in `SpeculativeSampling`.

    Raises:
        UserError: the draft model does not have these exits, or the thresholds do not fit them.
    """

    needs = Needs(draft_model=True, part="s2d", trims=True)

    def __init__(
        self,
        pair: Pair,
        exits: list[Count] | None = None,
        only: Count | None = None,
        thresholds: list[Probability] | None = None,
        max_draft_tokens: Count = 5,
        confidence_threshold: Probability = 0.0,
    ):
        super().__init__(pair, max_draft_tokens, confidence_threshold)
        trained = getattr(self.model.config, "exits", None)
        if trained and pair.draft_expansion is not None:
            trained = [pair.draft_expansion.layers(exit) for exit in trained]
        self.exits = choose_exits(exits, only, trained)
        if not 1 <= self.exits[0] <= self.exits[-1] <= len(self.model.layers):
            raise UserError(
                f"exits must lie between 1 and the {len(self.model.layers)} layers of the draft model"
            )
        self.thresholds = choose_thresholds(thresholds, len(self.exits))
        self.layers = self.exits[-1]

    def open(self, slots: Slots, target: StagedModel) -> None:
        """Allocates the draft model's cache, and room for the states of tokens at the exits."""
        super().open(slots, target)
        inner, width = self.exits[:-1], self.model.hidden_size
        self._exit_buffers = [slots.tensor(width, dtype=self.model.dtype, by_token=True) for _ in inner]
        # For each exit but the last, how many tokens of each sequence went deeper.
        self._deeper = [slots.values(int) for _ in inner]

    def begin(self, slot: int, sequence: SequenceState, prefill: Prefill) -> None:
        """Prefills the draft model with the prompt, exit by exit."""
        hidden, start, n = self.model.embed(prefill.ids), 0, prefill.ids.shape[1]
        cache = self._layout.prefill_view(slot, n)
        for i, end in enumerate(self.exits):
            hidden, start = self.model.run_layers(hidden, cache, 0, start, end), end
            if i < len(self._deeper):
                self._exit_buffers[i][slot, :n] = hidden[0]
                self._deeper[i][slot] = n
        self._fed[slot] = n

    def commit(self, batch: Batch, verified: Verified) -> None:
        """Drops the tokens that were not accepted from what the deeper layers hold."""
        super().commit(batch, verified)
        for deeper in self._deeper:
            for slot, (length, count) in enumerate(zip(batch.lengths, verified.counts)):
                deeper[slot] = min(deeper[slot], length + count)

    @property
    def looks(self) -> bool:
        """Whether the host checks a draft, as at each exit but the last."""
        return len(self.exits) > 1 or self.confidence_threshold > 0

    def draft(self, batch: Batch) -> Draft:
        """As without exits; the stats hold the exit of each token."""
        draft = super().draft(batch)
        if not self.looks:
            draft.stats = {"exits": [[self.layers] * draft.tokens.shape[1]] * batch.size}
        return draft

    def _pass_bytes(self, tokens: int, lo: int = 0, end: int | None = None) -> float:
        """Bytes of weights that a pass from layer `lo` to an exit reads, with its head; None: to the last exit."""
        end = self.layers if end is None else end
        return self.model.pass_bytes(lo, end, head=False, tokens=tokens) + self.head.bytes

    def _next(self, batch: Batch, ids: torch.Tensor, offset: int) -> tuple[torch.Tensor, Any, float]:
        """One pass; each sequence takes its first exit that is sure enough, and the batch runs to the deepest one."""
        model, cache, (b, n) = self.model, self._layout.cache, ids.shape
        # Tokens given to the model, these included.
        fed = [length - 1 + offset + n for length in batch.lengths]
        ctx, hidden, lo, read = self._layout.place(batch, n, offset), model.embed(ids), 0, 0.0
        deciding: torch.Tensor | None = None
        for i, (end, threshold) in enumerate(zip(self.exits, self.thresholds)):
            read += self._pass_bytes(b * hidden.shape[1], lo, end)
            hidden = model.run_layers(hidden, cache, ctx, lo, end)
            logits = self.head.logits(model.norm(last_tokens(hidden, fed)))
            if deciding is None:
                chosen, layers = logits, torch.full((b,), end, device=ids.device)
            else:
                chosen = torch.where(deciding.unsqueeze(1), logits, chosen)
                layers = layers.masked_fill(deciding, end)
            if i == len(self._deeper):
                break
            self._keep(i, ctx, hidden)
            unsure = confidence(logits) <= threshold
            deciding = unsure if deciding is None else deciding & unsure
            if not bool(deciding.any()):
                break
            # Every sequence is fed as many tokens as the one that lacks most: the others compute identical keys and
            # values again, and what is written after a short one's end is overwritten before it is read.
            deeper = self._deeper[i]
            width = max(length - processed for length, processed in zip(fed, deeper))
            deeper[:b] = fed
            ctx, lo = self._newest_context(fed, width), end
            hidden = self._exit_states(i, ctx, b)
        return chosen, layers, read

    def _stats(self, passes: list[Any]) -> dict[str, Any]:
        """`exits`: the layers that each draft token went through."""
        return {"exits": torch.stack(passes, dim=1)}

    @staticmethod
    def summarise(rounds: pd.DataFrame) -> dict[str, Any]:
        """`exit_shares`: share of the draft tokens by the layers after which they left the draft model."""
        drafted = [
            exits[:n] for exits, n in zip(stat(rounds, "exits"), rounds["drafted"]) if exits is not None
        ]
        counts = Counter(layers for exits in drafted for layers in exits)
        return {
            "exit_shares": {str(layers): n / counts.total() for layers, n in sorted(counts.items())} or None
        }

    @staticmethod
    def describe(stats: dict[str, Any]) -> list[str]:
        """The exit shares, if there is more than one exit."""
        shares = stats.get("exit_shares") or {}
        exits = ", ".join(f"{layers} layers {share:.0%}" for layers, share in shares.items())
        return [f"draft tokens left the draft model after: {exits}"] if len(shares) > 1 else []

    def _newest_context(self, fed: list[int], width: int) -> ForwardContext:
        """The pass of the last `width` of the tokens that the model was given."""
        starts = [max(length - width, 0) for length in fed]
        if min(fed) == max(fed):
            return ForwardContext.consecutive(starts[0], width)
        return self._layout.place_at(on_device(starts, self.model.device), width, max(starts) + width)

    def _keep(self, i: int, ctx: ForwardContext, hidden: torch.Tensor) -> None:
        """Keeps the states [b, n, d] of the tokens of a pass at exit i."""
        if ctx.start is not None:
            self._exit_buffers[i][: hidden.shape[0], ctx.start : ctx.kv_len] = hidden
        else:
            self._exit_buffers[i].flatten(0, 1).index_copy_(0, ctx.write_index, hidden.flatten(0, 1))  # type: ignore[arg-type] # no start, so a tensor

    def _exit_states(self, i: int, ctx: ForwardContext, b: int) -> torch.Tensor:
        """The states [b, n, d] of the tokens of a pass at exit i."""
        if ctx.start is not None:
            return self._exit_buffers[i][:b, ctx.start : ctx.kv_len]
        states = self._exit_buffers[i].flatten(0, 1).index_select(0, ctx.write_index)  # type: ignore[arg-type] # as in `_keep`
        return states.view(b, -1, states.shape[-1])


def last_tokens(hidden: torch.Tensor, fed: list[int]) -> torch.Tensor:
    """The state [b, d] of the last token of each sequence that was fed `fed` tokens, of which hidden [b, n, d] has n.

    A sequence of fewer tokens begins with its first one; states after its end are not used.
    """
    n = hidden.shape[1]
    if min(fed) >= n:
        return hidden[:, -1]
    last = on_device([min(n, length) - 1 for length in fed], hidden.device)
    return hidden[torch.arange(len(fed), device=hidden.device), last]


def choose_exits(requested: list[int] | None, only: int | None, trained: list[int] | None) -> list[int]:
    """The exits to use, ascending. Raises UserError for one that the draft model was not trained with."""
    requested, trained = requested or [], trained or []
    if not requested and not trained:
        raise UserError(
            "the config.json of the pair's part 's2d' names no `exits`: set exits, if it is sorted"
        )
    if unknown := sorted(set(requested) - set(trained or requested)):
        raise UserError(f"the sorted draft has no exit {unknown[0]}: it was trained with {sorted(trained)}")
    exits = sorted(set(requested or trained))
    if only is None:
        return exits
    if not 1 <= only <= len(exits):
        raise UserError(f"only must lie between 1 and {len(exits)}, the number of exits, not {only}")
    return [exits[only - 1]]


def choose_thresholds(requested: list[float] | None, exits: int) -> list[float]:
    """One threshold per exit, the last without effect. None: 0.5 everywhere, the authors' released setting."""
    limits = [0.5] * exits if requested is None else list(requested)
    if len(limits) == exits - 1:
        limits.append(0.0)
    if len(limits) != exits:
        raise UserError(f"{exits} exits take {exits} thresholds (the last has no effect), not {len(limits)}")
    return limits
