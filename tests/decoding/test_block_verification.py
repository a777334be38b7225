"""Block verification: it leaves the target's distribution as it is, and keeps no fewer tokens than one by one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from specbench.decoding import acceptance
from specbench.decoding.acceptance import accept, block_chain, block_chances
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams, position_uniforms, sample_inverse_cdf
from specbench.decoding.state import Batch, Draft, Request
from specbench.system.errors import UserError
from specbench.system.settings import BLOCK
from tests.support.decoding import random_pair
from tests.support.distribution import SHAPE, p_value_alone
from tests.support.drafters import ModelChain, ModelTree, Oracle

VOCAB, K = 3, 3
Tokens = tuple[int, ...]
Table = dict[Tokens, torch.Tensor]  # by tokens before it, the distribution of the next one
DRAFTS = [*product(range(VOCAB), repeat=K)]


def tables(seed: int) -> tuple[Table, Table]:
    """The target's and the draft's distributions after every prefix of at most K tokens."""
    generator = torch.Generator().manual_seed(seed)
    prefixes = [prefix for n in range(K + 1) for prefix in product(range(VOCAB), repeat=n)]
    target, draft = (
        {p: torch.softmax(2 * torch.randn(VOCAB, generator=generator).double(), 0) for p in prefixes}
        for _ in range(2)
    )
    return target, draft


def test_certain_drafts_leave_an_answer_as_it_is():
    """The baseline draws with fewer numbers a position: those of the target must be the same."""
    pair, prompt = random_pair("llama"), [3, 9, 27] * 4
    target, decoding = StagedModel(pair.target), SamplingParams(40, 0.5, BLOCK)
    plain = Engine(target, Drafter(), frozenset()).answer(prompt, decoding, 7)
    oracle = Oracle(len(prompt), plain.tokens, target.vocab_size, 0, 0.3, longest=4, tree=False)
    answer = Engine(target, oracle, frozenset()).answer(prompt, decoding, 7)
    assert answer.tokens == plain.tokens and any(step.accepted > 1 for step in answer.steps)


def along(table: Table, tokens: Tokens, rows: int) -> torch.Tensor:
    """[1, rows, VOCAB] the distributions after the first 0, 1, ... of some tokens."""
    return torch.stack([table[tokens[:i]] for i in range(rows)]).unsqueeze(0)


def chance(table: Table, tokens: Tokens) -> float:
    """Of saying these tokens."""
    return float(torch.stack([table[tokens[:i]][token] for i, token in enumerate(tokens)]).prod())


def kept_prefixes(target: Table, draft: Table, length: int) -> Iterator[tuple[Tokens, float, torch.Tensor]]:
    """Each prefix of each draft that may be kept, with the chance of it, and what the next token is drawn from."""
    valid = (torch.arange(K) < length).unsqueeze(0)
    for tokens in DRAFTS:
        drawn, ids = along(draft, tokens, K), torch.tensor([tokens])
        joint, chances, following = block_chances(along(target, tokens, K + 1), ids, drawn, valid)
        left = chance(draft, tokens)
        for count in range(length, -1, -1):
            passed = left * float(chances[0, count - 1]) if count else left
            scale = joint[0, count - 1] if count else 1.0
            rest = acceptance.residual(scale * target[tokens[:count]], following[0, count])
            yield tokens[:count], passed, rest / rest.sum()
            left -= passed


@pytest.mark.parametrize("length", [1, 2, K])
def test_what_is_said_has_the_targets_distribution(length):
    """By enumeration: the tokens that are kept, the next one, and then what the target itself says."""
    for seed in range(4):
        target, draft = tables(seed)
        shares = dict.fromkeys(product(range(VOCAB), repeat=K), 0.0)
        for tokens, share, rest in kept_prefixes(target, draft, length):
            for full in shares:
                if full[: len(tokens)] != tokens:
                    continue
                if len(tokens) == K:
                    shares[full] += share
                    continue
                after = full[: len(tokens) + 1]
                shares[full] += share * float(rest[after[-1]]) * chance(target, full) / chance(target, after)
        for full, share in shares.items():
            assert share == pytest.approx(chance(target, full), abs=1e-12)


def test_no_fewer_tokens_are_kept_than_one_by_one():
    gains = []
    for seed in range(8):
        target, draft = tables(seed)
        blocks = sum(share * len(tokens) for tokens, share, _ in kept_prefixes(target, draft, K))
        alone = 0.0
        for tokens in DRAFTS:
            ratios = along(target, tokens, K) / along(draft, tokens, K)
            chances = ratios[0, torch.arange(K), torch.tensor(tokens)].clamp(max=1.0)
            alone += chance(draft, tokens) * float(chances.cumprod(0).sum())
        gains.append(blocks - alone)
    assert min(gains) > -1e-12 and max(gains) > 0.02


def published(
    p: torch.Tensor, tokens: list[int], q: torch.Tensor, uniforms: list[float]
) -> tuple[int, torch.Tensor]:
    """Algorithm 2 of Sun et al. 2024, of one sequence, step by step; q is 0 after the draft."""
    q = torch.cat([q, torch.zeros_like(q[:1])])
    joint, count, rest = 1.0, 0, (p[0] - q[0]).clamp(min=0)
    for i, token in enumerate(tokens, 1):
        joint = min(1.0, joint * float(p[i - 1, token] / q[i - 1, token]))
        left = (joint * p[i] - q[i]).clamp(min=0)
        test = float(left.sum() / (left.sum() + 1 - joint))
        if uniforms[i - 1] < test:
            count, rest = i, left
    return count, rest


def test_a_batch_is_judged_as_published():
    generator = torch.Generator().manual_seed(5)
    b, k, vocab = 200, 5, 7
    p, q = (torch.softmax(torch.randn(b, n, vocab, generator=generator).double(), -1) for n in (k + 1, k))
    tokens = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(b, k)
    uniforms = torch.rand(b, k, generator=generator)
    lengths = torch.randint(1, k + 1, (b,), generator=generator)
    valid = torch.arange(k) < lengths.unsqueeze(1)
    count, rest = block_chain(p, tokens, q, uniforms, valid)
    for i, n in enumerate(lengths.tolist()):
        expected, left = published(p[i], tokens[i, :n].tolist(), q[i, :n], uniforms[i].tolist())
        assert int(count[i]) == expected
        torch.testing.assert_close(rest[i], left)
    assert len(count.unique()) == k + 1


def test_a_draft_by_the_target_itself_is_kept():
    p = torch.softmax(torch.randn(4, 4, 6), -1)
    tokens = torch.multinomial(p[:, :3].flatten(0, 1), 1).view(4, 3)
    count, rest = block_chain(p, tokens, p[:, :3], torch.full((4, 3), 0.999))
    assert count.tolist() == [3] * 4 and torch.allclose(rest.float(), p[:, 3])


# -- more than one round

MANY = 40_000


def batch_at(lengths: list[int], uniforms: torch.Tensor) -> Batch:
    """Sequences of some lengths, whose tokens are drawn with `uniforms`."""
    none: Any = None
    return Batch([], lengths, [2], 2, torch.zeros(1, 1), SamplingParams(9, 1.0, BLOCK), none, uniforms)


def test_two_rounds_have_the_targets_distribution():
    """A prefix that fails tells something about its numbers: the next round must have others."""
    p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.75, 0.25])
    uniforms = torch.stack([position_uniforms(seed, 6, 2, torch.device("cpu")) for seed in range(MANY)])
    lengths, said = torch.zeros(MANY, dtype=torch.long), torch.full((MANY, 8), -1)
    for _ in range(2):
        batch = batch_at(lengths.tolist(), uniforms)
        probs = q.expand(MANY, 2, -1)
        drafts = torch.stack(
            [sample_inverse_cdf(q.expand(MANY, -1), batch.draws(j)) for j in range(2)], dim=1
        )
        window = batch.window(uniforms, 0, 3)
        accepted = accept(p.log().expand(MANY, 3, -1), Draft(drafts, probs), batch.decoding, window)
        said.scatter_(1, lengths[:, None] + torch.arange(3), accepted.tokens)
        lengths += accepted.count + 1
    assert lengths.min() == 2 and lengths.max() == 6
    first_two = 2 * said[:, 0] + said[:, 1]
    assert chisquare(torch.bincount(first_two, minlength=4).numpy()).pvalue > 1e-3


# -- whole answers


@pytest.fixture(scope="module")
def pair():
    return random_pair("llama", **SHAPE)


@pytest.mark.slow
def test_answers_follow_the_target(pair):
    for drafter in (ModelChain(pair.draft, 3), ModelChain(pair.draft, 3, 0.5)):
        assert p_value_alone(pair, drafter, BLOCK) > 1e-3


@pytest.mark.slow
def test_a_spoiled_residual_is_found(pair, monkeypatch):
    monkeypatch.setattr(acceptance, "residual", lambda p, q: p)
    assert p_value_alone(pair, ModelChain(pair.draft, 3), BLOCK) < 1e-6


def test_trees_are_refused(pair):
    engine = Engine(StagedModel(pair.target), ModelTree(pair.draft), frozenset())
    with pytest.raises(UserError, match=r"verification=block is for chains"):
        engine.generate([Request([1, 3], SamplingParams(4, 1.0, BLOCK))])
