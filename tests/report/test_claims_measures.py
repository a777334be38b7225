"""Claims: what each measure makes of the runs that a claim chooses, and what its line says of them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from specbench.measure.machine import provenance
from specbench.measure.metrics.statistics import Estimate
from specbench.report import claims
from specbench.report.runs import Run
from tests.report.test_phases import measured
from tests.support.claims import AGAINST, KNOWN, found, journal, judged
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
    wrong,
)
from tests.support.synthetic import answered, by_repeat, generation, record, slowed, turn


def test_the_speedup_of_the_last_run_that_matches():
    claim = {"measure": "number", "of": {"experiment": "e", "method": "kangaroo"}, "at_least": 1.5}
    runs = runs_of(a=faster(3.0, experiment="e"), b=faster(1.7, experiment="e"), c=faster(9.0))
    checked = found(claim, runs)
    assert checked.estimate == Estimate(1.7, pytest.approx(1.6), pytest.approx(1.8))
    assert (checked.verdict, checked.remark) == ("supported", "160 questions")
    assert found(claim, runs[:1]).estimate.value == 3.0 and found(claim, runs[2:]).verdict == "not measured"


@pytest.mark.parametrize("change", [{"task": "qa"}, {"temperature": 1.0}, {"data": "jsonl"}, {"turns": 1}])
@pytest.mark.parametrize("measure", [{"measure": "number"}, {"measure": "number", "what": "speedup"}])
def test_an_overall_figure_is_of_all_tasks_and_greedy(change, measure):
    """A later run of one task, of drawn answers or of other questions does not decide, unless a claim is of those."""
    claim = {"of": {"method": "kangaroo"}, "at_least": 1.5} | measure
    runs = runs_of(a=faster(1.2), b=faster(1.9, **change))
    assert found(claim, runs).estimate.value == 1.2
    assert found(claim | {"of": claim["of"] | change}, runs).estimate.value == 1.9
    assert found(claim, runs[1:]).verdict == "not measured"


def test_a_number_of_the_summary():
    claim = {"measure": "number", "what": "stats.overlap.hidden_share", "of": {}, "at_least": 0.7}
    hidden = changed(SUMMARY, overall__stats={"overlap": {"hidden_share": 0.8}})
    assert found(claim, runs_of(a=hidden)).estimate == Estimate(0.8, None, None)
    assert found(claim, runs_of(a=hidden)).verdict == "supported (point estimate)"
    assert found(claim, runs_of(a=SUMMARY)).verdict == "not measured"  # nothing ran beside the target
    decoding = {"measure": "number", "what": "decode_speedup", "of": {}, "at_least": 1.5}
    with_its_interval = Estimate(1.7, pytest.approx(1.6), pytest.approx(1.8))
    assert found(decoding, runs_of(a=faster(1.7))).estimate == with_its_interval
    share = {"measure": "number", "what": "alignment_share", "of": {}, "at_most": 0.05}
    assert found(share, runs_of(a=batched(alignment_share=0.04))).verdict == "supported (point estimate)"
    assert found(share, runs_of(a=batched(alignment_share=0.06))).verdict == "not supported"


ONCE = "each question of a method once"


def test_the_share_of_certified_answers(tmp_path):
    claim = {"measure": "certified", "of": {"method": "kangaroo"}, "at_least": 1.0}
    a, b = (run_of(tmp_path, name, SUMMARY, records=judged(79, ties=1)) for name in "ab")
    checked = found(claim, [a, b])
    assert checked.estimate.value == 1.0 and checked.verdict == "supported"
    most = "at most 4.5% of answers can be others"
    assert checked.remark == f"2 runs, {ONCE}: 79 exact, 1 ties, 0 violations; {most}"
    faulty, sampled, other = (
        run_of(tmp_path, name, summary, records=records)
        for name, summary, records in (
            ("faulty", wrong(), judged(77, violations=3, first=1)),
            ("sampled", nothing(), []),
            ("other", wrong() | {"method": "pld"}, judged(77, violations=3)),
        )
    )
    checked = found(claim, [a, faulty, sampled, other])
    assert checked.estimate.value == 78 / 81 and checked.verdict == "not supported"
    assert checked.remark == f"3 runs, {ONCE}: 77 exact, 1 ties, 3 violations"
    assert found(claim, [sampled]).verdict == "not measured"  # no answer was judged


def test_the_share_of_equal_answers_counts_no_tie(tmp_path):
    claim = {"measure": "exact", "of": {"method": ["eqspec", "exspec"]}, "at_least": 1.0}
    runs = [
        run_of(tmp_path, method, SUMMARY | {"method": method}, records=judged(79, ties=1))
        for method in ("eqspec", "exspec", "ragged")
    ]
    checked = found(claim, runs)
    assert checked.estimate.value == 158 / 160 and checked.verdict == "not supported"
    assert checked.remark == f"2 runs, {ONCE}: 158 exact, 2 ties, 0 violations"
    assert found(claim, runs[2:]).verdict == "not measured"


@pytest.mark.parametrize(
    ("exact", "verdict", "low"), [(7, "supported (point estimate)", 0.590), (126, "supported", 0.971)]
)
def test_a_share_of_few_answers_has_a_wide_interval(tmp_path, exact, verdict, low):
    claim = {"measure": "exact", "of": {"method": "eqspec"}, "at_least": 0.95}
    checked = found(claim, [run_of(tmp_path, "a", SUMMARY | {"method": "eqspec"}, records=judged(exact))])
    assert (checked.verdict, checked.estimate.low) == (verdict, pytest.approx(low, abs=1e-3))


def test_equality_is_claimed_of_the_papers_own_methods_alone(tmp_path):
    """Ragged batches are ours: what they answer is no evidence for EQSPEC or EXSPEC."""
    (claim,) = (claim for claim in KNOWN if claim["name"].startswith("EQSPEC and EXSPEC, answers equal"))

    def batch(method: str, ties: int, size: int = 8) -> Run:
        summary = SUMMARY | {"method": method, "batch_size": size}
        return run_of(tmp_path, f"{method}-{size}-{ties}", summary, records=judged(80 - ties, ties))

    equal = [batch("eqspec", 0), batch("exspec", 0)]
    alone = batch("eqspec", 1, size=1)  # is compared with itself
    assert claims.find(claim, [*equal, batch("ragged", 1), alone]).estimate.value == 1.0
    assert claims.find(claim, [equal[0], batch("exspec", 1)]).estimate.value == 159 / 160


def test_no_claim_rests_on_the_best_of_several_noisy_numbers():
    """The maximum over tasks of a method that gains nothing is above 1."""
    shares, single = {"exact", "certified", "parameters"}, {"number", "relative"}
    assert {claim["measure"] for claim in KNOWN} <= shares | single == set(claims.MEASURES)


def test_against_the_strongest_of_others(tmp_path):
    ours, weak, strong = (
        run_of(tmp_path, name, SUMMARY | {"method": name}, records=journal(speedup, seed))
        for seed, (name, speedup) in enumerate({"ours": 1.8, "weak": 1.2, "strong": 1.5}.items())
    )
    checked = found(AGAINST, [strong, ours, weak])
    assert checked.estimate.low < 1.2 < checked.estimate.high and checked.verdict == "supported"
    assert checked.remark == "against strong; 30 questions"
    assert found(AGAINST | {"at_least": 1.19}, [ours, weak, strong]).verdict != "not supported"
    by_rival = [
        found(AGAINST | {"against": [{"method": name}]}, [ours, weak, strong]) for name in ("weak", "strong")
    ]
    for end in ("low", "high"):  # any rival may be the strongest
        ends = [getattr(one.estimate, end) for one in by_rival]
        assert getattr(checked.estimate, end) == min(ends)
    assert found(AGAINST | {"at_least": 1.4}, [ours, weak, strong]).verdict == "not supported"
    for lacking in ([ours, weak], [ours, strong], [weak, strong], []):
        checked = found(AGAINST, lacking)
        assert (checked.verdict, checked.estimate, checked.remark) == ("not measured", None, "no run for it")


def test_cores_of_a_methods_own_stand_in_the_line(tmp_path):
    claim = AGAINST | {"against": [{"method": "weak"}]}
    runs = []
    for name, cores in (("ours", 1), ("weak", 0)):
        summary = SUMMARY | {"method": name, "threads": 1, "extra_cores": cores}
        runs.append(run_of(tmp_path, name, summary, records=journal(1.5, cores)))
    assert found(claim, runs).remark == "ours (2 cores) against weak; 30 questions"


def test_a_run_with_too_few_cores_counts_for_what_needs_no_clock_alone(tmp_path):
    claim = {"measure": "number", "of": {"method": "ours"}, "at_least": 1.0}
    short = SUMMARY | {"method": "ours", "threads": 2, "extra_cores": 1, "cores": 2}
    run = run_of(tmp_path, "short", short, records=journal(1.5))
    assert claims.check(claim, [run]).small.verdict == "not measured"
    assert claims.check(claim | {"what": "acceptance_length"}, [run]).fitting.estimate is not None
    enough = run_of(tmp_path, "enough", short | {"threads": 1}, records=journal(1.5))
    assert claims.check(claim, [run, enough]).small.estimate is not None


def test_the_last_run_of_ours_that_every_other_can_be_compared_with_counts(tmp_path):
    """A later one, which nobody else was run beside, takes no verdict away."""
    speedups = {"ours": 1.8, "weak": 1.2, "strong": 1.5}
    runs = [
        run_of(tmp_path, name, SUMMARY | {"method": name}, records=journal(speedup, seed))
        for seed, (name, speedup) in enumerate(speedups.items())
    ]
    later = SUMMARY | {"method": "ours", "max_new_tokens": 512}
    alone = run_of(tmp_path, "alone", later, records=journal(9.0))
    half = run_of(tmp_path, "half", later | {"method": "weak"}, records=journal(1.0))
    assert found(AGAINST, [*runs, alone, half]) == found(AGAINST, runs)
    assert found(AGAINST, [alone, *runs[1:]]).verdict == "not measured"  # a length at 512 tokens by one at 64


def test_another_without_a_question_in_common_is_left_out_and_named(tmp_path):
    ours, strong = (
        run_of(tmp_path, name, SUMMARY | {"method": name}, records=journal(speedup))
        for name, speedup in {"ours": 1.8, "strong": 1.5}.items()
    )
    elsewhere = [one | {"question_id": 100 + one["question_id"]} for one in journal(1.2)]
    weak = run_of(tmp_path, "weak", SUMMARY | {"method": "weak"}, records=elsewhere)
    checked = found(AGAINST, [ours, weak, strong])
    assert checked.estimate.value == pytest.approx(1.2)
    assert checked.remark == "against strong; 30 questions; no measured question in common with weak"
    checked = found(AGAINST | {"against": [{"method": "weak"}]}, [ours, weak])
    assert (checked.verdict, checked.remark) == (
        "not measured",
        "no measured question in common with weak",
    )


def test_what_compared_runs_differ_in_stands_in_the_line(tmp_path):
    claim = AGAINST | {"against": [{"method": "weak"}]}
    ours = run_of(tmp_path, "ours", SUMMARY | {"method": "ours"}, records=journal(1.8))
    theirs = SUMMARY | {"method": "weak"}
    older = changed(PROVENANCE, versions__torch="2.0")
    weak = run_of(tmp_path, "weak", theirs, older, records=journal(1.2)[:20])
    remark = found(claim, [ours, weak]).remark
    assert says(remark, "against weak; 20 questions; versions.torch 2.0 against 2.13 ... only the 20 in both")
    means = {"kernels": "no compiler", "compiled": False}
    kernels = run_of(tmp_path, "kernels", theirs | means, records=journal(1.2))
    ours.summary.update(means | {"kernels": None})
    assert "kernels torch's (no compiler) against our own" in found(claim, [ours, kernels]).remark


def test_what_disturbed_a_time_stands_in_the_line(tmp_path):
    claim = AGAINST | {"against": [{"method": "weak"}]}
    slow = measured(slowed(product=0.3), summary=SUMMARY | {"method": "ours"})
    busy = SUMMARY | {"method": "weak", "machine": {"still_disturbed_share": 0.4}}
    runs = [
        run_of(tmp_path, name, summary, records=journal(1.5))
        for name, summary in {"ours": slow, "weak": busy}.items()
    ]
    remark = found(claim, runs).remark
    assert remark == "against weak; 30 questions; ours: SLOW MACHINE; weak: DISTURBED"
    assert found(claim | {"what": "acceptance_length"}, runs).remark == "against weak; 30 questions"
    for measure in ({"measure": "number"}, {"measure": "number", "what": "alignment_share"}):
        alone = {"of": {"method": "weak"}, "at_least": 1.0} | measure
        assert found(alone, runs).remark == "30 questions; weak: DISTURBED"


def test_others_are_of_the_same_pair(tmp_path):
    names = {"ours": 1.8, "weak": 1.2, "strong": 1.5}
    runs = [
        run_of(tmp_path, name, SUMMARY | {"method": name}, records=journal(speedup, seed))
        for seed, (name, speedup) in enumerate(names.items())
    ]
    elsewhere = SUMMARY | {"method": "strong", "pair": "another"}
    stronger = run_of(tmp_path, "elsewhere", elsewhere, records=journal(2.5, 7))
    assert found(AGAINST, [*runs, stronger]).estimate == found(AGAINST, runs).estimate
    assert found(AGAINST, [*runs[:2], stronger]).verdict == "not measured"


def test_others_are_of_the_same_target(tmp_path):
    """`pair.target=FOLDER` leaves the pair's name."""
    runs = [
        run_of(
            tmp_path,
            name,
            faster(speedup, method=name, target=f"/models/{target}"),
            records=journal(speedup, i),
        )
        for i, (name, speedup, target) in enumerate(
            [("ours", 2.0, "a"), ("weak", 1.2, "a"), ("strong", 1.5, "b")]
        )
    ]
    assert found(AGAINST, runs).verdict == "not measured"
    same = [Run(run.folder, run.summary | {"target": "/models/a"}) for run in runs]
    assert found(AGAINST, same).verdict == "supported"


def test_a_run_without_its_records_is_not_measured(tmp_path):
    runs = [run_of(tmp_path, name, SUMMARY | {"method": name}) for name in ("ours", "weak", "strong")]
    assert found(AGAINST, runs).verdict == "not measured"


def test_means_over_pairs(tmp_path):
    """Ours is 1.8 and 1.2 times as fast as autoregressive decoding, the other 1.5 and 1.0: 3.0 / 2.5."""
    claim = {
        "measure": "relative",
        "of": {"method": "ours"},
        "against": [{"method": "other"}],
        "over": "pair",
    }
    claim |= {"at_least": 1.0}
    given = {("ours", "deep"): 1.8, ("ours", "flat"): 1.2, ("other", "deep"): 1.5, ("other", "flat"): 1.0}
    runs = [
        run_of(
            tmp_path, f"{method}_{pair}", SUMMARY | {"method": method, "pair": pair}, records=journal(s, i)
        )
        for i, ((method, pair), s) in enumerate(given.items())
    ]
    checked = found(claim, runs)
    assert checked.estimate.low < 1.2 < checked.estimate.high and checked.verdict == "supported"
    assert checked.remark == "against other; 30 questions, means over 2 values of pair"
    assert found(claim, runs[:3]).verdict == "not measured"  # the other was not run on each pair
    assert found(claim, [runs[0], runs[2]]).verdict == "not measured"  # one pair is not several


def test_mbsu_against_another(tmp_path):
    """Per round 4 tokens; drafting reads 5 x 100 and 5 x 20 bytes beside the target's 1000."""
    claim = AGAINST | {"what": "mbsu", "against": [{"method": "full"}], "at_least": 1.3}
    runs = [
        run_of(tmp_path, name, SUMMARY | {"method": name}, records=journal(1.5, read=read))
        for name, read in {"ours": 20, "full": 100}.items()
    ]
    assert found(claim, runs).estimate.value == pytest.approx(1500 / 1100)


def pools(seconds: list[float], single: float) -> list[dict]:
    """A journal of one pool; seconds of each repeat, and of decoding one by one."""
    method = [generation([3] * 5, s, 0.01) for s in seconds]
    plain = [generation([0] * 20, 2 * s, 0.01, drafted=0) for s in seconds]
    one = [generation([0] * 20, single, 0.01, drafted=0) for _ in seconds]
    return by_repeat(
        record(i, pool=0, turns=[turn(baseline=plain, method=method, single=one)]) for i in range(4)
    )


def test_throughput_of_batches(tmp_path):
    claim = {
        "measure": "relative",
        "what": "throughput",
        "of": {"batch_size": 8},
        "against": [{"batch_size": 1}],
    }
    claim |= {"at_least": 3.0}
    small = run_of(tmp_path, "small", batched(batch_size=1), records=pools([4.0, 4.2, 3.8], 8.0))
    large = run_of(tmp_path, "large", batched(batch_size=8), records=pools([1.3, 1.2, 1.25], 10.0))
    checked = found(claim, [small, large])
    assert checked.estimate.value == pytest.approx(
        (10 / 1.25) / (8 / 4.0)
    )  # the machine was slower for the second
    assert 3 < checked.estimate.low < 4 < checked.estimate.high < 5 and checked.verdict == "supported"
    assert checked.remark == "against exspec + sps, batch 1; 3 repeats of one pool: timing noise only"


def test_batches_of_other_pools_are_not_divided_by_each_other(tmp_path):
    """`pool=2` and `pool=4`; that the batch sizes differ is what the claim is of."""
    claim = {"measure": "relative", "what": "throughput", "at_least": 3.0}
    claim |= {"of": {"batch_size": 8}, "against": [{"batch_size": 1}]}
    journals = {"small": pools([4.0, 4.2], 8.0), "large": pools([1.3, 1.2], 10.0)}
    journals["halves"] = [one | {"pool": one["question_id"] // 2} for one in journals["large"]]

    def measured_at(size: int, name: str):
        origin = changed(PROVENANCE, config__batch_size=size)
        return run_of(tmp_path, name, batched(batch_size=size), origin, journals[name])

    small, large, halves = measured_at(1, "small"), measured_at(8, "large"), measured_at(8, "halves")
    assert found(claim, [small, halves]).verdict == "not measured"
    checked = found(claim, [small, large, halves])
    assert checked == found(claim, [small, large]) and "config.batch_size" not in checked.remark


def sized(method: str, parameters: int, shared_head: bool | None = None, **changes) -> dict:
    """A run whose trained weights are so large."""
    weights = {"part": {"source": "weights", "parameters": parameters, "shared_head": shared_head}}
    return SUMMARY | {"method": method, "trained_weights": weights} | changes


PARAMETERS = {
    "measure": "parameters",
    "of": {"method": "kangaroo"},
    "against": [{"method": "medusa"}],
    "at_most": 0.113,
}


def test_parameters_are_those_that_were_run():
    runs = runs_of(a=sized("kangaroo", 100), b=sized("medusa", 1000))
    checked = found(PARAMETERS, runs)
    assert checked.estimate.value == 0.1 and checked.verdict == "supported"
    assert checked.remark == "100 against 1,000"
    assert found(PARAMETERS, runs[:1]).verdict == found(PARAMETERS, runs[1:]).verdict == "not measured"
    elsewhere = runs_of(a=sized("kangaroo", 100), b=sized("medusa", 1000, pair="another"))
    assert found(PARAMETERS, elsewhere).verdict == "not measured"
    of_older_edition = runs_of(a=SUMMARY, b=SUMMARY | {"method": "medusa"})
    assert found(PARAMETERS, of_older_edition).verdict == "not measured"


def test_heads_with_an_output_of_their_own_are_taken_before_shared_ones():
    kangaroo, shared = sized("kangaroo", 100), sized("medusa", 101, True)
    checked = found(PARAMETERS, runs_of(a=kangaroo, b=shared))
    assert checked.verdict == "not supported" and checked.remark == "100 against 101 (shared head)"
    both = runs_of(a=kangaroo, b=sized("medusa", 1000, False), c=shared, d=kangaroo | {"pair": "wide"})
    both += runs_of(e=shared | {"pair": "wide"})
    checked = found(PARAMETERS, both)
    assert checked.verdict == "supported" and checked.remark == "100 against 1,000 (own head)"


def test_what_drafts_through_the_targets_head_says_so(tmp_path):
    claim = AGAINST | {"against": [{"method": "weak"}]}
    ours, shared, own = (
        run_of(tmp_path, f"{name}_{form}", sized(name, 9, form), records=journal(speedup))
        for name, form, speedup in (("ours", True, 1.8), ("weak", True, 1.2), ("weak", False, 1.5))
    )
    assert (
        found(claim, [ours, shared]).remark == "ours (shared head) against weak (shared head); 30 questions"
    )
    assert (
        found(claim, [ours, own, shared]).remark == "ours (shared head) against weak (own head); 30 questions"
    )


@pytest.mark.parametrize("form", [True, False, None])
def test_trained_weights_are_counted_in_their_files(tmp_path, form):
    part = tmp_path / "part"
    part.mkdir()
    save_file({"a": np.zeros((10, 10), np.float32), "ids": np.zeros(20, np.int64)}, part / "a.safetensors")
    save_file({"c": np.zeros((2, 3, 4), np.float16)}, part / "b.safetensors")
    if form is not None:
        (part / "config.json").write_text(json.dumps({"original_lm_head": form}))
    expected = {"source": str(part), "parameters": 124, "shared_head": form}
    drafting = {"name": str(part), "heads": str(part), "none": None, "length": 4, "map": str(tmp_path)}
    assert provenance.trained_weights(drafting) == {"heads": expected}
    assert provenance.trained_weights({"drafter": {"heads": str(part)}}) == {"drafter.heads": expected}


def test_a_run_that_answered_a_single_question_has_no_interval(tmp_path):
    runs = [
        run_of(tmp_path, name, SUMMARY | {"method": name}, records=[answered(1, slow=slow)])
        for name, slow in {"ours": 2.0, "weak": 1.5, "strong": 1.5}.items()
    ]
    checked = found(AGAINST, runs)
    assert checked.estimate == Estimate(pytest.approx(4 / 3), None, None)
