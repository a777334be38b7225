"""Numbers of the first and last third of each task's questions, for a method that learns from answer to answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specbench.measure.metrics.metrics import numbers

if TYPE_CHECKING:
    from specbench.measure.metrics.metrics import MetricInput

NUMBERS = ("speedup", "speedup_low", "speedup_high", "acceptance_length")


def drift(records: list[dict], measured: MetricInput) -> dict[str, dict]:
    """The numbers of the first and the last third of each task's questions, in the order in which they were asked.

    Of each task: tasks follow one another and differ more than answers do, so thirds of the run would compare tasks.

    Args:
        records: of the journal, in its order, of questions that did not fail.
        measured: all of these questions.

    Returns:
        By "first" and "last": questions, speedup with its interval, acceptance_length. {} if no task has 3 questions.
    """
    of_tasks: dict[str, dict[int, None]] = {}
    for record in records:
        of_tasks.setdefault(record["task"], {})[record["question_id"]] = None
    first: set[int] = set()
    last: set[int] = set()
    for question_ids in map(list, of_tasks.values()):
        count = len(question_ids) // 3
        first |= {*question_ids[:count]}
        last |= {*question_ids[len(question_ids) - count :]}
    if not first:
        return {}

    def numbers_of(third: set[int]) -> dict[str, Any]:
        part = measured.part([record for record in records if record["question_id"] in third])
        return {"questions": len(third)} | numbers(part, NUMBERS)

    return {"first": numbers_of(first), "last": numbers_of(last)}


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
    return [f"learns from answer to answer: first third of each task: {first}; last third: {last}"]
