"""What the tests of methods need beyond pairs: sorted and padded draft models, trimmed heads, an adapter."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace

import torch

from methods.heads import DraftHead
from methods.kangaroo.adapter import Adapter, adapter_config, save_adapter
from specbench.decoding.draft import Batch, Draft, Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.sampling import Decoding
from specbench.decoding.target import StagedModel
from tests.support.decoding import random_pair


def sorted_pair(arch: str, seed: int = 0, **overrides):
    """A random pair whose draft model counts as sorted, with exits behind the first, second and last layer."""
    pair = random_pair(arch, seed, 4, **overrides)
    pair.draft.config.exits = [1, 2, pair.draft.config.num_hidden_layers]
    return pair


def padded_pair():
    """A pair whose target says ids that the draft model has no embeddings for: 64 against 56, of which the tokenizer
    has 50."""
    pair = sorted_pair("qwen2", seed=4, vocab_size=64)
    narrow = copy.deepcopy(pair.draft)
    narrow.resize_token_embeddings(56)
    return SimpleNamespace(**(vars(pair) | {"draft": narrow, "vocab_size": 50}))


def trimmed(drafter: Drafter, kept: list[int]) -> Drafter:
    """The drafter with a head that knows only the tokens `kept`."""
    drafter.head = DraftHead(
        drafter.head.model, drafter.head.vocab_size, torch.tensor(kept, device=drafter.head.model.device)
    )
    return drafter


def near_identity_adapter(pair) -> Adapter:
    """An adapter that passes the exit states on nearly unchanged, so that drafts are right now and then."""
    torch.manual_seed(7)
    adapter = Adapter(adapter_config(pair.target.config))
    with torch.no_grad():
        adapter.layers[0].self_attn.o_proj.weight.mul_(0.1)
        adapter.norm.weight.copy_(StagedModel(pair.target).norm.weight)
    return adapter.eval().requires_grad_(False)


def saved_adapter(pair, folder: str | Path, **notes: object) -> str:
    """Saves such an adapter in fp32 with `notes`, such as its exit layer; returns the folder."""
    save_adapter(near_identity_adapter(pair), folder, torch.float32, **notes)
    return str(folder)


def drafts(drafter: Drafter, pair, temperature: float) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """(tokens, probabilities) of every draft of one answer."""
    seen = []
    inner = drafter.draft

    def record(batch: Batch) -> Draft:
        draft = inner(batch)
        seen.append((draft.tokens[0].clone(), None if draft.probs is None else draft.probs[0]))
        return draft

    drafter.draft = record
    prompt = [3, 9, 27, 11, 33, 29, 17]
    Engine(StagedModel(pair.target), drafter, frozenset()).answer(prompt, Decoding(28, temperature), seed=5)
    return seen
