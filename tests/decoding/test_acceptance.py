"""The acceptance rules by themselves: against brute force, and against the distribution they must leave unchanged."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch.utils._python_dispatch import TorchDispatchMode

from specbench.decoding import acceptance
from specbench.decoding.acceptance import (
    Accepted,
    accept,
    greedy_chain,
    is_typical,
    residual,
    sampled_chain,
)
from specbench.decoding.sampling import SamplingParams, position_uniforms, sample_inverse_cdf
from specbench.decoding.state import Draft
from specbench.decoding.tree import Tree, ancestors

SMALL = st.integers(0, 2)


def next_token(verdict: Accepted) -> torch.Tensor:
    """[...] the target's token that follows what was accepted."""
    return verdict.tokens.gather(-1, verdict.count.unsqueeze(-1)).squeeze(-1)


@given(st.lists(st.tuples(SMALL, SMALL), max_size=8), SMALL)
def test_greedy_chain_keeps_the_matching_prefix(pairs, bonus):
    choices, tokens = [c for c, _ in pairs] + [bonus], [t for _, t in pairs]
    kept = 0
    while kept < len(tokens) and tokens[kept] == choices[kept]:
        kept += 1
    verdict = greedy_chain(torch.tensor(choices), torch.tensor(tokens, dtype=torch.int64))
    assert (verdict.count.item(), next_token(verdict).item()) == (kept, choices[kept])


def test_greedy_chain_takes_rows_of_a_batch_one_by_one():
    choices, tokens = torch.randint(0, 2, (50, 5)), torch.randint(0, 2, (50, 4))
    batch = greedy_chain(choices, tokens)
    for i in range(50):
        single = greedy_chain(choices[i], tokens[i])
        assert (batch.count[i], next_token(batch)[i]) == (single.count, next_token(single))


def test_no_new_token_of_a_sampled_batch_is_one_that_was_not_chosen():
    """A drafter also embeds what follows the shorter sequence's tokens: every entry must be an id."""
    logits = torch.randn(8, 5, 11, generator=torch.Generator().manual_seed(3))
    decoding = SamplingParams(9, 1.0)
    uniforms = torch.rand(8, 5, 3, generator=torch.Generator().manual_seed(4))
    draft = Draft(torch.zeros(8, 4, dtype=torch.int64))
    choices = acceptance.target_choices(logits, draft.tokens, decoding, uniforms[..., acceptance.TARGET])
    assert (choices == acceptance.UNREACHED).any()
    verdict = accept(logits, draft, decoding, uniforms)
    assert (
        verdict.tokens.min() >= 0
        and (next_token(verdict) == choices.gather(1, verdict.count[:, None])[:, 0]).all()
    )


@st.composite
def trees(draw):
    """Parents and tokens of a tree whose siblings differ, and the target's choice at each node."""
    k = draw(st.integers(1, 10))
    parents = [draw(st.integers(-1, i - 1)) for i in range(k)]
    tokens = []
    for i, parent in enumerate(parents):
        taken = {tokens[j] for j in range(i) if parents[j] == parent}
        tokens.append(draw(st.sampled_from([t for t in range(k + 3) if t not in taken])))
    choices = [draw(st.sampled_from([*tokens, 0])) for _ in range(k + 1)]
    return parents, tokens, choices


@given(trees())
@settings(max_examples=120)
def test_greedy_tree_walks_the_matching_path(tree):
    parents, tokens, choices = tree
    path, node = [], -1
    while True:
        fits = [i for i, p in enumerate(parents) if p == node and tokens[i] == choices[node + 1]]
        if not fits:
            break
        node = fits[0]
        path.append(node)
    logits = one_hot(torch.tensor([choices]))
    draft = Draft(torch.tensor([tokens]), tree=Tree.of(torch.tensor(parents)))
    verdict = accept(logits, draft, SamplingParams(1), None)
    assert verdict.path[0, : verdict.count].tolist() == path
    assert next_token(verdict).item() == choices[node + 1]
    for most in range(len(path) + 1):
        cut = accept(logits, draft, SamplingParams(1), None, limits=torch.tensor([most]))
        assert cut.path[0, : cut.count].tolist() == path[:most]
        assert next_token(cut).item() == choices[([-1, *path])[most] + 1]
    # Of nodes that are only looked at none is accepted.
    some = accept(
        logits, replace(draft, candidates=torch.tensor([len(tokens) // 2])), SamplingParams(1), None
    )
    assert some.path[0, : some.count].tolist() == [n for n in path if n < len(tokens) // 2]


@pytest.fixture(params=[True, False], ids=["on a CPU", "on a GPU"])
def host(request, monkeypatch):
    """Whether the host may look, which decides how much is computed, and nothing else."""
    monkeypatch.setattr(acceptance, "may_look", lambda _: request.param)
    return request.param


@pytest.mark.slow
def test_trees_of_a_batch_are_accepted_one_by_one(host):
    """Different shapes, padded; and one shape for all."""
    g = torch.Generator().manual_seed(4)
    for _ in range(40):
        k = int(torch.randint(1, 9, (), generator=g))
        parents = torch.stack(
            [torch.randint(-1, i, (5,), generator=g) if i else torch.full((5,), -1) for i in range(k)], 1
        )
        tokens, logits = torch.randint(0, 3, (5, k), generator=g), torch.randn(5, 1 + k, 3, generator=g)
        counts = torch.randint(0, k + 1, (5,), generator=g)
        numbers = torch.stack([position_uniforms(seed, k + 1, k, torch.device("cpu")) for seed in range(5)])
        q = torch.softmax(torch.randn(5, k, 3, generator=g), dim=-1)
        for decoding, uniforms, probs in (
            (SamplingParams(1), None, None),
            (SamplingParams(1, 1.0), numbers, q),
            (SamplingParams(1, 1.0), numbers, None),
        ):
            for shape in (parents, parents[:1]):
                draft = Draft(tokens, probs, tree=Tree.of(shape), candidates=counts)
                batch = accept(logits, draft, decoding, uniforms)
                for i in range(5):
                    one = slice(i, i + 1)
                    own = Draft(
                        tokens[one],
                        None if probs is None else probs[one],
                        tree=Tree.of(shape[one] if len(shape) > 1 else shape),
                        candidates=counts[one],
                    )
                    alone = accept(logits[one], own, decoding, None if uniforms is None else uniforms[one])
                    n = int(alone.count)
                    assert (int(batch.count[i]), int(next_token(batch)[i])) == (n, int(next_token(alone)))
                    assert batch.path[i, :n].tolist() == alone.path[0, :n].tolist()


def one_hot(tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(tokens, int(tokens.max()) + 1).float()


@given(trees())
@settings(max_examples=40)
def test_ancestors(tree):
    parents = tree[0]
    closure = ancestors(torch.tensor(parents))
    for i in range(len(parents)):
        line, node = set(), i
        while node >= 0:
            line.add(node)
            node = parents[node]
        assert set(closure[i].nonzero().flatten().tolist()) == line


@given(st.lists(trees(), min_size=1, max_size=3))
@settings(max_examples=40)
def test_trees_of_lists_are_those_of_tensors(several):
    k = min(len(tree[0]) for tree in several)
    parents = [tree[0][:k] for tree in several]
    made, expected = Tree.of_lists(parents, torch.device("cpu")), Tree.of(torch.tensor(parents))
    for name in ("parents", "on_path", "depths"):
        assert torch.equal(getattr(made, name), getattr(expected, name)), name
    assert torch.equal(made.visible, expected.visible) and torch.equal(made.offsets(), expected.offsets())
    first = torch.cat([torch.ones(len(parents), 1, dtype=torch.bool), torch.zeros(len(parents), k).bool()], 1)
    assert torch.equal(made.visible[:, 0], first) and bool(made.visible[..., 0].all())


# -- sampling ---------------------------------------------------------------------------------------------------

VOCAB, ROWS = 6, 200_000


def emitted_pairs(draft_kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws ROWS rounds of two draft tokens; returns counts of the first two emitted tokens, and what to expect.

    The target's distribution depends on the position alone, so the expectation is a plain product.
    """
    g = torch.Generator().manual_seed(11)
    p = torch.rand(3, VOCAB, generator=g) ** 3
    p = p / p.sum(-1, keepdim=True)
    probs = p.expand(ROWS, 3, VOCAB)
    if draft_kind == "deterministic":
        q, tokens = None, torch.tensor([1, 3]).expand(ROWS, 2)
    else:
        q = torch.rand(2, VOCAB, generator=g) ** 3
        if draft_kind == "subset":
            q[:, 3:] = 0  # a trimmed head: half the vocabulary cannot be drafted
        q = q / q.sum(-1, keepdim=True)
        tokens = torch.stack(
            [torch.multinomial(row, ROWS, replacement=True, generator=g) for row in q], dim=1
        )
        q = q.expand(ROWS, 2, VOCAB)
    if q is None:
        verdict = greedy_chain(sample_inverse_cdf(probs, torch.rand(ROWS, 3, generator=g)), tokens)
        count, following = verdict.count, next_token(verdict)
    else:
        count, rest = sampled_chain(probs, tokens, q, torch.rand(ROWS, 2, generator=g))
        following = torch.multinomial(rest, 1, generator=g).squeeze(-1)
    # A round that rejected its first token emitted one token; autoregressive decoding goes on from there.
    plain = torch.multinomial(p[1], ROWS, replacement=True, generator=g)
    first = torch.where(count >= 1, tokens[:, 0], following)
    second = torch.where(count >= 2, tokens[:, 1], torch.where(count == 1, following, plain))
    counts = torch.bincount(first * VOCAB + second, minlength=VOCAB * VOCAB)
    return counts, (p[0][:, None] * p[1]).flatten()


def p_value(counts: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.double() / expected.double().sum() * counts.sum()
    return chisquare(counts.double().numpy(), expected.numpy()).pvalue


@pytest.mark.parametrize("draft_kind", ["full", "subset", "deterministic"])
def test_speculative_sampling_leaves_the_distribution_unchanged(draft_kind):
    assert p_value(*emitted_pairs(draft_kind)) > 1e-3


@pytest.mark.parametrize("draft_kind", ["full", "subset"])
def test_a_spoiled_residual_is_found(draft_kind, monkeypatch):
    monkeypatch.setattr(acceptance, "residual", lambda p, q: p)
    assert p_value(*emitted_pairs(draft_kind)) < 1e-9


def whole_tensors(probs, tokens, draft_probs, uniforms, live):
    """Speculative sampling as it is written down: with q as a tensor of all drafted rows, and zeros after them."""
    index = tokens.unsqueeze(-1)
    if live is None:
        live = torch.ones_like(tokens, dtype=torch.bool)
    p, q = probs[..., :-1, :].gather(-1, index).squeeze(-1), draft_probs.gather(-1, index).squeeze(-1)
    count = ((uniforms * q < p) & live).long().cumprod(-1).sum(-1)
    padded = torch.cat([draft_probs * live.unsqueeze(-1), torch.zeros_like(probs[..., -1:, :])], dim=-2)
    at = count[..., None, None].expand(*count.shape, 1, probs.shape[-1])
    p, q = probs.gather(-2, at).squeeze(-2), padded.gather(-2, at).squeeze(-2)
    rest = (p - q).clamp(min=0.0)
    return count, torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)


@pytest.mark.slow
@given(
    shape=st.sampled_from([(), (1,), (4,)]),
    k=st.integers(1, 5),
    vocab=st.integers(1, 6),
    masked=st.booleans(),
    sharp=st.sampled_from([0.5, 3.0, 60.0]),
    same=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=500, deadline=None)
def test_one_row_of_q_is_as_good_as_all(shape, k, vocab, masked, sharp, same, seed):
    """sharp: up to distributions of a single token; same: p = q, of which nothing is left."""
    g = torch.Generator().manual_seed(seed)
    probs = torch.softmax(torch.randn(*shape, k + 1, vocab, generator=g) * sharp, dim=-1)
    q = torch.softmax(torch.randn(*shape, k, vocab, generator=g) * sharp, dim=-1)
    q = probs[..., :-1, :].clone() if same else q
    tokens = torch.randint(0, vocab, (*shape, k), generator=g)
    uniforms = torch.rand(*shape, k, generator=g)
    drafted = torch.randint(0, k + 1, (*shape, 1), generator=g)
    live = torch.arange(k) < drafted if masked else None
    asked = (probs, tokens, q, uniforms, live)
    for ours, expected in zip(sampled_chain(*asked), whole_tensors(*asked)):
        assert torch.equal(ours, expected)


def test_no_tensor_as_large_as_the_draft_is_made(monkeypatch):
    """With a vocabulary of 150,000 ids they would take longer than all the rest of the rule."""
    probs, tokens = torch.softmax(torch.randn(4, 50), dim=-1), torch.tensor([1, 2, 3])
    with Largest() as made:
        sampled_chain(probs, tokens, probs[:3], torch.rand(3))
    assert made.elements <= 50


class Largest(TorchDispatchMode):
    """elements: of the largest tensor that was written, views of others not among them."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in given:
            self.elements = max(self.elements, result.numel())
        return result


def test_argmax_drafts_with_a_soft_q_are_found():
    """The fault of several public codes: the drafted token was not drawn from the q that it is tested with."""
    g = torch.Generator().manual_seed(5)
    p, q = torch.softmax(torch.randn(2, VOCAB, generator=g) * 1.5, dim=-1)
    tokens = q.argmax().expand(ROWS, 1)
    count, rest = sampled_chain(
        p.expand(ROWS, 2, VOCAB), tokens, q.expand(ROWS, 1, VOCAB), torch.rand(ROWS, 1, generator=g)
    )
    first = torch.where(count == 1, tokens[:, 0], torch.multinomial(rest, 1, generator=g).squeeze(-1))
    assert p_value(torch.bincount(first, minlength=VOCAB), p) < 1e-9


def test_residual_never_vanishes():
    p = torch.tensor([0.5, 0.5, 0.0])
    assert torch.equal(residual(p, p), p)
    assert torch.equal(residual(p, torch.tensor([1.0, 0.0, 0.0])), torch.tensor([0.0, 0.5, 0.0]))
    nan = torch.full((3,), float("nan"))
    assert residual(nan, p).isnan().any() and residual(p, nan).isnan().any(), "a draw from it must fail"


ROUNDS = 6000


@cache
def draws_of_rounds() -> torch.Tensor:
    """[ROUNDS, positions, columns] the numbers of as many answers."""
    return torch.stack([position_uniforms(seed, 4, 2, torch.device("cpu")) for seed in range(ROUNDS)])


@pytest.mark.parametrize("deterministic", [True, False])
def test_sampled_trees_leave_the_distribution_unchanged(deterministic, host):
    """Two children of the root and one grandchild: what comes first, and what follows, are still draws from p.

    All rounds are sequences of one batch, which does not change what is accepted.
    """
    g = torch.Generator().manual_seed(2)
    logits = torch.randn(1, 4, VOCAB, generator=g)
    logits[:, 2] = logits[:, 1]  # so that what follows has one distribution, whichever child comes first
    p = torch.softmax(logits[0], dim=-1)
    q = torch.softmax(torch.randn(VOCAB, generator=g), dim=-1)
    tree = Tree.of(torch.tensor([-1, -1, 0]), max_children=2)
    numbers = draws_of_rounds()
    if deterministic:
        draft = Draft(torch.tensor([[1, 4, 2]]).expand(ROUNDS, 3), tree=tree)
    else:
        q = q.expand(ROUNDS, 3, VOCAB)
        draft = Draft(sample_inverse_cdf(q, numbers[:, [0, 0, 1], [3, 4, 3]]), q, tree=tree)
    verdict = accept(logits.expand(ROUNDS, 4, VOCAB), draft, SamplingParams(9, 1.0), numbers)
    count, following = verdict.count, next_token(verdict)
    kept = draft.tokens.gather(1, verdict.path)
    assert (following >= 0).all(), "a kept token is followed by one of the target"
    # A round that kept nothing emitted one token; autoregressive decoding goes on from there.
    plain = torch.multinomial(p[1], ROUNDS, replacement=True, generator=g)
    first = torch.where(count >= 1, kept[:, 0], following)
    second = torch.where(count >= 2, kept[:, 1], torch.where(count == 1, following, plain))
    assert p_value(torch.bincount(first, minlength=VOCAB), p[0]) > 1e-3
    assert p_value(torch.bincount(second, minlength=VOCAB), p[1]) > 1e-3


def walk(probs, tokens, draft_probs, parents, uniforms):
    """SpecInfer's algorithm 2, word by word: (path, distribution of the token that follows)."""
    path, node = [], -1
    while True:
        p = probs[node + 1]
        for child in (i for i, parent in enumerate(parents) if parent == node):
            p = p / p.sum()
            if uniforms[child] * draft_probs[child][tokens[child]] < p[tokens[child]]:
                path.append(child)
                break
            p = residual(p, draft_probs[child])
        else:
            return path, p
        node = path[-1]


@given(trees(), st.integers(0, 10_000))
@settings(deadline=None, max_examples=80)
def test_a_tree_of_drawn_tokens_is_walked_as_published(tree, seed):
    parents, k = tree[0], len(tree[0])
    g = torch.Generator().manual_seed(seed)
    probs = torch.softmax(2 * torch.randn(k + 1, VOCAB, generator=g), dim=-1)
    # The children of a node are drawn from one distribution.
    q = torch.softmax(torch.randn(k + 1, VOCAB, generator=g), dim=-1)[torch.tensor(parents) + 1]
    tokens = torch.randint(0, VOCAB, (k,), generator=g)
    uniforms = torch.rand(k, generator=g) ** 2  # so that several are accepted one after the other
    expected, following = walk(probs, tokens.tolist(), q, parents, uniforms)
    shape = Tree.of(torch.tensor(parents))
    for looks in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(acceptance, "may_look", lambda _, looks=looks: looks)
            count, path, rest = acceptance.sampled_tree(
                probs.unsqueeze(0).clone(), tokens.unsqueeze(0), q.unsqueeze(0), shape, uniforms.unsqueeze(0)
            )
        assert path[0, :count].tolist() == expected
        assert torch.allclose(rest[0] / rest.sum(), following / following.sum(), atol=1e-5)


class Rows(TorchDispatchMode):
    """Counts rows of a vocabulary that operations write, and the operations."""

    def __init__(self, vocab: int):
        super().__init__()
        self.vocab, self.rows, self.operations = vocab, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        if isinstance(out, torch.Tensor) and out.dim() and out.shape[-1] == self.vocab:
            self.rows += out.numel() // self.vocab
        return out


@pytest.mark.parametrize("drawn", [True, False])
def test_distributions_of_nodes_that_cannot_be_accepted_are_left_alone(drawn, host):
    """A tree of 63 nodes, with up to 13 children: 13 turns over all of them would write thousands of rows."""
    g = torch.Generator().manual_seed(0)
    parents = torch.tensor([-1] * 10 + [i // 4 for i in range(40)] + [10] * 13)
    vocab, k = 301, len(parents)
    logits, q = (
        torch.randn(1, 1 + k, vocab, generator=g),
        torch.softmax(torch.randn(1, k, vocab, generator=g), -1),
    )
    tokens = torch.randint(0, vocab, (1, k), generator=g)
    draft = Draft(tokens, q if drawn else None, tree=Tree.of(parents, max_children=13))
    numbers = position_uniforms(0, 4, 13, torch.device("cpu")).unsqueeze(0)
    with Rows(vocab) as counted:
        accept(logits, draft, SamplingParams(1, 1.0), numbers)
    most = (1600 if host else 2700) if drawn else (10 if host else 260)
    assert counted.rows <= most and counted.operations < 800


def test_siblings_are_counted():
    assert Tree.of(torch.tensor([-1, -1, 0, -1, 0, 2])).siblings_before().tolist() == [[0, 1, 0, 2, 1, 0]]


def test_a_tree_without_nodes_is_an_empty_chain():
    nothing = torch.empty(1, 0, dtype=torch.int64)
    verdict = accept(
        torch.tensor([[[0.0, 2.0]]]), Draft(nothing, tree=Tree.of(nothing)), SamplingParams(1), None
    )
    assert (verdict.count.item(), next_token(verdict).item(), verdict.path) == (0, 1, None)


# -- a rule that is lossy


def test_what_is_typical_depends_on_how_sure_the_target_is():
    sure, spread = torch.tensor([0.9, 0.06, 0.04]), torch.full((100,), 0.01)
    assert is_typical(sure.log().expand(3, 3), torch.arange(3)).tolist() == [True, False, False]
    bound = 0.3 / 100  # alpha * exp(-entropy) of 100 tokens that are alike
    few = torch.cat([spread, torch.tensor([bound * 0.9])])
    assert is_typical(few.log(), torch.tensor(5)) and not is_typical(few.log(), torch.tensor(100))


@pytest.mark.parametrize("tree", [False, True])
def test_typical_acceptance_keeps_tokens_that_are_not_the_targets_choice(tree):
    logits = torch.zeros(1, 4, 10).log_softmax(-1)  # every token is typical
    logits[..., 3] += 0.1  # and 3 is the choice
    draft = Draft(torch.tensor([[5, 3, 7]]), tree=Tree.of(torch.tensor([-1, 0, 1])) if tree else None)
    kept = accept(logits, draft, SamplingParams(9, verification="typical"), None)
    assert kept.count.tolist() == [3] and kept.tokens.tolist() == [[5, 3, 7, 3]]
    strict = accept(logits, draft, SamplingParams(9), None)
    assert strict.count.tolist() == [0] and next_token(strict).tolist() == [3]


def test_typical_acceptance_keeps_no_token_that_was_not_drafted():
    logits = torch.zeros(1, 4, 10)
    draft = Draft(torch.tensor([[5, 3, 7]]), candidates=torch.tensor([1]))
    assert accept(logits, draft, SamplingParams(9, verification="typical"), None).count.tolist() == [1]


def test_a_draft_chosen_on_the_host_is_as_wide_as_its_longest():
    draft = Draft.of([[5, 3], [7]], torch.device("cpu"))
    assert draft.tokens.tolist() == [[5, 3], [7, 0]] and draft.candidates.tolist() == [2, 1]
    assert Draft.of([[5]], torch.device("cpu")).candidates is None
