"""What tables say of the machine's speed: slow runs, those in which it changed, rows of different phases."""

from __future__ import annotations

import pytest

from specbench.measure.metrics import machine as seen
from specbench.report import compare, formats, phases, remarks, tables
from specbench.report.runs import Run
from tests.report.test_formats import texts
from tests.support.messages import says
from tests.support.samples import SUMMARY, WRONG, changed, faster, run_of, runs_of
from tests.support.synthetic import FACTS, QUIET, passes, probed, slowed


def measured(*probes: dict, summary: dict = SUMMARY, best: dict = QUIET, machine: str = "EPYC") -> dict:
    """A summary of a run with these probes."""
    records, facts = probed(passes(1), *probes), FACTS | {"speed": {"machine": machine, "best": best}}
    return summary | {"machine": seen.machine(records) | {"speed": seen.speed(records, facts)}}


def first_line(summary: dict) -> str:
    return tables.run_table(summary).title.plain.splitlines()[0]


def test_a_slow_machine_stands_in_the_first_line():
    line = first_line(measured(slowed(product=0.3), slowed(product=0.3)))
    assert line.startswith("SLOW MACHINE: a matrix product 30% below the best")
    assert "70.0 GFLOP/s, best 100.0 GFLOP/s" in line
    assert "memory" not in line and "starting" not in line and "CHANGED" not in line


@pytest.mark.parametrize(
    ("figure", "text"),
    [
        ("bandwidth", "reading memory 30% below ... 21.0 GB/s, best 30.0 GB/s"),
        ("operations", "starting operations 30% below ... 2.86 µs, best 2.00 µs"),
    ],
)
def test_each_figure_alone_makes_it_slow(figure, text):
    """Whichever probe it was."""
    for probes in ((slowed(**{figure: 0.3}), QUIET, QUIET), (QUIET, slowed(**{figure: 0.3}))):
        assert says(first_line(measured(*probes)), f"SLOW MACHINE: {text}")


def test_a_quiet_machine_is_not_mentioned():
    for probes in ((QUIET, QUIET), (slowed(product=0.1), slowed(bandwidth=0.14))):
        assert phases.slow_machine(measured(*probes)) == ""
    assert first_line(SUMMARY).startswith("kangaroo (")


def test_a_change_within_a_run_is_said():
    line = first_line(measured(QUIET, slowed(product=0.3), slowed(operations=0.2)))
    assert says(
        line,
        "SLOW MACHINE: ... IT CHANGED during the run: a matrix product by 30%, starting operations by 20%",
    )
    slow_all_the_time = first_line(measured(slowed(product=0.3), slowed(product=0.35)))
    assert "SLOW MACHINE" in slow_all_the_time and "CHANGED" not in slow_all_the_time


def test_a_violation_is_said_before_it():
    counts = {"equivalence": WRONG["equivalence"]}
    lines = tables.run_table(measured(slowed(product=0.3)) | counts).title.plain.splitlines()
    assert lines[0].startswith("VIOLATION") and lines[1].startswith("SLOW MACHINE")


def rows(**medians: dict) -> list[Run]:
    """Runs of one method each, measured in phases of their own."""
    return runs_of(
        **{
            name: measured(figures, summary=faster(1.5, method=name), best=figures)
            for name, figures in medians.items()
        }
    )


@pytest.mark.slow
def test_rows_of_another_phase_are_named():
    runs = rows(sps=QUIET, pld=slowed(product=0.3), rest=slowed(bandwidth=0.1), suffix=slowed(product=0.4))
    (line,) = phases.different_phases(runs)
    assert says(
        line, "DIFFERENT PHASES ... a matrix product ... slower than for sps in pld (30%), suffix (40%)"
    )
    assert "rest" not in line
    assert line in remarks.cautions(runs)
    assert phases.different_phases(rows(sps=QUIET, rest=slowed(bandwidth=0.1))) == []


def test_rows_are_compared_by_their_median():
    """A single slow probe makes a run slow, and no other phase."""
    once = measured(QUIET, slowed(product=0.3), QUIET, summary=faster(1.5, method="pld"))
    runs = runs_of(sps=measured(QUIET), pld=once)
    assert phases.different_phases(runs) == []
    assert [line.partition(":")[0] for line in phases.slow_machines(runs)] == ["pld"]


def test_many_slow_runs_share_a_line():
    found = [QUIET, *(slowed(product=0.2 + i / 10, bandwidth=0.3) for i in range(4))]
    runs = runs_of(
        **{
            f"run{i}": measured(figures, summary=faster(1.5, method=f"method{i}"))
            for i, figures in enumerate(found)
        }
    )
    (line,) = phases.slow_machines(runs)
    assert line.startswith("SLOW MACHINE in 4 of 5 runs: ")
    assert says(line, "reading memory 30% below ... a matrix product 20 to 50% below")
    assert [line for line in phases.different_phases(runs) if says(line, "in 4 of 5 rows (20 to 50%)")]


def test_many_disturbed_runs_share_a_line():
    shares = (0.3, 0.4, 0.9, 0.5, 0.05)
    runs = runs_of(
        **{
            f"run{i}": changed(SUMMARY) | {"machine": {"still_disturbed_share": share}}
            for i, share in enumerate(shares)
        }
    )
    (line,) = remarks.disturbances(runs)
    assert says(line, "DISTURBED in 4 of 5 runs: ... for 30 to 90% of the measured time")
    assert len(remarks.disturbances(runs[:3])) == 3


def test_captures_in_the_times_of_a_run_are_warned_of():
    summaries = [changed(SUMMARY) | {"machine": {"captured_share": share}} for share in (0.3, 0.05, None)]
    lines = [remarks.captured(one) for one in summaries]
    assert says(lines[0], "CAPTURES: ... in 30% of the measured time: raise remeasure") and lines[1:] == [
        "",
        "",
    ]
    assert lines[0] in str(remarks.title_text(summaries[0]))
    assert f"one: {lines[0]}" in remarks.machine_warnings(runs_of(one=summaries[0], two=summaries[1]))


def test_rows_of_other_machines_and_of_none_are_no_phases():
    runs = runs_of(
        a=measured(QUIET),
        b=measured(slowed(product=0.5), machine="EPYC, 2 threads", best=slowed(product=0.5)),
        old=SUMMARY,
        older=changed(SUMMARY) | {"machine": {}},
    )
    assert phases.different_phases(runs) == [] and phases.slow_machines(runs) == []


def test_rows_of_one_label_are_named_by_their_folder():
    runs = runs_of(before=measured(QUIET), after=measured(slowed(product=0.3)))
    (line,) = phases.different_phases(runs)
    assert says(line, "slower than for before in after (30%)")


def test_compare_names_the_rows(tmp_path, capsys):
    records = passes(1)
    fast, slow = (
        run_of(tmp_path, name, measured(figures, summary=faster(1.5, method=name)), records=records)
        for name, figures in (("sps", QUIET), ("pld", slowed(product=0.3)))
    )
    compare.print_comparison([fast, slow])
    shown = " ".join(capsys.readouterr().out.split())
    assert "DIFFERENT PHASES" in shown and "slower than for sps in pld (30%)" in shown
    assert "pld: SLOW MACHINE" in shown and "sps: SLOW MACHINE" not in shown
    compare.print_comparison([fast, fast])
    assert "PHASES" not in capsys.readouterr().out


def test_a_row_has_its_baseline():
    generate = {"quoted_against": "hf_generate", "hf_generate_tokens_per_second": 55.5}
    faster_generate = SUMMARY | {"baseline": SUMMARY["baseline"] | generate}
    table = tables.overview_table([SUMMARY, faster_generate | {"pair": "big"}])
    at = formats.cells(table).heads.index("baseline")
    assert [row[at] for row in texts(table)] == ["41.2", "55.5"]


def test_a_row_that_takes_two_cores_says_so():
    alone = faster(1.5, method="sps") | {"threads": 1, "extra_cores": 0}
    beside = faster(1.5, method="other") | {"threads": 1, "extra_cores": 1}
    third = SUMMARY | {"threads": 1}
    for table in (
        tables.overview_table([alone, beside, third]),
        tables.spec_bench_table([alone, beside, third]),
    ):
        names = [row[0] for row in texts(table)]
        assert names == ["sps", "other (2 cores)", "kangaroo"]
    assert "1 thread (2 cores)" in tables.run_table(beside).title.plain
    assert "cores" not in tables.run_table(alone).title.plain
