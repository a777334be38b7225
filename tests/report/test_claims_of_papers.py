"""The claims of the papers: each says what it must, `make claims` measures it, and a page gets the table."""

from __future__ import annotations

import re
from itertools import product

import pytest
import yaml
from omegaconf import OmegaConf

from specbench import ROOT
from specbench.config.compose import CONF
from specbench.measure.metrics.metrics import METRICS
from specbench.measure.metrics.statistics import Estimate
from specbench.report import claims
from specbench.system.errors import UserError
from tests.report.test_formats import texts
from tests.support.claims import KNOWN, published
from tests.support.samples import SUMMARY, nothing, run_of, runs_of


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


@pytest.mark.parametrize("claim", KNOWN, ids=[claim["name"] for claim in KNOWN])
def test_a_bound_of_a_paper_is_its_figure(claim):
    if claim["bound"] == "paper":
        figure = claim["paper"]["figure"]
        of = re.search(r"\(([\d.]+)M? / ([\d.]+)M?\)", figure)
        value = float(of[1]) / float(of[2]) if of else float(re.search(r"[\d.]+", figure)[0])
        assert claim.get("at_least", claim.get("at_most")) == pytest.approx(value, abs=5e-4)


def test_what_is_timed_or_accepted_is_claimed_of_published_settings():
    """What is counted alone does not depend on them. A rival may have the settings that the paper gave it."""
    for claim in KNOWN:
        rivals = claim.get("against", [])
        if any(key.startswith("settings.") for rival in rivals for key in rival):
            assert "settings" not in claim and claim["of"]["settings_source"] == "published"
            continue
        assert claim.get("settings") == (None if claim["measure"] in claims.WITHOUT_INTERVAL else "published")


def test_every_claim_names_what_there_is():
    methods = {path.stem for path in (CONF / "method").iterdir()}
    batch_keys = set(METRICS)
    for claim in KNOWN:
        assert set(claim) <= {
            *(
                "name",
                "bound",
                "paper",
                "measure",
                "settings",
                "of",
                "ours",
                "against",
                "same",
                "over",
                "what",
            ),
            *("at_least", "at_most"),
        }
        assert claim["measure"] in claims.MEASURES, claim["name"]
        assert ("at_least" in claim) != ("at_most" in claim)
        for choice in chosen(claim):
            keys = {key for key in choice if not key.startswith("settings.")}
            assert keys <= {"method", "batch_size", "pair", "temperature", "settings_source"}
            if rest := choice.keys() - keys:
                parameters = OmegaConf.load(CONF / "method" / f"{choice['method']}.yaml")
                assert {key.partition(".")[2] for key in rest} <= parameters.keys()
            assert set(values_of(choice, "method")) <= methods, claim["name"]
        assert ("against" in claim) == (claim["measure"] in ("relative", "parameters"))
        if claim["measure"] == "number":
            assert claim.get("what", "speedup").split(".")[0] in batch_keys
        if claim["measure"] == "relative":
            assert claim.get("what", "speedup") in ("speedup", "throughput", "mbsu", "acceptance_length")
    assert len({claim["name"] for claim in KNOWN}) == len(KNOWN)


def test_make_claims_measures_every_claim():
    """Each method that a claim chooses is swept, with the settings that the claim asks for."""
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nclaims: ")[2].partition("\n\n")[0]
    swept = set()
    for line in recipe.splitlines():
        given = dict(re.findall(r"(\w+)=([\w,]+)", line))
        if "settings" not in given:  # not a sweep, or one on the real pair
            continue
        methods = given.get("method")
        if methods is None:
            preset = yaml.safe_load((CONF / "experiment" / f"{given['experiment']}.yaml").read_text())
            methods = preset["hydra"]["sweeper"]["params"]["method"]
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
        rows = texts(claims.claims_table(checked))
        assert len(rows) == len(KNOWN)
        assert all(row[3].startswith("–") and row[4] == "not measured" for row in rows)


def test_no_figure_is_typed_in():
    """Other runs, another table: what stands under "here" comes from the runs alone."""

    def here(speedup: float) -> list[str]:
        run = published(speedup, pair="tiny_wide")
        checked = claims.check_claims(runs_of(a=run))
        return [row[3] for row in texts(claims.claims_table(checked))]

    one, other = here(1.4), here(1.9)
    assert one[0] == "1.40 [1.30, 1.50] (bound: at least 1.5)"
    assert other[0] == "1.90 [1.80, 2.00] (bound: at least 1.5)"
    assert one[1:] == other[1:]


def test_the_table_says_what_was_claimed_and_on_what():
    run = published(1.4, pair="tiny_wide")
    (row,) = texts(claims.claims_table(claims.check_claims(runs_of(a=run), KNOWN[:1])))
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
    assert claims._shown(Estimate(0.01234, None, None)) == "0.0123"
