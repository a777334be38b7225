"""The loop that every trainer shares, and what the sorted and the distilled draft model learn in it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from methods.common import training as common
from methods.common.training import agreement, batches, held_out_batches, training_pair
from methods.eagle import train as eagle_train
from methods.eagle3 import train as eagle3_train
from methods.eagle3.train import fresh_model as fresh_eagle3
from methods.kangaroo import train as kangaroo_train
from methods.mirror_sd import train as mirror_train
from methods.mirror_sd.streams import load_streams
from methods.mtp.train import fresh_model as fresh_mtp
from methods.s2d import train as s2d_train
from methods.sps import train as sps_train
from specbench import ROOT
from specbench.data.questions import questions_sha256
from specbench.data.training import CONDITIONS, LOG, RECORD, data_of, stages_of, train
from specbench.decoding.model.staged_model import StagedModel
from specbench.models.pairs import load_pair
from specbench.models.surgery import cut
from specbench.system import threads
from specbench.system.errors import UserError
from specbench.system.files import lock_folder, make_folder, read_json
from tests.support.decoding import random_pair
from tests.support.messages import says
from tests.support.models import EVERY_ARCHITECTURE, random_model
from tests.support.training import (
    Stopped,
    stop_after,
    training_overrides,
    training_settings,
    training_workplace,
)

SORTED = ("layers=[0,2,3]", "exits=[1,3]", "learning_rate=1e-2")


pytestmark = pytest.mark.usefixtures("fresh_accelerator")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    return training_workplace(tmp_path_factory.mktemp("train"))


def log(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / LOG).read_text().splitlines()]


@pytest.mark.slow
def test_sorted_training_learns_at_every_exit_and_goes_on_when_stopped(workplace, tmp_path, monkeypatch):
    cfg = training_settings("train_s2d", workplace, tmp_path / "whole", *SORTED)
    whole = AutoModelForCausalLM.from_pretrained(s2d_train.train(cfg))
    assert whole.config.exits == [1, 3] and whole.config.num_hidden_layers == 3
    rows = log(tmp_path / "whole")
    assert [row["step"] for row in rows] == [15, 30, 40]
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]
    assert set(rows[0]) == {"step", "threads", "loss", "held_out_agreement_1", "held_out_agreement_3"}
    assert {row["threads"] for row in rows} == {torch.get_num_threads()}

    pair = load_pair(cfg.pair, 0, with_draft=False)
    module = s2d_train.Sorted(whole.eval(), [1, 3])
    said = [row for batch in held_out_batches(cfg, pair) for row in [said_tokens(module, batch)]]
    for number in range(2):  # "ab ab ab": the text itself is learnt, by both exits
        assert torch.cat([row[number] for row in said]).float().mean() > 0.6

    stop_after(monkeypatch, s2d_train.Sorted, 35)
    cfg = training_settings("train_s2d", workplace, tmp_path / "stopped", *SORTED)
    with pytest.raises(Stopped):
        s2d_train.train(cfg)
    monkeypatch.undo()
    resumed = AutoModelForCausalLM.from_pretrained(s2d_train.train(cfg))
    for name, weight in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], weight, msg=name)


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


@torch.no_grad()
def said_tokens(module, batch) -> list[torch.Tensor]:
    """For each exit, whether its first choice is the token that the assistant says."""
    goals = batch["input_ids"][:, 1:][batch["loss_weight"][:, 1:] == 1.0]
    chosen = [s2d_train.predicting(states, batch, 1.0) for states in module.states(batch)]
    return [module.model.lm_head(states).argmax(-1) == goals for states in chosen]


FINISHED_LOGITS = ["cohere", "granite", "gemma2"]  # scaled, divided, capped


@pytest.mark.parametrize("arch", [*EVERY_ARCHITECTURE, *FINISHED_LOGITS])
def test_sorted_loss_is_the_mean_of_the_exits_own_losses(arch):
    model = random_pair(arch, seed=3).draft
    exits = (1, 2, model.config.num_hidden_layers)
    batch = {
        "input_ids": torch.tensor([[5, 9, 31, 7, 22, 14]]),
        "loss_weight": torch.tensor([[0.0, 0.0, 0.2, 1.0, 0.0, 1.0]]),
    }
    expected = []
    for exit in exits:
        short = cut(model, list(range(exit)))
        with torch.no_grad():
            logits = short(batch["input_ids"]).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, batch["input_ids"][0, 1:], reduction="none")
        expected.append((losses * batch["loss_weight"][0, 1:]).sum())
    with torch.no_grad():
        loss = s2d_train.Sorted(model, list(exits))(batch)
    torch.testing.assert_close(loss, torch.stack(expected).mean())


@pytest.mark.parametrize("arch", FINISHED_LOGITS)
def test_a_teacher_and_a_student_whose_logits_are_scaled_or_capped(arch):
    """Both distributions are those that the models have by themselves, not those of states times head."""
    pair = random_pair(arch, seed=3)
    batch = {
        "input_ids": torch.tensor([[5, 9, 31, 7, 22, 14]]),
        "loss_weight": torch.tensor([[0.0, 0.0, 0.2, 1.0, 0.0, 1.0]]),
    }
    with torch.no_grad():
        own, goal = (model(batch["input_ids"]).logits[0, :-1] for model in (pair.draft, pair.target))
        losses = -(goal.softmax(-1) * own.log_softmax(-1)).sum(-1)
        loss = sps_train.Distillation(pair.draft, StagedModel(pair.target))(batch)
    torch.testing.assert_close(loss, (losses * batch["loss_weight"][0, 1:]).sum())


@pytest.mark.parametrize("arch", FINISHED_LOGITS)
def test_streams_of_a_model_whose_logits_are_scaled_or_capped(arch):
    """The next token against the target's distribution, the stream's against the text, of tokens that both guess."""
    pair = random_pair(arch, seed=3)
    ids = torch.tensor([[5, 9, 31, 7]])
    module = mirror_train.Streaming(pair.draft, StagedModel(pair.target), 1, 0.5)
    with torch.no_grad():
        states, head = module.states(ids)[0], StagedModel(pair.draft).unembed
        goal = pair.target(ids).logits[0, 1:-1].softmax(-1)
        main = -(goal * head(states[1:-1, 0]).log_softmax(-1)).sum()
        stream = torch.nn.functional.cross_entropy(head(states[:-2, 1]), ids[0, 2:], reduction="sum")
        loss = module({"input_ids": ids, "loss_weight": torch.ones(1, 4)})
    torch.testing.assert_close(loss, main + 0.5 * stream)


def test_a_cut_of_all_layers_is_the_target_itself():
    target = random_pair("qwen3", seed=3).target
    whole = cut(target, list(range(4)))
    ids = torch.arange(3, 20).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(whole(ids).logits, target(ids).logits)
    assert all(p.requires_grad for p in whole.parameters())
    picked = cut(target, [0, 3])
    ours, theirs = picked.model.layers[1].state_dict(), target.model.layers[3].state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("layers=9",), "layers .*0 .*3"),
        (("layers=3", "exits=[1,2]"), "exits .*1 .*3 layers"),
    ],
)
def test_sorted_shapes_that_cannot_be_are_refused(workplace, tmp_path, wrong, message):
    with pytest.raises(UserError, match=message):
        s2d_train.train(training_settings("train_s2d", workplace, tmp_path, *wrong))


@pytest.mark.slow
def test_distillation_brings_a_draft_model_closer_to_its_target(workplace, tmp_path):
    cfg = training_settings("train_sps", workplace, tmp_path, "learning_rate=1e-2")
    pair = load_pair(cfg.pair, 0, with_draft=True)
    target, held_out = StagedModel(pair.target), held_out_batches(cfg, pair)
    before = agreement(sps_train.Distillation(pair.draft, target).choices, held_out)
    out = sps_train.train(cfg)
    draft = AutoModelForCausalLM.from_pretrained(out)
    after = agreement(sps_train.Distillation(draft, target).choices, held_out)
    assert after > before + 0.3
    assert log(tmp_path)[-1]["held_out_agreement"] == pytest.approx(after)
    assert not (out / "checkpoints").exists()


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
def test_streams_learn_what_comes_after_next(workplace, tmp_path):
    more = ("learning_rate=1e-2", "steps=60", "save_every=30", "stream_weight=0.5")
    cfg = training_settings("train_mirror_sd", workplace, tmp_path, *more)
    whole = AutoModelForCausalLM.from_pretrained(mirror_train.train(cfg))
    rows = log(tmp_path)
    # The target, which is not trained, does not say "ab ab ab": the main stream learns it, the others the text.
    assert rows[-1]["held_out_agreement"] > 0.3
    # The first of three tokens on is a fourth of the time the stop token, else it can be known.
    assert min(rows[-1][f"held_out_right_{j}"] for j in (2, 3)) > 0.5
    streams = load_streams(tmp_path, whole)
    assert streams.shape == (2, 64) and streams.std() > 0


@pytest.mark.parametrize("arch", ["llama", "qwen3", "mistral"])
def test_stream_loss_against_one_position_at_a_time(arch):
    """The main stream is the model as it is, which learns the target's distribution; stream j is the model's next state
    after j tokens that stand for what is not known yet, and learns the text."""
    pair = random_pair(arch, seed=3)
    model = pair.draft
    module = mirror_train.Streaming(model, StagedModel(pair.target), 2, 0.1)
    ids = torch.tensor([[5, 9, 31, 7, 22, 14]])
    weights = torch.tensor([[0.0, 0.0, 0.2, 1.0, 0.0, 1.0]])
    with torch.no_grad():
        module.streams.normal_()
        loss = module({"input_ids": ids, "loss_weight": weights})
        expected = torch.zeros(())
        embedded = model.get_input_embeddings()(ids)
        goals = pair.target(ids).logits[0].softmax(-1)
        for t in range(6):
            known = [embedded[:, : t + 1], *(embedded[:, t : t + 1] + p for p in module.streams)]
            logits = model(inputs_embeds=torch.cat(known, dim=1), use_cache=False).logits[0, t:]
            for j, scale in enumerate((1.0, 0.1, 0.1)):
                if 3 <= t + 1 + j < 6:  # tokens with enough in front for the last stream
                    goal = goals[t] if j == 0 else ids[0, t + 1 + j]
                    own = torch.nn.functional.cross_entropy(logits[j], goal)
                    expected += scale * weights[0, t + 1 + j] * own
    torch.testing.assert_close(loss, expected)


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
        train(module, iter(rows), dict, lambda out, figures: None, cfg, "draft")
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

    train(module, batches(cfg, pair), dict, save, cfg, "draft")
    record = read_json(tmp_path / "out" / RECORD)
    assert (record["data"], record["questions"]) == (began_with, questions)
    assert record["left_out"] == 1 and record["states"] is None


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
    assert len(log(out)) == 2 and {path: path.read_bytes() for path in files} == files
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
        train(torch.nn.Linear(1, 1), iter(()), dict, None, cfg, "nothing")


TRAINERS = {
    "train_kangaroo": kangaroo_train,
    "train_s2d": s2d_train,
    "train_mirror_sd": mirror_train,
    "train_sps": sps_train,
    "train_eagle": eagle_train,
}


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
        ("data.path=/nowhere/question.jsonl", "no file /nowhere/question.jsonl"),
        ("prompt_weight=1", "prompt_weight must be less than 1"),
        ("states=/nowhere", "there are no states in '/nowhere'"),
        ("vocab_sample=8", "states=FOLDER"),
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


@pytest.mark.process
def test_a_trainer_tells_in_one_line(workplace, tmp_path):
    arguments = training_overrides(workplace, tmp_path / "out", "steps=0")
    command = [sys.executable, "-m", "methods.kangaroo.train", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert done.returncode == 2
    assert says(done.stderr, "error: steps ... 1 ... 0") and done.stderr.count("\n") == 1


@pytest.mark.nightly
@pytest.mark.cluster
def test_two_processes_train_like_one_with_twice_the_batches(workplace, tmp_path):
    shared = ("steps=6", "save_every=3", "batch_size=2", "learning_rate=1e-2")
    alone, together = tmp_path / "alone", tmp_path / "together"
    kangaroo_train.train(training_settings("train_kangaroo", workplace, alone, "accumulate=2", *shared))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    arguments = training_overrides(workplace, together, "accumulate=1", *shared)
    command = [*launch, "-m", "methods.kangaroo.train", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [row["step"] for row in log(alone)] == [row["step"] for row in log(together)] == [3, 6]
    expected = load_file(alone / "model.safetensors")
    for name, weight in load_file(together / "model.safetensors").items():
        torch.testing.assert_close(weight, expected[name], msg=lambda m, name=name: f"{name}: {m}")


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
    ("arch", "settings", "base"),
    [
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5),
        ("opt", {}, 1e4),  # has no rotary positions: the usual ones
    ],
)
def test_a_drafting_layer_turns_as_its_target_does(arch, settings, base):
    target = StagedModel(random_model(arch, 0, **settings))
    for model in (fresh_eagle3(target, torch.arange(8)), fresh_mtp(target)):
        width = model.head_dim
        frequencies = base ** -(torch.arange(0, width, 2) / width)
        torch.testing.assert_close(model.rotary.inv_freq, frequencies)
