import json
import re
from itertools import product

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from specbench import ROOT
from specbench.config.compose import CONF
from specbench.measure.machine import provenance
from specbench.measure.metrics.metrics import METRICS
from specbench.measure.metrics.statistics import Speedup
from specbench.report import claims, formats
from specbench.system.errors import UserError
from tests.report.test_phases import measured
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
from tests.support.synthetic import answered, columns, generation, record, slowed, turn

KNOWN = yaml.safe_load(claims.FILE.read_text())


def published(speedup: float, **changes) -> dict:
    """A summary with the published settings of its method."""
    return faster(speedup, **changes) | {"settings_source": "published"}


def found(claim: dict, runs: list) -> claims.Finding:
    return claims.find({"name": "a claim", "paper": {"figure": "2 times", "source": "Table 1"}} | claim, runs)


# -- the verdict


@pytest.mark.parametrize(
    ("value", "low", "high", "at_least", "at_most"),
    [
        (1.5, 1.4, 1.6, "supported (point estimate)", "supported (point estimate)"),
        (1.5, 1.5, 1.6, "supported", "supported (point estimate)"),
        (1.5, 1.4, 1.5, "supported (point estimate)", "supported"),
        (1.6, 1.5001, 1.7, "supported", "not supported"),
        (1.6, 1.5, 1.7, "supported", "inconclusive"),
        (1.6, 1.49, 1.7, "supported (point estimate)", "inconclusive"),
        (1.4, 1.3, 1.49, "not supported", "supported"),
        (1.4, 1.3, 1.5, "inconclusive", "supported"),
        (1.4, 1.3, 1.51, "inconclusive", "supported (point estimate)"),
        (
            1.5,
            None,
            None,
            "supported (point estimate)",
            "supported (point estimate)",
        ),  # one run of a pool, a share of time
        (1.4999, None, None, "not supported", "supported (point estimate)"),
        (1.5001, None, None, "supported (point estimate)", "not supported"),
    ],
)
def test_verdicts_at_their_borders(value, low, high, at_least, at_most):
    measured = Speedup(value, low, high)
    assert claims.verdict(measured, {"at_least": 1.5}) == at_least
    assert claims.verdict(measured, {"at_most": 1.5}) == at_most
    assert {at_least, at_most} <= set(claims.STYLES)


@pytest.mark.parametrize(
    ("value", "at_least", "at_most"), [(1.5, "supported", "supported"), (1.4, "not supported", "supported")]
)
def test_what_was_counted_needs_no_interval(value, at_least, at_most):
    measured = Speedup(value, None, None)
    assert claims.verdict(measured, {"at_least": 1.5}, counted=True) == at_least
    assert claims.verdict(measured, {"at_most": 1.5}, counted=True) == at_most
    assert set(claims.COUNTED) <= set(claims.MEASURES)


# -- on which pairs


def test_a_claim_is_judged_on_fitting_pairs_and_shown_on_small_ones():
    claim = KNOWN[0] | {"of": {"method": "kangaroo"}}
    runs = runs_of(
        a=published(1.8, pair="tiny_wide"),
        b=published(1.2, pair="tiny"),
        c=published(1.3, pair="tiny_shallow"),
    )
    checked = claims.check(claim, runs)
    assert (checked.fitting.estimate.value, checked.fitting.verdict) == (1.8, "supported")
    assert (checked.small.estimate.value, checked.small.verdict) == (1.3, "not supported")
    assert claims.check(claim, runs[1:]).fitting.verdict == "not measured"
    assert claims.check(claim, runs[:1]).small.verdict == "not measured"
    row = formats.markdown(claims.claims_table([checked]))
    assert "1.80 [1.70, 1.90]" in row and "1.30 [1.20, 1.40]" in row and "not supported" in row


def test_a_real_pair_comes_before_an_expanded_one():
    """In whatever order they were run."""
    real = published(1.8, pair="smollm2-135m")
    wide = published(1.2, pair="tiny_wide", weights="expanded")
    claim = KNOWN[0]
    for runs in (runs_of(a=real, b=wide), runs_of(a=wide, b=real)):
        assert claims.check(claim, runs).fitting.estimate.value == 1.8
    assert claims.check(claim, runs_of(a=wide)).fitting.estimate.value == 1.2


@pytest.mark.parametrize(
    "change",
    [
        *({"weights": "random"}, {"verification": "typical"}, {"failed": 30}),
        {"equivalence__violation": 40},
        {"baseline__equivalence__violation": 1},
    ],
)
def test_a_run_that_something_is_wrong_with_supports_nothing(change):
    claim = KNOWN[0]
    sound = published(1.8, pair="smollm2-135m")
    (checked,) = claims.check_claims(
        runs_of(a=sound, b=changed(sound, overall__speedup=9.0, **change)), [claim]
    )
    assert checked.fitting.estimate.value == 1.8
    (checked,) = claims.check_claims(runs_of(b=changed(sound, **change)), [claim])
    assert checked.fitting.verdict == "not measured"


def test_a_lossy_control_takes_nothing_from_the_claim_that_answers_are_exact():
    claim = next(claim for claim in KNOWN if claim["measure"] == "certified")
    lossy = wrong() | {"verification": "typical"}
    (checked,) = claims.check_claims(runs_of(a=published(1.8), b=lossy), [claim])
    assert checked.fitting.estimate.value == 1.0
    (checked,) = claims.check_claims(runs_of(a=published(1.8), b=wrong()), [claim])
    assert checked.fitting.estimate.value < 1.0


@pytest.mark.parametrize("key", sorted(set(claims.CONTEXT) - {"pair"}))
def test_runs_of_different_contexts_are_not_compared(tmp_path, key):
    claim = AGAINST | {"against": [{"method": "weak"}]}
    ours, weak = (
        run_of(tmp_path, name, SUMMARY | {"method": name}, records=journal(1.5, n))
        for n, name in enumerate(("ours", "weak"))
    )
    assert found(claim, [ours, weak]).estimate is not None
    ours.summary[key] = "another"
    assert found(claim, [ours, weak]).verdict == "not measured"


def test_what_is_counted_is_counted_on_all_pairs():
    (claim,) = (claim for claim in KNOWN if claim["measure"] == "certified")
    checked = claims.check(claim, runs_of(a=SUMMARY, b=wrong() | {"pair": "tiny_wide"}))
    assert checked.fitting.remark.startswith("2 runs") and checked.small is None


def test_an_acceptance_length_needs_no_wide_pair(tmp_path):
    """It is the same on pairs of any width; one of a real pair comes first."""
    claim = AGAINST | {"what": "acceptance_length", "against": [{"method": "weak"}]}
    tiny, real = (
        [
            run_of(
                tmp_path, f"{name}_{pair}", SUMMARY | {"method": name, "pair": pair}, records=journal(1.5, n)
            )
            for name in ("ours", "weak")
        ]
        for n, pair in enumerate(("tiny", "vicuna-7b"))
    )
    checked = claims.check({"name": "a", "paper": {}, "bound": "paper"} | claim, tiny)
    assert checked.fitting.estimate.value == 1.0 and checked.small is None
    both = claims.check({"name": "a", "paper": {}, "bound": "paper"} | claim, [*real, *tiny])
    assert both.fitting == found(claim, real)


# -- with which settings


def test_a_run_with_other_settings_is_not_taken_for_a_published_claim():
    """The last run counts, but only among those with the published settings of the method."""
    claim = KNOWN[0] | {"of": {"method": "kangaroo"}}
    assert claim["settings"] == "published"
    of_older_edition = faster(1.9, pair="tiny_wide")
    later = [
        published(3.0, pair="tiny_wide") | {"settings_source": source} for source in ("tuned", "changed")
    ]
    runs = runs_of(a=published(1.2, pair="tiny_wide"), b=later[0], c=later[1], d=of_older_edition)
    checked = claims.check(claim, runs)
    assert (checked.fitting.estimate.value, checked.fitting.verdict) == (1.2, "not supported")
    assert claims.check(claim, runs[1:]).fitting.verdict == "not measured"


def test_tuned_settings_stand_beside_the_verdict():
    claim = KNOWN[0] | {"of": {"method": "kangaroo"}}
    tuned = published(1.9, pair="tiny_wide") | {"settings_source": "tuned"}
    checked = claims.check(claim, runs_of(a=tuned, b=published(1.2, pair="tiny_wide")))
    assert checked.fitting.estimate.value == 1.2 and checked.beside["tuned"].estimate.value == 1.9
    assert formats.cells(claims.claims_table([checked])).rows[0][6] == "tuned: 1.90 [1.80, 2.00]"
    # What has no tuned settings is not shown twice.
    assert claims.check(claim, runs_of(b=published(1.2, pair="tiny_wide"))).beside == {}


def test_a_tuned_method_is_held_against_others_at_their_best(tmp_path):
    """`strong` has tuned settings, `weak` has none: its published run is what it can do."""
    claim = AGAINST | {"name": "a", "paper": {}, "bound": "paper", "settings": "published"}
    given = {
        ("ours", "published"): 1.2,
        ("ours", "tuned"): 1.8,
        ("weak", "published"): 1.0,
        ("strong", "tuned"): 1.5,
        ("strong", "published"): 1.1,
    }
    runs = [
        run_of(
            tmp_path,
            f"{method}_{source}",
            SUMMARY | {"method": method, "pair": "wide", "settings_source": source},
            records=journal(speedup, seed),
        )
        for seed, ((method, source), speedup) in enumerate(given.items())
    ]
    checked = claims.check(claim, runs)
    assert checked.fitting.estimate.value == pytest.approx(1.2 / 1.1, rel=0.02)
    assert checked.beside["tuned"].estimate.value == pytest.approx(1.8 / 1.5, rel=0.02)


def test_a_method_of_our_own_stands_beside_the_papers(tmp_path):
    claim = {"measure": "speedup", "of": {"method": "theirs"}, "ours": {"method": "mine"}, "at_least": 1.5}
    claim |= {"name": "a", "paper": {}, "bound": "paper", "settings": "published"}
    mine = published(1.9, method="mine", pair="wide") | {"settings_source": "tuned"}
    checked = claims.check(claim, runs_of(a=published(1.2, method="theirs", pair="wide"), b=mine))
    assert (checked.fitting.estimate.value, checked.fitting.verdict) == (1.2, "not supported")
    assert {name: one.estimate.value for name, one in checked.beside.items()} == {"mine": 1.9}
    assert claims.check(claim, runs_of(b=mine)).fitting.verdict == "not measured"


# -- whose bounds


def test_our_own_bounds_are_counted_apart():
    def judged(bound: str, verdict: str) -> claims.Checked:
        claim = {"name": "a", "bound": bound, "at_least": 1, "paper": {"figure": "1", "source": "Table 1"}}
        return claims.Checked(claim, claims.Finding(None, "", verdict), None, {})

    checked = [judged("paper", "supported")] * 2 + [judged("ours", "supported")]
    checked += [judged("paper", "not supported"), judged("ours", "inconclusive")]
    line = claims.counts(checked)
    assert line == (
        "of the papers' 3 claims: 2 supported, 1 not supported; of our own 2 bounds: 1 supported, 1 inconclusive"
    )
    table = formats.cells(claims.claims_table(checked))
    assert table.caption == line
    assert table.heads[1] == "whose bound" and [row[1] for row in table.rows] == [
        *("paper", "paper", "ours", "paper", "ours")
    ]


# -- measures


def test_the_speedup_of_the_last_run_that_matches():
    claim = {"measure": "speedup", "of": {"experiment": "e", "method": "kangaroo"}, "at_least": 1.5}
    runs = runs_of(a=faster(3.0, experiment="e"), b=faster(1.7, experiment="e"), c=faster(9.0))
    checked = found(claim, runs)
    assert checked.estimate == Speedup(1.7, pytest.approx(1.6), pytest.approx(1.8))
    assert (checked.verdict, checked.remark) == ("supported", "160 questions")
    assert found(claim, runs[:1]).estimate.value == 3.0 and found(claim, runs[2:]).verdict == "not measured"


@pytest.mark.parametrize("change", [{"task": "qa"}, {"temperature": 1.0}, {"data": "jsonl"}])
@pytest.mark.parametrize("measure", [{"measure": "speedup"}, {"measure": "number", "what": "speedup"}])
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
    assert found(claim, runs_of(a=hidden)).estimate == Speedup(0.8, None, None)
    assert found(claim, runs_of(a=hidden)).verdict == "supported (point estimate)"
    assert found(claim, runs_of(a=SUMMARY)).verdict == "not measured"  # nothing ran beside the target
    share = {"measure": "number", "what": "alignment_share", "of": {}, "at_most": 0.05}
    assert found(share, runs_of(a=batched(alignment_share=0.04))).verdict == "supported (point estimate)"
    assert found(share, runs_of(a=batched(alignment_share=0.06))).verdict == "not supported"


def test_the_share_of_certified_answers():
    claim = {"measure": "certified", "of": {"method": "kangaroo"}, "at_least": 1.0}
    checked = found(claim, runs_of(a=SUMMARY, b=faster(1.0)))
    assert checked.estimate.value == 1.0 and checked.verdict == "supported"
    assert checked.remark == "2 runs: 158 exact, 2 ties, 0 violations"
    checked = found(claim, runs_of(a=SUMMARY, b=wrong(), c=nothing(), d=wrong() | {"method": "pld"}))
    assert checked.estimate.value == 157 / 160 and checked.verdict == "not supported"
    assert checked.remark == "3 runs: 156 exact, 1 ties, 3 violations"
    assert found(claim, runs_of(a=nothing())).verdict == "not measured"  # sampling: no answer was judged


def test_the_share_of_equal_answers_counts_no_tie():
    claim = {"measure": "exact", "of": {"method": ["eqspec", "exspec"]}, "at_least": 1.0}
    runs = runs_of(
        a=SUMMARY | {"method": "eqspec"}, b=SUMMARY | {"method": "exspec"}, c=SUMMARY | {"method": "ragged"}
    )
    checked = found(claim, runs)
    assert checked.estimate.value == 158 / 160 and checked.verdict == "not supported"
    assert checked.remark == "2 runs: 158 exact, 2 ties, 0 violations"
    assert found(claim, runs[2:]).verdict == "not measured"


def test_equality_is_claimed_of_the_papers_own_methods_alone():
    """Ragged batches are ours: what they answer is no evidence for EQSPEC or EXSPEC."""
    (claim,) = (claim for claim in KNOWN if claim["name"].startswith("EQSPEC and EXSPEC, answers equal"))
    alike = changed(SUMMARY, equivalence__exact=80, equivalence__tie=0)
    ties = alike | {"equivalence": SUMMARY["equivalence"]}
    ours = [alike | {"method": method} for method in ("eqspec", "exspec")]
    assert (
        claims.find(claim, runs_of(a=ours[0], b=ours[1], c=ties | {"method": "ragged"})).estimate.value == 1.0
    )
    assert claims.find(claim, runs_of(a=ours[0], b=ties | {"method": "exspec"})).estimate.value == 159 / 160


def test_no_claim_rests_on_the_best_of_several_noisy_numbers():
    """The maximum over tasks of a method that gains nothing is above 1."""
    shares, single = {"exact", "certified", "parameters"}, {"speedup", "number", "relative"}
    assert {claim["measure"] for claim in KNOWN} <= shares | single == set(claims.MEASURES)


def journal(speedup: float, seed: int = 0, read: int = 100) -> list[dict]:
    """30 questions; read: bytes of weights that a draft token reads."""
    draw = np.random.default_rng(seed)
    found = []
    for question in range(30):
        plain = 1 + question % 5
        rounds = columns([{"accepted": 3, "draft_bytes": 5 * read}] * 5)
        method = generation([3] * 5, plain / speedup * draw.normal(1, 0.02), 0.01) | {"steps": rounds}
        found.append(
            record(
                question, turns=[turn(baseline=generation([0] * 20, plain, 0.01, drafted=0), method=method)]
            )
        )
    return found


AGAINST = {
    "measure": "relative",
    "of": {"method": "ours"},
    "against": [{"method": "weak"}, {"method": "strong"}],
    "at_least": 1.1,
}


def test_against_the_strongest_of_others(tmp_path):
    ours, weak, strong = (
        run_of(tmp_path, name, SUMMARY | {"method": name}, records=journal(speedup, seed))
        for seed, (name, speedup) in enumerate({"ours": 1.8, "weak": 1.2, "strong": 1.5}.items())
    )
    checked = found(AGAINST, [strong, ours, weak])
    assert checked.estimate.low < 1.2 < checked.estimate.high and checked.verdict == "supported"
    assert checked.remark == "against strong; 30 questions"
    assert found(AGAINST | {"at_least": 1.19}, [ours, weak, strong]).verdict != "not supported"
    assert found(AGAINST | {"at_least": 1.4}, [ours, weak, strong]).verdict == "not supported"
    for lacking in ([ours, weak], [ours, strong], [weak, strong], []):
        checked = found(AGAINST, lacking)
        assert (checked.verdict, checked.estimate, checked.remark) == ("not measured", None, "no run for it")


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
    kernels = run_of(tmp_path, "kernels", theirs | {"kernels": "no compiler"}, records=journal(1.2))
    ours.summary["kernels"] = None
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
    assert says(remark, "30 questions; ours: SLOW MACHINE ... 30% ... weak: DISTURBED ... 40%")
    assert found(claim | {"what": "acceptance_length"}, runs).remark == "against weak; 30 questions"
    for measure in ({"measure": "speedup"}, {"measure": "number", "what": "alignment_share"}):
        alone = {"of": {"method": "weak"}, "at_least": 1.0} | measure
        assert says(found(alone, runs).remark, "30 questions; weak: DISTURBED ... 40%")


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
    return [record(i, pool=0, turns=[turn(baseline=plain, method=method, single=one)]) for i in range(4)]


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


# -- the papers' claims


def chosen(claim: dict) -> list[dict]:
    """All that a claim chooses runs by."""
    ours = [claim["of"] | claim["ours"]] if "ours" in claim else []
    return [claim["of"], *ours, *claim.get("against", [])]


def values_of(choice: dict, key: str) -> list[str]:
    """The values of a key that a choice allows; none without the key."""
    value = choice.get(key, [])
    return list(map(str, value if isinstance(value, list) else [value]))


@pytest.mark.parametrize("claim", KNOWN, ids=[claim["name"] for claim in KNOWN])
def test_every_claim_says_whose_bound_it_is_and_where_it_stands(claim):
    assert claim["bound"] in claims.BOUNDS
    assert set(claim["paper"]) == {"figure", "source"} and all(claim["paper"].values())
    source = claim["paper"]["source"]
    if claim["bound"] == "ours":
        assert "Ours: " in source  # with the reason for it, after what the paper says
    else:
        assert re.search(r"abstract|Table \d|eq\. \d|Figure \d|leaderboard", source)


def test_what_is_timed_or_accepted_is_claimed_of_published_settings():
    """What is counted alone does not depend on them."""
    for claim in KNOWN:
        assert claim.get("settings") == (None if claim["measure"] in claims.COUNTED else "published")


def test_every_claim_names_what_there_is():
    methods = {path.stem for path in (CONF / "method").iterdir()}
    batch_keys = set(METRICS)
    for claim in KNOWN:
        assert set(claim) <= {
            *("name", "bound", "paper", "measure", "settings", "of", "ours", "against", "over", "what"),
            *("at_least", "at_most"),
        }
        assert claim["measure"] in claims.MEASURES, claim["name"]
        assert ("at_least" in claim) != ("at_most" in claim)
        for choice in chosen(claim):
            assert set(choice) <= {"method", "batch_size", "pair"}
            assert set(values_of(choice, "method")) <= methods, claim["name"]
        assert ("against" in claim) == (claim["measure"] in ("relative", "parameters"))
        if claim["measure"] == "number":
            assert claim["what"].split(".")[0] in batch_keys
        if claim["measure"] == "relative":
            assert claim.get("what", "speedup") in ("speedup", "throughput", "mbsu", "acceptance_length")
    assert len({claim["name"] for claim in KNOWN}) == len(KNOWN)


def test_make_claims_measures_every_claim():
    """Each method that a claim chooses is swept, with the settings that the claim asks for."""
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nclaims: ")[2].partition("\n\n")[0]
    experiments = {"BATCHES": "batch_scaling"}
    swept = set()
    for line in recipe.splitlines():
        given = dict(re.findall(r"(\w+)=([\w,]+)", line))
        command = re.match(r"\t@\$\((\w+)\)", line)
        name = given.get("experiment") or (command and experiments.get(command[1]))
        if name is None:
            continue
        preset = yaml.safe_load((CONF / "experiment" / f"{name}.yaml").read_text())
        methods = given.get("method") or preset["hydra"]["sweeper"]["params"]["method"]
        swept |= set(product(methods.split(","), given["settings"].split(",")))
    for claim in KNOWN:
        for choice in chosen(claim):
            settings = (
                "tuned" if choice.get("method") == claim.get("ours", {}).get("method", 0) else "published"
            )
            asked = product(values_of(choice, "method"), [settings])
            assert set(asked) <= swept, claim["name"]


def test_without_runs_no_claim_is_measured():
    for runs in ([], runs_of(a=SUMMARY | {"method": "another", "equivalence": nothing()["equivalence"]})):
        checked = claims.check_claims(runs)
        assert len(checked) == len(KNOWN) and {one.fitting.verdict for one in checked} == {"not measured"}
        table = formats.cells(claims.claims_table(checked))
        assert len(table.rows) == len(KNOWN)
        assert all(row[3].startswith("–") and row[4] == "not measured" for row in table.rows)


def test_no_figure_is_typed_in():
    """Other runs, another table: what stands under "here" comes from the runs alone."""

    def here(speedup: float) -> list[str]:
        run = published(speedup, pair="tiny_wide")
        checked = claims.check_claims(runs_of(a=run))
        return [row[3] for row in formats.cells(claims.claims_table(checked)).rows]

    one, other = here(1.4), here(1.9)
    assert one[0] == "1.40 [1.30, 1.50] (asked: at least 1.5)"
    assert other[0] == "1.90 [1.80, 2.00] (asked: at least 1.5)"
    assert one[1:] == other[1:]


def test_the_table_says_what_was_claimed_and_on_what():
    run = published(1.4, pair="tiny_wide")
    (row,) = formats.cells(claims.claims_table(claims.check_claims(runs_of(a=run), KNOWN[:1]))).rows
    assert row[:2] == ["Kangaroo, all tasks", "paper"]
    assert row[2].startswith("1.50 times (Liu et al. 2024, Table 1")
    assert row[4:] == ["inconclusive", "published settings; 160 questions", "–", "– (not measured)"]


# -- pages


PAGE = """# Claims

<!-- claims:begin -->
old
<!-- claims:end -->

So much: <!-- claims-counts:begin -->
old
<!-- claims-counts:end -->

The end.
"""


def test_a_page_gets_the_table_and_the_counts(tmp_path):
    run = run_of(tmp_path, "a", published(1.4, pair="tiny_wide"))
    checked = claims.check_claims([run], KNOWN[:1])
    page = tmp_path / "claims.md"
    page.write_text(PAGE)
    claims.renew(page, checked, [run])
    text = page.read_text()
    assert "old" not in text and text.startswith("# Claims\n") and text.endswith("\nThe end.\n")
    assert "1 runs; 2026-01-02; EPYC, 2 cores; commit cccccccc.\n\n| claim | whose bound |" in text
    assert "\nOf the papers' 1 claims: 1 inconclusive.\n" in text
    claims.renew(page, checked, [run])
    assert page.read_text() == text
    (tmp_path / "bare.md").write_text("# Claims\n")
    with pytest.raises(UserError, match="claims:begin"):
        claims.renew(tmp_path / "bare.md", checked, [run])


def test_the_page_of_claims_has_its_markers():
    text = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    begin, end = (text.find(f"\n<!-- {claims.TABLE}:{edge} -->\n") for edge in ("begin", "end"))
    assert -1 < begin < text.find("\n| claim | ", begin) < end


def test_small_shares_are_shown_with_three_digits():
    assert claims._shown(Speedup(0.01234, None, None)) == "0.0123"


def test_a_run_that_answered_a_single_question_has_no_interval(tmp_path):
    runs = [
        run_of(tmp_path, name, SUMMARY | {"method": name}, records=[answered(1, slow=slow)])
        for name, slow in {"ours": 2.0, "weak": 1.5, "strong": 1.5}.items()
    ]
    checked = found(AGAINST, runs)
    assert checked.estimate == Speedup(pytest.approx(4 / 3), None, None)
