"""How waits for the device are found, which tests/test_conformance.py does with every method; and what piles up."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from methods.mirror_sd import MirrorSD
from methods.sps import SpeculativeSampling
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import Draft
from tests.support.decoding import random_pair
from tests.support.waits import watched

FAULTS = {
    "item": lambda batch: batch.tokens[0, 0].item(),
    "__bool__": lambda batch: bool(batch.tokens[0, 0] > 3),
    "__index__": lambda batch: range(batch.tokens[0, 0]),
    "__int__": lambda batch: int(batch.tokens[0, 0]),
    "cpu": lambda batch: batch.tokens.cpu(),
    "numpy": lambda batch: batch.tokens.numpy(),
    "nonzero": lambda batch: batch.tokens.nonzero(),
    "__getitem__": lambda batch: batch.tokens[batch.tokens > 3],
    "__getitem__ of a list": lambda batch: batch.tokens[[0]],
    "__getitem__ of a slice": lambda batch: batch.tokens[:, batch.tokens[0, 0] * 0 :],
    "__setitem__": lambda batch: batch.tokens.__setitem__([0], 3),
    "__setitem__ of a number": lambda batch: batch.tokens.__setitem__(batch.tokens[0, :1] * 0, 3),
    "tensor": lambda batch: torch.tensor([1, 2], device=batch.tokens.device),
    "aten._local_scalar_dense.default": lambda batch: torch.arange(batch.tokens[0, 0]),
    "aten._local_scalar_dense.default of an index": lambda batch: batch.tokens[batch.tokens[0, 0] * 0],
    "equal": lambda batch: torch.equal(batch.tokens, batch.tokens),
    "repeat_interleave": lambda batch: batch.tokens[0].repeat_interleave(batch.tokens[0] * 0, 0),
}


@pytest.mark.first_fast
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wait_is_found(monkeypatch, fault):
    class Faulty(Drafter):
        max_draft_tokens = 1

        def draft(self, batch) -> Draft:
            FAULTS[fault](batch)
            return Draft(batch.last_tokens(1))

    engine = Engine(StagedModel(random_pair("llama").target), Faulty(), frozenset())
    with watched(monkeypatch) as waits:
        engine.answer([5, 7, 9], SamplingParams(4))
    named = fault.partition(" of ")[0] + " at "
    assert any(wait.startswith(named) for found in waits.found["round"] for wait in found), waits.found


@pytest.mark.slow
@pytest.mark.parametrize("make", [SpeculativeSampling, lambda pair: MirrorSD(pair, 4, placement="inline")])
def test_no_draft_is_kept_beyond_its_round(make):
    """Probabilities of 128k words and states would pile up until the answer ends."""
    pair = random_pair("llama")
    drafter = make(pair)
    kept: list[weakref.ref] = []
    alive: list[int] = []
    inner = drafter.draft

    def draft(batch) -> Draft:
        gc.collect()
        alive.append(sum(one() is not None for one in kept))
        made = inner(batch)
        kept.extend(weakref.ref(part) for part in (made.tokens, made.probs) if part is not None)
        return made

    drafter.draft = draft
    Engine(StagedModel(pair.target), drafter, frozenset()).answer([3, 9, 27], SamplingParams(12, 1.0))
    assert len(alive) > 3 and max(alive) <= 1
