"""Faults of a run: they decide whether it is trusted and recommended, and its exit code."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from specbench.measure.metrics.drawn import UNLIKELY, is_off
from specbench.measure.metrics.statistics import verdict
from specbench.report.cells import ratio_text
from specbench.system.settings import TYPICAL

if TYPE_CHECKING:
    from rich.text import Text


def faults(summary: dict, with_baseline: bool = True, with_speed: bool = True) -> list[str]:
    """The faults of a run, a line each; `with_baseline` and `with_speed` include those of baseline and speed."""
    lines = engine_faults(summary) + ([line] if with_speed and (line := no_speed(summary)) else [])
    counts, baseline = summary["equivalence"], summary["baseline"]
    if counts["violation"]:
        whose = "the target's own" if summary["engine"] is None else "those of its plain arm"
        lines.append(f"VIOLATION: {counts['violation']} of {counts['answers']} answers are not {whose}")
    if too_many_ties(summary):
        lines.append(f"VIOLATION: {ties_line(summary)}")
    for arm in improbable(summary) if summary["engine"] is None else []:
        lines.append(f"VIOLATION: answers of the {arm} are not drawn from the target's distributions")
    if summary["verification"] == TYPICAL:
        lines.append("LOSSY: typical acceptance does not keep the target's answers; it is here as a control")
    if summary["failed"]:
        lines.append(f"FAILED: {summary['failed']} questions, left out of every number")
    if with_baseline and summary["engine"] is None and baseline["equivalence"]["violation"]:
        lines.append(baseline_fault(baseline))
    return lines


def sound(summaries: Iterable[dict]) -> list[dict]:
    """Those of runs without a fault."""
    return [summary for summary in summaries if not faults(summary)]


def violates(summary: dict) -> bool:
    """Whether answers of any arm are violations, in a run whose rule of acceptance should allow none."""
    counts = [summary["equivalence"], summary["baseline"]["equivalence"]]
    if (engine := summary["engine"]) is not None:
        counts.append(engine["again_equivalence"])
    wrong = any(one["violation"] for one in counts) or bool(improbable(summary)) or too_many_ties(summary)
    return wrong and summary["verification"] != TYPICAL


def improbable(summary: dict) -> list[str]:
    """The arms whose tokens are too likely, too unlikely or too like their drafts to be the target's draws."""
    return [arm for arm, one in summary["likelihood"].items() if is_off(one)]


def too_many_ties(summary: dict) -> bool:
    """Whether more answers are ties than rounding explains: a rule may be lossy by less than the noise."""
    ties = summary["ties"]
    return ties is not None and ties["p_value"] < UNLIKELY


def ties_line(summary: dict) -> str:
    """The number of ties, beside the one that rounding explains if that is known, and the widest tie; may be empty."""
    ties, counts, parts = summary["ties"], summary["equivalence"], []
    if ties is not None and max(ties["count"], ties["expected"]) >= 0.5:
        parts.append(f"{ties['count']} ties, where rounding explains {ties['expected']:.1f}")
    if (margin := counts["tie_margin"]) is not None:
        parts.append(f"widest tie {margin:.2g} logits, where rounding explains {counts['tie_noise']:.2g}")
    return "; ".join(parts)


def engine_faults(summary: dict) -> list[str]:
    """The faults of another engine's answers; [] for this project's own."""
    engine = summary["engine"]
    if engine is None:
        return []
    name, lines = engine["name"], []
    differing, unlike = summary["baseline"]["equivalence"], engine["again_equivalence"]
    if differing["violation"]:
        lines.append(f"VIOLATION: {differing['violation']} plain answers of {name} are not the target's")
    if unlike["violation"]:
        lines.append(f"VIOLATION: {unlike['violation']} plain answers of {name} are not what it said before")
    for arm in improbable(summary):
        whose = "plain" if arm == "baseline" else "speculative"
        lines.append(f"VIOLATION: {whose} answers of {name} are not drawn from the target's distributions")
    if faults_met := engine["faults"]:
        lines.append(f"FAULTS of {name}: {len(faults_met)}, the first: {faults_met[0]}")
    return lines


def no_speed(summary: dict) -> str:
    """A line if another engine may differ from itself by as much as a method gains or loses; else empty."""
    if (engine := summary["engine"]) is None:
        return ""
    if not could_explain(engine["again"]["low"], engine["again"]["high"], summary["overall"]):
        return ""
    return f"NO VERDICT ON SPEED: plain {engine['name']} against itself has {itself_text(engine)}"


def could_explain(low: float | None, high: float | None, overall: dict) -> bool:
    """Whether the baseline's difference from itself could explain what a method gains or loses.

    Args:
        low: lower end of the baseline's interval against itself; None without one.
        high: upper end.
        overall: numbers of the method.
    """
    ends = overall["speedup_low"], overall["speedup_high"]
    if low is None or high is None or (judged := verdict(*ends)) not in ("faster", "slower"):
        return False
    margin = max(high, 1 / low)
    return verdict(ends[0] / margin, ends[1] * margin) != judged


def itself_text(engine: dict) -> Text:
    """What an engine's plain arm gains over itself."""
    again = engine["again"]
    return ratio_text(again["speedup"], again["low"], again["high"])


def baseline_fault(baseline: dict) -> str:
    """A line on a baseline with violations."""
    differing = baseline["equivalence"]["violation"]
    single = "" if baseline["single_tokens_per_second"] is None else ", our loop at batch size 1"
    return f"VIOLATION: our loop{single} and transformers generate differ in {differing} answers"
