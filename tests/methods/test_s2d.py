"""S2D's own promises: who leaves where, what its lazily filled caches hold after every roll-back, what it reads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from methods.s2d import SortedDraft
from methods.sps import SpeculativeSampling
from specbench.decoding.engine import Engine
from specbench.decoding.sampling import Decoding
from specbench.decoding.target import Target
from specbench.errors import UserError
from specbench.pairs import cut
from tests.support.methods import drafts, sorted_pair

PROMPT = [3, 9, 27, 11, 33, 29, 17]
EXITS = [1, 2, 4]


def run(kind=SortedDraft, cap: int = 60, pair=None, **settings) -> list:
    pair = pair or sorted_pair("llama")
    drafter = kind(pair, **settings)
    return Engine(Target(pair.target), drafter, frozenset()).generate(PROMPT, Decoding(cap)).steps


def assert_like_a_full_pass(drafter: SortedDraft, known: torch.Tensor) -> None:
    """Every layer's keys and values, and every state that waits for a deeper slice, are those of one pass over all."""
    model, cache = drafter.model, drafter._cache
    fresh = model.new_cache(len(known))
    hidden, start = model.embed(known.unsqueeze(0)), 0
    for end, left in zip(drafter.exits, [*drafter._left, None]):
        hidden = model.run_layers(hidden, fresh, start, end)
        for layer in range(start, end):
            held = cache.lengths[layer]
            assert held == cache.lengths[start] <= len(known)
            whole, lazy = fresh.parts[0][layer, ..., :held, :], cache.parts[0][layer, ..., :held, :]
            torch.testing.assert_close(lazy, whole, atol=1e-4, rtol=1e-4)
        if left is not None:
            waiting = slice(cache.lengths[end], cache.lengths[start])
            torch.testing.assert_close(left[:, waiting], hidden[:, waiting], atol=1e-4, rtol=1e-4)
        start = end


class Checked(SortedDraft):
    """Compares its caches with those of a full pass after every round; `rejected`: the counts that came up."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.rejected: set[int] = set()

    def draft(self, context):
        drafted = super().draft(context)
        self.drafted = len(drafted.tokens)
        return drafted

    def commit(self, context, accepted):
        super().commit(context, accepted)
        self.rejected.add(self.drafted - accepted)
        assert_like_a_full_pass(self, context.known()[: context.length - 1])


def run_checked(kind: type[Checked]) -> set[int]:
    rejected = set()
    pair = sorted_pair("llama")
    for length in (1, 2, 3, 5):
        for threshold in (0.1, 0.2, 0.4):
            drafter = kind(pair, thresholds=[threshold, threshold], max_draft_tokens=length)
            Engine(Target(pair.target), drafter, frozenset()).generate(PROMPT, Decoding(30))
            rejected |= drafter.rejected
    return rejected


@pytest.mark.slow
def test_caches_after_every_roll_back():
    """Full acceptance, one rejected token (where the authors' code goes wrong), two and more."""
    assert {0, 1, 2, 3} <= run_checked(Checked)


def test_a_stale_state_would_be_found():
    """The authors' fault, planted: one state too many stays. (Theirs comes with exactly one rejected token; the last
    draft token never goes through our draft model, so here it takes two.)"""

    class Stale(Checked):
        def commit(self, context, accepted):
            before = self._cache.lengths
            super().commit(context, accepted)
            if self.drafted - accepted == 2:
                self._cache.lengths = before
                assert_like_a_full_pass(self, context.known()[: context.length - 1])

    with pytest.raises(AssertionError):
        run_checked(Stale)


def test_a_token_leaves_at_the_first_exit_whose_confidence_passes_its_threshold():
    pair = sorted_pair("llama")

    class Checked(SortedDraft):
        def _next(self, ids):
            model, end = self.model, self._cache.lengths[0] + ids.shape[1]
            self.fed = torch.cat([self.fed[: end - ids.shape[1]], ids[0]])
            states = model.embed(self.fed.unsqueeze(0))
            cache, start, expected = model.new_cache(end), 0, None
            for layers, threshold in zip(EXITS, (0.2, 0.3, 0.0)):
                states = model.run_layers(states, cache, start, layers)
                logits = model.head(states[:, -1])
                if expected is None and (layers == EXITS[-1] or logits.softmax(-1).max() > threshold):
                    expected = logits, layers
                start = layers
            logits, layers = super()._next(ids)
            assert layers == expected[1]
            torch.testing.assert_close(logits, expected[0], atol=1e-4, rtol=1e-4)
            return logits, layers

        def begin(self, context, *others):
            super().begin(context, *others)
            self.fed = context.known()[:-1].clone()

    steps = run(Checked, pair=pair, thresholds=[0.2, 0.3])
    assert {layers for s in steps for layers in s.exits} == set(EXITS)


@pytest.mark.slow
def test_one_exit_is_a_shallower_draft_model():
    """Fixed at an exit, the sorted draft drafts what a model of so many layers does."""
    pair = sorted_pair("llama")
    for number, exit in enumerate(EXITS, 1):
        short = SimpleNamespace(**vars(pair) | {"draft": cut(pair.draft, list(range(exit)))})
        drafters = [SortedDraft(pair, only=number, max_draft_tokens=4), SpeculativeSampling(short, 4)]
        tokens, others = (drafts(drafter, pair, 0.0) for drafter in drafters)
        assert [t.tolist() for t, _ in tokens] == [t.tolist() for t, _ in others]
        steps = run(only=number, max_draft_tokens=4)
        assert {layers for s in steps for layers in s.exits} == {exit}
        assert {len(s.exits) for s in steps} >= {4}
        model = Target(sorted_pair("llama").draft)
        per_token = model.pass_bytes(0, exit)
        assert all(s.draft_bytes == per_token * s.drafted for s in steps)


def test_bytes_count_every_head_on_the_way():
    model = Target(sorted_pair("llama").draft)
    head = model.pass_bytes(0, 0)
    cost = {
        layers: model.pass_bytes(0, layers, head=False) + (i + 1) * head for i, layers in enumerate(EXITS)
    }
    for step in run(thresholds=[0.2, 0.2]):
        assert step.draft_bytes == sum(cost[layers] for layers in step.exits)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"exits": [1, 3]}, r"exit.* 3\b.*\[1, 2, 4\]"),
        ({"only": 4}, r"only.*\b1\b.*\b3\b"),
        ({"thresholds": [0.5]}, "3 exits .*thresholds"),
    ],
)
def test_what_does_not_fit_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        SortedDraft(sorted_pair("llama"), **settings)


def test_a_draft_model_that_is_not_sorted_is_refused():
    pair = sorted_pair("llama", seed=1)
    plain = SimpleNamespace(**vars(pair))
    del plain.draft.config.exits
    with pytest.raises(UserError, match=r"method\.exits"):
        SortedDraft(plain)
