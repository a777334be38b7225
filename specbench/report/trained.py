"""What text the drafters of several runs saw: figures of methods that saw different data do not compare them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbench.report.runs import labels, named
from specbench.report.tables import UNKNOWN, PlainTable
from specbench.warming import WARM

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table

SHOWN_OF_A_DIGEST = 8
SAME = "all drafters that were trained here saw the same data, and as many tokens of it"


def training_table(summaries: Iterable[dict]) -> Table | None:
    """A row for each trained part of each method and pair; None where no run has one."""
    summaries = list(summaries)
    rows = {}
    for label, summary in zip(labels(summaries), summaries):
        for name, record in summary.get("training", {}).items():
            shares = [value for key, value in record.items() if key.startswith("held_out")]
            rows[label, name] = (
                label,
                name,
                _data(record["data"]),
                f"{record['tokens']:,}",
                str(record.get("steps", UNKNOWN)),  # a text that is looked up has none
                f"{record['loss']:.3f}" if "loss" in record else UNKNOWN,
                ", ".join(f"{share:.3f}" for share in shares) or UNKNOWN,
            )
    if not rows:
        return None
    table = PlainTable("what drafters were trained on", "" if differing_training(summaries) else SAME)
    for name in ("run", "part", "data"):
        table.add_column(name, overflow="fold")
    for name in ("tokens", "steps", "loss", "held-out\nshares"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows.values():
        table.add_row(*row)
    return table


def differing_training(summaries: Iterable[dict]) -> list[str]:
    """A line where parts of these runs saw different data, or different numbers of tokens of it.

    And one where the memory of some drafters was warmed, and that of others, which could have been, was not.
    """
    summaries = list(summaries)
    seen: dict[tuple[str, int], list[str]] = {}
    for label, summary in zip(labels(summaries), summaries):
        for record in summary.get("training", {}).values():
            names = seen.setdefault((record["data"], record["tokens"]), [])
            if label not in names:
                names.append(label)
    kinds = [f"{tokens:,} tokens of {_data(data)}: {named(names)}" for (data, tokens), names in seen.items()]
    lines = [f"drafters were not trained alike ({'; '.join(kinds)})"] if len(kinds) > 1 else []
    return lines + _differing_memory(summaries)


def _differing_memory(summaries: list[dict]) -> list[str]:
    began: dict[str, list[str]] = {"warmed": [], "empty": []}
    for label, summary in zip(labels(summaries), summaries):
        if {WARM, f"drafter.{WARM}"} & summary["settings"].keys():
            began["warmed" if WARM in summary.get("training", {}) else "empty"].append(label)
    if not all(began.values()):
        return []
    kinds = "; ".join(f"{how}: {named(names)}" for how, names in began.items())
    return [f"memories did not begin alike ({kinds})"]


def _data(name: str) -> str:
    """The name of a text; of a checksum its beginning."""
    kind, _, digest = name.partition(":")
    return f"{kind}:{digest[:SHOWN_OF_A_DIGEST]}" if kind == "sha256" else name
