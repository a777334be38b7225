"""Families of models beyond the six architectures: transformers' own greedy answers, alone and in batches."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.scheduler import Scheduler
from specbench.decoding.state import Request
from specbench.models.devices import place_weights
from tests.support.batches import assert_lossless
from tests.support.decoding import STOP, checked, generate_with_transformers, random_pair
from tests.support.drafters import ModelChain, ModelTree
from tests.support.models import FAMILIES

DRAFTERS = {
    "none": lambda pair: Drafter(),
    "chain": lambda pair: ModelChain(pair.draft, 4),
    "tree": lambda pair: ModelTree(pair.draft),
}
LENGTHS_AND_CAPS = ((30, 9), (3, 14), (1, 5), (12, 7))  # prompts within and beyond the windows of 8


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name == "gemma2" else pytest.mark.slow) for name in FAMILIES],
)
def test_answers_are_transformers_own(family):
    """Without a draft, with chains and with trees; one sequence, and several that join and leave."""
    pair, rng = random_pair(family), random.Random(family)
    requests = [
        Request(
            [rng.randrange(3, pair.vocab_size) for _ in range(length)],
            SamplingParams(cap),
            0,
            frozenset([STOP]),
        )
        for length, cap in LENGTHS_AND_CAPS
    ]
    expected = [
        generate_with_transformers(pair.target, r.prompt, r.decoding.max_new_tokens) for r in requests
    ]
    target = StagedModel(pair.target)
    checked(target)
    for name, drafter in DRAFTERS.items():
        steps = []
        for size, some in ((1, 2), (3, 4)):
            engine = Engine(target, drafter(pair), frozenset(), Scheduler(size))
            steps += assert_lossless(engine, requests[:some], expected[:some])
        assert any(s.accepted for s in steps) == (name != "none")
        assert any(s.accepted < s.drafted for s in steps) == (name != "none")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_accepted_in_half_precision(family):
    model = copy.deepcopy(random_pair(family).target)
    place_weights(model, torch.device("cpu"), torch.bfloat16)
    found = checked(StagedModel(model))
    assert found.distance <= found.noise or found.noise == 0
