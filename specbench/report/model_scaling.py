"""How speedups change with the size of a target that computes the same at every size.

Starting operations dominates a small model's pass, reading weights a large one's. Memory-bound speedup (MBSU) is what a
method would gain if there were nothing but reading; measured speedups are between the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median

from specbench.config.spec import QUESTION
from specbench.report.labels import labels, pair_names
from specbench.system.settings import CONSTANT

# What may differ between the runs of a line and of another model; the name of a preset changes no run.
OF_MODELS = (
    *("pair", "anatomy", "weights", "dtype", "data", "split", "turns", "questions_sha256", "limit"),
    "experiment",
)


def by_size(summaries: Iterable[Mapping]) -> dict[str, dict[int, Mapping]]:
    """The last run of each method at each size of an expanded target, of one sequence at a time.

    Returns:
        By label, then bytes of weights that a target's pass reads, rising; labels with one size alone are left out.
    """
    expanded = _with(summaries, "expanded")
    by_label: dict[str, dict[int, Mapping]] = {}
    for label, summary in zip(labels(expanded, without=("anatomy",)), expanded):
        by_label.setdefault(label, {})[summary["target_pass_bytes"]] = summary
    return {label: dict(sorted(sizes.items())) for label, sizes in by_label.items() if len(sizes) > 1}


def of_other_models(
    summaries: Iterable[Mapping], by_label: Mapping[str, Mapping[int, Mapping]]
) -> dict[str, dict[str, Mapping]]:
    """For each line of `by_label` the last run on each model that was not expanded, alike but for the model.

    Args:
        summaries: of any runs.
        by_label: as returned by `by_size`.

    Returns:
        By the model (pair, and dtype if it is not float32), then by the label that the method has in `by_label`.
    """
    lines = [next(iter(sizes.values())) for sizes in by_label.values()]
    pretrained = _with(summaries, "pretrained")
    names = labels([*lines, *pretrained], without=OF_MODELS)
    labels_of: dict[str, list[str]] = {}
    for name, label in zip(names, by_label):  # without the pair, lines of several pairs may have one name
        labels_of.setdefault(name, []).append(label)
    others: dict[str, dict[str, Mapping]] = {}
    for name, pair, summary in zip(names[len(lines) :], pair_names(pretrained), pretrained):
        for label in labels_of.get(name, ()):
            dtype = "" if summary["dtype"] == "float32" else f", {summary['dtype']}"
            others.setdefault(f"{pair}{dtype}", {})[label] = summary
    return others


def _with(summaries: Iterable[Mapping], weights: str) -> list[Mapping]:
    """The runs of one sequence at a time with such weights and passes of a known size."""
    of_one = [one for one in summaries if one["unit"] == QUESTION and one["engine"] is None]
    of_one = [one for one in of_one if one["draft_length"] == CONSTANT]
    return [one for one in of_one if one["weights"] == weights and one.get("target_pass_bytes")]


def baseline_fractions(by_label: Mapping[str, Mapping[int, Mapping]]) -> dict[int, float]:
    """The baseline's share of the memory-bandwidth ceiling by size: the median over the runs that measured it."""
    fractions: dict[int, list[float]] = {}
    for sizes in by_label.values():
        for size, summary in sizes.items():
            fraction = summary["baseline"]["bandwidth_fraction"]
            if fraction is not None:
                fractions.setdefault(size, []).append(fraction)
    return {size: median(of_size) for size, of_size in sorted(fractions.items())}
