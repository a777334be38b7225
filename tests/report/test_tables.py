import copy
import io
import re
import subprocess
import sys

import pytest
from rich.console import Console

from specbench.errors import UserError
from specbench.measure import metrics, store
from specbench.report import tables

NUMBERS = {
    "questions": 80,
    "tokens": 20000,
    "seconds": 100.0,
    "tokens_per_second": 1200.0,
    "speedup": 1.52,
    "speedup_low": 1.47,
    "speedup_high": 1.58,
    "decode_speedup": 1.6,
    "spec_bench_speedup": 1.5,
    "acceptance_length": 3.21,
    "acceptance_rate": 0.61,
    "exit_shares": None,
    "overlap": None,
    "mbsu": 1.9,
    "draft_seconds": 30.0,
    "verify_seconds": 60.0,
    "other_seconds": 5.0,
    "occupancy": None,
    "alignment_share": None,
    "group_rate": None,
    "equivalence": {"answers": 80, "exact": 79, "tie": 1, "violation": 0, "first_divergence_median": 12.0},
}
UNCLEAR = NUMBERS | {"speedup": 1.01, "speedup_low": 0.97, "speedup_high": 1.05}
WRONG = NUMBERS | {
    "equivalence": {"answers": 80, "exact": 77, "tie": 0, "violation": 3, "first_divergence_median": 4.0}
}
BASELINE = {
    "tokens_per_second": 41.2,
    "hf_generate_tokens_per_second": 36.0,
    "single_tokens_per_second": None,
    "quoted_against": "engine",
    "bandwidth_fraction": 0.71,
    "equivalence": {"answers": 80, "exact": 80, "tie": 0, "violation": 0, "first_divergence_median": None},
}
SUMMARY = {
    "schema": metrics.SCHEMA,
    "status": "complete",
    "failed": 0,
    "method": "kangaroo",
    "drafter": None,
    "settings": {"max_draft_tokens": 6, "exit_layer": 2, "confidence_threshold": 0.6},
    "pair": "tiny",
    "data": "spec_bench",
    "task": "all",
    "temperature": 0.0,
    "batch_size": 1,
    "dtype": "float32",
    "device": "cpu",
    "weights": "pretrained",
    "peak_memory_bytes": None,
    "overall": NUMBERS | {"questions": 160},
    "tasks": {"math_reasoning": NUMBERS, "qa": UNCLEAR},
    "equivalence": NUMBERS["equivalence"],
    "baseline": BASELINE,
}


def nothing(summary=SUMMARY) -> dict:
    """The same summary with null for every number of its tasks."""
    summary = copy.deepcopy(summary)
    judged = dict.fromkeys(NUMBERS["equivalence"]) | {"answers": 0}
    empty = dict.fromkeys(NUMBERS) | {"questions": 0, "equivalence": judged}
    baseline = dict.fromkeys(BASELINE) | {"quoted_against": "engine", "equivalence": judged}
    return summary | {"overall": empty, "tasks": {"qa": empty}, "equivalence": judged, "baseline": baseline}


def shown(renderable, width=100, color=False) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=color).print(renderable)
    return out.getvalue()


def wrong() -> dict:
    tasks = {"math_reasoning": NUMBERS, "rag": WRONG}
    return SUMMARY | {"tasks": tasks, "overall": WRONG, "equivalence": WRONG["equivalence"]}


def write_run(folder, name, summary):
    run_dir = folder / name
    run_dir.mkdir(parents=True)
    store.write_json(run_dir / store.SUMMARY, summary)
    store.write_json(run_dir / store.PROVENANCE, {"versions": {"torch": "2.13"}})
    return run_dir


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
        "no",
        "difference",
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


def batched(method="exspec", drafter="sps", batch_size=8, **numbers) -> dict:
    overall = NUMBERS | {"occupancy": 0.94, "alignment_share": 0.031, "group_rate": 0.0} | numbers
    baseline = BASELINE | {"single_tokens_per_second": 300.0}
    settings = {"window": 32, "drafter.max_draft_tokens": 5}
    return SUMMARY | {
        "method": method,
        "drafter": drafter,
        "batch_size": batch_size,
        "settings": settings,
        "overall": overall,
        "baseline": baseline,
        "peak_memory_bytes": 1_230_000_000,
    }


def test_a_batch_tells_how_it_was_used():
    text = " ".join(shown(tables.run_table(batched())).split())
    assert "exspec + sps (window=32, drafter.max_draft_tokens=5) on tiny" in text
    assert "batch of 8: 94% of the places in use, 3.1% of the time spent on lining rows up" in text
    assert (
        "rows of one length in 0% of the rounds, 4.00 times the tokens/s of plain decoding one by one" in text
    )
    assert "one length" not in shown(tables.run_table(batched(group_rate=None)))
    assert "batch of" not in shown(tables.run_table(SUMMARY))


def test_batches_side_by_side():
    runs = [
        SUMMARY,
        batched(),
        batched("ar_batch", "none", group_rate=None, alignment_share=None, speedup=None, speedup_low=None),
    ]
    text = shown(tables.batches_table(runs))
    assert max(len(line) for line in text.splitlines()) <= 100
    rows = [line.split() for line in text.splitlines()]
    cells = "exspec + sps 8 1200.0 4.00 1.52 [1.47, 1.58] 94% 3.1% 0% 1.23"
    assert cells.split() in rows
    assert any(row[0] == "ar_batch" and row[-1] == "1.23" for row in rows)
    assert tables.batches_table([SUMMARY]) is None


def test_two_settings_that_were_varied_make_a_heat_map():
    def run(exit_layer, kappa, speedup):
        settings = {"exit_layer": exit_layer, "kappa": kappa, "max_draft_tokens": 5}
        return SUMMARY | {"settings": settings, "overall": NUMBERS | {"speedup": speedup}}

    runs = [run(6, 1, 1.5), run(6, 2, 1.25), run(12, 1, 1.75), run(12, 2, None)]
    (grid,) = tables.grid_tables(runs)
    rows = [line.split() for line in shown(grid).splitlines()]
    assert ["exit_layer", "1", "2"] in rows and ["6", "1.50", "1.25"] in rows and ["12", "1.75", "–"] in rows
    assert tables.grid_tables(runs[:2]) == [] and tables.grid_tables([SUMMARY]) == []


def test_what_drafting_beside_the_target_gains():
    overlap = {
        "fall_back_rate": 0.125,
        "fall_back_rate_by_accepted": {"0": 0.125},
        "hidden_share": 0.83,
        "exit_seconds": 0.0042,
        "rest_seconds": 0.0061,
        "early_seconds": 0.0012,
        "beside_seconds": 0.0055,
        "after_hit_seconds": 0.0,
        "after_miss_seconds": 0.004,
        "waited_seconds": 0.0009,
        "idle_seconds": 0.001,
        "handover_seconds": None,
        "model_seconds": None,
        "round_seconds": 0.0123,
    }
    text = " ".join(shown(tables.run_table(SUMMARY | {"overall": NUMBERS | {"overlap": overlap}})).split())
    assert "83% of the draft's time hidden, 12% of the decisions not guessed" in text
    assert (
        "a round took 12.3 ms: 4.2 to the exit and 6.1 behind it (drafting meanwhile 1.2 and 5.5), " in text
    )
    assert "0.9 waiting; the latency model says – ms" in text


def test_exit_shares_are_told_where_there_are_several():
    for shares, said in (({"2": 0.6, "6": 0.4}, True), ({"2": 1.0}, False)):
        summary = SUMMARY | {"overall": NUMBERS | {"exit_shares": shares}}
        text = " ".join(shown(tables.run_table(summary)).split())
        assert ("draft tokens left the draft model after: 2 layers 60%, 6 layers 40%" in text) == said


def test_the_baseline_is_told():
    text = " ".join(shown(tables.run_table(SUMMARY)).split())
    assert "our loop 41.2 tokens/s, transformers generate 36.0" in text
    assert "speedups are against our loop, at 71% of the memory-bandwidth ceiling" in text
    other = tables.baseline_line(BASELINE | {"quoted_against": "hf_generate"}).plain
    assert "against transformers generate" in other
    disagreeing = BASELINE | {"equivalence": BASELINE["equivalence"] | {"violation": 2}}
    assert "VIOLATION: the two differ in 2 answers" in tables.baseline_line(disagreeing).plain


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
        tables.overview_table([SUMMARY, other, SUMMARY | {"method": "pld", "settings": {"ngram": 3}}])
    )
    assert "max_draft_tokens=6" in text and "max_draft_tokens=3" in text
    assert "exit_layer" not in text and "ngram" not in text
    assert max(len(line) for line in text.splitlines()) <= 100


def on(pair: str, method: str, speedup: float, **settings) -> dict:
    overall = NUMBERS | {"speedup": speedup, "speedup_low": speedup - 0.1, "speedup_high": speedup + 0.1}
    return SUMMARY | {"pair": pair, "method": method, "settings": settings, "overall": overall}


def test_speedups_by_pair_and_their_mean():
    runs = [
        on("tiny", "s2d", 1.6, draft="a"),
        on("tiny_shallow", "s2d", 1.3, draft="b"),
        on("tiny", "sps", 1.5, size=2),
        on("tiny", "sps", 1.4, size=3),
        on("tiny_shallow", "sps", 1.0, size=2),
    ]
    rows = [line.split() for line in shown(tables.pairs_table(runs)).splitlines()]
    assert "s2d 1.60 [1.50, 1.70] 1.30 [1.20, 1.40] 1.450".split() in rows
    assert "sps 1.50 [1.40, 1.60] no difference [0.90, 1.10] 1.250".split() in rows
    assert "sps 1.40 [1.30, 1.50] – –".split() in rows
    text = shown(tables.pairs_table(runs))
    assert "size=2" in text and "size=3" in text and "draft=" not in text
    assert tables.pairs_table(runs[2:4]) is None


def test_the_overview_of_a_sweep(tmp_path, capsys):
    runs = [on("tiny", "s2d", 1.6), on("tiny_shallow", "s2d", 1.3)]
    tables.print_overview([write_run(tmp_path, str(i), run) for i, run in enumerate(runs)])
    text = capsys.readouterr().out
    assert "all runs" in text and "speedups by pair" in text


def test_a_frame_has_a_row_per_run_and_task(tmp_path):
    runs = [write_run(tmp_path, "a", SUMMARY), write_run(tmp_path, "b", wrong())]
    (tmp_path / "c").mkdir()  # not finished
    frame = tables.summary_frame([*runs, tmp_path / "c"])
    assert frame[["run", "task"]].values.tolist() == [
        *(["a", "math_reasoning"], ["a", "qa"], ["a", "overall"]),
        *(["b", "math_reasoning"], ["b", "rag"], ["b", "overall"]),
    ]
    assert frame["violation"].tolist() == [0, 0, 0, 0, 3, 3]
    assert frame["baseline_quoted_against"].unique().tolist() == ["engine"]
    assert frame["settings"][0] == "max_draft_tokens=6, exit_layer=2, confidence_threshold=0.6"
    assert frame["speedup"][1] == 1.01
    assert tables.summary_frame([]).empty


def test_runs_of_another_schema_are_refused(tmp_path):
    run_dir = write_run(tmp_path, "a", SUMMARY | {"schema": 99})
    with pytest.raises(UserError, match="schema 99"):
        tables.read_summary(run_dir)


def test_runs_that_differ_in_more_than_the_method_say_so(tmp_path):
    runs = [write_run(tmp_path, name, SUMMARY) for name in "abc"]
    assert tables.not_comparable(runs) == []
    store.write_json(runs[1] / store.PROVENANCE, {"versions": {"torch": "2.0"}})
    (runs[2] / store.PROVENANCE).unlink()
    lines = tables.not_comparable(runs)
    assert "b is not comparable with a: versions.torch 2.13 against 2.0" in lines
    assert any(line.startswith("c may not be comparable") for line in lines) and len(lines) == 2


def report(*arguments, cwd) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "specbench.report.tables", *arguments]
    environment = {"PYTHONPATH": str(store.ROOT), "PATH": ""}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def test_the_command_prints_all_of_runs_when_piped(tmp_path):
    write_run(tmp_path / "runs", "1_good", SUMMARY)
    write_run(tmp_path / "runs", "2_bad", wrong())
    (tmp_path / "runs" / "3_unfinished").mkdir()
    done = report(cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("VIOLATION")  # the run with the violation comes first
    assert (
        done.stdout.index("runs/2_bad") < done.stdout.index("runs/1_good")
        and "3_unfinished" not in done.stdout
    )
    assert max(len(line) for line in done.stdout.splitlines()) <= 100 and "\x1b" not in done.stdout
    assert "all runs" in done.stdout


def test_the_command_says_when_there_is_nothing(tmp_path):
    done = report("nowhere", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr
        == "error: no finished run in nowhere: a run folder holds summary.json once it is complete\n"
    )


def test_importing_the_tables_loads_no_torch():
    code = (
        "import sys, specbench.report.tables; sys.exit(not {'torch', 'scipy.stats'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=store.ROOT, check=False).returncode == 0
