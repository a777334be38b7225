"""Trees of a draft model: what is drafted and drawn, that a chain is `sps`, the counted tree, and losslessness."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
import torch

from methods.ragged import RaggedBatch
from methods.sps import SpeculativeSampling
from methods.sps_tree import DraftModelTree, drafter
from methods.sps_tree.drafter import FILE, draws_without_replacement, load_tree
from methods.sps_tree.train import paths_of, ranks_of, train
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import Request
from specbench.system.errors import UserError
from tests.support import batches
from tests.support.conf import composed
from tests.support.decoding import PROMPT, random_pair
from tests.support.distribution import SHAPE, p_value_alone, p_value_in_a_batch
from tests.support.lossless import (
    assert_lossless,
    assert_samples_like_plain_decoding,
    assert_stops_anywhere,
    sampled_requests,
)
from tests.support.methods import padded_pair, trimmed
from tests.support.models import EVERY_ARCHITECTURE
from tests.support.schedulers import EVERY_SCHEDULER, assert_lossless_with
from tests.support.training import saved_pair, training_workplace

TREE = [[0], [0, 0], [1], [0, 0, 0], [3], [1, 2], [0, 2], [0, 0, 0, 0], [0, 0, 1]]
DRAWN = ["distinct", "independent"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / FILE).write_text(json.dumps({"tree": TREE}))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("settings", "draws"),
    [
        ({}, True),
        ({"shape": [1, 1, 1]}, True),  # a chain, but verified as a tree
        ({"sampling": "independent", "shape": [2]}, True),
        ({"sampling": "likeliest"}, False),
        ({"tree": "counted"}, True),
    ],
)
def test_whether_trees_are_drawn_is_known_without_weights(folder, settings, draws):
    settings = settings | ({"tree": folder} if "tree" in settings else {})
    assert DraftModelTree.draws_trees(settings) == draws
    drafter = DraftModelTree(random_pair("llama"), **settings)
    assert (drafter.max_nodes > 0 and not drafter.deterministic) == draws


def node_paths(draft) -> list[list[int]]:
    """The tokens of the path to each node of a draft of one sequence."""
    found: list[list[int]] = []
    for token, parent in zip(draft.tokens[0].tolist(), draft.tree.parents[0].tolist()):
        found.append([*(found[parent] if parent >= 0 else []), token])
    return found


def watched(tree: DraftModelTree, check) -> DraftModelTree:
    """Calls `check(known tokens, draft)` for every draft of a single sequence."""
    inner = tree.draft

    def draft(batch):
        made = inner(batch)
        check(batch.sequences[0].tokens, made)
        return made

    tree.draft = draft
    return tree


def logits_behind(model, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids]), use_cache=False).logits[0, -1]


@pytest.mark.slow
@pytest.mark.first_fast
@pytest.mark.parametrize("arch", ["llama", "mistral", "opt"])
def test_what_is_drafted(folder, arch):
    """Each node is the token of its rank after its own path, whatever the draft model's cache went through."""
    pair, seen = random_pair(arch), Counter()

    def check(known, draft):
        paths = node_paths(draft)
        own = {(): known}
        for path, parent in zip(paths, draft.tree.parents[0].tolist()):
            before = paths[parent] if parent >= 0 else []
            order = logits_behind(pair.draft, [*known, *before]).argsort(descending=True).tolist()
            ranks = next((r for r, of in own.items() if of == [*known, *before]), None)
            assert ranks is not None
            own[(*ranks, order.index(path[-1]))] = [*known, *path]
        deepest = max(map(len, paths))
        assert {ranks for ranks in own if ranks} == {tuple(p) for p in TREE if len(p) <= deepest}
        seen[deepest] += 1

    tree = watched(DraftModelTree(pair, folder), check)
    assert (tree.max_nodes, tree.max_draft_tokens) == (9, 4)
    steps = Engine(StagedModel(pair.target), tree, frozenset()).answer(PROMPT, SamplingParams(40)).steps
    assert seen[4] > 3 and len(seen) > 1
    assert len({s.accepted for s in steps}) > 2
    whole = next(s for s in steps if s.depth == 4)
    assert whole.drafted == 9 and whole.draft_bytes == 4 * StagedModel(pair.draft).pass_bytes()


def test_leaves_are_never_fed(folder):
    """A round feeds the pending token, the four nodes that have children and at most one token that was a leaf."""
    pair, fed = random_pair("llama"), []
    tree = DraftModelTree(pair, folder)
    layer = tree.model.layers[0].register_forward_hook(lambda m, a, o: fed.append(o.shape[1]))
    steps = Engine(StagedModel(pair.target), tree, frozenset()).answer(PROMPT, SamplingParams(30)).steps
    layer.remove()
    assert fed.pop(0) == len(PROMPT)
    whole = [s for s in steps if s.depth == 4]
    passes = [fed[4 * i : 4 * i + 4] for i in range(len(whole))]
    assert all(first in (1, 2) and rest == [2, 1, 1] for first, *rest in passes)
    assert {first for first, *_ in passes} == {1, 2}


@pytest.mark.first_fast
@pytest.mark.parametrize("sampling", DRAWN)
def test_what_is_drawn_from(sampling):
    """`probs` of each node are the draft model's after its parent, without the siblings before it where distinct."""
    pair, rounds = random_pair("llama"), []

    def check(known, draft):
        paths, parents = node_paths(draft), draft.tree.parents[0].tolist()
        for node, (path, parent) in enumerate(zip(paths, parents)):
            q = logits_behind(pair.draft, [*known, *path[:-1]]).div(1.3).softmax(-1)
            before = [paths[i][-1] for i in range(node) if parents[i] == parent]
            if sampling == "distinct":
                q[before] = 0.0
                q = q / q.sum()
                assert path[-1] not in before
            torch.testing.assert_close(draft.probs[0, node], q, atol=1e-4, rtol=1e-3)
        rounds.append(len(paths))

    tree = watched(DraftModelTree(pair, shape=[3, 2, 1], sampling=sampling), check)
    assert tree.siblings == 3 and not tree.deterministic
    steps = (
        Engine(StagedModel(pair.target), tree, frozenset()).answer(PROMPT, SamplingParams(30, 1.3), 2).steps
    )
    assert 3 + 6 + 6 in rounds and any(s.accepted for s in steps)


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("sampling", DRAWN)
def test_a_chain_is_sps(sampling, temperature):
    pair, (cases, _) = random_pair("llama"), batches.cases("llama")
    requests = [Request(r.prompt, SamplingParams(24, temperature), r.seed) for r in cases]
    found = []
    for one in (DraftModelTree(pair, shape=[1] * 4, sampling=sampling), SpeculativeSampling(pair, 4)):
        for scheduler in (None, RaggedBatch(3)):
            answers = Engine(StagedModel(pair.target), one, frozenset(), scheduler).generate(requests)
            found.append(
                [(a.tokens, [(s.depth, s.accepted, s.draft_bytes) for s in a.steps]) for a in answers]
            )
    assert found[0] == found[2] and found[1] == found[3]
    assert any(accepted == 4 for _, steps in found[0] for _, accepted, _ in steps)


def test_draws_without_replacement():
    probs = torch.tensor([[[0.5, 0.0, 0.3, 0.2], [0.0, 0.0, 1.0, 0.0]]])
    tokens, drawn_from = draws_without_replacement(probs, torch.tensor([[0.6, 0.9, 0.5, 0.99]]))
    assert tokens[0].tolist() == [[2, 3, 0, 1], [2, 3, 1, 0]]
    expected = [[0.5, 0.0, 0.3, 0.2], [5 / 7, 0.0, 0.0, 2 / 7], [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]
    torch.testing.assert_close(drawn_from[0, 0], torch.tensor(expected))
    # Nothing is left of the second distribution after one draw: the others are as likely as each other.
    torch.testing.assert_close(drawn_from[0, 1, 1], torch.tensor([1 / 3, 1 / 3, 0.0, 1 / 3]))
    nan = draws_without_replacement(probs * float("nan"), torch.rand(1, 2))[1]
    assert nan.isnan().any(-1).all(), "the target's draw must fail"


# -- the counted tree


def test_nodes_and_levels_of_a_counted_tree(folder):
    pair = random_pair("llama")
    some = DraftModelTree(pair, folder, max_draft_tokens=2, nodes=4)
    assert some.trees.paths == ((0,), (0, 0), (1,), (3,)) and some.max_draft_tokens == 2
    assert DraftModelTree(pair, folder, nodes=99).max_nodes == len(TREE)
    assert DraftModelTree(pair, folder, shape=[2]).trees.paths == ((0,), (1,))
    assert DraftModelTree(pair).max_draft_tokens == len(drafter.SHAPE)
    cut = DraftModelTree(pair, max_draft_tokens=3, nodes=4)
    assert cut.trees.paths == ((0,), (0, 0), (0, 0, 0), (0, 0, 1)), "of a shape, too"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"specbench train sps_tree"),
        ("{", "broken"),
        ('{"tree": []}', "empty"),
        ('{"tree": [[0], [1, 0]]}', r"\[1, 0\] has no parent"),
        ('{"tree": [[0], [0]]}', r"\[0\] has no parent"),
        ('{"tree": [[-1]]}', "broken"),
    ],
)
def test_a_tree_that_is_none_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / FILE).write_text(content)
    with pytest.raises(UserError, match=message):
        load_tree(str(tmp_path))


def test_ranks_of_an_answer():
    pair = random_pair("llama")
    answer = [5, 9, 20, 11]
    found = ranks_of(StagedModel(pair.draft), PROMPT, answer).tolist()
    for i, token in enumerate(answer):
        order = logits_behind(pair.draft, PROMPT + answer[:i]).argsort(descending=True).tolist()
        assert found[i] == order.index(token)


def test_a_token_that_only_the_target_has_is_out_of_reach():
    pair = padded_pair()
    draft = StagedModel(pair.draft, pair.vocab_size, 64)
    assert ranks_of(draft, PROMPT, [5, 60]).tolist()[1] == pair.vocab_size


def test_paths_of_an_answer():
    """The first token comes from the prompt's pass; after every other place the ranks that follow are a path."""
    found = paths_of(torch.tensor([7, 0, 1, 9, 0]), depth=2, limit=3)
    assert found == {(0,): 2, (0, 1): 1, (1,): 1}


@pytest.mark.slow
def test_counting(tmp_path, capsys):
    workplace = training_workplace(tmp_path)
    settings = [
        *saved_pair(workplace),
        "tokens=60",
        "max_new_tokens=12",
        "nodes=9",
        "depth=3",
        "ranks=260",
        f"out={tmp_path}",
    ]
    cfg = composed("train_sps_tree", *settings)
    content = json.loads((train(cfg) / FILE).read_text())
    assert load_tree(str(tmp_path)) == [tuple(path) for path in content["tree"]]
    assert len(content["tree"]) <= 9 and max(map(len, content["tree"])) <= 3
    assert content["tree_counts"] == sorted(content["tree_counts"], reverse=True)
    assert max(content["tree_counts"]) <= content["places"]
    assert content["left_out"] == 0 and len(content["questions"]) == 64
    assert "tokens a round" in capsys.readouterr().out
    assert json.loads((train(cfg) / FILE).read_text()) == content
    cfg.ranks = 1
    with pytest.raises(UserError, match="nothing"):
        train(cfg)


# -- losslessness


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("arch", EVERY_ARCHITECTURE)
def test_lossless(arch, folder):
    pair, steps = random_pair(arch), []
    for turn, settings in enumerate(({}, {"tree": folder}, {"tree": folder, "nodes": 3}, {"shape": [2, 2]})):
        steps += assert_lossless(arch, DraftModelTree(pair, **settings), third=turn)
    steps += assert_lossless(arch, trimmed(DraftModelTree(pair), list(range(0, pair.vocab_size, 2))), third=1)
    assert {0, 1, 2} <= {s.accepted for s in steps}


@pytest.mark.slow
@EVERY_SCHEDULER
def test_lossless_in_batches(scheduler, folder):
    steps = []
    for arch in ("qwen2", "mistral"):
        drafter = DraftModelTree(random_pair(arch), folder)
        steps += assert_lossless_with(scheduler, arch, drafter, alone=["accepted"])
    assert {0, 1, 2} <= {s.accepted for s in steps}


def test_a_batch_drafts_what_each_sequence_drafts_alone(folder):
    """With a draft model that is the target: a cache that is off by one node would have its tokens rejected."""
    pair = random_pair("llama")
    twin = type(pair)(**(vars(pair) | {"draft": pair.target}))
    requests, expected = batches.cases("llama")
    engine = Engine(StagedModel(pair.target), DraftModelTree(twin, folder), frozenset(), RaggedBatch(5))
    steps = batches.assert_lossless(engine, requests, expected)
    assert any(step.depth for step in steps)
    for step in steps:
        assert step.accepted == step.depth or step.emitted == step.accepted


@pytest.mark.slow
def test_a_sample_does_not_depend_on_who_shares_the_batch(folder):
    pair, cases = random_pair("mistral"), batches.cases("mistral")[0]
    requests = [Request(r.prompt, SamplingParams(12, 1.0), r.seed) for r in cases]
    target = StagedModel(pair.target)
    alone = Engine(target, DraftModelTree(pair, folder), frozenset())
    expected = [alone.generate([request])[0] for request in requests]
    random.Random(1).shuffle(order := list(range(len(requests))))
    together = Engine(target, DraftModelTree(pair, folder), frozenset(), RaggedBatch(5))
    for i, answer in zip(order, together.generate([requests[i] for i in order])):
        assert answer.tokens == expected[i].tokens
        assert [s.accepted for s in answer.steps] == [s.accepted for s in expected[i].steps]


@pytest.mark.slow
def test_likeliest_children_leave_the_sample_as_it_is(folder):
    pair = random_pair("llama")
    tree = DraftModelTree(pair, folder, sampling="likeliest")
    assert tree.siblings == 1
    assert assert_samples_like_plain_decoding(pair, tree, sampled_requests(pair, 30, 0.7))


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("sampling", DRAWN)
@pytest.mark.parametrize("kept", [None, [0, 2, 3]])
def test_answers_follow_the_target(sampling, kept):
    pair = random_pair("llama", **SHAPE)
    tree = DraftModelTree(pair, shape=[3, 2, 1], sampling=sampling)
    assert p_value_alone(pair, tree if kept is None else trimmed(tree, kept)) > 1e-3
    tree = DraftModelTree(pair, shape=[2, 2], sampling=sampling)
    assert p_value_in_a_batch(pair, tree, RaggedBatch(8)) > 1e-3


@pytest.mark.slow
def test_draws_that_say_they_were_independent_are_found(monkeypatch):
    """The fault: the later siblings' distribution still holds the tokens that were drawn before."""

    def undeclared(probs, uniforms):
        tokens, drawn_from = draws_without_replacement(probs, uniforms)
        return tokens, probs.unsqueeze(2).expand_as(drawn_from)

    monkeypatch.setattr(drafter, "draws_without_replacement", undeclared)
    pair = random_pair("llama", **SHAPE)
    assert p_value_alone(pair, DraftModelTree(pair, shape=[4, 4])) < 1e-4


@pytest.mark.slow
def test_stop_token_anywhere():
    assert_stops_anywhere(lambda *_: DraftModelTree(random_pair("llama"), shape=[3, 2, 2, 1]))
