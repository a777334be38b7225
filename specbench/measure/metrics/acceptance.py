"""Metrics of draft-verify rounds that need no baseline: acceptance, bytes read, occupancy of a batch.

Every function takes rows of `dataframes.steps_frame` of one arm and is pure. A number that could not be measured is
None.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

# Where the stretches begin over which acceptance is looked at, by a column of rounds: new tokens, or all, before them.
STRETCHES = {
    "place": (0, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
    "context": (0, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
}


def acceptance_length(rounds: pd.DataFrame) -> float | None:
    """Tokens emitted by draft-verify rounds per target pass, bonus token included, prefill excluded."""
    return ratio(rounds["emitted"].sum(), len(rounds))


def acceptance_length_by_answer(rounds: pd.DataFrame) -> float | None:
    """Mean over answers of the acceptance length of each, in which a short answer counts as much as a long one."""
    answers = rounds.groupby(["question_id", "turn", "repeat", "process"])["emitted"]
    return mean(answers.mean())


def accepted_per_verified(rounds: pd.DataFrame) -> float | None:
    """Tokens emitted per token that the target verified, without padding: emitted / (drafted + passes)."""
    return ratio(rounds["emitted"].sum(), rounds["drafted"].sum(skipna=False) + len(rounds))


def acceptance_rate(rounds: pd.DataFrame) -> float | None:
    """Accepted / drafted tokens; None for a method that never drafted, or if drafts were not counted."""
    return ratio(rounds["accepted"].sum(), rounds["drafted"].sum(skipna=False))


def acceptance_at_positions(rounds: pd.DataFrame, conditional: bool = False) -> list[float | None]:
    """Acceptance at each draft position, counted along the longest path of a tree.

    Args:
        rounds: of one arm.
        conditional: of the rounds that judged a position, see `judged_positions`; else of all that drafted it.
    """
    depth, accepted = rounds["depth"].to_numpy(), rounds["accepted"].to_numpy()
    judged = judged_positions(rounds)
    return [
        ratio((accepted > position).sum(), judged[position] if conditional else (depth > position).sum())
        for position in range(len(judged))
    ]


def judged_positions(rounds: pd.DataFrame) -> list[int]:
    """Number of rounds that judged each draft position: all before it was accepted, and no stop token was.

    [] if the lengths of drafts are unknown.
    """
    depth, accepted, emitted = (rounds[name].to_numpy() for name in ("depth", "accepted", "emitted"))
    if np.isnan(depth).any():
        return []
    stopped = emitted == accepted  # the answer ended inside the draft: there was no bonus token
    return [
        int(((depth > position) & (accepted >= position) & ~(stopped & (accepted == position))).sum())
        for position in range(int(depth.max(initial=0)))
    ]


def acceptance_over(rounds: pd.DataFrame, name: str) -> list[float | None]:
    """Acceptance length of the rounds that began in each stretch of `STRETCHES[name]`, up to the last with rounds.

    None for a stretch in which no round began.
    """
    emitted = np.bincount(_stretches(rounds, name), weights=rounds["emitted"])
    return [ratio(tokens, count) for tokens, count in zip(emitted, rounds_over(rounds, name))]


def rounds_over(rounds: pd.DataFrame, name: str) -> list[int]:
    """Number of rounds of each figure of `acceptance_over`."""
    return np.bincount(_stretches(rounds, name)).tolist()


def _stretches(rounds: pd.DataFrame, name: str) -> np.ndarray:
    """The number of the stretch in which each round began."""
    return np.searchsorted(STRETCHES[name], rounds[name].to_numpy(), side="right") - 1


def sequences_per_pass(rounds: pd.DataFrame) -> float | None:
    """Sequences that share a round, on average over the rounds; each row is one of the `sequences` of its round."""
    return ratio(len(rounds), (1 / rounds["sequences"]).sum())


def changed_drafts(rounds: pd.DataFrame) -> int | None:
    """Number of questions whose rounds differ between repeats of one process; None if none has several repeats.

    A drafter forgets an answer before it is repeated: if drafting is greedy, other drafts come from something that it
    has kept, or from arithmetic that is not deterministic.
    """
    answer = ["process", "question_id", "turn"]
    answers = rounds.groupby([*answer, "repeat"])[["drafted", "accepted"]].agg(tuple)
    repeats = answers.groupby(level=answer)
    if not (repeats.size() > 1).any():
        return None
    changed = (repeats.nunique() > 1).any(axis=1)
    return int(changed.groupby(level="question_id").any().sum())


def occupancy(rounds: pd.DataFrame, batch_size: int) -> float | None:
    """Sequences that ran / slots that were available."""
    sequences = sequences_per_pass(rounds)
    return None if sequences is None else sequences / batch_size


def mbsu(rounds: pd.DataFrame, target_pass_bytes: int | None) -> float | None:
    """Memory-bound speedup: tokens emitted x bytes of one target pass / bytes of weights really read.

    The speedup if all time were spent reading weights (Goel et al. 2024, arXiv 2403.00858).
    For a draft length gamma and a draft model of c times the target's bytes it is acceptance_length / (1 + c
    * gamma).
    """
    if target_pass_bytes is None:
        return None
    parts = mbsu_parts(rounds, target_pass_bytes)
    return ratio(parts["above"].sum(), parts["below"].sum(skipna=False))


def mbsu_parts(rounds: pd.DataFrame, target_pass_bytes: int) -> pd.DataFrame:
    """Bytes that autoregressive decoding reads for each round's tokens (`above`), and that the round read (`below`).

    The sequences of a batch share what a pass reads, also in autoregressive decoding.
    """
    emitted, read = rounds["emitted"], rounds["draft_bytes"] + rounds["target_bytes"]
    above, below = emitted * target_pass_bytes / rounds["sequences"], read / rounds["sequences"]
    return rounds.assign(above=above, below=below)[["above", "below"]]


def stat(rounds: pd.DataFrame, name: str) -> pd.Series:
    """One of a method's own numbers of its rounds, see `Draft.stats`; None for a round without it."""
    return rounds["stats"].map(lambda stats: stats.get(name) if stats else None).astype(object)


def ratio(numerator: float, denominator: float) -> float | None:
    """A quotient; None when there is nothing to divide by."""
    return float(numerator / denominator) if denominator > 0 else None


def mean(column: pd.Series) -> float | None:
    """Mean of a column; None when there is nothing."""
    return float(column.mean()) if len(column) else None


def total(column: pd.Series) -> float | int | None:
    """Sum of a column; None when there is nothing to add, or a part of it is unknown."""
    return column.sum(skipna=False).item() if len(column) and column.notna().all() else None
