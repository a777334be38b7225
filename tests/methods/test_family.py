"""The embedded family from nothing, at toy scale: all drafters learn from the same answers, nothing is done twice."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from methods import family
from methods.common import build
from specbench.data.training import RECORD
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


def test_answers_are_shuffled_whole_and_alike(tmp_path):
    for name in ("shallow", "deep"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{name} {i}\n" for i in range(50)))
    family.shuffle(tmp_path)
    both = (tmp_path / "both.jsonl").read_text().splitlines()
    assert len(both) == 100 and sorted(both) != both
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
