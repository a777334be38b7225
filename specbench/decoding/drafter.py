"""The interface of a method, `Drafter`, and what it requires, `Needs`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from specbench.decoding.model.graphs import GraphRunner
from specbench.decoding.state import Draft

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from specbench.decoding.model.staged_model import StagedModel
    from specbench.decoding.slots import Slots
    from specbench.decoding.state import Batch, Prefill, SequenceState, Verified


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter requires, as data, so that a combination is refused before a weight is loaded.

    Attributes:
        draft_model: a draft model in the pair.
        part: a trained part in the pair's `parts`, by that name; with `draft_model` that part is the draft model, in
            place of the pair's own.
        training: what the part is trained with beside the pair, such as "head=markov".
        sampling: whether it can draft at temperature > 0.
        batching: whether it can serve more than one sequence.
        one_memory: whether all sequences share what it learns: with `memory: answer` it then serves one at a time.
        any_length: whether it can draft fewer tokens than its longest draft has.
        reference_answer: the target's own greedy answer to a prompt, which `Drafter.set_reference_answers` gets before
            anything is timed.
        text_alone: whether it needs only the tokens so far: it can then draft inside another engine.
        trims: whether its head can be trimmed (`vocab=trim`); `methods.common.heads.draft_head` then does so.
    """

    draft_model: bool = False
    part: str | None = None
    training: str = ""
    sampling: bool = True
    batching: bool = True
    one_memory: bool = False
    any_length: bool = True
    reference_answer: bool = False
    text_alone: bool = False
    trims: bool = False

    def around(self, inner: Needs) -> Needs:
        """What a drafter with these needs requires when it wraps one that needs `inner`."""
        return replace(
            inner,
            sampling=self.sampling and inner.sampling,
            batching=self.batching and inner.batching,
            any_length=self.any_length and inner.any_length,
            reference_answer=self.reference_answer or inner.reference_answer,
            text_alone=self.text_alone and inner.text_alone,
        )


class Drafter:
    """Base of every method: `Method(pair, **parameters)`. One instance serves many generations.

    It is written once, for a batch: one sequence is a batch of one. The base itself drafts nothing, which is
    autoregressive decoding.

    Attributes:
        needs: what it requires.
        taps: depths of the target whose hidden states the drafter gets, of the prompt and of every verification: i for
            the states in front of layer i (the number of layers: after the last one), `NORMED` after the final norm.
        siblings: the most tokens of a tree that are drawn after the same token; 1 for chains.
        deterministic: whether it drafts without chance at any temperature. Its answers are then those of autoregressive
            decoding with the same seed, token by token.
        max_draft_tokens: the longest path of a draft.
        max_nodes: the most nodes of a draft; 0: as `max_draft_tokens`, for chains.
        upkeep_bytes: bytes of weights that `commit` reads. They are in the next draft's `bytes_read`, or in the
            wrapper's if a wrapper drafts instead.
        extra_cores: cores that it computes on, or holds between its rounds, beside those of torch's threads. With any,
            no other arm runs in between.
    """

    needs = Needs()
    taps: tuple[int, ...] = ()
    siblings = 1
    deterministic: bool = False
    max_draft_tokens = 0
    max_nodes = 0
    upkeep_bytes: float = 0
    extra_cores: int = 0

    @classmethod
    def draws(cls, settings: Mapping[str, Any]) -> bool:
        """Whether a drafter with these settings draws its tokens when it samples: see `deterministic`."""
        return not cls.deterministic

    @staticmethod
    def draws_trees(settings: Mapping[str, Any]) -> bool:
        """Whether a drafter with these settings draws tokens of trees, as far as that is known without weights."""
        return False

    def set_reference_answers(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> None:
        """Receives the answers to the next prompts if `needs.reference_answer` is set. This is not timed.

        Args:
            prompts: token ids.
            answers: for each of them, the new token ids of the target's own greedy decoding.
        """

    def open(self, slots: Slots, target: StagedModel) -> None:
        """Registers the state of each sequence in `slots`. Called whenever buffers are allocated.

        Args:
            slots: makes the buffers, and moves them when sequences change their slots.
            target: the model that verifies.
        """

    def begin(self, slot: int, sequence: SequenceState, prefill: Prefill) -> None:
        """Starts a sequence: its prompt was prefilled, and its first new token is known and pending.

        Args:
            slot: its place in the buffers.
            sequence: prompt, first token and request.
            prefill: token ids, logits, and the hidden states of `taps`.
        """

    def draft_limit(self, slot: int) -> int:
        """How many draft tokens, at least one, a path of the sequence in a slot may have in the next round."""
        return self.max_draft_tokens

    def draft(self, batch: Batch) -> Draft:
        """Drafts tokens that follow the pending ones; an empty draft makes the round autoregressive.

        A path may exceed the `batch.limits` of its sequence; tokens beyond are not accepted.
        """
        return Draft(batch.tokens[: batch.size, :0])

    def overlaps_verification(self) -> bool:
        """Whether it overrides `on_hidden`: a captured verification is then split at its taps."""
        return type(self).on_hidden is not Drafter.on_hidden

    def captures_passes(self) -> bool:
        """Whether passes of its own model are captured, whether or not the target's are."""
        return any(isinstance(getattr(part, "runner", None), GraphRunner) for part in vars(self).values())

    def on_hidden(self, layer: int, hidden_states: torch.Tensor) -> None:
        """Called during a verification when each of `taps` is reached. It must not wait for the device.

        Args:
            layer: the tap.
            hidden_states: [b, 1 + k, d] of the pending token and the draft.
        """

    def commit(self, batch: Batch, verified: Verified) -> None:
        """Learns the outcome of the verification.

        Args:
            batch: as it was given to `draft`; its sequences already have their new tokens.
            verified: the outcome.
        """

    def end(self, slot: int) -> float:
        """Stops all work for the sequence in a slot, which is complete or abandoned.

        Returns:
            Bytes of weights read since its last draft for a draft that is no longer needed; its last round counts them.
        """
        return 0

    # -- numbers of its own

    @staticmethod
    def summarise(rounds: pd.DataFrame) -> dict[str, Any]:
        """Sums up the `Draft.stats` of some rounds, for `stats` in a run's summary.

        Args:
            rounds: rows of `metrics.dataframes.steps_frame`; `metrics.acceptance.stat` reads a number of theirs.

        Returns:
            Numbers by name. A number that could not be measured is None.
        """
        return {}

    @staticmethod
    def describe(stats: dict[str, Any]) -> list[str]:
        """Lines about such a summary, for the foot of a run's table."""
        return []

    # -- state that outlives an answer

    def forget(self) -> None:
        """Drops what was learnt from earlier answers."""

    def snapshot(self) -> Any:
        """What was learnt from earlier answers, for `restore`."""

    def restore(self, state: Any) -> None:
        """Restores the state that `snapshot` returned."""

    def close(self) -> None:
        """Releases what is kept between answers, such as processes. The drafter must not be used afterwards."""
