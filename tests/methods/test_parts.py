"""The parts of all methods for one target, at toy scale: the same text, as many tokens, nothing done twice."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from methods import parts
from methods.common.build import run_all
from specbench import CONF
from specbench.data.training_folder import RECORD
from specbench.models.pairs import load_pair
from specbench.system.errors import UserError
from specbench.system.files import read_json
from specbench.system.settings import plain
from tests.support.conf import composed
from tests.support.training import saved_pair, training_workplace

TOY = ("steps=2", "length=20", "save_every=2", "loss_tokens=8", "vocab_sample=8")
LAYERS = 30  # of smollm2-135m
TRAINED = [name for name, part in composed("parts").parts.items() if "result" not in part]
SMALL = {"draft_vocab": 12, "mask_token": 5, "layers": 3, "taps": [1, 2]}  # for a toy's vocabulary and layers


@pytest.mark.slow
def test_every_part_is_made_by_a_trainer_with_settings_that_it_has(tmp_path):
    cfg = composed("parts", f"out={tmp_path}")
    groups = parts.steps(cfg, ["pair=smollm2-135m"], LAYERS)
    assert [[step.name for step in group] for group in groups[:2]] == [["conversations"], ["states"]]
    commands = [step.command for group in groups for step in group]
    for module, *words in commands:
        name = {
            "methods.states": "states",
            "specbench.commands.converse": "converse",
            "methods.vocab_trim.calibrate": "calibrate_vocab",
        }.get(module, f"train_{module.split('.')[1]}")
        assert callable(importlib.import_module(module).main)
        with initialize_config_dir(str(CONF), version_base="1.3"):
            compose(name, words)


@pytest.mark.parametrize("word", ["length=1", "prompt_weight=1.5"])
def test_what_a_trainer_would_refuse_is_refused_before_hours_of_text(tmp_path, monkeypatch, word):
    monkeypatch.setattr(parts, "load_pair", None)
    with pytest.raises(UserError, match=word.partition("=")[0]):
        parts.make(composed("parts", f"out={tmp_path}", word))


def test_those_that_are_compared_learn_alike(tmp_path):
    cfg = composed("parts", f"out={tmp_path}")
    trained = [step for group in parts.steps(cfg, [], LAYERS) for step in group if step.result.name == RECORD]
    keys = {*parts.TEXT, *parts.ALIKE, "conversations", "states", "threads"} - {"vocab_sample"}
    shared = [{word for word in step.command if word.partition("=")[0] in keys} for step in trained]
    assert len(trained) == 13 and all(one == shared[0] for one in shared) and len(shared[0]) == len(keys)
    # What a loss is estimated from is not what is learnt: those with a small head compute all of it.
    samples = {
        step.name: [word for word in step.command if word.startswith("vocab_sample=")] for step in trained
    }
    assert samples == {
        name: [f"vocab_sample={'null' if name in {'eagle3', 'peagle'} else 4096}"] for name in samples
    }


@pytest.mark.parametrize(
    ("layers", "overrides", "taps", "blocks", "streaming"),
    [
        (LAYERS, [], "2,3,15,27,-1", "2,15,27", "0,29"),
        (16, [], "2,3,8,13,-1", "2,8,13", "0,15"),
        (16, ["parts.dflash.settings.taps=2"], "2,3,8,13,14,-1", "2,14", "0,15"),
        (16, ["taps=[-1,13,8,3,2,5]"], "-1,13,8,3,2,5", "2,8,13", "0,15"),
        (16, ["~parts.kangaroo.settings.exit_layer"], "2,8,13,-1", "2,8,13", "0,15"),
    ],
)
def test_layers_are_those_of_the_target(tmp_path, layers, overrides, taps, blocks, streaming):
    """The states that are kept are those that the trainers read of a target with so many layers."""
    cfg = composed("parts", f"out={tmp_path}", *overrides)
    commands = {step.name: step.command for group in parts.steps(cfg, [], layers) for step in group}
    assert f"taps=[{taps}]" in commands["states"]
    assert f"taps=[{blocks}]" in commands["dflash"] and f"layers=[{streaming}]" in commands["streaming"]


def test_a_part_without_depths_has_those_of_its_trainer(tmp_path):
    cfg = composed("parts", f"out={tmp_path}")
    cfg.parts = {"mine": {"module": "methods.dflash.train", "settings": {"learning_rate": 1e-3}}}
    commands = {step.name: step.command for group in parts.steps(cfg, [], 16) for step in group}
    assert "taps=[2,5,8,11,14,-1]" in commands["states"] and "taps=[2,5,8,11,14]" in commands["mine"]


def test_paths_are_quoted_where_hydra_needs_it(tmp_path):
    out, talks = tmp_path / "a, b", tmp_path / "Chats (new)" / "c=1's.jsonl"
    cfg = composed("parts", *parts.arguments({"out": out, "conversations": talks}))
    commands = {step.name: step.command[1:] for group in parts.steps(cfg, [], LAYERS) for step in group}
    made = composed("train_sps_tree", "pair=smollm2-135m", *commands["sps_tree"])
    assert made.conversations == str(talks) and made.out == str(out / "weights" / "sps_tree")
    assert made.pair.draft == str(out / "weights" / "s2d")
    made = composed("train_kangaroo", "pair=smollm2-135m", *commands["kangaroo"])
    assert made.conversations == str(talks) and made.states == str(out / "states")
    assert parts.arguments({"out": Path("build/a-b.1")}) == ["out=build/a-b.1"]


def test_the_tree_is_counted_for_the_layers_that_the_pair_drafts_with(tmp_path):
    cfg = composed("parts", f"out={tmp_path}")
    (step,) = (step for step in parts.steps(cfg, [], LAYERS)[-1])
    made = composed("train_sps_tree", "pair=smollm2-135m", *step.command[1:]).pair
    shipped = composed("bench", "pair=smollm2-135m").pair
    assert made.draft != shipped.draft and made.draft_layers == shipped.draft_layers == 2


def test_rows_that_the_context_does_not_hold_are_refused_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "run_all", None)
    pair = saved_pair(training_workplace(tmp_path))
    with pytest.raises(UserError, match="length=4097 does not fit into the context of"):
        parts.make(composed("parts", *pair, "length=4097", f"out={tmp_path}/build"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pair=local"], "^pair local has no target: set pair.target to"),
        (["pair=tiny", "pair.dtype=x"], "^unknown pair.dtype 'x'"),
        (["pair=tiny", "cores=2000"], "^cores must be a whole number from 1 to 1024"),
        (["pair=tiny", "out=FILE"], "^cannot make the folder .*FILE/logs: a file is in its place"),
    ],
)
def test_what_cannot_be_made_is_one_line(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("")
    monkeypatch.setattr(parts, "run_all", lambda *_: None)
    with pytest.raises(UserError, match=message):
        parts.make(composed("parts", *words))


def test_of_blocks_all_tokens_are_judged(tmp_path):
    cfg = composed("parts", f"out={tmp_path}", "loss_tokens=8")
    judged = {
        step.name: word
        for group in parts.steps(cfg, [], LAYERS)
        for step in group
        for word in step.command
        if word.startswith("loss_tokens=")
    }
    blocks = {"dflash", "dspark", "dflash2"}
    assert judged == {name: f"loss_tokens={'null' if name in blocks else 8}" for name in judged}
    assert len(judged) == 13


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_a_trainer_accepts_its_settings(tmp_path, name):
    cfg = composed("parts")
    toy = {"steps": 1, "length": 20, "save_every": 1, "vocab_sample": None}
    trainer = cfg.parts[name].module
    conf = f"train_{trainer.split('.')[1]}"
    toy |= {key: value for key, value in SMALL.items() if key in composed(conf)}
    settings = {key: cfg[key] for key in (*parts.TEXT, *parts.ALIKE)} | plain(cfg.parts[name].settings) | toy
    words = [*saved_pair(training_workplace(tmp_path)), *parts.arguments(settings), f"out={tmp_path}/out"]
    folder = importlib.import_module(trainer).train(composed(conf, *words))
    assert read_json(folder / RECORD)["steps"] == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+parts.medusa.modul=x", r"unknown key 'parts\.medusa\.modul'"),
        ("parts.medusa.module=3", r"parts\.medusa\.module must be text"),
        (
            "parts.kangaroo.settings.exit_layer=x",
            r"parts\.kangaroo\.settings\.exit_layer must be a whole number",
        ),
        ("parts.kangaroo.settings.exit_layer=30", "parts.kangaroo reads the depth 30, .* depths 0 to 29"),
        (
            "parts.s2d=null",
            r"parts\.sps_tree needs the part 's2d', which is not made .*: set parts\.sps_tree=null",
        ),
        (
            "parts.sps_tree.draft=sps_tree",
            r"parts\.sps_tree needs the part 'sps_tree', which is not made before",
        ),
        ("taps=[2,15,27,-1]", r"taps lacks the depth 3, which parts\.kangaroo reads: set taps=null"),
    ],
)
def test_a_wrong_part_is_one_line(tmp_path, override, message):
    with pytest.raises(UserError, match=message):
        parts.steps(composed("parts", f"out={tmp_path}", override), [], LAYERS)


@pytest.mark.slow
@pytest.mark.process
def test_a_part_that_is_there_is_not_made_again(tmp_path):
    pair = saved_pair(training_workplace(tmp_path))
    cfg = composed("parts", *pair, *TOY, f"out={tmp_path}/build")
    cfg.parts = {
        "kangaroo": {"module": "methods.kangaroo.train", "settings": {"exit_layer": 1}},
        "draft": {
            "module": "methods.sps.train",
            "settings": {"layers": [0, 3], "share_embeddings": True},
        },
    }
    groups = parts.steps(cfg, [word for word in pair if word.startswith("pair")], 4)
    run_all(groups, tmp_path / "logs", 2, "toy")
    records = [read_json(tmp_path / "build" / "weights" / name / RECORD) for name in cfg.parts]
    assert len({(record["data"], record["tokens"]) for record in records}) == 1
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "build").rglob("*") if path.is_file()}
    run_all(groups, tmp_path / "logs", 2, "toy")
    assert written == {path: path.stat().st_mtime_ns for path in written}
    folder = tmp_path / "build" / "weights" / "draft"
    loaded = load_pair(OmegaConf.merge(cfg.pair, {"draft": str(folder)}), 0, with_draft=True)
    assert loaded.draft.get_input_embeddings() is loaded.target.get_input_embeddings()
