"""What text the drafters of several runs saw, over all stages of their training: those that differ are named."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from specbench.data.contamination import stages
from specbench.data.warm_start import WARM
from specbench.report.cells import NUMBER, UNKNOWN, PlainTable
from specbench.report.labels import labels, named

if TYPE_CHECKING:
    from rich.table import Table

SHOWN_OF_A_DIGEST = 8
WIDEST_SHARES = 13  # characters of a column: two of them in a line
SHARES = ("held_out_agreement", "held_out_right")  # not all that is measured on held-out text is a share
SAME = "all drafters trained here saw equally many tokens of the same data, over all stages"


def training_table(summaries: Iterable[dict]) -> Table | None:
    """A row for each trained part of each method and pair, also for one without a record; None if no run has one."""
    summaries = list(summaries)
    rows = []
    for label, summary in zip(labels(summaries), summaries):
        for name, record in _records(summary).items():
            shares = [value for key, value in record.items() if key.startswith(SHARES)]
            row = (
                label,
                name,
                record.get("begins", UNKNOWN),
                _text(record, _last_part) if record else UNKNOWN,
                "the measured" if name == WARM else _cleared_of(record),
                f"{tokens_seen(record):,}" if record else UNKNOWN,
                str(record.get("steps", UNKNOWN)),  # a text that is looked up has none
                f"{record['loss']:.3f}" if "loss" in record else UNKNOWN,
                ", ".join(UNKNOWN if share is None else f"{share:.3f}" for share in shares) or UNKNOWN,
            )
            if row not in rows:
                rows.append(row)
    if not rows:
        return None
    records = [record for summary in summaries for record in _records(summary).values()]
    alike = not differing_training(summaries) and all("steps" in record for record in records)
    table = PlainTable("what drafters were trained on", SAME if alike else "", padding=(0, 1, 0, 0))
    table.add_columns("run", "part", "begins as", "data", "cleared of\nquestions", overflow="fold")
    table.add_columns("tokens,\nall stages", "steps", "loss", **NUMBER)
    table.add_columns("held-out\nshares", justify="right", max_width=WIDEST_SHARES)
    for row in rows:
        table.add_row(*row)
    return table


def _records(summary: dict) -> dict[str, dict]:
    """The record of each trained part by its name; {} of one that has none, as it was trained elsewhere."""
    parts = [*summary["trained_weights"], *(["draft"] if summary["draft"] else [])]
    return {part: {} for part in parts} | summary["training"]


def _cleared_of(record: dict) -> str:
    """The questions that the text of all stages was cleared of; unknown if one stage does not record it."""
    digests = {str(stage.get("questions") or UNKNOWN)[:SHOWN_OF_A_DIGEST] for stage in stages(record)}
    return UNKNOWN if UNKNOWN in digests else ", ".join(sorted(digests))


def differing_training(summaries: Iterable[dict]) -> list[str]:
    """A line if drafters of these runs saw different text, or different numbers of tokens, over all stages.

    Another line names drafters whose training is unknown, beside others; another one the text of datastores, if other
    runs have none or another; another one is added if the memory of some drafters was warmed, and that of others, which
    could have been, was not.
    """
    summaries = list(summaries)
    trained: dict[tuple[int, str], list[str]] = {}
    stored: dict[tuple[int, str], list[str]] = {}
    unknown: list[str] = []
    for label, summary in zip(labels(summaries), summaries):
        for record in _records(summary).values():
            if not record:
                unknown += [label] * (label not in unknown)
                continue
            seen = trained if "steps" in record else stored
            names = seen.setdefault((tokens_seen(record), _text(record, _data)), [])
            if label not in names:
                names.append(label)
    lines = []
    if len(trained) > 1:
        what = "drafters were not trained alike"
        if len({tokens for tokens, _ in trained}) == 1:
            what = "drafters saw equally many tokens, but different text"
        lines.append(f"{what} ({_kinds(trained)})")
    if trained and unknown:
        lines.append(f"how these were trained is unknown: {named(unknown)}")
    if stored and len(trained) + len(stored) > 1:
        lines.append(f"some look text up ({_kinds(stored)})")
    return lines + _differing_memory(summaries)


def _kinds(seen: dict[tuple[int, str], list[str]]) -> str:
    return "; ".join(f"{tokens:,} tokens, {text}: {named(names)}" for (tokens, text), names in seen.items())


def tokens_seen(record: dict) -> int:
    """Tokens that a part was trained on, over all stages."""
    return sum(stage["tokens"] for stage in stages(record))


def _text(record: dict, name_of: Callable[[str], str]) -> str:
    """The text of all stages, named by `name_of`; if there are several, with the tokens of each."""
    seen = stages(record)
    if len(seen) == 1:
        return name_of(record["data"])
    return ", then ".join(f"{stage['tokens']:,} of {name_of(stage['data'])}" for stage in seen)


def _differing_memory(summaries: list[dict]) -> list[str]:
    began: dict[str, list[str]] = {"warmed": [], "empty": []}
    for label, summary in zip(labels(summaries), summaries):
        if {WARM, f"drafter.{WARM}"} & summary["settings"].keys():
            began["warmed" if WARM in summary["training"] else "empty"].append(label)
    if not all(began.values()):
        return []
    kinds = "; ".join(f"{how}: {named(names)}" for how, names in began.items())
    return [f"some drafters began with a warmed memory, others with an empty one ({kinds})"]


def _data(name: str) -> str:
    """The name of a text; of a checksum its beginning."""
    kind, _, digest = name.partition(":")
    return f"{kind}:{digest[:SHOWN_OF_A_DIGEST]}" if kind == "sha256" else name


def _last_part(name: str) -> str:
    """Likewise without its prefix, for a narrow column: folders, modules, the kind of checksum."""
    kind, _, digest = name.partition(":")
    if kind == "sha256":
        return digest[:SHOWN_OF_A_DIGEST]
    path, bracket, settings = name.partition("(")
    last = path.rpartition("/")[2]
    modules = last.split(".")
    if last == path and all(map(str.isidentifier, modules)):  # a function, no file
        last = modules[-1]
    return f"{last}{bracket}{settings}"
