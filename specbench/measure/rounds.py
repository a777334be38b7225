"""Metrics of draft-verify rounds that need no baseline: acceptance, bytes read, overlap, occupancy of a batch.

Every function takes rows of `frames.steps_frame` of one arm and is pure. A number that could not be measured is None.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

# What a method that decodes one sequence at a time has none of.
BATCHING = ("occupancy", "alignment_share", "group_rate", "align_seconds")


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


def exit_shares(rounds: pd.DataFrame) -> dict[str, float] | None:
    """Share of the draft tokens that left the draft model after so many layers; None for a single depth."""
    counts = rounds["exits"].explode().value_counts()
    return {str(layers): float(n / counts.sum()) for layers, n in counts.sort_index().items()} or None


def overlap(rounds: pd.DataFrame) -> dict | None:
    """What drafting during verification gains; None for a method that does not. Seconds are means per round.

    - fall_back_rate: of the decisions that were looked up, the share without a prepared branch; by_accepted: the same
      by how many draft tokens had been accepted.
    - hidden_share: 1 - what the target waited for a draft / what a draft takes that is begun after the decision (after
      a miss), as a serial method begins all of them; work on branches that were not used does not count. None without
      a miss.
    - model_seconds: the latency model of Mirror-SD (Bhendawade et al. 2025, eq. 10) with the terms that it lacks,
      max(exit, draft before it) + max(rest of the pass, draft during it) + handover + draft after the decision (the
      whole of it after a miss, the rest of it after a hit) + the rest of the round; round_seconds: as measured.
    """
    launched = rounds[rounds["exit_seconds"].notna()]
    if launched.empty:
        return None
    before = rounds.groupby(["question_id", "turn", "repeat"], sort=False)["accepted"].shift()
    looked = rounds["hit"].notna()
    missed = rounds.loc[looked, "hit"].eq(False)
    by_accepted = missed.groupby(before[looked].astype(int)).mean()
    kinds = rounds[looked]
    after_hit, after_miss = (mean(kinds.loc[missed == kind, "after_seconds"]) for kind in (False, True))
    waited = mean(kinds["draft_seconds"])
    fall_back = mean(missed.astype(float))
    exit_seconds = mean(launched["exit_seconds"])
    early, beside = mean(kinds["early_seconds"]), mean(kinds["beside_seconds"])
    rest = mean(launched["verify_seconds"] - launched["exit_seconds"])
    handover, other = mean(kinds["handover_seconds"]), mean(kinds["other_seconds"])
    parts = (exit_seconds, early, beside, rest, handover, other, fall_back)
    known = [part for part in parts if part is not None]
    model = None
    if len(known) == len(parts):
        leaving, before_exit, behind_exit, remaining, handing, settling, missing = known
        waiting = (1 - missing) * (after_hit or 0.0) + missing * (after_miss or 0.0)
        model = max(leaving, before_exit) + max(remaining, behind_exit) + handing + waiting + settling
    return {
        "fall_back_rate": fall_back,
        "fall_back_rate_by_accepted": {str(n): float(share) for n, share in by_accepted.items()},
        "hidden_share": max(0.0, 1 - waited / after_miss) if after_miss and waited is not None else None,
        "exit_seconds": exit_seconds,
        "rest_seconds": rest,
        "early_seconds": early,
        "beside_seconds": beside,
        "after_hit_seconds": after_hit,
        "after_miss_seconds": after_miss,
        "waited_seconds": waited,
        "idle_seconds": mean(kinds["idle_seconds"]),
        "handover_seconds": handover,
        "model_seconds": model,
        "round_seconds": mean(kinds[["draft_seconds", "verify_seconds", "other_seconds"]].sum(axis=1)),
    }


def batching(method: pd.DataFrame, rounds: pd.DataFrame, batch_size: int) -> dict:
    """How well a batch was used; rounds: one row per sequence and round, each with one part in `rows` of it.

    - occupancy: sequences that ran / slots that there were.
    - alignment_share: of all seconds, those spent on alignment in memory.
    - group_rate: of the rounds of several sequences, the share whose sequences had one length; None for a scheduler
      that does not look.
    """
    whole = (1 / rounds["rows"]).sum()
    judged = rounds[rounds["grouped"].notna()]
    return {
        "occupancy": ratio(len(rounds), whole * batch_size),
        "alignment_share": ratio(rounds["align_seconds"].sum(), method["seconds"].sum()),
        "group_rate": ratio(
            (judged["grouped"].astype(float) / judged["rows"]).sum(), (1 / judged["rows"]).sum()
        ),
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
