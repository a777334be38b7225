"""Speedups over the size of an expanded target: which runs belong together, and that they are drawn."""

from __future__ import annotations

import pytest

from specbench.report import plots, sweep_plots
from specbench.report.model_scaling import baseline_fractions, by_size, of_other_models
from tests.support.samples import SUMMARY, batched, changed, runs_of

# A model that is not expanded, and what comes with it.
REAL = {"weights": "pretrained", "pair": "real", "target": "models/real", "compiled": False}


def sized(method: str, megabytes: int, fraction: float | None = 0.5, **changes) -> dict:
    own = {
        "method": method,
        "compiled": True,
        "weights": "expanded",
        "anatomy": f"Llama of {megabytes}",
        "settings": {},
    }
    summary = SUMMARY | own | {"target_pass_bytes": megabytes * 10**6}
    unsure = {"overall__speedup_low": None, "overall__speedup_high": None}
    return changed(summary, baseline__bandwidth_fraction=fraction, **unsure | changes)


def test_runs_of_one_method_are_a_line():
    again = sized("sps", 100, overall__speedup=2.5)
    runs = [
        sized("sps", 400),
        sized("sps", 100),
        sized("s2d", 100),
        sized("s2d", 200),
        again,
        sized("pld", 100),
    ]
    found = by_size(runs)
    assert {name: list(sizes) for name, sizes in found.items()} == {
        "sps": [100 * 10**6, 400 * 10**6],
        "s2d": [100 * 10**6, 200 * 10**6],
    }
    assert found["sps"][100 * 10**6] is again


def test_other_runs_are_left_out():
    """Real models of two sizes say other things; a batch is another regime; older folders do not tell the size."""
    real = [run | {"weights": "pretrained"} for run in (sized("sps", 1), sized("sps", 2))]
    batches = [
        batched() | {"weights": "expanded", "target_pass_bytes": size, "anatomy": str(size)}
        for size in (1, 2)
    ]
    old = [SUMMARY | {"weights": "expanded"}, SUMMARY | {"weights": "expanded"}]
    assert by_size([*real, *batches, *old]) == {}
    assert sweep_plots.regimes([*real, *batches, *old]) is None


def test_other_models_are_points_of_the_methods_that_have_a_line():
    lines = by_size([sized("sps", 100), sized("sps", 400), sized("s2d", 100), sized("s2d", 200)])
    again = sized("sps", 300, overall__speedup=1.9) | REAL
    half = sized("sps", 150) | REAL | {"dtype": "bfloat16"}
    others = [sized("sps", 300) | REAL, again, half, sized("pld", 300) | REAL, sized("s2d", 100)]
    assert of_other_models(others, lines) == {"real": {"sps": again}, "real, bfloat16": {"sps": half}}


@pytest.mark.parametrize(
    "change", [{"temperature": 1.0}, {"threads": 4}, {"task": "qa"}, {"max_new_tokens": 512}]
)
def test_a_run_that_was_decoded_otherwise_is_no_point_of_a_line(change):
    lines = by_size([sized("sps", 100), sized("sps", 400)])
    real = sized("sps", 300) | REAL | {"data": "tiny", "experiment": "e"}
    assert of_other_models([real, real | change], lines) == {"real": {"sps": real}}


def test_a_point_has_the_settings_of_its_line():
    lines = by_size([sized("sps", size, settings={"n": n}) for n in (1, 2) for size in (100, 400)])
    reals = [sized("sps", 300, settings={"n": n}) | REAL for n in (1, 2, 3)]
    assert of_other_models(reals, lines) == {"real": {"sps, n=1": reals[0], "sps, n=2": reals[1]}}


def test_a_model_is_a_point_of_the_lines_of_every_expanded_pair():
    wide, deep = ([sized("sps", size, pair=pair) for size in (100, 400)] for pair in ("wide", "deep"))
    lines, real = by_size([*wide, *deep]), sized("sps", 300) | REAL
    assert len(lines) == 2 and of_other_models([real], lines) == {"real": dict.fromkeys(lines, real)}


def test_other_models_are_drawn_beside_the_lines():
    line = [sized("sps", size, overall__speedup=speed) for size, speed in ((100, 1.2), (400, 1.8))]
    ends = {
        f"overall__decode_speedup{end}": 1.4 + by for end, by in (("", 0), ("_low", -0.1), ("_high", 0.1))
    }
    real = sized("sps", 300, 0.6, **ends) | REAL
    bandwidth, speedups, _ = sweep_plots.regimes([*line, real]).axes
    assert [text.get_text() for text in bandwidth.get_xticklabels()] == ["100", "300", "400"]
    assert [0.6] in [list(one.get_ydata()) for one in bandwidth.get_lines()]
    assert "real" in [text.get_text() for text in bandwidth.texts]
    assert [1.4] in [list(one.get_ydata()) for one in speedups.get_lines()]


def test_of_many_lines_the_title_says_how_many_are_drawn(monkeypatch):
    summaries = [sized(method, size) for method in ("sps", "pld") for size in (100, 400)]
    assert sweep_plots.regimes(summaries).get_suptitle() == ""
    monkeypatch.setattr(sweep_plots, "MAX_SERIES", 1)
    assert sweep_plots.regimes(summaries).get_suptitle() == "1 of 2 lines are drawn"


def test_the_baselines_share_of_the_bandwidth():
    found = by_size([
        *(sized("sps", 100, fraction) for fraction in (0.3,)),
        *(sized("s2d", 100, fraction) for fraction in (0.5,)),
        sized("pld", 100, 0.4), sized("sps", 400, None), sized("s2d", 400, 0.8), sized("pld", 400, None),
    ])  # fmt: skip
    assert baseline_fractions(found) == {100 * 10**6: 0.4, 400 * 10**6: 0.8}


@pytest.mark.slow
def test_the_plot_has_each_methods_speedups_and_their_bound():
    none = {"overall__acceptance_rate": None, "overall__mbsu": 1.0}
    summaries = [
        *(sized("ar", size, **none) for size in (100, 400)),
        *(
            sized(
                "sps",
                size,
                overall__speedup=speed,
                overall__decode_speedup=speed + 0.1,
                overall__decode_speedup_low=None,
                overall__decode_speedup_high=None,
                overall__mbsu=2.0,
            )
            for size, speed in ((100, 1.2), (400, 1.8))
        ),
    ]
    drawn = plots.figures(runs_of(**{f"r{i}": summary for i, summary in enumerate(summaries)}))["regimes"]
    bandwidth, speedups, reached = drawn.axes
    assert [text.get_text() for text in bandwidth.get_xticklabels()] == ["100", "400"]
    lines = [list(line.get_ydata()) for line in speedups.get_lines()]
    assert pytest.approx([1.3, 1.9]) in lines and [2.0, 2.0] in lines
    assert speedups.get_ylabel() == plots.OF_ROUNDS_LABEL
    ratios = next(line for line in reached.get_lines() if line.get_label() == "sps")
    assert list(ratios.get_ydata()) == pytest.approx([0.65, 0.95])
    assert not any(line.get_label() == "ar" for line in reached.get_lines())
