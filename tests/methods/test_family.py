"""The embedded family from nothing, at toy scale: all drafters learn from the same answers, nothing is done twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
import torch

from methods import family
from methods.common import build
from specbench import ROOT
from specbench.data.conversations import HELD_OUT_EVERY
from specbench.data.training_folder import RECORD
from specbench.system.errors import UserError
from tests.support.commands import wait_for
from tests.support.conf import composed


def trained_on_answers(folder) -> dict[str, tuple[str, ...]]:
    """The commands of the trainings that read the target's states, by the name of the part."""
    groups = family.steps(family.Build(folder, family.FULL), family.WHOLE)
    commands = {
        step.name: step.command for group in groups for step in group if isinstance(step.command, tuple)
    }
    return {
        name: command
        for name, command in commands.items()
        if any(word.startswith("states=") for word in command)
    }


# Those that judge another number of tokens than the rest: several guesses of each, or the tokens of blocks.
JUDGED = {"mtp": 200, "peagle": 200, "dflash": None, "dspark": None, "dflash2": None}


def test_every_drafter_is_told_the_same(tmp_path):
    trained = trained_on_answers(tmp_path)
    parts = {Path(folder).name for folder in composed("bench", "pair=tiny").pair.parts.values()}
    counted = {"rest", "vocab_map", "sps_tree"}
    assert set(trained) > (parts - counted) | {"draft"}
    shared = ("conversations", "batch_size", "length", "prompt_weight", "seed")
    told = [{word for word in command if word.partition("=")[0] in shared} for command in trained.values()]
    assert all(one == told[0] for one in told) and len(told[0]) == len(shared)
    tokens = {name: word for name, command in trained.items() for word in command if "loss_tokens=" in word}
    assert tokens == {
        name: f"loss_tokens={JUDGED.get(name, family.WHOLE.loss_tokens)}".replace("None", "null")
        for name in trained
    }
    steps = {
        name: int(word.removeprefix("steps="))
        for name, command in trained.items()
        for word in command
        if word.startswith("steps=")
    }
    (first,) = (stage for stage in family.FULL.stages if stage.name == "draft")
    for name in ("draft", "streaming", "pard"):  # they begin as a model that has seen text of the same rows
        steps[name] += first.schedule.steps * first.batch // 4
    assert len(steps) == len(trained) and len(set(steps.values())) == 1


def test_paths_are_quoted_where_hydra_needs_it(tmp_path):
    out = tmp_path / "a, b (new)"
    cfg = composed("train_sps", *trained_on_answers(out)["draft"][1:])
    paths = (
        cfg.conversations,
        cfg.states,
        cfg.draft,
        cfg.pair.target,
        cfg.pair.tokenizer,
        cfg.data.path,
        cfg.out,
    )
    assert all(Path(path).is_relative_to(out) for path in paths)


def test_a_step_that_fails_ends_the_build_with_its_last_line(tmp_path, monkeypatch):
    done, failing = [], {"wrong"}

    def process(target, args) -> SimpleNamespace:
        (name,), log, _threads = args
        done.append(name)
        log.write_text("tried\nno room\n")
        return SimpleNamespace(start=lambda: None, join=lambda: None, exitcode=3 if name in failing else 0)

    monkeypatch.setattr(build, "CONTEXT", SimpleNamespace(Process=process))
    right, wrong, later = (
        build.Step(name, 1.0, tmp_path / f"{name}.done", (name,)) for name in ("right", "wrong", "later")
    )
    with pytest.raises(SystemExit, match=r"wrong failed \(.*wrong.log\): no room"):
        build.run_all([[right, wrong], [later]], tmp_path / "logs", cores=1, label="x")
    assert done == ["right", "wrong"] and right.result.exists() and not wrong.result.exists()
    failing.clear()
    build.run_all([[right, wrong], [later]], tmp_path / "logs", cores=2, label="x")
    assert len(done) == 4, "what is done is not done again"


def test_a_result_of_another_command_is_refused(tmp_path, monkeypatch):
    result = tmp_path / "training.json"

    def process(target, args) -> SimpleNamespace:
        return SimpleNamespace(start=lambda: result.write_text("{}"), join=lambda: None, exitcode=0)

    def step(*arguments: str) -> build.Step:
        return build.Step("heads", 1.0, result, ("train", *arguments))

    def make(*arguments: str) -> None:
        build.run_all([[step(*arguments)]], tmp_path / "logs", cores=1, label="x")

    monkeypatch.setattr(build, "CONTEXT", SimpleNamespace(Process=process))
    make("steps=1000", "seed=1")
    make("steps=1000", "seed=1")
    with pytest.raises(
        UserError, match=r"made with 'steps=1000', not 'steps=2000': .*delete .*training\.json"
    ):
        make("steps=2000", "seed=1")
    step().made_by.unlink()  # an older build did not tell
    make("steps=2000", "seed=1")


def test_a_module_that_is_no_program_is_told(tmp_path, monkeypatch):
    nothing = SimpleNamespace(start=lambda: None, join=lambda: None, exitcode=0)
    monkeypatch.setattr(build, "CONTEXT", SimpleNamespace(Process=lambda target, args: nothing))
    step = build.Step("heads", 1.0, tmp_path / "training.json", ("train",))
    with pytest.raises(
        SystemExit, match=r"heads left no .*training\.json .*: does its module run as a program"
    ):
        build.run_all([[step]], tmp_path / "logs", cores=1, label="x")


def test_an_interrupted_build_ends_what_runs_and_begins_nothing(tmp_path, monkeypatch):
    began, ended, released = [], [], Event()

    def process(target, args) -> SimpleNamespace:
        (name,), _log, _threads = args

        def terminate() -> None:
            ended.append(name)
            released.set()

        return SimpleNamespace(
            start=lambda: began.append(name), join=released.wait, terminate=terminate, exitcode=-15
        )

    def interrupted(futures):
        while not began:
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "CONTEXT", SimpleNamespace(Process=process))
    monkeypatch.setattr(build, "as_completed", interrupted)
    steps = [build.Step(name, 1.0, tmp_path / name / "x.json", (name,)) for name in ("first", "second")]
    with pytest.raises(KeyboardInterrupt):
        build.run_all([steps], tmp_path / "logs", cores=1, label="x")
    assert began == ["first"] and set(ended) == {"first"}


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_step_ends_with_the_build(tmp_path, number):
    """Also where the build has no time to end it."""
    (tmp_path / "sleeps.py").write_text(
        "import os, pathlib, time\npathlib.Path('pid').write_text(f'{os.getpid()}\\n')\ntime.sleep(600)\n"
    )
    (tmp_path / "builds.py").write_text(
        "from pathlib import Path\n"
        "from methods.common.build import Step, run_all\n"
        "if __name__ == '__main__':\n"
        "    run_all([[Step('sleeps', 1.0, Path('done'), ('sleeps',))]], Path('logs'), 1, 'x')\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    process = subprocess.Popen([sys.executable, "builds.py"], cwd=tmp_path, env=environment)
    pid = tmp_path / "pid"
    wait_for(lambda: pid.exists() and pid.read_text().endswith("\n"))
    process.send_signal(number)
    process.wait()
    wait_for(lambda: not is_running(int(pid.read_text())))


def is_running(pid: int) -> bool:
    """Whether there is such a process, other than one that has ended and waits to be asked about."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(("deep", "lines", "prompts"), [(147, 297, 3), (150, 300, 3), (300, 449, 7)])
def test_answers_are_shuffled_whole_and_alike(tmp_path, deep, lines, prompts):
    for name, count in (("shallow", 150), ("deep", deep)):
        talks = [[{"content": f"question {i}"}, {"content": name}] for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"messages": talk}) + "\n" for talk in talks)
        )
    family.shuffle(tmp_path)
    both = (tmp_path / "both.jsonl").read_text().splitlines()
    assert len({*both}) == len(both) == lines and sorted(both) != both
    folds: dict[str, set[bool]] = {}
    for i, line in enumerate(both):
        folds.setdefault(json.loads(line)["messages"][0]["content"], set()).add(i % HELD_OUT_EVERY == 0)
    assert all(len(fold) == 1 for fold in folds.values()), (
        "a prompt is held out with both answers, or learnt with both"
    )
    assert sum(True in fold for fold in folds.values()) == prompts
    family.shuffle(tmp_path)
    assert (tmp_path / "both.jsonl").read_text().splitlines() == both


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.process
def test_the_family_is_made_from_nothing_and_once(tmp_path, monkeypatch, capsys):
    deterministic = torch.are_deterministic_algorithms_enabled()
    arguments = ["--smoke", "--out", str(tmp_path), "--cores", "1"]
    assert family.main(arguments) == 0
    torch.use_deterministic_algorithms(deterministic)
    folders = {name: tmp_path / "weights" / name / RECORD for name in trained_on_answers(tmp_path)}
    records = {name: json.loads(path.read_text()) for name, path in folders.items()}
    for key in ("data", "tokens_in_all", "prompt_weight"):
        assert len({record[key] for record in records.values()}) == 1, key
    others = {record["loss_tokens"] for name, record in records.items() if name not in JUDGED}
    assert others == {family.TOY.loss_tokens}
    assert records["draft"]["data"].startswith("sha256:") and records["draft"]["held_out_agreement"] >= 0
    (first,) = records["streaming"]["earlier"]
    assert first["begins"].startswith("random weights, with a lookup circuit") and first["tokens"] > 0
    assert records["s2d"]["earlier"] == [] and records["s2d"]["begins"].startswith(
        "layers 0, 1 of the target"
    )
    assert (tmp_path / "weights" / "vocab_map" / "vocab_map.json").exists()
    assert (tmp_path / "weights" / "sps_tree_shallow" / "tree.json").exists()
    assert "below 0.6" in capsys.readouterr().out
    assert set(json.loads((tmp_path / "weights" / "soundness.json").read_text())) == {
        "target",
        "target_shallow",
    }

    def never(*_, **__):
        raise AssertionError("what is there is not made again")

    monkeypatch.setattr(build, "CONTEXT", SimpleNamespace(Process=never))
    monkeypatch.setattr("specbench.data.training.train", never)
    assert family.main(arguments) == 0
    torch.use_deterministic_algorithms(deterministic)

    other = records["s2d"] | {"data": "sha256:another"}
    (tmp_path / "weights" / "s2d" / RECORD).write_text(json.dumps(other))
    assert family.main(arguments) == 1 and "not trained alike" in capsys.readouterr().err
    torch.use_deterministic_algorithms(deterministic)
