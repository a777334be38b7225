"""The answer of a report: which method, for each setting, and when none is to be taken or trusted."""

from __future__ import annotations

import pytest

from specbench.report import remarks
from specbench.report.decision import decision_table, decisions, facts
from specbench.report.labels import labels
from tests.report.test_phases import measured
from tests.support.messages import shown
from tests.support.samples import ENGINE, NUMBERS, SUMMARY, batched, changed, faster, runs_of, wrong
from tests.support.synthetic import slowed


def run(method: str, speedup: float, low: float | None, high: float | None, **changes) -> dict:
    return faster(
        speedup,
        method=method,
        overall__speedup_low=low,
        overall__speedup_high=high,
        **{"settings": {"max_draft_tokens": 5}} | changes,
    )


def one(**summaries: dict):
    (decision,) = decisions(runs_of(**summaries))
    return decision


def test_of_many_the_fastest_must_gain_by_more():
    """Of forty methods that gain nothing one has an interval above 1 by chance, as a rule."""
    alone = one(a=run("lucky", 1.1, 1.01, 1.2))
    among = one(
        a=run("lucky", 1.1, 1.01, 1.2), **{f"b{i}": run(f"other{i}", 1.0, 0.9, 1.1) for i in range(9)}
    )
    assert alone.sentence.startswith("Take lucky") and "best of" not in alone.sentence
    assert among.sentence.startswith("Stay with autoregressive decoding")


def test_of_many_runs_of_two_pools_the_fastest_must_gain_by_far_more():
    """Student's t of one degree of freedom: what ten normal intervals would allow, ten of two pools do not."""
    unlucky = {"speedup": 1.0, "speedup_low": 0.9, "speedup_high": 1.1}
    others = {f"b{i}": batched("ragged", f"other{i}", 4, **unlucky) for i in range(9)}

    def sentence(**freedom: float | None) -> str:
        best = {"speedup": 1.3, "speedup_low": 1.12, "speedup_high": 1.51}
        return one(a=batched("ragged", "sps", 4, **best, **freedom), **others).sentence

    many = {"speedup_freedom": 100.0}
    assert sentence(**many).startswith("Take") and not sentence(speedup_freedom=1.0).startswith("Take")


def test_the_fastest_is_named_with_those_that_are_not_told_apart_from_it():
    decision = one(
        a=run("slow", 0.8, 0.7, 0.9),
        b=run("close", 1.5, 1.4, 1.65),
        c=run("best", 1.7, 1.6, 1.8),
        d=run("some", 1.2, 1.1, 1.3),
        e=run("unclear", 1.75, 0.9, 3.0),
    )
    ranks = {alternative.label: rank for alternative, rank in zip(decision.alternatives, decision.ranks)}
    assert ranks == {
        "unclear": "no gain shown",
        "best": "fastest",
        "close": "not told apart",
        "some": "gains",
        "slow": "slower",
    }
    assert decision.sentence == (
        "Take best, 5 draft tokens at most, with 1.70 [1.60, 1.80] times the baseline's speed. "
        "It is the best of 5: [1.57, 1.83] allows for that choice, and other questions will tend to show less. "
        "Not told apart from it: close"
    )


@pytest.mark.parametrize(
    ("changes", "words", "cell"),
    [
        ({"settings": {}, "max_nodes": 59, "longest_path": 6}, "a tree of 59 nodes and 6 levels", "59 (6)"),
        ({"settings": {"nodes": 59, "max_draft_tokens": 6}}, "a tree of 59 nodes and 6 levels", "59 (6)"),
        ({"settings": {"width": 10, "max_draft_tokens": 6}}, "a tree of 6 levels", "– (6)"),
        ({"settings": {"nodes": None}, "max_nodes": 63, "longest_path": 4}, "a tree of 63 nodes", "63 (4)"),
        ({"max_nodes": 0, "longest_path": 5}, "5 draft tokens", "5"),
        ({"settings": {"width": 1, "max_draft_tokens": 3}, "max_nodes": 3}, "3 draft tokens", "3"),
        ({"settings": {"draft.n_max": 4}, "engine": ENGINE}, "4 draft tokens", "4"),
    ],
)
def test_of_a_tree_nodes_and_levels_are_said(changes, words, cell):
    """Those that the drafter had, or those of an older run's settings."""
    decision = one(a=run("eagle2", 1.7, 1.6, 1.8, **changes))
    assert f", {words}" in decision.sentence and " at most, with 1.70" in decision.sentence
    assert f" {cell} " in shown(decision_table(decision), 140)


def test_without_a_gain_there_is_none_to_take():
    decision = one(a=run("sps", 1.2, 0.9, 1.5), b=run("pld", 0.8, 0.7, 0.9))
    assert decision.sentence == "Stay with autoregressive decoding: no method is shown to be faster"


@pytest.mark.parametrize(
    ("counts", "had", "a_run"),
    [((1,), "1 question", "1 question a run"), ((1, 3), "1–3 questions", "1–3 questions a run")],
)
def test_without_an_interval_there_is_no_verdict(counts, had, a_run):
    runs = {f"r{n}": run(f"m{n}", 1.2, None, None, overall__questions=n) for n in counts}
    decision = one(**runs)
    assert decision.sentence == (
        f"No verdict: an interval needs at least 6 questions, these runs have {had}: raise data.limit"
    )
    assert a_run in facts(decision)
    judged = one(**runs, z=run("pld", 0.8, 0.7, 0.9))
    assert judged.sentence.startswith("Stay with autoregressive decoding")


def test_more_questions_are_no_advice_where_they_failed():
    decision = one(a=run("sps", 1.2, None, None, overall__questions=4, failed=32))
    assert "at least 6 questions, these runs have 4 questions: the others failed" in decision.sentence


def test_batches_without_an_interval_want_pools_or_repeats():
    pool = batched(pools=1, speedup_low=None, speedup_high=None)
    assert one(a=pool).sentence == (
        "No verdict: an interval needs at least 2 pools, or repeats of one: raise repeats"
    )


def test_a_violation_is_no_alternative_however_fast():
    decision = one(a=wrong() | {"method": "fast"}, b=run("sps", 1.2, 1.1, 1.3))
    assert decision.sentence.startswith("Take sps") and decision.sentence.endswith("Not to be trusted: fast")
    assert dict(zip([a.label for a in decision.alternatives], decision.ranks))["fast"] == "not to be trusted"
    assert one(a=wrong()).sentence.startswith("Stay with autoregressive decoding")


def test_a_baseline_that_differs_from_itself_takes_the_trust_away():
    itself = {"overall__acceptance_rate": None, "overall__acceptance_length": 1.0, "settings": {}}
    told = one(a=run("ar", 1.0, 0.98, 1.02, **itself), b=run("sps", 1.5, 1.4, 1.6))
    assert [a.label for a in told.alternatives] == ["sps"]
    assert "trust no speedup" not in told.sentence
    assert "the baseline against itself: 1.00 [0.98, 1.02]" in shown(decision_table(told))
    untold = one(a=run("ar", 1.1, 1.05, 1.15, **itself), b=run("sps", 1.2, 1.14, 1.26))
    assert "The baseline against itself gave 1.10 [1.05, 1.15]: trust no speedup here" in untold.sentence


BASELINE = {"overall__acceptance_rate": None, "overall__acceptance_length": 1.0, "settings": {}}


def test_a_difference_of_the_baseline_takes_the_trust_from_gains_of_its_size_alone():
    off = run("ar", 1.003, 1.001, 1.005, **BASELINE)
    assert "trust no" not in one(a=off, b=run("sps", 1.8, 1.7, 1.9)).sentence
    small = run("pld", 1.006, 1.004, 1.008)
    text = one(a=off, b=run("sps", 1.8, 1.7, 1.9), c=small).sentence
    assert text.endswith("The baseline against itself gave 1.00 [1.00, 1.00]: trust no gain of pld")
    assert one(a=off, b=small).sentence.endswith("trust no speedup here")
    assert "trust no" not in one(a=off, b=run("sps", 1.0, 0.99, 1.01)).sentence, "no gain is shown"


def test_of_many_baselines_one_differs_by_chance():
    """The level of each is divided by their number; the one that differs most is shown, wherever it stands."""
    sound = {f"r{i}": run("ar", 1.0, 0.96, 1.04, **BASELINE) for i in range(20)}
    method = run("sps", 1.05, 1.01, 1.09)
    chance = run("ar", 1.042, 1.0005, 1.085, **BASELINE)
    assert "trust no" in one(a=chance, b=method).sentence
    decision = one(a=chance, b=method, **sound)
    assert decision.alarm is None and "trust no" not in decision.sentence
    assert "the baseline against itself: 1.00 [0.96, 1.04]" in shown(decision_table(decision))
    real = one(a=run("ar", 0.9, 0.87, 0.93, **BASELINE), b=method, **sound)
    assert real.sentence.endswith("gave 0.90 [0.87, 0.93]: trust no speedup here")
    assert "the baseline against itself: 0.90 [0.87, 0.93]" in shown(decision_table(real))


def test_runs_of_one_command_are_one_row_with_their_spread():
    decision = one(a=run("sps", 1.5, 1.4, 1.6), b=run("sps", 1.3, 1.2, 1.4), c=run("pld", 1.1, 1.05, 1.2))
    assert [(a.label, len(a.runs)) for a in decision.alternatives] == [("sps", 2), ("pld", 1)]
    text = shown(decision_table(decision), 140)
    assert "1.30 [1.20, 1.40]" in text and "1.30–1.50 in 2" in text


def test_settings_that_were_varied_are_alternatives():
    decision = one(
        a=run("sps", 1.3, 1.25, 1.35),
        b=run("sps", 1.5, 1.45, 1.55, settings={"max_draft_tokens": 3}),
    )
    assert decision.sentence.startswith("Take sps, max_draft_tokens=3, 3 draft tokens at most, with 1.50")


def test_what_is_decoded_otherwise_has_a_decision_of_its_own():
    greedy, drawn, cut, batch, half = (
        run("sps", 1.5, 1.4, 1.6),
        run("sps", 1.2, 1.1, 1.3, temperature=1.0),
        run("sps", 1.2, 1.1, 1.3, temperature=1.0, top_k=20, top_p=0.95),
        batched(batch_size=8),
        run("sps", 1.1, 1.05, 1.2, dtype="bfloat16"),
    )
    settings = [one.setting for one in decisions(runs_of(a=greedy, b=drawn, c=cut, d=batch, e=half))]
    assert len(set(settings)) == 5 and "top_k" not in settings[1]
    assert "temperature 1" in settings[1] and "top_k 20, top_p 0.95" in settings[2]
    assert "batch 8" in settings[3] and "bfloat16" in settings[4]


def test_runs_that_draft_nothing_leave_nothing_to_decide():
    assert not decisions(runs_of(a=changed(SUMMARY, overall__acceptance_rate=None, settings={})))


def test_a_drafter_that_found_nothing_is_not_the_baseline():
    found_nothing = run("pld", 0.9, 0.85, 0.95, overall__acceptance_rate=None)
    assert dict(zip(["pld"], one(a=found_nothing).ranks)) == {"pld": "slower"}
    failed = run("ar", 1.0, 0.9, 1.1, overall__acceptance_rate=None, settings={}, failed=80)
    assert one(a=failed).sentence.endswith("Not to be trusted: ar")


def test_ways_to_verify_are_settings_of_their_own():
    """The lossy one, which is there as a control, takes no trust from the others."""
    token = run("sps", 1.3, 1.25, 1.35)
    block, typical = (run("sps", 1.5, 1.45, 1.55, verification=way) for way in ("block", "typical"))
    by_token, by_block, lossy = decisions(runs_of(a=token, b=block, c=typical))
    assert by_token.sentence.startswith("Take sps") and "1.30" in by_token.sentence
    assert "block verification" in by_block.setting and "1.50" in by_block.sentence
    assert "typical verification" in lossy.setting and lossy.sentence.endswith("Not to be trusted: sps")


def test_draft_models_and_threads_are_told_apart():
    small, large = (
        run("sps", speedup, 1.2, 1.7, draft=name) for speedup, name in ((1.3, "small"), (1.6, "large"))
    )
    assert [one.label for one in one(a=small, b=large).alternatives] == [
        "sps, draft=large",
        "sps, draft=small",
    ]
    threads = labels([small | {"threads": 1}, small | {"threads": 4}])
    assert threads == ["sps, threads=1", "sps, threads=4"]


def test_files_that_another_engine_decodes_with_are_told_apart():
    """Its target stands in place of the dtype, which is that of the referee."""
    float32 = run("sps", 1.3, 1.2, 1.4, engine=ENGINE, draft="models/draft")
    small = float32 | {"draft": "small-Q4_1.gguf (aaaaaaaa)"}
    by_draft = [alternative.label for alternative in one(a=float32, b=small).alternatives]
    assert by_draft == [
        "sps by llama_cpp, draft=models/draft",
        "sps by llama_cpp, draft=small-Q4_1.gguf (aaaaaaaa)",
    ]
    quantised = float32 | {"engine_target": "big-Q4_1.gguf (bbbbbbbb)"}
    first, second = decisions(runs_of(a=float32, b=quantised))
    assert "float32" in first.setting and "float32" not in second.setting
    assert "big-Q4_1.gguf (bbbbbbbb)" in second.setting
    assert labels([float32, quantised])[1] == "sps by llama_cpp, big-Q4_1.gguf (bbbbbbbb)"
    assert "big-Q4_1.gguf (bbbbbbbb), cpu" in remarks.title_text(quantised).plain


def test_cores_of_a_methods_own_are_named():
    drafts_beside = run("mirror_sd", 1.5, 1.4, 1.6, threads=1, extra_cores=1)
    assert one(a=drafts_beside).sentence.startswith("Take mirror_sd (2 cores), 5 draft tokens at most,")


def test_a_table_says_what_drafters_were_trained_on_and_which_runs_were_disturbed(monkeypatch):
    trained = {"kangaroo": {"steps": 5, "tokens": 2_000_000, "earlier": [{"tokens": 1_500_000}]}}
    busy = {"still_disturbed_share": 2 * remarks.WORST_DISTURBED}
    text = shown(decision_table(one(a=run("kangaroo", 1.5, 1.4, 1.6, training=trained, machine=busy))), 140)
    assert (
        "3.5 M" in text and "disturbed by other processes: kangaroo" in text and "160 questions a run" in text
    )


def test_a_table_says_which_runs_a_slow_machine_measured():
    slow = measured(slowed(product=0.3), summary=run("kangaroo", 1.5, 1.4, 1.6))
    text = shown(decision_table(one(a=slow, b=run("sps", 1.4, 1.3, 1.5))), 140)
    assert "measured on a slow machine: kangaroo" in text and "disturbed" not in text


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("max_new_tokens", 512, "max_new_tokens=512"),
        ("limit", 5, "limit=5"),
        ("split", "throughput_1k", "split=throughput_1k"),
        ("turns", 1, "turns=1"),
        ("seed", 1, "seed=1"),
        ("processor", "H100", "H100"),
    ],
)
def test_what_was_measured_otherwise_is_no_alternative_and_no_repeat(key, value, words):
    """Two GPUs in one sentence, or an answer of 512 tokens beside one of 64, would be no choice."""
    first, second = decisions(
        runs_of(a=run("sps", 1.5, 1.4, 1.6), b=run("sps", 1.2, 1.1, 1.3) | {key: value})
    )
    assert words in second.setting and words not in first.setting
    assert [len(alternative.runs) for alternative in (*first.alternatives, *second.alternatives)] == [1, 1]


def test_of_many_alternatives_the_fastest_are_shown():
    many = {
        f"r{i}": run("sps", 1 + i / 100, 1 + i / 200, 1 + i / 50, settings={"max_draft_tokens": i})
        for i in range(1, 20)
    }
    text = shown(decision_table(one(**many)), 140)
    assert (
        "max_draft_tokens=19" in text
        and "max_draft_tokens=2 " not in text
        and "the 7 slowest are not shown" in text
    )


def test_a_speedup_that_was_not_measured_comes_last():
    unknown = changed(
        run("pld", 1.0, 0.9, 1.1),
        overall=NUMBERS | {"speedup": None, "speedup_low": None, "speedup_high": None},
    )
    decision = one(a=unknown, b=run("sps", 0.9, 0.8, 1.1))
    assert [a.label for a in decision.alternatives] == ["sps", "pld"]
    assert decision.ranks == ["no gain shown", "no gain shown"]


def test_what_nobody_could_deploy_is_not_recommended():
    """A drafter that is told the answers, and random weights, whose acceptance is no method's."""
    told, random = (
        run("oracle", 2.0, 1.9, 2.1, reference_answer=True),
        run("sps", 1.9, 1.8, 2.0, weights="random"),
    )
    assert decisions(runs_of(a=told, b=random)) == []
    assert one(a=told, b=random, c=run("pld", 1.2, 1.1, 1.3)).sentence.startswith("Take pld")


def test_our_loop_beside_generate_is_no_baseline_against_itself():
    ours = run("ar", 0.85, 0.83, 0.87, settings={}, overall__acceptance_rate=None)
    slower = changed(ours, baseline__quoted_against="hf_generate")
    method = changed(run("sps", 1.2, 1.1, 1.3), baseline__quoted_against="hf_generate")
    assert "trust no speedup" not in one(a=slower, b=method).sentence
    assert "trust no speedup" in one(a=ours, b=run("sps", 1.2, 1.1, 1.3)).sentence
    batch = changed(ours, overall__alignment_share=0.0)  # whose layout does not align
    assert "trust no speedup" in one(a=batch, b=run("sps", 1.2, 1.1, 1.3)).sentence
    aligned = changed(ours, overall__alignment_share=0.1)
    assert "trust no speedup" not in one(a=aligned, b=run("sps", 1.2, 1.1, 1.3)).sentence


@pytest.mark.parametrize(
    ("key", "values", "form"),
    [
        ("target", ("/m/base", "/m/tuned"), "target={}"),
        ("verify_width", (8, 16), "verify_width={}"),
        ("questions_sha256", ("a" * 64, "b" * 64), "questions {:.8}"),
        ("prompting", ("a" * 64, "b" * 64), "prompts {:.8}"),
    ],
)
def test_what_a_title_does_not_say_tells_decisions_apart_and_is_said_then(key, values, form):
    first, second = (run("sps", 1.3, 1.2, 1.4, **{key: value}) for value in values)
    settings = [decision.setting for decision in decisions(runs_of(a=first, b=second))]
    assert len(settings) == 2
    for setting, value in zip(settings, values):
        assert setting.endswith(form.format(value))
    (alone,) = decisions(runs_of(a=first))
    assert form.partition("{")[0] not in alone.setting
    assert len({*labels([first, second])}) == 2


def test_speedups_against_other_baselines_are_not_ranked_together():
    against = changed(run("sps", 1.2, 1.1, 1.3), baseline__quoted_against="hf_generate")
    ours, generate = decisions(runs_of(a=run("pld", 1.4, 1.3, 1.5), b=against))
    assert "against generate" in generate.setting and "against generate" not in ours.setting


def test_an_interval_of_one_pool_is_said_to_be_of_timing_noise():
    pool = batched("ragged", "sps", 8, pools=1, speedup=1.3, speedup_low=1.2, speedup_high=1.4)
    is_alone = remarks.is_one_pool(pool)
    text = shown(decision_table(one(a=pool)), 160)
    assert is_alone and remarks.ONE_POOL in text
    assert remarks.ONE_POOL not in shown(decision_table(one(a=run("pld", 1.4, 1.3, 1.5))), 160)


def test_versions_of_an_engine_have_decisions_of_their_own():
    first = run("sps", 1.3, 1.2, 1.4, engine=ENGINE)
    second = changed(first, engine__version="xllamacpp==2")
    settings = [decision.setting for decision in decisions(runs_of(a=first, b=second))]
    assert ["xllamacpp==1" in settings[0], "xllamacpp==2" in settings[1]] == [True, True]
