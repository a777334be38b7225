"""`specbench compare --fail-below`: which runs pass, fail, or may not be compared."""

import json
import sys
from dataclasses import replace
from itertools import count

import pytest

from specbench.measure.records import run_folder as store
from specbench.report import __main__ as report
from specbench.report import gate
from specbench.report.remarks import ONE_PROCESS
from specbench.report.runs import differences
from tests.report.test_compare import records, run, seconds  # noqa: F401 - run is a fixture
from tests.report.test_phases import measured
from tests.support.messages import says
from tests.support.samples import PROVENANCE, SUMMARY, changed
from tests.support.synthetic import slowed


@pytest.fixture
def pair(run):  # noqa: F811 - the fixture
    """Two runs of one method; `speedup` is that of the second, the first has 1.5."""

    number = count()

    def make(speedup: float, provenance: dict = PROVENANCE, summary: dict = SUMMARY, **more):
        n = next(number)
        first = run(f"a{n}", records(seconds(1.5, seed=1)))
        return [first, run(f"b{n}", records(seconds(speedup, seed=2), **more), summary, provenance)]

    return make


def command(monkeypatch, capsys, *arguments: str) -> tuple[int, str]:
    """Exit code and stdout of `specbench compare`."""
    monkeypatch.setattr(sys, "argv", ["specbench compare", "compare", *map(str, arguments)])
    code = report.main()
    return code, capsys.readouterr().out


@pytest.mark.parametrize(
    ("speedup", "verdict", "code"), [(1.5, "passed", 0), (1.8, "passed", 0), (1.2, "failed", 1)]
)
def test_the_whole_interval_must_lie_below_to_fail(pair, speedup, verdict, code):
    judged = gate.judge(pair(speedup), fail_below=0.97)
    [one] = judged
    assert (one.verdict, gate.exit_code(judged), one.reasons) == (verdict, code, [ONE_PROCESS])
    assert one.low < one.ratio < one.high and one.count == 40
    assert one.ratio == pytest.approx(speedup / 1.5, abs=0.03)


def test_an_interval_that_holds_the_limit_passes(pair):
    [one] = gate.judge(pair(1.5), fail_below=1.0)
    assert one.low < 1.0 < one.high and one.verdict == "passed"
    [one] = gate.judge(pair(1.5), fail_below=one.high + 0.001)
    assert one.verdict == "failed"


def test_without_a_limit_nothing_is_judged(pair):
    judged = gate.judge(pair(1.2))
    assert judged[0].verdict is None and gate.exit_code(judged) == 0


def test_other_code_is_what_a_gate_judges_but_another_machine_is_not(pair):
    other = changed(PROVENANCE, source_sha256="f" * 64)
    assert gate.judge(pair(1.5, other), fail_below=0.97)[0].verdict == "passed"
    other = changed(PROVENANCE, machine__cpu="another")
    judged = gate.judge(pair(1.5, other), fail_below=0.97)
    assert judged[0].verdict == "incomparable" and gate.exit_code(judged) == 2
    assert "machine.cpu" in judged[0].reasons[0]
    assert gate.judge(pair(1.5, other), fail_below=0.97, allow=["machine"])[0].verdict == "passed"


def test_violations_fail_whatever_the_speed(pair):
    summary = SUMMARY | {"equivalence": SUMMARY["equivalence"] | {"violation": 1}}
    [one] = gate.judge(pair(2.0, summary=summary), fail_below=0.97)
    assert one.verdict == "failed" and "VIOLATION: 1 of 80 answers" in one.reasons[0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"failed": 3}, "FAILED: 3 questions"),
        ({"verification": "typical"}, "LOSSY"),
        ({"baseline__equivalence__violation": 2}, "differ in 2 answers"),
    ],
)
def test_whatever_is_wrong_with_a_run_fails_it(pair, change, says):
    first, second = pair(2.0)
    broken = replace(second, summary=changed(second.summary, **change))
    for runs in ([first, broken], [broken, first]):
        [one] = gate.judge(runs, fail_below=0.97)
        assert one.verdict == "failed" and says in one.reasons[0]


def test_a_question_that_failed_in_every_pass_fails_though_it_cannot_be_compared(pair):
    first, second = pair(2.0)
    broken = replace(second, summary=changed(second.summary, failed=1))
    broken.__dict__["records"] = [
        record | {"turns": []} if i == 0 else record for i, record in enumerate(second.records)
    ]
    judged = gate.judge([first, broken], fail_below=0.97)
    assert judged[0].verdict == "failed" and gate.exit_code(judged) == 1
    assert any("only the" in reason for reason in judged[0].reasons)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kernels": "no C++ compiler"}, "kernels our own against torch's (no C++ compiler)"),
        ({"tiles": True}, "kernels our own against our own, on AMX"),
        ({"compiled": True}, "compiled False against True"),
        ({"engine": {"version": "2"}}, "engine.version None against 2"),
    ],
)
def test_what_runs_computed_with_must_be_the_same(pair, change, says):
    ours = {"kernels": None, "compiled": False}
    first, second = (replace(one, summary=one.summary | ours) for one in pair(1.5))
    other = replace(second, summary=second.summary | change)
    assert says in differences(first, other)
    older = replace(first, summary=first.summary | dict.fromkeys(ours))
    assert not [line for line in differences(older, other) if line.startswith(("kernels", "compiled"))]
    if "engine" not in change:
        runs = [first, other]
        assert gate.judge(runs, fail_below=0.97)[0].verdict == "incomparable"
        assert gate.judge(runs, fail_below=0.97, allow=[says.split()[0]])[0].verdict == "passed"


def test_arms_that_took_turns_in_another_way_are_not_compared(pair):
    """By whole answers they meet other phases of the machine than slice by slice."""
    first, second = (replace(one, summary=one.summary | {"slice_seconds": 0.05}) for one in pair(1.5))
    whole = replace(second, summary=second.summary | {"slice_seconds": None})
    [judged] = gate.judge([first, whole], fail_below=0.97)
    assert judged.verdict == "incomparable" and says(
        judged.reasons[0], "arms took turns by ... whole answers"
    )
    for allow in ("slice_seconds", "slice"):
        assert gate.judge([first, whole], fail_below=0.97, allow=[allow])[0].verdict == "passed"
    assert gate.judge([first, second], fail_below=0.97)[0].verdict == "passed"


@pytest.mark.parametrize("change", [{"temperature": 1.0}, {"weights": "random"}])
def test_another_seed_is_another_measurement_where_it_changes_what_is_measured(pair, change):
    first, second = (replace(one, summary=one.summary | {"seed": i}) for i, one in enumerate(pair(1.5)))
    assert differences(first, second) == []
    first, second = (replace(one, summary=one.summary | change) for one in (first, second))
    assert differences(first, second) == ["seed 0 against 1"]


def test_another_machine_may_have_another_gpu(pair):
    gpu = {"device": "cuda:0", "processor": "H100"}
    first, second = (replace(one, summary=one.summary | gpu) for one in pair(1.5))
    runs = [first, replace(second, summary=second.summary | {"processor": "A100"})]
    assert gate.judge(runs, fail_below=0.97)[0].reasons == [
        "machine.processor H100 against A100",
        ONE_PROCESS,
    ]
    assert gate.judge(runs, fail_below=0.97, allow=["machine"])[0].verdict == "passed"


def test_a_run_that_was_named_and_has_no_numbers_stops_a_gate(pair, monkeypatch, capsys):
    """Else the one after it would be judged, or be what the others are judged by."""
    first, second = pair(1.5)
    (second.folder / store.SUMMARY).unlink()
    for options in (("--fail-below", "0.9"), ("--json",)):
        for folders in ((first.folder, second.folder), (second.folder, first.folder)):
            with pytest.raises(SystemExit) as ended:
                command(monkeypatch, capsys, *folders, *options)
            assert ended.value.code == 2
            assert f"a gate needs every run: {second.name}: unfinished" in capsys.readouterr().err


def test_one_run_is_no_comparison(pair, monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        command(monkeypatch, capsys, pair(1.5)[0].folder)
    assert ended.value.code == 2 and "a comparison needs two finished runs" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        *(("--fail-below", "nan"), ("--fail-below", "0"), ("--fail-below", "a")),
        *(("--allow", ""), ("--allow", "foo"), ("--allow", "machines")),
    ],
)
def test_a_limit_that_nothing_can_miss_is_refused(pair, monkeypatch, capsys, options):
    with pytest.raises(SystemExit) as ended:
        command(monkeypatch, capsys, *(run.folder for run in pair(1.5)), *options)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and options[0] in error and error.count("\n") == 1
    assert ("did you mean machine?" in error) == ("machines" in options)


@pytest.mark.parametrize(
    "key", ["machine", "machine.cpu", "versions.torch", "config.pair", "kernels", "seed"]
)
def test_what_may_differ_is_named_by_its_beginning(pair, monkeypatch, capsys, key):
    folders = (one.folder for one in pair(1.5))
    assert command(monkeypatch, capsys, *folders, "--fail-below", "0.5", "--allow", key)[0] == 0


def test_too_few_questions_for_an_interval_may_not_be_compared(run):  # noqa: F811
    few = dict(list(seconds(1.5, seed=1).items())[:5])
    [one] = gate.judge([run("a", records(few)), run("b", records(few))], fail_below=0.97)
    assert one.verdict == "incomparable" and one.ratio == pytest.approx(1) and one.low is None


@pytest.mark.parametrize("metric", ["acceptance_length", "mbsu"])
def test_what_needs_no_clock_is_the_same_on_a_slower_machine(pair, metric):
    [one] = gate.judge(pair(1.2, machine=3.0), metric, fail_below=0.97)
    assert (one.ratio, one.verdict, one.count) == (pytest.approx(1), "passed", 40)


def test_a_metric_that_a_run_lacks_is_named(pair):
    """Such as bytes of another engine: more questions would not help."""
    first, second = pair(1.5)
    for one in second.records:
        for generation in one["turns"][0]["arms"]["method"]:
            generation["steps"]["draft_bytes"] = [None] * len(generation["steps"]["draft_bytes"])
    [judged] = gate.judge(
        [first, replace(second, summary=changed(SUMMARY, overall__mbsu=None))], "mbsu", 0.97
    )
    assert judged.verdict == "incomparable" and judged.reasons == [f"{second.name} has no mbsu"]
    assert "questions that both" not in str(judged)


def test_what_the_machine_did_is_a_reason_to_doubt_a_time_and_no_failure(pair):
    first, second = pair(1.5)
    slow = replace(first, summary=measured(slowed(product=0.3), summary=first.summary))
    busy = replace(second, summary=second.summary | {"machine": {"still_disturbed_share": 0.4}})
    [one] = gate.judge([slow, busy], fail_below=0.97)
    assert one.verdict == "passed" and len(one.reasons) == 3
    assert str(one).splitlines()[-1].startswith("passed: speedup of")
    assert says(str(one), f"{slow.name}: SLOW MACHINE ... 30% ... {busy.name}: DISTURBED ... 40%")
    assert gate.judge([slow, busy], "acceptance_length", fail_below=0.97)[0].reasons == []


def test_an_interval_of_one_process_says_what_it_does_not_cover(pair):
    first, second = pair(1.5)
    assert gate.judge([first, second], fail_below=0.97)[0].reasons == [ONE_PROCESS]
    several = [replace(one, summary=one.summary | {"processes": 3}) for one in (first, second)]
    assert gate.judge(several, fail_below=0.97)[0].reasons == []
    assert gate.judge([several[0], second], fail_below=0.97)[0].reasons == [ONE_PROCESS]
    assert gate.judge([first, second], "acceptance_length", fail_below=0.97)[0].reasons == []


def test_the_command_prints_json_and_ends_with_the_exit_code(pair, monkeypatch, capsys):
    first, second = pair(1.2)
    folders = (first.folder, second.folder)
    code, out = command(monkeypatch, capsys, *folders, "--fail-below", "0.97", "--json")
    [one] = json.loads(out)
    assert code == 1 and one["verdict"] == "failed" and one["high"] < 0.97 and one["metric"] == "speedup"
    code, out = command(monkeypatch, capsys, *folders, "--fail-below", "0.5")
    assert code == 0 and "passed: speedup of" in out
    code, out = command(monkeypatch, capsys, *folders, "--metric", "acceptance_length")
    assert code == 0 and "acceptance_length / that of" in out


def test_a_metric_that_runs_are_not_compared_by_is_one_line(monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        command(monkeypatch, capsys, "A", "B", "--metric", "longest_accepted")
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith("error: unknown metric 'longest_accepted': ")
    assert error.count("\n") == 1 and "known: acceptance_length, mbsu, speedup" in error


def test_the_command_judges_only_when_it_is_asked_to(pair, monkeypatch, capsys):
    folders = [one.folder for one in pair(1.2)]
    asked = []
    monkeypatch.setattr(gate, "judge", lambda *given: asked.append(given) or [])
    monkeypatch.setattr(gate, "exit_code", lambda judged: 7)
    code, out = command(monkeypatch, capsys, *folders)
    assert code == 0 and "times as fast as" in out and not asked
    assert command(monkeypatch, capsys, *folders, "--json") == (7, "[]\n")
    assert command(monkeypatch, capsys, *folders, "--fail-below", "0.9")[0] == 7 and len(asked) == 2
