"""How many ties rounding makes: a rule that is lossy by less than the noise makes more, and is found by that."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from specbench.config.spec import POOL, QUESTION
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import Request
from specbench.measure import certify, numeric_noise
from specbench.measure.certify import Certifier
from specbench.measure.metrics.metrics import ties
from specbench.measure.numeric_noise import shape_changes, shape_noise, tie_chance
from specbench.report import verdicts
from tests.support.samples import SUMMARY, changed


def turn(verdict: str | None, chance: float | None) -> dict:
    return {"equivalence": {"verdict": verdict}} | ({} if chance is None else {"tie_chance": chance})


def test_the_chance_of_a_tie_is_that_of_a_change_beyond_the_gap(monkeypatch):
    logits = torch.tensor([[3.0, 1.0, 0.0], [2.0, 1.9, 0.0], [1.0, 1.0, 0.0]])
    monkeypatch.setattr(numeric_noise, "forced_logits", lambda *_: logits)
    changes = torch.tensor([0.0, 0.05, 0.05, 0.2])
    # One change in four is beyond 0.1, three in four beyond 0; half of them swap the two.
    assert tie_chance(None, [1], [0, 0, 0], changes) == pytest.approx(1 - (1 - 1 / 8) * (1 - 3 / 8))


def test_a_run_of_single_questions_in_half_precision_works_out_its_ties(monkeypatch):
    def certifier(
        unit: str = QUESTION, dtype: torch.dtype = torch.bfloat16, width: int | None = None
    ) -> Certifier:
        target = SimpleNamespace(dtype=dtype, width=width)
        setup = SimpleNamespace(served=None, spec=SimpleNamespace(unit=unit), target=target)
        made = Certifier(setup, SimpleNamespace(decoding=SamplingParams(4)))
        changes = SimpleNamespace(values=torch.tensor([0.1, 0.3]))
        made.__dict__ |= {"_changes_of_shapes": changes, "_noise_of_shapes": 0.4}
        return made

    given = []
    monkeypatch.setattr(certify, "tie_chance", lambda *of: given.append(of[-1]) or 0.25)
    request = Request([1], SamplingParams(4))
    assert certifier().tie_chance(request, [5]) == 0.25
    # A change beyond half the noise may be a fault's, which must not explain its own ties.
    torch.testing.assert_close(given[0], torch.tensor([0.1, 0.2, 0.4]))
    for without in ({"unit": POOL}, {"dtype": torch.float32}, {"width": 8}):
        assert certifier(**without).tie_chance(request, [5]) is None


def test_changes_are_those_of_which_the_noise_is_the_largest(monkeypatch):
    def by_block(target, prompt, answer, block: int, begun: object = None) -> torch.Tensor:
        """A block of n tokens moves the first choice by n / 100."""
        logits = torch.tensor([[3.0, 1.0, 0.0]] * len(answer))
        return logits + torch.tensor([block / 100 if block > 1 else 0.0, 0.0, 0.0])

    monkeypatch.setattr(numeric_noise, "forced_logits", by_block)
    monkeypatch.setattr(numeric_noise, "begin", lambda *_: None)
    monkeypatch.setattr(numeric_noise, "model_change", lambda *_: (1.0, 0.0))
    target, samples = SimpleNamespace(width=None), [([1, 3], [5, 6, 7])]
    changes = shape_changes(target, samples, widest=12).values
    assert sorted(changes.tolist()) == pytest.approx(sorted([0.02, 0.04, 0.06, 0.08, 0.12] * 3), abs=1e-6)
    assert (
        shape_noise(target, samples, widest=12)
        == pytest.approx(2 * float(changes.max()))
        == pytest.approx(0.24)
    )


def test_ties_are_counted_beside_what_is_expected():
    records = [
        {"turns": [turn("tie", 0.1), turn("exact", 0.2)]},
        {"turns": [turn("tie", None), turn(None, 0.5)]},  # a later repeat, a sampled answer
    ]
    found = ties(records)
    assert found["count"] == 1 and found["expected"] == pytest.approx(0.3)
    assert found["p_value"] == pytest.approx(1 - 0.9 * 0.8)
    assert ties([{"turns": [turn("tie", None)]}]) is None
    all_tie = ties([{"turns": [turn("tie", 0.3)] * 14}])
    assert all_tie and all_tie["p_value"] == pytest.approx(0.3**14), "of 14 answers no more than 14 can tie"


def test_too_many_ties_are_a_violation():
    few = changed(SUMMARY, ties={"count": 3, "expected": 2.1, "p_value": 0.35})
    many = changed(SUMMARY, ties={"count": 16, "expected": 3.2, "p_value": 3e-7})
    assert not verdicts.violates(few) and verdicts.faults(few) == []
    assert verdicts.violates(many) and verdicts.faults(many)[0].startswith(
        "VIOLATION: 16 ties, where rounding explains 3.2"
    )
    assert verdicts.ties_line(few) == "3 ties, where rounding explains 2.1"
    assert verdicts.ties_line(SUMMARY) == ""
    counts = SUMMARY["equivalence"] | {"tie_margin": 0.123, "tie_noise": 0.47}
    widest = "widest tie 0.12 logits, where rounding explains 0.47"
    assert verdicts.ties_line(changed(SUMMARY, equivalence=counts)) == widest
    assert verdicts.ties_line(changed(few, equivalence=counts)).endswith(f"explains 2.1; {widest}")
