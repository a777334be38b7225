"""DFlash, DSpark, DFlash2: what a training sees and is judged by, by hand; what a training cannot be."""

from __future__ import annotations

import json
from itertools import product

import pytest
import torch

from methods.common.losses import Loss
from methods.common.training import mask_to_fill
from methods.dflash import train as dflash_train
from methods.dflash.checkpoint import FILLS_IN, PREDICTS, SELECTS
from methods.dflash.train import BlockDistillation
from specbench.data.training_folder import RECORD
from specbench.decoding.model.staged_model import StagedModel
from specbench.system.errors import UserError
from tests.support.blocks import BLOCK, HEADS, drafting_model, filled_by_hand, filled_by_transformers
from tests.support.decoding import PROMPT, random_pair
from tests.support.gradients import (
    assert_learns_from_a_sample,
    assert_same_gradients,
    no_distribution_stays,
)
from tests.support.training import training_settings


def test_training_sees_what_drafting_sees():
    """Blocks of a text, all at once, are those that transformers' own model fills after each beginning."""
    for head, arch in product(HEADS, ("llama", "qwen2")):
        pair = random_pair(arch)
        model = drafting_model(pair, head)
        module = BlockDistillation(model, StagedModel(pair.target), 2, 4.0, 0.0)
        ids, starts = torch.tensor([PROMPT, PROMPT[::-1]]), torch.tensor([[2, 6], [1, 4]])
        with torch.no_grad():
            states, _ = module.states({"input_ids": ids}, starts)
            for row, column in product(range(2), range(2)):
                known = ids[row, : starts[row, column] + 1].tolist()
                expected = filled_by_transformers(pair, model, known)[model.config.fills_in :]
                torch.testing.assert_close(states[row, column], expected, atol=1e-4, rtol=1e-4)


def test_what_a_block_is_judged_by():
    pair = random_pair("llama")
    module = BlockDistillation(drafting_model(pair, "independent"), StagedModel(pair.target), 2, 4.0, 0.0)
    weight = torch.tensor([[0, 0, 0, 1, 1, 0, 1, 1.0]])
    goals = module.goals({"loss_weight": weight}, torch.tensor([[2, 5]]))
    assert goals.positions.view(2, -1).tolist() == [[3, 4, 5, 6], [6, 7, 7, 7]]
    e = torch.exp(torch.tensor(-0.25)).item()
    # After a token that is not judged nothing of the block is, nor beyond the row's end.
    assert goals.weights.view(2, -1).tolist() == [[1, pytest.approx(e), 0, 0], [1, pytest.approx(e), 0, 0]]


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_the_loss_by_hand(share):
    pair = random_pair("llama")
    model = drafting_model(pair, "markov")
    module = BlockDistillation(model, StagedModel(pair.target), 1, 4.0, share)
    ids, start = torch.tensor([PROMPT]), 2
    batch = {"input_ids": ids, "loss_weight": torch.ones(1, len(PROMPT))}
    module.drawn = lambda _: torch.tensor([[start]])
    found = module(batch)
    states = filled_by_transformers(pair, model, PROMPT[: start + 1])
    truth = pair.target(ids, use_cache=False).logits[0].softmax(-1)
    total, weights = 0.0, 0.0
    for j in range(len(PROMPT) - 1 - start):
        before, weight = PROMPT[start + j], torch.exp(torch.tensor(-j / 4.0))
        embedded = model.markov_head.markov_w1.weight[before]
        logits = pair.target.lm_head(states[j]) + model.markov_head.markov_w2.weight @ embedded
        goal, guessed = truth[start + j], logits.softmax(-1)
        distance = (goal - guessed).abs().sum()
        estimate = model.confidence(states[j], embedded).sigmoid()
        accepted = (1 - distance / 2).detach()
        loss = (1 - share) * -(goal * logits.log_softmax(-1)).sum() + share * distance
        loss = loss - accepted * estimate.log() - (1 - accepted) * (1 - estimate).log()
        total, weights = total + weight * loss, weights + weight
    torch.testing.assert_close(found, total / weights * len(PROMPT), atol=1e-3, rtol=1e-4)
    found.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert pair.target.lm_head.weight.grad is None


def test_the_loss_of_a_selector_by_hand():
    """Beside the cross-entropy of each place: which of its candidates is the target's first choice, put among them."""
    pair = random_pair("llama")
    model = drafting_model(pair, "selector")
    module = BlockDistillation(model, StagedModel(pair.target), 1, 4.0, 0.0)
    ids, start, selector = torch.tensor([PROMPT]), 2, model.candidate_selector
    module.drawn = lambda _: torch.tensor([[start]])
    module.candidates = 24
    found = module({"input_ids": ids, "loss_weight": torch.ones(1, len(PROMPT))})
    states = filled_by_hand(pair, model, PROMPT[: start + 1])
    truth = pair.target(ids, use_cache=False).logits[0].softmax(-1)
    total, weights, missed = 0.0, 0.0, 0
    for j in range(BLOCK - 1):
        weight = torch.exp(torch.tensor(-j / 4.0))
        logits, goal = pair.target.lm_head(states[1 + j]), truth[start + j]
        first, candidates = int(goal.argmax()), logits.topk(24).indices.tolist()
        if first not in candidates:
            candidates[-1], missed = first, missed + 1
        weighed = selector.predecessor_codebook[PROMPT[start + j]] * selector.hidden_projection(states[1 + j])
        scores = logits[candidates] + selector.successor_codebook[candidates] @ weighed
        loss = -(goal * logits.log_softmax(-1)).sum() - scores.log_softmax(-1)[candidates.index(first)]
        total, weights = total + weight * loss, weights + weight
    torch.testing.assert_close(found, total / weights * len(PROMPT), atol=1e-3, rtol=1e-4)
    assert 0 < missed < BLOCK - 1
    found.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("head", HEADS)
def test_stored_distributions_are_read_where_tokens_are_judged_alone(head):
    """Elsewhere there may be none; and a batch in which nothing is judged costs nothing, but has gradients."""
    pair = random_pair("llama")
    model = drafting_model(pair, head)
    module = BlockDistillation(model, StagedModel(pair.target), 3, 4.0, 0.5)
    ids, weight = torch.tensor([PROMPT]), torch.tensor([[0, 0, 1, 1, 0, 0, 0.0]])
    with torch.no_grad():
        probs, likeliest = pair.target(ids, use_cache=False).logits.softmax(-1).topk(8)
    probs = torch.cat([torch.zeros(1, 1, 8), probs[:, :-1]], 1).roll(-1, 1) * weight.roll(-1, 1).unsqueeze(-1)
    batch = {"input_ids": ids, "loss_weight": weight, "probs": probs, "likeliest": likeliest}
    loss = module(batch)
    assert torch.isfinite(loss) and loss > 0
    nothing = module(batch | {"loss_weight": torch.zeros(1, 7)})
    assert nothing == 0 and nothing.requires_grad
    nothing.backward()


@pytest.mark.parametrize("head", HEADS)
def test_no_distribution_stays_and_gradients_are_those_of_a_loss_that_keeps_all(head, monkeypatch):
    pair = random_pair("llama")
    model = drafting_model(pair, head)
    module = BlockDistillation(model, StagedModel(pair.target), 2, 4.0, 0.5)
    module.drawn = lambda _: torch.tensor([[1, 3]])
    batch = {"input_ids": torch.tensor([PROMPT]), "loss_weight": torch.ones(1, len(PROMPT))}
    with no_distribution_stays(pair.vocab_size):
        loss = module(batch)
    monkeypatch.setattr(dflash_train, "checkpoint", lambda function, *args, **_: function(*args))
    assert_same_gradients(model, loss, module(batch))


@pytest.mark.parametrize("head", HEADS)
def test_a_sample_stands_for_the_vocabulary(head):
    pair = random_pair("llama")
    model = drafting_model(pair, head)

    def module_of(loss: Loss) -> BlockDistillation:
        module = BlockDistillation(model, StagedModel(pair.target), 2, 4.0, 0.5, loss)
        module.drawn = lambda _: torch.tensor([[1, 3], [0, 2]])
        return module

    assert_learns_from_a_sample(module_of, model, pair, [PROMPT, PROMPT[::-1]])


def test_agreement_is_that_on_what_the_assistant_says():
    """Not on prompts, however much they weigh in the loss."""
    pair = random_pair("llama")
    module = BlockDistillation(drafting_model(pair, "independent"), StagedModel(pair.target), 2, 4.0, 0.0)
    ids, k = torch.tensor([[*PROMPT, *PROMPT]]), module.guesses
    weight = torch.full((1, 14), 0.2)
    weight[:, 5 : 5 + k] = 1.0  # what the block at token 4 guesses, and not those at 0 and 8
    with torch.no_grad():
        assert module.choices({"input_ids": ids, "loss_weight": weight})[0].shape == (k, 1)
        assert module.choices({"input_ids": ids, "loss_weight": torch.ones(1, 14)})[0].shape == (k, 3)


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
def test_training_teaches_blocks(head, workplace, tmp_path):
    more = (
        "steps=60",
        "save_every=20",
        "block_size=4",
        "mask_token=255",
        "learning_rate=5e-3",
        f"head={head}",
    )
    out = dflash_train.train(training_settings("train_dflash", workplace, tmp_path / "out", *more, "taps=2"))
    rows = [json.loads(line) for line in (out / "train_log.jsonl").read_text().splitlines()]
    assert rows[-1]["place_1_agreement"] > rows[0]["place_1_agreement"]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert json.loads((out / RECORD).read_text())["place_3_agreement"] == rows[-1]["place_3_agreement"]
    settings = json.loads((out / "config.json").read_text())
    architectures = {"independent": FILLS_IN, "markov": PREDICTS, "selector": SELECTS}
    assert settings["architectures"] == [architectures[head]]


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("mask_token=100000", "mask_token=100000"),
        ("block_size=1", "block_size"),
        ("head=other", "head"),
        ("block_size=64", "no room"),
        ("loss_tokens=8", "loss_tokens must be null"),
    ],
)
def test_a_setting_of_the_training_that_cannot_work(workplace, tmp_path, setting, says):
    with pytest.raises(UserError, match=says):
        dflash_train.train(training_settings("train_dflash", workplace, tmp_path / "out", setting))


def test_depths_that_the_target_lacks(workplace, tmp_path):
    for taps in ("[99]", "[]"):
        settings = training_settings(
            "train_dflash", workplace, tmp_path / "out", f"taps={taps}", "mask_token=9"
        )
        with pytest.raises(UserError, match="depths of the target, 0 to 3"):
            dflash_train.train(settings)


def test_the_mask_is_the_tokenizers_unknown_or_padding_token():
    class Tokenizer:
        unk_token_id, pad_token_id = None, 7

    class Two:
        mask_token, tokenizer = None, Tokenizer()

    assert mask_to_fill(Two, Two, 8) == 7
    with pytest.raises(UserError, match="embeddings of 7 tokens"):
        mask_to_fill(Two, Two, 7)
