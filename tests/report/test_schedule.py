"""Draft lengths by batch size: from the fastest runs that gain, in the forms of three engines."""

from __future__ import annotations

import pytest

from specbench.report import schedule as module
from specbench.report.schedule import schedule_table, schedules
from tests.support.messages import says, shown
from tests.support.samples import ENGINE, SUMMARY, WRONG, batched, changed, runs_of


def run(size: int, length: int, speedup: float, width: float = 0.05, **changes) -> dict:
    numbers = {"speedup": speedup, "speedup_low": speedup - width, "speedup_high": speedup + width}
    return changed(
        batched("ragged", "sps", size, **numbers), settings={"drafter.max_draft_tokens": length}, **changes
    )


BATCHES = {
    "a": run(1, 4, 1.6),
    "b": run(1, 2, 1.4),
    "c": run(4, 4, 1.2),
    "d": run(4, 2, 1.3),
    "e": run(16, 2, 1.02, 0.1),
    "f": run(16, 4, 0.8),
}


def test_each_batch_size_has_the_length_of_its_fastest_gain():
    (schedule,) = schedules(runs_of(**BATCHES))
    assert schedule.drafter == "sps" and schedule.lengths == {1: 4, 4: 2, 16: 0}
    assert "batch" not in schedule.setting
    pooled = {name: one | {"pool": max(48, one["batch_size"])} for name, one in BATCHES.items()}
    pooled["b"] |= {"pool": None}
    (again,) = schedules(runs_of(**pooled))
    assert again.lengths == schedule.lengths
    text = shown(schedule_table(schedule), 120)
    assert "1.30 [1.25, 1.35]" in text and "no gain shown" in text and "2, 4" in text


def test_of_runs_of_one_length_the_last_speaks_and_what_the_machine_did_is_said(monkeypatch, capsys):
    """The luckiest of several is no better than the others."""
    every = BATCHES | {"g": run(1, 4, 1.3)}
    expanded = runs_of(**{name: one | {"weights": "expanded"} for name, one in every.items()})
    (schedule,) = schedules(expanded)
    assert schedule.lengths == {1: 2, 4: 2, 16: 0}
    monkeypatch.setattr(module, "runs_of_command", lambda *_: expanded)
    assert module.main() == 0
    assert "expanded weights" in capsys.readouterr().out
    wrong = runs_of(**(BATCHES | {"wrong": changed(run(16, 2, 1.9), equivalence__violation=1)}))
    monkeypatch.setattr(module, "runs_of_command", lambda *_: wrong)
    assert module.main() == 0
    assert "wrong: VIOLATION" in capsys.readouterr().out


def test_a_length_of_null_is_the_longest_that_the_drafter_can():
    """As of a block."""
    blocks = {
        f"b{size}": changed(run(size, 0, gain), settings={"drafter.max_draft_tokens": None}, longest_path=15)
        for size, gain in ((1, 1.5), (4, 0.9))
    }
    (schedule,) = schedules(runs_of(**blocks))
    assert schedule.lengths == {1: 15, 4: 0}


def test_a_length_is_never_longer_than_what_was_drafted():
    """As of a chain of EAGLE with fewer nodes than levels."""
    short = {f"b{size}": run(size, 6, 1.5) | {"longest_path": 2} for size in (1, 4)}
    (schedule,) = schedules(runs_of(**short))
    assert schedule.lengths == {1: 2, 4: 2}


def test_the_forms_of_the_engines():
    (schedule,) = schedules(runs_of(**BATCHES))
    assert schedule.vllm() == {
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [[1, 3, 4], [4, 15, 2], [16, 16, 0]],
    }
    assert schedule.tensorrt_llm() == {"max_draft_len": 4, "draft_len_schedule": {3: 4, 15: 2, 16: 0}}
    assert schedule.sglang() == {"1": {"candidate_steps": [4]}, "4": {"candidate_steps": [2]}}


def test_where_nothing_gains_no_engine_gets_a_draft_of_no_tokens(monkeypatch, capsys):
    monkeypatch.setattr(module, "runs_of_command", lambda *_: runs_of(a=run(1, 2, 0.8), b=run(4, 2, 0.7)))
    assert module.main() == 0
    out = capsys.readouterr().out
    assert out.count("none, do not speculate") == 3 and "num_speculative_tokens" not in out


def test_what_an_engine_cannot_be_told_is_said(monkeypatch, capsys):
    runs = runs_of(a=run(2, 2, 0.8), b=run(4, 4, 1.5))
    (schedule,) = schedules(runs)
    assert schedule.ranges == [[1, 3, 0], [4, 4, 4]], "vLLM's begin at 1"
    monkeypatch.setattr(module, "runs_of_command", lambda *_: runs)
    assert module.main() == 0
    out = capsys.readouterr().out
    assert says(out, "TensorRT-LLM, speculative_config: none, ... more tokens for larger batches\n")
    assert says(out, "SGLang cannot ... at batch size 2.\nBatches smaller than 2 were not measured")


def test_a_fast_run_with_a_violation_is_not_taken():
    wrong = run(1, 8, 3.0, equivalence=WRONG["equivalence"])
    (schedule,) = schedules(runs_of(**BATCHES, z=wrong))
    assert schedule.lengths[1] == 4 and schedule.measured[1] == [2, 4, 8]


def test_questions_are_batches_of_one_and_drafters_have_schedules_of_their_own():
    alone = changed(SUMMARY, method="sps", settings={"max_draft_tokens": 6})
    other = changed(batched("ragged", "eagle2", 4), settings={"drafter.max_draft_tokens": 5})
    both = schedules(runs_of(a=alone, b=run(4, 2, 1.3), c=other, d=changed(other, batch_size=8)))
    assert [(one.drafter, one.lengths) for one in both] == [("sps", {1: 6, 4: 2}), ("eagle2", {4: 5, 8: 5})]


def test_a_wrapped_drafter_has_the_same_settings_alone_and_in_a_batch():
    alone = changed(SUMMARY, method="sps", settings={"max_draft_tokens": 6, "drafter.n": 3})
    settings = {"drafter.max_draft_tokens": 2, "drafter.drafter.n": 3}
    batch = changed(batched("ragged", "sps", 4), settings=settings)
    assert [one.lengths for one in schedules(runs_of(a=alone, b=batch))] == [{1: 6, 4: 2}]


def test_of_a_batch_of_one_and_a_single_answer_the_later_run_counts():
    begun = {"single": 2, "pool": 1, "batch": 1}
    alone = changed(SUMMARY, method="sps", settings={"max_draft_tokens": 4}) | {"overall": WRONG}
    runs = runs_of(single=alone, pool=run(1, 4, 1.6), batch=run(4, 4, 1.3))
    for one in runs:
        one.__dict__["provenance"] = {"time": f"2026-12-0{begun[one.name]}T00:00:00+00:00"}
    wrong = changed(runs[0].summary, equivalence__violation=1)
    for summary, length in ((wrong, 0), (changed(SUMMARY, method="sps", settings=alone["settings"]), 4)):
        runs[0].summary.clear()
        runs[0].summary.update(summary)
        (schedule,) = schedules(runs)
        assert schedule.lengths[1] == length


def test_what_a_run_chooses_for_its_batch_parts_no_schedule():
    """Threads, and the faster baseline."""
    own = {name: one | {"threads": 1 + (one["batch_size"] > 4)} for name, one in BATCHES.items()}
    own["e"] = changed(own["e"], baseline__quoted_against="hf_generate")
    (schedule,) = schedules(runs_of(**own))
    assert schedule.lengths == {1: 4, 4: 2, 16: 0}


@pytest.mark.parametrize(
    "change",
    [
        *({"draft": "large"}, {"method": "exspec"}, {"max_new_tokens": 512}),
        {"settings": {"drafter.max_draft_tokens": 4, "drafter.confidence_threshold": 0.4}},
        {"settings": {"drafter.max_draft_tokens": 4, "window": 8}},
        *({"target": "/models/other"}, {"compiled": True}),
    ],
)
def test_other_settings_draft_models_and_schedulers_have_schedules_of_their_own(change):
    others = {f"o{size}": changed(run(size, 4, 2.0), **change) for size in (1, 4)}
    first, second = schedules(runs_of(**BATCHES, **others))
    assert (first.lengths, second.lengths) == ({1: 4, 4: 2, 16: 0}, {1: 4, 4: 4})
    assert first.setting.startswith("ragged, ") and first.setting != second.setting


def test_a_question_is_a_batch_of_one_for_every_scheduler():
    alone = changed(SUMMARY, method="sps", settings={"max_draft_tokens": 6, "n": 1}, draft="small")
    settings = {"drafter.max_draft_tokens": 2, "drafter.n": 1}
    batches = {
        name: changed(run(4, 2, 1.3), method=name, settings=settings, draft="small")
        for name in ("ragged", "exspec")
    }
    both = schedules(runs_of(a=alone, **batches))
    assert [one.lengths for one in both] == [{1: 6, 4: 2}] * 2
    assert [one.setting.split(",")[0] for one in both] == ["ragged", "exspec"]


@pytest.mark.parametrize(
    "runs", [{"a": run(4, 2, 1.3)}, {"a": changed(SUMMARY, settings={}), "b": SUMMARY | {"settings": {}}}]
)
def test_one_run_or_runs_without_a_length_make_no_schedule(runs):
    assert schedules(runs_of(**runs)) == []


def test_trees_are_left_out_and_named(monkeypatch, capsys):
    """Engines would draft chains of as many tokens as a tree has levels."""
    trees = {
        f"t{size}": changed(run(size, 6, 2.0), drafter="eagle2", max_nodes=59, longest_path=6)
        for size in (1, 4)
    }
    older = changed(
        SUMMARY, method="eagle3", settings={"nodes": 59, "max_draft_tokens": 6}, overall__speedup=3.0
    )
    runs = runs_of(**BATCHES, **trees, o=older, p=changed(older, settings__max_draft_tokens=4))
    assert [one.drafter for one in schedules(runs)] == ["sps"]
    monkeypatch.setattr(module, "runs_of_command", lambda *_: runs)
    assert module.main() == 0
    assert "Left out, as they draft trees: eagle3, ragged + eagle2.\n" in capsys.readouterr().out


@pytest.mark.parametrize("change", [{"reference_answer": True}, {"weights": "random"}])
def test_what_nobody_could_deploy_makes_no_schedule(change):
    assert schedules(runs_of(**{name: summary | change for name, summary in BATCHES.items()})) == []


@pytest.mark.parametrize(
    "key", ["num_speculative_tokens", "num_assistant_tokens", "draft.n_max", "ngram_simple.size_m"]
)
def test_runs_of_other_engines_have_schedules_in_their_words(key):
    """Whatever batch method names their load, and where a busy server does not count what it accepts."""

    def served(size: int, length: int, speedup: float, **changes) -> dict:
        words = {"settings": {key: length, "min_hits": 1}, "engine": ENGINE}
        return changed(run(size, length, speedup), **words | changes)

    alone = served(1, 8, 1.9, unit="question", method="sps", drafter=None)
    busy = served(4, 4, 1.4, overall__acceptance_rate=None)
    (schedule,) = schedules(runs_of(a=alone, b=served(1, 4, 1.5), c=busy, d=served(4, 8, 1.2)))
    assert schedule.drafter == "sps" and schedule.lengths == {1: 8, 4: 4}
    assert (
        "llama_cpp" in schedule.setting and "min_hits=1" in schedule.setting and key not in schedule.setting
    )


def test_a_setting_of_another_engine_is_the_same_alone_and_in_a_batch():
    alone = changed(SUMMARY, method="sps", settings={"max_draft_tokens": 6, "n": 3}) | {"engine": ENGINE}
    settings = {"drafter.max_draft_tokens": 2, "drafter.n": 3}
    batch = changed(batched("ragged", "sps", 4), settings=settings) | {"engine": ENGINE}
    (schedule,) = schedules(runs_of(a=alone, b=batch))
    assert schedule.lengths == {1: 6, 4: 2}
