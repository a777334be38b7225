"""Numbers of the first and last third of a run's questions, for a method that learns from answer to answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specbench.measure.metrics.metrics import numbers

if TYPE_CHECKING:
    from specbench.measure.metrics.metrics import MetricInput

NUMBERS = ("speedup", "speedup_low", "speedup_high", "acceptance_length")


def drift(records: list[dict], measured: MetricInput) -> dict[str, dict]:
    """The numbers of the first and the last third of the questions, in the order in which they were asked.

    Args:
        records: of the journal, in its order, of questions that did not fail.
        measured: all of these questions.

    Returns:
        By "first" and "last": questions, speedup with its interval, acceptance_length. {} of fewer than 3 questions.
    """
    question_ids = [*dict.fromkeys(record["question_id"] for record in records)]
    count = len(question_ids) // 3
    if count == 0:
        return {}

    def numbers_of(third: set[int]) -> dict[str, Any]:
        part = measured.part([record for record in records if record["question_id"] in third])
        return {"questions": count} | numbers(part, NUMBERS)

    return {"first": numbers_of(set(question_ids[:count])), "last": numbers_of(set(question_ids[-count:]))}


def drift_lines(by_third: dict[str, dict]) -> list[str]:
    """A line about both thirds, for the foot of a run's table."""
    if not by_third:
        return []

    def in_words(third: dict[str, Any]) -> str:
        speedup, length = third["speedup"], third["acceptance_length"]
        parts = [] if speedup is None else [f"speedup {speedup:.2f}"]
        if speedup is not None and third["speedup_low"] is not None:
            parts[0] += f" [{third['speedup_low']:.2f}, {third['speedup_high']:.2f}]"
        return (
            ", ".join([*parts, *([] if length is None else [f"acceptance length {length:.2f}"])]) or "nothing"
        )

    first, last = in_words(by_third["first"]), in_words(by_third["last"])
    return [f"learns from answer to answer: first third of the questions: {first}; last third: {last}"]
