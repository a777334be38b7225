"""Trimmed heads: the same drafts when nothing is trimmed, no token outside, q zero outside, fewer bytes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from methods.common.draft_layer import CachedLayer
from methods.common.heads import DraftHead, draft_head
from methods.kangaroo import Kangaroo
from methods.kangaroo.adapter import adapter_config
from methods.s2d import SortedDraft
from methods.sps import SpeculativeSampling
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.system.errors import UserError
from tests.support.decoding import random_pair
from tests.support.methods import drafts, saved_adapter, sorted_pair, trimmed, trimming

METHODS = ("sps", "kangaroo", "s2d")


def make(method: str, pair, folder: str):
    if method == "sps":
        return SpeculativeSampling(pair, 4)
    if method == "s2d":
        return SortedDraft(pair, thresholds=[0.2, 0.2], max_draft_tokens=4)
    return Kangaroo(pair, saved_adapter(pair, folder), 2, 4, 0.0)


@pytest.mark.first_fast
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", METHODS)
def test_with_every_token_kept_the_drafts_are_bit_identical(method, temperature, tmp_path):
    pair = sorted_pair("llama")
    plain = drafts(make(method, pair, str(tmp_path)), pair, temperature)
    everything = list(range(pair.target.config.vocab_size))
    whole = drafts(trimmed(make(method, pair, str(tmp_path)), everything), pair, temperature)
    assert len(plain) == len(whole) > 5
    for (tokens, probs), (others, other_probs) in zip(plain, whole):
        assert torch.equal(tokens, others)
        assert (probs is None and other_probs is None) or torch.equal(probs, other_probs)


@pytest.mark.parametrize("method", METHODS)
def test_nothing_outside_the_kept_tokens_is_drafted(method, tmp_path):
    pair = sorted_pair("llama")
    vocab, kept = pair.target.config.vocab_size, [2, 3, 5, 7, 11, 13, 17, 29, 31, 60]
    outside = torch.tensor([i for i in range(vocab) if i not in kept])
    drafted = drafts(trimmed(make(method, pair, str(tmp_path)), kept), pair, 1.0)
    assert len(drafted) > 5
    for tokens, probs in drafted:
        assert set(tokens.tolist()) <= set(kept)
        assert probs.shape == (len(tokens), vocab)
        assert (probs[:, outside] == 0).all()
        torch.testing.assert_close(probs.sum(-1), torch.ones(len(tokens)))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("kept", [None, [2, 3, 5, 7, 11, 13, 17, 29, 31, 60]])
def test_among_candidates_it_chooses_as_where_no_other_token_is_possible(kept, temperature):
    pair = sorted_pair("llama")
    model = StagedModel(pair.draft)
    head = DraftHead(model, model.vocab_size, None if kept is None else torch.tensor(kept))
    torch.manual_seed(0)
    candidates = torch.stack([torch.randperm(head.rows)[:6].sort().values for _ in range(200)])
    scores = torch.randn(200, 6).round()  # several are equally likely
    alone = torch.full((200, head.rows), -torch.inf).scatter(1, candidates, scores)
    uniforms = torch.rand(200) if temperature else None
    batch = SimpleNamespace(decoding=SamplingParams(1, temperature), draws=lambda place: uniforms)
    tokens, probs = head.choose(scores, batch, 0, candidates)
    others, other_probs = head.choose(alone, batch, 0)
    assert torch.equal(tokens, others) and len(tokens.unique()) > 5
    torch.testing.assert_close(probs, other_probs)


def test_the_rows_are_copies_and_the_embedding_stays_whole():
    pair = sorted_pair("llama", seed=2, tie_word_embeddings=True)
    model = StagedModel(pair.draft)
    before = pair.draft.model.embed_tokens.weight.clone()
    head = DraftHead(model, model.vocab_size, torch.tensor([4, 8, 15]))
    head.trimmed.weight.zero_()
    assert torch.equal(pair.draft.model.embed_tokens.weight, before)


def test_bytes_are_those_of_the_kept_rows():
    model = StagedModel(sorted_pair("llama").draft)
    whole, part = DraftHead(model, 61), DraftHead(model, 61, torch.arange(10))
    row = 4 * model.hidden_size
    assert whole.bytes == model.pass_bytes(0, 0)
    assert whole.bytes - part.bytes == (61 - 10) * row


def test_a_head_that_scores_some_tokens_alone_is_not_trimmed():
    pair, ids = sorted_pair("llama"), torch.tensor([9, 3, 5])
    head = draft_head(pair, pair.staged, ids)
    assert head.rows == 3 and head.ids(torch.tensor([1, 0])).tolist() == [3, 9]
    with pytest.raises(UserError, match="set vocab=full"):
        draft_head(trimming(pair, "a map"), pair.staged, ids)


def test_probabilities_of_a_whole_head_are_not_copied():
    pair = random_pair("llama")
    vocab = pair.target.config.vocab_size
    rows = torch.rand(2, 3, vocab)
    assert DraftHead(pair.staged, vocab).widen(rows) is rows
    wider = DraftHead(pair.staged, vocab + 5).widen(rows)
    assert torch.equal(wider[..., :vocab], rows) and not wider[..., vocab:].any()


def test_layers_have_the_targets_head_unless_they_have_their_own():
    pair, layers = sorted_pair("llama"), CachedLayer(adapter_config(sorted_pair("llama").target.config))
    head = draft_head(pair, pair.staged, layers=layers)
    assert head.token_ids is None and head.bytes == pair.staged.pass_bytes(0, 0)
    layers.token_ids = torch.tensor([9, 3, 5])
    own = draft_head(pair, pair.staged, layers=layers)
    assert own.rows == 3 and own.bytes == 0 and own.target_vocab == head.target_vocab
    with pytest.raises(UserError, match="set vocab=full"):
        draft_head(trimming(pair, "a map"), pair.staged, layers=layers)
