"""The check for a GPU, on a CPU: it reads the configuration as Hydra does, needs nothing that a bare machine lacks, and
what goes wrong in a part stays there."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from omegaconf import OmegaConf

from specbench import ROOT
from specbench.config.spec import RunSpec
from specbench.models.expansion import embedded
from tests.benchmarks.gpu import __main__ as check
from tests.benchmarks.gpu import answers, bundle, figures
from tests.benchmarks.gpu.figures import Check, Figure, TimeUp
from tests.benchmarks.gpu.parts import PARTS, Part
from tests.benchmarks.gpu.report import markdown
from tests.benchmarks.gpu.settings import method_settings, names, pair_settings, trimming
from tests.support.conf import composed, is_hub_id

MISSING = ("hydra", "omegaconf", "antlr4", "greenlet", "wandb", "datasets")


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("method", names("method"))
def test_a_method_is_configured_as_by_hydra(method):
    cfg = composed("bench", f"method={method}", "settings=published")
    OmegaConf.resolve(cfg)
    assert method_settings(method, pair_settings("tiny")) == OmegaConf.to_container(cfg.method)
    assert trimming(method, pair_settings("tiny")) == RunSpec.of(cfg).trimmed


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("pair", sorted({*names("pair")} - {"local"}))  # which is of no model
def test_a_pair_is_configured_as_by_hydra(pair):
    cfg = composed("bench", f"pair={pair}").pair
    assert pair_settings(pair) == OmegaConf.to_container(cfg, resolve=True)
    if not (is_hub_id(cfg.target) or cfg.target.startswith("specbench/")):
        return  # a folder that this machine need not have
    cfg.init = "expanded"
    assert pair_settings(pair, init="expanded") == OmegaConf.to_container(embedded(cfg), resolve=True)


def on_a_bare_machine(tmp_path, *command: str) -> subprocess.CompletedProcess:
    """Runs Python where nothing that is `MISSING` can be imported."""
    for name in MISSING:
        (tmp_path / "missing" / name).mkdir(parents=True)
        (tmp_path / "missing" / name / "__init__.py").write_text(f"raise ModuleNotFoundError('no {name}')\n")
    env = os.environ | {"PYTHONPATH": f"{tmp_path / 'missing'}{os.pathsep}{ROOT}"}
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.process
def test_every_method_is_imported_with_torch_and_transformers_alone(tmp_path):
    done = on_a_bare_machine(tmp_path, "-c", "from tests.benchmarks.gpu.answers import alone; print(alone())")
    assert done.returncode == 0 and "'rest'" in done.stdout, done.stderr[-2000:]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.process
def test_the_check_runs_with_torch_and_transformers_alone(tmp_path):
    command = ["-m", "tests.benchmarks.gpu", "--device", "cpu", "--small", "--together", "--minutes", "600"]
    done = on_a_bare_machine(tmp_path, *command, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in (tmp_path / check.RESULTS).read_text().splitlines()]
    figures = [line for line in lines if "name" in line]
    assert {line["part"] for line in figures} == set(PARTS)
    judged = [line for line in figures if line["name"].endswith("violations")]
    assert len(judged) > 10 and all(line["value"] == 0 and line["note"].endswith("1/0/0") for line in judged)
    report = (tmp_path / check.REPORT).read_text()
    assert report.startswith(f"# Check on {lines[0]['machine']}\n") and "narrow models" in report
    assert all(f"## {name}" in report for name in PARTS)


@pytest.mark.process
@pytest.mark.parametrize(
    ("part", "limit", "why"), [("nothing", 60, "exit code 1: KeyError"), ("passes", 0.3, "ended after")]
)
def test_a_part_that_fails_or_hangs_leaves_a_line(monkeypatch, tmp_path, part, limit, why):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(check, "GRACE", 0.0)
    (tmp_path / check.RESULTS).touch()
    file = io.StringIO()
    check.run(part, ["--device", "cpu", "--small", "--out", str(tmp_path)], limit, file)
    (line,) = map(json.loads, file.getvalue().splitlines())
    assert line["part"] == part and why in line["failed"] and line["seconds"] < limit + 30


def test_the_report_says_what_is_not_as_expected():
    figure = {"part": "p", "name": "a", "value": 3.0, "unit": "ms", "low": 1, "high": 2, "note": "n|m\nk"}
    head = {"machine": "H200", "small": False, "time": "now"}
    text, fine = markdown(
        [head, figure, figure | {"name": "b", "high": 4}, figure | {"name": "c", "value": None}]
    )
    assert not fine and "3 figures, 2 not as expected, 0 parts" in text
    assert "| **a** | 3 ms | 1 to 2 |" in text and "\n| b | 3 ms | 1 to 4 |" in text
    assert "| **c** | not measured ms |" in text
    open_ended = figure | {"low": None, "high": None}
    assert markdown([head, open_ended])[1]
    text, fine = markdown([head, open_ended, {"part": "q", "failed": "exit code 1: no memory"}])
    assert not fine and "- **q**: exit code 1: no memory" in text
    text, fine = markdown([head, open_ended, {"part": "q", "left_out": "no time for sps, pld"}])
    assert fine and "1 of which something was left out" in text
    assert "- q, left out: no time for sps, pld" in text


def ran(monkeypatch, tmp_path, *arguments: str) -> dict[str, float]:
    """The seconds that each part got which was begun, if all of them take as long as they may."""
    limits: dict[str, float] = {}

    def run(name: str, own: list[str], limit: float, file: io.StringIO) -> None:
        limits[name] = limit

    monkeypatch.setattr(
        check, "time", SimpleNamespace(monotonic=lambda: sum(limits.values()), strftime=time.strftime)
    )
    monkeypatch.setattr(check, "run", run)
    assert check.main(["--device", "cpu", "--out", str(tmp_path), *arguments]) == 0, "nothing has failed"
    return limits


def test_parts_share_the_minutes(monkeypatch, tmp_path):
    usual = ran(monkeypatch, tmp_path)
    assert usual.keys() == PARTS.keys() - {"compiled"} and sum(usual.values()) == pytest.approx(540)
    assert "- compiled, left out: all of it: it takes 180 s" in (tmp_path / check.REPORT).read_text()
    longer = ran(monkeypatch, tmp_path, "--minutes", "40")
    assert longer.keys() == PARTS.keys() and longer["passes"] == pytest.approx(usual["passes"] * 40 / 9)
    assert ran(monkeypatch, tmp_path, "--parts", "compiled", "--minutes", "5") == {"compiled": 300}


def test_methods_without_figures_are_measured_first():
    part, own = "embedded-float32", {"part": "embedded-float32"}
    checks = [
        [
            {"machine": "H200"},
            {**own, "name": "tiny float32 ar: violations"},
            {**own, "name": "tiny float32 sps: failed"},
        ],
        [
            {"machine": "H200"},
            {"part": "passes", "name": "tiny float32 pld: violations"},
            {**own, "name": "tiny float32 ar: decode speedup"},
            {**own, "seconds": 3.0},
        ],
    ]
    measured = check.measured_methods(checks, part)
    assert measured == ["sps", "ar"]
    one = Check(torch.device("cpu"), True, print, measured=measured)
    assert one.chosen(["ar", "eagle", "pld", "sps"]) == ["eagle", "pld", "sps", "ar"]
    assert replace(one, methods=["sps", "pld"]).chosen(["ar", "pld", "sps"]) == ["pld", "sps"]


def test_methods_for_which_there_is_no_time_are_named(monkeypatch):
    done: list[str] = []
    monkeypatch.setattr(figures, "time", SimpleNamespace(monotonic=lambda: 4.0 * len(done)))
    monkeypatch.setattr(answers, "Judge", MagicMock())
    monkeypatch.setattr(answers, "Engine", MagicMock())
    monkeypatch.setattr(answers, "told", lambda check, label, *given: done.append(label))
    monkeypatch.setattr(answers, "_inline", lambda *given: {})
    with pytest.raises(TimeUp, match="^pld, medusa$"):
        one = Check(torch.device("cpu"), True, lambda figure: None, end=7.0)
        answers.methods(one, MagicMock(), ["ar", "sps", "pld", "medusa"], 1)
    assert len(done) == 2


def test_a_part_whose_time_is_up_says_what_is_left(monkeypatch, tmp_path):
    def work(one: Check) -> None:
        one.say(Figure("a", 1.0))
        one.go_on("compiled passes", takes=1e6)

    monkeypatch.setitem(PARTS, "passes", Part(work, 1))
    arguments = ["--device", "cpu", "--small", "--together", "--parts", "passes", "--out", str(tmp_path)]
    assert check.main(arguments) == 0 == check.main(arguments)
    assert "- passes, left out: no time for compiled passes" in (tmp_path / check.REPORT).read_text()
    assert [len(lines) for lines in check.lines_of(tmp_path)] == [3, 3], "those of earlier checks are kept"


def test_a_method_that_there_is_not_is_refused(capsys, tmp_path):
    with pytest.raises(SystemExit):
        check.main(["--out", str(tmp_path), "--methods", "sps", "spss"])
    assert "no method of one sequence is called spss" in capsys.readouterr().err


def test_the_bundle_lists_what_is_needed_beside_torch(tmp_path, capsys):
    found = bundle.needed()
    assert {"hydra-core", "omegaconf", "antlr4-python3-runtime", "greenlet", "wandb"} <= found.keys()
    assert not {"torch", "transformers", "sympy"} & found.keys()
    assert found["antlr4-python3-runtime"] == "4.9.3"
    (tmp_path / "list.txt").write_text("Package Version\n------- -------\nnumpy 2.5.2\nJinja2==3.1.6\n")
    assert bundle.main(["--list", "--have", str(tmp_path / "list.txt")]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert f"greenlet=={found['greenlet']}" in listed
    assert not any(line.startswith(("numpy==", "jinja2==")) for line in listed)
