import re

import pytest
from rich.table import Table
from rich.text import Text

from specbench.report import formats, tables
from tests.support.samples import BASELINE, SUMMARY, batched, changed, faster, wrong

NASTY = r"a|b <script>alert(1)</script> & 50 % of $x_1$ {y} #2 ~ ^ \end{tabular} \\"


def nasty() -> Table:
    """A table whose every part holds what a form could take for its own."""
    table = Table(title=Text(NASTY), caption=Text(NASTY))
    for head in ("run", NASTY, NASTY):
        table.add_column(head)
    table.add_row(NASTY, Text(NASTY, style="bold red"), "two\nlines\rof text")
    table.add_row("", None, "–")
    return table


def every_table() -> list[Table]:
    grid = [faster(1 + a * b, settings={"a": a, "b": b}, method="pld") for a in (1, 2) for b in (1, 2)]
    runs = [SUMMARY, wrong(), SUMMARY | {"pair": "other"}, batched(), *grid]
    return [*tables.overview(runs), *map(tables.run_table, runs)]


TABLES = [*every_table(), nasty()]


def texts(table: Table) -> list[list[str]]:
    """What the cells of a table say."""
    return [[text for text, _ in row] for row in formats.cells(table).rows]


def cells_of_markdown(line: str) -> list[str]:
    return re.split(r"(?<!\\)\|", line.strip())[1:-1]


@pytest.mark.parametrize("table", TABLES, ids=range(len(TABLES)))
def test_each_row_of_markdown_has_as_many_cells(table):
    lines = [line for line in formats.markdown(table).splitlines() if line.startswith("|")]
    assert len(lines) == len(table.rows) + 2
    assert {len(cells_of_markdown(line)) for line in lines} == {len(table.columns)}
    sides = ["---:" if column.justify == "right" else "---" for column in table.columns]
    assert [cell.strip() for cell in cells_of_markdown(lines[1])] == sides


def test_markdown_escapes_pipes_and_says_the_rest():
    text = formats.markdown(nasty())
    assert NASTY.replace("|", r"\|") in text and "two (lines, of text)" in text
    assert text.startswith("**a|b") and text.rstrip().endswith(r"\\")  # title first, caption last
    assert "1.52 [1.47, 1.58]" in formats.markdown(tables.overview_table([SUMMARY]))
    assert "| 1.01 (0.97–1.05) |" in formats.markdown(tables.spec_bench_table([SUMMARY]))
    assert "| summarization |" in formats.markdown(tables.spec_bench_table([SUMMARY]))


ESCAPED = re.compile(r"\\[&%$#_{}]|\\text\w+(\{\})?")


@pytest.mark.parametrize("table", TABLES, ids=range(len(TABLES)))
def test_latex_is_a_table_of_booktabs_with_nothing_left_to_escape(table):
    text = formats.latex(table)
    assert text.count(r"\toprule") == text.count(r"\midrule") == text.count(r"\bottomrule") == 1
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 1
    sides = "".join("r" if column.justify == "right" else "l" for column in table.columns)
    assert rf"\begin{{tabular}}{{{sides}}}" in text
    body = text[text.index(r"\toprule") : text.index(r"\bottomrule")]
    rows = [line for line in body.splitlines() if line.endswith(r"\\")]
    assert len(rows) == len(table.rows) + 1
    for row in rows:
        content = ESCAPED.sub("", row.removesuffix(r"\\"))
        assert content.count("&") == len(table.columns) - 1
        assert not set(content) & set("%$#_~^<>\\")
        assert content.count("{") == content.count("}") == row.count(r"\textbf{")
    left = ESCAPED.sub("", text)
    depth = 0
    for sign in left:
        depth += {"{": 1, "}": -1}.get(sign, 0)
        assert depth >= 0
    assert depth == 0
    (caption,) = re.findall(r"\\caption\{(.*)\}$", text, re.MULTILINE)
    assert not set(ESCAPED.sub("", caption)) & set("&%$#_~^<>\\")


def test_latex_says_what_the_table_says():
    text = formats.latex(tables.overview_table([SUMMARY, faster(1.7, settings={"max_draft_tokens": 3})]))
    assert r"kangaroo, max\_draft\_tokens=6" in text and "1.52 [1.47, 1.58]" in text
    assert r"speedup [95 \% interval]" in text and "all runs, over all their questions" in text


def test_a_row_of_latex_begins_with_no_option():
    """As `[` would be behind the end of the row before."""
    table = Table("shape", "speedup")
    table.add_row("[5, 1]", "1.0")
    table.add_row("*", "[1.0]")
    rows = [line for line in formats.latex(table).splitlines() if "&" in line]
    assert [row.removesuffix(r" \\") for row in rows[1:]] == ["{}[5, 1] & 1.0", "{}* & {}[1.0]"]


def test_html_is_escaped():
    text = formats.html(nasty())
    assert "<script" not in text and text.count("&lt;script&gt;") == 6
    assert text.count("<td") == 6 and text.count('<th class="left">') == 3
    assert '<td class="red bold left">' in text


def test_a_violation_stays_visible_in_every_form():
    run, overview = tables.run_table(wrong()), tables.overview_table([SUMMARY, wrong()])
    assert "**77/0/3**" in formats.markdown(run) and "**77/0/3**" in formats.markdown(overview)
    assert r"\textbf{77/0/3}" in formats.latex(run) and r"\textbf{77/0/3}" in formats.latex(overview)
    for text in (formats.html(run), formats.html(overview)):
        assert re.search('class="red bold[^"]*">77/0/3<', text)
    for form in (formats.markdown, formats.latex, formats.html):
        assert "VIOLATION: 3 of 80 answers" in form(run)
        assert "79/1/0" in form(overview) and "**79/1/0" not in form(overview)
    disagreeing = tables.run_table(changed(SUMMARY, baseline__equivalence=wrong()["equivalence"]))
    for form in (formats.markdown, formats.latex, formats.html):
        assert "transformers generate differ in 3 answers" in form(disagreeing)
        assert f"{BASELINE['tokens_per_second']} tokens/s" in form(disagreeing)


def test_what_a_grid_shades_is_shaded_on_a_page():
    grid = next(table for table in every_table() if "down" in table.title.plain)
    assert formats.html(grid).count('style="background:rgb(') == 4
    assert ">5.00<" in formats.html(grid) and "| 5.00 |" in formats.markdown(grid)


def test_a_table_without_rows():
    table = Table(title="none")
    table.add_column("run")
    table.add_column("speedup")
    assert formats.markdown(table).count("|") == 6
    assert r"\toprule" in formats.latex(table) and "<tbody></tbody>" in formats.html(table)
