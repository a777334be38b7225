"""Methods around another drafter: what that one has learnt, and says of its rounds, is not lost."""

from __future__ import annotations

from functools import partial

import pytest

from methods.oracle import Oracle
from methods.s2d import SortedDraft
from methods.samd import SAMDecoding
from specbench.config.combinations import check_method
from specbench.config.spec import RunSpec
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.measure.metrics.metrics import stats_of
from specbench.system.errors import UserError
from tests.methods.test_stats import frame
from tests.support.conf import composed
from tests.support.decoding import PROMPT, random_pair

LEARNING = {"_target_": "methods.suffix.SuffixDecoding", "name": "suffix", "shape": "chain", "memory": "run"}


@pytest.mark.parametrize("make", [Oracle, partial(SAMDecoding, auxiliary="suffix")])
def test_what_the_inner_drafter_has_learnt_is_forgotten_and_restored(make):
    pair = random_pair("llama")
    outer = make(pair, LEARNING)
    engine = Engine(StagedModel(pair.target), outer, frozenset())

    def drafted() -> list[tuple[int, int]]:
        """Of each round, by the inner drafter alone."""
        steps = Engine(engine.target, outer.inner, frozenset()).answer(PROMPT, SamplingParams(30)).steps
        return [(step.drafted, step.accepted) for step in steps]

    outer.forget()
    empty = outer.snapshot()
    first = drafted()
    learnt = outer.snapshot()
    assert (again := drafted()) != first, "what was learnt must matter"
    outer.restore(empty)
    assert drafted() == first
    outer.restore(learnt)
    assert drafted() == again
    outer.forget()
    assert drafted() == first


def test_a_wrappers_summary_has_the_inner_drafters_numbers():
    cfg = composed("bench", "method=oracle", "method.cost_of=s2d")
    owners = RunSpec.of(cfg).owners
    assert owners == [Oracle, SortedDraft]
    rounds = frame([{"accepted": 1, "drafted": 2, "stats": {"exits": [2, 6]}}])
    assert stats_of(owners, rounds) == {"exit_shares": {"2": 0.5, "6": 0.5}}
    batched = composed("bench", "method=ragged", "drafter=oracle", "drafter.cost_of=s2d")
    assert RunSpec.of(batched).owners[1:] == [Oracle, SortedDraft]
    assert Drafter not in RunSpec.of(composed("bench", "method=samd")).owners


def test_a_memory_that_only_the_inner_drafter_has_is_refused():
    """A wrapper that says it forgets, around a drafter that does not: a table would tell the former."""
    settings = ["method=samd", "method.auxiliary=recycling"]
    check_method(composed("bench", *settings, "method.memory=run"))
    cfg = composed("bench", *settings)
    cfg.method.drafter = {**cfg.method.drafter, "memory": "run"}
    with pytest.raises(UserError, match=r"method\.memory=answer, but method\.drafter\.memory=run"):
        check_method(cfg)
    oracle = composed("bench", "method=oracle", "method.cost_of=suffix")
    oracle.method.drafter = {**oracle.method.drafter, "memory": "run", "shape": "chain"}
    check_method(oracle)  # it has no setting of its own to contradict
