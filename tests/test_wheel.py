"""The wheel alone, in an empty folder: nothing of the checkout is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specbench import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.process]

MINE = """
from specbench.decoding.drafter import Drafter
from specbench.decoding.state import Draft


class Repeat(Drafter):
    deterministic = True

    def __init__(self, pair, times: int = 2):
        self.max_draft_tokens = times

    def draft(self, batch):
        drafts = [sequence.tokens[-1:] * limit for sequence, limit in zip(batch.sequences, batch.limits)]
        return Draft.of(drafts, batch.tokens.device)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with the unpacked wheel, which comes before the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    target = folder / "site"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
    ]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    return target


def specbench(installed: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess:
    """The console command, as the wheel installs it."""
    return subprocess.run(
        [sys.executable, str(installed / "bin" / "specbench"), *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=300,
    )


SHORT = ("data.limit=1", "task=qa", "decoding.max_new_tokens=8", "generate=false", "remeasure=0")


def test_no_common_name_is_taken(installed):
    names = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert names == {"bin", "specbench", "hydra_plugins"}


def test_a_run_writes_to_the_working_directory(installed, tmp_path):
    (tmp_path / "methods.py").touch()  # of the user's, and none of ours
    done = specbench(installed, tmp_path, "run", "method=kangaroo", *SHORT)
    assert done.returncode == 0, done.stderr
    run_dir = tmp_path / done.stdout.splitlines()[-1]
    assert run_dir.parent == tmp_path / "runs" and (run_dir / "summary.json").exists()
    assert (
        '"commit"' not in (run_dir / "provenance.json").read_text()
    )  # of whatever repository lies around it
    report = specbench(installed, tmp_path, "report")
    assert report.returncode == 0 and (tmp_path / "runs" / "report" / "index.html").exists(), report.stderr


@pytest.mark.nightly
def test_a_method_of_the_users_own(installed, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "conf" / "method").mkdir(parents=True)
    (tmp_path / "conf" / "method" / "repeat.yaml").write_text(
        "_target_: mine.Repeat\nname: repeat\ntimes: 2\n"
    )
    done = specbench(installed, tmp_path, "run", "method=repeat", *SHORT)
    assert done.returncode == 0 and "_repeat_" in done.stdout.splitlines()[-1], done.stderr
    summary = json.loads((tmp_path / done.stdout.splitlines()[-1] / "summary.json").read_text())
    assert summary["overall"]["judged_by_position"], "it drafted"
    logged = specbench(installed, tmp_path, "log", done.stdout.splitlines()[-1], "--mode", "offline")
    assert logged.returncode == 0 and "wandb sync" in logged.stdout, logged.stderr
    wrong = specbench(installed, tmp_path, "run", "method=repeet")
    assert wrong.returncode == 2 and "repeat" in wrong.stderr
    wrong = specbench(installed, tmp_path, "run", "method=repeat", "method.time=3")
    assert wrong.returncode == 2 and "times" in wrong.stderr


def test_a_trainer_finds_its_configuration(installed, tmp_path):
    done = specbench(installed, tmp_path, "train", "sps", "steps=0")
    assert done.returncode == 2 and "steps" in done.stderr
