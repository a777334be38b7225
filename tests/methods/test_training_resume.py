"""Trainings that were stopped or finished: what goes on, as it began and with the same text alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from omegaconf import OmegaConf

from methods.common import training as common
from methods.eagle3 import train as eagle3_train
from methods.kangaroo import train as kangaroo_train
from specbench import ROOT
from specbench.data.training import train
from specbench.data.training_folder import CONDITIONS, RECORD, data_of
from specbench.system.errors import UserError
from specbench.system.files import lock_folder, make_folder, read_json
from tests.support.commands import wait_for
from tests.support.training import (
    Stopped,
    log,
    stop_after,
    strided,
    training_overrides,
    training_settings,
)

pytestmark = pytest.mark.usefixtures("fresh_accelerator")


@pytest.mark.slow
def test_a_stopped_training_goes_on_only_as_it_began(workplace, tmp_path, monkeypatch):
    def settings(*more):
        return training_settings("train_kangaroo", workplace, tmp_path, *more)

    stop_after(monkeypatch, kangaroo_train.Distillation, 20)
    with pytest.raises(Stopped):
        kangaroo_train.train(settings())
    monkeypatch.undo()
    monkeypatch.setattr(common, "load_pair", None)  # it is told before anything is loaded
    for more in ("learning_rate=1e-4", "steps=10", "exit_layer=1", "batch_size=2"):
        key = more.partition("=")[0]
        with pytest.raises(UserError, match=f" {key}="):
            kangaroo_train.train(settings(more))
    monkeypatch.undo()
    assert kangaroo_train.train(settings("save_every=10")).is_dir()


@pytest.mark.slow
def test_a_training_for_other_weights_at_the_same_path_is_not_continued(workplace, tmp_path, monkeypatch):
    target = tmp_path / "target"
    shutil.copytree(workplace / "target", target)

    def settings():
        return training_settings(
            "train_kangaroo", workplace, tmp_path / "out", "steps=2", f"pair.target={target}"
        )

    out = kangaroo_train.train(settings())
    monkeypatch.setattr(common, "load_pair", None)
    assert kangaroo_train.train(settings()) == out
    conditions = read_json(out / CONDITIONS)
    (out / CONDITIONS).write_text(
        json.dumps({key: conditions[key] for key in conditions if key != "target_files"})
    )
    assert kangaroo_train.train(settings()) == out, "older records lack it"
    (out / CONDITIONS).write_text(json.dumps(conditions))
    with (target / "model.safetensors").open("ab") as file:
        file.write(b" ")
    with pytest.raises(UserError, match=r"holds a training with target_files=\w{16}, not \w{16}"):
        kangaroo_train.train(settings())


@pytest.mark.slow
def test_the_folder_of_another_trainer_is_called_that(workplace, tmp_path, monkeypatch):
    cfg = training_settings("train_kangaroo", workplace, tmp_path, "steps=2", "save_every=1")
    kangaroo_train.train(cfg)
    monkeypatch.setattr(common, "load_pair", None)
    with pytest.raises(UserError, match=r"another trainer or version .*draft_steps.*exit_layer"):
        eagle3_train.train(training_settings("train_eagle3", workplace, tmp_path, "steps=2", "save_every=1"))


@pytest.mark.slow
@pytest.mark.parametrize(("calls", "message"), [(10, "nothing was saved yet"), (20, "resumes from step 15$")])
def test_a_training_that_is_stopped_says_from_where_it_goes_on(
    workplace, tmp_path, monkeypatch, calls, message
):
    forward, left = kangaroo_train.Distillation.forward, iter(range(calls))

    def limited(self, batch):
        if next(left, None) is None:
            signal.raise_signal(signal.SIGTERM)
        return forward(self, batch)

    monkeypatch.setattr(kangaroo_train.Distillation, "forward", limited)
    with pytest.raises(KeyboardInterrupt, match=message):
        kangaroo_train.train(training_settings("train_kangaroo", workplace, tmp_path))


@pytest.mark.process
@pytest.mark.slow
def test_sigterm_ends_a_trainer_as_ctrl_c_does(workplace, tmp_path):
    """With a line and its exit code, and no folder of its own is left."""
    out, scratch = tmp_path / "out", make_folder(tmp_path / "scratch")
    arguments = training_overrides(workplace, out, "steps=100000", "save_every=200")
    command = [sys.executable, "-m", "specbench", "train", "kangaroo", *arguments]
    env = os.environ | {"TMPDIR": str(scratch)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env) as child:
        try:
            wait_for(lambda: [*out.glob("checkpoints/state-*")] or child.poll() is not None)
            child.terminate()
            _, err = child.communicate(timeout=60)
        finally:
            child.kill()
    assert child.returncode == 130 and "stopped; the same command resumes from" in err
    assert not [*scratch.glob("tmp*")]


@pytest.mark.slow
def test_a_stopped_training_goes_on_with_the_same_text_alone(workplace, tmp_path, monkeypatch):
    """Wherever the text lies. What is begun anew in the same folder has a log of its own."""
    talk, out = tmp_path / "talk.jsonl", tmp_path / "out"
    shutil.copy(workplace / "talk.jsonl", talk)

    def settings(file, folder=out, *more):
        return training_settings("train_kangaroo", workplace, folder, f"conversations={file}", *more)

    stop_after(monkeypatch, kangaroo_train.Distillation, 20)
    with pytest.raises(Stopped):
        kangaroo_train.train(settings(talk))
    monkeypatch.undo()
    anew = tmp_path / "anew"
    shutil.copytree(out, anew)
    shutil.rmtree(anew / "checkpoints")
    talk.write_text(talk.read_text() * 2)
    with pytest.raises(UserError, match="holds a training with conversations=sha256:"):
        kangaroo_train.train(settings(talk))
    question = {"question_id": 1, "category": "qa", "turns": ["Another one?"]}
    (tmp_path / "q.jsonl").write_text(json.dumps(question) + "\n")
    with pytest.raises(UserError, match="holds a training with questions="):
        kangaroo_train.train(settings(workplace / "talk.jsonl", out, f"data.path={tmp_path}/q.jsonl"))
    record = read_json(kangaroo_train.train(settings(workplace / "talk.jsonl")) / RECORD)
    assert record["data"] == data_of(settings(workplace / "talk.jsonl"))
    kangaroo_train.train(settings(talk, anew))
    assert [row["step"] for row in log(anew)] == [15, 30, 40]


@pytest.mark.slow
def test_a_finished_training_is_not_made_again(workplace, tmp_path, monkeypatch, capsys):
    def settings(*more):
        return training_settings("train_kangaroo", workplace, tmp_path, "steps=2", "save_every=1", *more)

    out = kangaroo_train.train(settings())
    files = {path: path.read_bytes() for path in out.iterdir() if path.is_file()}
    monkeypatch.setattr(common, "load_pair", None)
    assert kangaroo_train.train(settings("save_every=2")) == out
    assert capsys.readouterr().out.endswith(f"already there: {out}\n")
    with pytest.raises(UserError, match="holds a training with learning_rate="):
        kangaroo_train.train(settings("learning_rate=1e-4"))
    with pytest.raises(UserError, match="holds a training with save_dtype=float32, not bfloat16"):
        kangaroo_train.train(settings("save_dtype=bfloat16"))
    assert len(log(out)) == 2 and {path: path.read_bytes() for path in files} == files
    (out / "model.safetensors").unlink()
    with pytest.raises(
        UserError, match="finished training without model.safetensors: remove it to start anew"
    ):
        kangaroo_train.train(settings())
    (out / CONDITIONS).unlink()  # of an older version
    with pytest.raises(UserError, match="finished training without conditions.json"):
        kangaroo_train.train(settings())


@pytest.mark.slow
def test_two_processes_do_not_train_in_one_folder(workplace, tmp_path):
    cfg = training_settings("train_sps", workplace, tmp_path)
    with (
        lock_folder(make_folder(tmp_path / "checkpoints"), "trained"),
        pytest.raises(UserError, match="checkpoints is being trained by another process"),
    ):
        train(torch.nn.Linear(1, 1), strided(()), dict, None, cfg, "nothing")


def test_text_is_known_by_its_split_and_the_settings_of_its_stream():
    """Stored states of one text are none of another."""

    def of(conversations, split="train_sft", **stream):
        pair = {"training": {"_target_": "stream", **stream}}
        return data_of(OmegaConf.create({"conversations": conversations, "split": split, "pair": pair}))

    assert of("a/set") == "a/set:train_sft" != of("a/set", "test_sft")
    assert of(None) == "stream" != of(None, world=2) == "stream(world=2)"
