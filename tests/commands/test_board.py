"""Spec-Bench's leaderboard on its own pair: every job is composed and checked, without a network or a weight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from specbench import ROOT
from specbench.commands import run as bench
from specbench.commands.sweep import FAILED, LEFT_OUT, OK, Job
from specbench.config.compose import CONF
from specbench.measure.records import run_folder as store
from tests.support.conf import composed

BOARD = OmegaConf.load(CONF / "experiment" / "spec_bench_board.yaml").hydra.sweeper.params.method.split(",")
# What pair=vicuna-7b does not come with, by the methods that cannot do without it.
LACKING = {
    "rest": "rest",
    "kangaroo": "kangaroo",
    "kangaroo_tree": "kangaroo",
    "eagle3": "eagle3",
}


def jobs(runs_root: Path, *overrides: str) -> list[Job]:
    """The jobs of `-m experiment=spec_bench_board pair=vicuna-7b data=spec_bench`, with questions that are there."""
    here = f"data.path={ROOT}/specbench/tiny/questions.jsonl", "data.sha256=null", "data.limit=1"
    chosen = "experiment=spec_bench_board", "pair=vicuna-7b", "data=spec_bench", *overrides
    return [
        Job(
            [f"method={method}"],
            composed("bench", *chosen, f"method={method}", *here, f"runs_root={runs_root}"),
        )
        for method in BOARD
    ]


def measured(run_dirs: Iterable[Path], _logs: Path) -> Iterator[tuple[Path, int, str | None]]:
    """Instead of measuring."""
    yield from ((run_dir, 0, None) for run_dir in run_dirs)


@pytest.mark.slow
def test_what_a_pair_lacks_is_one_line_for_each_method_and_the_others_go_on(tmp_path, capfd):
    asked = jobs(tmp_path, "leave_out=false")
    bench.run(asked, measured, tmp_path)
    states = {job.overrides[0].partition("=")[2]: job for job in asked}
    assert {name for name, job in states.items() if job.state == FAILED} == LACKING.keys()
    assert all(job.state == OK for name, job in states.items() if name not in LACKING)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == len(LACKING)
    for line, (name, part) in zip(lines, ((n, LACKING[n]) for n in BOARD if n in LACKING)):
        assert f"pair vicuna-7b has no part '{part}', which method {name} needs: train it with" in line
    assert all(states[name].code == 2 and states[name].run_dir is None for name in LACKING)
    folders = {store.read_config(job.run_dir)["method"]["name"] for job in asked if job.run_dir}
    assert folders == set(BOARD) - LACKING.keys()


@pytest.mark.slow
def test_the_board_leaves_out_what_the_pair_lacks(tmp_path, capfd):
    asked = jobs(tmp_path)
    bench.run(asked, measured, tmp_path)
    assert {job.cfg.method.name for job in asked if job.state == LEFT_OUT} == LACKING.keys()
    assert all(job.code == 0 for job in asked)
    assert capfd.readouterr().err.count("left out: pair vicuna-7b has no part") == len(LACKING)


@pytest.mark.slow
def test_with_every_part_the_whole_board_goes(tmp_path):
    parts = [f"++pair.parts.{part}={tmp_path}" for part in set(LACKING.values())]
    asked = jobs(tmp_path, *parts)
    bench.run(asked, measured, tmp_path)
    assert {job.reason for job in asked if job.state != OK} == set()
