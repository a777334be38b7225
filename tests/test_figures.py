"""`make readme-figures`: rows measured in rounds, in no slow phase of the machine."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from omegaconf import OmegaConf

from specbench.data.questions import load_questions
from specbench.measure.machine import speed
from specbench.measure.machine.speed import Probes
from specbench.measure.records import run_folder as store
from specbench.system.errors import UserError
from specbench.system.files import write_json
from tests.support.messages import says
from tests.support.pages import load_script
from tests.support.samples import faster, run_of, summarised
from tests.support.synthetic import FACTS, QUIET, passes, probed, record, slowed


@pytest.fixture
def figures() -> ModuleType:
    return load_script("figures")


def phase(*probes: dict) -> dict:
    """`machine` of a summary with such probes; a quiet machine is the best known."""
    facts = FACTS | {"speed": {"machine": "EPYC", "best": QUIET}}
    return {"machine": summarised(probed(passes(1), *probes), facts)["machine"]}


def test_a_slow_phase_is_marked_in_the_results(figures, tmp_path):
    first, second = (
        run_of(tmp_path / "runs", name, faster(1.5, method=name) | phase(figures_of))
        for name, figures_of in (("sps", QUIET), ("pld", slowed(product=0.3)))
    )
    text = figures.block([first, second], figures.PAGES[0], ())
    assert says(text, "**DIFFERENT PHASES ... sps in pld (30%)** ... **pld: SLOW MACHINE")
    assert len(figures.slow_phases([first, second])) == 2
    once = run_of(tmp_path / "runs", "once", faster(1.5) | phase(QUIET, QUIET, slowed(product=0.3)))
    assert figures.slow_phases([first, once]) == []


def test_a_table_with_a_fuller_page_names_what_the_notes_are_about(figures, tmp_path):
    runs = [
        run_of(tmp_path / "runs", name, faster(1.5, method=name) | phase(figures_of))
        for name, figures_of in (
            ("sps", QUIET),
            ("pld", slowed(product=0.3)),
            ("samd", slowed(bandwidth=0.3)),
        )
    ]
    short = replace(next(page for page in figures.PAGES if page.in_full), methods=())
    text = figures.block(runs, short, ())
    kinds = "DIFFERENT PHASES of the machine; pld: SLOW MACHINE; samd: SLOW MACHINE"
    assert f"**{kinds}: [in full]({short.in_full})**" in text and "30%" not in text


def test_questions_that_failed_are_told_below_a_table(figures, tmp_path):
    run = run_of(tmp_path, "sps", faster(1.5, method="sps", failed=2))
    assert "**sps: FAILED: 2 questions, left out of every number**" in figures.block(
        [run], figures.PAGES[0], ()
    )
    short = replace(next(page for page in figures.PAGES if page.in_full), methods=())
    assert "**sps: FAILED: [in full]" in figures.block([run], short, ())


def test_a_table_without_one_of_its_runs_is_not_written(figures, tmp_path, monkeypatch, capsys):
    folder = run_of(tmp_path, "pld", faster(1.5)).folder
    (tmp_path / "begun").mkdir()
    write_json(tmp_path / "begun" / store.CODE, {})
    monkeypatch.setattr(figures, "write", lambda *_: pytest.fail("written"))
    monkeypatch.setattr(sys, "argv", ["figures", str(folder), str(tmp_path / "begun")])
    with pytest.raises(SystemExit):
        figures.main()
    assert says(capsys.readouterr().err, "error: no table is written without ... begun: unfinished")


def test_a_word_that_no_row_holds_is_one_line(figures, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["figures", "--rows", "nope"])
    with pytest.raises(SystemExit):
        figures.main()
    assert says(capsys.readouterr().err, "error: no row of tiny holds 'nope': pld, ... mirror_hybrid")


def test_a_table_of_a_slow_phase_is_refused(figures, tmp_path, monkeypatch, capsys):
    folder = run_of(tmp_path, "pld", faster(1.5) | phase(slowed(product=0.3))).folder
    written = []
    monkeypatch.setattr(figures, "write", written.append)
    monkeypatch.setattr(sys, "argv", ["figures", str(folder)])
    with pytest.raises(SystemExit):
        figures.main()
    assert says(
        capsys.readouterr().err, "error: ... slow phase ... pld: a matrix product 30% ... --any-phase"
    )
    assert not written
    monkeypatch.setattr(sys, "argv", ["figures", "--any-phase", str(folder)])
    assert figures.main() == 0 and len(written) == 1


@pytest.fixture
def looks(monkeypatch, figures) -> tuple[Probes, list[dict], list[float]]:
    """Probes that find what stands in a list, on a clock that sleeping alone moves; how long it slept."""
    found, slept = [], []
    monkeypatch.setattr(speed, "probe", lambda device: found.pop(0))
    monkeypatch.setattr(figures.time, "monotonic", lambda: sum(slept))
    monkeypatch.setattr(figures.time, "sleep", slept.append)
    probes = Probes(torch.device("cpu"))
    monkeypatch.setattr(speed, "remember", lambda machine, figures: QUIET)
    return probes, found, slept


def test_a_slow_phase_is_waited_for_or_refused(figures, looks, capsys):
    probes, found, slept = looks
    slow = slowed(product=0.3)
    found[:] = [QUIET]
    figures.wait_for_speed(probes, 0, False)
    assert not found and not slept and capsys.readouterr().out == ""
    found[:] = [slow]
    with pytest.raises(UserError, match="--wait MINUTES"):
        figures.wait_for_speed(probes, 0, False)
    assert "slow now: a matrix product 30%" in capsys.readouterr().out and not slept
    found[:] = [slow, slow, QUIET]
    figures.wait_for_speed(probes, 5, False)
    assert not found and slept == [30.0, 30.0]
    found[:] = [slow] * 20
    with pytest.raises(UserError):
        figures.wait_for_speed(probes, 1, False)
    assert len(found) == 17
    found[:] = [slow]
    figures.wait_for_speed(probes, 0, True)
    assert not found


@pytest.fixture
def questions(tmp_path, monkeypatch) -> None:
    """A file in place of Spec-Bench's, which not every machine has."""
    (tmp_path / "questions.jsonl").write_text('{"question_id": 1, "category": "qa", "turns": ["Why?"]}\n')
    monkeypatch.setattr("specbench.data.questions._check_sha256", lambda *_: None)
    monkeypatch.setenv("SPEC_BENCH_QUESTIONS", str(tmp_path / "questions.jsonl"))


@pytest.mark.slow
@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("pair", "label"),
    [(pair, label) for pair, rows in load_script("figures").ROWS_OF.items() for label in rows],
)
def test_rows_of_the_tables_can_be_measured(figures, pair, label, tmp_path, questions):
    row = figures.ROWS_OF[pair][label]
    folder = figures.run_folder(row, tmp_path / figures.slug(label), ["threads=1"])
    assert figures.is_due(folder, 0)
    assert {"processes": 1, "threads": 1}.items() <= store.read_config(folder).items()


def test_labels_give_folders_of_their_own(figures):
    assert figures.slug("recycling (memory=run)") == "recycling-memory-run"
    for rows in figures.ROWS_OF.values():
        assert len({figures.slug(label) for label in rows}) == len(rows)


@pytest.mark.slow
def test_rows_are_measured_in_rounds_and_gone_on_with(figures, tmp_path, monkeypatch):
    """Each row with one process, then each with another; a process that was stopped halfway first."""
    done, stops, asked = [], [4], []

    def measure_process(folder: Path) -> None:
        """Measures a share, or half of one where it is stopped."""
        cfg = store.read_config(folder)
        count = len(store.read_records(folder))
        questions = load_questions(OmegaConf.create(cfg["data"]), OmegaConf.create(cfg["task"]))
        stopped = len(done) + 1 in stops
        done.append((folder.name, count / len(questions)))
        with store.open_journal(folder) as journal:
            repeat, left = divmod(count, len(questions))
            for question in questions[left : len(questions) // 2 if stopped else None]:
                journal.append(record(question.question_id) | {"repeat": repeat, "process": repeat})
        if stopped:
            stops.clear()
            raise KeyboardInterrupt
        if repeat == 2:
            write_json(folder / store.SUMMARY, {})

    monkeypatch.setattr(store, "changed_since", lambda *_: [])  # they have no provenance
    monkeypatch.setattr(figures, "measure_process", measure_process)
    rows = {"a b": ("method=pld",), "b": ("method=sps",)}

    def measure():
        return figures.measure(
            rows, tmp_path, ["processes=3", "data.limit=1"], lambda: asked.append(len(done))
        )

    with pytest.raises(KeyboardInterrupt):
        measure()
    assert measure() == [tmp_path / "a-b", tmp_path / "b"]
    assert done == [("a-b", 0), ("b", 0), ("a-b", 1), ("b", 1), ("b", 1.5), ("a-b", 2), ("b", 2)]
    assert asked == list(range(7)), "the machine is looked at before each process"
    assert measure() and len(done) == 7
    (tmp_path / "b" / store.SUMMARY).unlink()  # stopped between the last question and the summary
    monkeypatch.setattr(figures, "measure_process", lambda folder: done.append(folder.name))
    assert measure() and done[7:] == ["b"] * 3


@pytest.mark.slow
def test_a_process_that_fails_ends_it(figures, tmp_path):
    with pytest.raises(UserError, match="nothing ended with exit code 2"):
        figures.measure_process(tmp_path / "nothing")


def test_runs_of_a_pair_without_a_page_are_printed(figures, tmp_path, capsys):
    other = run_of(tmp_path / "runs", "a", faster(1.37) | {"pair": "somewhere"})
    figures.write([other], tmp_path)
    assert "1.37" in capsys.readouterr().out
    assert not (tmp_path / "docs").exists()


def test_the_page_of_a_method_has_its_rows(figures, tmp_path):
    pages = tmp_path / "docs" / "methods"
    pages.mkdir(parents=True)
    for name, heading in (("sps", "`sps`"), ("eagle", "`eagle`, `eagle2`"), ("rest", "`rest`")):
        text = f"# {heading}: a method\n\n<!-- tiny:begin -->\n\nold\n\n<!-- tiny:end -->\n"
        (pages / f"{name}.md").write_text(text, encoding="utf-8")
    (pages / "pld.md").write_text("# `pld`: no markers\n", encoding="utf-8")
    names = {"sps": 1.5, "eagle": 1.6, "eagle2": 1.7, "pld": 1.8}
    runs = [run_of(tmp_path / "runs", n, faster(speedup, method=n)) for n, speedup in names.items()]
    runs[0].summary["failed"] = 2
    waiting = {pages / "sps.md": (pages / "sps.md").read_text().replace("a method", "changed")}
    found = figures.method_pages(runs, figures.PAGES[0], tmp_path, waiting)
    written = {path.stem: text for path, text in found.items()}
    assert written.keys() == {"sps", "eagle"} and "changed" in written["sps"]
    assert "| 1.50 [" in written["sps"] and "| 1.60 [" not in written["sps"] and "old" not in written["sps"]
    assert "| 1.60 [" in written["eagle"] and "| 1.70 [" in written["eagle"]
    assert "**FAILED: [in full](../results/methods.md)**" in written["sps"]
    assert "in full" not in written["eagle"]


def test_the_page_of_conversations_shows_every_kind_and_counts_all():
    module = load_script("conversations")
    rows = [
        {
            "kind": "rare" if i == 0 else "chat",
            "messages": [
                {"role": "user", "content": f"Question {i}?"},
                {"role": "assistant", "content": f"```code``` {i}"} | ({"complete": False} if i % 2 else {}),
            ],
        }
        for i in range(60)
    ]
    pool = {"tokens": 30, "turns": 30, "cut": 15, "dropped": {"answer: loop": 2, "short answer": 1}}
    log = [{"settings": {"target": "t"}}, pool | {"conversations": {"chat": 29, "rare": 1}}]
    text = module.page(rows, [*log, pool | {"conversations": {"chat": 30}}])
    assert "60 conversations of 60 turns, 60 tokens of answers. 50% of the answers were cut" in text
    assert "| chat | 59 | 98.3% |" in text and "| answer: loop | 4 | 66.7% |" in text
    assert (
        text.count("\nQuestion:\n") == 24 and text.count("\nAnswer:\n") + text.count("\nAnswer, cut:\n") == 24
    )
    assert "```code``` 0" in text and text.count(module.FENCE) == 2 * 48
