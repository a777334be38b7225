"""A target's states on the disk: what trainers read is what the target computes, and what is judged is unbiased."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from methods import states
from methods.common import stored_states
from methods.common.losses import Distribution, Goals, cross_entropies, teacher_of
from methods.common.training import batches, held_out_batches, target_states
from methods.kangaroo import train as kangaroo_train
from methods.sps import train as sps_train
from specbench.data import conversations
from specbench.data.conversations import batched
from specbench.data.training_folder import RECORD
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.state import NORMED
from specbench.models.pairs import load_pair
from specbench.system.errors import UserError
from specbench.system.files import lock_folder, make_folder, read_json
from tests.support.conf import composed
from tests.support.training import Stopped, stop_after, training_settings

TAPS = (1, 2, NORMED)
TALKS = "talk.jsonl"
CHANGES = ("seed=1", "taps=[1]", "top=3", "precision=bf16", "split=other")


@pytest.fixture(autouse=True, scope="module")
def _a_third_is_held_out() -> Iterator[None]:
    """Of few conversations: enough for several batches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversations, "HELD_OUT_EVERY", 3)
        yield


@pytest.fixture(scope="module")
def workplace(workplace) -> Path:
    """With so few conversations as show that rows are stored; all of them lie in `all.jsonl`."""
    lines = (workplace / TALKS).read_text().splitlines(keepends=True)
    (workplace / "all.jsonl").write_text("".join(lines))
    (workplace / TALKS).write_text("".join(lines[:18]))
    return workplace


@cache
def same(workplace: Path) -> list[str]:
    """What the command that computes states is told as a trainer is."""
    trainer = training_settings("train_kangaroo", workplace, workplace / "out", "exit_layer=2")
    pair = [f"pair.target={trainer.pair.target}", f"pair.tokenizer={trainer.pair.tokenizer}"]
    names = ("conversations", "length", "seed", "prompt_weight")
    return [*pair, *(f"{name}={trainer[name]}" for name in names)]


def settings(workplace, out, *more: str):
    """As `training_settings`, for the command that computes states."""
    taps = f"taps={list(TAPS)}".replace(" ", "")
    own = ("pair.device=cpu", taps, "batch_size=2", "top=5", f"out={out}")
    return composed("states", *same(workplace), *own, *more)


@pytest.fixture(scope="module")
def folder(workplace, tmp_path_factory):
    return states.write(settings(workplace, tmp_path_factory.mktemp("states") / "all"))


def test_states_are_those_that_the_target_computes(workplace, folder, tmp_path):
    cfg = training_settings("train_kangaroo", workplace, tmp_path, f"states={folder}", "exit_layer=2")
    pair = load_pair(cfg.pair, 0, with_draft=False)
    target = StagedModel(pair.target)
    seen = set()
    for batch in islice(batches(cfg, pair, arrays=None), 6):
        alone = {name: batch[name] for name in ("input_ids", "loss_weight")}
        found, computed = target_states(target, batch, TAPS), target_states(target, alone, TAPS)
        for tap in TAPS:
            assert found[tap].dtype == torch.bfloat16
            torch.testing.assert_close(found[tap].float(), computed[tap], rtol=0.01, atol=0.01)
        seen |= {tuple(row) for row in batch["input_ids"].tolist()}
    rows = [tuple(ids) for ids, _ in stored_states.rows_of(cfg, pair, epochs=1)]
    assert seen <= set(rows)
    every = [
        ids.tolist()
        for batch in batched(stored_states.rows_of(cfg, pair, epochs=1), 1)
        for ids in batch["input_ids"]
    ]
    stored = torch.from_file(str(folder / stored_states.IDS), size=len(rows) * cfg.length, dtype=torch.int32)
    assert stored.view(-1, cfg.length).tolist() == every


def test_held_out_rows_of_a_small_file_are_stored_once(workplace, folder, tmp_path, capsys):
    """Repeated rows would make the figures of a training look surer than they are."""
    cfg = settings(workplace, folder)
    states.write(settings(workplace, tmp_path / "again"))
    pair = load_pair(cfg.pair, 0, with_draft=False)
    rows = [ids for ids, _ in stored_states.rows_of(cfg, pair, held_out=True, epochs=1)]
    assert 0 < len(rows) < states.HELD_OUT_ROWS
    stored = torch.from_file(
        str(folder / stored_states.HELD_OUT / stored_states.IDS),
        size=len(rows) * cfg.length,
        dtype=torch.int32,
    )
    assert stored.view(-1, cfg.length).tolist() == rows
    assert read_json(folder / stored_states.HELD_OUT / stored_states.RECORD)["rows"] == len(rows)
    assert f"only {len(rows)} rows of 20 tokens are held out" in " ".join(capsys.readouterr().err.split())


def test_stored_distributions_are_the_likeliest_tokens_of_the_target(workplace, folder, tmp_path):
    """The loss against them is the loss against the whole distribution, cut to those tokens."""
    top = json.loads((folder / stored_states.RECORD).read_text())["top"]
    cfg = training_settings("train_kangaroo", workplace, tmp_path, f"states={folder}", "exit_layer=2")
    pair = load_pair(cfg.pair, 0, with_draft=False)
    assert 1 < top < len(pair.tokenizer)
    for batch in [*islice(batches(cfg, pair), 3), *held_out_batches(cfg, pair)[:2]]:
        goals = Goals.of(batch, None)
        told = teacher_of(batch, None, None)(goals)
        with torch.no_grad():
            probs = pair.target(batch["input_ids"]).logits.softmax(-1)
        best = goals.before(probs).topk(top)
        torch.testing.assert_close(told.probs.sum(-1), torch.ones(len(told.probs)))
        expected = best.values / best.values.sum(-1, keepdim=True)
        torch.testing.assert_close(told.probs.sort(descending=True).values, expected, rtol=0.02, atol=1e-4)
        assert (told.ids[:, 0] == best.indices[:, 0]).float().mean() > 0.99  # but for ties
        logits = torch.randn(len(told.probs), len(pair.tokenizer))
        dense = torch.zeros_like(logits).scatter(1, told.ids, told.probs)
        by_hand = -(dense * logits.log_softmax(-1)).sum(-1)
        torch.testing.assert_close(cross_entropies(logits, told), by_hand)
        torch.testing.assert_close(cross_entropies(logits, Distribution(dense)), by_hand)


def test_every_epoch_has_every_row_in_an_order_of_its_own(workplace, folder, tmp_path):
    cfg = training_settings(
        "train_kangaroo", workplace, tmp_path, f"states={folder}", "exit_layer=2", "batch_size=1"
    )
    pair = load_pair(cfg.pair, 0, with_draft=False)
    count = (folder / stored_states.IDS).stat().st_size // (4 * cfg.length)
    rows = [tuple(batch["input_ids"][0].tolist()) for batch in islice(batches(cfg, pair), 2 * count)]
    assert sorted(rows[:count]) == sorted(rows[count:]) and rows[:count] != rows[count:]


def test_batches_that_are_skipped_are_not_read(workplace, folder, tmp_path, monkeypatch):
    """Nor are arrays that are not wanted: a training that goes on, or is one of several, reads its own share alone."""
    cfg = training_settings("train_kangaroo", workplace, tmp_path, f"states={folder}", "exit_layer=2")
    pair = load_pair(cfg.pair, 0, with_draft=False)
    every, read, from_numpy = [*islice(batches(cfg, pair, arrays=None), 20)], [], torch.from_numpy
    monkeypatch.setattr(torch, "from_numpy", lambda array: read.append(array) or from_numpy(array))
    finals = {"input_ids", "loss_weight", "likeliest", "probs", "hidden_normed"}
    for arrays, names in (
        (None, {*every[0]}),
        (stored_states.FINALS, finals),
        ((), {"input_ids", "loss_weight"}),
    ):
        read.clear()
        some = [*islice(batches(cfg, pair, start=5, stride=4, arrays=arrays), 4)]
        assert len(read) == 4 * len(names)
        for batch, expected in zip(some, every[5::4], strict=True):
            assert {*batch} == names
            assert all(torch.equal(batch[name], expected[name]) for name in names)


def test_states_are_on_the_device_of_the_ids():
    """Also of a target that is spread over devices: whose last layers are on another one."""
    output = SimpleNamespace(last_hidden_state=torch.ones(1), hidden_states=[torch.ones(1)] * 2)
    found = stored_states.states_of(lambda *_, **__: output, torch.zeros(1, device="meta"), (1, NORMED))
    assert {state.device.type for state in found.values()} == {"meta"}


def test_rows_that_the_context_does_not_hold_are_refused(workplace, tmp_path):
    commands = (
        *(
            (module.train, name)
            for module, name in ((kangaroo_train, "train_kangaroo"), (sps_train, "train_sps"))
        ),
        (states.write, "states"),
    )
    for command, name in commands:
        cfg = composed(
            name, *same(workplace), "length=4097", f"out={tmp_path}", f"pair.draft={workplace}/draft"
        )
        with pytest.raises(UserError, match="length=4097 does not fit into the context of"):
            command(cfg)


def test_the_highest_ids_of_a_tokenizer_with_gaps_are_stored(workplace):
    """It has fewer tokens than ids; the last one often ends an answer."""
    cfg = training_settings("train_kangaroo", workplace, "out")
    pair = load_pair(cfg.pair, 0, with_draft=False)
    last = pair.vocab_size - 1
    gaps = replace(pair, tokenizer=range(last))
    finals = 1e3 * pair.target.get_output_embeddings().weight[last].detach().expand(1, 2, -1)
    stored = states.distributions(finals, {"loss_weight": torch.ones(1, 2)}, gaps, 1)
    assert stored["likeliest"][0, 0].item() == last


def test_the_command_for_states_names_the_split_of_a_data_set(workplace, tmp_path):
    words = ("exit_layer=2", "conversations=org/talks", "split=train_sft")
    cfg = training_settings("train_kangaroo", workplace, tmp_path, *words)
    assert " conversations=org/talks split=train_sft length=20 " in stored_states.command_for(cfg)


def test_a_command_that_was_stopped_goes_on(workplace, folder, tmp_path, monkeypatch):
    """Stopped in the middle of writing a row: the files are whole again, and equal to those made in one go."""
    cfg = settings(workplace, tmp_path / "again")
    whole = batched

    def stopped(rows, size):
        yield from islice(whole(rows, size), 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(states, "batched", stopped)
    with pytest.raises(KeyboardInterrupt, match="resumes from row 4 of those that are held out"):
        states.write(cfg)
    monkeypatch.undo()
    assert not (tmp_path / "again" / stored_states.RECORD).exists()
    with (tmp_path / "again" / "hidden_1.bin").open("ab") as file:
        file.write(b"half a row")
    trainer = training_settings(
        "train_kangaroo", workplace, tmp_path, f"states={tmp_path / 'again'}", "exit_layer=2"
    )
    with pytest.raises(UserError, match="there are no states"):
        next(batches(trainer, load_pair(trainer.pair, 0, with_draft=False)))
    states.write(cfg)
    for file in folder.rglob("*.*"):
        assert (tmp_path / "again" / file.relative_to(folder)).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize("changed", ["seed=1", "length=24", "prompt_weight=0.5"])
def test_states_of_other_rows_are_refused(workplace, folder, tmp_path, changed):
    cfg = training_settings(
        "train_kangaroo", workplace, tmp_path, f"states={folder}", "exit_layer=2", changed
    )
    with pytest.raises(UserError, match=changed.partition("=")[0]):
        next(batches(cfg, load_pair(cfg.pair, 0, with_draft=False)))


def test_a_folder_goes_on_with_the_settings_that_began_it(workplace, tmp_path, monkeypatch):
    cfg = settings(workplace, tmp_path / "again")

    def stopped(rows, size):
        raise KeyboardInterrupt

    monkeypatch.setattr(states, "batched", stopped)
    with pytest.raises(KeyboardInterrupt):
        states.write(cfg)
    monkeypatch.undo()
    for _ in ("begun", "finished"):
        for changed in CHANGES:
            with pytest.raises(UserError, match=f"was begun with {changed.partition('=')[0]}="):
                states.write(settings(workplace, tmp_path / "again", changed))
        states.write(cfg)


def test_states_of_another_target_are_refused(workplace, folder, tmp_path):
    cfg = training_settings("train_kangaroo", workplace, tmp_path, f"states={folder}", "exit_layer=2")
    pair = load_pair(cfg.pair, 0, with_draft=False)
    digest = stored_states.target_sha256(pair.target)
    assert stored_states.target_sha256(pair.target.bfloat16()) == digest
    with torch.no_grad():
        pair.target.model.layers[1].self_attn.q_proj.weight.mul_(1.5)
    with pytest.raises(UserError, match="target_sha256"):
        next(batches(cfg, pair))


@pytest.mark.slow
def test_more_tokens_continue_a_finished_folder(workplace, folder, tmp_path, capsys):
    """Until all are there it equals one that was made in one go, but for what its record says was asked."""
    out, length = tmp_path / "again", 20
    for rows in (3, 5):
        states.write(settings(workplace, out, f"tokens={rows * length}"))
        assert read_json(out / stored_states.RECORD)["rows"] == rows
        assert (out / stored_states.IDS).stat().st_size == 4 * rows * length
    states.write(settings(workplace, out, f"tokens={5 * length}"))
    assert capsys.readouterr().out.endswith(f"already there: {out}\n")
    with pytest.raises(UserError, match=f"made with tokens={5 * length}, which is more than {length}"):
        states.write(settings(workplace, out, f"tokens={length}"))
    states.write(settings(workplace, out))
    for file in folder.rglob("*.bin"):
        assert (out / file.relative_to(folder)).read_bytes() == file.read_bytes(), file.name
    with pytest.raises(UserError, match="made with tokens=null, which is more than 20"):
        states.write(settings(workplace, out, "tokens=20"))


def test_a_folder_says_what_its_text_was_cleared_of(workplace, folder, tmp_path):
    record = read_json(folder / stored_states.RECORD)
    assert record["left_out"] == 0 and len(record["questions"]) == 64
    (tmp_path / "q.jsonl").write_text(
        json.dumps({"question_id": 1, "category": "qa", "turns": ["say ab"]}) + "\n"
    )
    cleared = states.write(settings(workplace, tmp_path / "other", f"data.path={tmp_path}/q.jsonl"))
    record = read_json(cleared / stored_states.RECORD)
    asked = (workplace / TALKS).read_text().count('"say ab"')
    assert record["left_out"] == asked > 1
    with pytest.raises(UserError, match="was begun with questions="):
        states.write(settings(workplace, tmp_path / "other"))


def test_bars_show_how_many_batches_there_are(workplace, tmp_path, monkeypatch):
    bars, shown = [], states.tqdm
    monkeypatch.setattr(states, "tqdm", lambda *args, **how: bars.append(shown(*args, **how)) or bars[-1])
    for name, more in (("all", ()), ("some", ("tokens=60",))):
        states.write(settings(workplace, tmp_path / name, *more))
    (_, every), (_, some) = bars[:2], bars[2:]
    assert every.n == every.total > some.n == some.total == 2  # of two rows of 20 tokens


def test_a_stop_before_anything_is_stored_says_so(workplace, tmp_path, monkeypatch):
    def stopped(*_args, **_settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(states, "load_pair", stopped)
    with pytest.raises(KeyboardInterrupt, match="nothing was saved yet"):
        states.write(settings(workplace, tmp_path / "again"))


def test_a_full_disk_is_one_line(workplace, tmp_path, monkeypatch):
    class Full(io.BytesIO):
        def write(self, content) -> int:
            raise OSError(28, "No space left on device")

    opened = Path.open

    def full(path: Path, *args, **kwargs):
        return Full() if path.suffix == ".bin" else opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(UserError, match="cannot write .*held_out: No space left on device"):
        states.write(settings(workplace, tmp_path / "again"))


def test_a_folder_that_another_process_writes_is_left_alone(workplace, tmp_path):
    with (
        lock_folder(make_folder(tmp_path / "again"), "written"),
        pytest.raises(UserError, match="again is being written by another process"),
    ):
        states.write(settings(workplace, tmp_path / "again"))


@pytest.mark.slow
def test_a_trainer_refuses_states_that_lack_a_depth(workplace, folder, tmp_path):
    """Rather than to run the whole target in every step."""
    cfg = training_settings("train_kangaroo", workplace, tmp_path / "out", f"states={folder}", "exit_layer=3")
    with pytest.raises(UserError, match=r"lack the depths \[3\].*taps=\[-1,3\]"):
        kangaroo_train.train(cfg)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (stored_states.RECORD, b"{", "states.json cannot be read: JSONDecodeError"),
        (stored_states.RECORD, b"[]", "states.json cannot be read: it holds no JSON object"),
        (stored_states.RECORD, b'{"rows": 3}', "states.json: hidden_size must be a whole number"),
        (stored_states.IDS, None, "lack ids.bin: remove the folder, and `specbench states` makes it anew"),
        ("hidden_1.bin", None, "lack hidden_1.bin: "),
        ("probs.bin", b"half", "probs.bin does not hold .* rows, as ids.bin does: "),
    ],
)
def test_a_damaged_folder_is_one_line(workplace, folder, tmp_path, file, content, message):
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    (damaged / file).unlink() if content is None else (damaged / file).write_bytes(content)
    more = ("exit_layer=2", f"states={damaged}")
    with pytest.raises(UserError, match=message) as caught:
        kangaroo_train.train(training_settings("train_kangaroo", workplace, tmp_path / "out", *more))
    assert "\n" not in str(caught.value)
    if content in (b"{", b"[]"):
        with pytest.raises(UserError, match=message):
            states.write(settings(workplace, damaged))


def test_states_without_distributions_are_no_vocabulary_to_sample(workplace, tmp_path):
    bare = states.write(settings(workplace, tmp_path / "bare", "top=0"))
    more = ("exit_layer=2", f"states={bare}", "vocab_sample=8")
    with pytest.raises(UserError, match="states in '.*bare' have none: make them with top=64"):
        kangaroo_train.train(training_settings("train_kangaroo", workplace, tmp_path / "out", *more))


def test_a_batch_may_have_more_rows_than_are_held_out(workplace, folder, tmp_path):
    def settings(size: int):
        more = (f"states={folder}", "exit_layer=2", f"batch_size={size}")
        return training_settings("train_kangaroo", workplace, tmp_path / "out", *more)

    pair = load_pair(settings(1).pair, 0, with_draft=False)
    rows = read_json(folder / stored_states.RECORD)["rows"]
    held_out = read_json(folder / stored_states.HELD_OUT / stored_states.RECORD)["rows"]
    assert len(next(batches(settings(rows), pair, held_out=True))["input_ids"]) == min(rows, held_out)
    assert len(next(batches(settings(rows), pair))["input_ids"]) == rows
    with pytest.raises(UserError, match=f"holds {rows} rows, fewer than batch_size={rows + 1}"):
        kangaroo_train.train(settings(rows + 1))


@pytest.mark.slow
def test_a_training_goes_on_with_the_states_that_it_began_with(workplace, folder, tmp_path, monkeypatch):
    """Which may lie elsewhere by now."""

    def trainer(stored):
        more = ("exit_layer=2", f"states={stored}")
        return training_settings("train_kangaroo", workplace, tmp_path / "out", *more)

    stop_after(monkeypatch, kangaroo_train.Distillation, 20)
    with pytest.raises(Stopped):
        kangaroo_train.train(trainer(folder))
    monkeypatch.undo()
    fewer = states.write(settings(workplace, tmp_path / "fewer", "top=3"))
    for other in ("null", fewer):
        with pytest.raises(UserError, match="holds a training with states"):
            kangaroo_train.train(trainer(other))
    moved = shutil.copytree(folder, tmp_path / "moved")
    record = read_json(kangaroo_train.train(trainer(moved)) / RECORD)
    assert record["states"] == {
        "precision": "no",
        "rows": read_json(folder / stored_states.RECORD)["rows"],
        "top": 5,
    }
    assert (
        record["questions"] == read_json(folder / stored_states.RECORD)["questions"]
        and record["left_out"] == 0
    )


@pytest.mark.parametrize("tap", [4, -2])
def test_a_depth_that_is_none_is_one_line(workplace, tmp_path, tap):
    """Depth 4 would be the states after the last layer, which transformers gives after the norm alone."""
    with pytest.raises(UserError, match=f"taps holds {tap}, and the target has the depths 0 to 3"):
        states.write(settings(workplace, tmp_path / "again", f"taps=[1,{tap}]"))


def test_prompts_must_weigh_less_than_answers(workplace, tmp_path):
    with pytest.raises(UserError, match="prompt_weight must be less than 1"):
        states.write(settings(workplace, tmp_path / "again", "prompt_weight=1.0"))


def test_a_text_without_an_end_needs_a_number_of_tokens(workplace, tmp_path):
    with pytest.raises(UserError, match="tokens="):
        states.write(settings(workplace, tmp_path, "conversations=null"))


@pytest.mark.slow
def test_a_training_on_stored_states_learns_the_same(workplace, tmp_path, monkeypatch):
    """The stored states are rounded to bfloat16 and their rows come in another order: it learns as much.

    So it does where part of the vocabulary stands for the rest.
    """
    every = f"conversations={workplace}/all.jsonl"
    folder, agreements = states.write(settings(workplace, tmp_path / "states", "top=64", every)), []
    stored = f"states={folder}"
    trainings = {
        "stored": (stored, "loss_tokens=40"),
        "sampled": (stored, "vocab_sample=100"),
        "computed": (),
    }
    for name, more in trainings.items():
        out = tmp_path / name
        kangaroo_train.train(
            training_settings(
                *("train_kangaroo", workplace, out, "exit_layer=2", "learning_rate=1e-2", every, *more)
            )
        )
        record = json.loads((out / RECORD).read_text())
        agreements.append(record["held_out_agreement"])
        assert record["tokens_in_all"] == record["tokens"] and record["earlier"] == []
        assert record["begins"].startswith("random attention")  # its key heads are shared
    assert agreements[0] == pytest.approx(agreements[2], abs=0.1)
    assert agreements[1] == pytest.approx(agreements[2], abs=0.1)


def test_a_sample_of_the_vocabulary_needs_stored_states(workplace, tmp_path):
    with pytest.raises(UserError, match="states=FOLDER"):
        kangaroo_train.train(
            training_settings("train_kangaroo", workplace, tmp_path, "exit_layer=2", "vocab_sample=10")
        )
