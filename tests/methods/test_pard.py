"""PARD's own promises: one pass a draft, what a mask sees while training and drafting, which places keep masks."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch

from methods.common.losses import Loss
from methods.common.training import _prepare
from methods.pard import ParallelDraft
from methods.pard import train as pard_train
from methods.pard.drafter import MASK
from methods.pard.train import ParallelDistillation, Places
from methods.ragged import RaggedBatch
from methods.sps import SpeculativeSampling
from specbench.data.training_folder import RECORD
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import Request
from specbench.system.errors import UserError
from tests.support.decoding import PROMPT, random_pair
from tests.support.distribution import SHAPE, p_value_alone
from tests.support.lossless import SOME_LENGTHS, assert_lossless, assert_rounds_of_every_kind
from tests.support.models import EVERY_ARCHITECTURE
from tests.support.training import training_settings


def pair_with_mask(arch: str, mask: int = 1, **overrides):
    pair = random_pair(arch, **overrides)
    setattr(pair.draft.config, MASK, mask)
    return pair


class Checked(ParallelDraft):
    """Compares each greedy draft with one pass of transformers over all that is known, and masks."""

    compared = 0

    def draft(self, batch):
        draft = super().draft(batch)
        k = draft.tokens.shape[1]
        known = batch.sequences[0].tokens
        ids = torch.tensor([[*known, *[self.mask] * (k - 1)]])
        logits = self.model.model(ids, use_cache=False).logits[:, -k:]
        assert draft.tokens.tolist() == logits.argmax(-1).tolist()
        self.compared += 1
        return draft


@pytest.mark.parametrize("arch", ["llama", "gpt_neox"])
def test_a_draft_is_one_pass_over_what_is_known_and_masks(arch):
    pair = pair_with_mask(arch)
    drafter = Checked(pair, 5)
    Engine(StagedModel(pair.target), drafter, frozenset()).answer(PROMPT, SamplingParams(40))
    assert drafter.compared > 8


@pytest.mark.one_in(3)
@pytest.mark.parametrize("arch", EVERY_ARCHITECTURE)
def test_answers_are_the_targets(arch):
    steps = []
    for n in SOME_LENGTHS:
        steps += assert_lossless(arch, ParallelDraft(pair_with_mask(arch), n), third=n)
    assert_rounds_of_every_kind(steps)


@pytest.mark.slow
def test_samples_follow_the_target():
    pair = pair_with_mask("llama", **SHAPE)
    assert p_value_alone(pair, ParallelDraft(pair, 3)) > 1e-3


def test_a_draft_reads_the_draft_model_once():
    pair = pair_with_mask("llama")
    both = [
        Engine(StagedModel(pair.target), kind(pair, 4), frozenset())
        .answer(PROMPT, SamplingParams(8))
        .steps[0]
        for kind in (ParallelDraft, SpeculativeSampling)
    ]
    one, token_by_token = (step.draft_bytes for step in both)
    assert token_by_token == 4 * one


class Forgetful(ParallelDraft):
    """Feeds up to nine of the newest tokens once more, as after a draft of which many were accepted."""

    def _lacking(self, batch):
        self._fed = [max(0, length - 9) for length in batch.lengths]
        return super()._lacking(batch)


def test_a_sequence_shorter_than_what_another_one_lacks():
    """Its first token is written again, and no entry in front of it, where another sequence has its own."""
    pair = pair_with_mask("llama")
    requests = [Request([*PROMPT, *range(20, 40)], SamplingParams(12)), Request([5], SamplingParams(12))]
    for order in (requests, requests[::-1]):
        answers = [
            Engine(StagedModel(pair.target), kind(pair, 4), frozenset(), RaggedBatch(2)).generate(order)
            for kind in (Forgetful, ParallelDraft)
        ]
        [lagging, usual] = [
            [(one.tokens, [s.accepted for s in one.steps]) for one in some] for some in answers
        ]
        assert lagging == usual


def test_a_draft_model_without_a_mask_is_refused():
    pair = random_pair("llama")
    if hasattr(pair.draft.config, MASK):
        delattr(pair.draft.config, MASK)
    with pytest.raises(UserError, match="has no pard_token"):
        ParallelDraft(pair)
    with pytest.raises(UserError, match="beyond the"):
        ParallelDraft(pair_with_mask("llama", 10**6))


# -- training


def test_a_mask_sees_the_tokens_up_to_its_place_and_the_masks_before_it():
    inputs = Places.of([torch.arange(4), torch.tensor([0, 2]), torch.tensor([2])])
    assert list(zip(inputs.places.tolist(), inputs.masks.tolist())) == [
        *((place, 0) for place in range(4)),
        *((0, 1), (2, 1), (2, 2)),
    ]
    seen = (inputs.attention(torch.float32) == 0).int().tolist()
    assert seen == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 0, 0, 0, 1, 0, 0],
        [1, 1, 1, 0, 0, 1, 0],
        [1, 1, 1, 0, 0, 1, 1],
    ]


def test_the_padding_token_learns_as_an_input(workplace):
    """It may be the mask, or end an answer, and torch gives its row no gradient."""
    draft = pair_with_mask("llama").draft
    embedding = draft.get_input_embeddings()
    embedding.padding_idx = 1
    cfg = training_settings("train_pard", workplace, "unused")
    _prepare(draft, cfg)
    draft.base_model(torch.tensor([[5, 1, 7]])).last_hidden_state.sum().backward()
    assert embedding.weight.grad[1].abs().sum() > 0


@pytest.mark.parametrize("arch", ["llama", "gpt_neox"])
def test_training_sees_what_drafting_sees(arch):
    pair = pair_with_mask(arch)
    module = ParallelDistillation(pair.draft, StagedModel(pair.target), 1, 4, 1.0, 1.0, Loss())
    ids = torch.tensor([PROMPT, PROMPT[::-1]])
    places = torch.tensor([2, 4])
    with torch.no_grad():
        states = module.states({"input_ids": ids}, [torch.arange(7), places, places, places])
        for place in places.tolist():
            drafting = torch.cat([ids[:, : place + 1], torch.ones(2, 3, dtype=torch.long)], dim=1)
            expected = pair.draft.base_model(drafting, use_cache=False).last_hidden_state[:, -4:]
            torch.testing.assert_close(
                torch.stack([of[:, place] for of in states], dim=1), expected, atol=1e-5, rtol=1e-4
            )


def test_each_mask_more_is_of_a_share_of_the_places_that_have_those_before(monkeypatch):
    pair = pair_with_mask("llama")
    module = ParallelDistillation(pair.draft, StagedModel(pair.target), 1, 6, 0.5, 0.2, Loss())
    seen = []
    states = module.states
    monkeypatch.setattr(module, "states", lambda batch, kept: seen.append(kept) or states(batch, kept))
    length = 40
    batch = {"input_ids": torch.randint(2, 30, (2, length)), "loss_weight": torch.ones(2, length)}
    module(batch)
    (kept,) = seen
    sets = [set(some.tolist()) for some in kept]
    # The last token of a row has none to guess.
    assert len(sets[0]) == length - 1 and all(more <= fewer for fewer, more in pairwise(sets))
    for j, (some, share) in enumerate(zip(sets[1:], (0.5, 0.25, 0.2, 0.2, 0.2)), 1):
        assert share * length - j - 1 <= len(some) <= share * length  # the last places have nothing to guess
        assert max(some) < length - 1 - j


def test_a_drafted_token_is_judged_at_its_place():
    """The loss of guesses is that of the target's own choices where the draft model is the target, one token ahead."""
    pair = pair_with_mask("llama")
    target = StagedModel(pair.target)
    module = ParallelDistillation(pair.target, target, 1, 2, 0.0, 0.0, Loss())
    ids = torch.tensor([PROMPT])
    weight = torch.ones(1, 7)
    with torch.no_grad():
        loss = module({"input_ids": ids, "loss_weight": weight})
        probs = pair.target(ids, use_cache=False).logits[:, :-1].softmax(-1)
    entropy = -(probs * probs.log()).sum()
    torch.testing.assert_close(loss, entropy, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_training_teaches_tokens_further_ahead(workplace, tmp_path):
    more = ("steps=125", "save_every=25", "tokens_ahead=3", "mask_token=255", "learning_rate=5e-3")
    out = pard_train.train(training_settings("train_pard", workplace, tmp_path / "out", *more))
    rows = [json.loads(line) for line in (out / "train_log.jsonl").read_text().splitlines()]
    assert rows[-1]["token_2_agreement"] > rows[0]["token_2_agreement"] + 0.2  # the first after 25 steps
    assert json.loads((out / "config.json").read_text())[MASK] is not None
    assert json.loads((out / RECORD).read_text())["token_3_agreement"] == rows[-1]["token_3_agreement"]


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("mask_token=100000", "mask_token=100000"),
        ("tokens_ahead=1", "tokens_ahead"),
        ("retention=2", "retention"),
        ("tokens_ahead=64", "no room"),
    ],
)
def test_a_setting_of_the_training_that_cannot_work(workplace, tmp_path, setting, says):
    with pytest.raises(UserError, match=says):
        pard_train.train(training_settings("train_pard", workplace, tmp_path / "out", setting))
