"""What the tests of methods need beyond pairs: sorted and padded draft models, trimmed heads, parts that draft."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch
from transformers import LlamaConfig

from methods.common.chained_steps import chained
from methods.common.checkpoints import layer_sizes
from methods.common.draft_layer import CachedLayer
from methods.common.heads import DraftHead
from methods.common.stored_states import key_of
from methods.common.training import target_states
from methods.eagle.checkpoint import save_eagle
from methods.eagle.model import EagleModel
from methods.kangaroo.adapter import Adapter, adapter_config, save_adapter
from methods.oracle import Oracle
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import NORMED, Batch, Draft
from specbench.models.expansion import Expansion, expand_model
from tests.support.decoding import PROMPT, random_pair
from tests.support.lossless import cases
from tests.support.models import byte_tokenizer

Model = TypeVar("Model", bound=torch.nn.Module)
# Of an expanded target, but for the vocabulary.
WIDE = {
    "model_type": "llama",
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 24,
}
TAUGHT = 40  # tokens of each text at most, so that no short one is padded far


def sorted_pair(arch: str, seed: int = 0, **overrides):
    """A random pair whose draft model counts as sorted, with exits after the first, second and last layer."""
    pair = random_pair(arch, seed, 4, **overrides)
    pair.draft.config.exits = [1, 2, pair.draft.config.num_hidden_layers]
    return pair


def padded_pair():
    """A pair whose target says ids that the draft model has no embeddings for: 64 against 56, of which the tokenizer
    has 50."""
    pair = sorted_pair("qwen2", seed=4, vocab_size=64)
    narrow = copy.deepcopy(pair.draft)
    narrow.resize_token_embeddings(56)
    return type(pair)(**(vars(pair) | {"draft": narrow, "vocab_size": 50}))


def with_tokenizer(arch: str):
    """A random pair that a datastore can be made for."""
    pair = random_pair(arch)
    return type(pair)(**vars(pair), tokenizer=byte_tokenizer())


def expanded_pair(pair, shape: dict):
    """The same pair with a target that computes the same at the dimensions of a configuration."""
    expansion = Expansion(pair.target.config.to_dict(), shape, "x")
    target = expand_model(pair.target, expansion, pair.device, torch.float32)
    return type(pair)(**(vars(pair) | {"target": target, "expansion": expansion}))


def trimming(pair, vocab_map: str):
    """The same pair for drafters whose heads are trimmed by a map."""
    return type(pair)(**(vars(pair) | {"trimmed": (vocab_map, None)}))


def trimmed(drafter: Drafter, kept: list[int]) -> Drafter:
    """The drafter with a head that knows only the tokens `kept`."""
    drafter.head = DraftHead(
        drafter.head.model, drafter.head.target_vocab, torch.tensor(kept, device=drafter.head.model.device)
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


@torch.no_grad()
def randomise(model: torch.nn.Module, loud: str) -> None:
    """Gives a drafting model weights at random; those whose name begins with `loud` are larger."""
    torch.manual_seed(5)
    for name, weight in model.named_parameters():
        weight.copy_(torch.rand_like(weight) + 0.5 if weight.dim() == 1 else torch.randn_like(weight) * 0.1)
        if name.startswith(loud):
            weight.mul_(5)


def norm(states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * states / (states.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def taught(module: torch.nn.Module, model: Model, arch: str, steps: int) -> Model:
    """The drafting model once it learnt the answers of `lossless.cases`, so that it is right now and then.

    A module gives the loss of a batch, which has the end of each text, with the target's states of it: no step computes
    these again.
    """
    texts = [prompt + answer for prompt, _, _, answer in cases(arch)]
    longest = max(map(len, texts))
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    states = target_states(module.target, {"input_ids": ids}, {*model.taps, NORMED})
    lengths = torch.tensor([len(text) for text in texts]).unsqueeze(1)
    taught = min(TAUGHT, longest)
    at = (lengths - taught).clamp(min=0) + torch.arange(taught)
    batch = {"input_ids": ids.gather(1, at), "loss_weight": (at < lengths).float()}
    rows = torch.arange(len(texts)).unsqueeze(1)
    batch |= {key_of(tap): state[rows, at] for tap, state in states.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        loss = module(batch) / taught
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.requires_grad_(False)


def fit(model: CachedLayer, arch: str, steps: int = 15) -> CachedLayer:
    """Teaches a drafting model of EAGLE's kind some of the answers of `lossless.cases`, so that drafts are often right
    and often wrong. It drafts with the target's head."""
    pair = random_pair(arch)
    target, texts = StagedModel(pair.target), []
    for prompt, _, _, answer in cases(arch):
        ids = torch.tensor([prompt + answer])
        if ids.shape[1] > 4:
            states = true_states(pair, ids, model.taps)
            features = {tap: hidden[:, :-1] for tap, hidden in states.items()}
            choices = pair.target(ids, use_cache=False).logits.argmax(-1)[0, 1:]
            texts.append((features, target.embed(ids[:, 1:]), choices))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(steps):
        loss = torch.zeros(())
        for features, embeds, choices in texts:
            for j, out in enumerate(chained(model, model.features(features), embeds, 2)):
                n = len(choices) - j
                loss = loss + torch.nn.functional.cross_entropy(target.unembed(out[0, :n]), choices[j:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


@torch.no_grad()
def true_states(pair, ids: torch.Tensor, taps: tuple[int, ...]) -> dict[int, torch.Tensor]:
    """The target's own states [b, n, d] of a text [b, n], by tap, from transformers' forward."""
    output = pair.target.get_decoder()(ids, use_cache=False, output_hidden_states=True)
    return {tap: output.last_hidden_state if tap == NORMED else output.hidden_states[tap] for tap in taps}


@cache
@torch.inference_mode(False)
def fitted_eagle(arch: str) -> EagleModel:
    """EAGLE-1's drafting model for the random pair of an architecture."""
    torch.manual_seed(5)
    return fit(EagleModel(LlamaConfig(**layer_sizes(StagedModel(random_pair(arch).target)))), arch)


def saved_eagle(arch: str, folder: str | Path, **notes: object) -> str:
    """Saves it in fp32 with `notes`, such as its tree; returns the folder."""
    save_eagle(fitted_eagle(arch), folder, torch.float32, **notes)
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
    Engine(StagedModel(pair.target), drafter, frozenset()).answer(
        PROMPT, SamplingParams(28, temperature), seed=5
    )
    return seen


def assert_drafts_the_same(made: Callable, pair, wide, prompt: list[int], cap: int) -> Drafter:
    """In every round of an answer on a pair and on its expanded one; returns the drafter of the latter.

    made: the drafter for a pair.
    """
    drafted: list[Draft] = []
    for which in (pair, wide):
        drafter = made(which)
        inner = drafter.draft
        drafter.draft = lambda batch, inner=inner: drafted.append(draft := inner(batch)) or draft
        Engine(StagedModel(which.target), drafter, frozenset()).answer(prompt, SamplingParams(cap))
    half = len(drafted) // 2
    assert half > 2 and len(drafted) == 2 * half
    for one, two in zip(drafted[:half], drafted[half:]):
        assert torch.equal(one.tokens, two.tokens) and (one.tree is None) == (two.tree is None)
        assert one.tree is None or torch.equal(one.tree.parents, two.tree.parents)
    return drafter


def assert_an_oracle_proposes_in_place_of(method: str, weights: str) -> None:
    """An oracle at the cost of a method: two right tokens and a wrong one, token by token, even if it guesses all at
    once.

    method: the `_target_` of its configuration.
    """
    pair = random_pair("llama")
    config = {"_target_": method, "name": "costly", "weights": weights}
    drafter = Oracle(pair, config, [1.0, 1.0, 0.0], cost_of="costly", max_draft_tokens=4)
    prompt, cap, _, answer = cases("llama")[6]
    drafter.set_reference_answers([prompt], [answer])
    said = Engine(StagedModel(pair.target), drafter, frozenset()).answer(prompt, SamplingParams(cap))
    assert said.tokens == answer and {s.accepted for s in said.steps if s.drafted > 2} == {2}
