"""Which draft tokens survive. Every method uses these rules, so that losslessness is proved once.

Greedy decoding, and tokens drafted without chance: the target chooses a token at every node, and a draft token survives
while it equals that token. When sampling, the target's choices are drawn with the numbers of their positions, so that
the text is that of plain sampling.

Tokens that were drawn: speculative sampling (Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2). A
draft token x is kept with probability min(1, p(x)/q(x)); after the first rejection the next token is drawn from
norm(max(p - q, 0)) over the full vocabulary, so a drafter whose support is a part of the vocabulary stays exact. In a
tree the children of a node are tried one after the other (SpecInfer, Miao et al. 2024, algorithm 2). A chain may be
judged as a whole instead: block verification (Sun et al. 2024, algorithm 2) keeps at least as many tokens on average.

One rule is lossy and serves as a control that the certificate must detect: typical acceptance (Cai et al. 2024, section
2.3.2) keeps tokens that the target finds likely enough, even if they are not its own choice.

All functions handle a batch of b sequences without loops over sequences or tree nodes, and on a GPU without waiting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specbench.decoding.sampling import ACCEPT, TARGET, SamplingParams, sample_inverse_cdf
from specbench.system.settings import BLOCK, TYPICAL

if TYPE_CHECKING:
    from specbench.decoding.state import Draft
    from specbench.decoding.tree import Tree

THRESHOLD, ALPHA = 0.09, 0.3  # of typical acceptance, in the authors' code
UNREACHED = -2  # in place of the target's token at a node that cannot be accepted


@dataclass(slots=True)
class Accepted:
    """The outcome of one verification.

    Attributes:
        count: [b] draft tokens kept.
        tokens: [b, 1 + k] the kept tokens, then the target's own token; the rest is unused.
        path: for a tree [b, k]: the first `count` are the indices of the kept nodes from the root down, the rest
            those of any nodes; None for a chain.
    """

    count: torch.Tensor
    tokens: torch.Tensor
    path: torch.Tensor | None = None


def accept(
    logits: torch.Tensor,
    draft: Draft,
    decoding: SamplingParams,
    uniforms: torch.Tensor | None,
    limits: torch.Tensor | None = None,
) -> Accepted:
    """Applies the rule that fits the draft and the decoding.

    Args:
        logits: [b, 1 + k, vocab] after the pending token and each draft token.
        draft: k tokens of each sequence, a chain or a tree.
        decoding: how tokens are chosen.
        uniforms: [b, at least 1 + depth, 1 + 2 * columns] of the positions after each pending token, as
            `position_uniforms` makes them; None when greedy.
        limits: [b] draft tokens that each may accept at most; None: all.
    """
    b, k = draft.tokens.shape
    if k == 0:
        choices, _ = decoding.select(logits, None if uniforms is None else uniforms[:, :1, TARGET])
        return Accepted(draft.tokens.new_zeros(b), choices)
    valid_mask = _valid_mask(draft, limits)
    if draft.tree is not None:
        return _accept_tree(logits, draft, draft.tree, decoding, uniforms, valid_mask)
    if uniforms is None or draft.probs is None:
        drawing = None if uniforms is None else uniforms[:, : 1 + k, TARGET]
        choices = target_choices(logits, draft.tokens, decoding, drawing)
        if uniforms is None and decoding.verification != TYPICAL:
            return greedy_chain(choices, draft.tokens, valid_mask)
        fits = choices[:, :-1] == draft.tokens
        if decoding.verification == TYPICAL:
            fits = fits | is_typical(logits[:, :-1], draft.tokens)
        count = leading(fits, valid_mask)
        # Drawn choices lack those of nodes that are not reached: no id that a drafter could embed.
        return outcome(draft.tokens, count, _at(choices, count))
    rule, accepting = sampled_chain, uniforms[:, :k, ACCEPT]
    if decoding.verification == BLOCK:  # the column of each position is its place in the draft
        rule, accepting = block_chain, uniforms[:, :k, ACCEPT : ACCEPT + k].diagonal(dim1=1, dim2=2)
    count, rest = rule(decoding.probs(logits), draft.tokens, draft.probs, accepting, valid_mask)
    return outcome(draft.tokens, count, sample_inverse_cdf(rest, _at(uniforms[..., TARGET], count)))


def may_look(tensor: torch.Tensor) -> bool:
    """Whether the host can read a tensor without waiting for a device."""
    return tensor.device.type == "cpu"


def target_choices(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    decoding: SamplingParams,
    uniforms: torch.Tensor | None,
    parents: torch.Tensor | None = None,
) -> torch.Tensor:
    """The target's own token [b, 1 + k] after the pending token and each node, `UNREACHED` where none is needed.

    A draw reads a whole distribution several times. Where the host may look, only nodes that are reached through the
    target's own tokens get one, level by level.

    Args:
        logits: [b, 1 + k, vocab].
        tokens: [b, k] the nodes.
        decoding: how tokens are chosen.
        uniforms: [b, 1 + k] numbers in [0, 1) to draw with; None when greedy.
        parents: [b, k] the row of the verification that each node follows; None for a chain.
    """
    if uniforms is None or not may_look(logits):
        return decoding.select(logits, uniforms)[0]
    b, k = tokens.shape
    if parents is None:
        parents = torch.arange(k, device=tokens.device).expand(b, -1)
    choices = tokens.new_full((b, 1 + k), UNREACHED)
    reached = torch.zeros_like(choices, dtype=torch.bool)
    reached[:, 0] = True
    while reached.any():
        choices[reached], _ = decoding.select(logits[reached], uniforms[reached])
        fits = (choices.gather(1, parents) == tokens) & reached.gather(1, parents)
        reached = torch.nn.functional.pad(fits, (1, 0))
    return choices


def outcome(
    tokens: torch.Tensor, count: torch.Tensor, following: torch.Tensor, path: torch.Tensor | None = None
) -> Accepted:
    """The outcome if `count` of the draft's tokens [b, k] are kept, those on `path` for a tree."""
    accepted_tokens = tokens if path is None else tokens.gather(1, path)
    steps, next_ = torch.arange(1 + tokens.shape[1], device=tokens.device), following.unsqueeze(1)
    new = torch.where(steps == count.unsqueeze(1), next_, torch.cat([accepted_tokens, next_], dim=1))
    return Accepted(count, new, path)


def _accept_tree(
    logits: torch.Tensor,
    draft: Draft,
    tree: Tree,
    decoding: SamplingParams,
    uniforms: torch.Tensor | None,
    valid_mask: torch.Tensor | None,
) -> Accepted:
    b = draft.tokens.shape[0]
    parents, depths = tree.parents.expand(b, -1), tree.depths.expand(b, -1)
    if uniforms is None or draft.probs is None:
        drawing = None
        if uniforms is not None:  # a node of depth d is d positions after the pending token
            drawing = uniforms[..., TARGET].gather(1, tree.offsets().expand(b, -1))
        followed = parents + 1  # rows of the verification
        choices = target_choices(logits, draft.tokens, decoding, drawing, followed)
        fits = choices.gather(1, followed) == draft.tokens
        if decoding.verification == TYPICAL:
            rows = followed.unsqueeze(-1).expand(-1, -1, logits.shape[-1])
            fits = fits | is_typical(logits.gather(1, rows), draft.tokens)
        fits = fits if valid_mask is None else fits & valid_mask
        count, path, last = longest_path(fits, tree)
        return outcome(draft.tokens, count, _at(choices, last), path)
    siblings = tree.siblings_before().expand(b, -1)
    column = (depths - 1) * uniforms.shape[2] + ACCEPT + siblings
    accepting = uniforms.flatten(1).gather(1, column)
    probs = decoding.probs(logits)
    count, path, rest = sampled_tree(probs, draft.tokens, draft.probs, tree, accepting, valid_mask)
    following = sample_inverse_cdf(rest, _at(uniforms[..., TARGET], count))
    return outcome(draft.tokens, count, following, path)


def _valid_mask(draft: Draft, limits: torch.Tensor | None) -> torch.Tensor | None:
    """Which nodes [b, k] may be accepted: candidates that lie within the limits; None: all."""
    candidates = draft.acceptable()
    if limits is None:
        return candidates
    k, device = draft.tokens.shape[1], draft.tokens.device
    depths = torch.arange(1, 1 + k, device=device) if draft.tree is None else draft.tree.depths
    within = depths <= limits.unsqueeze(1)
    return within if candidates is None else within & candidates


def _at(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The entry [...] of each row of [..., n] that `index` [...] names."""
    return rows.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def greedy_chain(
    choices: torch.Tensor, tokens: torch.Tensor, valid_mask: torch.Tensor | None = None
) -> Accepted:
    """Accepts draft tokens while each equals the target's own choice. Sequences of a batch are independent.

    Args:
        choices: [..., k + 1] the target's own tokens.
        tokens: [..., k] the draft.
        valid_mask: [..., k], which of the tokens were drafted at all; None for all of them.
    """
    # Kept draft tokens equal the target's choices.
    return Accepted(leading(choices[..., :-1] == tokens, valid_mask), choices)


def leading(fits: torch.Tensor, valid_mask: torch.Tensor | None) -> torch.Tensor:
    """Number of leading tokens [...] that fit, of [..., k]; those outside `valid_mask` do not."""
    return (fits if valid_mask is None else fits & valid_mask).cumprod(-1).sum(-1)


def is_typical(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Whether the target, at temperature 1, finds each token likelier than min(threshold, alpha * exp(-entropy)).

    Args:
        logits: [..., vocab] in front of each token.
        tokens: [...].
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    entropy = torch.special.entr(logprobs.exp()).sum(-1)
    return _at(logprobs, tokens).exp() > (ALPHA * (-entropy).exp()).clamp(max=THRESHOLD)


def sampled_chain(
    probs: torch.Tensor,
    tokens: torch.Tensor,
    draft_probs: torch.Tensor,
    uniforms: torch.Tensor,
    valid_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepts draft tokens by speculative sampling.

    Args:
        probs: [..., k + 1, vocab] the target's distributions.
        tokens: [..., k] the draft.
        draft_probs: [..., k, vocab] the distributions the tokens were drawn from.
        uniforms: [..., k] numbers in [0, 1) to accept with.
        valid_mask: as in `greedy_chain`.

    Returns:
        The kept count [...] and the (unnormalised) distribution [..., vocab] of the token that follows.
    """
    k, p, q = tokens.shape[-1], _at(probs[..., :-1, :], tokens), _at(draft_probs, tokens)
    count = leading(uniforms * q < p, valid_mask)
    following = _row(probs, count)
    # One row of q is needed: with a vocabulary of 150,000 ids a tensor of all rows takes longer than all the rest.
    last = count.clamp(max=k - 1)
    draft_row = _row(draft_probs, last)
    # After the draft's end, where nothing was drafted, the next token is drawn from p.
    drafted = count < k
    if valid_mask is not None:
        drafted = drafted & _at(valid_mask, last)
    return count, residual(following, draft_row.masked_fill_(~drafted.unsqueeze(-1), 0.0))


def block_chain(
    probs: torch.Tensor,
    tokens: torch.Tensor,
    draft_probs: torch.Tensor,
    uniforms: torch.Tensor,
    valid_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepts draft tokens by block verification; arguments and result are those of `sampled_chain`.

    The longest prefix that passes its own test is kept: a token that fails does not end the draft.
    """
    k = tokens.shape[-1]
    joint, chances, q = block_chances(probs, tokens, draft_probs, valid_mask)
    count = ((uniforms < chances) * torch.arange(1, k + 1, device=tokens.device)).amax(-1)
    joint = torch.nn.functional.pad(joint, (1, 0), value=1.0)  # of the empty prefix
    return count, residual(_at(joint, count).unsqueeze(-1) * _row(probs, count), _row(q, count))


def block_chances(
    probs: torch.Tensor, tokens: torch.Tensor, draft_probs: torch.Tensor, valid_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The chances of each prefix of a draft in block verification; arguments are those of `sampled_chain`.

    With p_i the ratio of the target's to the draft's probability of the first i tokens, cut at 1 after each of them,
    the chance of prefix i is A / (A + 1 - p_i), where A = sum of max(p_i p - q, 0) over the next token; q is 0 after
    the last one.

    Returns:
        The p_i [..., k], the chances [..., k], 0 after the last token, and q [..., k + 1, vocab] after each prefix, the
        empty one included.
    """
    p, q = _at(probs[..., :-1, :], tokens).double(), _at(draft_probs, tokens).double()
    valid = torch.ones_like(tokens, dtype=torch.bool) if valid_mask is None else valid_mask
    # The running product, cut at 1 after each factor, is the sum of logarithms minus its largest value so far.
    sums = torch.where(valid, p / q, 0.0).log().cumsum(-1)
    joint = (sums - sums.cummax(-1).values.clamp(min=0.0)).exp()
    following = torch.nn.functional.pad(draft_probs * valid.unsqueeze(-1), (0, 0, 0, 1))
    rest = (joint.unsqueeze(-1) * probs[..., 1:, :] - following[..., 1:, :]).clamp_(min=0.0).sum(-1)
    total = rest + 1.0 - joint
    # 0 / 0 where the draft's distribution is the target's own: nothing is ever rejected there.
    return joint, torch.where(total > 0, rest / total, 1.0), following


def _row(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The row [..., vocab] of `rows` [..., n, vocab] that `index` [...] names."""
    return rows.gather(-2, index[..., None, None].expand(*index.shape, 1, rows.shape[-1])).squeeze(-2)


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """max(p - q, 0) [..., vocab], not normalised; p itself if that is 0 everywhere (p equals q).

    NaN in p or q stays NaN, so that the draw from it fails instead of returning an arbitrary token.
    """
    rest = (p - q).clamp_(min=0.0)
    return torch.where(rest.sum(-1, keepdim=True) == 0, p, rest)


def longest_path(fits: torch.Tensor, tree: Tree) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The longest path of a tree on which every node fits.

    Args:
        fits: [b, k].
        tree: of k nodes.

    Returns:
        Nodes on the path [b]; the path [b, k] as in `Accepted`; and the row [b] of the verification after which it
        ends, 0 for the pending token.
    """
    survives = ~(tree.on_path & ~fits.unsqueeze(1)).any(-1)
    depth = tree.depths * survives
    best = depth.argmax(-1)
    count = _at(depth, best)
    nodes = torch.arange(fits.shape[1], device=fits.device)
    on_path = tree.on_path.expand(fits.shape[0], -1, -1)
    on_best_path = on_path.gather(1, best[:, None, None].expand(-1, 1, fits.shape[1])).squeeze(1)
    k = fits.shape[1]
    path = nodes.expand_as(on_best_path).masked_fill(~on_best_path, k).sort(-1).values
    return count, path.clamp(max=k - 1), (best + 1) * (count > 0)


def sampled_tree(
    probs: torch.Tensor,
    tokens: torch.Tensor,
    draft_probs: torch.Tensor,
    tree: Tree,
    uniforms: torch.Tensor,
    valid_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accepts a path in each tree of drawn tokens.

    Each child must have been drawn from its own row of `draft_probs`. The row may depend on the siblings before it:
    with independent draws it is the same for all of them (SpecInfer), without replacement it lacks the tokens of the
    earlier ones (Sequoia, Chen et al. 2024). The share of each rejected child is subtracted from p before the next one
    is tried. The outcome at a node does not depend on how it was reached, so all nodes are tried at once: first their
    first children, then their second ones. Each turn touches only nodes with so many children: with a vocabulary of
    50,000 ids, distributions of all nodes in all turns would be more bytes than a target's weights.

    Args:
        probs: [b, k + 1, vocab] the target's distributions, overwritten.
        tokens: [b, k] the nodes.
        draft_probs: [b, k, vocab] the distribution that each node was drawn from.
        tree: their shape.
        uniforms: [b, k] a number in [0, 1) for each node to accept it with.
        valid_mask: [b, k] which nodes may be accepted; the others are not tried. None: all.

    Returns:
        The kept count [b], the path [b, k] as in `Accepted`, and the (unnormalised) distribution [b, vocab] of the
        token that follows.
    """
    b, k = tokens.shape
    tried = torch.ones_like(tokens, dtype=torch.bool) if valid_mask is None else valid_mask
    parents, order = (tree.parents + 1).expand(b, -1), tree.siblings_before().expand(b, -1)
    rest, slots = probs, torch.arange(b, device=tokens.device).unsqueeze(1)
    open_ = torch.ones(b, k + 1, dtype=torch.bool, device=tokens.device)  # nodes without an accepted child
    children = torch.zeros_like(open_, dtype=torch.int64).scatter_add_(1, parents, torch.ones_like(parents))
    by_children = children.argsort(dim=1, descending=True)
    taken = torch.zeros_like(tried)
    for turn in range(k if tree.max_children is None else tree.max_children):
        # No more than k // (turn + 1) nodes have a child of this turn.
        most = int((children > turn).sum(1).max()) if may_look(tokens) else k // (turn + 1)
        if most == 0:
            break
        rows, now = by_children[:, :most], (order == turn) & tried
        # The child of each of these nodes to try now; k if there is none.
        child = torch.full((b, k + 2), k, device=tokens.device)
        child.scatter_(
            1, parents.masked_fill(~now, k + 1), torch.arange(k, device=tokens.device).expand(b, -1)
        )
        child = child.gather(1, rows)
        has, child = (child < k) & open_.gather(1, rows), child.clamp(max=k - 1)
        p, q, token = rest[slots, rows], draft_probs[slots, child], tokens.gather(1, child)
        chance, share = _at(p, token), _at(q, token)
        accepted = has & (uniforms.gather(1, child) * share * p.sum(-1) < chance)
        closed = torch.zeros_like(open_).scatter_(1, rows, accepted)
        taken = taken | (now & closed.gather(1, parents))
        rejected = (has & ~accepted).unsqueeze(-1)
        rest[slots, rows] = torch.where(rejected, residual(p / p.sum(-1, keepdim=True), q), p)
        open_ = open_ & ~closed
    count, path, last = longest_path(taken, tree)
    return count, path, _row(rest, last)
