"""EAGLE-3: the training-time test, what is drafted from which states, losslessness, expansion."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import silu

from methods.common.chained_steps import chained
from methods.common.dynamic_trees import Growth
from methods.eagle3 import Eagle3
from methods.eagle3.checkpoint import load_eagle3, save_eagle3
from methods.eagle3.model import Eagle3Config, Eagle3Model, default_taps
from methods.eagle3.train import TrainingTimeTest, _has_biases, frequent_ids, fresh_model
from specbench.decoding.engine import Engine
from specbench.decoding.kv_cache import ForwardContext
from specbench.decoding.model.layer_stack import attention_mask, rope_of
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.models.expansion import wide as wide_shape
from specbench.system.errors import UserError
from tests.support.decoding import PROMPT, random_pair
from tests.support.lossless import (
    assert_lossless,
    assert_samples_like_plain_decoding,
    cases,
    sampled_requests,
)
from tests.support.methods import WIDE, assert_drafts_the_same, expanded_pair, norm, randomise, taught
from tests.support.models import EVERY_ARCHITECTURE
from tests.support.schedulers import EVERY_SCHEDULER, assert_lossless_with
from tests.support.training import batch_of

VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def drafting_model(pair, **flags) -> Eagle3Model:
    """Random weights, as large as those of the target; two thirds of its tokens are kept."""
    target = StagedModel(pair.target)
    kept = torch.tensor([i for i in range(target.vocab_size) if i % 3])
    model = fresh_model(target, kept)
    if flags:
        config = Eagle3Config(**model.config.to_dict() | flags)
        model = Eagle3Model(config, model.taps, kept)
    randomise(model, "lm_head")
    return model.eval()


@cache
@torch.inference_mode(False)
def trained_model(arch: str) -> Eagle3Model:
    pair = random_pair(arch)
    model = drafting_model(pair)
    return taught(TrainingTimeTest(model, pair.staged, 3), model, arch, 20)


def saved(pair, folder) -> str:
    save_eagle3(trained_model(pair.name), folder, torch.float32)
    return str(folder)


# -- the model


def test_taps_of_the_authors():
    known = {24: (2, 12, 21), 32: (2, 16, 29), 36: (2, 18, 33), 40: (2, 20, 37), 64: (2, 32, 61)}
    assert {layers: default_taps(layers) for layers in known} == known
    for layers in range(4, 30):
        taps = default_taps(layers)
        assert 0 < taps[0] < taps[1] < taps[2] < layers
    with pytest.raises(UserError, match="3 layers"):
        default_taps(3)


@pytest.mark.parametrize("flag", [None, *VARIANTS])
def test_the_layer_by_hand(flag):
    """Of one pair, which attends to itself alone: attention gives its own values."""
    pair = random_pair("qwen2")
    model = drafting_model(pair, **({flag: True} if flag else {}))
    w, eps = model.state_dict(), model.config.rms_norm_eps
    depths, embed = torch.randn(3, 64), torch.randn(64)
    joined = depths.flatten()
    if flag == "norm_before_fc":
        joined = norm(joined, w["input_norm.weight"], eps)
    if flag == "fc_norm":
        joined = torch.cat([norm(depths[i], w[f"fc_norm.{i}.weight"], eps) for i in range(3)])
    g = w["fc.weight"] @ joined
    normed = norm(g, w["midlayer.hidden_norm.weight"], eps)
    y = torch.cat([norm(embed, w["midlayer.input_layernorm.weight"], eps), normed])
    values = (w["midlayer.self_attn.v_proj.weight"] @ y).view(2, 16).repeat_interleave(2, 0).flatten()
    v = (normed if flag == "norm_before_residual" else g) + w["midlayer.self_attn.o_proj.weight"] @ values
    inner = norm(v, w["midlayer.post_attention_layernorm.weight"], eps)
    gate, up = w["midlayer.mlp.gate_proj.weight"] @ inner, w["midlayer.mlp.up_proj.weight"] @ inner
    a = v + w["midlayer.mlp.down_proj.weight"] @ (silu(gate) * up)
    ended = norm(a, w["norm.weight"], eps)
    states = dict(zip(model.taps, depths.view(3, 1, 1, 64)))
    found = model(
        model.features(states),
        embed.view(1, 1, -1),
        position_embeddings=model.rope(torch.tensor([[7]]), embed),
    )
    torch.testing.assert_close(found[0, 0], ended if flag == "norm_output" else a, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.logits(found)[0, 0], w["lm_head.weight"] @ ended, rtol=1e-4, atol=1e-4)


@pytest.mark.first_fast
@pytest.mark.parametrize("taps", [(2,), (1, 2, 3, 4)])
def test_another_number_of_depths(taps, tmp_path):
    """As config.json names them; the authors read three."""
    pair = random_pair("llama")
    three = drafting_model(pair)
    model = Eagle3Model(Eagle3Config(**three.config.to_dict() | {"fc_norm": True}), taps, three.token_ids)
    randomise(model, "lm_head")
    save_eagle3(model, tmp_path, torch.float32)
    loaded = load_eagle3(tmp_path, StagedModel(pair.target))
    assert loaded.taps == taps and len(loaded.fc_norm) == len(taps)
    states, w = {tap: torch.randn(1, 2, 64) for tap in taps}, model.state_dict()
    normed = [
        norm(states[tap], w[f"fc_norm.{i}.weight"], model.config.rms_norm_eps) for i, tap in enumerate(taps)
    ]
    torch.testing.assert_close(loaded.features(states), torch.cat(normed, -1) @ w["fc.weight"].T)
    assert_lossless("llama", Eagle3(pair, str(tmp_path), 12, 3, 4), third=1)


# -- training


@pytest.mark.parametrize("flag", [None, "norm_output"])
def test_a_step_of_the_training_is_that_step_of_a_draft(flag):
    """Step j at place t: the true pairs up to t in a cache, then j chained pairs of the text's own tokens."""
    torch.manual_seed(2)
    model = drafting_model(random_pair("qwen2"), **({flag: True} if flag else {}))
    length, steps = 9, 4
    features, embeds = torch.randn(2, length, 64), torch.randn(2, length, 64)
    found = list(chained(model, features[:, :-1], embeds[:, 1:], steps))
    assert len(found) == steps
    table = model.rope(torch.arange(32).unsqueeze(0), features)
    for t in range(length - steps):
        cache = model.new_cache(32, 2)

        def run(states, tokens, start, cache=cache):
            n = states.shape[1]
            ctx = ForwardContext.consecutive(start, n)
            cache.begin_pass(0, 1, ctx, 2, n)
            return model(
                states,
                tokens,
                position_embeddings=rope_of(table, ctx, n),
                attention_mask=attention_mask(ctx, n, states),
                past_key_values=cache,
            )

        with torch.no_grad():
            out = run(features[:, : t + 1], embeds[:, 1 : t + 2], 0)[:, -1:]
            torch.testing.assert_close(found[0][:, t], out[:, 0], rtol=1e-4, atol=1e-5)
            for j in range(1, steps):
                out = run(out, embeds[:, t + 1 + j : t + 2 + j], t + j)
                torch.testing.assert_close(found[j][:, t], out[:, 0], rtol=1e-4, atol=1e-5)


BATCH = (
    [[5, 9, 20, 11, 4, 30, 8, 2], [7, 7, 1, 50, 3, 3, 0, 0]],
    [[0, 0, 0, 1, 1, 0.5, 1, 1.0], [0, 0, 1, 1, 1, 1, 0, 0.0]],
)


def test_the_loss_by_hand():
    """Step j at place t against the target at t + 1 + j, where token t + 2 + j counts and its likeliest one is kept.

    All steps are judged by the same tokens: those with enough tokens in front for the last step.
    """
    pair = random_pair("qwen2")
    model, steps = drafting_model(pair), 3
    ids, said = BATCH
    module = TrainingTimeTest(model, StagedModel(pair.target), steps)
    found = module(batch_of(ids, said))
    expected, left_out = torch.zeros(()), 0
    for row in range(2):
        output = pair.target(torch.tensor([ids[row]]), use_cache=False, output_hidden_states=True)
        states = {tap: output.hidden_states[tap] for tap in model.taps}
        embeds = pair.target.get_input_embeddings()(torch.tensor([ids[row]]))
        outputs = list(chained(model, model.features(states)[:, :-1], embeds[:, 1:], steps))
        for j in range(steps):
            for t in range(steps - 1 - j, 8 - 2 - j):
                teacher = output.logits[0, t + 1 + j]
                if teacher.argmax() % 3 == 0:  # not kept
                    left_out += said[row][t + 2 + j] > 0
                    continue
                goal = teacher[model.token_ids].softmax(-1)
                logs = model.logits(outputs[j][0, t]).log_softmax(-1)
                expected = expected + 0.8**j * said[row][t + 2 + j] * -(goal * logs).sum()
    assert left_out
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    found.backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None and weight.grad.abs().sum() > 0, name
    assert pair.target.lm_head.weight.grad is None


def test_hits_by_hand():
    pair = random_pair("qwen2")
    model, steps = drafting_model(pair), 2
    ids, said = BATCH
    found = TrainingTimeTest(model, StagedModel(pair.target), steps).hits(batch_of(ids, said))
    expected: list[list[bool]] = [[], []]
    for row in range(2):
        output = pair.target(torch.tensor([ids[row]]), use_cache=False, output_hidden_states=True)
        states = {tap: output.hidden_states[tap] for tap in model.taps}
        embeds = pair.target.get_input_embeddings()(torch.tensor([ids[row]]))
        outputs = list(chained(model, model.features(states)[:, :-1], embeds[:, 1:], steps))
        for t in range(8 - 1 - steps):
            if said[row][t + 2] == said[row][t + 3] == 1:
                for j in range(steps):
                    guess = model.token_ids[model.logits(outputs[j][0, t]).argmax()]
                    expected[j].append(bool(guess == output.logits[0, t + 1 + j].argmax()))
    assert len(expected[0]) > 2 and found.tolist() == expected


def test_the_draft_vocabulary_is_what_the_assistant_says_most():
    some = [
        batch_of([[4, 4, 9, 9, 9, 2, 7]], [[0, 0, 1, 1, 0, 1, 0.2]]),
        batch_of([[2, 6, 6]], [[1, 0, 0.0]]),
    ]
    assert frequent_ids(some, 2, 20).tolist() == [2, 9]
    assert frequent_ids(some, 4, 20).tolist() == [0, 1, 2, 9]  # unseen ids fill up


def test_the_head_of_a_target_that_is_spread_over_devices_is_indexed_where_it_lies():
    target, indexed = StagedModel(random_pair("llama").target), []

    class Elsewhere:
        device = torch.device("meta")

        def __getitem__(self, ids: torch.Tensor) -> torch.Tensor:
            indexed.append(ids.device)
            return torch.ones(len(ids), target.hidden_size)

    target.lm_head = SimpleNamespace(weight=Elsewhere())
    assert fresh_model(target, torch.arange(5)).lm_head.weight.eq(1).all()
    assert indexed == [Elsewhere.device]


def test_a_fresh_model_begins_with_the_target():
    """Without its layer it says what the target's head makes of the deepest tap, less sure."""
    pair = random_pair("llama")
    target = StagedModel(pair.target)
    kept = torch.arange(0, target.vocab_size, 2)
    model = fresh_model(target, kept)
    states = {tap: torch.randn(1, 3, 64) for tap in model.taps}
    g = model.features(states)
    assert torch.equal(g, states[model.taps[-1]])
    torch.testing.assert_close(model.logits(g), 0.3 * target.head(g)[..., kept])


def test_attention_begins_like_a_layer_whose_queries_share_keys():
    """Each key head finds what the mean of its queries asks for; where each query has its own, it is that one."""
    target = StagedModel(random_pair("qwen2").target)
    layer = target.layers[1].self_attn
    model = fresh_model(target, torch.arange(target.vocab_size), like_layer=1)
    own, h = model.midlayer.self_attn, target.hidden_size
    assert layer.num_key_value_groups > 1
    asks = layer.q_proj.weight.view(-1, layer.num_key_value_groups, layer.head_dim, h).mean(1)
    torch.testing.assert_close(
        own.k_proj.weight, torch.cat([torch.zeros(asks.flatten(0, 1).shape), asks.flatten(0, 1)], 1)
    )
    for name in ("q_proj", "v_proj"):
        weight = getattr(layer, name).weight
        assert torch.equal(getattr(own, name).weight, torch.cat([weight, torch.zeros_like(weight)], 1))


# -- drafting


@pytest.mark.slow
def test_what_is_drafted(tmp_path):
    """Each round's tree is the one that grows from a pass over all true pairs, without a cache."""
    pair = random_pair("qwen2")
    folder = saved(pair, tmp_path)
    target, drafter = StagedModel(pair.target), Eagle3(pair, folder, 12, 3, 3)
    model = load_eagle3(folder, target)
    inner, seen = drafter.draft, []

    def check(batch):
        draft = inner(batch)
        tokens = torch.tensor([batch.sequences[0].tokens])
        output = pair.target(tokens[:, :-1], use_cache=False, output_hidden_states=True)
        features = model.features({tap: output.hidden_states[tap] for tap in model.taps})
        embeds = pair.target.get_input_embeddings()(tokens[:, 1:])

        def followers(path: list[int]) -> torch.Tensor:
            """Logits after the true pairs and then a path, token by token, each fed with the output before it."""
            states, given = features, embeds
            for token in path:
                out = model(
                    states, given, position_embeddings=model.rope(torch.arange(states.shape[1])[None], states)
                )
                states = torch.cat([states, out[:, -1:]], 1)
                given = torch.cat([given, pair.target.get_input_embeddings()(torch.tensor([[token]]))], 1)
            out = model(
                states, given, position_embeddings=model.rope(torch.arange(states.shape[1])[None], states)
            )
            return model.logits(out[:, -1])[0]

        depth, nodes = min(3, batch.max_draft, batch.max_nodes), min(12, batch.max_nodes)
        growth, level = Growth(3), [[]]
        growth.add(followers([])[None, None])
        for _ in range(depth - 1):
            rows, above = growth.expand()
            found = model.token_ids[rows[0]].tolist()
            level = [[*level[a], token] for a, token in zip(above[0].tolist(), found, strict=True)]
            growth.add(torch.stack([followers(path) for path in level])[None])
        rows, tree = growth.best(min(nodes, 3 + (depth - 1) * 9))
        assert draft.tokens.tolist() == model.token_ids[rows].tolist()
        assert draft.tree.parents.tolist() == tree.parents.tolist()
        seen.append(int(tree.depths.max()))
        return draft

    drafter.draft = check
    prompt, cap, *_ = cases("qwen2")[6]
    steps = Engine(target, drafter, frozenset()).answer(prompt, SamplingParams(cap)).steps
    assert len({*seen}) > 1 and any(s.accepted for s in steps)
    weights = model.state_dict()
    once, rest = weights.pop("fc.weight").nbytes, sum(w.nbytes for w in weights.values())
    assert steps[0].draft_bytes == once + 3 * rest


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("arch", EVERY_ARCHITECTURE)
def test_lossless(arch, tmp_path):
    """Also where the draft vocabulary lacks tokens that the target says."""
    steps = assert_lossless(arch, Eagle3(random_pair(arch), saved(random_pair(arch), tmp_path), 12, 4, 4))
    assert any(s.accepted for s in steps) and any(not s.accepted for s in steps)


@pytest.mark.slow
@EVERY_SCHEDULER
def test_lossless_in_batches(scheduler, tmp_path):
    pair = random_pair("qwen2")
    assert_lossless_with(scheduler, "qwen2", Eagle3(pair, saved(pair, tmp_path), 12, 4, 4))


@pytest.mark.slow
def test_sampled_trees_give_the_text_of_autoregressive_decoding(tmp_path):
    """The conformance walk drafts chains."""
    pair = random_pair("qwen2")
    drafter = Eagle3(pair, saved(pair, tmp_path), 12, 4, 4)
    assert assert_samples_like_plain_decoding(pair, drafter, sampled_requests(pair, 16, 0.7))


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [97, 120])
def test_the_drafter_of_an_expanded_target(vocab, tmp_path):
    """It drafts the same."""
    pair = random_pair("llama")
    wide, folder = expanded_pair(pair, WIDE | {"vocab_size": vocab}), saved(pair, tmp_path)
    prompt, cap, *_ = cases("llama")[6]
    drafter = assert_drafts_the_same(lambda which: Eagle3(which, folder, 9, 3, 3), pair, wide, prompt, cap)
    assert drafter.taps == (2, 4, 6) and drafter.model.fc.weight.shape == (96, 288)


@pytest.mark.parametrize(("flag", "tied"), [(flag, flag == "fc_norm") for flag in VARIANTS])
def test_an_expanded_model_gives_the_same_logits(flag, tied, tmp_path):
    """Every variant, whose norms may read three states side by side, also where the target ties head and embedding."""
    pair = random_pair("llama", tie_word_embeddings=tied)
    model = drafting_model(pair, **{flag: True})
    save_eagle3(model, tmp_path, torch.float32)
    shape = wide_shape(pair.target.config.to_dict(), 256) | {"tie_word_embeddings": tied}
    wide = expanded_pair(pair, shape)
    new = load_eagle3(tmp_path, StagedModel(wide.target), wide.expansion)
    ids = torch.tensor([PROMPT])
    logits = []
    for one, body in ((model, pair.target), (new, wide.target)):
        found = body(ids, use_cache=False, output_hidden_states=True)
        states = {tap: found.hidden_states[tap][:, :-1] for tap in one.taps}
        outputs = chained(one, one.features(states), body.model.embed_tokens(ids[:, 1:]), 3)
        logits.append(torch.stack([one.logits(output) for output in outputs]))
    torch.testing.assert_close(logits[1], logits[0], atol=1e-3, rtol=1e-3)


def test_what_is_trained_drafts_the_same_when_loaded(tmp_path):
    """Bit for bit: in the dtype of the file, and once more written and read."""
    pair = random_pair("qwen2")
    target = StagedModel(pair.target)
    model = drafting_model(pair)
    first, second = tmp_path / "first", tmp_path / "second"
    save_eagle3(model, first, torch.bfloat16, loss=1.0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    loaded = load_eagle3(first, target)
    save_eagle3(loaded, second, torch.bfloat16)
    features, embeds = torch.randn(2, 5, 192).split(64, -1), torch.randn(2, 5, 64)
    states = dict(zip(model.taps, features, strict=True))
    rope = model.rope(torch.arange(5)[None], embeds)
    outputs = [
        m.logits(m(m.features(states), embeds, position_embeddings=rope))
        for m in (model, load_eagle3(second, target))
    ]
    assert (
        torch.equal(*outputs) and loaded.taps == model.taps and torch.equal(loaded.token_ids, model.token_ids)
    )


def test_a_layer_that_it_cannot_begin_like_is_refused_and_biases_are_told():
    for arch in ("opt", "qwen3"):  # other names, and norms of queries and keys
        with pytest.raises(UserError, match="not built like a Llama's: set like_layer=null"):
            _has_biases(StagedModel(random_pair(arch).target).layers[0])
    biased = [_has_biases(StagedModel(random_pair(arch).target).layers[0]) for arch in ("llama", "qwen2")]
    assert biased == [False, True]


def test_depths_that_are_none_are_refused(tmp_path):
    pair = random_pair("llama")
    save_eagle3(drafting_model(pair), tmp_path, torch.float32)
    with pytest.raises(UserError, match=r"depths of this target .* not \[\]"):
        load_eagle3(tmp_path, StagedModel(pair.target), taps=[])
