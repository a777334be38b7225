"""A drafter around another one: what it does not do itself, the inner drafter does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specbench.decoding.drafter import Drafter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

    from specbench.decoding.model.staged_model import StagedModel
    from specbench.decoding.slots import Slots
    from specbench.decoding.state import Batch, Draft, Prefill, SequenceState, Verified


class WrappedDrafter(Drafter):
    """Base of a drafter that wraps another one: what is asked of a `Drafter` is passed on to the inner drafter.

    All but `draft_limit`, which is that of its own `max_draft_tokens`.

    A subclass overrides what it does itself, and calls `super()` where the inner drafter takes part. `summarise` and
    `describe` belong to classes: a run asks those of the outer and of the inner class, see `metrics.method_stats`.

    Args:
        inner: the drafter that is wrapped; see `drafter.make_drafter`.

    Attributes:
        inner: as given. The other attributes of a `Drafter` are copied from it; a subclass sets those that differ.
    """

    def __init__(self, inner: Drafter):
        self.inner = inner
        self.needs = self.needs.around(inner.needs)
        self.taps, self.siblings, self.deterministic = inner.taps, inner.siblings, inner.deterministic
        self.max_draft_tokens, self.max_nodes = inner.max_draft_tokens, inner.max_nodes
        self.exclusive, self.extra_cores = inner.exclusive, inner.extra_cores

    def set_reference_answers(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> None:
        """As the inner drafter."""
        self.inner.set_reference_answers(prompts, answers)

    def open(self, slots: Slots, target: StagedModel) -> None:
        """As the inner drafter."""
        self.inner.open(slots, target)

    def begin(self, slot: int, sequence: SequenceState, prefill: Prefill) -> None:
        """As the inner drafter."""
        self.inner.begin(slot, sequence, prefill)

    def draft(self, batch: Batch) -> Draft:
        """As the inner drafter."""
        return self.inner.draft(batch)

    @property
    def overlaps_verification(self) -> bool:
        """As the inner drafter."""
        return self.inner.overlaps_verification

    def on_hidden(self, layer: int, hidden_states: torch.Tensor) -> None:
        """As the inner drafter."""
        self.inner.on_hidden(layer, hidden_states)

    def commit(self, batch: Batch, verified: Verified) -> None:
        """As the inner drafter."""
        self.inner.commit(batch, verified)

    def end(self, slot: int) -> None:
        """As the inner drafter."""
        self.inner.end(slot)

    def forget(self) -> None:
        """As the inner drafter."""
        self.inner.forget()

    def snapshot(self) -> Any:
        """As the inner drafter."""
        return self.inner.snapshot()

    def restore(self, state: Any) -> None:
        """As the inner drafter."""
        self.inner.restore(state)

    def export(self, folder: Path) -> None:
        """As the inner drafter."""
        self.inner.export(folder)

    def close(self) -> None:
        """As the inner drafter."""
        self.inner.close()
