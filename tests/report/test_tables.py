"""Tables of one run and of several: rows, columns, captions, widths."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from specbench import ROOT
from specbench.report import cells, formats, remarks, tables
from tests.report.test_formats import texts
from tests.support.messages import shown
from tests.support.samples import (
    BASELINE,
    NUMBERS,
    SUMMARY,
    WRONG,
    batched,
    changed,
    faster,
    nothing,
    runs_of,
    wrong,
)


def test_a_row_per_task_and_one_for_all():
    text = shown(tables.run_table(SUMMARY))
    rows = [line.split() for line in text.splitlines()]
    assert [
        "math_reasoning",
        "80",
        "1200.0",
        "1.52",
        "[1.47,",
        "1.58]",
        "3.21",
        "0.61",
        "1.90",
        "79/1/0",
    ] in rows
    assert [
        "qa",
        "80",
        "1200.0",
        "1.01",
        "[0.97,",
        "1.05]",
        "3.21",
        "0.61",
        "1.90",
        "79/1/0",
    ] in rows
    assert rows.index(next(r for r in rows if r[:1] == ["overall"])) > rows.index(
        next(r for r in rows if r[:1] == ["qa"])
    )
    assert "kangaroo (max_draft_tokens=6, exit_layer=2, confidence_threshold=0.6) on tiny" in text
    assert "VIOLATION" not in text and "FAILED" not in text


def test_it_fits_100_columns_and_cuts_nothing():
    for summary in (SUMMARY, wrong(), nothing()):
        text = shown(tables.run_table(summary))
        assert max(len(line) for line in text.splitlines()) <= 100
        assert "…" not in text


def test_a_batch_tells_how_it_was_used():
    text = " ".join(shown(tables.run_table(batched())).split())
    assert "exspec + sps (window=32, drafter.max_draft_tokens=5) on tiny" in text
    assert "batch of 8: occupancy 94%, 3.1% of the time spent on alignment" in text
    assert "4.00 times the tokens/s of autoregressive decoding at batch size 1" in text
    assert "timing noise" not in text
    assert "batch of" not in shown(tables.run_table(SUMMARY))


def test_how_much_answers_repeat_themselves_is_told_by_task():
    repeats = changed(SUMMARY, tasks__qa__distinct_4grams=0.625)
    told = "4-grams of the answers that do not occur earlier in the answer: qa 62%"
    assert told in " ".join(shown(tables.run_table(repeats)).split())
    assert remarks.repetition_line(SUMMARY) == ""


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"compiled": True, "kernels": None}, "short passes: kernels of our own, layers compiled"),
        ({"compiled": False, "kernels": None}, "short passes: kernels of our own"),
        (
            {"compiled": True, "kernels": None, "uncompiled": {"EagleLayer": "it has hooks"}},
            "short passes: kernels of our own, layers compiled, NOT COMPILED: EagleLayer: it has hooks",
        ),
        ({"compiled": False, "kernels": None, "tiles": True}, "short passes: kernels of our own on AMX"),
        ({"compiled": False, "kernels": "no compiler"}, "short passes: torch's kernels (no compiler)"),
        (
            {"compiled": True, "kernels": None, "beyond_kernels": 160},
            "short passes: kernels of our own, layers compiled; one with a full draft of each sequence has 160 tokens "
            "and runs as a prompt does, the baseline's do not",
        ),
        ({"compiled": False, "kernels": None, "device": "cuda"}, ""),
        ({"compiled": False, "kernels": None, "engine": {"name": "vllm"}}, ""),
        ({"compiled": None, "kernels": None}, ""),
    ],
)
def test_whose_kernels_ran_is_told_below_the_table(facts, expected):
    assert remarks.kernels_line(SUMMARY | facts) == expected
    if expected:
        assert formats.cells(tables.run_table(SUMMARY | facts)).caption.endswith(f"; {expected}")


def test_a_table_says_what_is_gained_without_prefill():
    line = "without prefill, which took 4.0% of the method's time, the speedup is 1.60 [1.55, 1.66]"
    assert remarks.prefill_line(SUMMARY["overall"]) == line
    assert line in formats.cells(tables.run_table(SUMMARY)).caption
    assert remarks.prefill_line(SUMMARY["overall"] | {"decode_speedup": None}) == ""


def test_an_interval_over_repeats_of_one_pool_says_so():
    """Every table in which it stands."""
    said = "interval over repeats of one pool: timing noise only"
    one, several = batched(pools=1), batched(pools=2)
    after = f"{remarks.acceptance_line(one['overall'])}; {remarks.prefill_line(one['overall'])}"
    assert formats.cells(tables.run_table(one)).caption.endswith(f"at batch size 1; {said}; {after}")
    on_pairs = [one, one | {"pair": "big"}]
    for table in (tables.batches_table([one]), tables.overview_table([one]), tables.pairs_table(on_pairs)):
        assert formats.cells(table).caption == said
    assert formats.cells(tables.overview_table([SUMMARY, one])).caption == f"batches: {said}"
    without = batched(pools=1, speedup_low=None, speedup_high=None)
    for summaries in ([several], [without], [SUMMARY]):
        assert formats.cells(tables.overview_table(summaries)).caption == ""


def test_an_interval_that_holds_1_hides_no_number():
    wide = cells.ratio_text(1.414, 0.97, 2.051)
    assert (wide.plain, wide.style) == ("1.41 [0.97, 2.05]", "")
    assert cells.ratio_text(1.414, 0.97, 2.051, narrow=True).plain == "1.41\n0.97–2.05"
    assert cells.ratio_text(1.414, 1.1, 2.051).style == "green"
    assert cells.ratio_text(0.5, 0.4, 0.6, narrow=True).style == "red"


def test_labels_are_no_markup():
    """What a user names stands as it is, in cells, heads, titles and captions."""
    pairs = [faster(1.5, pair=pair) for pair in ("[/x]", "[red]y")]
    text = shown(tables.overview_table(pairs), 200) + shown(tables.pairs_table(pairs), 200)
    assert text.count("[/x]") == text.count("[red]y") == 2
    maps = [faster(1.5, settings={"vocab_map": f"/m/[{name}]/map"}) for name in ("old", "new")]
    text = shown(tables.overview_table(maps), 200) + shown(tables.spec_bench_table(maps), 200)
    assert text.count("/m/[old]/map") == text.count("/m/[new]/map") == 2
    batches = [batched() | {"settings": one["settings"]} for one in maps]
    assert "/m/[old]/map" in shown(tables.batches_table(batches), 200)
    varied = [
        faster(1.5, settings={"vocab_map": f"/m/[{name}]/map", "n": n})
        for name in ("old", "new")
        for n in (1, 2)
    ]
    (grid,) = tables.grid_tables(varied)
    assert "/m/[old]/map" in shown(grid, 200)
    named = SUMMARY | {"exit_shares": None, "tasks": {"[/qa]": NUMBERS}, "pair": "[/x]"}
    text = shown(tables.run_table(named), 200)
    assert "[/qa]" in text and "on [/x]" in text
    noted = SUMMARY | {"notes": ["[/2] layers 50%"]}
    assert "[/2] layers 50%" in shown(tables.run_table(noted), 200)


def test_lines_on_the_console_are_no_markup(capsys):
    cells.console().print("a[/b] of [red]c")
    assert capsys.readouterr().out == "a[/b] of [red]c\n"


def test_a_cell_of_a_grid_is_no_run_with_a_fault():
    runs = {(a, b): faster(1 + a + b, settings={"a": a, "b": b}) for a in (1, 2) for b in (1, 2)}
    runs[2, 2] = changed(runs[2, 2], equivalence__violation=1)
    (grid,) = tables.grid_tables(runs.values())
    assert "4.00" in shown(grid) and "5.00" not in shown(grid)


def test_batches_side_by_side():
    runs = [
        SUMMARY,
        batched(),
        batched("ar_batch", "none", alignment_share=None, speedup=None, speedup_low=None),
    ]
    text = shown(tables.batches_table(runs))
    assert max(len(line) for line in text.splitlines()) <= 100
    rows = [line.split() for line in text.splitlines()]
    cells = "exspec + sps 8 1200.0 4.00 1.52 [1.47, 1.58] 94% 3.1% 1.23"
    assert cells.split() in rows
    assert any(row[0] == "ar_batch" and row[-1] == "1.23" for row in rows)
    assert tables.batches_table([SUMMARY]) is None


def test_grids_of_other_batch_sizes_are_not_mixed():
    def run(window, budget, batch_size, speedup):
        return faster(
            speedup,
            method="ragged",
            drafter="sps",
            unit="pool",
            batch_size=batch_size,
            settings={"window": window, "budget": budget},
        )

    runs = [run(w, b, size, size + w / 100) for size in (4, 8) for w in (16, 32) for b in ([1], [2])]
    small, large = tables.grid_tables(runs)  # lists are settings like others
    assert "batch 4" in small.title.plain and "batch 8" in large.title.plain
    assert "4.16" in shown(small) and "8." not in shown(small) and "8.32" in shown(large)


def test_two_settings_that_were_varied_make_a_heat_map():
    def run(exit_layer, kappa, speedup):
        settings = {"exit_layer": exit_layer, "kappa": kappa, "max_draft_tokens": 5}
        return SUMMARY | {"settings": settings, "overall": NUMBERS | {"speedup": speedup}}

    runs = [run(6, 1, 1.5), run(6, 2, 1.25), run(12, 1, 1.75), run(12, 2, None)]
    (grid,) = tables.grid_tables(runs)
    rows = [line.split() for line in shown(grid).splitlines()]
    assert ["exit_layer", "1", "2"] in rows and ["6", "1.50", "1.25"] in rows and ["12", "1.75", "–"] in rows
    assert tables.grid_tables(runs[:2]) == [] and tables.grid_tables([SUMMARY]) == []


def test_the_baseline_is_told():
    text = " ".join(shown(tables.run_table(SUMMARY)).split())
    assert "our loop 41.2 tokens/s, transformers generate 36.0" in text
    assert "speedups are against our loop, at 71% of the memory-bandwidth ceiling" in text
    other = remarks.baseline_line(BASELINE | {"quoted_against": "hf_generate"}).plain
    assert "against transformers generate" in other
    alone = remarks.baseline_line(BASELINE | {"hf_generate_tokens_per_second": None}).plain
    assert "transformers generate not timed; speedups are against our loop" in alone
    disagreeing = BASELINE | {"equivalence": BASELINE["equivalence"] | {"violation": 2}}
    said = remarks.baseline_line(disagreeing).plain
    assert "VIOLATION: our loop and transformers generate differ in 2 answers" in said


def test_a_violation_is_said_first_and_in_red():
    lines = shown(tables.run_table(wrong())).splitlines()
    assert lines[0].startswith("VIOLATION: 3 of 80 answers")
    tasks = [line.split()[0] for line in lines if line.startswith(("rag", "math_reasoning", "overall"))]
    assert tasks == ["rag", "math_reasoning", "overall"]
    assert "\x1b[1;31mVIOLATION" in shown(tables.run_table(wrong()), color=True)
    assert re.search("\x1b\\[1;31m *77/0/3", shown(tables.run_table(wrong()), color=True))


def test_failed_questions_and_random_weights_are_told():
    text = shown(tables.run_table(SUMMARY | {"status": "failed", "failed": 2, "weights": "random"}))
    assert "FAILED: 2 questions" in text and "random weights" in text


def test_what_was_not_measured_is_a_dash():
    text = shown(tables.run_table(nothing()))
    row = next(line.split() for line in text.splitlines() if line.startswith("qa"))
    assert row == ["qa", "0", *["–"] * 6]
    assert "our loop – tokens/s" in text and "ceiling" not in text


def test_a_speedup_without_an_interval_is_shown_alone():
    lonely = NUMBERS | {"speedup_low": None, "speedup_high": None}
    text = shown(tables.run_table(SUMMARY | {"tasks": {"qa": lonely}}))
    assert "1.52      3.21" in next(line for line in text.splitlines() if line.startswith("qa"))


def test_an_overview_names_what_varies():
    other = SUMMARY | {"settings": SUMMARY["settings"] | {"max_draft_tokens": 3}}
    text = shown(
        tables.overview_table([SUMMARY, other, SUMMARY | {"method": "pld", "settings": {"ngram": 3}}]),
        cells.PIPED_WIDTH,
    )
    assert "max_draft_tokens=6" in text and "max_draft_tokens=3" in text
    assert "exit_layer" not in text and "ngram" not in text
    assert max(len(line) for line in text.splitlines()) <= cells.PIPED_WIDTH


def on(pair: str, method: str, speedup: float, **settings) -> dict:
    return faster(speedup, pair=pair, target=f"models/{pair}", method=method, settings=settings)


def test_speedups_by_pair_and_their_mean():
    runs = [
        on("tiny", "s2d", 1.6, draft="a") | {"limit": 6},  # pairs have limits of their own
        on("tiny_shallow", "s2d", 1.3, draft="b") | {"limit": 2},
        on("tiny", "sps", 1.5, size=2),
        on("tiny", "sps", 1.4, size=3),
        on("tiny_shallow", "sps", 1.0, size=2),
    ]
    text = shown(tables.pairs_table(runs))
    rows = [line.split() for line in text.splitlines()]
    assert "s2d 1.60 [1.50, 1.70] 1.30 [1.20, 1.40] 1.450".split() in rows
    assert "sps, size=2 1.50 [1.40, 1.60] 1.00 [0.90, 1.10] 1.250".split() in rows
    assert "size=3" not in text and "draft=" not in text  # on one pair alone; not varied on a pair
    assert tables.pairs_table(runs[2:4]) is None


def test_a_pair_shows_its_largest_run_and_none_with_violations():
    """A smoke run after a full one, and one whose answers are wrong, would stand in its place without a word."""
    runs = [on("tiny", "sps", 1.5), on("tiny_shallow", "sps", 1.0)]
    smoke = changed(on("tiny", "sps", 9.0), overall__questions=6) | {"limit": 1}
    false = changed(on("tiny", "sps", 8.0), equivalence__violation=1)
    text = shown(tables.pairs_table([*runs, smoke, false]))
    assert "1.50 [1.40, 1.60]" in text and "9.00" not in text and "8.00" not in text
    lossy = [on(pair, "sps", 2.5) | {"verification": "typical"} for pair in ("tiny", "tiny_shallow")]
    assert "2.50" not in shown(tables.pairs_table([*runs, *lossy]))
    newer = on("tiny", "sps", 1.7)
    assert "1.70 [1.60, 1.80]" in shown(tables.pairs_table([*runs, newer, smoke]))


def test_pairs_bring_a_target_and_whether_layers_are_compiled():
    first, second = on("tiny", "s2d", 1.6), on("tiny_shallow", "s2d", 1.3)
    runs = [first | {"compiled": True}, second | {"compiled": False}]
    assert "s2d 1.60 [1.50, 1.70] 1.30 [1.20, 1.40] 1.450" in " ".join(
        shown(tables.pairs_table(runs)).split()
    )
    again = on("tiny", "s2d", 1.2) | {"compiled": False}
    text = " ".join(shown(tables.pairs_table([*runs, again])).split())
    assert "s2d, compiled=False 1.20 [1.10, 1.30] 1.30 [1.20, 1.40] 1.250" in text


def test_targets_of_one_name_have_columns_of_their_own():
    runs = [on("local", "s2d", speed, draft=f"d{speed}") | {"target": f"/m/{speed}"} for speed in (1.6, 1.3)]
    old = on("local", "s2d", 1.1) | {"target": None}  # of a folder that does not tell it
    text = shown(tables.pairs_table([old, *runs]))
    assert "local (/m/1.3)" in text and "local (/m/1.6)" in text
    assert "s2d 1.10 [1.00, 1.20] 1.30 [1.20, 1.40] 1.60 [1.50, 1.70] 1.333" in " ".join(text.split())


def test_no_mean_is_taken_over_runs_that_differ_in_more_than_the_pair():
    def run(pair, batch_size, speedup):
        return faster(
            speedup,
            pair=pair,
            target=f"models/{pair}",
            method="ragged",
            drafter="sps",
            unit="pool",
            batch_size=batch_size,
            settings={},
        )

    runs = [run("tiny", 8, 1.5), run("tiny", 16, 2.0), run("tiny_shallow", 8, 1.3)]
    rows = [line.split() for line in shown(tables.pairs_table(runs)).splitlines()]
    assert "ragged + sps, batch 8 1.50 [1.40, 1.60] 1.30 [1.20, 1.40] 1.400".split() in rows
    assert not any("2.00" in row for row in rows)


def test_no_mean_is_taken_over_settings_that_were_changed_from_pair_to_pair():
    def run(pair, length, **source):
        settings = {"max_draft_tokens": length}
        told = {"target": f"models/{pair}", "settings_published": {"max_draft_tokens": 5}}
        told["settings_tuned_on"] = pair
        return faster(1.5, pair=pair, method="sps", settings=settings, **told, **source)

    changed_on_each = [
        run("tiny", 3, settings_source="changed"),
        run("tiny_shallow", 7, settings_source="changed"),
    ]
    assert tables.pairs_table(changed_on_each) is None
    again = run("tiny_shallow", 3, settings_source="changed")
    assert "sps, max_draft_tokens=3" in shown(tables.pairs_table([*changed_on_each, again]))
    tuned = [run("tiny", 3, settings_source="tuned"), run("tiny_shallow", 7, settings_source="tuned")]
    assert "max_draft_tokens" not in shown(tables.pairs_table(tuned))


def test_the_overview_of_a_sweep(capsys):
    runs = runs_of(a=on("tiny", "s2d", 1.6), b=on("tiny_shallow", "s2d", 1.3))
    tables.print_overview(runs)
    text = capsys.readouterr().out
    assert "all runs" in text and "speedups by pair" in text


def test_a_table_of_very_many_rows_is_only_named(capsys, monkeypatch):
    monkeypatch.setattr(tables, "ROWS_SHOWN", 2)
    tables.print_overview(runs_of(a=SUMMARY, b=on("tiny", "s2d", 1.6), c=batched()))
    text = " ".join(capsys.readouterr().out.split())
    assert "all runs, over all their questions: 3 rows, which python -m specbench.report writes" in text
    assert "speedups by task" in text and "79/1/0" in text and "1.60" in text  # the shorter ones


def test_spec_benchs_own_form():
    runs = [SUMMARY, faster(1.8, method="pld", overall__spec_bench_speedup=1.44), batched()]
    rows = [line.split() for line in shown(tables.spec_bench_table(runs), 112).splitlines()]
    kangaroo = next(row for row in rows if row[0] == "kangaroo")
    # three tasks that were not asked, qa, math, rag, acceptance length, overall, its definition, MBSU, answers
    assert kangaroo[1:] == [*"–––", "1.01", "1.52", "–", "3.21", "1.52", "1.55", "1.90", "79/1/0"]
    assert next(row for row in rows if row[0] == "pld")[-4:] == ["1.80", "1.44", "1.90", "79/1/0"]
    assert not any("exspec" in row for row in rows) and tables.spec_bench_table([batched()]) is None
    assert ["0.97–1.05", "1.47–1.58", "1.47–1.58"] in rows


def test_as_wide_as_it_is_piped_no_table_cuts_a_count():
    many = {"answers": 560, "exact": 550, "tie": 7, "violation": 13, "first_divergence_median": None}
    block = WRONG | {"equivalence": many}
    tasks = dict.fromkeys(("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"), block)
    run = SUMMARY | {
        "tasks": tasks,
        "overall": block,
        "equivalence": many,
        "method": "a_method_of_some_length",
    }
    for table in tables.overview([run, run | {"pair": "a-pair-of-models"}, batched()]):
        text = shown(table, cells.PIPED_WIDTH)
        assert "…" not in text
        if table.title.plain not in ("batches", "speedups by pair"):
            assert text.count(" 550/7/13") == 2


def test_batches_of_other_settings_have_names_of_their_own():
    one, other = batched(), changed(batched(), settings__window=64)
    names = [row[0] for row in texts(tables.batches_table([one, other]))]
    assert names == ["exspec + sps, window=32", "exspec + sps, window=64"]


@pytest.mark.process
def test_importing_the_tables_loads_no_torch():
    code = (
        "import sys, specbench.report.tables; sys.exit(not {'torch', 'scipy.stats'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
