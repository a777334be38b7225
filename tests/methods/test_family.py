"""The embedded family from nothing, at toy scale: all drafters learn from the same answers, nothing is done twice."""

from __future__ import annotations

import json
from subprocess import CompletedProcess

import pytest
import torch

from methods import family
from specbench.training import RECORD

DRAFTERS = ("draft", "s2d", "streaming", "kangaroo", "kangaroo_shallow")


def test_every_drafter_is_told_the_same(tmp_path):
    trained = {
        step.name: step.command for step in family.steps(tmp_path, family.WHOLE) if step.name in DRAFTERS
    }
    assert set(trained) == set(DRAFTERS)
    shared = ("conversations", "steps", "batch_size", "accumulate", "length", "prompt_weight", "seed")
    told = [{word for word in command if word.partition("=")[0] in shared} for command in trained.values()]
    assert all(one == told[0] for one in told) and len(told[0]) == 6


def test_a_step_that_fails_ends_the_build(tmp_path, monkeypatch):
    monkeypatch.setattr(family.subprocess, "run", lambda command, **_: CompletedProcess(command, 3))
    step = family.Step("answers", 1.0, tmp_path / "deep.done", ("methods.answer",))
    with pytest.raises(SystemExit, match="3"):
        family.run(step, 1)
    assert not step.result.exists()
    monkeypatch.setattr(family.subprocess, "run", lambda command, **_: CompletedProcess(command, 0))
    family.run(step, 1)
    assert step.result.exists()


def test_answers_are_shuffled_whole_and_alike(tmp_path):
    for name in ("shallow", "deep"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{name} {i}\n" for i in range(50)))
    family.shuffle(tmp_path)
    both = (tmp_path / "both.jsonl").read_text().splitlines()
    assert len(both) == 100 and sorted(both) != both
    family.shuffle(tmp_path)
    assert (tmp_path / "both.jsonl").read_text().splitlines() == both


@pytest.mark.slow
@pytest.mark.process
def test_the_family_is_made_from_nothing_and_once(tmp_path, monkeypatch, capsys):
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    arguments = ["--smoke", "--out", str(tmp_path), "--threads", "1"]
    assert family.main(arguments) == 0
    torch.use_deterministic_algorithms(deterministic)
    torch.set_num_threads(threads)
    records = {name: json.loads((tmp_path / "weights" / name / RECORD).read_text()) for name in DRAFTERS}
    for key in ("data", "tokens", "steps", "prompt_weight"):
        assert len({record[key] for record in records.values()}) == 1, key
    assert records["draft"]["data"].startswith("sha256:") and records["draft"]["held_out_agreement"] >= 0
    assert (tmp_path / "weights" / "vocab_map" / "vocab_map.json").exists()

    def never(*_, **__):
        raise AssertionError("what is there is not made again")

    monkeypatch.setattr(family.subprocess, "run", never)
    monkeypatch.setattr("specbench.training.train", never)
    assert family.main(arguments) == 0
    torch.use_deterministic_algorithms(deterministic)
    torch.set_num_threads(threads)

    other = records["s2d"] | {"data": "sha256:another"}
    (tmp_path / "weights" / "s2d" / RECORD).write_text(json.dumps(other))
    assert family.main(arguments) == 1 and "different answers" in capsys.readouterr().err
    torch.use_deterministic_algorithms(deterministic)
    torch.set_num_threads(threads)
