"""Lines about a run: what was measured how, the notes below its table, and its warnings."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from rich.text import Text

from specbench.config.spec import POOL, without_group
from specbench.data.warm_start import WARM, warmed_with
from specbench.measure.metrics.drawn import rarities
from specbench.measure.metrics.statistics import LEAST_PASSES, verdict
from specbench.report.cells import UNKNOWN, WRONG, equivalence_text, number_text, ratio_text, share_text
from specbench.report.labels import QUOTED, VOCAB_MAP, VOCAB_SIZE, as_text, labels, method_label, named
from specbench.report.phases import FEW, different_phases, slow_machine, slow_machines, spread
from specbench.report.runs import Run, differing_by_pair
from specbench.report.training_data import differing_training
from specbench.report.verdicts import baseline_fault, faults, itself_text
from specbench.system.settings import TOKEN, TYPICAL, WORTH

RANDOM = "random weights: times and sizes are real, acceptance is not"
EXPANDED = "text and acceptance are those of the embedded family, times and sizes those of the dimensions"
DISTURBED = "other processes were busy for {} of the measured time"
CAPTURED = (
    "passes were captured as graphs, or layers compiled, in {} of the measured time: raise remeasure, or set "
    "pair.graphs=false"
)
STILL_DISTURBED = "still_disturbed_share"  # of the numbers of the machine
WORST_DISTURBED = 0.1  # of the measured time, above which a run warns of it first
STOLEN_SHOWN = 0.001
ONE_PROCESS = "intervals over questions: they leave out how far processes of a run differ (processes=3)"
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
    """How far the overall speedup moves when the same questions are measured again; empty for a single pass."""
    overall, passes, processes = summary["overall"], summary["repeats"], summary["processes"]
    if overall["passes_low"] is None:
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


def prefill_line(numbers: dict) -> str:
    """The speedup without prefills, which no method shortens; empty where they were not timed."""
    if numbers["decode_speedup"] is None:
        return ""
    share = share_text(numbers["prefill_seconds"] / numbers["seconds"])
    faster = ratio_text(*(numbers[f"decode_speedup{end}"] for end in ("", "_low", "_high")))
    return f"without prefill, which took {share} of the method's time, the speedup is {faster}"


def machine_line(summary: dict) -> str:
    """Load by other processes during a run; empty if it was not watched, as in older runs."""
    machine = summary["machine"]
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
    """Which kernels ran a CPU's short passes, and whether layers were compiled; empty for older runs."""
    elsewhere = summary["device"] != "cpu" or summary["engine"]
    if elsewhere or summary["compiled"] is None:
        return ""
    kernels = f"torch's kernels ({reason})" if (reason := summary["kernels"]) else "kernels of our own"
    tiles = " on AMX" if summary["tiles"] and not reason else ""
    compiled = ", layers compiled" if summary["compiled"] else ""
    failed = "; ".join(f"{kind}: {why}" for kind, why in (summary["uncompiled"] or {}).items())
    beyond = ""
    if not reason and (tokens := summary["beyond_kernels"]):
        beyond = (
            f"; one with a full draft of each sequence has {tokens} tokens and runs as a prompt does, the baseline's "
            "do not"
        )
    return f"short passes: {kernels}{tiles}{compiled}{failed and f', NOT COMPILED: {failed}'}{beyond}"


def repetition_line(summary: dict) -> str:
    """How much the answers repeat themselves, by task; nothing for older runs."""
    shares = {name: numbers["distinct_4grams"] for name, numbers in summary["tasks"].items()}
    parts = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share is not None)
    return f"4-grams of the answers that do not occur earlier in the answer: {parts}" if parts else ""


def changed_drafts_line(summary: dict) -> str:
    """A warning if a drafter does not draft the same for the same question; else empty."""
    changed = summary["changed_drafts"]
    if not changed:
        return ""
    return (
        f"DRAFTS CHANGED between repeats of {paired_over(changed, 'question')}: does state outlive an answer?"
    )


def disturbed(summary: dict) -> str:
    """A warning if a run stayed disturbed; else empty."""
    share = _lost_share(summary, STILL_DISTURBED)
    return f"DISTURBED: {DISTURBED.format(f'{share:.0%}')}" if share else ""


def captured(summary: dict) -> str:
    """A warning if a run's times hold captures of graphs, which happen once; else empty."""
    share = _lost_share(summary, "captured_share")
    return f"CAPTURES: {CAPTURED.format(f'{share:.0%}')}" if share else ""


def _lost_share(summary: dict, name: str) -> float:
    """A share of the measured time; 0 if it is too small for a warning, or unknown, as in older runs."""
    share = summary["machine"].get(name)
    return 0.0 if share is None or share <= WORST_DISTURBED else share


def disturbances(runs: Iterable[Run]) -> list[str]:
    """A line for each run that stayed disturbed; if there are many, one for all of them."""
    runs = list(runs)
    lines = [f"{run.name}: {line}" for run in runs if (line := disturbed(run.summary))]
    if len(lines) <= FEW:
        return lines
    shares = spread([share for run in runs if (share := _lost_share(run.summary, STILL_DISTURBED))])
    return [f"DISTURBED in {len(lines)} of {len(runs)} runs: {DISTURBED.format(shares)}"]


def machine_warnings(runs: Iterable[Run]) -> list[str]:
    """Warnings about the machine: its phases, and runs on a slow or disturbed one or on too few cores."""
    runs = list(runs)
    of_runs = [f"{run.name}: {line}" for run in runs for line in of_one_run(run.summary)]
    return [*different_phases(runs), *slow_machines(runs), *disturbances(runs), *of_runs]


def of_one_run(summary: dict) -> list[str]:
    """The warnings about the machine that several runs do not share in one line."""
    return [*filter(None, (captured(summary), too_few_cores(summary), weak_baseline(summary)))]


def too_few_cores(summary: dict) -> str:
    """A warning if a method computes on more cores than there are; else empty, also for older runs."""
    wanted, present = _cores_wanted(summary), summary["cores"]
    if wanted is None or present is None or wanted <= present:
        return ""
    return f"TOO FEW CORES: {wanted} wanted, {present} present; the drafter takes the target's"


def weak_baseline(summary: dict) -> str:
    """A warning if the baseline alone is faster with other threads than the run's; else, or if unmeasured, empty."""
    seconds = {int(n): of_n for n, of_n in (summary["baseline_by_threads"] or {}).items()}
    usual = seconds.get(summary["threads"] or 0)
    best = min(seconds, key=lambda n: seconds[n], default=None)
    if usual is None or best is None or seconds[best] >= WORTH * usual:
        return ""
    return (
        f"WEAK BASELINE: {usual / seconds[best]:.2f} times as fast with threads={best} (one warm-up question); "
        "measure with that, too"
    )


def in_one_process(runs: Iterable[Run]) -> bool:
    """Whether any run was measured by one process: its interval then does not cover how processes differ."""
    return any((run.summary["processes"] or 1) < LEAST_PASSES for run in runs)


def kinds(lines: Iterable[str]) -> list[str]:
    """The subjects of some warnings, without their figures; each once."""
    before_brackets = [line.partition(" (")[0] for line in lines]
    return list(dict.fromkeys(text.rpartition(": ")[0] or text for text in before_brackets))


def paired_over(count: int, unit: str) -> str:
    """The number of pairs that a ratio is based on, in words; unit: as in `metrics.Relative`."""
    text = f"{count} {unit}" if count == 1 else f"{count} {unit}s"
    if unit != "repeat":
        return text
    return f"{text} of one pool" if count == 1 else f"{text} of one pool: timing noise only"


def settings_line(summary: dict) -> str:
    """The source of a run's settings; empty if unknown, as for older runs, or if there are none."""
    source, published = summary["settings_source"], summary["settings_published"]
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
    of_drafter = without_group(summary["settings"])
    return {
        "decoding.draft_length": summary["draft_length"],
        "vocab": "full" if of_drafter.get(VOCAB_MAP) is None else "trim",
        "vocab.size": of_drafter.get(VOCAB_SIZE),
    }


def settings_lines(summaries: Iterable[dict]) -> list[str]:
    """The sources of several runs' settings, a line for each kind, with the methods that have it.

    A method whose settings come from several sources is listed by the labels of its runs.
    """
    summaries = list(summaries)
    sources: dict[str, set[str | None]] = {}
    for summary in summaries:
        sources.setdefault(method_label(summary), set()).add(summary["settings_source"])
    names: dict[str, dict[str, None]] = {}
    for summary, label in zip(summaries, labels(summaries)):
        method = method_label(summary)
        if kind := settings_line(summary).partition(":")[0]:
            names.setdefault(kind, {})[method if len(sources[method]) == 1 else label] = None
    return [f"{kind}: {_listed(of_kind)}" for kind, of_kind in sorted(names.items())]


def _listed(names: Collection[str]) -> str:
    """Names in a row, with semicolons between them if one has commas of its own."""
    return ("; " if any(", " in name for name in names) else ", ").join(names)


def _plain(value: object) -> str:
    """A setting as on a command line."""
    return "null" if value is None else str(value)


def turns(summary: dict) -> str:
    """How arms took turns, in words; in older runs, which do not record it, by whole answers."""
    seconds = summary["slice_seconds"]
    return "whole answers" if seconds is None else f"slices of {seconds * 1000:.0f} ms"


def gain(summary: dict) -> float | None:
    """Tokens per second of a batch method / those of autoregressive decoding at batch size 1 in the same run."""
    rate, single = summary["overall"]["tokens_per_second"], summary["baseline"]["single_tokens_per_second"]
    return rate / single if rate and single else None


def baseline_line(baseline: dict) -> Text:
    """The baseline of the speedups, its speed, and its share of the memory-bandwidth ceiling."""
    engine, generate = baseline["tokens_per_second"], baseline["hf_generate_tokens_per_second"]
    beside = "not timed" if generate is None else number_text(generate, 1)
    text = Text(f"baseline: our loop {number_text(engine, 1)} tokens/s, transformers generate {beside}; ")
    text.append(f"speedups are against {QUOTED[baseline['quoted_against']]}")
    text.append(_ceiling(baseline))
    if baseline["equivalence"]["violation"]:
        text.append(f"\n{baseline_fault(baseline)}", style=WRONG)
    return text


def _ceiling(baseline: dict) -> str:
    share = baseline["bandwidth_fraction"]
    return "" if share is None else f", at {share:.0%} of the memory-bandwidth ceiling"


def engine_line(summary: dict) -> Text:
    """As `baseline_line`, for another engine: its plain arm, the same once more, and our own loop."""
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
    again = "alone" if summary["batch_size"] > 1 else "again"
    text.append(f", beside its own {again}: ").append(equivalence_text(engine["again_equivalence"]))
    if not engine.get("started", True):
        text.append(
            "\nits servers were started elsewhere, once: another start may differ, which no interval covers"
        )
    elif summary["processes"] == 1:
        text.append("\none start of its servers: another one may differ (processes=2 has two)")
    return text


def likelihood_line(summary: dict) -> str:
    """Likelihood of drawn tokens under the target; empty if answers are judged by their tokens."""
    plain = "baseline" if summary["engine"] is None else "plain"
    parts = []
    for arm, one in summary["likelihood"].items():
        errors = UNKNOWN if one["standard_errors"] is None else f"{one['standard_errors']:+.1f}"
        text = f"{plain if arm == 'baseline' else arm} {number_text(one['logprob'], 3)}, {errors} standard errors off"
        if (lean := one["lean"]) is not None:
            text += f", {lean:+.1f} towards its drafts"
        parts.append(", ".join([text, *rarities(one)]))
    return f"mean log p of drawn tokens: {'; '.join(parts)}" if parts else ""


def baseline_rate(baseline: dict) -> float | None:
    """Tokens per second of what the speedups are quoted against."""
    is_ours = baseline["quoted_against"] == "engine"
    return baseline["tokens_per_second" if is_ours else "hf_generate_tokens_per_second"]


def notes(runs: list[Run]) -> list[str]:
    """Warnings for a reader of several runs."""
    return [
        *cautions(runs),
        *differing_by_pair(runs),
        *differing_training(run.summary for run in runs),
    ]


def cautions(runs: Iterable[Run]) -> list[str]:
    """Warnings that would otherwise be only in the tables of each run."""
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
        if run.summary["learns"]:
            names_by_kind.setdefault("carries over between answers", []).append(run.name)
        if (record := run.summary["training"].get(WARM)) is not None:
            names_by_kind.setdefault(warmed_with(record), []).append(run.name)
    return [f"memory {kind}: {named(names)}" for kind, names in names_by_kind.items()]


def is_one_pool(summary: dict) -> bool:
    """Whether the interval of a batch run rests on repeats of one pool."""
    overall = summary["overall"]
    return overall["pools"] == 1 and overall["speedup_low"] is not None


def title_text(summary: dict) -> Text:
    """The title of a run's table: its faults, and what was measured how."""
    text = Text()
    for line in faults(summary, with_baseline=False):
        text.append(f"{line}\n", style=WRONG)
    for warning in filter(None, (slow_machine(summary), disturbed(summary), *of_one_run(summary))):
        text.append(f"{warning}\n", style=WRONG)
    chosen = as_text({name: value for name, value in summary["settings"].items() if value is not None})
    settings = f" ({', '.join(chosen)})" if chosen else ""
    text.append(f"{method_label(summary)}{settings}", style="bold").append(
        f" on {summary['pair']}: {summary['data']}, {summary['task']}, {_sampling(summary)}, "
        f"{_verification(summary)}batch {summary['batch_size']}, {dtype_label(summary)}, "
        f"{summary['device']}{_threads(summary)}, {turns(summary)}"
    )
    if source := settings_line(summary):
        text.append(f"; {source}")
    if summary["weights"] == "random":
        text.append(f"\n{RANDOM}", style="yellow")
    if summary["weights"] == "expanded":
        built = f"expanded, {summary['anatomy']} at {summary['pair']}'s dimensions"
        text.append(f"\n{built}: {EXPANDED}", style="yellow")
    return text


def _sampling(summary: dict) -> str:
    """The temperature, and which tokens were left out, if any were."""
    top_k, top_p = summary["top_k"], summary["top_p"]
    left_in = [f"top_k {top_k}"] * (top_k > 0) + [f"top_p {top_p}"] * (top_p < 1)
    return ", ".join([f"temperature {summary['temperature']}", *left_in])


def _verification(summary: dict) -> str:
    """How drafts were verified; empty if token by token."""
    verification = summary["verification"]
    lossy = " (LOSSY)" if verification == TYPICAL else ""
    return "" if verification == TOKEN else f"{verification} verification{lossy}, "


def dtype_label(summary: dict) -> str:
    """The dtype of a run, and what its target was made from; or the file that another engine decodes with."""
    if (file := summary["engine_target"]) is not None:
        return file
    source = summary["weights_source"]
    return f"{summary['dtype']} ({source})" if source else summary["dtype"]


def _threads(summary: dict) -> str:
    """The threads of a run on a CPU; empty for an older run, which does not record them."""
    threads = summary["threads"] if summary["device"] == "cpu" else None
    return "" if threads is None else f", {threads} thread{'s' if threads > 1 else ''}{cores_label(summary)}"


def cores_label(summary: dict) -> str:
    """The cores of a method that drafts on extra ones, those of torch's threads included; else empty."""
    wanted = _cores_wanted(summary)
    return "" if wanted is None else f" ({wanted} cores)"


def _cores_wanted(summary: dict) -> int | None:
    """The cores of a method that drafts on extra ones; None for other methods, and for older runs."""
    extra, threads = summary["extra_cores"], summary["threads"]
    return threads + extra if extra and threads else None
