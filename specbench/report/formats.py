"""The tables of a report in other forms than a terminal's. A rich table is the one form that tables are made in."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import pandas as pd
from rich.text import Text

from specbench.report.cells import WRONG

if TYPE_CHECKING:
    from rich.table import Table

LATEX = str.maketrans(
    {sign: f"\\{sign}" for sign in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}"}
)


@dataclass(frozen=True)
class Cells:
    """The content of a table: text and style of each cell, and whether each column is aligned to the right."""

    title: str
    caption: str
    heads: list[str]
    rows: list[list[tuple[str, str]]]
    right: list[bool]


def cells(table: Table) -> Cells:
    """The content of a table, each cell in one line."""
    rows = zip(zip(*(column.cells for column in table.columns)), table.rows)
    return Cells(
        title=" ".join(_lines(table.title)),
        caption="; ".join(_lines(table.caption)),
        heads=[_head(column.header) for column in table.columns],
        rows=[[(_plain(cell), f"{_style(cell)} {row.style or ''}") for cell in line] for line, row in rows],
        right=[column.justify == "right" for column in table.columns],
    )


def markdown(table: Table) -> str:
    """A table of GitHub's Markdown after its title."""
    content = cells(table)
    rows = [[f"**{text}**" if WRONG in style else text for text, style in row] for row in content.rows]
    lines = [content.heads, ["---:" if right else "---" for right in content.right], *rows]
    shown = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    below = ["", content.caption] if content.caption else []
    return "\n".join([f"**{content.title}**", "", *shown, *below, ""])


def latex(table: Table) -> str:
    """A LaTeX table with booktabs' rules; a cell that warns is bold. Its caption joins title and caption."""
    content = cells(table)
    rows = [[_latex_cell(*cell) for cell in row] for row in content.rows]
    layout = "".join("r" if right else "l" for right in content.right)
    frame = pd.DataFrame(rows, columns=range(len(content.heads)))  # heads may be alike
    text = frame.style.hide(axis="index").format_index(lambda i: content.heads[i].translate(LATEX), axis=1)
    caption = "; ".join(filter(None, (content.title, content.caption))).translate(LATEX)
    return text.to_latex(caption=caption, column_format=layout, hrules=True)


def _latex_cell(text: str, style: str) -> str:
    escaped = text.translate(LATEX)
    if text.startswith(("[", "*")):  # after the end of a row LaTeX would read it as an option
        escaped = f"{{}}{escaped}"
    return rf"\textbf{{{escaped}}}" if WRONG in style else escaped


def html(table: Table, alone: bool = False) -> str:
    """A table of a page. Cells that warn (a violation) or tell a verdict keep a class for their style.

    Args:
        table: of a report.
        alone: without its title and its caption.
    """
    content = cells(table)
    sides = ["" if right else "left" for right in content.right]
    heads = "".join(f'<th class="{side}">{escape(head)}</th>' for head, side in zip(content.heads, sides))
    rows = "".join(
        f"<tr>{''.join(_cell(*cell, side) for cell, side in zip(row, sides))}</tr>" for row in content.rows
    )
    body = f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    if alone:
        return body
    caption = f"<p>{escape(content.caption)}</p>" if content.caption else ""
    return f"<h3>{escape(content.title)}</h3>{body}{caption}"


def _cell(text: str, style: str, side: str) -> str:
    ground = style.partition(" on ")[2].strip()
    colour = f' style="background:{ground};color:{style.split()[0]}"' if ground else ""
    words = [word for word in ("red", "green", "bold", "dim") if word in style.split() and not ground]
    kind = f' class="{" ".join([*words, side]).strip()}"' if words or side else ""
    return f"<td{kind}{colour}>{escape(text)}</td>"


def _plain(text: object) -> str:
    """A title or cell in one line, with all lines after the first in brackets."""
    first, *more = _lines(text)
    return f"{first} ({', '.join(more)})" if more else first


def _head(text: object) -> str:
    """A column's head in one line, with split words rejoined."""
    return "\n".join(_lines(text)).replace("-\n", "").replace("/\n", "/").replace("\n", " ")


def _lines(text: object) -> list[str]:
    plain = text.plain if isinstance(text, Text) else str(text or "")
    return [line.strip() for line in plain.strip().splitlines()] or [""]


def _style(cell: object) -> str:
    return str(cell.style) if isinstance(cell, Text) else ""


def between(text: str, name: str, content: str) -> str | None:
    """A page with other content between its lines `<!-- NAME:begin -->` and `:end`; None if it lacks them."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    head, opened, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    return f"{head}{begin}\n\n{content}\n\n{end}{tail}" if opened and closed else None
