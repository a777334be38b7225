"""Hydra and Hydra++: what is drafted from which state, the prefix layer's cache, expanded heads, losslessness."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from methods.common.checkpoints import layer_sizes
from methods.common.heads import DraftHead
from methods.common.rank_trees import MEDUSA_TREE
from methods.hydra_heads import HydraHeads
from methods.hydra_heads import drafter as drafter_module
from methods.hydra_heads.checkpoint import save_heads
from methods.hydra_heads.train import fresh_heads
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.model.cost import weight_bytes
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.system.errors import UserError
from tests.support import batches
from tests.support.decoding import PROMPT, random_pair
from tests.support.hydra import KINDS, TREE, by_hand, finals, loaded, prefix_model, saved_heads
from tests.support.lossless import assert_lossless
from tests.support.methods import drafts, expanded_pair, trimmed
from tests.support.models import EVERY_ARCHITECTURE
from tests.support.schedulers import EVERY_SCHEDULER, SCHEDULERS, assert_lossless_with


@pytest.fixture(params=KINDS)
def folder(request, tmp_path):
    return saved_heads(random_pair("llama"), tmp_path, *KINDS[request.param])


def test_fresh_heads_say_what_the_target_says():
    """Directions of states alone: a norm takes their lengths, and those of the prefix layer are alike."""
    target = StagedModel(random_pair("llama").target)
    states, tokens = torch.randn(2, 5, 64), torch.randn(2, 5, 64 * 2)
    for prefix in (False, True):
        heads, _ = fresh_heads(target, 2, 4, prefix, True)
        assert torch.equal(heads(0, torch.cat([states, tokens[..., :64]], -1)), states)
        assert torch.equal(heads(1, torch.cat([states, tokens], -1)), states)
        assert torch.equal(heads.output[1](states), target.lm_head(states))
    positions = torch.arange(5).unsqueeze(0)
    passed = heads.prefix(states, position_embeddings=heads.prefix.rope(positions, states))
    torch.testing.assert_close(
        torch.nn.functional.normalize(passed, dim=-1), torch.nn.functional.normalize(states, dim=-1)
    )
    weight = target.norm.weight
    torch.testing.assert_close(
        passed.square().mean().sqrt(), weight.square().mean().sqrt(), rtol=1e-3, atol=0
    )


@pytest.mark.parametrize(
    ("arch", "begins"), [("llama", "a silent copy of"), ("qwen3", "a silent layer of random")]
)
def test_a_prefix_layer_says_what_it_begins_as(arch, begins):
    target = StagedModel(random_pair(arch).target)
    heads, says = fresh_heads(target, 2, 1, True, False)
    assert says.startswith(begins)
    same = torch.equal(heads.prefix.layers[0].mlp.up_proj.weight, target.layers[-1].mlp.up_proj.weight)
    assert same == (arch == "llama")


def test_blocks_by_hand(folder):
    heads, state = loaded(folder), load_file(f"{folder}/model.safetensors")
    for i in range(3):
        read = torch.randn(4, 64 * (2 + i))
        torch.testing.assert_close(heads(i, read), by_hand(state, i, read, 1 if heads.prefix is None else 2))


@pytest.mark.first_fast
@torch.inference_mode()
def test_what_is_drafted(folder):
    """Of every node the likeliest tokens of its head on the state in front and on its own path, computed alone."""
    pair = random_pair("llama")
    target, drafter = StagedModel(pair.target), HydraHeads(pair, folder)
    state = load_file(f"{folder}/model.safetensors")
    prefixed = drafter.heads.prefix is not None
    prefix = prefix_model(folder, LlamaConfig(**layer_sizes(StagedModel(pair.target)))) if prefixed else None
    inner, seen = drafter.draft, []

    def output(i: int, z: torch.Tensor) -> torch.Tensor:
        name = f"hydra_lm_head.{i}.1"
        if f"{name}.weight" not in state:
            return pair.target.lm_head(z)
        return state[f"{name}.weight"] @ z + state[f"{name}.bias"]

    def check(batch):
        draft = inner(batch)
        tokens = batch.sequences[0].tokens
        states = finals(pair, tokens[:-1])
        if prefix is not None:
            states = prefix(inputs_embeds=states, use_cache=False).last_hidden_state
        found = {}
        parents = draft.tree.parents[0].tolist()
        for node, token in enumerate(draft.tokens[0].tolist()):
            above = found[parents[node]][1] if parents[node] >= 0 else []
            read = torch.cat(
                [states[0, -1], *pair.target.model.embed_tokens(torch.tensor([tokens[-1], *above]))]
            )
            depth = len(above)
            logits = output(depth, by_hand(state, depth, read, 2 if prefixed else 1))
            rank = int((logits > logits[token]).sum())
            path = (*(found[parents[node]][0] if parents[node] >= 0 else ()), rank)
            found[node] = (path, [*above, token])
        paths = {tuple(path) for path in TREE if len(path) <= batch.max_draft}
        assert {path for path, _ in found.values()} == paths
        seen.append(len(found))
        return draft

    drafter.draft = check
    steps = Engine(target, drafter, frozenset()).answer(PROMPT, SamplingParams(40)).steps
    assert 8 in seen and len(set(seen)) > 1 and len(seen) > 5
    if not prefixed:
        blocks = 64 * 2 * (64 * (2 + 3 + 4) + 3) + 3 * 2 * (64 * 64 + 64)  # the square ones are applied twice
        assert steps[0].draft_bytes == 4 * blocks + 3 * target.pass_bytes(0, 0)
    else:
        assert steps[0].draft_bytes > weight_bytes(prefix.layers)


def test_a_block_that_is_applied_again_is_read_again(tmp_path):
    pair, read = random_pair("llama"), {}
    for layers in (2, 4):
        heads, _ = fresh_heads(StagedModel(pair.target), 4, layers, False, False)
        save_heads(heads, tmp_path / str(layers), torch.float32)
        read[layers] = HydraHeads(pair, str(tmp_path / str(layers)))._level_bytes
    square = 4 * (64 * 64 + 64)
    assert [many - few for few, many in zip(read[2], read[4])] == [2 * square] * 4


@pytest.mark.one_in(3)
@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize("scheduler", [None, *SCHEDULERS.values()], ids=["alone", *SCHEDULERS])
@pytest.mark.parametrize("arch", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_the_prefix_layers_cache_is_that_of_one_pass_over_all_states(arch, scheduler, tmp_path):
    """After every round: keys, values and the state to draft from, of every sequence that ran."""
    pair = random_pair(arch)
    folder = saved_heads(pair, tmp_path, prefix=True)
    drafter = HydraHeads(pair, folder)
    prefix = prefix_model(folder, LlamaConfig(**layer_sizes(StagedModel(pair.target))))
    inner, checked = drafter.commit, Counter()

    def check(batch, verified):
        inner(batch, verified)
        for slot, (sequence, count) in enumerate(zip(batch.sequences, verified.counts)):
            # Cut after a stop token the text has less than was accepted, and is not gone on with.
            if batch.is_over or sequence.length != batch.lengths[slot] + count + 1:
                continue
            out = prefix(inputs_embeds=finals(pair, sequence.tokens[:-1]), use_cache=True)
            n = sequence.length - 1
            layer, cache = out.past_key_values.layers[0], drafter._layer_cache.layout.cache.segments[0][0]
            for own, expected in zip(cache[:, slot, :n], (layer.keys[0], layer.values[0])):
                torch.testing.assert_close(own.transpose(0, 1), expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(
                drafter._states[slot], out.last_hidden_state[0, -1], rtol=1e-3, atol=1e-4
            )
            checked[count] += 1

    drafter.commit = check
    requests, expected = batches.cases(arch)
    engine = Engine(
        StagedModel(pair.target), drafter, frozenset(), *([] if scheduler is None else [scheduler(4)])
    )
    batches.assert_lossless(engine, requests, expected)
    assert len(checked) > 1 and checked.total() > 30


def test_the_prefix_layer_does_not_run_after_the_last_round(tmp_path, monkeypatch):
    pair = random_pair("llama")
    drafter, passes = HydraHeads(pair, saved_heads(pair, tmp_path, prefix=True)), []
    prefix = drafter.heads.prefix
    prefix.register_forward_hook(lambda *_: passes.append(1))
    stop = Engine(pair.staged, Drafter(), frozenset()).answer(PROMPT, SamplingParams(9)).tokens[-1]
    rounds = len(Engine(pair.staged, drafter, frozenset([stop])).answer(PROMPT, SamplingParams(40)).steps)
    assert len(passes) == 1 + rounds - 1  # of the prompt, and after each round but the last


def test_a_smaller_tree(folder):
    drafter = HydraHeads(random_pair("llama"), folder, nodes=3)
    assert drafter.trees.paths == ((0,), (1,), (0, 0))
    assert drafter.max_draft_tokens == 2 and drafter.max_nodes == 3
    with pytest.raises(UserError, match=r"nodes=9.*\b8\b"):
        HydraHeads(random_pair("llama"), folder, nodes=9)


def test_heads_without_a_tree_get_the_published_one(tmp_path):
    drafter = HydraHeads(random_pair("llama"), saved_heads(random_pair("llama"), tmp_path, False, tree=None))
    assert drafter.trees.paths == tuple(path for path in MEDUSA_TREE if len(path) <= 3)


# -- expansion

WIDER = {
    "twice": {
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "larger vocabulary": {"hidden_size": 96, "intermediate_size": 100, "vocab_size": 70, "head_dim": 24},
}


@pytest.mark.first_fast
@pytest.mark.parametrize("kind", ["hydra", "hydra++"])
@pytest.mark.parametrize("shape", WIDER)
def test_expanded_heads_draft_the_same(kind, shape, tmp_path):
    """At every round the same tree of the same tokens from the same state; added tokens are never drafted."""
    pair = random_pair("llama")
    folder = saved_heads(pair, tmp_path, *KINDS[kind])
    other = expanded_pair(pair, pair.target.config.to_dict() | WIDER[shape])
    drafters = [HydraHeads(p, folder) for p in (pair, other)]
    states: list[list[torch.Tensor]] = [[], []]
    for drafter, seen in zip(drafters, states):

        def check(read, i, inner=drafter._logits, drafter=drafter, seen=seen):
            logits = inner(read, i)
            assert logits[..., pair.vocab_size :].numel() == 0 or logits[..., pair.vocab_size :].max() < -1000
            seen.append(drafter._states[0, :64].clone())
            return logits

        drafter._logits = check
    expected, found = (drafts(d, p, 0.0) for d, p in zip(drafters, (pair, other)))
    assert len(expected) == len(found) > 5
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(expected, found))
    torch.testing.assert_close(torch.stack(states[1]), torch.stack(states[0]), rtol=5e-5, atol=5e-5)


def test_heads_with_matrices_of_their_own_are_not_expanded(tmp_path):
    pair = random_pair("llama")
    other = expanded_pair(pair, pair.target.config.to_dict() | WIDER["twice"])
    with pytest.raises(UserError, match="cannot be expanded"):
        HydraHeads(other, saved_heads(pair, tmp_path, True, True))


# -- losslessness


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("arch", EVERY_ARCHITECTURE)
def test_lossless(arch, tmp_path):
    pair = random_pair(arch)
    steps = []
    for turn, kind in enumerate(KINDS):
        folder = saved_heads(pair, tmp_path / kind, *KINDS[kind])
        steps += assert_lossless(arch, HydraHeads(pair, folder, (4, None, 1)[turn]), third=turn)
    some = list(range(0, pair.vocab_size, 2))
    steps += assert_lossless(arch, trimmed(HydraHeads(pair, str(tmp_path / "hydra++")), some), third=1)
    assert any(s.accepted for s in steps)


def test_matrices_of_their_own_are_trimmed_as_the_targets_is(tmp_path, monkeypatch):
    pair = random_pair("llama")
    folder, kept = saved_heads(pair, tmp_path, True, True), torch.arange(0, pair.vocab_size, 3)
    monkeypatch.setattr(drafter_module, "draft_head", lambda pair, model: DraftHead(model, 61, kept))
    drafter, whole = HydraHeads(pair, folder), loaded(folder)
    states = torch.randn(1, 4, 64)
    for i in range(3):
        assert torch.equal(drafter._logits(states, i), whole.output[i](states)[..., kept])
    rounds = drafts(drafter, pair, 0.0)
    assert len(rounds) > 2 and all(set(tokens.tolist()) <= set(kept.tolist()) for tokens, _ in rounds)
    assert assert_lossless("llama", drafter, third=0)


@pytest.mark.slow
@EVERY_SCHEDULER
def test_lossless_in_batches(scheduler, tmp_path):
    """Without a prefix layer; where there is one, its cache is compared in batches, too."""
    pair = random_pair("qwen2")
    drafter = HydraHeads(pair, saved_heads(pair, tmp_path, prefix=False))
    # Not how much is drafted: a tree is as deep as the sequence with most room can use it.
    assert_lossless_with(scheduler, "qwen2", drafter, alone=["accepted"])
