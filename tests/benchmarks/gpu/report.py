"""The report of a check: what was expected beside what was measured."""

from __future__ import annotations

from typing import Any


def markdown(lines: list[dict[str, Any]]) -> tuple[str, bool]:
    """The report, and whether all that was measured is as expected.

    Args:
        lines: of the results: the machine, figures, and how each part ended.
    """
    figures = [line for line in lines if "name" in line]
    failed = [line for line in lines if "failed" in line]
    left_out = [line for line in lines if "left_out" in line]
    odd = [line for line in figures if not expected(line)]
    head = next(line for line in lines if "machine" in line)
    kind = "the script alone, with narrow models" if head["small"] else "full"
    text = [f"# Check on {head['machine']}", "", f"{head['time']}, {kind}.", ""]
    text += [
        f"{len(figures)} figures, {len(odd)} not as expected, {len(failed)} parts that did not end well, "
        f"{len(left_out)} of which something was left out.",
        "",
    ]
    text += [f"- **{line['part']}**: {line['failed']}" for line in failed]
    text += [f"- {line['part']}, left out: {line['left_out']}" for line in left_out]
    for part in dict.fromkeys(line["part"] for line in figures):
        own = [line for line in figures if line["part"] == part]
        spent = next(
            (line["seconds"] for line in lines if line.get("part") == part and "seconds" in line), None
        )
        text += ["", f"## {part}" + (f" ({spent:.0f} s)" if spent is not None else ""), ""]
        text += ["| figure | measured | expected | note |", "|---|---:|---:|---|"]
        text += [_row(line) for line in own]
    return "\n".join(text) + "\n", not odd and not failed


def expected(line: dict[str, Any]) -> bool:
    """Whether a figure lies where it was expected; one without an expectation does."""
    value, low, high = line["value"], line["low"], line["high"]
    if not isinstance(value, int | float):
        return low is None and high is None
    return (low is None or value >= low) and (high is None or value <= high)


def _row(line: dict[str, Any]) -> str:
    measured = _text(line["value"]) + (f" {line['unit']}" if line["unit"] else "")
    bounds = [_text(bound) for bound in (line["low"], line["high"]) if bound is not None]
    wanted = " to ".join(bounds) if len(bounds) == 2 else "".join(bounds) and f"at least {bounds[0]}"
    if line["low"] is None and line["high"] is not None:
        wanted = f"at most {bounds[0]}"
    name = line["name"] if expected(line) else f"**{line['name']}**"
    return f"| {name} | {measured} | {wanted} | {line['note']} |".replace("\n", " ")


def _text(value: Any) -> str:
    if value is None:
        return "not measured"
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")
