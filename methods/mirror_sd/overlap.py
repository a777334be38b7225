"""What drafting during verification gains, from the statistics that `worker` keeps of each draft."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbench.measure.metrics.acceptance import mean, stat

if TYPE_CHECKING:
    import pandas as pd

# Seconds of each draft.
SECONDS = (
    *("exit_seconds", "overlapped_before_exit_seconds", "overlapped_behind_exit_seconds"),
    *("exposed_seconds", "idle_seconds", "ipc_seconds"),
)
UNKNOWN = "\u2013"  # not measured


def overlap(rounds: pd.DataFrame) -> dict | None:
    """What drafting during verification gains; None for a method that does not. Seconds are means per round.

    - miss_rate: of the decisions that were looked up, the share without a prepared branch; by_accepted: the same
      by how many draft tokens had been accepted.
    - hidden_share: 1 - time that the target waited for a draft / time of a draft that begins after the decision (after
      a miss), as all of a serial method's do; unused branches do not count. None without a miss.
    - model_seconds: the latency model of Mirror-SD (Bhendawade et al. 2025, eq. 10) with the terms that it lacks,
      max(exit, draft before it) + max(rest of the pass, draft during it) + messages + draft after the decision (the
      whole of it after a miss, the rest of it after a hit) + the rest of the round; round_seconds: as measured.
    """
    seconds = {name: stat(rounds, name).astype(float) for name in SECONDS}
    rounds = rounds.assign(hit=stat(rounds, "hit"), **seconds)
    launched = rounds[rounds["exit_seconds"].notna()]
    if launched.empty:
        return None
    before = rounds.groupby(["question_id", "turn", "repeat"], sort=False)["accepted"].shift()
    looked = rounds["hit"].notna()
    missed = rounds.loc[looked, "hit"].eq(False)
    by_accepted = missed.groupby(before[looked].astype(int)).mean()
    kinds = rounds[looked]
    exposed_hit, exposed_miss = (mean(kinds.loc[missed == kind, "exposed_seconds"]) for kind in (False, True))
    waited = mean(kinds["draft_seconds"])
    exit_seconds = float(launched["exit_seconds"].mean())
    rest = float((launched["verify_seconds"] - launched["exit_seconds"]).mean())
    model = None
    if len(kinds):
        means = kinds[[*SECONDS, "other_seconds"]].mean()
        to_exit = max(exit_seconds, means["overlapped_before_exit_seconds"])
        after_exit = max(rest, means["overlapped_behind_exit_seconds"])
        model = float(to_exit + after_exit + means[["ipc_seconds", "exposed_seconds", "other_seconds"]].sum())
    return {
        "miss_rate": mean(missed.astype(float)),
        "miss_rate_by_accepted": {str(n): float(share) for n, share in by_accepted.items()},
        "hidden_share": 1 - waited / exposed_miss if exposed_miss and waited is not None else None,
        "exit_seconds": exit_seconds,
        "rest_seconds": rest,
        "overlapped_before_exit_seconds": mean(kinds["overlapped_before_exit_seconds"]),
        "overlapped_behind_exit_seconds": mean(kinds["overlapped_behind_exit_seconds"]),
        "exposed_hit_seconds": exposed_hit,
        "exposed_miss_seconds": exposed_miss,
        "waited_seconds": waited,
        "idle_seconds": mean(kinds["idle_seconds"]),
        "ipc_seconds": mean(kinds["ipc_seconds"]),
        "model_seconds": model,
        "round_seconds": mean(kinds[["draft_seconds", "verify_seconds", "other_seconds"]].sum(axis=1)),
    }


def overlap_line(overlap: dict) -> str:
    """How much of the drafting was hidden, and where the time of a round went."""

    def ms(name: str) -> str:
        return UNKNOWN if overlap[name] is None else f"{1e3 * overlap[name]:.1f}"

    def share(name: str) -> str:
        return UNKNOWN if overlap[name] is None else f"{overlap[name]:.0%}"

    return (
        f"overlap: {share('hidden_share')} of the time of a serial draft "
        f"({ms('exposed_miss_seconds')} ms) hidden, "
        f"miss rate {share('miss_rate')}; a round took {ms('round_seconds')} ms: "
        f"{ms('exit_seconds')} to the exit and {ms('rest_seconds')} after it (overlapped drafting "
        f"{ms('overlapped_before_exit_seconds')} and {ms('overlapped_behind_exit_seconds')}), "
        f"{ms('waited_seconds')} waiting; the latency model says {ms('model_seconds')} ms"
    )
