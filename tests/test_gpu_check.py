"""The check for a GPU, on a CPU: it reads the configuration as Hydra does, needs nothing that a bare machine lacks, and
what goes wrong in a part stays there."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from specbench import ROOT
from specbench.models.expansion import embedded
from tests.benchmarks.gpu import __main__ as check
from tests.benchmarks.gpu import bundle
from tests.benchmarks.gpu.report import markdown
from tests.benchmarks.gpu.settings import method_settings, names, pair_settings
from tests.support.conf import composed, is_hub_id

MISSING = ("hydra", "omegaconf", "antlr4", "greenlet", "wandb", "datasets")


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("method", names("method"))
def test_a_method_is_configured_as_by_hydra(method):
    cfg = composed("bench", f"method={method}", "settings=published")
    OmegaConf.resolve(cfg)
    assert method_settings(method, pair_settings("tiny")) == OmegaConf.to_container(cfg.method)


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


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.process
def test_the_check_runs_with_torch_and_transformers_alone(tmp_path):
    for name in MISSING:
        (tmp_path / "missing" / name).mkdir(parents=True)
        (tmp_path / "missing" / name / "__init__.py").write_text(f"raise ModuleNotFoundError('no {name}')\n")
    command = [sys.executable, "-m", "tests.benchmarks.gpu", "--device", "cpu", "--small", "--together"]
    path = f"{tmp_path / 'missing'}{os.pathsep}{ROOT}"
    done = subprocess.run(
        [*command, "--out", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in (tmp_path / check.RESULTS).read_text().splitlines()]
    figures = [line for line in lines if "name" in line]
    from tests.benchmarks.gpu.parts import PARTS

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
def test_a_part_that_fails_or_hangs_leaves_a_line(monkeypatch, part, limit, why):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    file = io.StringIO()
    check.run(part, ["--device", "cpu", "--small"], limit, file)
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
