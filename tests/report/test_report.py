"""The command line: `python -m specbench.report`."""

import os
import re
import subprocess
import sys

import pandas as pd
import pytest

from specbench import ROOT
from specbench.measure.records import run_folder as store
from specbench.report import __main__ as command
from specbench.report.published_tables import published_tables
from tests.report.test_compare import records, seconds
from tests.support.messages import says
from tests.support.samples import PROVENANCE, SUMMARY, batched, changed, faster, run_of, write_run, wrong


def report(*arguments, cwd) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", "specbench.report", *arguments]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(cwd)}
    environment |= {"MPLCONFIGDIR": os.environ["MPLCONFIGDIR"]} if "MPLCONFIGDIR" in os.environ else {}
    return subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """A folder of runs, one of them wrong, one damaged, one unfinished, after the command."""
    folder = tmp_path_factory.mktemp("work")
    write_run(folder / "runs", "1_good", SUMMARY)
    write_run(folder / "runs", "2_bad", wrong() | {"method": "pld"})
    write_run(folder / "runs", "3_cut")
    (folder / "runs" / "3_cut" / store.SUMMARY).write_text('{"schema": 3, ')
    (write_run(folder / "runs", "4_unfinished") / store.SUMMARY).unlink()
    write_run(folder / "runs", "5_batch", batched(), changed(PROVENANCE, threads__torch=1))
    return folder, report(cwd=folder)


@pytest.mark.process
def test_the_command_prints_all_of_runs_when_piped(reported):
    _, done = reported
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("VIOLATION")  # the run with the violation comes first
    assert done.stdout.index("runs/2_bad") < done.stdout.index("runs/1_good")
    assert max(len(line) for line in done.stdout.splitlines()) <= 112 and "\x1b" not in done.stdout
    assert "all runs" in done.stdout and "speedups by task" in done.stdout and "batches" in done.stdout
    assert done.stdout.splitlines()[-1] == "runs/report/index.html"


@pytest.mark.process
def test_what_is_left_out_is_named_and_in_no_number(reported):
    folder, done = reported
    assert "left out: 3_cut: damaged: summary.json" in done.stdout
    assert "left out: 4_unfinished: unfinished" in done.stdout
    page = (folder / "runs" / "report" / "index.html").read_text()
    for name in ("3_cut: damaged", "4_unfinished: unfinished"):
        assert name in page
    assert page.count('<details class="run"') == 3 and "3 finished runs" in page
    frame = pd.read_csv(folder / "runs" / "report" / "runs.csv")
    assert frame["run"].unique().tolist() == ["1_good", "2_bad", "5_batch"]


@pytest.mark.process
def test_the_report_is_written_in_every_form(reported):
    folder, _ = reported
    out = folder / "runs" / "report"
    plots = {f"{name}.{form}" for name in PLOTS for form in ("png", "svg")}
    assert {path.name for path in out.iterdir()} == {
        "index.html",
        "tables.md",
        "tables.tex",
        "runs.csv",
        "plots",
    }
    assert {path.name for path in (out / "plots").iterdir()} == plots
    page, markdown, latex = ((out / n).read_text() for n in ("index.html", "tables.md", "tables.tex"))
    assert page.count("data:image/svg+xml;base64,") == len(PLOTS)
    for text in (page, markdown, latex):
        assert "speedups by task" in text and "77/0/3" in text and "exspec + sps" in text
    assert "VIOLATION: 3 of 80 answers" in page[: page.index('id="tables"')]
    for text, mark in ((markdown, "> "), (latex, "% ")):  # they are pasted without the page
        assert any(
            line.startswith(mark) and "VIOLATION: 3 of 80 answers" in line for line in text.splitlines()
        )
    decided = 2  # the question runs, and the batch
    count = decided + 3 + len(published_tables(["kangaroo", "pld", "exspec"]))
    assert latex.count(r"\toprule") == len(re.findall(r"^\*\*", markdown, re.MULTILINE)) == count


PLOTS = ("speedup_by_task", "acceptance_and_speedup", "time", "acceptance_by_position", "acceptance_by_place",
         "acceptance_by_context", "throughput", "mbsu_and_speedup")  # fmt: skip


@pytest.mark.process
def test_a_report_of_a_report_is_the_same(reported, monkeypatch, capsys):
    """The folder of the report is no run, and what it holds changes nothing."""
    folder, done = reported
    monkeypatch.chdir(folder)
    monkeypatch.setattr(command.plots, "figures", lambda runs: {})
    monkeypatch.setenv("COLUMNS", "112")
    assert command.write_report(["runs", "--out", "again"]) == 0
    assert capsys.readouterr().out.splitlines()[:-1] == done.stdout.splitlines()[:-1]


# The rest in this process: matplotlib is loaded once.


@pytest.fixture
def called(monkeypatch, tmp_path):
    """The command's exit code, with no plot."""
    monkeypatch.setattr(command.plots, "figures", lambda runs: {})
    monkeypatch.chdir(tmp_path)

    def call(*arguments) -> int:
        monkeypatch.setattr(sys, "argv", ["report", *map(str, arguments)])
        return command.main()

    return call


def test_the_command_says_when_there_is_nothing(called, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="2"):
        called("empty")
    said = capsys.readouterr()
    assert said.out == ""
    assert says(said.err, "error: ... empty ... summary.json") and said.err.count("\n") == 1


def test_a_report_that_cannot_be_written_or_read_is_one_line(called, tmp_path, capsys):
    write_run(tmp_path, "run")
    (tmp_path / "file").write_text("")
    for arguments, named in (
        (["run", "--out", "file"], "file"),
        (["x" * 300], "x" * 300),
        (
            ["run", "--ouut", "file"],
            "unrecognized arguments: --ouut file; usage: python -m specbench.report [-h] ",
        ),
    ):
        with pytest.raises(SystemExit, match="2"):
            called(*arguments)
        error = capsys.readouterr().err
        assert error.startswith("error: ") and named in error and error.count("\n") == 1


def test_a_report_of_a_single_run_stands_beside_it(called, tmp_path, capsys):
    run_dir = write_run(tmp_path, "run")
    before = {path.name for path in run_dir.iterdir()}
    assert called("run") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "report/index.html"
    assert {path.name for path in run_dir.iterdir()} == before


def test_a_report_is_never_written_into_a_run_that_is_left_out(called, tmp_path):
    (write_run(tmp_path, "begun") / store.SUMMARY).unlink()
    write_run(tmp_path, "done")
    called("begun", "done")
    assert not (tmp_path / "begun" / "report").exists() and (tmp_path / "report" / "index.html").exists()


def test_what_is_damaged_is_named_however_much_and_few_unfinished_runs_are(called, tmp_path, capsys):
    write_run(tmp_path / "runs", "good")
    for i in range(15):
        (write_run(tmp_path / "runs", f"cut_{i:02}") / store.SUMMARY).write_text("{")
    begun = [write_run(tmp_path / "runs", f"begun_{i}") / store.SUMMARY for i in range(4)]
    for summary in begun[1:]:
        summary.unlink()
    called()
    out = capsys.readouterr().out
    assert out.count("left out: cut_") == 15 and out.count("left out: begun_") == 3
    begun[0].unlink()
    called()
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("left out: cut_") == 15 and "left out: begun_" not in out
    assert "left out 4 runs without results (failed or unfinished); give the same command again" in out


def test_of_many_runs_those_that_something_is_wrong_with_are_shown_one_by_one(called, tmp_path, capsys):
    for i in range(command.MAX_SINGLE_TABLES):
        write_run(tmp_path / "runs", f"good_{i}", faster(1 + i / 10, settings={"n": i}))
    write_run(tmp_path / "runs", "failed", SUMMARY | {"failed": 2, "method": "s2d"})
    write_run(tmp_path / "runs", "bad", wrong() | {"method": "pld"})
    called()
    text = capsys.readouterr().out
    assert text.startswith("VIOLATION") and "FAILED: 2 questions" in text
    assert "runs/bad\n" in text and "runs/failed\n" in text and "runs/good_0\n" not in text


def test_claims_without_runs_for_them_fail(called, tmp_path, capsys):
    write_run(tmp_path / "runs", "run")
    assert called("claims") == 1
    text = capsys.readouterr().out
    assert "the papers' claims, checked" in text and "not measured" in text
    page = (tmp_path / "runs" / "report" / "index.html").read_text()
    markdown = (tmp_path / "runs" / "report" / "tables.md").read_text()
    assert page.index("claims, checked") < page.index("speedups by task")
    assert "| not measured |" in markdown
    assert "claims" not in (tmp_path / "runs" / "report" / "runs.csv").read_text()


def test_claims_that_have_runs_end_well(called, tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "runs", "run", faster(1.7, experiment="e", pair="tiny_wide"))
    (tmp_path / "claims.yaml").write_text(
        "[{name: one, bound: paper, paper: {figure: 2, source: t}, measure: number, of: {experiment: e}, "
        "at_least: 5}]"
    )
    monkeypatch.setattr(command.claims, "FILE", tmp_path / "claims.yaml")
    assert called("claims") == 0  # measured, though it is not supported
    assert "not supported" in capsys.readouterr().out
    (tmp_path / "page.md").write_text("<!-- claims:begin -->\n<!-- claims:end -->\n")
    assert called("claims", "--markdown", "--write", str(tmp_path / "page.md")) == 0
    text = capsys.readouterr().out
    assert (
        text.startswith("1 runs; ")
        and "| one | paper | 2 (t) |" in text
        and text in (tmp_path / "page.md").read_text().replace("<!--", "\n<!--")
    )


def test_compare_names_what_is_left_out_before_it_compares(called, tmp_path, capsys):
    journal = records(seconds(1.5, seed=1))
    one, other = (run_of(tmp_path, name, records=journal).folder for name in "ab")
    (write_run(tmp_path, "begun") / store.SUMMARY).unlink()
    assert called("compare", "begun", one, other) == 0
    text = capsys.readouterr().out
    assert text.startswith("left out: begun: unfinished") and "times as fast as a" in text
    with pytest.raises(SystemExit):
        called("compare", "begun", one)
    said = capsys.readouterr()
    assert "left out: begun" in said.out and says(said.err, "error: ... two ... runs")
    with pytest.raises(SystemExit):
        called("compare")
