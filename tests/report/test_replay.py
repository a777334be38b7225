"""Replay of draft lengths: against lengths that were played for real, over guesses that are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from specbench.measure.draft_length import Adaptive, Constant, listed_costs
from specbench.report import replay
from specbench.report.replay import (
    LEAST_ROUNDS,
    Recorded,
    groups,
    main,
    mean_costs,
    play,
    replay_table,
    rounds_of,
)
from specbench.report.runs import Run
from tests.support.messages import shown
from tests.support.samples import SUMMARY, changed, runs_of
from tests.support.synthetic import generation, record, turn

TOKENS, ANSWERS = 300, 30
BRIEF = 80  # tokens of an answer where no figure must be precise
COSTS = {0: 1.0, 1: 1.3, 2: 1.5, 4: 1.9, 6: 2.4}  # of a round by draft tokens


def guesses(seed: int = 0) -> list[np.ndarray]:
    """Easy and hard stretches of answers: which places a drafter guesses."""
    rng = np.random.default_rng(seed)
    easy = rng.random((ANSWERS, TOKENS)).cumsum(1) % 9 < 6
    return [*(rng.random((ANSWERS, TOKENS)) < np.where(easy, 0.9, 0.4)).astype(float)]


def short() -> list[np.ndarray]:
    """The beginnings of as many answers."""
    return [right[:BRIEF] for right in guesses()]


def endless(right: np.ndarray) -> np.ndarray:
    """No draft of an answer stops by itself."""
    return np.full(len(right), len(right))


def stopping(right: np.ndarray, seed: int = 0) -> np.ndarray:
    """Each draft stops by itself in front of the next of some places."""
    n = len(right)
    stops = np.append(np.flatnonzero(np.random.default_rng(seed).random(n) < 0.2), n)
    return stops[np.searchsorted(stops, np.arange(n))]


def played(right: np.ndarray, ends: np.ndarray, length: int) -> list[dict]:
    """The rounds that an engine would record."""
    return [
        {
            "drafted": drafted,
            "accepted": accepted,
            "draft_seconds": 0.0,
            "verify_seconds": 0.01 * float(np.interp(drafted, [*COSTS], [*COSTS.values()])),
            "other_seconds": 0.0,
        }
        for drafted, accepted in rounds_of(right, ends, Constant(length))
    ]


def run(length: int, *, of: list[np.ndarray] | None = None, ending=endless, **changes) -> Run:
    """A run whose drafter guesses these places, with drafts of one length; the baseline takes 10 ms a token."""
    from tests.support import synthetic

    records, passes, ours = [], 0, 0.0
    some = guesses() if of is None else of
    for number, right in enumerate(some):
        rounds = played(right, ending(right), length)
        seconds = sum(r["verify_seconds"] for r in rounds)
        passes, ours = passes + len(rounds), ours + 0.1 + seconds
        method = generation(tokens=1 + len(right), seconds=0.1 + seconds)
        method["steps"] = synthetic.columns([r | {"emitted": r["accepted"] + 1} for r in rounds])
        plain = generation([0] * len(right), seconds=0.1 + 0.01 * len(right), drafted=0)
        times = {"draft_seconds": 0.0, "verify_seconds": 0.01, "other_seconds": 0.0}
        plain["steps"] |= {name: [value] * len(right) for name, value in times.items()}
        records.append(record(number, turns=[turn(baseline=plain, method=method)]))
    tokens = sum(map(len, some))
    speedup = (0.1 * len(some) + 0.01 * tokens) / ours
    summary = changed(
        SUMMARY,
        **{"method": "sps", "settings": {"max_draft_tokens": length}} | changes,
        max_new_tokens=1 + max(map(len, some)),
        overall__acceptance_length=tokens / passes,
        overall__speedup=speedup,
    )
    made = runs_of(**{f"run_{length}": summary})[0]
    made.__dict__["records"] = records
    return made


def brief(length: int, **changes) -> Run:
    """A run of two answers, whose figures do not count."""
    return run(length, of=guesses()[:2], **changes)


@pytest.fixture
def few_draws(monkeypatch) -> None:
    """Places that were not guessed are drawn twice: what is not about figures needs no more."""
    monkeypatch.setattr(replay, "DRAWS", 2)


def test_rounds_by_hand():
    right = np.array([1, 1, 0, 1, 1, 1, 1, 0, 1.0])
    ends = endless(right)
    assert rounds_of(right, ends, Constant(2)) == [(2, 2), (2, 2), (2, 1), (0, 0)]
    assert rounds_of(right, ends, Constant(5)) == [(5, 2), (5, 4), (0, 0)]
    assert rounds_of(np.array([]), np.array([]), Constant(3)) == []
    # An answer that ends by itself is drafted for beyond its end, and the last token may be accepted with the others.
    assert rounds_of(right, ends, Constant(5), limited=False) == [(5, 2), (5, 4), (5, 1)]
    assert rounds_of(np.ones(4), endless(np.ones(4)), Constant(8), limited=False) == [(8, 4)]
    # A draft stops in front of places 1 and 4, and none is made there.
    ends = np.array([1, 1, 4, 4, 4, 9, 9, 9, 9])
    assert rounds_of(right, ends, Constant(5)) == [(1, 1), (2, 0), (1, 1), (3, 2), (0, 0)]


def test_a_run_is_replayed_to_what_it_had():
    recorded = Recorded(run(6))
    again = play(recorded, listed_costs(mean_costs([recorded])), Constant(6))
    assert again.length == pytest.approx(recorded.measured.length, rel=0.005)
    assert again.speedup == pytest.approx(recorded.measured.speedup, rel=0.01)


def test_drafts_that_the_context_cut_did_not_stop_by_themselves():
    """One answer has room for ten tokens, the others for 81; its last drafts are cut to what is left."""
    some = [*short()[:2], np.ones(9)]
    assert Recorded(run(4, of=some)).answers[2].ends.tolist() == [9] * 9

    def at_the_fourth(right: np.ndarray) -> np.ndarray:
        return np.where(np.arange(len(right)) <= 3, 3, len(right))

    assert Recorded(run(4, of=some, ending=at_the_fourth)).answers[2].ends.tolist() == [3] * 4 + [9] * 5


def test_an_answer_of_one_token_counts_with_its_prefill():
    """It has no round, and as much prefill in both arms."""
    brief = run(4, of=[*guesses()[:4], *[np.empty(0)] * 4])
    recorded = Recorded(brief)
    assert recorded.measured.speedup < run(4, of=guesses()[:4]).summary["overall"]["speedup"]
    again = play(recorded, listed_costs(mean_costs([recorded])), Constant(4))
    assert again.speedup == pytest.approx(recorded.measured.speedup, rel=0.01)


def test_a_replayed_speedup_is_against_the_baseline_that_the_run_is_quoted_against():
    slow, fast = run(6, of=short()), run(6, of=short(), baseline__quoted_against="hf_generate")
    for one in fast.records:
        arms = one["turns"][0]["arms"]
        [plain] = arms["baseline"]
        arms["hf_generate"] = [plain | {"seconds": plain["seconds"] / 1.3}]
    costs = listed_costs(mean_costs([Recorded(slow)]))
    ours, theirs = (play(Recorded(one), costs, Constant(4)) for one in (slow, fast))
    assert theirs.speedup == pytest.approx(ours.speedup / 1.3) and theirs.length == ours.length


def test_a_replayed_speedup_is_over_as_many_tokens_as_the_baseline_gave():
    """Half as long a baseline takes half the decoding of both, as it does in a measured speedup."""
    costs, tokens = listed_costs(mean_costs([Recorded(run(6, of=short()))])), BRIEF
    full, cut = run(6, of=short()), run(6, of=short())
    for one in cut.records:
        [plain] = one["turns"][0]["arms"]["baseline"]
        plain |= {"tokens": plain["tokens"][: 1 + tokens // 2], "seconds": 0.1 + 0.01 * tokens / 2}
    decoding = (0.1 + 0.01 * tokens) / play(Recorded(full), costs, Constant(4)).speedup - 0.1
    expected = (0.1 + 0.01 * tokens / 2) / (0.1 + decoding / 2)
    assert play(Recorded(cut), costs, Constant(4)).speedup == pytest.approx(expected)


@pytest.mark.first_fast
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_shorter_drafts_are_what_they_would_have_been(length):
    """Within 2 % of the length and 5 % of the speedup that drafts of that length really have."""
    longest, really = Recorded(run(6)), Recorded(run(length)).measured
    costs = mean_costs([longest, Recorded(run(2)), Recorded(run(4))])
    replayed = play(longest, listed_costs(costs), Constant(length))
    assert replayed.length == pytest.approx(really.length, rel=0.02)
    assert replayed.speedup == pytest.approx(really.speedup, rel=0.05)


@pytest.mark.first_fast
@pytest.mark.parametrize("length", [1, 2, 4, 6])
def test_a_drafter_that_stops_by_itself_stops_in_a_replay(length):
    """As a look-up does without a match: as many rounds are played without a draft as there were."""
    recorded, really = (Recorded(run(k, ending=stopping)) for k in (6, length))
    assert (really._rounds["drafted"] == 0).mean() > 0.15
    replayed = play(recorded, None, Constant(length))
    assert replayed.length == pytest.approx(really.measured.length, rel=0.02)


def test_what_was_never_guessed_is_drawn_by_what_follows_whole_drafts():
    """Where a drafter is right everywhere, every place is; where half of them are, half of the unknown ones."""
    always = Recorded(run(3, of=[np.ones(48)] * 4))
    assert always.after_full == 1.0
    assert np.isnan(always.answers[0].right).sum() == 12  # one of four places
    assert play(always, listed_costs(mean_costs([always])), Constant(1)).length == pytest.approx(2.0)
    rng = np.random.default_rng(1)
    half = Recorded(run(1, of=[*(rng.random((40, 200)) < 0.5).astype(float)]))
    assert half.after_full == pytest.approx(0.5, abs=0.03)


def test_an_oracle_is_as_fast_as_any_length_and_emits_as_much_as_the_longest():
    recorded = Recorded(run(6, of=short()))
    costs = {int(k): v for k, v in COSTS.items()}
    best = play(recorded, listed_costs(costs), Constant(6), oracle=True)
    lengths = [play(recorded, listed_costs(costs), Constant(k)) for k in range(1, 7)]
    assert best.length == pytest.approx(lengths[-1].length)
    assert best.speedup > max(one.speedup for one in lengths)
    assert play(recorded, listed_costs(costs), Adaptive(6)).length < best.length


def test_costs_are_in_rounds_of_the_baseline():
    recorded = Recorded(run(4))
    assert mean_costs([recorded]) == {0: 1.0, 4: pytest.approx(COSTS[4])}
    undrafted = recorded._rounds.copy()
    undrafted["drafted"] = 0
    recorded._rounds = pd.concat([recorded._rounds, undrafted])
    looked_up = mean_costs([recorded])[0]
    assert looked_up == pytest.approx(COSTS[4], rel=0.02), "a look-up that finds nothing costs something, too"
    few = Recorded(run(4, of=[np.ones(4 * (LEAST_ROUNDS - 2))]))
    assert mean_costs([few]) == {0: 1.0}  # too few rounds for a mean
    assert play(few, listed_costs(mean_costs([few])), Constant(2)).speedup is None


def test_every_round_counts_alike_whichever_run_it_is_of():
    many, few = Recorded(run(2)), Recorded(run(2, of=guesses()[:1]))
    few._rounds["verify_seconds"] *= 3  # in a slow phase of the machine
    sizes = [(one._rounds["drafted"] == 2).sum() for one in (many, few)]
    expected = COSTS[2] * (sizes[0] + 3 * sizes[1]) / sum(sizes)
    assert mean_costs([many, few])[2] == pytest.approx(expected)


def test_a_rule_is_played_with_the_costs_that_its_run_had(few_draws):
    costly = run(4, of=short(), draft_length="goodput", round_costs=[1.0, 9.0])
    recorded = [Recorded(run(4, of=short())), Recorded(costly)]
    table, _ = replay_table(recorded, "sps")
    rows = {line.split()[0]: line.split() for line in shown(table, 120).splitlines()}
    assert rows["goodput"][1] == rows["1"][1] != rows["4"][1]


def test_the_table_sets_what_was_measured_beside(few_draws):
    table, settings = replay_table([Recorded(run(length, of=short())) for length in (4, 2)], "sps")
    table = shown(table, 120)
    rows = {line.split()[0]: line.split() for line in table.splitlines() if line[:1].isdigit()}
    assert [*rows] == ["1", "2", "3", "4"]
    assert rows["1"][2] == rows["3"][2] == "–" != rows["2"][2]
    assert (
        "adaptive" in table
        and "goodput" in table
        and "oracle" in table
        and "by draft tokens: 1: 1.30, 2: 1.50, 4: 1.90" in table
    )
    assert settings == "decoding.draft_length=goodput decoding.round_costs=[1.00,1.30,1.50,1.70,1.90]"


def test_a_drafter_of_one_length_is_replayed_without_rules(few_draws):
    """Such as `mirror_sd`, which a run refuses to combine with one."""
    recorded = [Recorded(run(length, of=short(), any_length=False)) for length in (4, 2)]
    table, settings = replay_table(recorded, "mirror_sd")
    first = [line.split()[0] for line in shown(table, 120).splitlines() if line.strip()]
    assert {"1", "4", "oracle"} <= {*first} and not {"adaptive", "goodput"} & {*first}
    assert settings == ""


def test_a_run_of_a_rule_stands_beside_its_replay(few_draws):
    """And gives no lengths to replay where another run has constant ones."""
    rules = [(4, {}), (4, {"draft_length": "adaptive"}), (2, {"draft_length": "goodput"})]
    table, _ = replay_table([Recorded(run(length, of=short(), **rule)) for length, rule in rules], "sps")
    rows = {line.split()[0]: line.split() for line in shown(table, 120).splitlines()}
    assert [key for key in rows if key.isdigit()] == ["1", "2", "3", "4"]
    # That of the other had shorter drafts than are replayed.
    assert rows["adaptive"][2] != "–" == rows["goodput"][2]


def test_of_equal_runs_the_last_is_replayed_and_stands_beside_it(few_draws):
    runs = [run(4, of=short()), run(4, of=short())]
    object.__setattr__(runs[1], "folder", Path("newer"))  # of a frozen class, with its records
    table, _ = replay_table([Recorded(one) for one in runs], "sps")
    assert "in newer" in " ".join(shown(table, 120).split())


def test_costs_beyond_the_longest_drafts_that_were_measured_go_on_rising():
    recorded = Recorded(run(6, of=short()))
    replayed = play(recorded, [1.0, 1.3, 1.5], Constant(6))
    exactly = play(recorded, [1.0, 1.3, 1.5, 1.7, 1.9, 2.1, 2.3], Constant(6))
    assert replayed == exactly != play(recorded, [1.0, 1.3, 1.5, 1.5], Constant(6))


def test_only_chains_of_single_questions_without_chance_are_replayed():
    tree, nothing = brief(4), brief(0)
    for one in tree.records:
        one["turns"][0]["arms"]["method"][0]["steps"]["depth"][3] = 2  # of four nodes
    failed = brief(4, overall__acceptance_rate=None)
    others = [
        brief(4, unit="pool"),
        brief(4, temperature=0.7),
        tree,
        nothing,
        failed,
        brief(4, engine={"name": "x"}),
    ]
    unset = brief(3, settings={"max_draft_tokens": None})  # as many as a drafting model was trained to guess
    found = groups(
        [brief(4), *others, brief(2), unset, brief(2, settings={"max_draft_tokens": 2, "vocab_size": 9})]
    )
    assert [[one.longest for one in group] for group in found.values()] == [[4, 2, 3], [2]]
    first, second = found
    assert first.startswith("sps: pair=tiny") and "vocab_size=9" in second


def test_runs_of_other_draft_models_are_not_played_together():
    large = [brief(length, draft="large") for length in (4, 2)]
    found = groups([brief(4, draft="small"), *large])
    assert [[one.longest for one in group] for group in found.values()] == [[4], [4, 2]]
    assert "draft=large" in list(found)[1]


def test_runs_at_one_width_are_not_played_with_others():
    found = groups([brief(4), brief(2, verify_width=16), brief(2)])
    assert [[one.longest for one in group] for group in found.values()] == [[4, 2], [2]]
    assert "verify_width=16" in list(found)[1]


def test_what_is_wrong_with_a_run_is_said_before_its_replay(monkeypatch, capsys, few_draws):
    every = [brief(4, equivalence__violation=1), brief(2)]
    monkeypatch.setattr(replay, "runs_of_command", lambda *_, **__: every)
    assert main() == 0
    assert capsys.readouterr().out.startswith("run_4: VIOLATION")


def test_without_such_runs_it_says_what_to_run(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("sys.argv", ["specbench replay", str(tmp_path)])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2 and "no finished run" in capfd.readouterr().err
