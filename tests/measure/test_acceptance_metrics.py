"""The numbers that rounds have without a baseline, by hand and as identities."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.measure.metrics.acceptance import acceptance_length, mbsu
from specbench.measure.metrics.dataframes import steps_frame
from specbench.measure.metrics.summary import summarise
from tests.support.synthetic import (
    CONFIG,
    FACTS,
    columns,
    generation,
    overall,
    questions,
    record,
    turn,
)


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 8),
    st.integers(1, 400),
    st.lists(st.floats(0, 1), min_size=1, max_size=10),
    st.integers(1, 16),
    st.sampled_from([1, 10**6, 10**8]),  # kilobytes, and models of 1 GB and 100 GB
)
def test_mbsu_of_a_fixed_draft_length(gamma, draft_bytes, shares, sequences, scale):
    """tau / (1 + c * gamma), c = draft bytes / target bytes, in a batch, too, and for any size of model."""
    whole_pass = FACTS["target_pass_bytes"] * scale
    rounds = [
        {
            "accepted": int(share * gamma),
            "drafted": gamma,
            "draft_bytes": gamma * draft_bytes * scale,
            "target_bytes": whole_pass,
            "sequences": sequences,
        }
        for share in shares
    ]
    method = generation() | {"steps": columns(rounds)}
    found = steps_frame([record(turns=[turn(method=method)])])
    c = draft_bytes / FACTS["target_pass_bytes"]
    tau = acceptance_length(found)
    assert mbsu(found, whole_pass) == pytest.approx(tau / (1 + c * gamma))


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
    assert found["judged_by_position"] == [2, 2, 1, 0, 0]
    assert found["accepted_per_verified"] == pytest.approx(
        (2 + 3) / (2 * (5 + 1))
    )  # no bonus token after the stop


def test_acceptance_as_other_tools_count_it():
    """A long answer of length 2 and a short one of length 4: pooled 2.4, by answer 3."""
    long, short = (columns([{"accepted": a}] * n) for a, n in ((1, 4), (3, 1)))
    turns = [turn(i, method=generation() | {"steps": steps}) for i, steps in enumerate((long, short))]
    found = overall([record(turns=turns)])
    assert found["acceptance_length"] == pytest.approx(2.4)
    assert found["acceptance_length_by_answer"] == pytest.approx(3.0)
    assert found["accepted_per_verified"] == pytest.approx((7 + 5) / (25 + 5))


def test_acceptance_over_the_answer():
    """The prefill gives the first token: the second round begins with five, the last one with 39."""
    rounds = columns([{"accepted": 3}, {"accepted": 33, "drafted": 40, "depth": 40}, {"accepted": 0}])
    found = overall([record(turns=[turn(method=generation() | {"steps": rounds})])])
    assert (found["acceptance_by_place"], found["rounds_by_place"]) == ([19.0, 1.0], [2, 1])
    # After a prompt of ten tokens, one stretch holds them all.
    assert (found["acceptance_by_context"], found["rounds_by_context"]) == ([13.0], [3])
    assert sum(found["rounds_by_place"]) == 3
    # Each arm has a context of its own: in a second turn its own first answer is part of the prompt.
    longer = generation() | {"steps": rounds, "prompt_tokens": 200}
    found = overall([record(turns=[turn(method=longer)])])
    assert found["rounds_by_context"] == [0, 3]


def test_a_tree_is_counted_along_its_longest_path():
    rounds = columns([{"accepted": 2, "drafted": 12, "depth": 3}, {"accepted": 0, "drafted": 12, "depth": 3}])
    found = overall([record(turns=[turn(method=generation() | {"steps": rounds})])])
    assert found["acceptance_rate"] == pytest.approx(2 / 24)
    assert found["acceptance_by_position"] == [0.5, 0.5, 0.0]


@pytest.mark.parametrize("told", [None, 3])
def test_where_drafts_are_not_counted_there_are_lengths_and_no_rates(told):
    """Also where some of them are."""
    unknown = {"drafted": None, "draft_bytes": None}
    rounds = columns([{"accepted": 2} | unknown | {"drafted": told}, {"accepted": 0} | unknown])
    found = overall([record(turns=[turn(method=generation() | {"steps": rounds})])])
    assert found["acceptance_length"] == 2.0
    assert found["acceptance_rate"] is None and found["accepted_per_verified"] is None
    assert found["acceptance_by_position"] == found["judged_by_position"] == [] and found["mbsu"] is None


def test_a_drafter_that_drafts_otherwise_in_a_repeat_is_noticed():
    """In one process: another one may round otherwise, and so may batches, draws, and what hangs on times."""

    def measured(*accepted, processes=(0, 0), **changes):
        records = [
            record(1, turns=[turn(method=generation(rounds))]) | {"repeat": i, "process": process}
            for i, (rounds, process) in enumerate(zip(accepted, processes))
        ]
        same = [record(2, turns=[turn(method=generation([3, 0]))]) | {"repeat": i} for i in range(2)]
        config = CONFIG | {"decoding": CONFIG["decoding"] | changes}
        return summarise([*records, *same], FACTS, config)["changed_drafts"]

    assert measured([2, 1], [2, 1]) == 0
    assert measured([2, 1], [1, 2]) == 1
    assert measured([2, 1], [1, 2], processes=(0, 1)) == 0
    assert measured([2, 1], [1, 2], temperature=0.7) is None
    assert measured([2, 1], [1, 2], draft_length="goodput") is None
