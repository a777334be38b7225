"""The loop that every trainer shares: threads, records, precision, where a part begins, figures."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from itertools import repeat
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from omegaconf import OmegaConf
from safetensors import SafetensorError
from safetensors.torch import load_file

from methods.common.initialisation import UNSURE, scale_of
from methods.common.training import batches
from methods.dflash.train import fresh_model as fresh_blocks
from methods.eagle import train as eagle_train
from methods.eagle3.train import fresh_model as fresh_eagle3
from methods.hydra_heads import train as hydra_train
from methods.kangaroo import train as kangaroo_train
from methods.kangaroo.adapter import load_adapter, save_adapter
from methods.mirror_sd import train as mirror_train
from methods.mtp.train import fresh_model as fresh_mtp
from methods.s2d import train as s2d_train
from methods.sps import train as sps_train
from specbench import ROOT
from specbench.data import training
from specbench.data.questions import questions_sha256
from specbench.data.training import train, training_pair
from specbench.data.training_folder import RECORD, data_of, stages_of
from specbench.decoding.model.staged_model import StagedModel
from specbench.models.pairs import load_pair
from specbench.system import threads
from specbench.system.errors import UserError
from specbench.system.files import read_json
from tests.support.blocks import MASK, settings_of
from tests.support.models import random_model
from tests.support.training import (
    SORTED,
    Stopped,
    log,
    stop_after,
    strided,
    training_overrides,
    training_settings,
)

pytestmark = pytest.mark.usefixtures("fresh_accelerator")

LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}


@pytest.mark.slow
def test_a_training_keeps_its_number_of_threads(workplace, tmp_path, monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    monkeypatch.setattr(threads, "fewest_worth", max)
    measured = 2 * threads.ROUNDS + 1  # forward passes before the first step
    cfg = training_settings("train_s2d", workplace, tmp_path / "stopped", *SORTED)
    with pytest.raises(Stopped), monkeypatch.context() as patch:
        stop_after(patch, s2d_train.Sorted, measured + 20)
        s2d_train.train(cfg)
    monkeypatch.setattr(threads, "fewest_worth", min)
    torch.set_num_threads(1)
    s2d_train.train(cfg)
    used, left = [row["threads"] for row in log(tmp_path / "stopped")], torch.get_num_threads()
    torch.set_num_threads(before)
    assert used == [2, 2, 2] and left == 2


@pytest.mark.slow
def test_the_record_tells_every_stage(workplace, tmp_path):
    """Trained once, and once more from there: the second record holds the first, and counts the tokens of both."""
    records = []
    for name, more in (("first", ()), ("second", (f"draft={tmp_path / 'first'}",))):
        cfg = training_settings("train_sps", workplace, tmp_path / name, "steps=2", "save_every=2", *more)
        records.append(json.loads((sps_train.train(cfg) / RECORD).read_text()))
    first, second = records
    tokens = 2 * cfg.batch_size * cfg.length
    assert first["tokens"] == first["tokens_in_all"] == tokens and first["earlier"] == []
    assert second["tokens_in_all"] == 2 * tokens and second["begins"] == "first"
    (stage,) = second["earlier"]
    assert stage == {key: value for key, value in first.items() if key != "earlier"}
    assert len(stages_of(tmp_path / "second")) == 2 and stages_of(tmp_path) == []


@pytest.mark.slow
def test_accumulated_batches_count_like_one_larger_batch(workplace, tmp_path):
    """Two batches of two rows a step move the weights like one batch of four, whatever the assistant says in each."""
    weights = []
    for accumulate, size in ((1, 4), (2, 2)):
        sizes = (f"accumulate={accumulate}", f"batch_size={size}", "steps=3", "save_every=3")
        cfg = training_settings("train_sps", workplace, tmp_path / str(accumulate), *sizes)
        pair = load_pair(cfg.pair, 0, with_draft=True)
        module = sps_train.Distillation(pair.draft.requires_grad_(True), StagedModel(pair.target))
        ids = torch.arange(48).view(12, 4) + 5
        said = (torch.arange(48).view(12, 4) % 7 < 4).float()  # not the same in every row
        rows = [
            {"input_ids": row, "loss_weight": weight}
            for row, weight in zip(ids.split(size), said.split(size))
        ]
        train(module, strided(rows), dict, lambda out, figures: None, cfg, "draft")
        weights.append([p.clone() for p in module.parameters()])
    for one, other in zip(*weights):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_half_precision_target_trains_a_float32_adapter(workplace, tmp_path, dtype):
    assert training_pair(OmegaConf.create({"dtype": dtype})).dtype == "bfloat16"
    more = (f"pair.dtype={dtype}", "steps=2", "save_every=1")
    out = kangaroo_train.train(training_settings("train_kangaroo", workplace, tmp_path, *more))
    assert [set(row) for row in log(out)] == [{"step", "threads", "loss", "held_out_agreement"}] * 2


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["train_kangaroo", "train_s2d", "train_sps", "train_mirror_sd", "train_eagle"]
)
def test_passes_in_bf16(workplace, tmp_path, name):
    more = {"train_s2d": ("layers=3", "exits=[1,3]")}.get(name, ())
    cfg = training_settings(name, workplace, tmp_path, "precision=bf16", "steps=2", "save_every=1", *more)
    trainer = {
        "train_kangaroo": kangaroo_train,
        "train_s2d": s2d_train,
        "train_sps": sps_train,
        "train_mirror_sd": mirror_train,
        "train_eagle": eagle_train,
    }[name]
    assert all(row["loss"] > 0 for row in log(trainer.train(cfg)))


@pytest.mark.slow
def test_a_record_says_what_the_text_is_and_was_cleared_of(workplace, tmp_path):
    """The text as it was at the beginning, also where its file changes in the meantime."""
    talk = tmp_path / "talk.jsonl"
    asked = "Which old river runs slowly past the town of nine bridges?"
    row = {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": "ab"}]}
    talk.write_text((workplace / "talk.jsonl").read_text() + json.dumps(row) + "\n")
    question = {"question_id": 1, "category": "qa", "turns": [asked]}
    (tmp_path / "q.jsonl").write_text(json.dumps(question) + "\n")
    text = (f"conversations={talk}", f"data.path={tmp_path}/q.jsonl", "steps=2", "save_every=2")
    cfg = training_settings("train_sps", workplace, tmp_path / "out", *text)
    began_with, questions = data_of(cfg), questions_sha256(cfg.data)
    pair = load_pair(cfg.pair, 0, with_draft=True)
    module = sps_train.Distillation(pair.draft.requires_grad_(True), StagedModel(pair.target))

    def save(out, figures) -> None:
        talk.write_text("")

    train(module, partial(batches, cfg, pair), dict, save, cfg, "draft")
    record = read_json(tmp_path / "out" / RECORD)
    assert (record["data"], record["questions"]) == (began_with, questions)
    assert record["left_out"] == 1 and record["states"] is None


@pytest.mark.parametrize("arch", ["llama", "gemma", "gemma3", "opt"])
def test_a_copy_of_a_norm_scales_as_the_norm_does(arch):
    """Of Gemma's families the weight is 1 less than what it multiplies by."""
    target = StagedModel(random_model(arch, 0))
    norm: Any = target.norm
    with torch.no_grad():
        norm.weight.normal_()
        states = torch.randn(3, norm.weight.shape[0])
        states -= states.mean(-1, keepdim=True)  # for those that take it away
        normed = states / states.pow(2).mean(-1, keepdim=True).sqrt()
        bias = getattr(norm, "bias", None)
        expected = norm(states) - (0.0 if bias is None else bias)
    torch.testing.assert_close(scale_of(norm) * normed, expected, atol=1e-3, rtol=1e-3)
    assert scale_of(norm) is norm.weight or arch.startswith("gemma")


def test_norms_begin_with_the_scales_of_their_target():
    target = StagedModel(random_model("gemma", 0))
    target.norm.weight.data.normal_()
    for model in (
        fresh_eagle3(target, torch.arange(20)),
        fresh_blocks(settings_of("independent"), target, MASK),
    ):
        torch.testing.assert_close(model.norm.weight / UNSURE, 1 + target.norm.weight)
    adapter, _ = kangaroo_train.fresh_adapter(target, 1)
    torch.testing.assert_close(adapter.norm.weight, 1 + target.norm.weight)


@pytest.mark.parametrize("arch", ["gpt_neox", "stablelm"])
def test_an_adapter_of_a_target_that_is_built_otherwise_begins_as_an_early_exit(arch):
    adapter, is_like = kangaroo_train.fresh_adapter(StagedModel(random_model(arch, 0)), 1)
    assert not is_like and not adapter.layers[0].self_attn.o_proj.weight.any()


@pytest.mark.nightly
@pytest.mark.cluster
def test_two_processes_train_like_one_with_twice_the_batches(workplace, tmp_path):
    shared = ("steps=6", "save_every=3", "batch_size=2", "learning_rate=1e-2")
    alone, together = tmp_path / "alone", tmp_path / "together"
    kangaroo_train.train(training_settings("train_kangaroo", workplace, alone, "accumulate=2", *shared))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    arguments = training_overrides(workplace, together, "accumulate=1", *shared)
    command = [*launch, "-m", "specbench", "train", "kangaroo", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [row["step"] for row in log(alone)] == [row["step"] for row in log(together)] == [3, 6]
    expected = load_file(alone / "model.safetensors")
    for name, weight in load_file(together / "model.safetensors").items():
        torch.testing.assert_close(weight, expected[name], msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(
    ("arch", "settings", "base", "factor"),
    [
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, 1.0),
        ("llama", {"rope_parameters": LINEAR, "rms_norm_eps": 1e-4}, 5e5, 2.0),
        ("opt", {}, 1e4, 1.0),  # has no rotary positions: the usual ones
    ],
)
def test_a_drafting_layer_turns_as_its_target_does(arch, settings, base, factor):
    """And has its heads and eps, whichever trainer makes it; an adapter has keys for each query head."""
    target = StagedModel(random_model(arch, 0, **settings))
    theirs, (adapter, _) = target.config, kangaroo_train.fresh_adapter(target, 1)
    models = [
        adapter,
        eagle_train.fresh_model(target),
        fresh_eagle3(target, torch.arange(8)),
        hydra_train.fresh_heads(target, 2, 1, True, False)[0].prefix,
        fresh_mtp(target),
        fresh_blocks(settings_of("independent"), target, MASK),
    ]
    for model in models:
        config, width = model.config, model.head_dim
        frequencies = base ** -(torch.arange(0, width, 2) / width) / factor
        torch.testing.assert_close(model.rotary.inv_freq, frequencies)
        assert config.rms_norm_eps == getattr(theirs, "rms_norm_eps", 1e-6)
        assert config.num_attention_heads == theirs.num_attention_heads
        shared = theirs.num_attention_heads if model is adapter else theirs.num_key_value_heads
        assert config.num_key_value_heads == shared
        assert not [name for name, _ in model.named_parameters() if name.endswith("_proj.bias")]


def test_an_adapter_turns_the_same_when_loaded(tmp_path):
    target = StagedModel(random_model("llama", 0, rope_parameters=LINEAR))
    adapter, _ = kangaroo_train.fresh_adapter(target, 1)
    save_adapter(adapter, tmp_path, torch.float32, exit_layer=1)
    loaded = load_adapter(tmp_path, target)
    assert torch.equal(loaded.rotary.inv_freq, adapter.rotary.inv_freq)


class Weight(torch.nn.Linear):
    """batch -> a number times the one weight."""

    def __init__(self, factor: float = 1.0):
        super().__init__(1, 1, bias=False)
        self.factor = factor

    def forward(self, batch) -> torch.Tensor:
        return self.factor * self.weight.sum()


def trained(workplace, out, module: Weight, evaluate=dict, save=lambda out, figures: None):
    """Trains it for three steps, with a state after each."""
    cfg = training_settings("train_kangaroo", workplace, out, "steps=3", "save_every=1")
    batch = {"input_ids": torch.ones(1, 4, dtype=torch.long), "loss_weight": torch.ones(1, 4)}
    return train(module, strided(repeat(batch)), evaluate, save, cfg, "nothing")


@pytest.mark.slow
def test_a_loss_that_is_no_number_ends_a_training_in_one_line(workplace, tmp_path):
    with pytest.raises(UserError, match="the loss is nan at step 1: set a smaller learning_rate"):
        trained(workplace, tmp_path, Weight(float("nan")))
    assert not [*tmp_path.glob("checkpoints/state*")]


@pytest.mark.slow
def test_a_figure_of_no_token_is_null(workplace, tmp_path):
    """Held-out answers may be too short for the last guess."""
    saved: list[dict] = []
    figures = {"held_out_agreement": 0.5, "step_2_agreement": float("nan")}
    trained(workplace, tmp_path, Weight(), lambda: figures, lambda out, found: saved.append(found))
    for written in (*saved, *log(tmp_path), read_json(tmp_path / RECORD)):
        assert written["held_out_agreement"] == 0.5 and written["step_2_agreement"] is None


@pytest.mark.slow
def test_a_bar_shows_loss_and_agreement_alone(workplace, tmp_path, monkeypatch):
    """And its speed is that of steps: what comes between them does not count. The log has all figures."""
    shown: list[str] = []
    resumed: list[int] = []

    class Bar(training.tqdm):
        def set_postfix_str(self, text, *args, **settings) -> None:
            shown.append(text)

        def unpause(self) -> None:
            resumed.append(self.n)

    monkeypatch.setattr(training, "tqdm", Bar)
    figures = {"held_out_agreement": 0.5, "step_1_agreement": 0.5, "step_2_agreement": 0.25}
    trained(workplace, tmp_path, Weight(), lambda: figures)
    losses = [row["loss"] for row in log(tmp_path)]
    assert shown == [f"loss {loss:.3f}, agreement 0.500" for loss in losses] and resumed == [1, 2, 3]
    assert all(figures.items() <= row.items() for row in log(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        RuntimeError("PytorchStreamWriter failed writing file"),
        SafetensorError("No space left on device"),
    ],
)
def test_a_full_disk_is_one_line_and_leaves_the_state_before(workplace, tmp_path, monkeypatch, error):
    save_state = Accelerator.save_state

    def full(self, folder: str) -> None:
        if (tmp_path / "checkpoints" / "state-1").exists():
            raise error
        save_state(self, folder)

    monkeypatch.setattr(Accelerator, "save_state", full)
    with pytest.raises(UserError, match=f"cannot write .*checkpoints: .*{error.args[-1]}"):
        trained(workplace, tmp_path, Weight())
    assert [path.name for path in tmp_path.glob("checkpoints/state-*")] == ["state-1"]
    monkeypatch.undo()

    def refused(out, figures) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="cannot write .*No space left on device"):
        trained(workplace, tmp_path, Weight(), save=refused)
    assert not (tmp_path / RECORD).exists()
    assert trained(workplace, tmp_path, Weight()) == tmp_path
    assert [row["step"] for row in log(tmp_path)] == [1, 2, 2, 3, 3]
