"""The notebooks run from top to bottom on real run folders, and are in git without outputs."""

from __future__ import annotations

import nbformat
import pytest
from nbclient import NotebookClient

from specbench import ROOT
from specbench.measure.metrics.summary import summarise
from specbench.measure.records import run_folder as store
from specbench.system.errors import UserError
from specbench.system.files import finite, write_json
from tests.support.synthetic import CONFIG, FACTS, answered, columns, generation

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def run_folder(root, method, slow, facts=FACTS, generate=None):
    """A run whose method is `slow` times as fast as our loop; generate: seconds of each step of transformers' own."""
    folder = root / f"2026-01-01_00000{slow}_{method}"
    folder.mkdir(parents=True)
    accepted = [(2, 3, 5, 0), (1, 4, 5), (5, 5, 2, 1, 0)]
    records = [
        answered(i, task, accepted[i % 3], slow=slow) for i, task in enumerate(["qa", "rag"] * 4, start=1)
    ]
    for record in records if generate else []:
        arms = record["turns"][0]["arms"]
        n = len(arms["method"][0]["tokens"]) - 1
        step = {
            "accepted": 0,
            "drafted": 0,
            "draft_seconds": 0,
            "verify_seconds": generate,
            "other_seconds": 0,
        }
        arms["hf_generate"] = [
            generation(seconds=0.1 + n * generate, tokens=n + 1) | {"steps": columns([step] * n)}
        ]
    config = CONFIG | {"method": CONFIG["method"] | {"name": method}}
    write_json(folder / store.CODE, {})
    write_json(folder / store.SUMMARY, finite(summarise(records, facts, config)))
    (folder / store.RECORDS).write_text("".join(store.json.dumps(record) + "\n" for record in records))
    store._write_steps(folder / store.STEPS, records)


@pytest.mark.process
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_on_finished_runs(path, tmp_path, monkeypatch):
    for method, slow in (("sps", 2), ("kangaroo", 3)):
        run_folder(tmp_path / "runs", method, slow)
    monkeypatch.setenv("SPECBENCH_RUNS", str(tmp_path / "runs"))
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute(cwd=str(ROOT / "notebooks"))
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/svg+xml" in output.get("data", {}) for output in outputs)
    text = "".join(output.get("data", {}).get("text/html", "") for output in outputs)
    assert (
        "kangaroo" in text if path.stem == "compare_methods" else "3.00" in text
    )  # the faster run's speedup


def test_an_anatomy_is_of_what_the_speedup_is_against(tmp_path, monkeypatch):
    engine = {"name": "vllm", "version": "1", "faults": [], "plain": {}}
    run_folder(tmp_path, "sps", 3, generate=0.01)
    run_folder(tmp_path, "pld", 4, FACTS | {"engine": engine})
    monkeypatch.setenv("SPECBENCH_RUNS", str(tmp_path))
    notebook = nbformat.read(ROOT / "notebooks" / "anatomy_of_a_speedup.ipynb", as_version=4)
    names: dict = {}
    for cell in [cell for cell in notebook.cells if cell.cell_type == "code"][:2]:
        exec(cell.source, names)
    assert names["run"].summary["baseline"]["quoted_against"] == "hf_generate"
    worked_out, measured = names["anatomy"].iloc[3:5]
    assert worked_out == pytest.approx(measured)


def test_an_anatomy_is_of_a_run_that_can_be_deployed(tmp_path, monkeypatch):
    run_folder(tmp_path, "oracle", 9, FACTS | {"reference_answer": True})
    monkeypatch.setenv("SPECBENCH_RUNS", str(tmp_path))
    notebook = nbformat.read(ROOT / "notebooks" / "anatomy_of_a_speedup.ipynb", as_version=4)
    cell = next(cell for cell in notebook.cells if cell.cell_type == "code")
    with pytest.raises(UserError, match="no run in .* drafts for single answers"):
        exec(cell.source, {})
    run_folder(tmp_path, "sps", 3)
    names: dict = {}
    exec(cell.source, names)
    assert names["run"].summary["method"] == "sps"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_has_no_outputs_in_git(path):
    code = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert code and all(not cell.outputs and cell.execution_count is None for cell in code)


def test_there_are_notebooks():
    assert NOTEBOOKS
