"""Medusa: heads and their files, the tree of counts, what is drafted from which state, and losslessness."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file

from methods.common.heads import DraftHead
from methods.common.rank_trees import MEDUSA_TREE
from methods.medusa import Medusa
from methods.medusa.checkpoint import load_heads, save_for_vllm, save_heads
from methods.medusa.heads import MedusaHeads
from methods.medusa.train import Distillation
from methods.medusa.train import train as train_medusa
from methods.ragged import RaggedBatch
from specbench.decoding.cpu.packed_linear import PackedLinear, packed_linear
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import Request
from specbench.models.pairs import load_pair
from specbench.system.errors import UserError
from tests.support.checkpoints import RunsCode, spoil
from tests.support.decoding import PROMPT, random_pair
from tests.support.lossless import assert_lossless
from tests.support.methods import drafts, trimmed, trimming
from tests.support.models import EVERY_ARCHITECTURE
from tests.support.schedulers import EVERY_SCHEDULER, assert_lossless_with
from tests.support.training import batch_of, training_settings, training_workplace

TREE = [[0], [1], [0, 0], [2], [0, 1], [1, 0], [0, 0, 0]]


def saved_heads(pair, folder, own: bool = False, **notes) -> str:
    torch.manual_seed(3)
    hidden = pair.target.config.hidden_size
    heads = MedusaHeads(3, hidden, pair.target.config.vocab_size if own else None)
    with torch.no_grad():
        heads.weight.normal_(std=0.2)
        heads.bias.normal_(std=0.2)
        if own:
            heads.output.copy_(pair.target.get_output_embeddings().weight.expand_as(heads.output))
            heads.output.add_(0.1 * torch.randn_like(heads.output))
    save_heads(heads, folder, torch.float32, **({"tree": TREE} | notes))
    return str(folder)


def loaded(folder, pair=None) -> tuple:
    pair = pair or random_pair("llama")
    return load_heads(folder, StagedModel(pair.target), pair.expansion)


@pytest.fixture(params=[False, True], ids=["shared head", "own heads"])
def folder(request, tmp_path):
    return saved_heads(random_pair("llama"), tmp_path, request.param)


def test_the_published_tree():
    assert len(MEDUSA_TREE) == len(set(MEDUSA_TREE)) == 63
    assert [sum(len(path) == depth for path in MEDUSA_TREE) for depth in range(1, 5)] == [10, 28, 23, 2]


def test_fresh_heads_say_what_the_target_says():
    states = torch.randn(2, 5, 16)
    assert torch.equal(MedusaHeads(3, 16)(states), states.unsqueeze(2).expand(-1, -1, 3, -1))


def test_heads_are_blocks_of_their_own(folder):
    heads, settings, ids = loaded(folder)
    assert ids is None
    state, states = load_file(f"{folder}/model.safetensors"), torch.randn(4, 64)
    for i in range(3):
        weight, bias = state[f"{i}.0.linear.weight"], state[f"{i}.0.linear.bias"]
        expected = states + torch.nn.functional.silu(states @ weight.T + bias)
        torch.testing.assert_close(heads(states)[:, i], expected)
    assert settings["medusa_num_heads"] == 3
    assert settings["original_lm_head"] == (heads.output is None) == ("0.1.weight" not in state)


def test_what_is_drafted(folder):
    """The likeliest tokens of each head on the state in front of the pending token, round by round."""
    pair = random_pair("llama")
    target = StagedModel(pair.target)
    drafter = Medusa(pair, folder)
    state = load_file(f"{folder}/model.safetensors")
    inner, seen = drafter.draft, []

    def check(batch):
        draft = inner(batch)
        tokens = batch.sequences[0].tokens
        f = pair.target.model(torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state[0, -1]
        ranks = []
        for i in range(3):
            z = f + torch.nn.functional.silu(state[f"{i}.0.linear.weight"] @ f + state[f"{i}.0.linear.bias"])
            output = state.get(f"{i}.1.weight", pair.target.lm_head.weight)
            ranks.append((output @ z).topk(3).indices.tolist())
        paths = sorted((p for p in TREE if len(p) <= batch.max_draft), key=lambda p: (len(p), p))
        assert draft.tokens[0].tolist() == [ranks[len(path) - 1][path[-1]] for path in paths]
        places = {tuple(path): i for i, path in enumerate(paths)}
        assert draft.tree.parents[0].tolist() == [places.get(tuple(path[:-1]), -1) for path in paths]
        seen.append(len(paths))
        return draft

    drafter.draft = check
    steps = Engine(target, drafter, frozenset()).answer(PROMPT, SamplingParams(40)).steps
    assert {7, 3} <= set(seen) and {s.depth for s in steps} == {0, 1, 2, 3}
    blocks = sum(t.nbytes for name, t in state.items() if ".0." in name)
    outputs = sum(t.nbytes for name, t in state.items() if ".1." in name)
    assert steps[0].draft_bytes == blocks + (outputs or target.pass_bytes(0, 0))


def test_nodes_that_another_sequence_has_room_for_are_not_counted(folder):
    """In a batch a tree is as deep as the sequence with most room can use: it is a draft of that one alone."""
    pair = random_pair("llama")
    target, caps = StagedModel(pair.target), (5, 12, 23, 9)
    requests = [Request(PROMPT[i:], SamplingParams(cap)) for i, cap in enumerate(caps)]
    alone = [Engine(target, Medusa(pair, folder), frozenset()).answer(r.prompt, r.decoding) for r in requests]
    together = Engine(target, Medusa(pair, folder), frozenset(), RaggedBatch(4)).generate(requests)
    assert any(step.drafted < len(TREE) for answer in alone for step in answer.steps)
    for one, other in zip(alone, together):
        counts = [[(s.drafted, s.accepted, s.depth) for s in answer.steps] for answer in (one, other)]
        assert counts[0] == counts[1]


def test_heads_that_guess_nothing_are_neither_computed_nor_counted(folder):
    pair = random_pair("llama")
    drafter = Medusa(pair, folder, nodes=3)  # two of three levels
    seen, forward = [], drafter.heads.forward
    drafter.heads.forward = lambda *given: seen.append(forward(*given)) or seen[-1]
    step = Engine(StagedModel(pair.target), drafter, frozenset()).answer(PROMPT, SamplingParams(9)).steps[0]
    assert seen[0].shape[-2] == 2
    state = load_file(f"{folder}/model.safetensors")
    used = sum(t.nbytes for name, t in state.items() if int(name.split(".")[0]) < 2)
    shared = 0 if "0.1.weight" in state else drafter.head.bytes
    assert step.draft_bytes == used + shared


def test_a_smaller_tree(folder):
    drafter = Medusa(random_pair("llama"), folder, nodes=3)
    assert drafter.trees.paths == ((0,), (1,), (0, 0))
    assert drafter.max_draft_tokens == 2 and drafter.max_nodes == 3
    with pytest.raises(UserError, match=r"nodes=8.*\b7\b"):
        Medusa(random_pair("llama"), folder, nodes=8)


def test_heads_without_a_tree_get_the_published_one(tmp_path):
    """As far as they reach."""
    drafter = Medusa(
        random_pair("llama"), saved_heads(random_pair("llama"), tmp_path, tree=None, tree_counts=0)
    )
    assert drafter.trees.paths == tuple(path for path in MEDUSA_TREE if len(path) <= 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("1.0.linear.bias"), "missing 1.0.linear.bias"),
        (lambda s: s.update({"lm_head.weight": torch.ones(2)}), "unknown lm_head.weight"),
        (lambda s: s.update({"2.0.linear.bias": torch.ones(2)}), r"2.0.linear.bias is \(2,\)"),
        (lambda s: s.clear(), "no tensor"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(folder, change, message):
    spoil(folder, change)
    with pytest.raises(UserError, match=message):
        loaded(folder)


def test_other_faults_of_a_checkpoint(folder, tmp_path):
    with pytest.raises(UserError, match=r"64 wide.*48.*another target"):
        loaded(folder, random_pair("llama", hidden_size=48, head_dim=12))
    with pytest.raises(UserError, match="config.json is missing"):
        loaded(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("no JSON")
    with pytest.raises(UserError, match="cannot be read"):
        loaded(tmp_path)


def test_the_authors_format(folder, tmp_path):
    """A pickle, and a config.json that counts wrong."""
    authors = tmp_path / "authors"
    authors.mkdir()
    state = load_file(f"{folder}/model.safetensors")
    torch.save(state, authors / "medusa_lm_head.pt")
    (authors / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1}))
    ours, theirs = (loaded(f)[0] for f in (folder, authors))
    states = torch.randn(2, 64)
    assert theirs.heads == 3 and torch.equal(ours(states), theirs(states))


def test_a_pickle_that_runs_code_is_not_loaded(folder, tmp_path):
    authors = tmp_path / "authors"
    authors.mkdir()
    (authors / "config.json").write_text("{}")
    torch.save({"0.0.linear.bias": RunsCode()}, authors / "medusa_lm_head.pt")
    with pytest.raises(UserError, match="[Ww]eights.only"):
        loaded(authors)


def test_files_from_the_hub(folder, monkeypatch):
    """A part may be a hub id: only the files that are read are fetched."""
    asked = []

    def fetch(name, revision=None, allow_patterns=None, ignore_patterns=None):
        asked.append((name, allow_patterns))
        return folder

    monkeypatch.setattr("specbench.models.model_source.snapshot_download", fetch)
    assert Medusa(random_pair("llama"), "someone/medusa-of-llama").heads.heads == 3
    files = ["config.json", "model.safetensors", "medusa_lm_head.pt", "medusa_lm_head.safetensors"]
    assert asked == [("someone/medusa-of-llama", files)]


def test_whole_models_and_trees_that_are_too_deep_are_refused(folder, tmp_path):
    """Medusa-2's checkpoints are models; their files of tensors have any names."""
    (tmp_path / "two").mkdir()
    settings = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 32, "medusa_num_heads": 5}
    (tmp_path / "two" / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="whole model.*Medusa-2"):
        loaded(tmp_path / "two")
    for name, what in (
        ("kangaroo", "an adapter of Kangaroo"),
        ("hydra_heads", "heads of Hydra"),
        ("eagle3", "LlamaForCausalLMEagle3"),
        ("eagle", "a model with attention"),
    ):
        with pytest.raises(
            UserError, match=f"{name}' holds no heads of Medusa, but {what}: name another folder"
        ):
            loaded(f"specbench/tiny/weights/{name}")
    deep = saved_heads(random_pair("llama"), tmp_path, tree=[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]])
    with pytest.raises(UserError, match="4 levels, but there are 3 heads"):
        Medusa(random_pair("llama"), deep)


# -- vLLM's form

VOCAB = random_pair("llama").vocab_size


def as_vllm_reads(folder) -> dict[str, torch.Tensor]:
    """What vLLM puts into its parameters, by its list of keys: what is not on the list is dropped without a word."""
    config = json.loads((folder / "config.json").read_text())
    k, d, rows = config["num_heads"], config["hidden_size"], config["truncated_vocab_size"]
    assert config["model_type"] == "medusa" and config["architectures"] == ["MedusaModel"]
    assert rows == config["vocab_size"]  # else a token map must be there
    shapes = {
        f"blocks.{i}.layers.{j}.weight": (d, d) for i in range(k) for j in range(config["num_hidden_layers"])
    }
    if config["medusa_fc_bias"]:
        shapes |= {name.replace("weight", "bias"): (d,) for name in shapes}
    if config["original_lm_head"]:
        shapes["lm_head.weight"] = (rows, d)
    else:
        shapes |= {f"lm_heads.{i}.weight": (rows, d) for i in range(k)}
    state = load_file(folder / "model.safetensors")
    taken = {name: tensor for name, tensor in state.items() if name in shapes}
    assert {name: tuple(tensor.shape) for name, tensor in taken.items()} == shapes
    return taken


@pytest.mark.parametrize("own", [False, True])
def test_what_is_written_for_vllm(own, tmp_path):
    """vLLM finds every parameter that it has; read again the heads are the same, and draft the same."""
    pair = random_pair("llama")
    plain = saved_heads(pair, tmp_path / "plain", own)
    heads, settings, _ = loaded(plain)
    head = pair.target.lm_head.weight
    save_for_vllm(heads, head, tmp_path / "vllm", torch.float32, tree=settings["tree"])
    taken = as_vllm_reads(tmp_path / "vllm")
    states = torch.randn(4, 64)
    for i in range(3):
        weight, bias = taken[f"blocks.{i}.layers.0.weight"], taken[f"blocks.{i}.layers.0.bias"]
        z = states + torch.nn.functional.silu(states @ weight.T + bias)
        torch.testing.assert_close(z, heads(states)[:, i])
        output = taken[f"lm_heads.{i}.weight"] if own else taken["lm_head.weight"]
        assert torch.equal(output, heads.output[i] if own else head)
    ours, again = (drafts(Medusa(pair, str(f)), pair, 0.0) for f in (plain, tmp_path / "vllm"))
    assert len(ours) > 2 and all(torch.equal(a, b) for (a, _), (b, _) in zip(ours, again))


def in_vllms_form(folder, change=None, own: bool = True, **settings) -> str:
    """Heads as others may have written them for vLLM, with whatever that form has."""
    pair = random_pair("llama")
    heads = loaded(saved_heads(pair, folder / "plain", own))[0]
    save_for_vllm(heads, pair.target.lm_head.weight, folder, torch.float32, tree=TREE)
    config = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(config))
    if change is not None:
        spoil(folder, change)
    return str(folder)


def renamed(state: dict, prefix: str = "medusa_heads.") -> None:
    for name in list(state):
        state[f"{prefix}{name}"] = state.pop(name)


IDS = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[: VOCAB // 2]


def mapped(state: dict, cut: bool) -> None:
    state["token_map"] = IDS
    for name in [name for name in state if name.startswith("lm_head") and cut]:
        state[name] = state[name][IDS].contiguous()


@pytest.mark.first_fast
@pytest.mark.parametrize("cut", [True, False], ids=["rows of the map", "all rows"])
@pytest.mark.parametrize("own", [False, True])
def test_a_token_map(own, cut, tmp_path):
    """Heads with a map draft what heads do that are trimmed to the same tokens."""
    pair = random_pair("llama")
    folder = in_vllms_form(
        tmp_path, lambda s: mapped(s, cut), own, vocab_size=VOCAB, truncated_vocab_size=len(IDS)
    )
    drafter, plain = Medusa(pair, folder), Medusa(pair, str(tmp_path / "plain"))
    head = DraftHead(plain.head.model, VOCAB, IDS)
    plain.head, plain._outputs = head, [packed_linear(one.weight[IDS], None) for one in plain._outputs]
    assert len(plain._outputs) == 3 * own and all(isinstance(one, PackedLinear) for one in drafter._outputs)
    expected, found = drafts(plain, pair, 0.0), drafts(drafter, pair, 0.0)
    assert len(found) > 2 and all(torch.equal(a, b) for (a, _), (b, _) in zip(expected, found))
    assert {token for tokens, _ in found for token in tokens.tolist()} <= set(IDS.tolist())
    assert assert_lossless("llama", drafter, third=0)
    with pytest.raises(UserError, match="vocab=full"):
        Medusa(trimming(pair, "any"), folder)


def test_other_forms_of_vllms_form(tmp_path):
    """With a prefix, without biases, the target's head under another name; biases that config.json does not tell of."""
    whole = loaded(in_vllms_form(tmp_path / "a"))[0]
    prefixed = loaded(in_vllms_form(tmp_path / "b", renamed))[0]
    assert all(map(torch.equal, whole.state_dict().values(), prefixed.state_dict().values()))
    silent = loaded(in_vllms_form(tmp_path / "c", medusa_fc_bias=False))[0]
    assert torch.equal(silent.bias, whole.bias) and whole.bias.abs().sum() > 0

    def no_biases(state):
        for name in [name for name in state if name.endswith("bias")]:
            del state[name]

    bare = loaded(in_vllms_form(tmp_path / "d", no_biases, medusa_fc_bias=False))[0]
    assert torch.equal(bare.weight, whole.weight) and not bare.bias.any()
    shared = in_vllms_form(
        tmp_path / "e", lambda s: s.update({"lm_heads.0.weight": s.pop("lm_head.weight")}), own=False
    )
    assert loaded(shared)[0].output is None


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (lambda s: s.pop("blocks.1.layers.0.bias"), {}, "missing 1.0.linear.bias"),
        (
            lambda s: s.update({"blocks.0.layers.1.weight": torch.ones(64, 64)}),
            {},
            "unknown blocks.0.layers.1",
        ),
        (lambda s: s.pop("lm_heads.2.weight"), {}, "missing 2.1.weight"),
        (lambda s: mapped(s, True), {}, "token_map has .* ids, config.json says"),
        (
            lambda s: s.update(token_map=torch.zeros(9).long()),
            {"truncated_vocab_size": 9},
            "token_map holds an id",
        ),
        (lambda s: s.update(token_map=torch.arange(9) * 50), {"truncated_vocab_size": 9}, "not below"),
        (lambda s: s.update(token_map=torch.ones(9)), {"truncated_vocab_size": 9}, "no list of token ids"),
        (
            lambda s: s.update(
                {f"lm_heads.{i}.weight": torch.ones(7, 64) for i in range(3)}, token_map=torch.arange(9)
            ),
            {"truncated_vocab_size": 9},
            "score 7 tokens, not 9",
        ),
        (None, {"original_lm_head": True}, "made for another target: lm_head.weight is not the target's"),
        (
            lambda s: s.update({f"lm_heads.{i}.weight": torch.ones(VOCAB + 1, 64) for i in range(3)}),
            {},
            f"score {VOCAB + 1} tokens, not {VOCAB}",
        ),
    ],
)
def test_vllms_form_that_does_not_fit_is_refused(change, settings, message, tmp_path):
    with pytest.raises(UserError, match=message):
        loaded(in_vllms_form(tmp_path, change, **settings))


# -- training


def test_the_loss_by_hand():
    """Head i at place t against the target at t + 1 + i, where token t + 2 + i counts."""
    pair = random_pair("llama")
    torch.manual_seed(1)
    heads = MedusaHeads(2, 64)
    with torch.no_grad():
        heads.weight.normal_(std=0.1)
    ids, said = [[5, 9, 20, 11, 4, 30, 8]], [[0, 0, 0, 1, 1, 0.5, 1]]
    found = Distillation(heads, StagedModel(pair.target))(batch_of(ids, said))
    output = pair.target.model(torch.tensor(ids), use_cache=False)
    finals, teacher = (
        output.last_hidden_state[0],
        pair.target.lm_head(output.last_hidden_state[0]).softmax(-1),
    )
    expected = 0.0
    for i in range(2):
        for t in range(7 - 2 - i):
            logits = pair.target.lm_head(heads(finals[t])[i])
            expected += 0.8**i * said[0][t + 2 + i] * -(teacher[t + 1 + i] * logits.log_softmax(-1)).sum()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    found.backward()
    assert heads.weight.grad.abs().sum() > 0 and pair.target.lm_head.weight.grad is None


def test_rank_paths_by_hand():
    pair = random_pair("llama")
    heads = MedusaHeads(2, 64)  # both say what the target's own head says
    ids = [[5, 9, 20, 11, 4, 30, 8, 2]]
    module = Distillation(heads, StagedModel(pair.target))
    found = module.rank_paths(batch_of(ids, [[0, 0, 1, 1, 1, 1, 1, 1]]))
    logits = pair.target(torch.tensor(ids), use_cache=False).logits[0]
    expected: Counter = Counter()
    for place in range(1, 5):  # the pending token, place + 1, is the assistant's, and so are both after it
        ranks = [int((logits[place] > logits[place, ids[0][place + 2 + i]]).sum()) for i in range(2)]
        for n in (1, 2):
            if all(rank < 10 for rank in ranks[:n]):
                expected[tuple(ranks[:n])] += 1
    assert found == expected


@pytest.mark.slow
def test_the_trainer_writes_the_form_that_is_asked_for(tmp_path):
    workplace, found = training_workplace(tmp_path), []
    for form in ("authors", "vllm"):
        more = (f"form={form}", "heads=2", "steps=6", "learning_rate=1e-2")
        cfg = training_settings("train_medusa", workplace, tmp_path / form, *more)
        out = train_medusa(cfg)
        found.append(loaded(out, load_pair(cfg.pair, 0, with_draft=False)))
    (heads, settings, _), (again, others, _) = found
    assert torch.equal(heads.weight, again.weight) and heads.weight.any() and again.output is None
    assert settings["tree"] == others["tree"] and settings["loss"] == others["loss"]
    assert set(as_vllm_reads(tmp_path / "vllm")) > {"lm_head.weight", "blocks.1.layers.0.bias"}


# -- losslessness


@pytest.mark.one_in(3)
@pytest.mark.parametrize("arch", EVERY_ARCHITECTURE)
def test_lossless(arch, tmp_path):
    pair = random_pair(arch)
    folder = saved_heads(pair, tmp_path)
    steps = []
    for turn, nodes in enumerate((1, 4, None)):
        steps += assert_lossless(arch, Medusa(pair, folder, nodes), third=turn)
    steps += assert_lossless(arch, trimmed(Medusa(pair, folder), list(range(0, pair.vocab_size, 2))), third=1)
    assert any(s.accepted for s in steps)


@pytest.mark.slow
@EVERY_SCHEDULER
def test_lossless_in_batches(scheduler, tmp_path):
    pair = random_pair("qwen2")
    assert_lossless_with(scheduler, "qwen2", Medusa(pair, saved_heads(pair, tmp_path)))
