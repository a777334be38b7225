"""Where speculation pays off: worked out from round costs, and drawn where it was worked out."""

from __future__ import annotations

import math

import pytest

from specbench.report import plots, sweep_plots
from specbench.report.break_even import break_evens, crossing, expected_length
from tests.support.samples import SUMMARY, batched, changed, faster, runs_of

ACCEPTANCES = (0.2, 0.5, 0.8)


def costing(cost: float, length: int, size: int, acceptance: float, noise: float = 0.1, **more) -> dict:
    """A run whose every round costs as much as `cost` plain steps, with an interval of a factor to each side."""
    speedup = expected_length(acceptance, length) / cost
    ends = {"speedup_low": speedup / (1 + noise), "speedup_high": speedup * (1 + noise)}
    run = batched("ragged", "oracle", size, speedup=speedup, **ends)
    settings = {"acceptance": acceptance, "max_draft_tokens": length, "cost_of": "sps", "seed": 0} | more
    return run | {"settings": {"token_budget": None} | {f"drafter.{k}": v for k, v in settings.items()}}


def curve(cost: float, length: int = 4, size: int = 1, **more) -> list[dict]:
    return [costing(cost, length, size, acceptance, **more) for acceptance in ACCEPTANCES]


def test_a_drafter_that_supplies_the_cost_of_single_answers_has_settings_of_its_own():
    """Their group is then that of this drafter, not of the one in a batch."""
    runs = []
    for one in curve(1.75):
        settings = {key.removeprefix("drafter."): value for key, value in one["settings"].items()}
        settings |= {"drafter.layer": 2}
        runs.append(changed(SUMMARY, method="oracle", settings=settings, overall=one["overall"]))
    [(name, found)] = break_evens(runs).items()
    assert "sps" in name and [*found] == [(4, 1)]


def test_expected_length_by_hand():
    assert expected_length(0.5, 2) == 1.75 and expected_length(0.0, 5) == 1 and expected_length(1.0, 5) == 6


@pytest.mark.parametrize(("cost", "acceptance"), [(1.75, 0.5), (1.5, 0.366025), (2.2, 0.704159)])
def test_with_a_round_of_one_cost_the_crossing_is_exact(cost, acceptance):
    """1 + a + a^2 = cost, solved by hand; however far apart the points are."""
    for points in (ACCEPTANCES, (0.0, 1.0), (0.3, 0.75)):
        speedups = {a: expected_length(a, 2) / cost for a in points}
        assert crossing(speedups, 2) == pytest.approx(acceptance, abs=1e-5)


def test_where_all_or_none_of_the_measured_pays_off():
    assert crossing({0.2: 1.0, 0.8: 1.5}, 4) == -math.inf
    assert crossing({0.2: 0.5, 0.8: 0.99}, 4) == math.inf


def test_from_where_on_it_stays_above_one():
    """A speedup that noise lifted above 1 once is not the place."""
    points = {0.2: 1.01, 0.4: 0.9, 0.6: 1.1, 0.8: 1.5}
    assert 0.4 < crossing(points, 4) < 0.6


def test_a_curve_over_length_and_batch():
    summaries = [*curve(1.6, 4, 1), *curve(2.0, 4, 8), *curve(3.0, 8, 8)]
    (curves,) = break_evens(summaries).items()
    name, found = curves
    assert name == "ragged + oracle at the cost of sps, tiny" and list(found) == [(4, 1), (4, 8), (8, 8)]
    for (length, size), cost in {(4, 1): 1.6, (4, 8): 2.0, (8, 8): 3.0}.items():
        one = found[length, size]
        assert expected_length(one.acceptance, length) == pytest.approx(cost)
        assert expected_length(one.low, length) == pytest.approx(cost / 1.1)  # it is faster: less is enough
        assert expected_length(one.high, length) == pytest.approx(cost * 1.1)
        assert one.measured == (0.2, 0.8)


def test_curves_of_several_pairs_are_named_by_the_pair_alone():
    other = [changed(s, pair="other", target="models/other") for s in curve(1.8)]
    names = [f"ragged + oracle at the cost of sps, {pair}" for pair in ("tiny", "other")]
    assert list(break_evens([*curve(1.6), *other])) == names


def test_what_differs_otherwise_is_a_curve_of_its_own():
    summaries = [
        *curve(1.6), *curve(1.7, cost_of="none"), *(changed(s, pair="other") for s in curve(1.8)),
        *(changed(s, settings__token_budget=20) for s in curve(1.9)),
    ]  # fmt: skip
    assert len(break_evens(summaries)) == 4
    first, *others = curve(1.6)
    named = [
        first | {"settings_source": "published"},
        *(one | {"settings_source": "changed"} for one in others),
    ]
    assert len(break_evens(named)) == 1, "whatever the settings are called that a curve is drawn over"
    again = break_evens([*curve(1.6), *curve(2.0)])
    assert expected_length(next(iter(again.values()))[4, 1].acceptance, 4) == pytest.approx(2.0)  # the last


def test_what_a_batch_size_decides_makes_no_curve_of_its_own():
    """Each size has its own number of threads and its own faster baseline."""
    summaries = [*curve(1.6, 4, 1), *(one | {"threads": 2} for one in curve(2.0, 4, 8))]
    summaries[1] = changed(summaries[1], baseline__quoted_against="hf_generate")
    (found,) = break_evens(summaries).values()
    assert list(found) == [(4, 1), (4, 8)] and found[4, 1].measured == (0.2, 0.8)
    assert expected_length(found[4, 1].acceptance, 4) == pytest.approx(1.6)
    again = [one | {"threads": 2} for one in curve(1.8, 4, 1)]
    assert len(break_evens([*summaries, *again])) == 2, "both numbers of threads at one size were chosen"


def test_runs_that_cannot_be_part_of_it():
    assert break_evens([SUMMARY, *curve(1.6)[:1]]) == {}  # no acceptance was chosen; one alone
    text = [faster(1.1, settings={"acceptance": "exact", "max_draft_tokens": 5, "n": n}) for n in (1, 2)]
    assert break_evens(text) == {}
    null = [changed(s, overall__speedup=None) for s in curve(1.6)]
    assert break_evens(null) == {}
    (found,) = break_evens([changed(s, overall__speedup_low=None) for s in curve(1.6)]).values()
    assert found[4, 1].high is None and found[4, 1].low is not None


def test_alone_too():
    """A method that decodes one sequence at a time has its settings without a prefix."""
    alone = [
        faster(
            expected_length(a, 4) / 1.6, method="oracle", settings={"acceptance": a, "max_draft_tokens": 4}
        )
        | {"batch_size": 1}
        for a in ACCEPTANCES
    ]
    (found,) = break_evens(alone).values()
    assert expected_length(found[4, 1].acceptance, 4) == pytest.approx(1.6)


@pytest.mark.slow
def test_the_plot():
    summaries = [*curve(1.6, 4, 1), *curve(2.0, 4, 8), *curve(9.0, 8, 8), *curve(1.0, 2, 1)]
    runs = runs_of(**{f"run{i}": summary for i, summary in enumerate(summaries)})
    figure = plots.figures(runs)["break_even"]
    (axes,) = figure.axes
    (found,) = break_evens(summaries).values()
    lines = {line.get_label(): line for line in axes.lines}
    assert lines["4 draft tokens"].get_ydata().tolist() == [found[4, 1].acceptance, found[4, 8].acceptance]
    assert lines["2 draft tokens"].get_ydata().tolist() == []  # at every measured acceptance
    below, above = (
        [line for line in axes.lines if line.get_marker() == marker and len(line.get_xdata())]
        for marker in "v^"
    )
    assert below[0].get_ydata()[0] < 0.2 and above[0].get_ydata()[0] > 0.8
    assert round(below[0].get_xdata()[0]) == 1 and round(above[0].get_xdata()[0]) in (8, 9)
    ends = [sorted(line.get_ydata()) for line in axes.lines if line.get_marker() == "None"]
    assert [found[4, 1].low, found[4, 1].high] in ends
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "8"]
    said = [text.get_text() for text in axes.get_legend().get_texts()]
    assert said[-2:] == ["not reached at any measured", "reached at all measured"]
    assert sweep_plots.break_even([SUMMARY]) is None


@pytest.mark.slow
def test_each_drafter_has_a_panel_and_of_many_the_title_says_so():
    summaries = [s for cost in ("none", "sps", "pld", "s2d") for s in curve(1.6, cost_of=cost)]
    figure = sweep_plots.break_even(summaries)
    assert len(figure.axes) == sweep_plots.PANELS
    assert all("(3 of 4 are drawn)" in axes.get_title(loc="left") for axes in figure.axes)
