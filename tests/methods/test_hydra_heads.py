"""Hydra and Hydra++: heads and their files, what is drafted from which state, the prefix layer's cache, losses."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import silu
from transformers import LlamaModel

from methods.common.heads import DraftHead
from methods.common.rank_trees import MEDUSA_TREE
from methods.eqspec import EqSpec
from methods.exspec import ExSpec
from methods.hydra_heads import HydraHeads
from methods.hydra_heads import drafter as drafter_module
from methods.hydra_heads.checkpoint import load_heads, save_heads
from methods.hydra_heads.heads import Heads, prefix_config
from methods.hydra_heads.train import Distillation, fit, fresh_heads
from methods.hydra_heads.train import train as train_hydra_heads
from methods.ragged import RaggedBatch
from specbench.decoding.engine import Engine
from specbench.decoding.model.cost import weight_bytes
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import Request
from specbench.models.expansion import Expansion, expand_model
from specbench.models.pairs import load_pair
from specbench.system.errors import UserError
from tests.support import batches
from tests.support.checkpoints import RunsCode, spoil
from tests.support.decoding import random_pair
from tests.support.lossless import assert_lossless, assert_samples_like_plain_decoding
from tests.support.methods import drafts, trimmed
from tests.support.models import EVERY_ARCHITECTURE
from tests.support.training import training_settings, training_workplace

PROMPT = [3, 9, 27, 11, 33, 29, 17]
TREE = [[0], [1], [0, 0], [2], [0, 1], [1, 0], [0, 0, 0], [1, 0, 2]]
KINDS = {"hydra": (False, False), "hydra++": (True, False), "hydra++, own heads": (True, True)}


def heads_for(pair, prefix: bool, own: bool = False, layers: int = 3, noise: float = 0.05) -> Heads:
    """Heads that begin as the trainer's do, with noise on every weight."""
    torch.manual_seed(3)
    heads = fresh_heads(StagedModel(pair.target), 3, layers, prefix, own)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return heads


def saved_heads(pair, folder, prefix: bool, own: bool = False, **notes) -> str:
    save_heads(heads_for(pair, prefix, own), folder, torch.float32, **({"tree": TREE} | notes))
    return str(folder)


@pytest.fixture(params=KINDS)
def folder(request, tmp_path):
    return saved_heads(random_pair("llama"), tmp_path, *KINDS[request.param])


def loaded(folder, pair=None) -> Heads:
    pair = pair or random_pair("llama")
    return load_heads(folder, StagedModel(pair.target), pair)[0]


def prefix_model(folder, config) -> LlamaModel:
    """The prefix layer as transformers' own Llama of one layer: an independent way to compute it."""
    model = LlamaModel(config)
    state = load_file(f"{folder}/model.safetensors")
    name = "prefix_embeding_layer."
    own = {key.removeprefix(name): value for key, value in state.items() if key.startswith(name)}
    missing, unexpected = model.load_state_dict(own, strict=False)
    assert missing == ["embed_tokens.weight"] and not unexpected
    return model.eval()


def finals(pair, tokens: list[int]) -> torch.Tensor:
    """The target's states [1, n, d] after its final norm, from transformers' own pass."""
    return pair.target.model(torch.tensor([tokens]), use_cache=False).last_hidden_state


# -- heads


def test_fresh_heads_say_what_the_target_says():
    """Directions of states alone: a norm takes their lengths, and those of the prefix layer are alike."""
    target = StagedModel(random_pair("llama").target)
    states, tokens = torch.randn(2, 5, 64), torch.randn(2, 5, 64 * 2)
    for prefix in (False, True):
        heads = fresh_heads(target, 2, 4, prefix, True)
        assert torch.equal(heads(0, torch.cat([states, tokens[..., :64]], -1)), states)
        assert torch.equal(heads(1, torch.cat([states, tokens], -1)), states)
        assert torch.equal(heads.output[1](states), target.lm_head(states))
    positions = torch.arange(5).unsqueeze(0)
    passed = heads.prefix(states, heads.prefix.rope(positions, states))
    torch.testing.assert_close(
        torch.nn.functional.normalize(passed, dim=-1), torch.nn.functional.normalize(states, dim=-1)
    )
    weight = target.norm.weight
    torch.testing.assert_close(
        passed.square().mean().sqrt(), weight.square().mean().sqrt(), rtol=1e-3, atol=0
    )


@pytest.mark.parametrize("prefix", [False, True])
def test_fitted_heads_estimate_their_states(prefix):
    target, ids = StagedModel(random_pair("llama").target), torch.randint(0, 60, (8, 64))
    batch = {"input_ids": ids, "loss_weight": torch.ones(ids.shape)}
    heads = fresh_heads(target, 2, 1, prefix, False)
    states = finals_of(target, ids)

    def errors() -> list[float]:
        with torch.no_grad():
            guesses = Distillation(heads, target).states(batch, states)
        return [(guess - states[:, 1 + i :]).square().mean().item() for i, guess in enumerate(guesses)]

    before = errors()
    fit(heads, target, [batch])
    assert all(after < error / 2 for after, error in zip(errors(), before))


def finals_of(target: StagedModel, ids: torch.Tensor) -> torch.Tensor:
    """The target's states [B, T, d] after its final norm."""
    with torch.no_grad():
        return target.model.model(ids, use_cache=False).last_hidden_state


def by_hand(state: dict, i: int, read: torch.Tensor, step: int) -> torch.Tensor:
    """Head i's states of its input, from a checkpoint's tensors; step: between the indices of two blocks."""
    first = step - 1
    wide = f"hydra_mlp.{i}.{first}"
    z = read @ state[f"{wide}.res_connection.weight"].T + state[f"{wide}.res_connection.bias"]
    z = z + silu(read @ state[f"{wide}.linear.weight"].T + state[f"{wide}.linear.bias"])
    for j in (1, 2):
        square = f"hydra_mlp.{i}.{first + step * j}.linear"
        z = z + silu(z @ state[f"{square}.weight"].T + state[f"{square}.bias"])
    return z


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
    prefix = prefix_model(folder, prefix_config(pair.target.config)) if prefixed else None
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
        blocks = 64 * 2 * (64 * (2 + 3 + 4) + 3) + 3 * (64 * 64 + 64)
        assert steps[0].draft_bytes == 4 * blocks + 3 * target.pass_bytes(0, 0)
    else:
        assert steps[0].draft_bytes > weight_bytes(prefix.layers)


@pytest.mark.one_in(3)
@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize("scheduler", [None, RaggedBatch, EqSpec, lambda size: ExSpec(size, window=7)])
@pytest.mark.parametrize("arch", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_the_prefix_layers_cache_is_that_of_one_pass_over_all_states(arch, scheduler, tmp_path):
    """After every round: keys, values and the state to draft from, of every sequence that ran."""
    pair = random_pair(arch)
    folder = saved_heads(pair, tmp_path, prefix=True)
    drafter = HydraHeads(pair, folder)
    prefix = prefix_model(folder, prefix_config(pair.target.config))
    inner, checked = drafter.commit, Counter()

    def check(batch, verified):
        inner(batch, verified)
        for slot, (sequence, count) in enumerate(zip(batch.sequences, verified.counts)):
            # Cut after a stop token the text has less than was accepted, and is not gone on with.
            if sequence.length != batch.lengths[slot] + count + 1:
                continue
            out = prefix(inputs_embeds=finals(pair, sequence.tokens[:-1]), use_cache=True)
            n = sequence.length - 1
            layer, cache = out.past_key_values.layers[0], drafter._layer.layout.cache.segments[0][0]
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


def test_a_smaller_tree(folder):
    drafter = HydraHeads(random_pair("llama"), folder, nodes=3)
    assert drafter.trees.paths == ((0,), (1,), (0, 0))
    assert drafter.max_draft_tokens == 2 and drafter.max_nodes == 3
    with pytest.raises(UserError, match=r"nodes=9.*\b8\b"):
        HydraHeads(random_pair("llama"), folder, nodes=9)


def test_heads_without_a_tree_get_the_published_one(tmp_path):
    drafter = HydraHeads(random_pair("llama"), saved_heads(random_pair("llama"), tmp_path, False, tree=None))
    assert drafter.trees.paths == tuple(path for path in MEDUSA_TREE if len(path) <= 3)


# -- files


class Block(torch.nn.Module):
    """A block of the authors' heads, with their names."""

    def __init__(self, inputs: int):
        super().__init__()
        self.linear = torch.nn.Linear(inputs, 64)
        self.res_connection = torch.nn.Linear(inputs, 64) if inputs > 64 else torch.nn.Identity()

    def forward(self, x):
        return self.res_connection(x) + silu(self.linear(x))


class Authors(torch.nn.Module):
    """The authors' modules by the names and the order of their checkpoints, at a small size."""

    def __init__(self, target, arch: str, layers: int = 4):
        super().__init__()
        dropout = [torch.nn.Dropout(0.2)] * (arch == "prefix-mlp")
        if dropout:
            self.prefix_embeding_layer = LlamaModel(prefix_config(target.config))
        self.input_embed_fn = target.model.embed_tokens
        heads = [[*dropout, Block(64 * (2 + i)), *[*dropout, Block(64)] * (layers - 1)] for i in range(2)]
        self.hydra_mlp = torch.nn.ModuleList(torch.nn.Sequential(*blocks) for blocks in heads)
        outputs = [torch.nn.Linear(64, target.config.vocab_size) for _ in range(2)]
        self.hydra_lm_head = torch.nn.ModuleList(
            torch.nn.Sequential(*dropout, output) if dropout else output for output in outputs
        )


def authors_checkpoint(folder, arch: str, layers: int = 4, change=None, **settings) -> Authors:
    torch.manual_seed(5)
    authors = Authors(random_pair("llama").target, arch, layers).eval()
    state = {name: tensor.clone() for name, tensor in authors.state_dict().items()}
    if change is not None:
        change(state)
    torch.save(state, folder / "hydra_lm_head.pt")
    config = {"hydra_num_heads": 2, "hydra_num_layers": layers, "hydra_head_arch": arch}
    config |= {"grounded_heads": True, "hidden_state_offset": 0, "base_model_name_or_path": "x", **settings}
    (folder / "config.json").write_text(json.dumps(config))
    return authors


@torch.inference_mode()
@pytest.mark.parametrize(("arch", "layers"), [("mlp", 1), ("mlp", 3), ("prefix-mlp", 1), ("prefix-mlp", 4)])
def test_the_authors_files(arch, layers, tmp_path):
    """What is read says what the authors' own modules say; written and read again it is the same."""
    pair = random_pair("llama")
    authors = authors_checkpoint(tmp_path, arch, layers)
    heads = loaded(tmp_path)
    assert (heads.heads, heads.layers, heads.prefix is not None) == (2, layers, arch == "prefix-mlp")
    states = finals(pair, PROMPT)
    if heads.prefix is not None:
        expected = authors.prefix_embeding_layer(inputs_embeds=states, use_cache=False).last_hidden_state
        own = heads.prefix(states, heads.prefix.rope(torch.arange(len(PROMPT)).unsqueeze(0), states))
        torch.testing.assert_close(own, expected)
    for i in range(2):
        read = torch.randn(3, 64 * (2 + i))
        expected = authors.hydra_lm_head[i](authors.hydra_mlp[i](read))
        torch.testing.assert_close(heads.output[i](heads(i, read)), expected)
    save_heads(heads, tmp_path / "again", torch.float32, tree=TREE[:5])
    state = load_file(tmp_path / "again" / "model.safetensors")
    dropped = {"input_embed_fn.weight", "prefix_embeding_layer.embed_tokens.weight"}
    assert set(state) == set(authors.state_dict()) - dropped
    assert all(torch.equal(tensor, authors.state_dict()[name]) for name, tensor in state.items())
    again = loaded(tmp_path / "again")
    assert all(map(torch.equal, again.state_dict().values(), heads.state_dict().values()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("hydra_mlp.1.1.linear.bias"), "missing hydra_mlp.1.1.linear.bias"),
        (lambda s: s.pop("hydra_lm_head.0.1.bias"), "missing hydra_lm_head.0.1.bias"),
        (lambda s: s.update({"lm_head.weight": torch.ones(2)}), "unknown lm_head.weight"),
        (
            lambda s: s["hydra_mlp.1.5.linear.weight"].add_(1),
            "hydra_mlp.1.5.linear.weight differs from hydra_mlp.1.3",
        ),
        (
            lambda s: s["hydra_mlp.0.7.linear.bias"].add_(1),
            "hydra_mlp.0.7.linear.bias differs from hydra_mlp.0.3",
        ),
        (lambda s: s["input_embed_fn.weight"].mul_(1.5), "made for another target: input_embed_fn.weight"),
        (
            lambda s: [s.pop(n) for n in list(s) if n.startswith("hydra_mlp.1")],
            "hydra_num_heads=2, .* are of 1",
        ),
        (lambda s: [s.pop(n) for n in list(s) if ".7." in n], "hydra_num_layers=4, .* are of 3"),
        (lambda s: s.pop("prefix_embeding_layer.norm.weight"), "missing prefix_embeding_layer.norm.weight"),
    ],
)
def test_files_that_do_not_fit_are_refused(change, message, tmp_path):
    authors_checkpoint(tmp_path, "prefix-mlp", change=change)
    with pytest.raises(UserError, match=message):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hydra_num_heads": 3}, "hydra_num_heads=3, the tensors are of 2"),
        ({"hydra_num_heads": None}, "hydra_num_heads is None"),
        ({"hydra_num_layers": 2}, "hydra_num_layers=2, the tensors are of 4"),
        ({"hydra_head_arch": "eagle-attn"}, "hydra_head_arch is 'eagle-attn', not 'mlp' or 'prefix-mlp'"),
        ({"hydra_head_arch": "mlp"}, "missing hydra_mlp.0.0.linear.bias.*unknown hydra_mlp.0.1"),
        ({"grounded_heads": False}, "grounded_heads is not true"),
        ({"hidden_state_offset": 1}, "hidden_state_offset is not 0"),
    ],
)
def test_heads_of_another_kind_are_refused(settings, message, tmp_path):
    authors_checkpoint(tmp_path, "prefix-mlp", **settings)
    with pytest.raises(UserError, match=message):
        loaded(tmp_path)


def test_other_faults_of_a_checkpoint(tmp_path):
    folder = saved_heads(
        random_pair("llama"), tmp_path / "a", True, tree=[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]
    )
    with pytest.raises(UserError, match="4 levels, but there are 3 heads"):
        HydraHeads(random_pair("llama"), folder)
    saved_heads(random_pair("llama"), tmp_path / "a", True, tree=[[0], [1, 0]])
    with pytest.raises(UserError, match=r"tree of the heads is broken: \[1, 0\] has no parent"):
        HydraHeads(random_pair("llama"), folder)
    narrow = random_pair("llama", hidden_size=48, head_dim=12)
    with pytest.raises(UserError, match=r"64 wide.*48.*another target"):
        loaded(folder, narrow)
    spoil(folder, lambda s: s.clear())
    with pytest.raises(UserError, match="hydra_num_heads=3, the tensors are of 0"):
        loaded(folder)
    (tmp_path / "b").mkdir()
    with pytest.raises(UserError, match=r"config.json is missing"):
        loaded(tmp_path / "b")
    (tmp_path / "b" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"model.safetensors, hydra_lm_head.pt is missing"):
        loaded(tmp_path / "b")


def test_a_pickle_that_runs_code_is_not_loaded(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    torch.save({"hydra_mlp.0.0.linear.bias": RunsCode()}, tmp_path / "hydra_lm_head.pt")
    with pytest.raises(UserError, match="[Ww]eights.only"):
        loaded(tmp_path)


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
    settings = pair.target.config.to_dict()
    expansion = Expansion(settings, settings | WIDER[shape], "x")
    wide = expand_model(pair.target, expansion, pair.device, torch.float32)
    other = type(pair)(**(vars(pair) | {"target": wide, "expansion": expansion}))
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
    settings = pair.target.config.to_dict()
    expansion = Expansion(settings, settings | WIDER["twice"], "x")
    wide = expand_model(pair.target, expansion, pair.device, torch.float32)
    other = type(pair)(**(vars(pair) | {"target": wide, "expansion": expansion}))
    with pytest.raises(UserError, match="cannot be expanded"):
        HydraHeads(other, saved_heads(pair, tmp_path, True, True))


# -- training


def batch_of(ids: list[list[int]], said: list[list[float]]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor(ids), "loss_weight": torch.tensor(said, dtype=torch.float32)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_by_hand(kind, tmp_path):
    """Head i at place t, given tokens t + 1 to t + 1 + i, against the target at t + 1 + i; token t + 2 + i counts.

    All three heads are judged by the same tokens: those with enough tokens in front for the last head.
    """
    pair = random_pair("llama")
    prefix, own = KINDS[kind]
    heads = heads_for(pair, prefix, own)
    save_heads(heads, tmp_path, torch.float32)
    ids, said = [5, 9, 20, 11, 4, 30, 8], [0, 0, 0, 1, 1, 0.5, 1]
    found = Distillation(heads, StagedModel(pair.target))(batch_of([ids], [said]))
    states = finals(pair, ids)
    teacher = pair.target.lm_head(states[0]).softmax(-1)
    if prefix:
        model = prefix_model(tmp_path, prefix_config(pair.target.config))
        states = model(inputs_embeds=states, use_cache=False).last_hidden_state
    embedded = pair.target.model.embed_tokens(torch.tensor(ids))
    state, step, expected = load_file(tmp_path / "model.safetensors"), 2 if prefix else 1, 0.0
    for i in range(3):
        for t in range(2 - i, len(ids) - 2 - i):
            z = by_hand(state, i, torch.cat([states[0, t], *embedded[t + 1 : t + 2 + i]]), step)
            logits = heads.output[i](z) if own else pair.target.lm_head(z)
            expected += said[t + 2 + i] * -(teacher[t + 1 + i] * logits.log_softmax(-1)).sum()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    found.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in heads.parameters())
    assert pair.target.lm_head.weight.grad is None


def test_rank_paths_are_those_of_the_chain_on_the_true_tokens(tmp_path):
    """Counted in one pass; the ranks of what follows, each drafted after the true tokens in front."""
    pair = random_pair("llama")
    heads = heads_for(pair, prefix=True)
    ids = [5, 9, 20, 11, 4, 30, 8, 2]
    found = Distillation(heads, StagedModel(pair.target)).rank_paths(
        batch_of([ids], [[0, 0, 1, 1, 1, 1, 1, 1]])
    )
    save_heads(heads, tmp_path, torch.float32)
    model = prefix_model(tmp_path, prefix_config(pair.target.config))
    states = model(inputs_embeds=finals(pair, ids), use_cache=False).last_hidden_state[0]
    state, embedded = (
        load_file(tmp_path / "model.safetensors"),
        pair.target.model.embed_tokens(torch.tensor(ids)),
    )
    expected: Counter = Counter()
    for place in range(
        1, 4
    ):  # the pending token, place + 1, is the assistant's, and so are the three after it
        ranks = []
        for i in range(3):
            read = torch.cat([states[place], *embedded[place + 1 : place + 2 + i]])
            logits = pair.target.lm_head(by_hand(state, i, read, 2))
            ranks.append(int((logits > logits[ids[place + 2 + i]]).sum()))
        for n in (1, 2, 3):
            if all(rank < 10 for rank in ranks[:n]):
                expected[tuple(ranks[:n])] += 1
    assert found == expected


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("prefix", [True, False])
def test_training_learns_and_what_is_saved_drafts_as_what_was_trained(prefix, tmp_path, monkeypatch):
    workplace = training_workplace(tmp_path)
    cfg = training_settings(
        "train_hydra_heads", workplace, tmp_path / "out", "learning_rate=1e-2", "heads=2", f"prefix={prefix}"
    )
    kept = {}
    from methods.hydra_heads import checkpoint

    def keep(heads, *args, **notes):
        kept["heads"] = heads
        save_heads(heads, *args, **notes)

    monkeypatch.setattr(checkpoint, "save_heads", keep)
    out = train_hydra_heads(cfg)
    settings = json.loads((out / "config.json").read_text())
    assert settings["head_2_agreement"] > 0.7 and len(settings["tree"]) == len(settings["tree_counts"]) > 0
    log = [
        json.loads(line)["held_out_agreement"] for line in (out / "train_log.jsonl").read_text().splitlines()
    ]
    assert log[-1] > log[0]
    pair = load_pair(cfg.pair, 0, with_draft=False)
    saved, trained = HydraHeads(pair, str(out)), HydraHeads(pair, str(out))
    trained.heads = kept["heads"].eval().requires_grad_(False)
    assert all(map(torch.equal, saved.heads.state_dict().values(), trained.heads.state_dict().values()))
    expected, found = (drafts(drafter, pair, 0.0) for drafter in (trained, saved))
    assert len(found) > 2 and all(torch.equal(a, b) for (a, _), (b, _) in zip(expected, found))


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
    monkeypatch.setattr(drafter_module, "draft_head", lambda pair, model, *_: DraftHead(model, 61, kept))
    drafter, whole = HydraHeads(pair, folder), loaded(folder)
    states = torch.randn(1, 4, 64)
    for i in range(3):
        assert torch.equal(drafter._logits(states, i), whole.output[i](states)[..., kept])
    rounds = drafts(drafter, pair, 0.0)
    assert len(rounds) > 2 and all(set(tokens.tolist()) <= set(kept.tolist()) for tokens, _ in rounds)
    assert assert_lossless("llama", drafter, third=0)


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("scheduler", [RaggedBatch, EqSpec, lambda size: ExSpec(size, window=7)])
def test_lossless_in_batches(scheduler, prefix, tmp_path):
    requests, expected = batches.cases("qwen2")
    pair = random_pair("qwen2")
    drafter = HydraHeads(pair, saved_heads(pair, tmp_path, prefix))
    engine = Engine(StagedModel(pair.target), drafter, frozenset(), scheduler(4))
    assert any(s.accepted for s in batches.assert_lossless(engine, requests, expected))
    # A tree is as deep as the sequence with most room can use it.
    batches.assert_drafts_as_alone(engine, requests, ["accepted"])


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("scheduler", [None, RaggedBatch(3)])
def test_sampled_text_is_that_of_autoregressive_decoding(folder, scheduler):
    pair = random_pair("llama")
    requests = [Request(PROMPT, SamplingParams(30, 0.7), seed) for seed in range(4)]
    assert assert_samples_like_plain_decoding(pair, HydraHeads(pair, folder), requests, scheduler)
