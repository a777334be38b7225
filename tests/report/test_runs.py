import io
import json
import sys
from pathlib import Path

import pandas as pd
import pytest

from specbench.measure.metrics.metrics import METRICS, Metric
from specbench.measure.metrics.summary import SCHEMA
from specbench.measure.records import run_folder as store
from specbench.measure.records.migrate import LATER, migrated_summary
from specbench.report import __main__ as command
from specbench.report import formats, plots, runs, tables
from specbench.report.labels import labels, task_names
from specbench.report.runs import Run, finished_runs, read_run, read_runs
from specbench.system.errors import UserError
from specbench.system.files import write_json
from tests.support.messages import says
from tests.support.samples import (
    PROVENANCE,
    SUMMARY,
    batched,
    changed,
    faster,
    nothing,
    run_of,
    runs_of,
    summarised,
    write_run,
    wrong,
)
from tests.support.synthetic import CONFIG, FACTS, answered, record


def summary_text(summary: dict) -> str:
    return json.dumps(summary)


def without(summary: dict, *path: str) -> dict:
    """A copy that lacks a key."""
    *above, last = path
    inner = summary = json.loads(json.dumps(summary))
    for key in above:
        inner = inner[key]
    del inner[last]
    return summary


# What may lie in a run folder instead of a summary, and what the reader is told.
DAMAGED = {
    "cut": (summary_text(SUMMARY)[:-40], "damaged ... summary.json ... read"),
    "empty": ("", "damaged ... summary.json ... read"),
    "not_text": (b"\xff\xfe\x00", "damaged ... summary.json ... read"),
    "a_list": ("[1, 2]", "damaged ... summary.json ... no summary"),
    "no_schema": (summary_text(without(SUMMARY, "schema")), "damaged ... summary.json ... no summary"),
    "newer": (
        summary_text(SUMMARY | {"schema": 99}),
        f"summary.json ... 99 ... {SCHEMA}",
    ),
    "no_method": (summary_text(without(SUMMARY, "method")), "damaged ... summary.json ... method"),
    "no_weights": (summary_text(without(SUMMARY, "weights")), "damaged ... summary.json ... weights"),
    "no_tokens": (
        summary_text(without(SUMMARY, "overall", "tokens")),
        "damaged ... summary.json ... overall.tokens",
    ),
    "half_a_task": (
        summary_text(without(SUMMARY, "tasks", "qa", "equivalence", "tie")),
        "damaged ... summary.json ... tasks.qa.equivalence.tie",
    ),
    "no_baseline": (
        summary_text(without(SUMMARY, "baseline", "quoted_against")),
        "damaged ... summary.json ... baseline.quoted_against",
    ),
    "other_kind": (
        summary_text(SUMMARY | {"overall": None, "tasks": []}),
        "damaged ... summary.json ... overall, tasks",
    ),
    "nothing_in_it": (
        summary_text({"schema": SCHEMA}),
        "damaged ... summary.json ... failed, method, drafter",
    ),
    "of_0_2": (summary_text(without(SUMMARY, "records")), "summary.json ... specbench 0.2: measure it again"),
    "unfinished": (None, "unfinished"),
}


WHOLE = [answered(1), record(2, error="no memory"), answered(3)]
# What may have become of the records of a whole run, and what the reader is told.
BROKEN = {
    "gone": (lambda path: path.unlink(), "damaged ... records.jsonl ... 0 ... 3"),
    "halved": (lambda path: keep(path, 1.5), "damaged ... records.jsonl ... 1 ... 3"),
    "one_too_many": (lambda path: keep(path, 3, 3), "damaged ... records.jsonl ... 4 ... 3"),
}
SPOILT = {
    "no_turns": (lambda one: one.pop("turns"), "damaged ... records.jsonl, line 3 ... turns"),
    "no_arms": (lambda one: one["turns"][0].pop("arms"), "damaged ... records.jsonl, line 3 ... arms"),
    "no_steps": (
        lambda one: one["turns"][0]["arms"]["method"][0].pop("steps"),
        "damaged ... records.jsonl, line 3 ... steps",
    ),
}


def keep(path: Path, lines: float, again: int = 0) -> None:
    """Leaves so many lines, the last one cut, and adds line `again` once more."""
    have = path.read_text().splitlines(keepends=True)
    more = have[int(lines)][:40] if lines % 1 else have[again - 1] if again else ""
    path.write_text("".join(have[: int(lines)]) + more)


def spoil(path: Path, change) -> None:
    *whole, last = map(json.loads, path.read_text().splitlines())
    change(last)
    path.write_text("".join(f"{json.dumps(one)}\n" for one in [*whole, last]))


@pytest.mark.parametrize("name", BROKEN)
def test_a_run_without_all_of_its_records_is_left_out_and_named(tmp_path, name):
    change, said = BROKEN[name]
    write_run(tmp_path, "good", records=WHOLE)
    change(write_run(tmp_path, name, records=WHOLE) / store.RECORDS)
    found, (item,) = read_runs([tmp_path])
    assert [run.name for run in found] == ["good"] and item.folder.name == name
    assert says(item.reason, said) and "\n" not in item.reason
    with pytest.raises(UserError, match=name):
        read_run(item.folder)


@pytest.mark.parametrize("name", SPOILT)
def test_a_record_that_lacks_something_is_told_in_one_line(tmp_path, name, capsys, monkeypatch):
    change, said = SPOILT[name]
    first, second = (write_run(tmp_path, folder, records=WHOLE) for folder in ("first", "second"))
    spoil(write_run(tmp_path, name, records=WHOLE) / store.RECORDS, change)
    found, left_out = read_runs([tmp_path], with_records=True)
    assert [run.name for run in found] == ["first", "second"]
    (item,) = left_out
    assert item.folder.name == name and says(item.reason, said)
    monkeypatch.setattr("sys.argv", ["report", "compare", str(first), str(second), str(tmp_path / name)])
    assert command.main() == 0
    assert f"left out: {name}: {item.reason}" in capsys.readouterr().out


def test_a_file_beside_run_folders_is_left_out_and_named(tmp_path):
    """A shell's `runs/*` names runs/README.md, too."""
    run = write_run(tmp_path, "run", records=WHOLE)
    (tmp_path / "README.md").write_text("runs")
    found, (item,) = read_runs(sorted(tmp_path.iterdir()))
    assert [one.name for one in found] == [run.name]
    assert item.folder.name == "README.md" and item.reason == "there is no run in it"


def test_a_folder_of_an_earlier_version_is_derived_from_its_records(tmp_path):
    """It knew no number of pools, its interval was a bootstrap's, and its share of hidden drafting another."""
    records = [answered(i, slow=1 + i % 4, accepted=[i % 6]) for i in range(12)]
    today = summarised(records)
    older = without(changed(today, overall__speedup_low=1.9, tasks__qa__speedup_low=1.9), "overall", "pools")
    run_dir = write_run(tmp_path, "older", without(older, "tasks", "qa", "pools"), records=records)
    write_json(run_dir / store.FACTS, FACTS)
    (run_dir / store.CONFIG).write_text(json.dumps(CONFIG))  # JSON is YAML
    assert read_run(run_dir).summary == today
    (run_dir / store.FACTS).unlink()
    with pytest.raises(UserError, match=r"summary\.json lacks overall\.pools"):
        read_run(run_dir)


LACKING = [(store.FACTS, ("weights",)), (store.CONFIG, ("decoding", "temperature"))]


@pytest.mark.parametrize(("file", "path"), LACKING)
def test_an_older_folder_that_lacks_a_fact_or_setting_is_left_out_and_named(tmp_path, file, path):
    """The others are read all the same."""
    today = summarised([answered(1)])
    for name in ("good", "older"):
        run_dir = write_run(tmp_path, name, without(today, "overall", "mbsu"), records=[answered(1)])
        for where, content in ((store.FACTS, FACTS), (store.CONFIG, CONFIG)):
            lacks = (name, where) == ("older", file)
            write_json(run_dir / where, without(content, *path) if lacks else content)
    found, (item,) = read_runs([tmp_path])
    assert [run.name for run in found] == ["good"] and item.folder.name == "older"
    assert says(item.reason, "damaged ... summary.json ... overall.mbsu")


@pytest.mark.parametrize(("device", "processor"), [("cpu", "EPYC"), ("cuda:0", "H100")])
def test_the_processor_of_an_older_folder_is_that_of_its_provenance(tmp_path, device, processor):
    facts, records = without(FACTS, "processor") | {"device": device}, [answered(1)]
    today = summarised(records)
    origin = changed(PROVENANCE, machine__gpus=[{"name": "H100"}])
    run_dir = write_run(tmp_path, "older", without(today, "processor"), origin, records)
    write_json(run_dir / store.FACTS, facts)
    (run_dir / store.CONFIG).write_text(json.dumps(CONFIG))
    assert read_run(run_dir).summary["processor"] == processor
    (run_dir / store.PROVENANCE).unlink()
    assert read_run(run_dir).summary["processor"] is None


def test_the_questions_of_an_older_folder_are_those_of_its_provenance(tmp_path):
    """Its summary names the data alone, of which several files may go by one name."""
    older = without(SUMMARY, "questions_sha256")
    assert run_of(tmp_path, "a", older).summary["questions_sha256"] == "e" * 64
    assert run_of(tmp_path, "b", older, provenance=None).summary["questions_sha256"] is None


# Keys that all folders of this schema have, or that are made of others: a new key belongs among those of `LATER`.
FROM_THE_BEGINNING = {
    *("schema", "status", "failed", "method", "drafter", "settings", "pair", "data", "task", "limit"),
    *("temperature", "max_new_tokens", "seed", "batch_size", "repeats", "protocol", "dtype", "device"),
    *("processor", "weights", "peak_memory_bytes", "tasks", "overall", "equivalence", "baseline"),
    *("unit", "records", "learns", "drift", "likelihood", "machine"),
}


def test_reports_need_not_ask_whether_an_older_summary_has_a_key():
    today = summarised([answered(1)])
    assert today.keys() - LATER.keys() == FROM_THE_BEGINNING
    older = {key: value for key, value in today.items() if key not in LATER.keys() | {"learns"}}
    assert migrated_summary(older).keys() == today.keys()
    # Where the forms of layers were measured, "compiled" meant something else.
    assert migrated_summary(today | {"compiled": True, "layouts": {"groups": {}}})["compiled"] is None


def test_a_metric_of_ones_own_is_one_entry(tmp_path, monkeypatch):
    records = [answered(i) for i in range(3)]
    run_dir = write_run(tmp_path, "older", summarised(records), records=records)
    write_json(run_dir / store.FACTS, FACTS)
    (run_dir / store.CONFIG).write_text(json.dumps(CONFIG))
    monkeypatch.setitem(METRICS, "longest", Metric(lambda measured: int(measured.method["tokens"].max())))
    of_pools = Metric(lambda measured: 1, "pool")
    monkeypatch.setitem(METRICS, "of_pools", of_pools)
    monkeypatch.setitem(runs.NUMBERS, "longest", None)
    found = read_run(run_dir)
    summary = found.summary
    assert summary["overall"]["longest"] == summary["tasks"]["qa"]["longest"] == 8
    assert summary["overall"]["of_pools"] is None
    assert runs.summary_frame([found])["longest"].tolist() == [8, 8]


@pytest.mark.first_fast
@pytest.mark.parametrize("missing", [("overall", "mbsu"), ("tasks", "qa", "acceptance_rate"), ("weights",)])
def test_a_number_that_is_newer_than_a_folder_is_made_of_its_records(tmp_path, missing):
    records = [answered(i, slow=1 + i % 4, accepted=[i % 6]) for i in range(12)]
    today = summarised(records)
    run_dir = write_run(tmp_path, "older", without(today, *missing), records=records)
    write_json(run_dir / store.FACTS, FACTS)
    (run_dir / store.CONFIG).write_text(json.dumps(CONFIG))
    assert read_run(run_dir).summary == today
    (run_dir / store.RECORDS).unlink()
    with pytest.raises(UserError, match=missing[-1]):
        read_run(run_dir)


def damage(folder: Path, name: str) -> Path:
    run_dir = write_run(folder, name)
    path, content = run_dir / store.SUMMARY, DAMAGED[name][0]
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return run_dir


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_or_unfinished_run_is_left_out_and_named(tmp_path, name):
    write_run(tmp_path, "good")
    damaged = damage(tmp_path, name)
    found, left_out = read_runs([tmp_path])
    assert [run.name for run in found] == ["good"]
    (item,) = left_out
    assert item.folder == damaged and says(item.reason, DAMAGED[name][1]) and "\n" not in item.reason
    with pytest.raises(UserError, match=name):  # alone it is named, too
        read_run(damaged)


def test_a_run_that_was_given_up_says_why(tmp_path):
    """The same command does not resume it, so nobody is told to give it again."""
    given_up = write_run(tmp_path, "a")
    (given_up / store.SUMMARY).unlink()
    store.give_up(given_up, "it began under other conditions")
    _, [left_out] = read_runs([given_up])
    assert str(left_out) == "a: given up: it began under other conditions"


@pytest.mark.parametrize("order", [("old", "new"), ("new", "old")])
def test_of_runs_of_one_kind_the_newest_counts_whatever_its_name_and_place(
    tmp_path, capsys, monkeypatch, order
):
    for name, speedup, day in (("old", 1.3, 1), ("new", 0.9, 2)):
        began = PROVENANCE | {"time": f"2026-01-0{day}T03:04:05+0000"}
        write_run(tmp_path, name, faster(speedup, method="sps"), provenance=began)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["report", *order, "--out", "out"])
    assert command.main() == 0
    assert "Stay with autoregressive decoding" in capsys.readouterr().out
    runs_there, _ = read_runs([tmp_path / name for name in order])
    assert [run.name for run in runs.oldest_first(runs_there)] == ["old", "new"]


def test_no_number_is_taken_from_what_is_left_out(tmp_path):
    for name in DAMAGED:
        damage(tmp_path, name)
    write_run(tmp_path, "good", faster(1.3))
    found, left_out = read_runs([tmp_path])
    assert {item.folder.name for item in left_out} == set(DAMAGED)
    assert runs.summary_frame(found)["run"].unique().tolist() == ["good"]


def test_what_the_runner_writes_is_whole(tmp_path):
    """The keys that reports ask for are those of the summaries that are written, with and without answers."""
    failed = [answered(1), answered(2, "rag"), record(3, error="no memory")]
    for name, records in {"some": failed, "none": []}.items():
        for unit in ("question", "pool"):
            facts = FACTS | {"unit": unit}
            summary = summarised(records, facts, CONFIG | {"batch_size": 2})
            found = run_of(tmp_path, f"{name}_{unit}", summary, records=records)
            assert found.summary == summary


def test_other_folders_are_no_runs(tmp_path):
    write_run(tmp_path, "run")
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "index.html").write_text("")
    (tmp_path / "README.md").write_text("")
    found, left_out = read_runs([tmp_path])
    assert [run.name for run in found] == ["run"] and left_out == []
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / store.RECORDS).write_text("")
    assert [item.folder.name for item in read_runs([tmp_path])[1]] == ["begun"]


def test_paths_are_runs_or_folders_of_runs_each_read_once(tmp_path, monkeypatch):
    first, second = write_run(tmp_path / "one", "b"), write_run(tmp_path / "one", "a")
    third = write_run(tmp_path / "other", "c")
    empty = tmp_path / "empty"
    empty.mkdir()
    found, left_out = read_runs([third, tmp_path / "one", first, empty])
    assert [run.folder for run in found] == [third, second, first]
    assert [item.folder for item in left_out] == [empty] and "no run" in left_out[0].reason
    monkeypatch.chdir(tmp_path)
    assert len(read_runs([Path("one"), tmp_path / "one" / "a"])[0]) == 2


def test_without_a_finished_run_the_reader_is_told_why(tmp_path):
    damage(tmp_path, "cut")
    with pytest.raises(UserError, match=r"cut: damaged: summary\.json"):
        finished_runs([tmp_path])
    with pytest.raises(UserError, match="nowhere"):
        finished_runs([tmp_path / "nowhere"])


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", json.dumps(PROVENANCE | {"machine": None})])
def test_provenance_that_cannot_be_read_is_none(tmp_path, content):
    run_dir = write_run(tmp_path, "a", provenance=None)
    if content is not None:
        (run_dir / store.PROVENANCE).write_text(content)
    assert read_run(run_dir).provenance is None


# -- all together


def test_a_frame_has_a_row_per_run_and_task():
    frame = runs.summary_frame(runs_of(a=SUMMARY, b=wrong()))
    assert frame[["run", "task"]].values.tolist() == [
        *(["a", "math_reasoning"], ["a", "qa"], ["a", "overall"]),
        *(["b", "math_reasoning"], ["b", "rag"], ["b", "overall"]),
    ]
    assert frame["violation"].tolist() == [0, 0, 0, 0, 3, 3]
    assert frame["baseline_quoted_against"].unique().tolist() == ["engine"]
    assert frame["settings"][0] == "max_draft_tokens=6, exit_layer=2, confidence_threshold=0.6"
    assert frame["speedup"][1] == 1.01
    assert runs.summary_frame([]).empty


def test_a_frame_reads_back_from_csv_as_it_was(tmp_path):
    third = faster(1 / 3, overall__tokens_per_second=1e5 / 7, overall__tokens=2**53 - 1)
    frame = runs.summary_frame(runs_of(a=third, b=batched(), c=nothing()))
    frame.to_csv(tmp_path / "runs.csv", index=False)
    back = pd.read_csv(tmp_path / "runs.csv", float_precision="round_trip")
    assert back.columns.tolist() == frame.columns.tolist() and len(back) == len(frame)
    numeric = [name for name in back if pd.api.types.is_numeric_dtype(back[name])]
    assert {"speedup", "speedup_low", "tokens", "tokens_per_second", "mbsu", "violation"} <= set(numeric)
    for name in numeric:
        expected = pd.to_numeric(frame[name])
        assert (back[name].eq(expected) | (back[name].isna() & expected.isna())).all(), name
    assert back["speedup"][2] == 1 / 3


def test_runs_that_differ_in_more_than_the_method_say_so(tmp_path):
    torch = changed(PROVENANCE, versions__torch="2.0")
    given = {"a": PROVENANCE, "b": torch, "c": None, "d": torch, "e": torch, "f": torch, "g": PROVENANCE}
    found = [run_of(tmp_path, name, provenance=known) for name, known in given.items()]
    assert runs.not_comparable([found[0], found[-1]]) == [] == runs.not_comparable([])
    torches, unread = runs.not_comparable(found)
    assert says(torches, "a: b, d, e and 1 more ... versions.torch 2.13 ... 2.0")
    assert says(unread, "a: c ... provenance.json")
    assert "provenance.json" in runs.not_comparable([found[2]])[0]


def test_the_seed_of_greedy_batches_counts_as_it_orders_their_pools(tmp_path):
    batch = batched(batch_size=8)
    pools = [run_of(tmp_path, f"p{seed}", batch | {"seed": seed}) for seed in (0, 1)]
    alone = [run_of(tmp_path, f"q{seed}", SUMMARY | {"seed": seed}) for seed in (0, 1)]
    assert says(runs.not_comparable(pools)[0], "p1 ... seed 0 against 1") and runs.not_comparable(alone) == []


def test_settings_that_an_older_version_did_not_have_are_no_difference_but_others_are(tmp_path):
    today = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "verification": "token", "verify_width": None}
    before, now, cut, endless = (
        run_of(tmp_path, name, provenance=changed(PROVENANCE, **changes))
        for name, changes in (
            ("before", {"config__decoding": {"temperature": 0.0}}),
            ("now", {"config__decoding": today}),
            ("cut", {"config__decoding": today | {"top_k": 4}}),
            ("endless", {"config__decoding": today, "config__pair__stop_ids": []}),
        )
    )
    assert runs.not_comparable([before, now]) == []
    assert says(runs.not_comparable([before, cut])[0], "config.decoding.top_k 0 against 4")
    assert says(runs.not_comparable([now, endless])[0], "config.pair.stop_ids None against []")


def test_a_rule_for_draft_lengths_is_a_method_of_its_own(tmp_path):
    """As its settings are: runs of it are told apart, are no repeats of others, and nobody wonders that they differ."""
    other = changed(PROVENANCE, config__decoding={"draft_length": "adaptive", "round_costs": [1.0, 1.2]})
    found = [run_of(tmp_path, "a"), run_of(tmp_path, "b", SUMMARY | {"draft_length": "adaptive"}, other)]
    assert runs.not_comparable(found) == []
    first, second = labels(run.summary for run in found)
    assert second.startswith(f"{first.split(',')[0]}, adaptive draft length")


def test_other_pairs_and_batch_sizes_are_no_surprise(tmp_path):
    other = changed(PROVENANCE, config__pair__target="models/other")
    found = [
        run_of(tmp_path, "a"),
        run_of(tmp_path, "b", SUMMARY | {"pair": "big"}, other),
        run_of(tmp_path, "c", batched(batch_size=8), changed(PROVENANCE, config__batch_size=8)),
    ]
    assert runs.differing_by_pair(found) == [] and len(runs.not_comparable(found)) == 2
    same_pair = run_of(tmp_path, "d", provenance=other)
    assert "config.pair.target" in runs.differing_by_pair([*found, same_pair])[0]


def test_a_run_reads_its_records_only_when_asked(tmp_path):
    run_dir = write_run(tmp_path, "a", records=[answered(1), answered(2)])
    run = read_run(run_dir)
    _, line = (run_dir / store.RECORDS).read_bytes().splitlines(keepends=True)
    (run_dir / store.RECORDS).write_bytes(b"{broken\n" + line)
    assert run.summary == changed(SUMMARY, overall__questions=2, overall__speedup_questions=2, records=2)
    with pytest.raises(UserError, match=r"records\.jsonl, line 1"):
        _ = run.records
    assert Run(tmp_path / "no_records", SUMMARY).records == []


def test_a_task_of_ones_own_is_in_every_table_and_plot(tmp_path):
    mine = SUMMARY | {"tasks": {"poetry": SUMMARY["tasks"]["qa"], "rag": SUMMARY["tasks"]["qa"]}}
    assert task_names([mine, SUMMARY]) == ["qa", "math_reasoning", "rag", "poetry"]
    assert "poetry" in formats.markdown(tables.spec_bench_table([mine]))
    assert "poetry" in formats.markdown(tables.run_table(mine))
    named, _ = plots.chosen([("mine", run_of(tmp_path, "mine", mine))])
    ticks = plots.speedup_by_task(named).axes[0].get_yticklabels()
    assert [tick.get_text() for tick in ticks] == ["rag", "poetry", "overall"]


def test_a_run_in_the_working_directory_has_its_folders_name(tmp_path, monkeypatch):
    folder = tmp_path / "mine"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert Run(Path(), SUMMARY).name == "mine"
    assert str(runs.SkippedRun(Path(), "it is empty")) == "mine: it is empty"
    assert command.beside(Path()) == tmp_path and command.beside(Path("runs/mine")) == Path("runs")


def test_a_terminal_that_lacks_a_sign_ends_no_report(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    monkeypatch.setenv("COLUMNS", "200")
    tables.print_overview([Run(Path("a"), SUMMARY)])
    assert b"kangaroo" in written.getvalue()
