"""The map of kept tokens: what it lists, what it refuses, and how calibration makes one."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest

from methods.common import training
from methods.common.training import answered
from methods.common.vocab_map import FILE, always_kept, kept_ids, rank, save_vocab_map
from methods.vocab_trim.calibrate import SOURCES, calibrate, coverage
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.sampling import SamplingParams
from specbench.models.pairs import load_pair
from specbench.system.errors import UserError
from tests.support.conf import composed
from tests.support.models import BYTES, byte_tokenizer, save_pair
from tests.support.training import saved_pair

STOP = BYTES + 1
TOKENIZER = byte_tokenizer()
PAIR = SimpleNamespace(
    name="saved", tokenizer=TOKENIZER, stop_ids=frozenset([STOP, 7]), vocab_size=len(TOKENIZER)
)
TOGETHER = 12  # answers that are written together, a quarter of them at a time
COUNTS = {65: 3, 66: 9, 67: 3, STOP: 1}


@pytest.fixture
def folder(tmp_path):
    save_vocab_map(tmp_path, rank(COUNTS, TOKENIZER, PAIR.stop_ids), TOKENIZER, source="raw_text")
    return tmp_path


def test_special_tokens_come_first_then_frequency_then_id(folder):
    rows = json.loads((folder / FILE).read_text())["rows"]
    special = [7, *range(BYTES, BYTES + 4)]
    assert [row[0] for row in rows] == [*special, 66, 65, 67]
    assert [row[1] for row in rows] == [0, 0, 1, 0, 0, 9, 3, 3]
    assert rows[2][2] == "</s>"


def test_a_size_takes_the_first_rows_and_fills_up_with_ids_that_never_came(folder):
    special = always_kept(TOKENIZER, PAIR.stop_ids)
    assert kept_ids(folder, PAIR, None) == sorted([*special, 65, 66, 67])
    assert kept_ids(folder, PAIR, len(special) + 2) == sorted([*special, 65, 66])
    assert kept_ids(folder, PAIR, len(special) + 5) == sorted([*special, 0, 1, 65, 66, 67])
    assert kept_ids(folder, PAIR, len(TOKENIZER)) == list(range(len(TOKENIZER)))


def test_a_token_for_which_the_models_have_no_row_is_not_kept(folder):
    """The small models of Gemma 3 lack one for their tokenizer's token for images."""
    pair = SimpleNamespace(**vars(PAIR) | {"vocab_size": len(TOKENIZER) - 1})
    assert kept_ids(folder, pair, None) == [7, 65, 66, 67, *range(BYTES, BYTES + 3)]
    assert kept_ids(folder, pair, len(TOKENIZER) - 1) == list(range(len(TOKENIZER) - 1))


def test_a_size_beyond_what_was_counted_warns(folder, capsys):
    """How many rows are filler, and of how many counted tokens the map knows."""
    special = len(always_kept(TOKENIZER, PAIR.stop_ids))
    kept_ids(folder, PAIR, special + 3)
    kept_ids(folder, PAIR, None)
    assert capsys.readouterr().err == ""
    kept_ids(folder, PAIR, special + 5)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"warning: 2 of vocab.size={special + 5} rows ({2 / (special + 5):.0%}) are filler"
    )


def test_what_is_generated_needs_an_end(workplace, tmp_path):
    for more in (["source=target_generated"], ["source=raw_text", "conversations=null"]):
        cfg = composed("calibrate_vocab", *saved_pair(workplace), *more, "tokens=null", f"out={tmp_path}")
        with pytest.raises(UserError, match="tokens="):
            calibrate(cfg)


@pytest.mark.slow
def test_all_answers_are_counted_once(workplace, tmp_path):
    more = ("source=raw_text", "tokens=null", "held_out_tokens=50", "max_new_tokens=16", f"out={tmp_path}")
    content = json.loads(
        (calibrate(composed("calibrate_vocab", *saved_pair(workplace), *more)) / FILE).read_text()
    )
    assert content["tokens"] == 58 * 6  # of 60 conversations two are held out; "aab" and "abc"
    assert content["left_out"] == 0 and len(content["questions"]) == 64


@pytest.mark.parametrize("size", [1, 10_000])
def test_a_size_that_cannot_be_is_refused(folder, size):
    with pytest.raises(UserError, match=r"vocab\.size .*\b5\b"):
        kept_ids(folder, PAIR, size)


def test_a_map_without_a_stop_token_is_refused(folder):
    """As of a pair with other stop tokens: a draft could never end."""
    other = SimpleNamespace(**vars(PAIR) | {"name": "other", "stop_ids": frozenset([STOP, 90])})
    with pytest.raises(UserError, match=r"lacks 1 special or stop tokens of pair 'other', such as 90"):
        kept_ids(folder, other, None)


def test_a_map_of_another_tokenizer_is_refused(folder):
    other = SimpleNamespace(
        name="other", tokenizer=byte_tokenizer(first_special="<bos>"), stop_ids=PAIR.stop_ids
    )
    with pytest.raises(UserError, match="another tokenizer"):
        kept_ids(folder, other, None)


def test_a_missing_and_a_broken_map_are_named(tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path}"):
        kept_ids(tmp_path, PAIR, None)
    (tmp_path / FILE).write_text('{"rows": [[1, 2')
    with pytest.raises(UserError, match=FILE):
        kept_ids(tmp_path, PAIR, None)


@pytest.mark.parametrize("wrong", [lambda ids: ids[-1:], lambda _: [-1], lambda ids: [max(ids) + 10**6]])
def test_a_map_that_lists_an_id_twice_or_no_token_is_refused(folder, tmp_path, wrong):
    content = json.loads((Path(folder) / FILE).read_text())
    content["rows"] += [[token, 0] for token in wrong([row[0] for row in content["rows"]])]
    (tmp_path / FILE).write_text(json.dumps(content))
    with pytest.raises(UserError, match="broken: it lists an id twice, or an id"):
        kept_ids(tmp_path, PAIR, None)


def test_coverage():
    rows = [[1, 0, "a"], [2, 9, "b"], [3, 3, "c"]]
    assert coverage(rows, Counter({1: 1, 2: 5, 4: 2}), 2) == 6 / 8


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibrate")
    save_pair(folder)
    talk = [("user", "say a"), ("assistant", "aab"), ("user", "more"), ("assistant", "abc")]
    line = json.dumps({"messages": [{"role": role, "content": text} for role, text in talk]})
    (folder / "talk.jsonl").write_text(f"{line}\n" * 60)
    return folder


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_calibration(workplace, tmp_path, source, capsys):
    overrides = [
        *saved_pair(workplace),
        f"source={source}",
        "tokens=300",
        "held_out_tokens=50",
        "max_new_tokens=16",
        f"out={tmp_path}",
    ]
    cfg = composed("calibrate_vocab", *overrides)
    content = json.loads((calibrate(cfg) / FILE).read_text())
    assert content["source"] == source and 300 <= content["tokens"] < 320
    counts = {row[0]: row[1] for row in content["rows"]}
    assert sum(counts.values()) == content["tokens"]
    if source == "raw_text":  # "aab" and "abc", over and over
        seen = {row[2]: row[1] for row in content["rows"] if row[1]}
        assert set(seen) == {"a", "b", "c"} and seen["a"] == pytest.approx(150, abs=3)
    assert "coverage of held-out answers" in capsys.readouterr().out
    first = content["rows"]
    assert json.loads((calibrate(cfg) / FILE).read_text())["rows"] == first  # a seed fixes what is counted


@pytest.mark.first_fast
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_that_are_written_together_are_those_of_one_after_another(
    workplace, monkeypatch, temperature
):
    monkeypatch.setattr(training, "ANSWERS", TOGETHER)
    overrides = [*saved_pair(workplace), "max_new_tokens=6", f"temperature={temperature}", "seed=3"]
    cfg = composed("calibrate_vocab", *overrides)
    pair = load_pair(cfg.pair, cfg.seed, with_draft=False)
    engine = Engine(pair.staged, Drafter(), pair.stop_ids, context_length=pair.context_length)
    decoding = SamplingParams(6, temperature)
    for number, (prompt, answer) in enumerate(islice(answered(cfg, pair, pair.staged), TOGETHER + 2)):
        assert answer == engine.answer(prompt, decoding, seed=3 + number).tokens
