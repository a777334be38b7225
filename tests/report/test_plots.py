import hashlib
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from matplotlib.figure import Figure

from specbench import ROOT
from specbench.report import plots, sweep_plots
from specbench.report.runs import Run
from tests.support.samples import (
    ENGINE,
    NUMBERS,
    SUMMARY,
    UNCLEAR,
    batched,
    changed,
    faster,
    nothing,
    runs_of,
)

pytestmark = pytest.mark.slow

QA_ALONE = faster(
    1.8, method="pld", tasks={"qa": UNCLEAR}, overall__acceptance_length=1.7, overall__mbsu=1.65
)
LONELY = changed(QA_ALONE, method="s2d", overall__speedup_low=None, overall__speedup_high=None)
SIZES = {1: 150.0, 2: 280.0, 8: 470.0}
BATCHES = {
    f"ragged_{size}": batched("ragged", batch_size=size, tokens_per_second=rate, align_seconds=6.0)
    for size, rate in SIZES.items()
}
GRID = {
    f"grid_{a}_{b}": faster(
        1 + a * b / 10 if (a, b) != (2, 3) else None, method="sps", settings={"a": a, "b": b}
    )
    for a in (1, 2)
    for b in (1, 2, 3)
}
RUNS = runs_of(kangaroo=SUMMARY, pld=QA_ALONE, s2d=LONELY, **BATCHES)


@pytest.fixture(scope="module")
def drawn() -> dict[str, Figure]:
    return plots.figures([*RUNS, *runs_of(**GRID)])


def points(figure: Figure) -> dict[str, tuple]:
    """By label: positions, speedups, and the two ends of each error bar, of the plots of points."""
    found = {}
    for container in figure.axes[0].containers:
        line, _, (bars,) = container.lines
        found[container.get_label()] = (
            line.get_xdata().tolist(),
            line.get_ydata().tolist(),
            [segment.tolist() for segment in bars.get_segments()],
        )
    return found


def title(figure: Figure) -> str:
    return figure.get_suptitle() + "".join(axes.get_title() for axes in figure.axes)


def test_every_plot_is_drawn_once(drawn):
    assert list(drawn) == [
        *("speedup_by_task", "acceptance_and_speedup", "time", "acceptance_by_position"),
        *("acceptance_by_place", "acceptance_by_context", "throughput", "mbsu_and_speedup", "heat_map_1"),
    ]


def test_speedups_by_task_stand_where_they_were_measured(drawn):
    axes = drawn["speedup_by_task"].axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["qa", "math_reasoning", "overall"]
    found = points(drawn["speedup_by_task"])
    assert len(found) == 8 and "ragged + sps" not in "".join(found)  # batches have no times by task
    speedups, rows, bars = found["kangaroo"]
    assert speedups == [1.01, 1.52, 1.52] and [round(row) for row in rows] == [0, 1, 2]
    ends = np.array([(bar[0][0], bar[1][0]) for bar in bars])
    assert ends == pytest.approx(np.array([(0.97, 1.05), (1.47, 1.58), (1.47, 1.58)]))
    assert [bar[0][1] for bar in bars] == rows
    speedups, rows, bars = found["pld"]
    assert speedups == [1.01, 1.8] and [round(row) for row in rows] == [0, 2]
    assert (bars[1][0][0], bars[1][1][0]) == pytest.approx((1.7, 1.9))
    assert all(-0.4 < row - round(row) < 0.4 for _, rows, _ in found.values() for row in rows)
    heights = {rows[0] for _, rows, _ in found.values()}
    assert len(heights) == len(found)  # none stands on another


def test_without_an_interval_a_point_has_none(drawn):
    _, _, bars = points(drawn["speedup_by_task"])["s2d"]
    assert bars[1][0][0] == bars[1][1][0] == 1.8


def test_acceptance_against_speedup(drawn):
    found = points(drawn["acceptance_and_speedup"])
    assert found["kangaroo"][:2] == ([3.21], [1.6]) and found["pld"][:2] == ([1.7], [1.8])
    ((low, high),) = found["pld"][2]
    assert (low[0], high[0]) == (1.7, 1.7) and (low[1], high[1]) == pytest.approx((1.7, 1.9))
    axes = drawn["acceptance_and_speedup"].axes[0]
    slopes = [
        line.get_ydata()[1] / line.get_xdata()[1] for line in axes.lines if line.get_linestyle() == "--"
    ]
    assert slopes == pytest.approx([1 / cost for cost in plots.ROUND_COSTS])
    assert axes.get_ylabel() == plots.OF_ROUNDS_LABEL
    assert axes.get_ylim()[1] > 1.9 and axes.get_xlim()[1] > 3.21


def test_mbsu_against_speedup(drawn):
    found = points(drawn["mbsu_and_speedup"])
    assert found["kangaroo"][:2] == ([1.9], [1.6]) and found["pld"][:2] == ([1.65], [1.8])
    assert drawn["mbsu_and_speedup"].axes[0].get_ylabel() == plots.OF_ROUNDS_LABEL
    axes = drawn["mbsu_and_speedup"].axes[0]
    (diagonal,) = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert (
        diagonal.get_xdata().tolist() == diagonal.get_ydata().tolist() and axes.get_xlim() == axes.get_ylim()
    )


def test_where_the_time_of_a_token_goes():
    figure = plots.figures(runs_of(kangaroo=SUMMARY, ragged=batched("ragged", align_seconds=3.0)))["time"]
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["kangaroo", "ragged + sps, batch 8"]
    parts = {bars.get_label(): [bar.get_width() for bar in bars] for bars in axes.containers}
    assert parts == {
        "draft": pytest.approx([1.5, 1.5]),  # 30 s of 20,000 tokens, in ms
        "verify": pytest.approx([3.0, 3.0]),
        "alignment": pytest.approx([0.0, 0.15]),
        "prefill": pytest.approx([0.2, 0.2]),
        "other": pytest.approx([0.3, 0.15]),
    }
    for place in (0, 1):  # end to end, and all of the 100 s
        bars = [container[place] for container in axes.containers]
        ends = np.cumsum([bar.get_width() for bar in bars])
        assert [bar.get_x() for bar in bars] == pytest.approx([0, *ends[:-1]]) and ends[-1] == pytest.approx(
            5
        )
    lines = [line.get_xdata()[0] for line in axes.lines]
    assert lines == pytest.approx([1e3 / 41.2] * 2)  # the faster baseline
    assert [text.get_text() for text in axes.get_legend().get_texts()].count("baseline") == 1


def test_seconds_that_are_not_known_are_one_part_and_no_other():
    """Another engine shows whole rounds: of its 5 ms a token 0.2 are the prompt's."""
    served = changed(SUMMARY, method="served", overall__draft_seconds=None, overall__verify_seconds=None)
    axes = plots.figures(runs_of(a=served, b=SUMMARY))["time"].axes[0]
    parts = {bars.get_label(): [bar.get_width() for bar in bars] for bars in axes.containers}
    assert parts["not told apart"] == pytest.approx([4.8, 0.0])
    assert parts["prefill"] == pytest.approx([0.2, 0.2]) and parts["other"] == pytest.approx([0.0, 0.3])


def test_acceptance_by_position(drawn):
    lines = {line.get_label(): line for line in drawn["acceptance_by_position"].axes[0].lines}
    assert lines["kangaroo"].get_xdata().tolist() == [1, 2]
    assert lines["kangaroo"].get_ydata().tolist() == [0.8, 0.75]


def test_acceptance_over_the_answer_and_the_context(drawn):
    """The third stretch has three rounds, too few to draw."""
    place, context = (drawn[f"acceptance_by_{name}"].axes[0] for name in ("place", "context"))
    lines = {line.get_label(): line for line in place.lines}
    assert lines["kangaroo"].get_ydata().tolist() == [3.5, 3.1]
    assert [tick.get_text() for tick in place.get_xticklabels()] == ["0\u201331", "32\u201363"]
    assert [tick.get_text() for tick in context.get_xticklabels()] == ["0\u2013127", "128\u2013255"]


def test_throughput_over_the_batch_size(drawn):
    (line,) = drawn["throughput"].axes[0].lines
    assert line.get_label() == "ragged + sps"
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == (list(SIZES), list(SIZES.values()))
    ticks = drawn["throughput"].axes[0].get_xticklabels()
    assert [tick.get_text() for tick in ticks] == ["1", "2", "8"]


def test_runs_with_a_fault_are_no_points():
    sizes = [batched(batch_size=size) for size in (2, 4)]
    lossy = changed(batched(batch_size=8), verification="typical")
    (line,) = sweep_plots.throughput([*sizes, lossy]).axes[0].lines
    assert line.get_xdata().tolist() == [2, 4]


def test_a_line_goes_on_where_another_baseline_is_faster():
    sizes = [batched(batch_size=2), changed(batched(batch_size=4), baseline__quoted_against="hf_generate")]
    (line,) = sweep_plots.throughput(sizes).axes[0].lines
    assert line.get_xdata().tolist() == [2, 4]


def test_a_line_goes_on_where_other_threads_were_chosen_but_not_where_they_are_compared():
    chosen = [batched(batch_size=2) | {"threads": 1}, batched(batch_size=4) | {"threads": 2}]
    (line,) = sweep_plots.throughput(chosen).axes[0].lines
    assert line.get_xdata().tolist() == [2, 4]
    compared = [*chosen, batched(batch_size=4) | {"threads": 1}]
    lines = sweep_plots.throughput(compared).axes[0].lines
    assert {line.get_label(): line.get_xdata().tolist() for line in lines} == {
        "exspec + sps, threads=1": [2, 4],
        "exspec + sps, threads=2": [4],
    }


def test_batches_of_other_settings_are_lines_of_their_own():
    windows = [changed(batched(batch_size=size), settings__window=8 * size) for size in (2, 4)]
    lines = sweep_plots.throughput(windows).axes[0].lines
    assert [line.get_label() for line in lines] == ["exspec + sps, window=16", "exspec + sps, window=32"]


def test_engines_stand_beside_our_own_run_of_the_method():
    engine = ENGINE | {"again": {"speedup": 1.0, "low": 0.98, "high": 1.02}}
    served = changed(
        SUMMARY, engine=engine, overall__speedup=0.9, overall__speedup_low=0.8, overall__speedup_high=1.1
    )
    unknown = changed(served, engine__name="vllm", baseline__ceiling_tokens_per_second=None)
    unmeasured = changed(served, engine__name="openai", baseline__tokens_per_second=None)
    figure = sweep_plots.engines([SUMMARY, served, unknown, changed(SUMMARY, method="pld"), unmeasured])
    plain, gain = figure.axes
    assert [label.get_text() for label in plain.get_yticklabels()] == [
        *("kangaroo", "kangaroo by llama_cpp", "kangaroo by vllm", "kangaroo by openai")
    ]
    assert [bar.get_width() for bar in plain.patches] == [41.2] * 3  # of the fourth there is no rate
    ceilings = [line.get_xdata()[0] for line in plain.lines]
    assert ceilings == pytest.approx([61.5] * 3)  # of the third it is not known
    assert [container.lines[0].get_xdata().tolist() for container in gain.containers] == [
        [1.52],
        *[[0.9]] * 3,
    ]
    assert [note.get_text() for note in gain.texts] == ["79/1/0"] * 4
    assert sweep_plots.engines([SUMMARY]) is None


def test_the_heat_map_holds_the_speedups_of_the_grid(drawn):
    axes = drawn["heat_map_1"].axes[0]
    values = axes.images[0].get_array()
    assert values.filled(np.nan)[0].tolist() == [1.1, 1.2, 1.3]
    assert values.filled(np.nan)[1][:2].tolist() == [1.2, 1.4] and np.isnan(values.filled(np.nan)[1][2])
    assert [text.get_text() for text in axes.texts] == ["1.10", "1.20", "1.30", "1.20", "1.40", "–"]
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("a", "b")
    assert axes.get_title() == "speedup of sps on tiny"


def test_a_run_looks_the_same_in_every_plot(drawn):
    looks = {}
    for name in ("speedup_by_task", "acceptance_and_speedup", "mbsu_and_speedup"):
        for container in drawn[name].axes[0].containers:
            line = container.lines[0]
            looks.setdefault(container.get_label(), set()).add((line.get_color(), line.get_marker()))
    for line in drawn["acceptance_by_position"].axes[0].lines:
        looks.setdefault(line.get_label(), set()).add((line.get_color(), line.get_marker()))
    assert all(len(look) == 1 for look in looks.values())
    assert len(set.union(*looks.values())) == len(looks)


def test_a_run_looks_the_same_where_fewer_are_drawn():
    many = {f"r{i}": faster(1 + i / 10, settings={"n": i}) for i in range(plots.MAX_SERIES + 3)}
    drawn = plots.figures(runs_of(**many))
    few, more = (
        {
            container.get_label(): (container.lines[0].get_color(), container.lines[0].get_marker())
            for container in drawn[name].axes[0].containers
        }
        for name in ("speedup_by_task", "acceptance_and_speedup")
    )
    assert (len(few), len(more)) == (plots.MAX_SERIES, len(many)) and few.items() <= more.items()


def test_where_there_is_nothing_nothing_is_drawn():
    assert plots.figures([]) == {}
    assert plots.figures(runs_of(a=nothing())) == {}
    assert plots.figures(runs_of(a=nothing(batched()), b=nothing(batched(batch_size=4)))) == {}
    assert sweep_plots.throughput([batched(batch_size=1)]) is None
    assert sweep_plots.heat_maps([nothing(summary) for summary in GRID.values()]) == []
    empty = plots.chosen([("a", Run(None, nothing()))])[0]
    for draw in (
        plots.speedup_by_task,
        plots.acceptance_and_speedup,
        plots.mbsu_and_speedup,
        plots.time_by_part,
        plots.acceptance_by_position,
        *(partial(plots.acceptance_over, name=name) for name in plots.STRETCHES),
    ):
        assert draw([]) is None and draw(empty) is None


NULLS = ("speedup", "decode_speedup", "speedup_low", "acceptance_length", "mbsu", "tokens", "seconds",
         "draft_seconds", "prefill_seconds", "tokens_per_second")  # fmt: skip


def test_the_share_of_a_few_rounds_is_not_drawn():
    shares = {"acceptance_by_position_conditional": [0.5, 0.4, 1.0], "judged_by_position": [50, 25, 3]}
    few = shares | {"judged_by_position": [10, 5, 2]}
    runs, _ = plots.chosen(
        [
            (name, Run(None, changed(SUMMARY, overall=NUMBERS | found)))
            for name, found in (("a", shares), ("b", few))
        ]
    )
    (line,) = plots.acceptance_by_position(runs).axes[0].lines
    assert line.get_label() == "a" and list(line.get_ydata()) == [0.5, 0.4]
    assert plots.acceptance_by_position([run for run in runs if run.label == "b"]) is None


def test_a_number_that_is_null_crashes_no_plot():
    """A run for each number, which is null in every block of it, beside one that has them all."""
    named = [("whole", Run(None, SUMMARY))]
    for key in NULLS:
        shares = {"acceptance_by_position_conditional": [0.5, None, None], "judged_by_position": [90, 0, 0]}
        null = NUMBERS | shares | {key: None}
        summary = SUMMARY | {"overall": null, "tasks": {"qa": null}}
        named.append((key, Run(None, changed(summary, baseline__tokens_per_second=None))))
    runs, _ = plots.chosen(named, len(named))
    lacking = {
        plots.speedup_by_task: {"speedup"},
        plots.acceptance_and_speedup: {"decode_speedup", "acceptance_length"},
        plots.mbsu_and_speedup: {"decode_speedup", "mbsu"},
        plots.time_by_part: {"tokens", "seconds"},
        plots.acceptance_by_position: set(),
    }
    for draw, left_out in lacking.items():
        figure = draw(runs)
        figure.draw_without_rendering()
        assert {"whole", *NULLS} - set(labels_in(figure)) == left_out
    sweep_plots.throughput([changed(batched(), overall__tokens_per_second=None), batched(batch_size=4)])


def labels_in(figure: Figure) -> list[str]:
    axes = figure.axes[0]
    ticks = [tick.get_text() for tick in axes.get_yticklabels()]
    return [*axes.get_legend_handles_labels()[1], *ticks]


def test_cores_of_a_methods_own_are_in_its_label():
    run = Run(None, SUMMARY | {"threads": 1, "extra_cores": 1})
    (drawn,), _ = plots.chosen([("mirror_sd", run)])
    assert drawn.label == "mirror_sd (2 cores)"


def test_faulty_runs_are_named_and_do_not_crowd_out_sound_ones():
    fast = faster(9.0, equivalence__violation=1)
    slow = {f"sound{i}": faster(1 + i / 10, settings={"n": i}) for i in range(2)}
    named = [(run.name, run) for run in runs_of(fast=fast, **slow)]
    assert [run.label for run in plots.chosen(named)[0]] == ["fast, VIOLATION", "sound0", "sound1"]
    assert [run.label for run in plots.chosen(named, 2)[0]] == ["sound0", "sound1"]


def test_of_runs_that_share_a_label_the_last_is_drawn():
    shown = plots.figures(runs_of(a=faster(1.2), b=faster(1.4)))
    assert points(shown["acceptance_and_speedup"])["kangaroo"][1] == [1.4]
    assert len(shown["speedup_by_task"].axes[0].containers) == 1


def test_of_many_runs_the_fastest_are_drawn_and_every_title_says_so(monkeypatch):
    monkeypatch.setattr(plots, "MOST_POINTS", 12)
    many = {f"run{i}": faster(1 + i / 10, settings={"n": i}) for i in range(plots.MAX_SERIES)}
    assert plots.chosen([(run.name, run) for run in runs_of(**many)])[1] == ""
    more = {f"more{i}": faster(0.5 + i / 100, settings={"n": 100 + i}) for i in range(3)}
    batches = {
        f"batch{i}": batched(batch_size=2, tokens_per_second=100.0 + i) for i in range(plots.MAX_SERIES + 2)
    }
    batches = {name: changed(run, settings__window=i) for i, (name, run) in enumerate(batches.items())}
    drawn = plots.figures(runs_of(**more, **many, **batches))
    assert "the 12 fastest of 13 runs" in title(drawn["acceptance_and_speedup"])
    assert len(points(drawn["acceptance_and_speedup"])) == 12
    for name in ("speedup_by_task", "acceptance_by_position", "mbsu_and_speedup"):
        assert "the 10 fastest of 13 runs" in title(drawn[name])
    assert (
        "the 10 fastest of 25 runs" in title(drawn["time"]) and len(drawn["time"].axes[0].get_yticks()) == 10
    )
    found = points(drawn["speedup_by_task"])
    assert set(found) == {f"kangaroo, n={i}" for i in range(10)}
    assert "the 10 fastest of 12 lines" in title(drawn["throughput"])
    rates = [line.get_ydata()[0] for line in drawn["throughput"].axes[0].lines]
    assert sorted(rates) == [102.0 + i for i in range(10)]


@pytest.mark.filterwarnings("error")  # such as that a plot has no room left
@pytest.mark.parametrize("count", [2, plots.MOST_POINTS])
def test_long_names_of_many_runs_stand_within_the_figure(count):
    names = [f"{i} and as many words as three lines hold " * 3 for i in range(count)]
    shown = plots.figures(runs_of(**{f"run{n}": faster(1.5, settings={"a": n}) for n in names}))
    assert len(shown["acceptance_and_speedup"].axes[0].get_legend().get_texts()) == count
    for figure in shown.values():
        axes, (width, height) = figure.axes[0], figure.bbox.size
        legend, plot = axes.get_legend().get_window_extent(), axes.get_window_extent()
        assert 0 <= legend.x0 < legend.x1 <= width and 0 <= legend.y0 < legend.y1 <= height
        assert plot.width > 0.35 * width and plot.height > 0.6 * height


def test_of_many_heat_maps_the_largest_are_drawn_and_their_titles_say_so(monkeypatch):
    monkeypatch.setattr(sweep_plots, "HEAT_MAPS", 1)
    small = [faster(1.1, settings={"a": a, "b": b}, pair="small") for a in (1, 2) for b in (1, 2)]
    (figure,) = sweep_plots.heat_maps([*small, *GRID.values()])
    assert figure.axes[0].get_title() == "speedup of sps on tiny (1 of 2 are drawn)"


CODE = """
import hashlib, sys
from specbench.report import __main__, plots
from tests.report.test_plots import RUNS
print(hashlib.sha256(plots.svg(plots.figures(RUNS[3:])["throughput"])).hexdigest())
sys.exit("matplotlib.pyplot" in sys.modules)
"""


@pytest.mark.process
def test_the_same_runs_give_the_same_svg_and_pyplot_is_left_alone():
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figure = plots.figures(RUNS[3:])["throughput"]
    again = [hashlib.sha256(plots.svg(figure)).hexdigest() for _ in range(2)]
    assert [done.stdout.strip()] * 2 == again


def test_what_is_saved_is_what_is_returned(tmp_path):
    dollars = faster(1.3, settings={"folder": r"${\frac$"})  # no formula
    drawn = plots.figures(runs_of(a=SUMMARY, b=dollars))
    kept = {name: drawn[name] for name in ("acceptance_and_speedup", "time")}
    assert all(map(plots.NAMES.fullmatch, drawn))
    # Two of another report, and one of nobody.
    for name in ("heat_map_2.svg", "speedup_by_task.png", "mine.png"):
        (tmp_path / name).write_text("")
    images = plots.save(kept, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{n}.{form}" for n in kept for form in ("png", "svg")
    } | {"mine.png"}
    for name, image in images.items():
        assert (tmp_path / f"{name}.svg").read_bytes() == image and image.startswith(b"<?xml")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
