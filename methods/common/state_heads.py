"""Base of drafters with heads on the target's own states, which fill a static tree of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from methods.common.rank_trees import RankTrees, chosen_paths
from specbench.decoding.drafter import Drafter
from specbench.decoding.state import NORMED, Batch, Draft, Prefill, SequenceState, Verified
from specbench.models.pairs import Pair
from specbench.system.settings import Count

if TYPE_CHECKING:
    import torch

    from methods.common.heads import DraftHead
    from methods.common.rank_trees import Level, Path
    from specbench.decoding.model.staged_model import StagedModel
    from specbench.decoding.slots import Slots


class StateHeads(Drafter):
    """Keeps the state in front of each pending token, after the target's final norm, and fills trees from it.

    A subclass loads the heads (`load`), drafts tokens from a state (`fill`), and counts the bytes that it reads
    (`draft_bytes`).

    Not as published: with temperature the tree is verified by the target's own draws, which keeps its distribution; the
    authors' "typical acceptance" does not.

    Args:
        pair: with the target.
        weights: folder of the heads' checkpoint.
        nodes: of the tree, the most frequently right ones first; None: all that config.json names. Heads without a tree
            get the authors' of 63 nodes, the likeliest ranks first.

    Attributes:
        target: whose states are read.
        heads: what reads them; set by `load`.
        head: makes logits of their outputs if they have no output matrices; set by `load`.
        trees: that are filled.
        leaves_last: as in `RankTrees`.

    Raises:
        UserError: the heads cannot be read, do not fit the target, or their tree has too few nodes.
    """

    deterministic = True
    taps = (NORMED,)
    leaves_last: ClassVar[bool] = False
    heads: torch.nn.Module
    head: DraftHead

    def __init__(
        self,
        pair: Pair,
        weights: str,
        nodes: Count | None = None,
    ):
        self.target = pair.staged
        count, tree = self.load(pair, weights)
        self.trees = RankTrees(chosen_paths(tree, count, nodes), self.leaves_last, rows=self.head.rows)
        self.max_nodes, self.max_draft_tokens = self.trees.max_nodes, self.trees.depth

    def load(self, pair: Pair, weights: str) -> tuple[int, Sequence[Path] | None]:
        """Loads the heads; arguments as of the class.

        Returns:
            The number of heads, and the tree that their config.json names, or None.
        """
        raise NotImplementedError

    def fill(self, batch: Batch, states: torch.Tensor, levels: Sequence[Level]) -> torch.Tensor:
        """Returns the tokens of a draft; this function is captured, see `StagedModel.run_batch`.

        Args:
            batch: the running sequences.
            states: [b, d] in front of each pending token.
            levels: of the tree.

        Returns:
            [b, k]
        """
        raise NotImplementedError

    def draft_bytes(self, levels: int) -> float:
        """Bytes of weights that a draft of `levels` levels reads."""
        raise NotImplementedError

    def open(self, slots: Slots, target: StagedModel) -> None:
        """Makes room for the state that each sequence drafts from."""
        self._states = slots.tensor(target.hidden_size, dtype=target.dtype)

    def begin(self, slot: int, sequence: SequenceState, prefill: Prefill) -> None:
        """Notes the state of the prompt's last token."""
        self._states[slot] = prefill.hidden_states[NORMED][0, -1]

    def draft(self, batch: Batch) -> Draft:
        """Fills the tree."""
        tree, levels, nodes = self.trees.of(batch)

        def filled(batch: Batch, states: torch.Tensor) -> list[torch.Tensor]:
            return [self.fill(batch, states, levels)]

        key, states = ("draft", nodes, len(levels)), self._states[: batch.size]
        drafted = self.target.run_batch(batch, self.heads, key, filled, states)
        return Draft(*drafted, tree=tree, bytes_read=self.draft_bytes(len(levels)))

    def commit(self, batch: Batch, verified: Verified) -> None:
        """Notes the state of the last token that was accepted."""
        self._states[: batch.size] = verified.last(verified.hidden_states[NORMED])
