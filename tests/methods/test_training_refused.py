"""What a trainer cannot do is one line, before anything is loaded where that can be known."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from methods.common import stored_states
from methods.common import training as common
from methods.common.training import batches
from methods.eagle import train as eagle_train
from methods.eagle3 import train as eagle3_train
from methods.hydra_heads import train as hydra_train
from methods.kangaroo import train as kangaroo_train
from methods.medusa import train as medusa_train
from methods.mirror_sd import train as mirror_train
from methods.pard import train as pard_train
from methods.s2d import train as s2d_train
from methods.sps import train as sps_train
from specbench import ROOT
from specbench.models.pairs import load_pair
from specbench.system.errors import UserError
from tests.support.messages import says
from tests.support.models import random_model
from tests.support.training import (
    training_overrides,
    training_settings,
)

pytestmark = pytest.mark.usefixtures("fresh_accelerator")

TRAINERS = {
    "train_kangaroo": kangaroo_train,
    "train_s2d": s2d_train,
    "train_mirror_sd": mirror_train,
    "train_sps": sps_train,
    "train_eagle": eagle_train,
}


def test_a_model_of_the_users_is_not_replaced(workplace, tmp_path):
    cfg = training_settings("train_kangaroo", workplace, tmp_path, "steps=1", "save_every=1")
    out = Path(cfg.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text("{}")
    with pytest.raises(UserError, match="holds a model that no training run wrote"):
        kangaroo_train.train(cfg)
    assert [path.name for path in out.iterdir() if path.is_file()] == ["config.json"]


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize(
    "setting",
    [
        *("steps=0", "steps=abc", "steps=null", "steps=1.5", "accumulate=0", "batch_size=0", "length=1"),
        *("save_every=0", "learning_rate=0", "learning_rate=nan", "seed=-1", "precision=fp8"),
    ],
)
def test_a_setting_that_cannot_work_is_told_before_anything_is_loaded(
    workplace, tmp_path, monkeypatch, name, setting
):
    trainer = TRAINERS[name]
    monkeypatch.setattr(common, "load_pair", None)
    cfg = training_settings(name, workplace, tmp_path / "out", setting)
    key = setting.partition("=")[0]
    with pytest.raises(UserError, match=f"^(unknown )?{key} "):
        trainer.train(cfg)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("conversations=/nowhere/talk.jsonl", "no conversations file '/nowhere/talk.jsonl'"),
        ("data.path=/nowhere/question.jsonl", "no file '/nowhere/question.jsonl'"),
        ("prompt_weight=1", "prompt_weight must be less than 1"),
        ("states=/nowhere", "there are no states in '/nowhere'"),
        (
            "vocab_sample=8",
            r"states=FOLDER, .*specbench states pair=\w+ conversations=\S+ length=20 .* taps=",
        ),
    ],
)
def test_what_is_missing_is_told_before_anything_is_loaded(
    workplace, tmp_path, monkeypatch, name, setting, message
):
    monkeypatch.setattr(common, "load_pair", None)
    with pytest.raises(UserError, match=message):
        TRAINERS[name].train(training_settings(name, workplace, tmp_path / "out", setting))


@pytest.mark.parametrize("name", ["train_kangaroo", "train_eagle"])
def test_what_only_draft_models_do_is_refused_elsewhere(workplace, tmp_path, monkeypatch, name):
    monkeypatch.setattr(common, "load_pair", None)
    with pytest.raises(UserError, match="gradient_checkpointing=true is for draft models"):
        cfg = training_settings(name, workplace, tmp_path / "out", "gradient_checkpointing=true")
        TRAINERS[name].train(cfg)


@pytest.mark.parametrize(
    ("name", "trainer"), [("train_kangaroo", kangaroo_train), ("train_eagle3", eagle3_train)]
)
def test_a_layer_that_the_target_lacks_is_one_line(workplace, tmp_path, name, trainer):
    cfg = training_settings(name, workplace, tmp_path / "out", "like_layer=4")
    with pytest.raises(UserError, match="like_layer must be a layer of the target, 0 to 3, not 4"):
        trainer.train(cfg)


@pytest.mark.parametrize("layers", ["[0,0]", "[3,1,3]"])
def test_a_layer_that_is_named_twice_is_one_line(workplace, tmp_path, layers):
    cfg = training_settings("train_sps", workplace, tmp_path / "out", f"layers={layers}")
    with pytest.raises(UserError, match="0 to 3, each once, or a count of its first"):
        sps_train.train(cfg)
    cfg = training_settings("train_s2d", workplace, tmp_path / "out", "layers=2", "exits=[2,2]")
    with pytest.raises(UserError, match="exits must rise"):
        s2d_train.train(cfg)


@pytest.mark.parametrize(("name", "trainer"), [("train_mirror_sd", mirror_train), ("train_pard", pard_train)])
def test_a_trainer_with_a_mask_of_its_own_looks_at_the_window(
    workplace, tmp_path, monkeypatch, name, trainer
):
    def refuse(*_) -> None:
        raise UserError("too long")

    monkeypatch.setattr(trainer, "check_window", refuse)
    with pytest.raises(UserError, match="too long"):
        trainer.train(training_settings(name, workplace, tmp_path / "out"))


def test_rows_longer_than_a_draft_models_window_are_refused():
    """A mask of its own lets a token see the whole row."""
    draft = random_model("mistral", 0, sliding_window=16)
    common.check_window(SimpleNamespace(length=16), draft)
    with pytest.raises(UserError, match="length=17, and layers .* see 16 tokens: set length=16"):
        common.check_window(SimpleNamespace(length=17), draft)
    common.check_window(SimpleNamespace(length=500), random_model("llama", 0))


def test_prompts_without_room_end_in_a_line(monkeypatch):
    monkeypatch.setattr(stored_states, "TOO_MANY", 3)
    prompts = [[0] * 9, [0] * 2, [0] * 5, [0] * 4, *[[0] * 9] * 4]
    with_room = common._with_room(iter(prompts), 5)
    assert [next(with_room)[::2] for _ in range(2)] == [(1, 3), (3, 1)]
    with pytest.raises(UserError, match="no prompt .* leaves room for an answer in 5 tokens"):
        next(with_room)


def test_a_layer_that_an_adapter_cannot_begin_like_is_one_line(workplace, tmp_path):
    """The target's heads share keys."""
    cfg = training_settings("train_kangaroo", workplace, tmp_path / "out", "like_layer=2")
    with pytest.raises(UserError, match="has another form than an adapter's .*: set like_layer=null"):
        kangaroo_train.train(cfg)


@pytest.mark.process
def test_a_trainer_tells_in_one_line(workplace, tmp_path):
    arguments = training_overrides(workplace, tmp_path / "out", "steps=0")
    command = [sys.executable, "-m", "specbench", "train", "kangaroo", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert done.returncode == 2
    assert says(done.stderr, "error: steps ... 1 ... 0") and done.stderr.count("\n") == 1


def test_a_pair_without_text_asks_for_conversations(workplace, tmp_path):
    with pytest.raises(UserError, match="conversations=FILE"):
        more = ("conversations=null", "pair.training=null")
        kangaroo_train.train(training_settings("train_kangaroo", workplace, tmp_path, *more))


def test_text_in_which_the_assistant_never_speaks_is_refused(workplace, tmp_path):
    (tmp_path / "mute.jsonl").write_text('{"messages": [{"role": "user", "content": "?"}]}\n' * 3)
    cfg = training_settings("train_kangaroo", workplace, tmp_path, f"conversations={tmp_path}/mute.jsonl")
    with pytest.raises(UserError, match="too few .*assistant"):
        next(batches(cfg, load_pair(cfg.pair, 0, with_draft=False)))


@pytest.mark.parametrize(
    ("name", "trainer", "setting"),
    [
        ("train_medusa", medusa_train, "heads=19"),
        ("train_hydra_heads", hydra_train, "heads=19"),
        ("train_mirror_sd", mirror_train, "streams=19"),
        ("train_eagle", eagle_train, "length=7"),
    ],
)
def test_rows_without_room_for_all_guesses(workplace, tmp_path, monkeypatch, name, trainer, setting):
    """Of 20 tokens, if nothing else is said. It is told before anything is loaded, not at the end."""
    monkeypatch.setattr(common, "load_pair", None)
    with pytest.raises(UserError, match="length=.* leaves no room for"):
        trainer.train(training_settings(name, workplace, tmp_path / "out", setting))
