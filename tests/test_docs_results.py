"""The tables of results in README and docs/: written between their markers, of one machine, and of sound runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from specbench import ROOT
from specbench.report.runs import Run
from specbench.system.errors import UserError
from tests.support.pages import broken_links, load_script
from tests.support.samples import SUMMARY, faster, run_of, wrong

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def figures():
    return load_script("figures")


@pytest.fixture
def pages(figures, tmp_path) -> Path:
    """A root with empty pages."""
    for page in figures.PAGES:
        path = tmp_path / page.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"before\n\n{figures.BEGIN}\nold\n{figures.END}\n\nbehind\n")
    return tmp_path


def two_runs(folder: Path) -> list[Run]:
    return [
        run_of(folder, "a", faster(1.52)),
        run_of(folder, "b", faster(1.8, method="sps", settings={"max_draft_tokens": 5})),
    ]


def test_results_stand_between_the_markers(figures, pages, tmp_path):
    figures.write(two_runs(tmp_path / "runs"), pages)
    of_tiny = [page for page in figures.PAGES if page.pair == "tiny"]
    for page in of_tiny:
        text = (pages / page.path).read_text()
        assert text.startswith(f"before\n\n{figures.BEGIN}\n") and text.endswith(f"{figures.END}\n\nbehind\n")
        assert "old" not in text
        assert "| kangaroo | 160 | 1200.0 | 41.2 | 1.52 [1.42, 1.62] | 3.21 | 0.61 | 1.90 | 79/1/0 |" in text
        assert "| sps | 160 | 1200.0 | 41.2 | 1.80 [1.70, 1.90] |" in text
        assert "`make readme-figures`, 2026-01-02; EPYC, 2 cores" in text
        assert broken_links(pages / page.path) == []
    assert (pages / "docs" / "figures" / "tiny" / "speedup_by_task.png").stat().st_size > 1000
    again = [(pages / page.path).read_text() for page in of_tiny]
    figures.write(two_runs(tmp_path / "once_more"), pages)
    assert [(pages / page.path).read_text() for page in of_tiny] == again
    others = [page for page in figures.PAGES if page not in of_tiny]
    assert others and all("old" in (pages / page.path).read_text() for page in others)


def test_a_violation_is_bold_in_the_results(figures, pages, tmp_path):
    figures.write([run_of(tmp_path / "runs", "a", wrong())], pages)
    assert "**77/0/3**" in (pages / figures.PAGES[0].path).read_text()


def test_results_of_two_machines_are_refused(figures, pages, tmp_path):
    first, second = two_runs(tmp_path / "runs")
    second.provenance["machine"]["cpu"] = "Xeon"
    with pytest.raises(UserError, match="one machine"):
        figures.write([first, second], pages)
    assert "old" in (pages / figures.PAGES[0].path).read_text()


def test_a_page_without_markers_is_refused(figures, pages, tmp_path):
    (pages / figures.PAGES[0].path).write_text("nothing\n")
    with pytest.raises(UserError, match="no lines"):
        figures.write([run_of(tmp_path / "runs", "a", SUMMARY)], pages)


def test_pages_have_their_markers(figures):
    for page in figures.PAGES:
        text = (ROOT / page.path).read_text(encoding="utf-8")
        assert "\n\nanother table\n\n" in figures.between_markers(text, "another table")
        assert "| kangaroo |" in text  # it was written
