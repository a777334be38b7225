"""EAGLE-1 and EAGLE-2: files, what is drafted from which states, the cache round by round, losslessness."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from methods.common.chained_steps import chained
from methods.common.checkpoints import layer_sizes
from methods.eagle import Eagle, Eagle2
from methods.eagle.checkpoint import load_eagle, save_eagle
from methods.eagle.drafter import EAGLE_TREE
from methods.eagle.model import EagleModel
from methods.eqspec import EqSpec
from methods.ragged import RaggedBatch
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import CACHE_STEP, Engine
from specbench.decoding.kv_cache import ForwardContext
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.system.errors import UserError
from tests.support import batches
from tests.support.checkpoints import RunsCode, spoil
from tests.support.decoding import PROMPT, random_pair
from tests.support.eagle import by_chain, outputs, pairs_of
from tests.support.lossless import assert_lossless, assert_samples_like_plain_decoding, sampled_requests
from tests.support.methods import (
    WIDE,
    assert_drafts_the_same,
    expanded_pair,
    fitted_eagle,
    saved_eagle,
    trimmed,
)
from tests.support.models import EVERY_ARCHITECTURE, random_model
from tests.support.schedulers import EVERY_SCHEDULER, assert_lossless_with

CPU = torch.device("cpu")
TREE = [[0], [1], [0, 0], [2], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0, 0]]
MAKE = {
    "eagle": lambda pair, folder: Eagle(pair, folder),
    "eagle2": lambda pair, folder: Eagle2(pair, folder, nodes=9, width=3, max_draft_tokens=4),
}
METHOD = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE.keys())


@pytest.fixture
def folder(tmp_path) -> str:
    return saved_eagle("llama", tmp_path, tree=TREE)


def loaded(folder, arch: str = "llama"):
    return load_eagle(folder, StagedModel(random_pair(arch).target))


def test_the_published_tree():
    assert len(EAGLE_TREE) == len(set(EAGLE_TREE)) == 25
    assert [sum(len(path) == depth for path in EAGLE_TREE) for depth in range(1, 6)] == [4, 8, 8, 3, 2]
    inner = {path[:-1] for path in EAGLE_TREE} - {()}
    assert [sum(len(path) == depth for path in inner) for depth in range(1, 6)] == [4, 4, 1, 1, 0]


# -- what is drafted


@pytest.mark.slow
def test_one_pair_by_hand():
    """The embedding comes first; there is no norm in front of the attention, which sees one pair, nor at the end."""
    model = fitted_eagle("llama")
    layer, f, e = model.layer, torch.randn(64), torch.randn(64)
    joined = model.fc.weight[:, :64] @ e + model.fc.weight[:, 64:] @ f + model.fc.bias
    values = (layer.self_attn.v_proj.weight @ joined).view(2, 1, 16).expand(2, 2, 16).flatten()
    attended = joined + layer.self_attn.o_proj.weight @ values
    scale = attended / (attended.pow(2).mean() + model.config.rms_norm_eps).sqrt()
    normed = layer.post_attention_layernorm.weight * scale
    gate, up, down = (getattr(layer.mlp, f"{name}_proj").weight for name in ("gate", "up", "down"))
    expected = attended + down @ (torch.nn.functional.silu(gate @ normed) * (up @ normed))
    torch.testing.assert_close(outputs(model, f.view(1, 1, 64), e.view(1, 1, 64))[0, 0], expected)


@pytest.mark.slow
@METHOD
def test_a_node_is_drafted_as_the_end_of_a_chain(make, folder):
    """Whatever stands beside it in the tree; and each level is a pass of its nodes with children alone."""
    pair = random_pair("llama")
    drafter, model = make(pair, folder), fitted_eagle("llama")
    passes, rounds = [], []
    level, draft = drafter._level, drafter.draft

    def watched_level(batch, features, tokens, first, tree):
        out = level(batch, features, tokens, first, tree)
        passes.append((first, tokens[0].tolist(), tree.parents[0].tolist(), out[0]))
        return out

    def watched_draft(batch):
        passes.clear()
        made = draft(batch)
        tokens, ran, ctx = batch.sequences[0].tokens, {}, {}
        root = by_chain(model, pair, tokens, [])
        torch.testing.assert_close(drafter._outputs[0, 0], root, atol=1e-5, rtol=1e-4)
        for first, level_tokens, parents, out in passes:
            for i, token in enumerate(level_tokens):
                parent = parents[first + i]
                ran[first + i] = [*(ran[parent] if parent >= 0 else []), token]
                expected = by_chain(model, pair, tokens, ran[first + i])
                torch.testing.assert_close(out[i], expected, atol=1e-5, rtol=1e-4)
                ctx[tuple(ran[first + i])] = out[i]
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(made.tokens[0].tolist(), made.tree.parents[0].tolist()):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        for path in paths:  # a node is one of the likeliest followers of its parent
            state = ctx[path[:-1]] if path[:-1] else root
            assert path[-1] in pair.target.lm_head(state).topk(3).indices
        inner = {path[:-1] for path in paths} - {()}
        assert inner <= set(ctx)
        assert isinstance(drafter, Eagle2) or inner == set(ctx), "leaves never go through the layer"
        rounds.append((len(paths), max(map(len, paths))))
        return made

    drafter._level, drafter.draft = watched_level, watched_draft
    steps = Engine(StagedModel(pair.target), drafter, frozenset()).answer(PROMPT, SamplingParams(40)).steps
    assert len(rounds) > 5 and max(rounds)[1] >= 3
    assert [(s.drafted, s.depth) for s in steps if s.drafted] == rounds
    levels = rounds[0][1] if isinstance(drafter, Eagle) else 4
    weights = sum(t.nbytes for t in load_file(f"{folder}/model.safetensors").values())
    assert steps[0].draft_bytes == levels * (weights + StagedModel(pair.target).pass_bytes(0, 0))


@pytest.mark.one_in(3)
@pytest.mark.first_fast
@METHOD
@EVERY_SCHEDULER
def test_the_cache_holds_what_the_true_pairs_leave_there(make, scheduler, folder):
    """After every round, in every slot: nothing of a draft stays, and every state is the target's own."""
    pair = random_pair("llama")
    drafter, model = make(pair, folder), fitted_eagle("llama")
    commit, seen = drafter.commit, Counter()

    def watched(batch, verified):
        commit(batch, verified)
        if all(sequence.done for sequence in batch.sequences):
            return
        for slot, sequence in enumerate(batch.sequences):
            features, embeds = pairs_of(pair, sequence.tokens)
            n = features.shape[1]
            cache = model.new_cache(n)
            cache.begin_pass(0, 1, ForwardContext.consecutive(0, n), 1, n)
            rope = model.rope(torch.arange(n).unsqueeze(0), features)
            expected = model(features, embeds, position_embeddings=rope, past_key_values=cache)
            if sequence.done:
                continue  # what comes after its stop token was fed, too
            own = drafter._layer_cache.layout.cache.segments[0][:, :, slot, :n]
            torch.testing.assert_close(own, cache.segments[0][:, :, 0], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(drafter._outputs[slot, 0], expected[0, -1], atol=1e-5, rtol=1e-4)
            seen[verified.counts[slot]] += 1

    drafter.commit = watched
    requests, _ = batches.cases("llama")
    Engine(StagedModel(pair.target), drafter, frozenset(), scheduler(3)).generate(requests)
    assert len(seen) > 2 and seen.total() > 20


def test_smaller_trees_of_ranks(folder):
    drafter = Eagle(random_pair("llama"), folder, nodes=4)
    assert drafter.trees.paths == ((0,), (1,), (0, 0), (2,)) and drafter.max_draft_tokens == 2
    assert drafter.max_nodes == 4
    drafter = Eagle(random_pair("llama"), folder, nodes=5, max_draft_tokens=2)
    assert drafter.trees.paths == ((0,), (1,), (0, 0), (2,), (0, 1)) and drafter.max_draft_tokens == 2


def test_a_checkpoint_without_a_tree_gets_the_published_one(tmp_path):
    drafter = Eagle(random_pair("llama"), saved_eagle("llama", tmp_path))
    assert drafter.trees.paths == tuple(EAGLE_TREE) and drafter.max_draft_tokens == 5


@pytest.mark.parametrize(
    ("nodes", "width", "levels", "expected"),
    [(1, 3, 4, 1), (59, 10, 6, 59), (59, 3, 2, 12), (500, 2, 3, 10), (2, 5, 6, 2)],
)
def test_dimensions_of_dynamic_trees(folder, nodes, width, levels, expected):
    """As many nodes as asked for, or as there can be; a path is no longer than the answer can use."""
    pair = random_pair("llama")
    drafter = Eagle2(pair, folder, nodes, width, levels)
    assert drafter.max_nodes == expected
    steps = assert_lossless("llama", drafter, third=1)
    assert max(s.drafted for s in steps) == expected
    assert all(s.depth <= min(levels, s.drafted) for s in steps)
    assert max(s.draft_bytes for s in steps) == min(levels, nodes) * drafter._bytes, "a pass for each level"


@pytest.mark.parametrize("scheduler", [RaggedBatch(3), EqSpec(3)], ids=["ragged", "eqspec"])
def test_a_chain_in_a_sampled_batch(folder, scheduler):
    """Its layer then also gets entries after the end of a sequence that accepted fewer tokens than others."""
    pair = random_pair("llama")
    drafter = Eagle2(pair, folder, nodes=3, width=1, max_draft_tokens=3)
    assert assert_samples_like_plain_decoding(pair, drafter, sampled_requests(pair, 24, 0.3), scheduler)


def test_a_tree_ends_where_the_answer_must(folder):
    pair = random_pair("llama")
    drafter, most = Eagle2(pair, folder, 30, 3, 6), []
    draft = drafter.draft

    def watched(batch):
        made = draft(batch)
        most.append((batch.max_draft, int(made.tree.depths.max())))
        return made

    drafter.draft = watched
    Engine(StagedModel(pair.target), drafter, frozenset()).answer(PROMPT, SamplingParams(6))
    assert most[0] == (4, 4) and all(depth <= limit for limit, depth in most)


@pytest.mark.slow
def test_room_for_nodes_that_are_not_kept(folder):
    """More nodes go through the layer than the tree has, up to the end of what the buffers hold."""
    pair = random_pair("llama")
    new = CACHE_STEP - len(PROMPT) - 7  # 6 nodes and the pending token
    expected = Engine(StagedModel(pair.target), Drafter(), frozenset()).answer(PROMPT, SamplingParams(new))
    drafter = Eagle2(pair, folder, nodes=6, width=6, max_draft_tokens=6)
    answer = Engine(StagedModel(pair.target), drafter, frozenset()).answer(PROMPT, SamplingParams(new))
    assert answer.tokens == expected.tokens
    assert drafter._layer_cache.layout.cache.capacity == CACHE_STEP + 30


# -- files


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("fc.weight"), "missing fc.weight"),
        (lambda s: s.pop("layers.0.self_attn.q_proj.weight"), "missing layers.0.self_attn.q_proj.weight"),
        (lambda s: s.update({"lm_head.weight": torch.ones(2)}), "unknown lm_head.weight"),
        (
            lambda s: s.update({"layers.0.input_layernorm.weight": torch.ones(64)}),
            "unknown layers.0.input_layernorm",
        ),
        (lambda s: s.update({"fc.bias": torch.ones(2)}), r"fc.bias is \(2,\)"),
        (lambda s: s.update({"embed_tokens.weight": torch.ones(61, 64)}), "an embedding unlike the target's"),
        (lambda s: s.update({"embed_tokens.weight": torch.ones(61, 80)}), "an embedding unlike the target's"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(folder, change, message):
    spoil(folder, change)
    with pytest.raises(UserError, match=message):
        loaded(folder)


def test_other_faults_of_a_checkpoint(folder, tmp_path):
    narrow = random_model("llama", 0, hidden_size=32)
    with pytest.raises(UserError, match=r"64 wide.*32.*another target"):
        load_eagle(folder, StagedModel(narrow))
    with pytest.raises(UserError, match="config.json is missing"):
        loaded(tmp_path / "nowhere")


def test_a_tree_without_a_parent_and_angles_of_a_whole_pass_are_refused(folder):
    for settings, message in (
        ({"tree": [[0], [0, 0, 0]]}, r"\[0, 0, 0\] has no parent"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    ):
        path = Path(folder) / "config.json"
        before = path.read_text()
        path.write_text(json.dumps(json.loads(before) | settings))
        with pytest.raises(UserError, match=message):
            Eagle(random_pair("llama"), folder)
        path.write_text(before)


def test_the_authors_format(folder, tmp_path):
    """A pickle with the target's embedding and an old buffer, and a config.json that does not name key heads."""
    authors = tmp_path / "authors"
    authors.mkdir()
    target = random_pair("llama").target
    state = load_file(f"{folder}/model.safetensors")
    state["embed_tokens.weight"] = target.get_input_embeddings().weight.half()
    state["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    torch.save(state, authors / "pytorch_model.bin")
    settings = json.loads((tmp_path / "config.json").read_text())
    for name in ("num_key_value_heads", "head_dim", "tree", "bias"):
        del settings[name]
    (authors / "config.json").write_text(json.dumps(settings))
    features, embeds = pairs_of(random_pair("llama"), PROMPT)
    ours, theirs = (outputs(loaded(f)[0], features, embeds) for f in (folder, authors))
    assert torch.equal(ours, theirs)


def test_a_pickle_that_runs_code_is_not_loaded(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    torch.save({"fc.bias": RunsCode()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="[Ww]eights.only"):
        loaded(tmp_path)


@pytest.mark.first_fast
@pytest.mark.parametrize(
    "changes",
    [
        {"bias": False},
        {"qkv_bias": True},
        {"num_key_value_heads": 1},
        {"head_dim": 24, "num_key_value_heads": 4},
        {"intermediate_size": 40, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ],
)
def test_layers_of_other_forms(changes, tmp_path):
    """Without a bias after the states (LLaMA-3), with biases of queries, keys and values (Qwen2), other heads."""
    pair = random_pair("llama")
    torch.manual_seed(2)
    model = EagleModel(LlamaConfig(**(layer_sizes(StagedModel(pair.target)) | changes))).eval()
    save_eagle(model, tmp_path, torch.float32)
    read, _ = loaded(tmp_path)
    assert (read.fc.bias is None) == ("bias" in changes)
    assert (read.layer.self_attn.q_proj.bias is not None) == ("qkv_bias" in changes)
    assert read.layer.self_attn.o_proj.bias is None
    features, embeds = pairs_of(pair, PROMPT)
    expected = outputs(model, features, embeds)
    torch.testing.assert_close(outputs(read, features, embeds), expected)
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 77.0}
    assert not torch.allclose(outputs(twin_of(model), features, embeds), expected)
    assert_lossless("llama", Eagle2(pair, str(tmp_path), 9, 3, 3), third=0)


def twin_of(model: EagleModel) -> EagleModel:
    """The same weights under the model's changed config."""
    twin = EagleModel(model.config)
    twin.load_state_dict(model.state_dict())
    return twin.eval()


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [61, 70])
def test_the_drafter_of_an_expanded_target(vocab, folder):
    """It drafts the same, and none of the tokens that were added."""
    pair = random_pair("llama")
    wide = expanded_pair(pair, WIDE | {"num_hidden_layers": 8, "vocab_size": vocab})
    new, _ = load_eagle(folder, StagedModel(wide.target), wide.expansion)
    assert new.fc.weight.shape == (96, 192)
    own = chained(fitted_eagle("llama"), *pairs_of(pair, PROMPT), 3)
    for one, two in zip(own, chained(new, *pairs_of(wide, PROMPT), 3), strict=True):
        torch.testing.assert_close(two[..., :64], one, atol=1e-4, rtol=1e-3)
        logits = wide.target.lm_head(two)
        torch.testing.assert_close(logits[..., :61], pair.target.lm_head(one), atol=1e-3, rtol=1e-3)
        assert (logits[..., 61:] < -100).all()
    assert_drafts_the_same(lambda which: Eagle2(which, folder, 9, 3, 4), pair, wide, PROMPT, 20)


# -- losslessness


@pytest.mark.one_in(5)
@METHOD
@pytest.mark.parametrize("arch", EVERY_ARCHITECTURE)
def test_lossless(arch, make, tmp_path):
    pair = random_pair(arch)
    folder = saved_eagle(arch, tmp_path, tree=TREE)
    steps = assert_lossless(arch, make(pair, folder))
    assert {0, 1, 2} <= {s.accepted for s in steps} and any(0 < s.accepted == s.depth for s in steps)
    drafter = trimmed(make(pair, folder), list(range(0, pair.vocab_size, 2)))
    assert any(s.accepted for s in assert_lossless(arch, drafter, third=1))


@pytest.mark.one_in(3)
@METHOD
@EVERY_SCHEDULER
def test_lossless_in_batches(scheduler, make, tmp_path):
    assert_lossless_with(scheduler, "qwen2", make(random_pair("qwen2"), saved_eagle("qwen2", tmp_path)))


@pytest.mark.slow
@METHOD
def test_sampled_text_of_a_batch_is_that_of_autoregressive_decoding(make, folder):
    pair = random_pair("llama")
    requests, drafter = sampled_requests(pair, 30, 1.0), make(pair, folder)
    assert assert_samples_like_plain_decoding(pair, drafter, requests, RaggedBatch(3))
