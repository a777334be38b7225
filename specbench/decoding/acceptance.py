"""Which draft tokens survive. Every method uses these rules, so that losslessness is proved once.

Greedy: a token survives while it is the target's own choice. Sampling: speculative sampling (Leviathan et al. 2023,
algorithm 1; Chen et al. 2023, algorithm 2). A draft token x is kept with probability min(1, p(x)/q(x)); after the
first rejection the next token is drawn from norm(max(p - q, 0)) over the full vocabulary, so a drafter whose support
is a part of the vocabulary, or a single token, stays exact. Trees: the greedy walk takes the one matching path; the
sampling walk tries the children of a node one after the other (SpecInfer, Miao et al. 2024, algorithm 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specbench.decoding.sampling import Decoding, invert, likeliest
from specbench.decoding.target import ancestors

if TYPE_CHECKING:
    from specbench.decoding.draft import Draft


@dataclass(frozen=True, slots=True)
class Accepted:
    """The outcome of one verification.

    Attributes:
        count: [] draft tokens kept; for a batch [b].
        next: [] the target's token that follows them; for a batch [b].
        path: for a tree [k], of which the first `count` are the indices of the kept nodes from the root down; None for
            a chain.
    """

    count: torch.Tensor
    next: torch.Tensor
    path: torch.Tensor | None = None


def accept(
    logits: torch.Tensor, draft: Draft, decoding: Decoding, generator: torch.Generator | None
) -> Accepted:
    """Applies the rule that fits the draft and the decoding.

    Args:
        logits: [1 + k, vocab] after the pending token and each draft token.
        draft: k tokens, a chain or a tree.
        decoding: how tokens are chosen.
        generator: to draw with; None when greedy.
    """
    if draft.parents is not None:
        if decoding.greedy:
            return greedy_tree(likeliest(logits), draft.tokens, draft.parents)
        return sampled_tree(decoding.probs(logits), draft, generator)
    if decoding.greedy:
        return greedy_chain(likeliest(logits), draft.tokens)
    probs = decoding.probs(logits)
    uniforms = torch.rand(draft.tokens.shape, generator=generator, device=probs.device)
    count, rest = sampled_chain(probs, draft.tokens, draft.probs, uniforms)
    return Accepted(count, torch.multinomial(rest, 1, generator=generator)[0])


def accept_rows(
    logits: torch.Tensor,
    draft: Draft,
    drafted: torch.Tensor,
    decoding: Decoding,
    uniforms: torch.Tensor | None,
) -> Accepted:
    """Applies the rule for b sequences at once.

    Args:
        logits: [b, 1 + k, vocab] after the pending token and each draft token of each sequence.
        draft: tokens [b, k], a chain each.
        drafted: [b], how many of its k tokens each sequence has really drafted.
        decoding: how tokens are chosen.
        uniforms: when sampling, two numbers in [0, 1) for each position, [b, 1 + k, 2]: one to accept with, one to draw
            the token that follows with.
    """
    live = torch.arange(draft.tokens.shape[1], device=drafted.device) < drafted.unsqueeze(1)
    if decoding.greedy:
        return greedy_chain(likeliest(logits), draft.tokens, live)
    accepting, drawing = uniforms.unbind(-1)  # type: ignore[union-attr] # None only where decoding is greedy
    count, rest = sampled_chain(decoding.probs(logits), draft.tokens, draft.probs, accepting[:, :-1], live)
    return Accepted(count, invert(rest, drawing.gather(1, count.unsqueeze(1)).squeeze(1)))


def greedy_chain(choices: torch.Tensor, tokens: torch.Tensor, live: torch.Tensor | None = None) -> Accepted:
    """Accepts draft tokens while each equals the target's own choice. Sequences of a batch are independent.

    Args:
        choices: [..., k + 1] the target's own tokens.
        tokens: [..., k] the draft.
        live: [..., k], which of the tokens were drafted at all; None for all of them.
    """
    fits = choices[..., :-1] == tokens
    count = (fits if live is None else fits & live).cumprod(-1).sum(-1)
    return Accepted(count, choices.gather(-1, count.unsqueeze(-1)).squeeze(-1))


def sampled_chain(
    probs: torch.Tensor,
    tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    uniforms: torch.Tensor,
    live: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepts draft tokens by speculative sampling.

    Args:
        probs: [..., k + 1, vocab] the target's distributions.
        tokens: [..., k] the draft.
        draft_probs: [..., k, vocab] the distributions the tokens were drawn from; None for certain tokens.
        uniforms: [..., k] numbers in [0, 1) to accept with.
        live: as in `greedy_chain`.

    Returns:
        The kept count [...] and the (unnormalised) distribution [..., vocab] of the token that follows.
    """
    k, index = tokens.shape[-1], tokens.unsqueeze(-1)
    p = probs[..., :-1, :].gather(-1, index).squeeze(-1)
    q = 1.0 if draft_probs is None else draft_probs.gather(-1, index).squeeze(-1)
    kept = uniforms * q < p
    if live is not None:
        kept = kept & live
    count = kept.cumprod(-1).sum(-1)
    following = _row(probs, count)
    if k == 0:
        return count, following
    # One row of q is needed: with a vocabulary of 150,000 ids a tensor of all rows takes longer than all the rest.
    last = count.clamp(max=k - 1)
    if draft_probs is None:
        own = torch.zeros_like(following).scatter_(-1, tokens.gather(-1, last.unsqueeze(-1)), 1.0)
    else:
        own = _row(draft_probs, last)
    # Where nothing was drafted, behind the draft's end, the next token is drawn from p.
    drafted = count < k
    if live is not None:
        drafted = drafted & live.gather(-1, last.unsqueeze(-1)).squeeze(-1)
    return count, residual(following, own.masked_fill_(~drafted.unsqueeze(-1), 0.0))


def _row(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The row [..., vocab] of `rows` [..., n, vocab] that `index` [...] names."""
    return rows.gather(-2, index[..., None, None].expand(*index.shape, 1, rows.shape[-1])).squeeze(-2)


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """max(p - q, 0) [..., vocab], not normalised. Where nothing is left of it (p equals q), p itself.

    NaN in p or q stays NaN, so that the draw from it fails instead of giving some token.
    """
    rest = (p - q).clamp_(min=0.0)
    return torch.where(rest.sum(-1, keepdim=True) == 0, p, rest)


def greedy_tree(choices: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor) -> Accepted:
    """Accepts the longest path of a tree on which every node equals the target's own choice.

    Args:
        choices: [k + 1], the target's token after the pending token and after each node.
        tokens: [k] the nodes.
        parents: [k], as in `Draft`.
    """
    k = tokens.shape[0]
    on_path = ancestors(parents)
    fits = choices[parents + 1] == tokens
    survives = ~(on_path & ~fits).any(1)
    depth = on_path.sum(1) * survives
    best = depth.argmax()
    count = depth[best]
    nodes = torch.arange(k, device=tokens.device)
    path = torch.where(on_path[best], nodes, k).sort().values
    last = torch.where(count > 0, best + 1, torch.zeros_like(best))
    return Accepted(count, choices[last], path)


def sampled_tree(probs: torch.Tensor, draft: Draft, generator: torch.Generator | None) -> Accepted:
    """Walks down a tree while sampling; probs: [k + 1, vocab] the target's distributions.

    With `draft.probs` a node's children must be independent draws from the distribution there ([k, vocab], one row a
    node: the distribution it was drawn from); without, they are distinct certain tokens. Each rejected child takes
    its share out of p before the next one is tried.
    """
    assert draft.parents is not None  # of a tree
    parents, tokens = draft.parents.tolist(), draft.tokens.tolist()
    path: list[int] = []
    node = -1
    while True:
        p = probs[node + 1]
        for child in (i for i, parent in enumerate(parents) if parent == node):
            if draft.probs is None:
                q = torch.zeros_like(p)
                q[tokens[child]] = 1.0
            else:
                q = draft.probs[child]
            p = p / p.sum()
            if torch.rand((), generator=generator, device=p.device) * q[tokens[child]] < p[tokens[child]]:
                path.append(child)
                break
            p = residual(p, q)
        else:
            break
        node = path[-1]
    padded = torch.tensor(path + [0] * (len(tokens) - len(path)), device=probs.device)
    count = torch.tensor(len(path), device=probs.device)
    return Accepted(count, torch.multinomial(p, 1, generator=generator)[0], padded)
