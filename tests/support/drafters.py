"""Drafters of the decoding core's own tests. They import no method."""

from __future__ import annotations

import random

import torch

from specbench.decoding.drafter import Drafter, Needs
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import sample_inverse_cdf
from specbench.decoding.slots import Slots
from specbench.decoding.state import Batch, Draft, Prefill, Resume, SequenceState, Verified
from specbench.decoding.tree import Tree


class Oracle(Drafter):
    """Drafts a known continuation, as a chain or a tree, and errs wherever its random numbers say so.

    answer: the tokens that autoregressive decoding gives. error: chance of each token to be wrong. tree: adds branches.
    """

    needs = Needs(batching=False)

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
        self.max_draft_tokens, self.max_nodes = longest, 3 * longest if tree else 0
        self.committed: list[int] = []

    def draft(self, batch: Batch) -> Draft:
        length = min(self.rng.randint(0, self.longest), batch.max_draft)
        known, device = batch.lengths[0] - self.start, batch.tokens.device
        right = (self.answer + [0] * (known + length))[known : known + length]
        chain = [self._wrong(t) if self.rng.random() < self.error else t for t in right]
        if not self.tree or not chain:
            return Draft(torch.tensor([chain], dtype=torch.int64, device=device))
        tokens, parents = branched(self.rng, chain, self._wrong)
        tree = Tree.of(torch.tensor(parents, device=device))
        return Draft(torch.tensor([tokens], device=device), tree=tree)

    def commit(self, batch: Batch, verified: Verified) -> None:
        self.committed += verified.counts

    def _wrong(self, token: int) -> int:
        return (token + self.rng.randrange(1, self.vocab)) % self.vocab


def branched(rng: random.Random, chain: list[int], wrong) -> tuple[list[int], list[int]]:
    """A chain with up to two wrong siblings of each token, in any order: (tokens, parents)."""
    tokens, parents, last = [], [], -1
    for token in chain:
        siblings = [wrong(token) for _ in range(rng.randint(0, 2))] + [token]
        rng.shuffle(siblings)
        at = len(tokens) + siblings.index(token)
        tokens += siblings
        parents += [last] * len(siblings)
        last = at
    return tokens, parents


class ModelChain(Drafter):
    """A model drafts token by token; when sampling the distributions go along. Each sequence has a cache of its own.

    longest: draft length. threshold: a sequence drafts no more after a token of a lower top-1 probability.
    """

    def __init__(self, model, longest: int = 4, threshold: float = 0.0):
        self.model, self.max_draft_tokens, self.threshold = StagedModel(model), longest, threshold

    def open(self, slots: Slots, target: StagedModel) -> None:
        self.cache = slots.cache(self.model.new_cache(slots.capacity, slots.count)).cache
        self.held = slots.values(
            int
        )  # tokens of each sequence that its slot of the cache holds and that stay
        self.prompts: list[list[int]] = slots.values(list)

    def begin(self, slot: int, sequence: SequenceState, prefill: Prefill) -> None:
        self.prompts[slot], self.held[slot] = sequence.request.prompt, 0

    def draft(self, batch: Batch) -> Draft:
        logits = self._behind_the_pending(batch)
        tokens, probs = [], []
        counts = torch.zeros(batch.size, dtype=torch.int64, device=logits.device)
        going = torch.ones(batch.size, dtype=torch.bool, device=logits.device)
        for j in range(min(self.max_draft_tokens, batch.max_draft)):
            if j:
                logits = torch.cat(
                    [self._next(i, new.view(1), j - 1, batch) for i, new in enumerate(tokens[-1])]
                )
            token, q = batch.decoding.select(logits, batch.draws(j))
            token = token.clamp(min=0)  # one that could not be drawn; the NaN are in q
            tokens.append(token)
            probs.append(q)
            counts += going
            going &= torch.softmax(logits.float(), dim=-1).amax(-1) >= self.threshold
            if not going.any():
                break
        drawn = None if batch.decoding.greedy else torch.stack(probs, dim=1)
        return Draft(torch.stack(tokens, dim=1), drawn, candidates=counts)

    def _behind_the_pending(self, batch: Batch) -> torch.Tensor:
        """Logits [b, vocab] after the pending tokens; feeds what the caches lack."""
        found = []
        for slot, length in enumerate(batch.lengths):
            prompt = self.prompts[slot]
            known = batch.tokens[slot, :length]
            assert known[: len(prompt)].tolist() == prompt, "a drafter's state went to another sequence"
            feed = known[self.held[slot] :]
            found.append(self._next(slot, feed, -len(feed), batch))
            self.held[slot] = length
        return torch.cat(found)

    def _next(self, slot: int, ids: torch.Tensor, offset: int, batch: Batch) -> torch.Tensor:
        """Token ids [n], the first of them `offset` after the known tokens -> logits [1, vocab] after the last."""
        start = batch.lengths[slot] + offset
        hidden = self.model.run_layers(self.model.embed(ids.unsqueeze(0)), self.cache.slot(slot), start)
        return self.model.head(hidden[:, -1])


class ModelTree(ModelChain):
    """Two tokens that may follow the pending one, drawn from the same distribution, and one after the first."""

    siblings = 2

    def __init__(self, model):
        super().__init__(model, 2)
        self.max_nodes = 3

    def draft(self, batch: Batch) -> Draft:
        first = self._behind_the_pending(batch)
        if batch.decoding.greedy:
            siblings, q = first.topk(2).indices, None
        else:
            q = batch.decoding.probs(first).unsqueeze(1).expand(-1, 2, -1)
            siblings = sample_inverse_cdf(q, batch.draws(0, 2))
        if batch.max_nodes < 3:
            return Draft(siblings[:, :0])
        behind = torch.cat([self._next(i, new[:1], 0, batch) for i, new in enumerate(siblings)])
        token, below = batch.decoding.select(behind, batch.draws(1))
        probs = None if q is None else torch.cat([q, below.unsqueeze(1)], dim=1)
        tree = Tree.of(siblings.new_tensor([-1, -1, 0]), max_children=2)
        return Draft(torch.cat([siblings, token.unsqueeze(1)], dim=1), probs, tree=tree)


class EarlyExit(Drafter):
    """Drafts with the target's first `layer` layers and its head; verification resumes after those layers."""

    def __init__(self, layer: int, longest: int = 4):
        self.layer, self.max_draft_tokens = layer, longest
        self.taps = (layer,)

    def open(self, slots: Slots, target: StagedModel) -> None:
        self.target = target

    def begin(self, slot: int, sequence: SequenceState, prefill: Prefill) -> None:
        states = prefill.hidden_states[self.layer]
        assert states.shape == (1, sequence.length - 1, self.target.hidden_size)

    def draft(self, batch: Batch) -> Draft:
        ids, states, tokens, probs = batch.last_tokens(1), [], [], []
        longest = min(self.max_draft_tokens, batch.max_draft)
        for j in range(longest + 1):
            ctx = batch.layout.place(batch, 1, j)
            hidden = self.target.embed(ids)
            states.append(self.target.run_layers(hidden, batch.layout.cache, ctx, 0, self.layer))
            if j == longest:
                break
            token, q = batch.decoding.select(self.target.head(states[-1][:, -1]), batch.draws(j))
            tokens.append(token.clamp(min=0))
            probs.append(q)
            ids = tokens[-1].unsqueeze(1)
        drawn = None if batch.decoding.greedy else torch.stack(probs, dim=1)
        resume = Resume(self.layer, torch.cat(states, dim=1))
        return Draft(torch.stack(tokens, dim=1), drawn, resume=resume)
