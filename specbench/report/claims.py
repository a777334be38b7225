"""The papers' claims as checks on measured runs (`claims.yaml`): what was published, what came out here, a verdict."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import yaml
from rich.text import Text
from scipy import stats

from specbench import CONF, ROOT
from specbench.config.spec import METHOD, POOL
from specbench.measure.metrics.metrics import EXACT, TIE, VIOLATION, certificates, worst_of
from specbench.measure.metrics.relative import COUNTED, Relative, ratio_of_runs
from specbench.measure.metrics.statistics import CONFIDENCE, Estimate
from specbench.report import cells, formats, remarks, verdicts
from specbench.report.compare import differing_conditions, hindrance
from specbench.report.labels import DISTRIBUTION, method_label, named
from specbench.system.errors import UserError
from specbench.system.files import file_sha256
from specbench.system.settings import CONSTANT, TYPICAL

if TYPE_CHECKING:
    from rich.table import Table

    from specbench.report.runs import Run

FILE = Path(__file__).with_name("claims.yaml")
# The embedded family as it is: starting operations dominates its passes, reading memory those of the papers.
SMALL = {"pair": ["tiny", "tiny_shallow"]}
# The same family, expanded to the width of other models: its passes cost what theirs do, but its text is its own.
EXPANDED = {"weights": "expanded"}
# Checksums of the questions that claims refer to, whatever file a run used in their place.
QUESTIONS = {
    "spec_bench": yaml.safe_load((CONF / "data" / "spec_bench.yaml").read_text(encoding="utf-8"))["sha256"],
    "tiny": file_sha256(ROOT / "specbench" / "tiny" / "questions.jsonl"),
}
# The embedded questions mean nothing to a real model.
REAL_TEXT = {"data": "spec_bench", "questions_sha256": QUESTIONS["spec_bench"]}
# Scope of a paper's overall figure, unless a claim chooses its runs differently: all tasks of Spec-Bench, or of the
# embedded questions in its form, all turns, decoded greedily.
OVERALL = {
    "task": "all",
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "data": [*QUESTIONS],
    "questions_sha256": [*QUESTIONS.values()],
    "turns": None,
}
# What two runs must share for their numbers to be compared; their questions are paired one by one.
CONTEXT = (
    *("pair", "target", "data", "questions_sha256", "split", "turns"),
    *("dtype", "device", "weights", "anatomy", *DISTRIBUTION, "verification", "protocol"),
    *("threads", "drafter", "max_new_tokens", "processor"),
)
# What runs of one family must share for their answers to the same question to be the same.
SAME_ANSWERS = ("method", "questions_sha256", *DISTRIBUTION, "dtype")
EMBEDDED, SHALLOW = "embedded", "specbench/tiny/weights/target_shallow"  # the family, and its other target
STYLES = {
    "supported": "green",
    "supported (point estimate)": "",
    "inconclusive": "yellow",
    "not supported": "red",
    "not measured": "yellow",
}
BOUNDS = {"paper": "of the papers' {} claims", "ours": "of our own {} bounds"}
# What a page holds between the lines <!-- NAME:begin --> and <!-- NAME:end -->.
TABLE, COUNTS = "claims", "claims-counts"
# Forms of heads that a paper trains: the second is the published one.
SHARED_HEAD, OWN_HEAD = "shared head", "own head"


@dataclass(frozen=True)
class Finding:
    """The result of a claim on some runs.

    Attributes:
        estimate: what was measured; None: no run for it.
        remark: its basis.
        verdict: a key of `STYLES`.
    """

    estimate: Estimate | None
    remark: str
    verdict: str


@dataclass(frozen=True)
class Checked:
    """A claim and its findings.

    Attributes:
        claim: as in `claims.yaml`.
        fitting: the one with the verdict. Measures that depend on the time or the bytes of a pass are judged on real
            pairs or, without such runs, on the embedded family, expanded until its passes are memory-bound, as in the
            papers; acceptance lengths likewise or, without such runs, on the small pairs; counts on all.
        small: on the embedded family as it is (`SMALL`); None for what does not depend on it.
        beside: findings without a verdict, by name: "tuned" settings, or a method of our own with its best ones.
    """

    claim: Mapping
    fitting: Finding
    small: Finding | None
    beside: Mapping[str, Finding]


def check_claims(runs: list[Run], claims: list[dict] | None = None) -> list[Checked]:
    """Checks every claim against the runs of this project's own decoding with a constant draft length.

    Runs with random weights, or with the lossy rule that serves as a control, do not count. A run with any other fault
    counts only for what needs no times and no lengths: its answers, and the size of its drafter. A claim without a run
    is "not measured".
    """
    runs = [run for run in runs if _may_count(run.summary)]
    return [check(claim, runs) for claim in (yaml.safe_load(FILE.read_text()) if claims is None else claims)]


def _may_count(summary: Mapping) -> bool:
    of_one_length = summary["engine"] is None and summary["draft_length"] == CONSTANT
    return of_one_length and summary["weights"] != "random" and summary["verification"] != TYPICAL


def check(claim: Mapping, runs: list[Run]) -> Checked:
    """Checks one claim on the runs."""
    judged = runs
    if "settings" in claim:
        judged = [run for run in runs if run.summary["settings_source"] == claim["settings"]]
    fitting, small = _on_pairs(claim, judged)
    others = {"tuned": claim} if "settings" in claim else {}
    if "ours" in claim:
        others[claim["ours"]["method"]] = {**claim, "of": claim["of"] | claim["ours"]}
    beside = {name: _on_pairs(other, _tuned(runs))[0] for name, other in others.items()}
    shown = {name: one for name, one in beside.items() if one.estimate is not None and one != fitting}
    return Checked(claim, fitting, small, shown)


def _on_pairs(claim: Mapping, runs: list[Run]) -> tuple[Finding, Finding | None]:
    """The findings on the pairs that a claim is judged on, and on the small ones; see `Checked`."""
    if claim["measure"] in WITHOUT_INTERVAL:
        return find(claim, runs), None
    groups: dict[str, list[Run]] = {"real": [], "expanded": [], "small": []}
    is_timed = claim.get("what") not in COUNTED
    for run in runs:
        if verdicts.faults(run.summary) or (is_timed and remarks.too_few_cores(run.summary)):
            continue
        kind = "small" if _matches(SMALL, run) else "expanded" if _matches(EXPANDED, run) else "real"
        if kind != "real" or _matches(REAL_TEXT, run):
            groups[kind].append(run)
    real, expanded, small = (find(claim, group) for group in groups.values())
    fitting = expanded if real.estimate is None else real
    if claim.get("what") != "acceptance_length":
        return fitting, small
    return (small if fitting.estimate is None else fitting), None


def _tuned(runs: list[Run]) -> list[Run]:
    """The runs with published and then those with tuned settings: the last is a method's best, whether tuned or not."""
    return [
        run for source in ("published", "tuned") for run in runs if run.summary["settings_source"] == source
    ]


def find(claim: Mapping, runs: list[Run]) -> Finding:
    """The finding of some runs."""
    is_counted = claim["measure"] in WITHOUT_INTERVAL
    if not is_counted:
        overall = {key: claim["of"].get(key, value) for key, value in OVERALL.items()}
        runs = [run for run in runs if _matches(overall, run)]
    measured = MEASURES[claim["measure"]](claim, runs)
    estimate, remark = measured or (None, "no run for it")
    if estimate is None or estimate.value is None:
        return Finding(None, remark, "not measured")
    return Finding(estimate, remark, verdict(estimate, claim, is_counted))


def verdict(estimate: Estimate, claim: Mapping, counted: bool = False) -> str:
    """The verdict on a claim.

    - supported: the worse end of the interval (or a number that was counted) meets the bound, too.
    - supported (point estimate): the number does, but that end does not, or there is none.
    - inconclusive: only the better end does.
    - not supported: neither end does.
    """
    value = cast("float", estimate.value)
    low, high = (value if end is None else end for end in (estimate.low, estimate.high))
    if "at_least" in claim:
        worst, middle, best, bound = low, value, high, claim["at_least"]
    else:
        worst, middle, best, bound = -high, -value, -low, -claim["at_most"]
    if middle >= bound:
        sure = worst >= bound and (counted or estimate.low is not None)
        return "supported" if sure else "supported (point estimate)"
    return "inconclusive" if best >= bound else "not supported"


def counts(checked: list[Checked]) -> str:
    """Number of claims for each verdict, separately for the papers' claims and for our own bounds."""
    lines = []
    for bound, words in BOUNDS.items():
        verdicts = Counter(one.fitting.verdict for one in checked if one.claim["bound"] == bound)
        if verdicts:
            each = ", ".join(f"{verdicts[name]} {name}" for name in STYLES if verdicts[name])
            lines.append(f"{words.format(verdicts.total())}: {each}")
    return "; ".join(lines)


def claims_table(checked: list[Checked]) -> Table:
    """A row for each claim: the verdict, and the figures of other settings and of the small embedded pairs."""
    table = cells.PlainTable("the papers' claims, checked", counts(checked))
    heads = ("claim", "whose bound", "paper", "here", "verdict", "on", "other settings", "small pairs (tiny)")
    table.add_columns(*heads, overflow="fold")
    for one in checked:
        claim = one.claim
        bound = f"at least {claim['at_least']:g}" if "at_least" in claim else f"at most {claim['at_most']:g}"
        settings = f"{claim['settings']} settings; " if "settings" in claim else ""
        table.add_row(
            claim["name"],
            claim["bound"],
            f"{claim['paper']['figure']}\n{claim['paper']['source']}",
            f"{_shown(one.fitting.estimate)}\nbound: {bound}",
            Text(one.fitting.verdict, style=STYLES[one.fitting.verdict]),
            f"{settings if one.fitting.estimate else ''}{one.fitting.remark}",
            "\n".join(f"{name}: {_shown(other.estimate)}" for name, other in one.beside.items())
            or cells.UNKNOWN,
            cells.UNKNOWN if one.small is None else f"{_shown(one.small.estimate)}\n{one.small.verdict}",
        )
    return table


def markdown(checked: list[Checked], runs: list[Run]) -> str:
    """The table in Markdown, with what it was measured on and how many claims came to each verdict."""
    table = formats.markdown(claims_table(checked)).partition("\n\n")[2]
    return f"{measured_on(runs)}\n\n{table}"


def measured_on(runs: list[Run]) -> str:
    """Dates, machines and commits of the runs, in a sentence."""
    provenances = [run.provenance for run in runs if run.provenance is not None]
    days = sorted({one["time"][:10] for one in provenances})
    machines = sorted(
        {f"{one['machine']['cpu']}, {one['machine']['usable_cores']} cores" for one in provenances}
    )
    commits = sorted({one["git"]["commit"][:8] for one in provenances if one["git"]})
    facts = [
        f"{len(runs)} runs",
        " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "",
        " and ".join(machines),
        f"commit {named(commits)}" if commits else "",
    ]
    return "; ".join(filter(None, facts)) + "."


def renew(page: Path, checked: list[Checked], runs: list[Run]) -> None:
    """Writes the table, or the line of counts, between the markers of a page.

    Args:
        page: A Markdown file with the lines `<!-- claims:begin -->` and `<!-- claims:end -->` around the table, or
            `claims-counts` in place of `claims` around the line.
        checked: The claims.
        runs: That they were checked on.

    Raises:
        UserError: The page has neither pair of markers.
    """
    text = before = page.read_text(encoding="utf-8")
    line = counts(checked)
    contents = {TABLE: markdown(checked, runs).strip(), COUNTS: f"{line[:1].upper()}{line[1:]}."}
    marked = 0
    for name, content in contents.items():
        written = formats.between(text, name, content)
        if written is not None:
            text, marked = written, marked + 1
    if not marked:
        raise UserError(f"{page} has no lines <!-- {TABLE}:begin --> and <!-- {TABLE}:end -->")
    if text != before:
        page.write_text(text, encoding="utf-8")


# -- measures: (claim, runs) -> number with interval and a remark; None without a run


def number(claim: Mapping, runs: list[Run]) -> tuple[Estimate, str] | None:
    """A number of the summary, the overall speedup unless the claim names another, with its interval if it has one."""
    run, what = _last(claim["of"], runs), claim.get("what", "speedup")
    if run is None:
        return None
    value = overall = run.summary["overall"]
    for key in what.split("."):
        value = None if value is None else value.get(key)
    basis = [f"{cells.questions_text(overall)} questions", *remarks.kinds(remarks.machine_warnings([run]))]
    return Estimate(value, overall.get(f"{what}_low"), overall.get(f"{what}_high")), "; ".join(basis)


def relative(claim: Mapping, runs: list[Run]) -> tuple[Estimate, str] | None:
    """A number of a run against that of the strongest rival in the same context.

    Rivals without a measured question in common are left out, and named. With `over` it compares means over all
    values of a key (each pair), of which there must be several.
    """
    key, what = claim.get("over"), claim.get("what", "speedup")
    values = sorted({run.summary[key] for run in runs if _matches(claim["of"], run)}) if key else []
    sets = [_comparable(claim, choice, runs) for choice in ([{key: value} for value in values] or [{}])]
    if not all(sets) or (key and len(values) < 2):
        return None
    ours, *others = (list(column) for column in zip(*sets))
    ratios = [(_ratio(other, ours, what), other) for other in others]
    apart = [
        f"no measured question in common with {_named(other[0])}"
        for one, other in ratios
        if one.ratio.value is None
    ]
    measured = [(one.ratio.value, one, other) for one, other in ratios if one.ratio.value is not None]
    if not measured:
        return Estimate(None, None, None), "; ".join(apart)
    _, (strongest, count, unit), rivals = min(measured, key=lambda item: item[0])
    # The interval of the smallest ratio: any rival may be the strongest.
    lows, highs = ([getattr(one.ratio, end) for _, one, _ in measured] for end in ("low", "high"))
    ratio = Estimate(strongest.value, *(None if None in ends else min(ends) for ends in (lows, highs)))
    batch = f", batch {rivals[0].summary['batch_size']}" if rivals[0].unit == POOL else ""
    means = f", means over {len(values)} values of {key}" if key else ""
    name = _named(ours[0])
    first = "" if name == method_label(ours[0].summary) else f"{name} "
    basis = f"{first}against {_named(rivals[0])}{batch}; {remarks.paired_over(count, unit)}{means}"
    return ratio, "; ".join([basis, *apart, *_doubts(claim, ours, rivals)])


def share_of_answers(claim: Mapping, runs: list[Run]) -> tuple[Estimate, str] | None:
    """Share of the answers with one of the verdicts `EQUAL`, over all runs that match.

    Runs of one method give the same answer to a question, which is no evidence of its own: it counts once, with the
    worst verdict of all runs. A run that is a violation as a whole, by its ties or by the likelihood of its answers,
    counts as one more answer. Violations of the baseline are none of the method's.
    """
    matching = [run for run in runs if _matches(claim["of"], run)]
    by_answer: dict[tuple, list[dict]] = defaultdict(list)
    as_a_whole = set()
    for run in matching:
        is_embedded = _matches(SMALL, run) or _matches(EXPANDED, run)
        target = run.summary["target"]
        # Expanded, a target of the embedded family still gives its own answers.
        family = (EMBEDDED, target == SHALLOW) if is_embedded else (run.summary["pair"], target)
        group = (family, *(run.summary[key] for key in SAME_ANSWERS))
        for answer, some in certificates(run.records).items():
            by_answer[*group, *answer] += some
        off = verdicts.too_many_ties(run.summary) or METHOD in verdicts.improbable(run.summary)
        if off and not run.summary["equivalence"]["violation"]:
            as_a_whole.add(group)
    total = Counter(worst_of(some)["verdict"] for some in by_answer.values())
    total[VIOLATION] += len(as_a_whole)
    answers = total.total()
    if not answers:
        return None
    kinds = f"{total[EXACT]} exact, {total[TIE]} ties, {total[VIOLATION]} violations"
    remark = f"{len(matching)} runs, each question of a method once: {kinds}"
    equal = sum(total[name] for name in EQUAL[claim["measure"]])
    ends = stats.binomtest(equal, answers).proportion_ci(CONFIDENCE, method="exact")
    if claim["measure"] == "certified":  # no number of answers shows that there never is another
        share = f"at most {1 - ends.low:.1%} of answers can be others"
        return Estimate(equal / answers, None, None), f"{remark}; {share}" if equal == answers else remark
    return Estimate(equal / answers, ends.low, ends.high), remark


def parameters(claim: Mapping, runs: list[Run]) -> tuple[Estimate, str] | None:
    """Parameters of the trained weights of a run / those of another run on the same pair, as their files hold them.

    Of several such pairs of runs, one counts whose second has weights with a head of their own, if there is one.
    """
    (against,) = claim["against"]
    both = [
        (ours, theirs)
        for ours in runs
        if _matches(claim["of"], ours)
        and (theirs := _last(against | {key: ours.summary[key] for key in ("pair", "target")}, runs))
        is not None
    ]
    both = [pair for pair in both if all(map(_parameters, pair))]
    if not both:
        return None
    with_own_head = [pair for pair in both if _form(pair[1]) == OWN_HEAD]
    pair = (with_own_head or both)[-1]
    count, of_other = map(_parameters, pair)
    forms = [f" ({_form(run)})" if _form(run) else "" for run in pair]
    return Estimate(count / of_other, None, None), f"{count:,}{forms[0]} against {of_other:,}{forms[1]}"


# By measure, the verdicts on answers that count as equal to the reference's.
EQUAL = {"exact": (EXACT,), "certified": (EXACT, TIE)}
WITHOUT_INTERVAL = (*EQUAL, "parameters")  # those that have no interval because they need none
MEASURES: dict[str, Callable] = {
    "number": number,
    "relative": relative,
    "parameters": parameters,
    **dict.fromkeys(EQUAL, share_of_answers),
}


# -- helpers


def _matches(choice: Mapping, run: Run) -> bool:
    """Whether a run has each key's value, or one of several; "settings.nodes" is a key of a key."""
    return all(_value(run, k) in (v if isinstance(v, list) else [v]) for k, v in choice.items())


def _value(run: Run, key: str) -> object:
    outer, _, inner = key.partition(".")
    value = run.summary.get(outer)
    return (value or {}).get(inner) if inner else value


def _newest(choice: Mapping, runs: list[Run]) -> list[Run]:
    """The runs that match, the last first; runs whose weights have their own head come before the others."""
    matching = [run for run in reversed(runs) if _matches(choice, run)]
    return sorted(matching, key=lambda run: _form(run) != OWN_HEAD)


def _last(choice: Mapping, runs: list[Run]) -> Run | None:
    """The first of `_newest`."""
    return next(iter(_newest(choice, runs)), None)


def _comparable(claim: Mapping, choice: Mapping, runs: list[Run]) -> list[Run]:
    """Our last run that is comparable with a run of each rival, and those runs; [] if there is none."""
    for ours in _newest(claim["of"] | choice, runs):
        context = {name: ours.summary.get(name) for name in (*CONTEXT, *claim.get("same", ()), *choice)}
        matching = [_newest(other | context, runs) for other in claim["against"]]
        others = [[run for run in of_other if not hindrance(ours, run)] for of_other in matching]
        if all(others):
            return [ours, *(of_other[0] for of_other in others)]
    return []


def _ratio(others: list[Run], ours: list[Run], what: str) -> Relative:
    """The mean of a number over our runs / its mean over the others."""
    theirs, frames = ([run.parts(what) for run in of_side] for of_side in (others, ours))
    processes = [run.parts_by_process(what) for run in (*others, *ours)]
    return ratio_of_runs(theirs, frames, processes, what in COUNTED)


def _doubts(claim: Mapping, ours: list[Run], others: list[Run]) -> list[str]:
    """How compared runs differ, besides what the claim chooses ours by, and warnings about the machine."""
    chosen_by = [f"config.{name}" for name in claim["of"]]
    lines = [line for run, other in zip(ours, others) for line in differing_conditions(other, run, chosen_by)]
    if claim.get("what") not in COUNTED:
        lines += remarks.kinds(remarks.machine_warnings([*ours, *others]))
    return list(dict.fromkeys(lines))


def _parameters(run: Run) -> int:
    return sum(one["parameters"] for one in run.summary["trained_weights"].values())


def _form(run: Run) -> str:
    """Whether the trained weights of a run draft through the target's head; empty if unknown."""
    forms = {one["shared_head"] for one in run.summary["trained_weights"].values()}
    return SHARED_HEAD if True in forms else OWN_HEAD if False in forms else ""


def _named(run: Run) -> str:
    """The method, with the form of its weights if it is known, and its cores if it has extra ones."""
    form = f" ({_form(run)})" if _form(run) else ""
    return f"{method_label(run.summary)}{form}{remarks.cores_label(run.summary)}"


def _shown(estimate: Estimate | None) -> str:
    if estimate is None or estimate.value is None:
        return cells.UNKNOWN
    value = f"{estimate.value:.3g}" if estimate.value < 0.1 else f"{estimate.value:.2f}"
    return value if estimate.low is None else f"{value} [{estimate.low:.2f}, {estimate.high:.2f}]"
