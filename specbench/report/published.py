"""The papers' own figures, each with its source, to stand beside what was measured. The data are in published.yaml."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

from omegaconf import OmegaConf

from specbench.data.question_files import TASKS

FILE = Path(__file__).with_suffix(".yaml")
HANDS = ("first", "second")
OVERALL = "overall"
NUMBERS = (
    *("speedup", "acceptance_length", "acceptance_rate", "mbsu", "tokens_per_second"),
    *("exact_share", "alignment_share", "group_rate", "ratio", "parameters_millions"),
)
# Rows that belong beside a method though they bear another name: Mirror-SD's draft model streams, its Vanilla-SD is
# plain speculative decoding beside the SpS of the same table, and an abstract means both methods of its paper. Other
# papers' measurements of a method bear its paper's name: how they ran it is theirs to say.
ALIASES = {
    "mirror_ss": ("mirror_sd",),
    "eqspec": ("EQSPEC/EXSPEC",),
    "exspec": ("EQSPEC/EXSPEC",),
    "sps": ("Vanilla-SD",),
    "eagle": ("EAGLE",),
    "eagle2": ("EAGLE-2",),
    "eagle3": ("EAGLE-3",),
    "medusa": ("Medusa-1", "Medusa"),
    "hydra_heads": ("Hydra",),
    "recycling": ("Recycling",),
}

# Keys of a node's structure, which are no fields; texts that are joined from the outermost node to the cell.
LAYOUT = ("rows", "columns", "numbers", "cells", "is")
ADDED = {"paper": ", ", "setting": ", ", "note": "; "}


@dataclass(frozen=True, kw_only=True)
class Published:
    """One row of a paper: figures of one method at one setting. What the paper does not report is None.

    method: our name where we have the method, else the paper's. paper: author, year, number, table. source: where it
    was read. hand: "first" in the source or a copy of it, "second" in what others wrote of it. target, draft: models.
    setting: temperature, batch, dtype, what was drafted and how. data: "spec_bench", or the paper's own questions.
    task: one of the six or "overall", the paper's own average; None if it is none of these, as for the best task.
    ablation: a point of a sweep or a variant, not the method as published. note: what to know before using the row.

    speedup: times autoregressive decoding. acceptance_length: tokens per target pass, bonus included. exact_share: of
    answers that equal the target's own. alignment_share: of the time, spent on alignment. group_rate: of the
    rounds, whose sequences had one length. ratio: times what `against` names, if that is not autoregressive
    decoding. parameters_millions: what the method adds to the target. The other numbers are named as in summary.json;
    shares and rates are of 1. A number is as in the paper: `note` has "up to" or "about". Raises ValueError for an
    invalid row.
    """

    method: str
    paper: str
    source: str
    hand: str
    target: str | None = None
    draft: str | None = None
    hardware: str | None = None
    setting: str | None = None
    data: str | None = None
    task: str | None = None
    against: str | None = None
    ablation: bool = False
    note: str | None = None
    speedup: float | None = None
    acceptance_length: float | None = None
    acceptance_rate: float | None = None
    mbsu: float | None = None
    tokens_per_second: float | None = None
    exact_share: float | None = None
    alignment_share: float | None = None
    group_rate: float | None = None
    ratio: float | None = None
    parameters_millions: float | None = None

    def __post_init__(self) -> None:
        numbers = [value for name in NUMBERS if (value := getattr(self, name)) is not None]
        if self.hand not in HANDS:
            raise ValueError(f"hand must be one of {HANDS}: {self}")
        if self.task not in (None, *TASKS, OVERALL):
            raise ValueError(f"unknown task: {self}")
        if not numbers or not all(type(value) in (int, float) and value > 0 for value in numbers):
            raise ValueError(f"numbers must be positive, and one at least: {self}")
        if (self.ratio is None) != (self.against is None):
            raise ValueError(f"ratio and against go together: {self}")


def beside(methods: Iterable[str]) -> list[Published]:
    """The rows that belong beside measured ones of `methods`, in their order: the methods as published, no ablations.

    A method may have none.
    """
    names = dict.fromkeys(name for method in methods for name in (method, *ALIASES.get(method, ())))
    return [row for name in names for row in all_rows() if row.method == name and not row.ablation]


@cache
def all_rows() -> tuple[Published, ...]:
    """Every row of the file."""
    # OmegaConf and not plain YAML, which silently accepts duplicate keys.
    nodes = cast("list[dict]", OmegaConf.to_container(OmegaConf.load(FILE)))
    return tuple(row for node in nodes for row in rows_of(node, {}))


def rows_of(node: Mapping, outer: Mapping) -> Iterator[Published]:
    """The rows of one node of the file with the fields of its outer nodes. The top of published.yaml explains nodes."""
    node = _within(outer, node)
    rows, cells = node.pop("rows", None), node.pop("cells", None)
    if rows is not None:
        for row in rows:
            yield from rows_of(row, node)
    elif cells is not None:
        for column, cell in zip(node["columns"], cells, strict=True):
            if cell is not None:
                column = column if isinstance(column, Mapping) else {"task": column}
                cell = cell if isinstance(cell, Mapping) else {"is": cell}
                yield _row(_within(_within(node, column), {**cell, **_values(node["numbers"], cell["is"])}))
    else:
        yield _row(node)


def _within(outer: Mapping, inner: Mapping) -> dict:
    """The fields of `inner` on top of those of `outer`."""
    added = {k: f"{outer[k]}{join}{inner[k]}" for k, join in ADDED.items() if k in outer and k in inner}
    return {**outer, **inner, **added}


def _values(names: str, cell: str | float) -> dict[str, float]:
    """The numbers of a cell: "1.24/1.15" or 1.24."""
    parts = zip(names.split("/"), str(cell).split("/"), strict=True)
    return {name: float(part) for name, part in parts if part}


def _row(fields: Mapping) -> Published:
    return Published(**{k: v for k, v in fields.items() if k not in LAYOUT})
