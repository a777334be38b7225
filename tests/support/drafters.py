"""Drafters of the decoding core's own tests. They import no method."""

from __future__ import annotations

import random

import torch

from specbench.decoding.batch import Rows
from specbench.decoding.draft import Context, Draft, Drafter, Needs, Resume
from specbench.decoding.sampling import invert
from specbench.decoding.target import Prefill, Target


class Oracle(Drafter):
    """Drafts a known continuation, as a chain or a tree, and errs wherever its random numbers say so.

    answer: the tokens that autoregressive decoding gives. error: chance of each token to be wrong. tree: adds branches.
    """

    def __init__(
        self,
        prompt_length: int,
        answer: list[int],
        vocab: int,
        seed: int,
        error: float,
        longest: int,
        tree: bool,
    ):
        self.rng = random.Random(seed)
        self.start, self.answer, self.vocab = prompt_length, answer, vocab
        self.error, self.longest, self.tree = error, longest, tree
        self.tree_nodes = 3 * longest if tree else 0
        self.committed: list[int] = []

    def draft(self, context: Context) -> Draft:
        length = min(self.rng.randint(0, self.longest), context.max_draft)
        known = context.length - self.start
        right = (self.answer + [0] * (known + length))[known : known + length]
        chain = [self._wrong(t) if self.rng.random() < self.error else t for t in right]
        if not self.tree or not chain:
            return Draft(torch.tensor(chain, dtype=torch.int64, device=context.tokens.device))
        tokens, parents, last = [], [], -1
        for token in chain:
            siblings = [self._wrong(token) for _ in range(self.rng.randint(0, 2))] + [token]
            self.rng.shuffle(siblings)
            at = len(tokens) + siblings.index(token)
            tokens += siblings
            parents += [last] * len(siblings)
            last = at
        device = context.tokens.device
        return Draft(torch.tensor(tokens, device=device), parents=torch.tensor(parents, device=device))

    def commit(self, context: Context, accepted: int) -> None:
        self.committed.append(accepted)

    def _wrong(self, token: int) -> int:
        return (token + self.rng.randrange(1, self.vocab)) % self.vocab


class ModelChain(Drafter):
    """A model drafts token by token; when sampling the distributions go along. Each sequence has a cache of its own.

    longest: draft length. threshold: a sequence drafts no more behind a token of a lower top-1 probability.
    """

    needs = Needs(batching=True)

    def __init__(self, model, longest: int = 4, threshold: float = 0.0):
        self.model, self.max_draft_tokens, self.threshold = Target(model), longest, threshold
        self.cache = None

    def begin(self, context: Context, prefill: Prefill, target: Target, cache) -> None:
        if self.cache is None or self.cache.capacity < cache.capacity:
            self.cache = self.model.new_cache(cache.capacity)
        self.cache.truncate(0)

    def draft(self, context: Context) -> Draft:
        feed, tokens, probs = self._unseen(self.cache, context.known()), [], []
        for j in range(min(self.max_draft_tokens, context.max_draft)):
            logits = self._next(self.cache, feed)
            token, q = context.decoding.select(logits, context.draws(j))
            token = token.clamp(min=0)  # one that could not be drawn; the NaN are in q
            feed = token
            tokens.append(token)
            probs.append(q)
            if self._unsure(logits):
                break
        return Draft(torch.cat(tokens), None if context.decoding.greedy else torch.cat(probs))

    def open_rows(self, rows: int, capacity: int, target: Target, cache) -> None:
        self.caches, self.capacity = [None] * rows, capacity

    def begin_row(self, row: int, prompt: torch.Tensor, prefill: Prefill, target: Target) -> None:
        self.caches[row] = self.model.new_cache(self.capacity)

    def move_rows(self, sources: list[int], destinations: list[int], reach: int) -> None:
        moved = [self.caches[source] for source in sources]
        for destination, cache in zip(destinations, moved):
            self.caches[destination] = cache

    def draft_rows(self, rows: Rows) -> Draft:
        caches = self.caches[: rows.known.shape[0]]
        feeds = [
            self._unseen(cache, rows.tokens[i, :n])
            for i, (cache, n) in enumerate(zip(caches, rows.known.tolist()))
        ]
        tokens, probs = [], []
        counts = torch.zeros_like(rows.known)
        going = torch.ones_like(rows.known, dtype=torch.bool)
        for j in range(min(self.max_draft_tokens, rows.max_draft)):
            logits = torch.cat([self._next(cache, feed) for cache, feed in zip(caches, feeds)])
            token, q = rows.decoding.select(logits, rows.draws(j))
            token = token.clamp(min=0)  # one that could not be drawn; the NaN are in q
            feeds = token.unsqueeze(1)
            tokens.append(token)
            probs.append(q)
            counts += going
            going &= ~self._unsure(logits)
        drawn = None if rows.decoding.greedy else torch.stack(probs, dim=1)
        return Draft(torch.stack(tokens, dim=1), drawn, counts=counts)

    def _unseen(self, cache, known: torch.Tensor) -> torch.Tensor:
        """The known tokens that the cache does not hold; what it holds of rejected ones goes."""
        cache.truncate(min(cache.lengths[0], known.shape[0] - 1))
        return known[cache.lengths[0] :]

    def _next(self, cache, ids: torch.Tensor) -> torch.Tensor:
        """Token ids [n] that follow what the cache holds -> logits [1, vocab] behind them."""
        return self.model.head(self.model.run_layers(self.model.embed(ids.unsqueeze(0)), cache)[:, -1])

    def _unsure(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.softmax(logits.float(), dim=-1).amax(-1) < self.threshold


class ModelTree(ModelChain):
    """Two tokens that may follow the pending one, drawn from the same distribution, and one behind the first."""

    needs = Needs()
    siblings = 2
    tree_nodes = 1

    def draft(self, context: Context) -> Draft:
        greedy = context.decoding.greedy
        first = self._next(self.cache, self._unseen(self.cache, context.known()))
        if greedy:
            siblings, q = first[0].topk(2).indices, None
        else:
            q = context.decoding.probs(first)
            siblings = invert(q.expand(2, -1), context.draws(0, 2))
        if context.max_draft < 2:
            parents = torch.full_like(siblings, -1)
            return Draft(siblings, None if greedy else q.expand(2, -1), parents)
        behind, below = context.decoding.select(self._next(self.cache, siblings[:1]), context.draws(1))
        self.cache.truncate(context.length)  # the next draft feeds what was accepted of the siblings itself
        probs = None if greedy else torch.cat([q, q, below])
        return Draft(torch.cat([siblings, behind]), probs, siblings.new_tensor([-1, -1, 0]))


class EarlyExit(Drafter):
    """Drafts with the target's first `layer` layers and its head; verification resumes behind those layers."""

    needs = Needs(batching=True)

    def __init__(self, layer: int, longest: int = 4):
        self.layer, self.max_draft_tokens = layer, longest
        self.taps = (layer,)

    def begin(self, context: Context, prefill: Prefill, target: Target, cache) -> None:
        assert prefill.hidden[self.layer].shape == (1, context.length - 1, target.hidden_size)
        self.target, self.cache = target, cache

    def draft(self, context: Context) -> Draft:
        ids, states, tokens, probs = context.pending(), [], [], []
        while True:
            states.append(self.target.run_layers(self.target.embed(ids), self.cache, 0, self.layer))
            if len(tokens) == min(self.max_draft_tokens, context.max_draft):
                break
            token, q = context.decoding.select(
                self.target.head(states[-1][:, -1]), context.draws(len(tokens))
            )
            tokens.append(token)
            probs.append(q)
            ids = token.unsqueeze(0)
        drawn = None if context.decoding.greedy else torch.cat(probs)
        return Draft(torch.cat(tokens), drawn, resume=Resume(self.layer, torch.cat(states, dim=1)))

    def open_rows(self, rows: int, capacity: int, target: Target, cache) -> None:
        self.target, self.cache = target, cache

    def begin_row(self, row: int, prompt: torch.Tensor, prefill: Prefill, target: Target) -> None:
        assert prefill.hidden[self.layer].shape == (1, prompt.shape[1], target.hidden_size)

    def draft_rows(self, rows: Rows) -> Draft:
        ids, states, tokens, probs = rows.newest(1), [], [], []
        longest = min(self.max_draft_tokens, rows.max_draft)
        for j in range(longest + 1):
            places = rows.layout.places(rows.known - 1 + j, 1, rows.reach + j, j)
            states.append(self.target.run_rows(self.target.embed(ids), self.cache, places, 0, self.layer))
            if j == longest:
                break
            token, q = rows.decoding.select(self.target.head(states[-1][:, -1]), rows.draws(j))
            tokens.append(token.clamp(min=0))
            probs.append(q)
            ids = tokens[-1].unsqueeze(1)
        drawn = None if rows.decoding.greedy else torch.stack(probs, dim=1)
        resume = Resume(self.layer, torch.cat(states, dim=1))
        return Draft(torch.stack(tokens, dim=1), drawn, resume=resume)
