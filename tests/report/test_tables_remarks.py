"""What a table says of its runs: what is wrong with them, what others did on the machine, settings, another engine."""

from __future__ import annotations

import pytest

from specbench.report import remarks, tables, verdicts
from tests.support.messages import says, shown
from tests.support.samples import ENGINE, SUMMARY, WRONG, changed, nothing, runs_of, wrong


def test_what_is_wrong_with_a_run():
    assert verdicts.faults(SUMMARY) == []
    assert verdicts.faults(wrong())[0].startswith("VIOLATION: 3 of 80 ")
    assert verdicts.faults(changed(SUMMARY, failed=2))[0].startswith("FAILED: 2 ")
    disagreeing = changed(SUMMARY, baseline__equivalence__violation=4)
    assert says(verdicts.faults(disagreeing)[0], "VIOLATION: ... generate ... 4")
    assert verdicts.faults(nothing()) == []


def test_violations_of_any_arm_count_but_those_of_a_lossy_control():
    many = {"violation": 1}
    for arm in ({"equivalence": many}, {"baseline__equivalence": many}):
        assert verdicts.violates(changed(SUMMARY, **arm))
        assert not verdicts.violates(changed(SUMMARY, verification="typical", **arm))
    off = {"standard_errors": -9.0, "rare_p": None, "spread_p": None}
    assert verdicts.violates(changed(SUMMARY, likelihood={"method": off}))
    assert verdicts.violates(changed(SERVED, engine__again_equivalence=many))
    assert not any(verdicts.violates(one) for one in (SUMMARY, SERVED, nothing(), changed(SUMMARY, failed=2)))


def test_a_title_has_the_settings_that_are_set():
    title = remarks.title_text(changed(SUMMARY, settings={"nodes": None, "width": 4})).plain
    assert "(width=4) on" in title and "nodes" not in title
    assert "kangaroo on" in remarks.title_text(changed(SUMMARY, settings={"nodes": None})).plain


def test_what_a_ratio_rests_on():
    said = [remarks.paired_over(n, unit) for unit in ("question", "pool", "repeat") for n in (1, 2)]
    assert said[:4] == ["1 question", "2 questions", "1 pool", "2 pools"]
    assert said[4:] == ["1 repeat of one pool", "2 repeats of one pool: timing noise only"]


def test_expanded_weights_are_told(capsys):
    expanded = SUMMARY | {"weights": "expanded", "anatomy": "Llama of 36 layers x 4096", "pair": "qwen3-8b"}
    text = shown(tables.run_table(expanded))
    assert says(text, "expanded, Llama of 36 layers x 4096 at qwen3-8b's dimensions ... embedded family")
    tables.print_overview(runs_of(a=expanded, b=SUMMARY))
    assert says(capsys.readouterr().out, "expanded weights ... embedded family ... : a")


def test_an_overview_tells_of_random_weights(capsys):
    random = SUMMARY | {"weights": "random"}
    tables.print_overview(runs_of(a=random, b=SUMMARY))
    assert says(capsys.readouterr().out, "random weights ... acceptance ... : a")
    assert remarks.cautions(runs_of(a=SUMMARY)) == []
    assert remarks.cautions(runs_of(**dict.fromkeys("abcde", random)))[0].endswith("a, b, c and 2 more")


def test_an_overview_tells_what_speedups_are_against():
    slower = changed(SUMMARY, baseline__quoted_against="hf_generate")
    (told,) = remarks.cautions(runs_of(a=slower, b=SUMMARY))
    assert says(told, "transformers generate ... our loop ... : a")
    assert remarks.cautions(runs_of(a=slower, b=slower)) == []
    assert remarks.cautions(runs_of(a=slower, b=SUMMARY | {"engine": ENGINE})) == [], "its own baseline"


def test_of_many_notes_the_first_are_printed(capsys):
    tables.print_notes([f"note {i}" for i in range(13)])
    lines = capsys.readouterr().out.split("\n")
    assert lines[:-1] == [*(f"note {i}" for i in range(10)), "and 3 more"]


MACHINE = {
    "disturbed_share": 0.3, "still_disturbed_share": 0.04, "measured_again": 5, "others_cores": 0.42,
    "waited_share": 0.1, "stolen_share": 0.02, "throttled_share": 0.0, "switches_per_second": 9.0,
}  # fmt: skip


def test_what_others_did_on_the_machine_is_told():
    text = shown(tables.run_table(SUMMARY | {"machine": MACHINE}))
    words = " ".join(text.split())
    assert "other processes disturbed 30% of the time (4.0% after measuring 5 turns again)" in words
    assert "used 0.42 cores on average; 2.0% was stolen" in words and "DISTURBED" not in text
    unknown = dict.fromkeys(MACHINE)
    assert "disturbed" not in shown(tables.run_table(SUMMARY | {"machine": unknown}))


def test_a_run_that_stayed_disturbed_says_so_first():
    stayed = SUMMARY | {"machine": MACHINE | {"still_disturbed_share": 0.25}}
    first, *_ = shown(tables.run_table(stayed)).splitlines()
    assert first.startswith("DISTURBED: other processes were busy") and "25% of the measured time" in first
    noted = remarks.cautions(runs_of(calm=SUMMARY | {"machine": MACHINE}, busy=stayed))
    assert [line.split(":")[0] for line in noted] == ["busy"]


def test_passes_are_told_with_their_interval():
    measured = changed(SUMMARY, overall__passes_low=1.51, overall__passes_high=1.531, repeats=4)
    assert "over 4 passes the speedup of the same questions lies in [1.510, 1.531]" in " ".join(
        shown(tables.run_table(measured)).split()
    )
    several = " ".join(shown(tables.run_table(measured | {"processes": 2})).split())
    assert "over 4 passes in 2 processes" in several
    assert "same questions" not in shown(tables.run_table(SUMMARY))


def of_source(source: str | None, **more) -> dict:
    return SUMMARY | {"settings_source": source, "settings_tuned_on": None, "settings_published": {}} | more


@pytest.mark.parametrize(
    ("summary", "line"),
    [
        (of_source("published"), "published settings"),
        (
            of_source("tuned", settings_tuned_on="tiny", settings_published={"nodes": 59}),
            "settings tuned on tiny",
        ),
        (
            of_source("changed", settings={"nodes": 16}, settings_published={"nodes": 80, "width": None}),
            "settings changed: nodes=16 (published 80), width=null (published null)",
        ),
        (
            of_source(
                "changed", draft_length="adaptive", settings_published={"decoding.draft_length": "constant"}
            ),
            "settings changed: decoding.draft_length=adaptive (published constant)",
        ),
        (
            of_source(
                "changed",
                settings={"drafter.vocab_map": "maps/a", "drafter.vocab_size": 2048},
                settings_published={"vocab": "trim", "vocab.size": 4096},
            ),
            "settings changed: vocab.size=2048 (published 4096)",
        ),
        (
            of_source(
                "changed", settings={"vocab_map": "a", "vocab_size": 9}, settings_published={"vocab": "full"}
            ),
            "settings changed: vocab=trim (published full)",
        ),
        (
            of_source("changed", settings={"k": 3}, settings_published={"vocab": "trim", "vocab.size": 4096}),
            "settings changed: vocab=full (published trim), vocab.size=null (published 4096)",
        ),
        (of_source(None), ""),
        (SUMMARY, ""),  # an older run
    ],
)
def test_a_title_says_whether_settings_are_the_published_ones(summary, line):
    assert remarks.settings_line(summary) == line
    text = " ".join(shown(tables.run_table(summary)).split())
    assert f"whole answers; {line} " in text if line else "settings" not in text


def test_captions_say_whose_settings_are_the_published_ones():
    several = [
        *(of_source("published", method=method) for method in ("pld", "sps", "sps")),
        of_source("tuned", method="eagle2", settings_tuned_on="tiny"),
        of_source("changed", method="medusa", settings={"nodes": 9}, settings_published={"nodes": None}),
        SUMMARY | {"method": "old"},
    ]
    for table in (tables.overview_table(several), tables.spec_bench_table(several)):
        text = " ".join(shown(table, width=200).split())
        assert "published settings: pld, sps settings changed: medusa settings tuned on tiny: eagle2" in text
    assert "settings" not in shown(tables.overview_table([SUMMARY]), width=200)


def test_captions_name_runs_of_a_method_that_has_settings_of_several_kinds():
    several = [
        of_source("published", method="mine", settings={"length": 2}),
        of_source("changed", method="mine", settings={"length": 3}, settings_published={"length": 2}),
        of_source("changed", method="mine", settings={"length": 4}, settings_published={"length": 2}),
        of_source("changed", method="bigram"),
    ]
    assert remarks.settings_lines(several) == [
        "published settings: mine, published",
        "settings changed: mine, length=3; mine, length=4; bigram",
    ]
    tuned = [of_source("tuned", pair=pair, settings_tuned_on=pair) for pair in ("tiny", "smollm2-135m")]
    assert remarks.settings_lines(tuned) == [
        "settings tuned on smollm2-135m: kangaroo",
        "settings tuned on tiny: kangaroo",
    ]


SERVED = SUMMARY | {"engine": ENGINE}


def test_another_engine_is_named_with_its_baseline_and_what_it_has_against_itself():
    text = " ".join(shown(tables.run_table(SERVED), width=300).split())
    assert "kangaroo by llama_cpp" in text and "generate" not in text
    assert says(
        text,
        "plain llama_cpp 41.2 tokens/s, against itself 1.00 [0.98, 1.02]; our loop 37.5 ... xllamacpp==1, "
        "cache_type_k=f16; plain answers beside our loop's: 80/0/0, beside its own again: 79/1/0 ... processes=2",
    )
    assert "processes=2" not in shown(tables.run_table(SERVED | {"processes": 2}), width=300)
    assert "may be off" not in text
    off = changed(SERVED, engine__again={"speedup": 1.05, "low": 1.01, "high": 1.09})
    text = " ".join(shown(tables.run_table(off), width=300).split())
    assert "against itself 1.05 [1.01, 1.09] (not 1: speedups may be off" in text


@pytest.mark.parametrize("processes", [1, 2])
def test_servers_that_a_run_does_not_start_are_one_start_whatever_its_processes(processes):
    text = shown(tables.run_table(changed(SERVED, engine__started=False, processes=processes)), width=300)
    assert "started elsewhere, once" in text and "processes=2" not in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"engine__again": {"speedup": 1.05, "low": 1.01, "high": 1.09}}, None),  # far from 1.52 [1.47, 1.58]
        ({"engine__again": {"speedup": 1.5, "low": 1.45, "high": 1.55}}, "NO VERDICT ON SPEED"),
        ({"engine__again": {"speedup": 0.67, "low": 0.65, "high": 0.69}}, "NO VERDICT ON SPEED"),
        (
            {"engine__again": {"speedup": 1.1, "low": 0.7, "high": 1.7}},
            "NO VERDICT ON SPEED",
        ),  # as wide as the speedup
        ({"engine__again": {"speedup": None, "low": None, "high": None}}, None),
        (
            {"engine__faults": ["plain: broke off", "plain: again"]},
            "FAULTS of llama_cpp: 2, the first: plain: broke off",
        ),
        (
            {"baseline__equivalence__violation": 2},
            "VIOLATION: 2 plain answers of llama_cpp are not the target's",
        ),
        (
            {"engine__again_equivalence": WRONG["equivalence"]},
            "VIOLATION: 3 plain answers ... what it said before",
        ),
        ({"equivalence": WRONG["equivalence"]}, "VIOLATION: 3 of 80 answers are not those of its plain arm"),
    ],
)
def test_what_is_wrong_with_another_engine_stands_first(changes, message):
    lines = verdicts.faults(changed(SERVED, **changes))
    assert len(lines) == (message is not None)
    assert message is None or says(lines[0], message)


@pytest.mark.parametrize(
    ("again", "method", "explained"),
    [
        ((1.001, 1.005), (1.70, 1.90), False),
        ((1.001, 1.005), (1.004, 1.010), True),
        ((0.96, 0.98), (1.01, 1.03), True),
        ((0.96, 0.98), (0.90, 0.95), False),
        ((0.96, 0.98), (0.93, 0.97), True),
        ((0.98, 1.02), (0.95, 1.05), False),  # nothing is shown that it could explain
        ((None, None), (1.2, 1.3), False),
    ],
)
def test_an_engine_has_no_verdict_where_its_own_difference_could_explain_the_method(again, method, explained):
    overall = dict(zip(("speedup_low", "speedup_high"), method))
    assert verdicts.could_explain(*again, overall) == explained


def test_engines_stand_side_by_side_with_our_own_run_of_the_method():
    other = SUMMARY | {"method": "pld"}
    assert tables.engines_table([SUMMARY, other]) is None
    table = tables.engines_table([SUMMARY, other, SERVED, changed(SERVED, engine__name="vllm")])
    text = shown(table, width=200)
    assert [line.split()[:3] for line in text.splitlines() if line.startswith("kangaroo")] == [
        ["kangaroo", "41.2", "71%"],
        ["kangaroo", "by", "llama_cpp"],
        ["kangaroo", "by", "vllm"],
    ]
    assert len(tables.overview([SUMMARY, SERVED])) == 1 + len(tables.overview([SUMMARY, SUMMARY]))


def test_a_baseline_that_is_faster_with_other_threads_is_called_weak():
    weak = SUMMARY | {"threads": 1, "baseline_by_threads": {"1": 2.0, "2": 1.25}}
    warning = "WEAK BASELINE: 1.60 times as fast with threads=2"
    assert shown(tables.run_table(weak)).startswith(warning)
    assert f"weak: {warning}" in remarks.machine_warnings(runs_of(weak=weak))[-1]
    for strong in (
        {"threads": 2},
        {"baseline_by_threads": {"1": 2.0, "2": 1.9}},
        {"baseline_by_threads": None},
    ):
        assert remarks.weak_baseline(weak | strong) == ""


def test_a_method_that_wants_more_cores_than_there_are_says_so():
    short = SUMMARY | {"threads": 2, "extra_cores": 1, "cores": 2}
    warning = "TOO FEW CORES: 3 wanted, 2 present"
    assert shown(tables.run_table(short)).startswith(warning)
    assert f"short: {warning}" in remarks.machine_warnings(runs_of(short=short))[-1]
    for enough in ({"threads": 1}, {"extra_cores": 0}, {"cores": 4}, {"cores": None}, {"threads": None}):
        assert remarks.too_few_cores(short | enough) == ""
