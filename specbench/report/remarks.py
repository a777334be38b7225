"""Lines about a run: what was measured how, what stands below its table, and what is wrong with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from specbench.config.spec import POOL
from specbench.data.warm_start import WARM, warmed_with
from specbench.measure.metrics.engine import SURPRISE
from specbench.measure.metrics.statistics import verdict
from specbench.report.cells import WRONG, equivalence_text, number_text, ratio_text, share_text
from specbench.report.labels import QUOTED, VOCAB_MAP, VOCAB_SIZE, as_text, labels, method_label, named
from specbench.report.phases import FEW, different_phases, slow_machine, slow_machines, spread
from specbench.report.runs import Run, differing_by_pair
from specbench.report.training_data import differing_training
from specbench.system.settings import TOKEN, TYPICAL

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

RANDOM = "random weights: times and sizes are real, acceptance is not"
EXPANDED = "text and acceptance are those of the embedded family, times and sizes those of the dimensions"
DISTURBED = "other processes were busy for {} of the measured time"
WORST_DISTURBED = 0.1  # of the measured time, above which a run warns of it first
STOLEN_SHOWN = 0.001
UNLIKELY = 1e-4  # p value of as many ties as there are
ONE_POOL = "interval over repeats of one pool: timing noise only"


def batch_line(summary: dict) -> str:
    """One line on a run of pools: occupancy, time, gain over batch size 1, and what its interval does not cover."""
    if summary["unit"] != POOL:
        return ""
    overall = summary["overall"]
    return (
        f"batch of {summary['batch_size']}: occupancy {share_text(overall['occupancy'])}, "
        f"{share_text(overall['alignment_share'])} of the time spent on alignment, "
        f"{number_text(gain(summary), 2)} times the tokens/s of autoregressive decoding at batch size 1"
    ) + (f"; {ONE_POOL}" if is_one_pool(summary) else "")


def passes_line(summary: dict) -> str:
    """How far the overall speedup moves when the same questions are measured again; nothing of a single pass."""
    overall, passes, processes = summary["overall"], summary["repeats"], summary.get("processes", 1)
    if overall.get("passes_low") is None:
        return ""
    over = f"{passes} passes" if processes == 1 else f"{passes} passes in {processes} processes"
    return (
        f"over {over} the speedup of the same questions lies in "
        f"[{overall['passes_low']:.3f}, {overall['passes_high']:.3f}]"
    )


def acceptance_line(numbers: dict) -> str:
    """Acceptance as other tools count it, beside the table's own; nothing for a method that does not draft."""
    by_answer, verified = numbers["acceptance_length_by_answer"], numbers["accepted_per_verified"]
    if by_answer is None or numbers["acceptance_rate"] is None:
        return ""
    return f"acceptance length as a mean over answers {by_answer:.2f}; accepted per verified token {verified:.2f}"


def machine_line(summary: dict) -> str:
    """What others did on the machine during a run; nothing where it was not watched, as in older runs."""
    machine = summary.get("machine") or {}
    if machine.get("disturbed_share") is None:
        return ""
    text = f"other processes disturbed {share_text(machine['disturbed_share'])} of the time"
    if machine["measured_again"]:
        still = share_text(machine["still_disturbed_share"])
        text += f" ({still} after measuring {machine['measured_again']} turns again)"
    if machine["others_cores"] is not None:
        text += f" and used {max(machine['others_cores'], 0.0):.2f} cores on average"
    stolen = machine["stolen_share"]
    return text + (f"; {share_text(stolen)} was stolen" if stolen and stolen > STOLEN_SHOWN else "")


def kernels_line(summary: dict) -> str:
    """Whose kernels ran a CPU's short passes, and whether layers were compiled; nothing for older runs."""
    elsewhere = summary["device"] != "cpu" or summary.get("engine")
    if elsewhere or summary.get("compiled") is None or summary.get("layouts"):
        return ""
    kernels = f"torch's kernels ({reason})" if (reason := summary.get("kernels")) else "kernels of our own"
    tiles = " on AMX" if summary.get("tiles") and not reason else ""
    compiled = ", layers compiled" if summary["compiled"] else ""
    failed = "; ".join(f"{kind}: {why}" for kind, why in (summary.get("uncompiled") or {}).items())
    return f"short passes: {kernels}{tiles}{compiled}{failed and f', NOT COMPILED: {failed}'}"


def repetition_line(summary: dict) -> str:
    """How much the answers repeat themselves, by task; nothing for older runs."""
    shares = {name: numbers.get("distinct_4grams") for name, numbers in summary["tasks"].items()}
    parts = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share is not None)
    return f"4-grams of the answers that do not occur earlier in the answer: {parts}" if parts else ""


def changed_drafts_line(summary: dict) -> str:
    """A warning of a drafter that does not draft the same for the same question; nothing for others."""
    changed = summary.get("changed_drafts")
    if not changed:
        return ""
    return f"DRAFTS CHANGED between repeats of {paired_over(changed, 'question')}: does it keep something of an answer?"


def disturbed(summary: dict) -> str:
    """A warning of a run that stayed disturbed; nothing for others."""
    share = _disturbed_share(summary)
    return f"DISTURBED: {DISTURBED.format(f'{share:.0%}')}" if share else ""


def _disturbed_share(summary: dict) -> float:
    """The share of the measured time in which other processes were busy; 0 where it is too small for a warning."""
    share = (summary.get("machine") or {}).get("still_disturbed_share")
    return 0.0 if share is None or share <= WORST_DISTURBED else share


def disturbances(runs: Iterable[Run]) -> list[str]:
    """A line for each run that stayed disturbed; where they are many, one for all of them."""
    runs = list(runs)
    lines = [f"{run.name}: {line}" for run in runs if (line := disturbed(run.summary))]
    if len(lines) <= FEW:
        return lines
    shares = spread([share for run in runs if (share := _disturbed_share(run.summary))])
    return [f"DISTURBED in {len(lines)} of {len(runs)} runs: {DISTURBED.format(shares)}"]


def machine_warnings(runs: Iterable[Run]) -> list[str]:
    """What the machine did to the times of runs: its phases, that it was slow, disturbed or had too few cores."""
    runs = list(runs)
    crowded = [f"{run.name}: {line}" for run in runs if (line := too_few_cores(run.summary))]
    return [*different_phases(runs), *slow_machines(runs), *disturbances(runs), *crowded]


def too_few_cores(summary: dict) -> str:
    """A warning of a method that computes on more cores than there are; nothing for others, and older runs."""
    extra, threads, cores = (summary.get(key) for key in ("extra_cores", "threads", "cores"))
    if not extra or threads is None or cores is None or threads + extra <= cores:
        return ""
    return f"TOO FEW CORES: {threads + extra} wanted, {cores} present; the drafter takes the target's"


def kinds(lines: Iterable[str]) -> list[str]:
    """What each of some warnings is about, without its figures; each once."""
    before_brackets = [line.partition(" (")[0] for line in lines]
    return list(dict.fromkeys(text.rpartition(": ")[0] or text for text in before_brackets))


def paired_over(count: int, unit: str) -> str:
    """On how many pairs of times a ratio rests; unit: as in `metrics.Relative`."""
    text = f"{count} {unit}" if count == 1 else f"{count} {unit}s"
    if unit != "repeat":
        return text
    return f"{text} of one pool" if count == 1 else f"{text} of one pool: timing noise only"


def settings_line(summary: dict) -> str:
    """What the settings of a run are; nothing where it is not known, as of older runs, or there are none."""
    source, published = summary.get("settings_source"), summary.get("settings_published") or {}
    if source == "changed":
        chosen = summary["settings"] | beside_settings(summary)
        changes = [
            f"{key}={_plain(chosen.get(key))} (published {_plain(value)})"
            for key, value in published.items()
            if chosen.get(key) != value or value is None
        ]
        return f"settings changed: {', '.join(changes)}"
    if source == "tuned":
        return f"settings tuned on {summary['settings_tuned_on']}"
    return "published settings" if source == "published" else ""


def beside_settings(summary: dict) -> dict:
    """What counts as a setting beside those of a method: the rule of draft lengths, and the vocabulary."""
    of_drafter = {key.removeprefix("drafter."): value for key, value in summary["settings"].items()}
    return {
        "decoding.draft_length": summary.get("draft_length"),
        "vocab": "full" if of_drafter.get(VOCAB_MAP) is None else "trim",
        "vocab.size": of_drafter.get(VOCAB_SIZE),
    }


def settings_lines(summaries: Iterable[dict]) -> list[str]:
    """What the settings of several runs are, a line for each kind, with the methods that have it.

    Of a method whose runs have settings from several sources, the labels of the runs.
    """
    summaries = list(summaries)
    sources: dict[str, set[str | None]] = {}
    for summary in summaries:
        sources.setdefault(method_label(summary), set()).add(summary.get("settings_source"))
    names: dict[str, dict[str, None]] = {}
    for summary, label in zip(summaries, labels(summaries)):
        method = method_label(summary)
        if kind := settings_line(summary).partition(":")[0]:
            names.setdefault(kind, {})[method if len(sources[method]) == 1 else label] = None
    return [f"{kind}: {_listed(of_kind)}" for kind, of_kind in sorted(names.items())]


def _listed(names: Collection[str]) -> str:
    """Names in a row, with semicolons between them where one has commas of its own."""
    return ("; " if any(", " in name for name in names) else ", ").join(names)


def _plain(value: object) -> str:
    """A setting as a command line takes it."""
    return "null" if value is None else str(value)


def turns(summary: dict) -> str:
    """How arms took turns, in words; older runs, which do not tell, did so by whole answers."""
    seconds = summary.get("slice_seconds")
    return "whole answers" if seconds is None else f"slices of {seconds * 1000:.0f} ms"


def gain(summary: dict) -> float | None:
    """Tokens per second of a batch method / those of autoregressive decoding at batch size 1 in the same run."""
    rate, single = summary["overall"]["tokens_per_second"], summary["baseline"]["single_tokens_per_second"]
    return rate / single if rate and single else None


def baseline_line(baseline: dict) -> Text:
    """What the speedups are quoted against, how fast it is, and how close to what the memory allows."""
    engine, generate = baseline["tokens_per_second"], baseline["hf_generate_tokens_per_second"]
    beside = "not timed" if generate is None else number_text(generate, 1)
    text = Text(f"baseline: our loop {number_text(engine, 1)} tokens/s, transformers generate {beside}; ")
    text.append(f"speedups are against {QUOTED[baseline['quoted_against']]}")
    text.append(_ceiling(baseline))
    if baseline["equivalence"]["violation"]:
        text.append(f"\n{_baseline_fault(baseline)}", style=WRONG)
    return text


def _ceiling(baseline: dict) -> str:
    share = baseline["bandwidth_fraction"]
    return "" if share is None else f", at {share:.0%} of the memory-bandwidth ceiling"


def engine_line(summary: dict) -> Text:
    """As `baseline_line`, of another engine: its plain arm, the same once more, and our own loop beside it."""
    engine, baseline = summary["engine"], summary["baseline"]
    name, rate = engine["name"], number_text(baseline["tokens_per_second"], 1)
    loop = number_text(engine["own_tokens_per_second"], 1)
    text = Text(f"baseline: plain {name} {rate} tokens/s, against itself ")
    text.append(itself_text(engine))
    if verdict(engine["again"]["low"], engine["again"]["high"]) in ("faster", "slower"):
        text.append(" (not 1: speedups may be off by as much)")
    text.append(f"; our loop {loop} tokens/s; speedups are against plain {name}")
    text.append(_ceiling(baseline))
    settings = "".join(f", {setting}" for setting in as_text(engine["plain"]))
    text.append(f"\n{engine['version']}{settings}; plain answers beside our loop's: ")
    text.append(equivalence_text(baseline["equivalence"]))
    again = "alone" if summary["unit"] == POOL else "again"
    text.append(f", beside its own {again}: ").append(equivalence_text(engine["again_equivalence"]))
    if not engine.get("started", True):
        text.append(
            "\nits servers were started elsewhere, once: another start may differ, which no interval covers"
        )
    elif summary.get("processes", 1) == 1:
        text.append("\none start of its servers: another one may differ (processes=2 has two)")
    return text


def likelihood_line(summary: dict) -> str:
    """How likely the target finds what was drawn; nothing where answers are judged by their tokens."""
    plain = "baseline" if summary["engine"] is None else "plain"
    parts = [
        f"{plain if arm == 'baseline' else arm} {one['logprob']:.3f}, "
        f"{one['standard_errors']:+.1f} standard errors off"
        + (f", {lean:+.1f} towards its drafts" if (lean := one.get("lean")) is not None else "")
        for arm, one in summary["likelihood"].items()
    ]
    return f"mean log p of drawn tokens: {'; '.join(parts)}" if parts else ""


def could_explain(low: float | None, high: float | None, overall: dict) -> bool:
    """Whether what a baseline may have against itself makes what a method gains, or loses, no longer shown.

    Args:
        low: lower end of the baseline's interval against itself; None without one.
        high: upper end.
        overall: numbers of the method.
    """
    ends = overall["speedup_low"], overall["speedup_high"]
    if low is None or high is None or (judged := verdict(*ends)) not in ("faster", "slower"):
        return False
    margin = max(high, 1 / low)
    return verdict(ends[0] / margin, ends[1] * margin) != judged


def itself_text(engine: dict) -> Text:
    """What an engine's plain arm gains over itself."""
    again = engine["again"]
    return ratio_text(again["speedup"], again["low"], again["high"])


def baseline_rate(baseline: dict) -> float | None:
    """Tokens per second of what the speedups are quoted against."""
    is_ours = baseline["quoted_against"] == "engine"
    return baseline["tokens_per_second" if is_ours else "hf_generate_tokens_per_second"]


def faults(summary: dict, with_baseline: bool = True, with_speed: bool = True) -> list[str]:
    """What is wrong with a run, a line each; of its baseline, and of what its speed rests on, unless told elsewhere."""
    lines = engine_faults(summary) + ([line] if with_speed and (line := no_speed(summary)) else [])
    counts, baseline = summary["equivalence"], summary["baseline"]
    if counts["violation"]:
        whose = "the target's own" if summary.get("engine") is None else "those of its plain arm"
        lines.append(f"VIOLATION: {counts['violation']} of {counts['answers']} answers are not {whose}")
    if too_many_ties(summary):
        lines.append(f"VIOLATION: {ties_line(summary)}")
    for arm in improbable(summary) if summary["engine"] is None else []:
        lines.append(f"VIOLATION: answers of the {arm} are not drawn from the target's distributions")
    if summary["verification"] == TYPICAL:
        lines.append("LOSSY: typical acceptance does not keep the target's answers; it is here as a control")
    if summary["failed"]:
        lines.append(f"FAILED: {summary['failed']} questions, left out of every number")
    if with_baseline and summary.get("engine") is None and baseline["equivalence"]["violation"]:
        lines.append(_baseline_fault(baseline))
    return lines


def violates(summary: dict) -> bool:
    """Whether answers of any arm are violations, in a run whose rule of acceptance should allow none."""
    counts = [summary["equivalence"], summary["baseline"]["equivalence"]]
    if (engine := summary["engine"]) is not None:
        counts.append(engine["again_equivalence"])
    wrong = any(one["violation"] for one in counts) or bool(improbable(summary)) or too_many_ties(summary)
    return wrong and summary["verification"] != TYPICAL


def improbable(summary: dict) -> list[str]:
    """The arms whose tokens are too likely, too unlikely or too like their drafts to be the target's draws."""
    return [
        arm
        for arm, one in summary["likelihood"].items()
        if abs(one["standard_errors"]) > SURPRISE or abs(one.get("lean") or 0.0) > SURPRISE
    ]


def too_many_ties(summary: dict) -> bool:
    """Whether more answers are ties than rounding makes: a rule that is lossy by less than the noise."""
    ties = summary.get("ties")
    return ties is not None and ties["p_value"] < UNLIKELY


def ties_line(summary: dict) -> str:
    """How many ties there are beside what rounding makes; nothing where that was not worked out, or none of either."""
    ties = summary.get("ties")
    if ties is None or max(ties["count"], ties["expected"]) < 0.5:
        return ""
    return f"{ties['count']} ties, where rounding explains {ties['expected']:.1f}"


def engine_faults(summary: dict) -> list[str]:
    """What is wrong with the answers of another engine; nothing of this project's own."""
    engine = summary.get("engine")
    if engine is None:
        return []
    name, lines = engine["name"], []
    differing, unlike = summary["baseline"]["equivalence"], engine["again_equivalence"]
    if differing["violation"]:
        lines.append(f"VIOLATION: {differing['violation']} plain answers of {name} are not the target's")
    if unlike["violation"]:
        lines.append(f"VIOLATION: {unlike['violation']} plain answers of {name} are not what it said before")
    for arm in improbable(summary):
        whose = "plain" if arm == "baseline" else "speculative"
        lines.append(f"VIOLATION: {whose} answers of {name} are not drawn from the target's distributions")
    if faults_met := engine["faults"]:
        lines.append(f"FAULTS of {name}: {len(faults_met)}, the first: {faults_met[0]}")
    return lines


def no_speed(summary: dict) -> str:
    """A line where another engine may differ from itself by as much as a method gains or loses; else nothing."""
    if (engine := summary.get("engine")) is None:
        return ""
    if not could_explain(engine["again"]["low"], engine["again"]["high"], summary["overall"]):
        return ""
    return f"NO VERDICT ON SPEED: plain {engine['name']} against itself has {itself_text(engine)}"


def notes(runs: list[Run]) -> list[str]:
    """What a reader of several runs should be warned of."""
    return [
        *cautions(runs),
        *differing_by_pair(runs),
        *differing_training(run.summary for run in runs),
    ]


def cautions(runs: Iterable[Run]) -> list[str]:
    """What a reader of several runs would else see only in the tables of each."""
    runs = list(runs)
    ours = [run for run in runs if run.summary["engine"] is None]  # other engines are their own baseline
    slower = [run.name for run in ours if run.summary["baseline"]["quoted_against"] == "hf_generate"]
    lines = []
    for weights, remark in (("random", RANDOM), ("expanded", f"expanded weights: {EXPANDED}")):
        if names := [run.name for run in runs if run.summary["weights"] == weights]:
            lines.append(f"{remark}: {named(names)}")
    lines += memories(runs)
    lines += machine_warnings(runs)
    if 0 < len(slower) < len(ours):
        lines.append(
            f"speedups against {QUOTED['hf_generate']}, which was faster, not "
            f"{QUOTED['engine']} as in the others: {named(slower)}"
        )
    return lines


def memories(runs: Iterable[Run]) -> list[str]:
    """A line for each kind of state that was not empty when an answer began, with the runs that had it."""
    names_by_kind: dict[str, list[str]] = {}
    for run in runs:
        if run.summary.get("thirds"):
            names_by_kind.setdefault("carries over between answers", []).append(run.name)
        if (record := run.summary.get("training", {}).get(WARM)) is not None:
            names_by_kind.setdefault(warmed_with(record), []).append(run.name)
    return [f"memory {kind}: {named(names)}" for kind, names in names_by_kind.items()]


def _baseline_fault(baseline: dict) -> str:
    differing = baseline["equivalence"]["violation"]
    single = "" if baseline["single_tokens_per_second"] is None else ", our loop at batch size 1"
    return f"VIOLATION: our loop{single} and transformers generate differ in {differing} answers"


def is_one_pool(summary: dict) -> bool:
    """Whether the interval of a batch run rests on repeats of one pool."""
    overall = summary["overall"]
    return overall["pools"] == 1 and overall["speedup_low"] is not None


def title_text(summary: dict) -> Text:
    """What stands above a run's table: its faults, and what was measured how."""
    text = Text()
    sliced = f", {turns(summary)}" if "slice_seconds" in summary else ""
    for line in faults(summary, with_baseline=False):
        text.append(f"{line}\n", style=WRONG)
    for warning in filter(None, (slow_machine(summary), disturbed(summary), too_few_cores(summary))):
        text.append(f"{warning}\n", style=WRONG)
    chosen = as_text({name: value for name, value in summary["settings"].items() if value is not None})
    settings = f" ({', '.join(chosen)})" if chosen else ""
    text.append(f"{method_label(summary)}{settings}", style="bold").append(
        f" on {summary['pair']}: {summary['data']}, {summary['task']}, temperature {summary['temperature']}, "
        f"{_verification(summary)}batch {summary['batch_size']}, {dtype_label(summary)}, "
        f"{summary['device']}{_threads(summary)}{sliced}"
    )
    if source := settings_line(summary):
        text.append(f"; {source}")
    if summary["weights"] == "random":
        text.append(f"\n{RANDOM}", style="yellow")
    if summary["weights"] == "expanded":
        built = f"expanded, {summary['anatomy']} at {summary['pair']}'s dimensions"
        text.append(f"\n{built}: {EXPANDED}", style="yellow")
    return text


def _verification(summary: dict) -> str:
    """How drafts were verified, where it is not token by token."""
    verification = summary["verification"]
    lossy = " (LOSSY)" if verification == TYPICAL else ""
    return "" if verification == TOKEN else f"{verification} verification{lossy}, "


def dtype_label(summary: dict) -> str:
    """The dtype of a run, and what its target was made from; or the file that another engine decodes with."""
    if (file := summary.get("engine_target")) is not None:
        return file
    source = summary.get("weights_source")
    return f"{summary['dtype']} ({source})" if source else summary["dtype"]


def _threads(summary: dict) -> str:
    """The threads of a run on a CPU; nothing for an older run, which does not tell."""
    threads = summary.get("threads") if summary["device"] == "cpu" else None
    return "" if threads is None else f", {threads} thread{'s' if threads > 1 else ''}{cores_label(summary)}"


def cores_label(summary: dict) -> str:
    """How many cores a method takes that drafts on some of its own, beside those of torch's threads; else nothing."""
    extra, threads = summary.get("extra_cores"), summary.get("threads")
    return f" ({threads + extra} cores)" if extra and threads else ""
