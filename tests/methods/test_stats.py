"""What methods make of the numbers that they keep of their rounds."""

from __future__ import annotations

import pytest

from methods.mirror_sd import MirrorSD
from methods.s2d import SortedDraft
from methods.swift import Swift
from specbench.measure.metrics.dataframes import steps_frame
from tests.support.synthetic import columns, generation, record, turn

OWN = (
    "exit_seconds",
    "hit",
    "overlapped_before_exit_seconds",
    "overlapped_behind_exit_seconds",
    "exposed_seconds",
    "idle_seconds",
)
OWN = (*OWN, "ipc_seconds")


def frame(rounds: list[dict]):
    method = generation([r["accepted"] for r in rounds]) | {"steps": columns(rounds)}
    return steps_frame([record(turns=[turn(method=method)])])


def found_overlap(rounds: list[dict]) -> dict | None:
    """Of rounds that say at once what is in `stats`."""
    nested = [
        {k: v for k, v in r.items() if k not in OWN}
        | {"stats": {k: v for k, v in r.items() if k in OWN} or None}
        for r in rounds
    ]
    return MirrorSD.summarise(frame(nested))["overlap"]


def test_exit_shares():
    """Also of a draft that the cap cut short, whose last token was verified for nobody."""
    rounds = [
        {"accepted": 1, "drafted": 3, "stats": {"exits": [2, 2, 6]}},
        {"accepted": 0, "drafted": 1, "stats": {"exits": [4, 6]}},
        {"accepted": 0, "drafted": 0},
    ]
    shares = SortedDraft.summarise(frame(rounds))
    assert shares == {"exit_shares": {"2": 0.5, "4": 0.25, "6": 0.25}}
    assert SortedDraft.describe(shares) == [
        "draft tokens left the draft model after: 2 layers 50%, 4 layers 25%, 6 layers 25%"
    ]
    assert SortedDraft.summarise(frame(rounds[2:])) == {"exit_shares": None}
    assert SortedDraft.describe({"exit_shares": {"2": 1.0}}) == SortedDraft.describe({}) == []


def test_the_last_of_a_search_is_the_one_after_the_most_sets():
    """Rounds are in the order of their questions, and a pool asks them in another one."""
    scored = [(0.5, 3), (0.9, 8), None, (0.7, 5)]
    rounds = [
        {"accepted": 0} | ({} if one is None else {"stats": dict(zip(("matchness", "sets_scored"), one))})
        for one in scored
    ]
    assert Swift.summarise(frame(rounds)) == {"matchness": 0.9, "sets_scored": 8.0}
    assert Swift.summarise(frame(rounds[2:3])) == {"matchness": None, "sets_scored": None}


def test_overlap_by_hand():
    """Three rounds: the first draft is nobody's guess, the second was guessed, the third was not."""
    common = {"exit_seconds": 0.004, "verify_seconds": 0.010, "other_seconds": 0.001, "idle_seconds": 0.002}
    common |= {"ipc_seconds": 0.0001, "overlapped_before_exit_seconds": 0.0}
    names = (
        "accepted",
        "hit",
        "overlapped_before_exit_seconds",
        "overlapped_behind_exit_seconds",
        "exposed_seconds",
        "draft_seconds",
    )
    rounds = [
        dict(zip(names, (2, None, 0.0, 0.0, 0.005, 0.005))),
        dict(zip(names, (4, True, 0.002, 0.007, 0.0, 0.001))),
        dict(zip(names, (0, False, 0.0, 0.005, 0.003, 0.003))),
    ]
    rounds = [common | r for r in rounds]
    last = {"accepted": 0}  # the last place belongs to the target alone
    found = found_overlap([*rounds, last])
    assert found["miss_rate"] == 0.5
    assert found["miss_rate_by_accepted"] == {"2": 0.0, "4": 1.0}
    assert found["hidden_share"] == pytest.approx(1 - 0.002 / 0.003)  # waited a round / a serial draft
    assert found["waited_seconds"] == pytest.approx(0.002)
    # max(exit, draft before it) + max(rest of the pass, draft beside it) + messages + half of a miss's draft + the rest
    assert found["model_seconds"] == pytest.approx(0.004 + 0.006 + 0.0001 + 0.5 * 0.003 + 0.001)
    for r in rounds[:3]:
        r |= {"overlapped_before_exit_seconds": 0.009, "overlapped_behind_exit_seconds": 0.008}
    found = found_overlap([*rounds, last])
    assert found["model_seconds"] == pytest.approx(0.009 + 0.008 + 0.0001 + 0.5 * 0.003 + 0.001)
    assert found["round_seconds"] == pytest.approx(0.002 + 0.010 + 0.001)
    assert found_overlap([last]) is None


def test_work_on_branches_that_nobody_took_hides_nothing():
    """The target waits 6 ms a round, a serial draft takes 10: 40 % hidden, however much is drafted meanwhile."""
    common = {"exit_seconds": 0.004, "verify_seconds": 0.010, "idle_seconds": 0.0, "ipc_seconds": 0.0}
    names = ("accepted", "hit", "exposed_seconds", "draft_seconds")
    kinds = ((2, None, 0.01, 0.01), (4, True, 0.0, 0.002), (0, False, 0.01, 0.010))

    def hidden(useless: float, kinds: tuple = kinds) -> float | None:
        work = {"overlapped_before_exit_seconds": useless, "overlapped_behind_exit_seconds": 0.005 + useless}
        rounds = [common | work | dict(zip(names, kind)) for kind in kinds]
        return found_overlap(rounds)["hidden_share"]

    assert hidden(0.0) == hidden(0.02) == pytest.approx(0.4)
    assert hidden(0.02, kinds[:1]) is None  # nothing was looked up
    assert hidden(0.02, kinds[:2]) is None  # nothing was missed: what a serial draft takes is not known
    longer = hidden(0.02, (kinds[0], (0, False, 0.01, 0.02)))
    assert longer == pytest.approx(-1.0), "the target waited longer than a serial draft takes"


def test_what_drafting_beside_the_target_gains_in_words():
    overlap = {
        "miss_rate": 0.125,
        "miss_rate_by_accepted": {"0": 0.125},
        "hidden_share": 0.83,
        "exit_seconds": 0.0042,
        "rest_seconds": 0.0061,
        "overlapped_before_exit_seconds": 0.0012,
        "overlapped_behind_exit_seconds": 0.0055,
        "exposed_hit_seconds": 0.0,
        "exposed_miss_seconds": 0.004,
        "waited_seconds": 0.0009,
        "idle_seconds": 0.001,
        "ipc_seconds": None,
        "model_seconds": None,
        "round_seconds": 0.0123,
    }
    (text,) = MirrorSD.describe({"overlap": overlap})
    assert "83% of the time of a serial draft (4.0 ms) hidden, miss rate 12%" in text
    assert (
        "a round took 12.3 ms: 4.2 to the exit and 6.1 after it (overlapped drafting 1.2 and 5.5), " in text
    )
    assert "0.9 waiting; the latency model says – ms" in text
