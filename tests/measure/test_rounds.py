"""The numbers that rounds have without a baseline, by hand and as identities."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.measure.frames import steps_frame
from specbench.measure.rounds import acceptance_length, mbsu
from tests.support.synthetic import (
    BESIDE,
    FACTS,
    answered,
    columns,
    generation,
    overall,
    questions,
    record,
    turn,
)


def test_exit_shares():
    rounds = [
        {"accepted": 1, "exits": [2, 2, 6]},
        {"accepted": 0, "exits": [4]},
        {"accepted": 0, "exits": []},
    ]
    method = generation([1, 0, 0]) | {"steps": columns(rounds)}
    shares = overall([record(turns=[turn(method=method)])])["exit_shares"]
    assert shares == {"2": 0.5, "4": 0.25, "6": 0.25}
    assert overall([record()])["exit_shares"] is None


def test_overlap_by_hand():
    """Three rounds: the first draft is nobody's guess, the second was guessed, the third was not."""
    common = {"exit_seconds": 0.004, "verify_seconds": 0.010, "other_seconds": 0.001, "idle_seconds": 0.002}
    common |= {"handover_seconds": 0.0001, "early_seconds": 0.0}
    names = ("accepted", "hit", "early_seconds", "beside_seconds", "after_seconds", "draft_seconds")
    rounds = [
        dict(zip(names, (2, None, 0.0, 0.0, 0.005, 0.005))),
        dict(zip(names, (4, True, 0.002, 0.007, 0.0, 0.001))),
        dict(zip(names, (0, False, 0.0, 0.005, 0.003, 0.003))),
        {"accepted": 0} | dict.fromkeys(BESIDE),  # the last place belongs to the target alone
    ]
    rounds = [common | r for r in rounds]
    method = generation([2, 4, 0, 0]) | {"steps": columns(rounds)}
    found = overall([record(turns=[turn(method=method)])])["overlap"]
    assert found["fall_back_rate"] == 0.5
    assert found["fall_back_rate_by_accepted"] == {"2": 0.0, "4": 1.0}
    assert found["hidden_share"] == pytest.approx(1 - 0.002 / 0.003)  # waited a round / a serial draft
    assert found["waited_seconds"] == pytest.approx(0.002)
    # max(exit, draft before it) + max(rest of the pass, draft beside it) + handover + half of a miss's draft + the rest
    assert found["model_seconds"] == pytest.approx(0.004 + 0.006 + 0.0001 + 0.5 * 0.003 + 0.001)
    for r in rounds[:3]:
        r |= {"early_seconds": 0.009, "beside_seconds": 0.008}
    method = generation([2, 4, 0, 0]) | {"steps": columns(rounds)}
    found = overall([record(turns=[turn(method=method)])])["overlap"]
    assert found["model_seconds"] == pytest.approx(0.009 + 0.008 + 0.0001 + 0.5 * 0.003 + 0.001)
    assert found["round_seconds"] == pytest.approx(0.002 + 0.010 + 0.001)
    assert overall([answered()])["overlap"] is None


def test_work_on_branches_that_nobody_took_hides_nothing():
    """The target waits 6 ms a round, a serial draft takes 10: 40 % hidden, however much is drafted meanwhile."""
    common = {"exit_seconds": 0.004, "verify_seconds": 0.010, "idle_seconds": 0.0, "handover_seconds": 0.0}
    names = ("accepted", "hit", "after_seconds", "draft_seconds")
    kinds = ((2, None, 0.01, 0.01), (4, True, 0.0, 0.002), (0, False, 0.01, 0.010))

    def hidden(useless: float, kinds: tuple = kinds) -> float | None:
        work = {"early_seconds": useless, "beside_seconds": 0.005 + useless}
        rounds = [common | work | dict(zip(names, kind)) for kind in kinds]
        method = generation([r["accepted"] for r in rounds]) | {"steps": columns(rounds)}
        return overall([record(turns=[turn(method=method)])])["overlap"]["hidden_share"]

    assert hidden(0.0) == hidden(0.02) == pytest.approx(0.4)
    assert hidden(0.02, kinds[:1]) is None  # nothing was looked up
    assert hidden(0.02, kinds[:2]) is None  # nothing was missed: what a serial draft takes is not known
    assert hidden(0.02, (kinds[0], (0, False, 0.01, 0.02))) == 0.0


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 8), st.integers(1, 400), st.lists(st.floats(0, 1), min_size=1, max_size=10))
def test_mbsu_of_a_fixed_draft_length(gamma, draft_bytes, shares):
    """tau / (1 + c * gamma), c = draft bytes / target bytes."""
    rounds = [
        {"accepted": int(share * gamma), "drafted": gamma, "draft_bytes": gamma * draft_bytes}
        for share in shares
    ]
    method = generation() | {"steps": columns(rounds)}
    found = steps_frame([record(turns=[turn(method=method)])])
    c = draft_bytes / FACTS["target_pass_bytes"]
    tau = acceptance_length(found)
    assert mbsu(found, FACTS["target_pass_bytes"]) == pytest.approx(tau / (1 + c * gamma))


@settings(deadline=None, max_examples=15)
@given(questions())
def test_acceptance_identities(records):
    found = overall(records)
    rounds = sum(len(t["arms"]["method"][0]["steps"]["emitted"]) for r in records for t in r["turns"])
    prefills = sum(len(r["turns"]) for r in records)
    assert found["acceptance_length"] * rounds == pytest.approx(found["tokens"] - prefills)
    assert found["acceptance_length"] == pytest.approx(
        1 + 5 * found["acceptance_rate"]
    )  # a chain of 5, no stop
    assert sum(found["acceptance_by_position"]) == pytest.approx(5 * found["acceptance_rate"])
    conditional = [c for c in found["acceptance_by_position_conditional"] if c is not None]
    for position, share in enumerate(found["acceptance_by_position"]):
        assert share == pytest.approx(math.prod(conditional[: position + 1]))
    total = (
        found["prefill_seconds"] + found["draft_seconds"] + found["verify_seconds"] + found["other_seconds"]
    )
    assert total == pytest.approx(found["seconds"])


def test_a_stop_token_in_the_draft_is_no_rejection_of_what_follows():
    rounds = columns([{"accepted": 2, "emitted": 2}, {"accepted": 2}])
    found = overall([record(turns=[turn(method=generation() | {"steps": rounds})])])
    assert found["acceptance_by_position"] == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert found["acceptance_by_position_conditional"] == [1.0, 1.0, 0.0, None, None]


def test_a_tree_is_counted_along_its_longest_path():
    rounds = columns([{"accepted": 2, "drafted": 12, "depth": 3}, {"accepted": 0, "drafted": 12, "depth": 3}])
    found = overall([record(turns=[turn(method=generation() | {"steps": rounds})])])
    assert found["acceptance_rate"] == pytest.approx(2 / 24)
    assert found["acceptance_by_position"] == [0.5, 0.5, 0.0]
