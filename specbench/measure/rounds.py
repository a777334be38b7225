"""Metrics of draft-verify rounds that need no baseline: acceptance, bytes read, occupancy of a batch.

Every function takes rows of `frames.steps_frame` of one arm and is pure. A number that could not be measured is None.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

# What a method that decodes one sequence at a time has none of.
BATCHING = ("occupancy", "alignment_share", "align_seconds")


def acceptance_length(rounds: pd.DataFrame) -> float | None:
    """Tokens emitted by draft-verify rounds per target pass of theirs, bonus token included, prefill not."""
    return ratio(rounds["emitted"].sum(), len(rounds))


def acceptance_rate(rounds: pd.DataFrame) -> float | None:
    """Accepted / drafted tokens; None for a method that never drafted."""
    return ratio(rounds["accepted"].sum(), rounds["drafted"].sum())


def acceptance_by_position(rounds: pd.DataFrame) -> dict[str, list[float | None]]:
    """Acceptance at each draft position, counted along the longest path of a tree.

    unconditional: of the rounds that drafted so far, the share that accepted this position. conditional: the
    same among the rounds in which it was judged, that is, in which all before it was accepted and no stop
    token was.
    """
    depth, accepted, emitted = (rounds[name].to_numpy() for name in ("depth", "accepted", "emitted"))
    stopped = emitted == accepted  # the answer ended inside the draft: there was no token of the target's own
    unconditional, conditional = [], []
    for position in range(depth.max(initial=0)):
        drafted = depth > position
        judged = drafted & (accepted >= position) & ~(stopped & (accepted == position))
        kept = int((accepted > position).sum())
        unconditional.append(ratio(kept, drafted.sum()))
        conditional.append(ratio(kept, judged.sum()))
    return {"acceptance_by_position": unconditional, "acceptance_by_position_conditional": conditional}


def batching(method: pd.DataFrame, rounds: pd.DataFrame, batch_size: int) -> dict:
    """How well a batch was used; rounds: one row per sequence and round, each with one part in `rows` of it.

    - occupancy: sequences that ran / slots that there were.
    - alignment_share: of all seconds, those spent on alignment in memory.
    """
    whole = (1 / rounds["rows"]).sum()
    return {
        "occupancy": ratio(len(rounds), whole * batch_size),
        "alignment_share": ratio(rounds["align_seconds"].sum(), method["seconds"].sum()),
        "align_seconds": total(rounds["align_seconds"]),
    }


def mbsu(rounds: pd.DataFrame, target_pass_bytes: int) -> float | None:
    """Memory-bound speedup: tokens emitted x bytes of one target pass / bytes of weights really read.

    What the speedup would be if time were nothing but reading weights (Goel et al. 2024, arXiv 2403.00858).
    For a draft length gamma and a draft model of c times the target's bytes it is acceptance_length / (1 + c
    * gamma).
    """
    # The sequences of a batch share what a pass reads.
    read = ((rounds["draft_bytes"] + rounds["target_bytes"]) / rounds["rows"]).sum()
    return ratio(int(rounds["emitted"].sum()) * target_pass_bytes, read)


def ratio(numerator: float, denominator: float) -> float | None:
    """A quotient; None when there is nothing to divide by."""
    return float(numerator / denominator) if denominator > 0 else None


def mean(column: pd.Series) -> float | None:
    """Mean of a column; None when there is nothing."""
    return float(column.mean()) if len(column) else None


def total(column: pd.Series) -> float | int | None:
    """Sum of a column; None when there is nothing to add, or a part of it is unknown."""
    return column.sum(skipna=False).item() if len(column) and column.notna().all() else None
