"""The shipped tokenizer: lossless on any text, the chat template, and lengths."""

from __future__ import annotations

from functools import cache
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.tiny import english, world
from specbench.tiny.data import encode_example, packed_batches
from specbench.tiny.drills import DRILLS
from specbench.tiny.tokenizer import SPECIALS, VOCAB_SIZE, load_tokenizer
from specbench.tiny.train import SHIPPED


@cache  # hypothesis runs a test many times within one fixture
def shipped():
    return load_tokenizer(SHIPPED / "weights" / "tokenizer")


@pytest.fixture
def tokenizer():
    return shipped()


def test_size_and_special_tokens(tokenizer):
    assert len(tokenizer) == VOCAB_SIZE == 16384
    assert all(len(tokenizer.encode(s, add_special_tokens=False)) == 1 for s in SPECIALS)
    assert (
        tokenizer.eos_token == "<|end|>"
        and tokenizer.bos_token == "<|bos|>"
        and tokenizer.pad_token == "<|pad|>"
    )


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=80))
def test_any_text_comes_back(text):
    loaded = shipped()
    if not any(s in text for s in SPECIALS):
        assert loaded.decode(loaded.encode(text, add_special_tokens=False)) == text


def test_spaces_before_punctuation_stay(tokenizer):
    text = "a . b , c ! def f(x):\n    return x  # don 't\r\n\té 中文 🙂"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_are_one_token_each(tokenizer):
    assert tokenizer.tokenize("407") == ["4", "0", "7"]


def test_the_chat_template_writes_what_training_saw(tokenizer):
    for category in ("writing", "qa"):
        example = world.make_example(category, 6, 0)
        chat = []
        for turn, answer in zip(example.turns, example.answers, strict=True):
            chat += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
        ids = tokenizer.apply_chat_template(chat, return_dict=False)
        assert ids == encode_example(tokenizer, example)[0]
        prompt = tokenizer.apply_chat_template(chat[:-1], add_generation_prompt=True, return_dict=False)
        assert prompt == ids[: len(prompt)] and ids[len(prompt) - 1] == tokenizer.convert_tokens_to_ids(
            "<|assistant|>"
        )


def test_every_example_fits_a_row(tokenizer):
    for category in (*world.MT_BENCH, *world.TASKS, *DRILLS):
        for index in range(40):
            ids, weights = encode_example(tokenizer, world.make_example(category, 6, index))
            assert len(ids) == len(weights) <= 512


def test_answers_are_long_enough_to_speculate_on(tokenizer):
    for category in (*world.MT_BENCH, *world.TASKS):
        answers = [a for i in range(20) for a in world.make_example(category, 6, i).answers]
        assert 30 <= sum(len(tokenizer.encode(a)) for a in answers) / len(answers) <= 150


def test_plain_english_stays_short(tokenizer):
    text = " ".join(english.FREQUENT * 3)[:7000]
    assert len(tokenizer.encode(text)) <= 2500
    prose = (
        "Photosynthesis transforms luminous radiation into chemical energy; chloroplasts orchestrate it. "
        * 73
    )
    assert len(prose) >= 7000 and len(tokenizer.encode(prose[:7000])) <= 4096


def test_packing_keeps_examples_whole_and_weighs_answers(tokenizer):
    batch = next(packed_batches(tokenizer, 3, 512, seed=2))
    ids, weights = batch["input_ids"], batch["loss_weight"]
    assert ids.shape == weights.shape == (3, 512)
    assert set(weights.unique().tolist()) <= {0.0, weights[0, 1].item(), 1.0}
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    assert (weights[ids == end] == 1.0).all() and (weights[ids == pad] == 0.0).all()
    assert (weights == 0).float().mean() < 0.12
    assert (ids[:, 0] == tokenizer.bos_token_id).all()


def test_a_finite_stream_ends(tokenizer):
    examples = list(islice(world.training_examples(9), 20))
    batches = list(packed_batches(tokenizer, 2, 512, 0, examples))
    packed = sum(int((b["input_ids"] == tokenizer.bos_token_id).sum()) for b in batches)
    assert packed == len(examples)
