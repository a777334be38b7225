"""The papers' claims as checks on measured runs (`claims.yaml`): what was published, what came out here, a verdict."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from rich.text import Text
from safetensors import safe_open

from specbench.measure import metrics
from specbench.measure.statistics import Speedup
from specbench.questions import packaged
from specbench.report import tables
from specbench.report.runs import Run, method_label

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.table import Table

FILE = Path(__file__).with_name("claims.yaml")
# The embedded family as it is: the time of a pass is that of starting operations, where the papers' is that of memory.
SMALL = {"pair": ["tiny", "tiny_shallow"]}
MEDUSA_HEADS = 4  # of Medusa-1 as Liu et al. count it: each a square layer and a head of its own
STYLES = {
    "supported": "green",
    "supported (point estimate)": "",
    "inconclusive": "yellow",
    "not supported": "red",
    "not measured": "yellow",
}


@dataclass(frozen=True)
class Finding:
    """What runs say of a claim.

    Attributes:
        found: what was measured; None: no run for it.
        remark: what it rests on.
        verdict: what it comes to.
    """

    found: Speedup | None
    remark: str
    verdict: str


@dataclass(frozen=True)
class Checked:
    """A claim and what runs say of it.

    Attributes:
        claim: as `claims.yaml` has it.
        fitting: on pairs whose passes are bound by memory, as those of the papers are; of what is counted: on all.
        small: on the embedded family as it is (`SMALL`); None for what is counted.
    """

    claim: Mapping
    fitting: Finding
    small: Finding | None


def check_claims(runs: list[Run], claims: list[dict] | None = None) -> list[Checked]:
    """Every claim against the runs. No number is typed in: what no run tells is "not measured"."""
    return [check(claim, runs) for claim in (yaml.safe_load(FILE.read_text()) if claims is None else claims)]


def check(claim: Mapping, runs: list[Run]) -> Checked:
    """One claim against the runs."""
    if claim["measure"] in COUNTED:
        return Checked(claim, find(claim, runs), None)
    small = [run for run in runs if _matches(SMALL, run)]
    fitting = [run for run in runs if not _matches(SMALL, run)]
    return Checked(claim, find(claim, fitting), find(claim, small))


def find(claim: Mapping, runs: list[Run]) -> Finding:
    """What some runs say of a claim."""
    measured = MEASURES[claim["measure"]](claim, runs)
    found, remark = measured or (None, "no run for it")
    if found is None or found.value is None:
        return Finding(None, remark, "not measured")
    return Finding(found, remark, verdict(found, claim, claim["measure"] in COUNTED))


def verdict(found: Speedup, claim: Mapping, counted: bool = False) -> str:
    """The verdict on a claim.

    - supported: also the worse end of the interval (or a number that was counted) meets the bound.
    - supported (point estimate): the number does, but that end does not, or there is none.
    - inconclusive: only the better end does.
    - not supported: neither end does.
    """
    value, low, high = found.value, found.low, found.high
    low, high = value if low is None else low, value if high is None else high
    if "at_least" in claim:
        worst, middle, best, bound = low, value, high, claim["at_least"]
    else:
        worst, middle, best, bound = -high, -value, -low, -claim["at_most"]
    if middle >= bound:
        sure = worst >= bound and (counted or found.low is not None)
        return "supported" if sure else "supported (point estimate)"
    return "inconclusive" if best >= bound else "not supported"


def claims_table(checked: list[Checked]) -> Table:
    """A row for each claim: the verdict on a fitting pair, and beside it what the small embedded pairs say."""
    table = tables.PlainTable("the papers' claims, checked")
    for name in ("claim", "paper", "here", "verdict", "on", "small pairs (tiny)"):
        table.add_column(name, overflow="fold")
    for one in checked:
        bound = (
            f"at least {one.claim['at_least']:g}"
            if "at_least" in one.claim
            else f"at most {one.claim['at_most']:g}"
        )
        table.add_row(
            one.claim["name"],
            f"{one.claim['paper']['figure']}\n{one.claim['paper']['source']}",
            f"{_shown(one.fitting.found)}\nasked: {bound}",
            Text(one.fitting.verdict, style=STYLES[one.fitting.verdict]),
            one.fitting.remark,
            tables.UNKNOWN if one.small is None else f"{_shown(one.small.found)}\n{one.small.verdict}",
        )
    return table


# -- measures: (claim, runs) -> number with interval and a remark; None without a run


def speedup(claim: Mapping, runs: list[Run]) -> tuple[Speedup, str] | None:
    """Overall speedup of a run."""
    run = _last(claim["of"], runs)
    return run and (_speedup(run.summary["overall"]), _asked(run))


def number(claim: Mapping, runs: list[Run]) -> tuple[Speedup, str] | None:
    """A number of the summary, without an interval."""
    run = _last(claim["of"], runs)
    if run is None:
        return None
    value = run.summary["overall"]
    for key in claim["what"].split("."):
        value = None if value is None else value.get(key)
    return Speedup(value, None, None), _asked(run)


def relative(claim: Mapping, runs: list[Run]) -> tuple[Speedup, str] | None:
    """A number of a run against the same of the strongest of others, on the same pair.

    With `over` it is of their means over all values of a key (each pair), of which there must be several.
    """
    key, what = claim.get("over"), claim.get("what", "speedup")
    values = sorted({run.summary[key] for run in runs if _matches(claim["of"], run)}) if key else [None]
    same = {"pair", key} - {None}
    ours = [_last(claim["of"] | ({key: value} if key else {}), runs) for value in values]
    if not ours or None in ours or (key and len(values) < 2):
        return None
    others = [
        [_last(choice | {name: run.summary[name] for name in same}, runs) for run in ours]
        for choice in claim["against"]
    ]
    if any(None in other for other in others):
        return None
    batched = bool(ours[0].summary["drafter"])
    frames = [run.parts(what, batched) for run in ours]
    found = []
    for other in others:
        theirs = [run.parts(what, batched) for run in other]
        processes = [run.parts_by_process(what, batched) for run in (*other, *ours)]
        found.append((*metrics.relative(theirs, frames, batched, processes), other[0]))
    weakest = min(found, key=lambda item: item[0].value or 0)
    ratio, count, unit, against = weakest
    batch = f", batch {against.summary['batch_size']}" if batched else ""
    means = f", means over {len(values)} values of {key}" if key else ""
    return ratio, f"against {method_label(against.summary)}{batch}; {tables.paired_over(count, unit)}{means}"


def exact(claim: Mapping, runs: list[Run]) -> tuple[Speedup, str] | None:
    """Share of the answers that equal the reference's, token for token, over all runs that match."""
    return _share_of_answers(claim, runs, ("exact",))


def certified(claim: Mapping, runs: list[Run]) -> tuple[Speedup, str] | None:
    """Share of the answers that are exact or a rounding tie, over all runs that match."""
    return _share_of_answers(claim, runs, ("exact", "tie"))


def _share_of_answers(
    claim: Mapping, runs: list[Run], verdicts: tuple[str, ...]
) -> tuple[Speedup, str] | None:
    counts = [run.summary["equivalence"] for run in runs if _matches(claim["of"], run)]
    answers = sum(count["answers"] for count in counts)
    if not answers:
        return None
    total = {name: sum(count[name] or 0 for count in counts) for name in ("exact", "tie", "violation")}
    remark = "{} runs: {exact} exact, {tie} ties, {violation} violations".format(len(counts), **total)
    return Speedup(sum(total[name] for name in verdicts) / answers, None, None), remark


def parameters(claim: Mapping, runs: list[Run]) -> tuple[Speedup, str] | None:
    """Parameters of a trained part / those of Medusa-1's heads on the same target, 4 (d^2 + d V); from file headers."""
    run = _last(claim["of"], runs)
    if run is None or run.provenance is None:
        return None
    pair = run.provenance["config"]["pair"]
    folder, target = packaged(pair["parts"][claim["part"]]), packaged(pair["target"])
    if not folder.is_dir() or not target.is_dir():
        return None
    shape = json.loads((target / "config.json").read_text())
    width, vocabulary = shape["hidden_size"], shape["vocab_size"]
    count = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "numpy") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 - no dictionary
    heads = MEDUSA_HEADS * (width**2 + width * vocabulary)
    return Speedup(count / heads, None, None), f"{count:,} against {heads:,}"


COUNTED = ("exact", "certified", "parameters")  # measures that have no interval because they need none
MEASURES: dict[str, Callable] = {
    measure.__name__: measure for measure in (speedup, number, relative, exact, certified, parameters)
}


# -- helpers


def _matches(choice: Mapping, run: Run) -> bool:
    """Whether a run has each key's value, or one of several."""
    return all(run.summary.get(k) in (v if isinstance(v, list) else [v]) for k, v in choice.items())


def _last(choice: Mapping, runs: list[Run]) -> Run | None:
    found = [run for run in runs if _matches(choice, run)]
    return found[-1] if found else None


def _speedup(numbers: Mapping) -> Speedup:
    return Speedup(numbers["speedup"], numbers["speedup_low"], numbers["speedup_high"])


def _asked(run: Run) -> str:
    return f"{run.summary['overall']['questions']} questions"


def _shown(found: Speedup | None) -> str:
    if found is None:
        return tables.UNKNOWN
    value = f"{found.value:.3g}" if found.value < 0.1 else f"{found.value:.2f}"
    return value if found.low is None else f"{value} [{found.low:.2f}, {found.high:.2f}]"
