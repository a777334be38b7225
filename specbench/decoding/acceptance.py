"""Which draft tokens survive. Every method uses these rules, so that losslessness is proved once.

Greedy, and tokens that were drafted without chance: the target chooses a token at every node, and a draft token
survives while it is that very token. When sampling, the target's choices are draws with the numbers of their positions,
so that the text is that of plain sampling.

Tokens that were drawn: speculative sampling (Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2). A
draft token x is kept with probability min(1, p(x)/q(x)); after the first rejection the next token is drawn from
norm(max(p - q, 0)) over the full vocabulary, so a drafter whose support is a part of the vocabulary stays exact. In a
tree the children of a node are tried one after the other (SpecInfer, Miao et al. 2024, algorithm 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specbench.decoding.sampling import ACCEPT, TARGET, Decoding, invert
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


def accept(logits: torch.Tensor, draft: Draft, decoding: Decoding, uniforms: torch.Tensor | None) -> Accepted:
    """Applies the rule that fits the draft and the decoding.

    Args:
        logits: [1 + k, vocab] after the pending token and each draft token.
        draft: k tokens, a chain or a tree.
        decoding: how tokens are chosen.
        uniforms: [at least 1 + depth, 1 + 2 * siblings] the numbers of the positions behind the pending token, as
            `position_draws` makes them; None when greedy.
    """
    k = draft.tokens.shape[0]
    if draft.parents is not None and k > 0:
        return _accept_tree(logits, draft, draft.parents, decoding, uniforms)
    if uniforms is None or draft.probs is None:
        choices, _ = decoding.select(logits, None if uniforms is None else uniforms[: 1 + k, TARGET])
        return greedy_chain(choices, draft.tokens)
    probs = decoding.probs(logits)
    count, rest = sampled_chain(probs, draft.tokens, draft.probs, uniforms[:k, ACCEPT])
    return Accepted(count, invert(rest, uniforms[count, TARGET]))


def _accept_tree(
    logits: torch.Tensor,
    draft: Draft,
    parents: torch.Tensor,
    decoding: Decoding,
    uniforms: torch.Tensor | None,
) -> Accepted:
    on_path = ancestors(parents)
    depths = on_path.sum(1)  # a node of depth d stands d positions behind the pending token
    if uniforms is None or draft.probs is None:
        behind = torch.cat([depths.new_zeros(1), depths])
        choices, _ = decoding.select(logits, None if uniforms is None else uniforms[behind, TARGET])
        return greedy_tree(choices, draft.tokens, parents, on_path)
    accepting = uniforms[depths - 1, ACCEPT + siblings_before(parents)]
    count, path, rest = sampled_tree(decoding.probs(logits), draft.tokens, draft.probs, parents, accepting)
    return Accepted(count, invert(rest, uniforms[count, TARGET]), path)


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
        uniforms: when sampling, the numbers [b, 1 + k, 3] of the positions behind each pending token.
    """
    live = torch.arange(draft.tokens.shape[1], device=drafted.device) < drafted.unsqueeze(1)
    if uniforms is None or draft.probs is None:
        choices, _ = decoding.select(logits, None if uniforms is None else uniforms[..., TARGET])
        return greedy_chain(choices, draft.tokens, live)
    accepting = uniforms[:, :-1, ACCEPT]
    count, rest = sampled_chain(decoding.probs(logits), draft.tokens, draft.probs, accepting, live)
    return Accepted(count, invert(rest, uniforms[..., TARGET].gather(1, count.unsqueeze(1)).squeeze(1)))


def siblings_before(parents: torch.Tensor) -> torch.Tensor:
    """[k] how many children of the same parent stand before each node of a tree."""
    return (parents.unsqueeze(1) == parents).tril(-1).sum(1)


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
    draft_probs: torch.Tensor,
    uniforms: torch.Tensor,
    live: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepts draft tokens by speculative sampling.

    Args:
        probs: [..., k + 1, vocab] the target's distributions.
        tokens: [..., k] the draft.
        draft_probs: [..., k, vocab] the distributions the tokens were drawn from.
        uniforms: [..., k] numbers in [0, 1) to accept with.
        live: as in `greedy_chain`.

    Returns:
        The kept count [...] and the (unnormalised) distribution [..., vocab] of the token that follows.
    """
    k, index = tokens.shape[-1], tokens.unsqueeze(-1)
    p = probs[..., :-1, :].gather(-1, index).squeeze(-1)
    q = draft_probs.gather(-1, index).squeeze(-1)
    kept = uniforms * q < p
    if live is not None:
        kept = kept & live
    count = kept.cumprod(-1).sum(-1)
    following = _row(probs, count)
    if k == 0:
        return count, following
    # One row of q is needed: with a vocabulary of 150,000 ids a tensor of all rows takes longer than all the rest.
    last = count.clamp(max=k - 1)
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


def greedy_tree(
    choices: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, on_path: torch.Tensor
) -> Accepted:
    """Accepts the longest path of a tree on which every node equals the target's own choice.

    Args:
        choices: [k + 1], the target's token after the pending token and after each node.
        tokens: [k] the nodes.
        parents: [k], as in `Draft`.
        on_path: [k, k], their `ancestors`.
    """
    k = tokens.shape[0]
    fits = choices[parents + 1] == tokens
    survives = ~(on_path & ~fits).any(1)
    depth = on_path.sum(1) * survives
    best = depth.argmax()
    count = depth[best]
    nodes = torch.arange(k, device=tokens.device)
    path = torch.where(on_path[best], nodes, k).sort().values
    last = torch.where(count > 0, best + 1, torch.zeros_like(best))
    return Accepted(count, choices[last], path)


def sampled_tree(
    probs: torch.Tensor,
    tokens: torch.Tensor,
    draft_probs: torch.Tensor,
    parents: torch.Tensor,
    uniforms: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walks down a tree of drawn tokens, without a wait for the device.

    The children of a node must be independent draws from the distribution there. Each rejected child takes its share
    out of p before the next one is tried. Nodes are tried in their order: one counts where its parent is the node that
    the walk has reached.

    Args:
        probs: [k + 1, vocab] the target's distributions.
        tokens: [k] the nodes.
        draft_probs: [k, vocab] the distribution that each node was drawn from.
        parents: [k], as in `Draft`.
        uniforms: [k] a number in [0, 1) for each node to accept it with.

    Returns:
        The kept count [], the path [k] as in `Accepted`, and the (unnormalised) distribution [vocab] of the token that
        follows.
    """
    k = tokens.shape[0]
    reached, p = parents.new_full((), -1), probs[0]
    kept = torch.zeros_like(tokens, dtype=torch.bool)
    for node in range(k):
        token, q = tokens[node], draft_probs[node]
        tried = parents[node] == reached
        taken = tried & (uniforms[node] * q[token] * p.sum() < p[token])
        kept[node] = taken
        rejected = residual(p / p.sum(), q)
        p = torch.where(taken, probs[node + 1], torch.where(tried, rejected, p))
        reached = torch.where(taken, node, reached)
    nodes = torch.arange(k, device=tokens.device)
    return kept.sum(), torch.where(kept, nodes, k).sort().values, p
