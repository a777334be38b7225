"""Claims: the verdict and its borders, on which pairs and with which settings, and whose bound it is."""

from __future__ import annotations

import itertools

import pytest

from specbench.measure.metrics.statistics import Estimate
from specbench.report import claims, formats
from specbench.report.runs import Run
from tests.report.test_formats import texts
from tests.support.claims import AGAINST, KNOWN, found, journal, judged, published
from tests.support.samples import SUMMARY, changed, faster, run_of, runs_of, wrong


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
    measured = Estimate(value, low, high)
    assert claims.verdict(measured, {"at_least": 1.5}) == at_least
    assert claims.verdict(measured, {"at_most": 1.5}) == at_most
    assert {at_least, at_most} <= set(claims.STYLES)


@pytest.mark.parametrize(
    ("value", "at_least", "at_most"), [(1.5, "supported", "supported"), (1.4, "not supported", "supported")]
)
def test_what_was_counted_needs_no_interval(value, at_least, at_most):
    measured = Estimate(value, None, None)
    assert claims.verdict(measured, {"at_least": 1.5}, counted=True) == at_least
    assert claims.verdict(measured, {"at_most": 1.5}, counted=True) == at_most
    assert set(claims.WITHOUT_INTERVAL) <= set(claims.MEASURES)


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


def test_a_lossy_control_takes_nothing_from_the_claim_that_answers_are_exact(tmp_path):
    claim = next(claim for claim in KNOWN if claim["measure"] == "certified")
    sound = run_of(tmp_path, "sound", published(1.8), records=judged(80))
    lossy, faulty = (
        run_of(tmp_path, rule, wrong() | {"verification": rule}, records=judged(77, violations=3))
        for rule in ("typical", "exact")
    )
    (checked,) = claims.check_claims([sound, lossy], [claim])
    assert checked.fitting.estimate.value == 1.0
    (checked,) = claims.check_claims([sound, faulty], [claim])
    assert checked.fitting.estimate.value < 1.0


@pytest.mark.parametrize("pair", ["smollm2-135m", "tiny_wide", "tiny"])
def test_a_file_in_place_of_the_known_questions_decides_nothing(pair):
    """Such as of `data=spec_bench data.path=my.jsonl data.sha256=null`."""
    weights = "expanded" if pair == "tiny_wide" else "pretrained"
    run = published(1.8, pair=pair, weights=weights, questions_sha256="a" * 64)
    (checked,) = claims.check_claims(runs_of(a=run), KNOWN[:1])
    verdicts = {checked.fitting.verdict, checked.small.verdict}
    assert verdicts == {"not measured"}


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


def test_a_claim_may_ask_for_one_draft_model(tmp_path):
    claim = AGAINST | {"against": [{"method": "weak"}]}
    ours, weak = (
        run_of(tmp_path, name, SUMMARY | {"method": name, "draft": name}, records=journal(1.5, n))
        for n, name in enumerate(("ours", "weak"))
    )
    assert found(claim, [ours, weak]).estimate is not None
    assert found(claim | {"same": ["draft"]}, [ours, weak]).verdict == "not measured"


def test_what_is_counted_is_counted_on_all_pairs(tmp_path):
    (claim,) = (claim for claim in KNOWN if claim["measure"] == "certified")
    runs = [
        run_of(tmp_path, pair, SUMMARY | {"pair": pair}, records=judged(7)) for pair in ("tiny", "tiny_wide")
    ]
    checked = claims.check(claim, runs)
    assert checked.fitting.remark.startswith("2 runs") and checked.small is None


def test_answers_to_the_same_questions_are_counted_once_for_each_method(tmp_path):
    """Ten runs of seven answers are no seventy: an interval would be far too narrow."""
    claim = {"measure": "exact", "of": {}, "at_least": 0.95}
    names = map(str, itertools.count())

    def of(exact: int, ties: int = 0, first: int = 0, **changes) -> Run:
        return run_of(tmp_path, next(names), SUMMARY | changes, records=judged(exact, ties, first=first))

    def estimate(*runs: Run) -> Estimate:
        return found(claim, list(runs)).estimate

    once = estimate(of(7))
    assert estimate(*[of(7) for _ in range(10)]) == once and once.low < 0.6
    assert estimate(of(7), of(7, weights="expanded", pair="tiny_wide"), of(5, limit=1)) == once
    assert estimate(of(7), of(7, method="pld")).low > once.low
    assert estimate(of(7), of(7, pair="smollm2-135m")).low > once.low
    assert estimate(of(7), of(7, target="specbench/tiny/weights/target_shallow")).low > once.low
    assert estimate(of(8), of(6, ties=2)).value == 0.75


def test_answers_to_other_questions_of_a_file_are_counted_each(tmp_path):
    """Such as of `task=qa` and `task=rag`, of which each has a violation, or of ranges that overlap."""
    claim = {"measure": "exact", "of": {}, "at_least": 0.95}
    qa = run_of(tmp_path, "qa", SUMMARY | {"task": "qa"}, records=judged(9, violations=1))
    rag = run_of(tmp_path, "rag", SUMMARY | {"task": "rag"}, records=judged(9, violations=1, first=10))
    assert found(claim, [qa, rag]).remark.endswith("18 exact, 0 ties, 2 violations")
    overlapping = run_of(tmp_path, "overlapping", SUMMARY, records=judged(10, first=5))
    assert found(claim, [qa, overlapping]).remark.endswith("14 exact, 0 ties, 1 violations")
    assert found(claim, [qa, rag, overlapping]).remark.endswith("18 exact, 0 ties, 2 violations")


@pytest.mark.parametrize(
    "off",
    [
        {"ties": {"count": 40, "expected": 3.0, "p_value": 1e-20}},
        {"likelihood": {"method": {"standard_errors": -9.0, "rare_p": None, "spread_p": None}}},
    ],
)
def test_a_run_that_is_a_violation_as_a_whole_refutes_that_answers_are_exact(tmp_path, off):
    (claim,) = (claim for claim in KNOWN if claim["measure"] == "certified")
    runs = [
        run_of(tmp_path, name, published(1.8) | summary, records=judged(7))
        for name, summary in {"exact": {}, "off": off | {"method": "pld"}, "again": off}.items()
    ]
    (checked,) = claims.check_claims(runs[:2], [claim])
    assert checked.fitting.verdict == "not supported"
    assert checked.fitting.remark.endswith("14 exact, 0 ties, 1 violations")
    (checked,) = claims.check_claims(runs, [claim])
    assert checked.fitting.remark.endswith("14 exact, 0 ties, 2 violations")


def test_what_the_baseline_does_wrong_is_no_fault_of_the_method(tmp_path):
    (claim,) = (claim for claim in KNOWN if claim["measure"] == "certified")
    wrong = SUMMARY["baseline"] | {"equivalence": SUMMARY["baseline"]["equivalence"] | {"violation": 1}}
    drawn = {"baseline": {"standard_errors": -9.0, "rare_p": None, "spread_p": None}}
    summary = published(1.8) | {"baseline": wrong, "likelihood": drawn}
    (checked,) = claims.check_claims([run_of(tmp_path, "a", summary, records=judged(7))], [claim])
    assert (
        checked.fitting.remark.startswith("1 runs")
        and "7 exact, 0 ties, 0 violations" in checked.fitting.remark
    )


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
    assert texts(claims.claims_table([checked]))[0][6] == "tuned: 1.90 [1.80, 2.00]"
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
    claim = {"measure": "number", "of": {"method": "theirs"}, "ours": {"method": "mine"}, "at_least": 1.5}
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
    table = claims.claims_table(checked)
    assert formats.cells(table).caption == line
    assert formats.cells(table).heads[1] == "whose bound" and [row[1] for row in texts(table)] == [
        *("paper", "paper", "ours", "paper", "ours")
    ]


def test_a_rival_may_have_the_settings_that_a_paper_gave_it():
    claim = KNOWN[0] | {"of": {"method": "kangaroo", "settings.nodes": 7}}
    chain = published(1.8, pair="tiny_wide", settings={"nodes": 7})
    tree = published(1.2, pair="tiny_wide", settings={"nodes": 59})
    without = published(1.3, pair="tiny_wide", settings={})
    assert claims.check(claim, runs_of(a=chain, b=tree, c=without)).fitting.estimate.value == 1.8
    assert claims.check(claim, runs_of(b=tree, c=without)).fitting.verdict == "not measured"
