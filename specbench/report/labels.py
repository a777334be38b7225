"""What to call runs in tables and plots: by method and settings, and by what else they differ in."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from specbench.config.spec import POOL, QUESTION
from specbench.config.tuned import JUDGED_ELSEWHERE, PUBLISHED, TUNED
from specbench.data.question_files import TASKS
from specbench.system.settings import CONSTANT, TRIMMING

NAMED = 3
DRAFT = "draft"  # the draft model of a pair, as a setting
ROUND_COSTS = "round_costs"  # of a rule for draft lengths, if the configuration sets them
UNKNOWN_VERSION = "unknown"  # of an engine that somebody else started
VOCAB_MAP, VOCAB_SIZE = TRIMMING  # the one tells of the other
# What runs can differ in besides method and settings, and its form in a label.
DIFFERING = {
    "pair": "{}",
    "batch_size": "batch {}",
    "pool": "pool={}",
    "data": "{}",
    "split": "split={}",
    "turns": "turns={}",
    "questions_sha256": "questions {:.8}",
    "task": "{}",
    "limit": "limit={}",
    "temperature": "T={:g}",
    "top_k": "top_k={}",
    "top_p": "top_p={:g}",
    "max_new_tokens": "max_new_tokens={}",
    "seed": "seed={}",
    "threads": "threads={}",
    "verification": "{} verification",
    "dtype": "{}",
    "engine_target": "{}",
    "device": "{}",
    "processor": "{}",
    "protocol": "protocol {}",
    "weights": "{} weights",
    "anatomy": "{}",
    "prompting": "prompts {:.8}",  # template, tokenizer and stop tokens
    "verify_width": "width {}",
    "compiled": "compiled={}",
    "graphs": "graphs={}",
    "kernels": "torch's kernels ({})",  # without a reason they are our own
    "quoted_against": "against {}",
    "engine_plain": "{}",
    "experiment": "{}",
}
DISTRIBUTION = ("temperature", "top_k", "top_p")  # that tokens are drawn from
# Keys that depend on others: a difference only between runs that agree in those.
COMES_WITH = {
    "anatomy": ("pair",),
    "prompting": ("pair",),
    "compiled": ("pair",),
    "kernels": ("pair", "dtype", "device"),
    "questions_sha256": ("data", "split"),
    "pool": ("unit",),
    "engine_plain": ("engine_name",),
}
# Values that are no difference: unknown in older runs, or of an engine that is its own baseline.
UNTOLD: dict[str, set] = {
    "pool": {None},
    "quoted_against": {None},
    "engine_plain": {None},
    "prompting": {None},
    "graphs": {None},
}
# Keys that neither "published" nor "tuned" covers.
NO_SETTINGS = {*JUDGED_ELSEWHERE, "weights", DRAFT, ROUND_COSTS}
QUOTED = {"engine": "our loop", "hf_generate": "transformers generate"}  # what speedups are against


def method_label(summary: Mapping) -> str:
    """The method, its drafter if that is chosen separately, its rule for draft lengths, and another engine."""
    drafter, engine = summary["drafter"], summary["engine"]
    if engine is not None:  # which schedules by itself
        return f"{drafter or summary['method']} by {engine['name']}"
    label = summary["method"] if drafter in (None, "none") else f"{summary['method']} + {drafter}"
    rule = summary["draft_length"]
    return label if rule == CONSTANT else f"{label}, {rule} draft length"


def beside_engines(summaries: Iterable[dict]) -> list[dict]:
    """The runs of other engines, and this project's own of a method and pair that another engine was measured with."""
    of_questions = [summary for summary in summaries if summary["unit"] == QUESTION]
    others = {_question(summary) for summary in of_questions if summary["engine"] is not None}
    return [summary for summary in of_questions if _question(summary) in others]


def _question(summary: Mapping) -> tuple:
    """What engines that are shown side by side share."""
    return tuple(
        summary[key]
        for key in ("method", "pair", "data", "split", "turns", "questions_sha256", *DISTRIBUTION)
    )


def as_text(settings: Mapping) -> list[str]:
    """Each setting as on the command line."""
    return [f"{name}={value}" for name, value in settings.items()]


def task_names(summaries: Iterable[Mapping]) -> list[str]:
    """The tasks that any of the runs measured: Spec-Bench's six in its order, then others as they come."""
    seen = dict.fromkeys(task for summary in summaries for task in summary["tasks"])
    return [*(task for task in TASKS if task in seen), *(task for task in seen if task not in TASKS)]


def varied_settings(summaries: Iterable[Mapping]) -> list[dict]:
    """For each summary the settings that were varied for its method: in which two of its runs on one pair differ."""
    summaries = list(summaries)
    every = [chosen_settings(summary) for summary in summaries]
    first: dict[tuple[str, str], dict] = {}
    varied: dict[str, set] = {}
    for summary, settings, pair in zip(summaries, every, pair_names(summaries)):
        method = method_label(summary)
        base = first.setdefault((method, pair), dict(settings))
        if DRAFT in settings:
            base.setdefault(DRAFT, settings[DRAFT])
        differing = {k for k in base.keys() | settings.keys() if base.get(k) != settings.get(k)}
        if DRAFT not in settings:
            differing.discard(DRAFT)  # unknown in older runs
        if VOCAB_SIZE in differing:
            differing.discard(VOCAB_MAP)
        varied.setdefault(method, set()).update(differing)
    return [
        {key: value for key, value in settings.items() if key in varied[method_label(summary)]}
        for summary, settings in zip(summaries, every)
    ]


def chosen_settings(summary: Mapping) -> dict:
    """The settings of a run, its draft model, which the pair names, and the costs of rounds that it was given."""
    more = {DRAFT: summary["draft"], ROUND_COSTS: summary["set_round_costs"]}
    return summary["settings"] | {key: value for key, value in more.items() if value is not None}


def pair_names(summaries: Iterable[Mapping]) -> list[str]:
    """The pair of each, and its target if pairs of one name, such as `local`, have several."""
    summaries = list(summaries)
    targets: dict[str, set] = {}
    for summary in summaries:
        targets.setdefault(summary["pair"], set()).add(summary["target"])
    return [
        # Older runs do not record it.
        f"{pair} ({target})" if target is not None and len(targets[pair] - {None}) > 1 else pair
        for pair, target in ((summary["pair"], summary["target"]) for summary in summaries)
    ]


def labels(summaries: Iterable[Mapping], without: Collection[str] = ()) -> list[str]:
    """A short name for each: the method, the settings that were varied, and what else the runs differ in.

    The keys `without` are left out.
    """
    summaries = list(summaries)
    rest = _differing(summaries, without)
    return [
        ", ".join([method_label(summary), *words, *more])
        for summary, words, more in zip(summaries, _settings_words(summaries), rest)
    ]


def line_names(
    summaries: Sequence[Mapping], places: Sequence[Hashable], without: Collection[str] = ()
) -> list[str]:
    """The line of each run over the batch size, one for runs that differ in what a batch size alone decided.

    Each size has its own faster baseline and, unless it was set, its own number of threads.

    Args:
        summaries: of the runs.
        places: where on its line each run is. If two runs with other threads would share one, threads are named.
        without: keys that are left out as well.
    """
    along = ("batch_size", "quoted_against", *without)
    names = labels(summaries, without=(*along, "threads"))
    threads: dict[tuple[str, Hashable], set[int | None]] = {}
    for name, place, summary in zip(names, places, summaries):
        threads.setdefault((name, place), set()).add(summary["threads"])
    return names if all(len(one) == 1 for one in threads.values()) else labels(summaries, without=along)


def _settings_words(summaries: Sequence[Mapping]) -> list[list[str]]:
    """Words that distinguish the settings of a method's runs: "published" or "tuned" if unique, else those varied.

    It is unique if all such runs of a pair have the same settings. Keys of `NO_SETTINGS` are added. A method with tuned
    settings alone is "tuned" if another one has published ones.
    """
    every = varied_settings(summaries)
    beside = [as_text({key: varied[key] for key in varied if _is_no_setting(key)}) for varied in every]
    words = [as_text(varied) for varied in every]
    sources = [summary["settings_source"] for summary in summaries]
    by_source: dict[str, dict[str | None, dict[str, set[tuple[str, ...]]]]] = {}
    for summary, pair, source, varied, more in zip(summaries, pair_names(summaries), sources, words, beside):
        of_pair = by_source.setdefault(method_label(summary), {}).setdefault(source, {})
        of_pair.setdefault(pair, set()).add(tuple(word for word in varied if word not in more))
    named = {
        (method, source)
        for method, of_source in by_source.items()
        for source, of_pair in of_source.items()
        if source in (PUBLISHED, TUNED)
        and len(of_source) > 1
        and all(len(one) == 1 for one in of_pair.values())
    }
    tuned = [TUNED] if PUBLISHED in sources else []
    return [
        [str(source), *more]
        if varied and (method_label(summary), source) in named
        else varied + (tuned if by_source[method_label(summary)].keys() == {TUNED} else [])
        for summary, source, varied, more in zip(summaries, sources, words, beside)
    ]


def _is_no_setting(key: str) -> bool:
    return key.rpartition(".")[2] in NO_SETTINGS


def _differing(summaries: list[Mapping], without: Collection[str]) -> list[list[str]]:
    """What the runs differ in besides method and settings, in labels' form; the size of a batch only for batches.

    A key that depends on others is a difference only between runs that agree in those: see `COMES_WITH`.
    """
    summaries = [
        dict(summary) | {"pair": pair, "quoted_against": _quoted(summary)} | of_engine(summary)
        for summary, pair in zip(summaries, pair_names(summaries))
    ]
    several = [key for key in DIFFERING if key not in without and _differs(key, summaries)]
    return [
        [
            DIFFERING[key].format(summary[key])
            for key in several
            if summary.get(key) is not None and (key != "batch_size" or summary["unit"] == POOL)
        ]
        for summary in summaries
    ]


def _differs(key: str, summaries: Iterable[Mapping]) -> bool:
    """Whether summaries differ in a key, of those that agree in what it comes with."""
    values: dict[tuple, set] = {}
    for summary in summaries:
        alike = tuple(summary.get(other) for other in COMES_WITH.get(key, ()))
        values.setdefault(alike, set()).add(summary.get(key))
    return any(len(of_alike - UNTOLD.get(key, set())) > 1 for of_alike in values.values())


def _quoted(summary: Mapping) -> str | None:
    """What a speedup is against; None for another engine, which is its own baseline."""
    return None if summary["engine"] else QUOTED[summary["baseline"]["quoted_against"]]


def of_engine(summary: Mapping) -> dict[str, str | None]:
    """The name of another engine, its version and the settings of its plain arm; None for our own."""
    engine = summary["engine"]
    if not engine:
        return {"engine_name": None, "engine_plain": None}
    version = [] if engine["version"] == UNKNOWN_VERSION else [engine["version"]]
    return {
        "engine_name": engine["name"],
        "engine_plain": ", ".join([*version, *as_text(engine["plain"])]) or None,
    }


@dataclass(frozen=True)
class Grid:
    """Overall speedups of a method on a pair by the values of the two settings that were varied."""

    label: str
    pair: str
    down: str
    across: str
    cells: dict[tuple, float | None]

    @property
    def rows(self) -> list:
        """Values of the first setting: numbers by size, others in the order of the cells."""
        return _ordered(row for row, _ in self.cells)

    @property
    def columns(self) -> list:
        """Values of the second setting, likewise."""
        return _ordered(column for _, column in self.cells)


def _ordered(values: Iterable) -> list:
    """Each value once; numbers by size, after None, which switches a setting off."""
    once = list(dict.fromkeys(values))
    numbers = [value for value in once if isinstance(value, int | float)]
    others = [value for value in once if value is None]
    return once if len(numbers) + len(others) < len(once) else others + sorted(numbers)


def grids(summaries: Iterable[Mapping]) -> list[Grid]:
    """A grid for each method and pair with exactly two varied settings, of two or more values each.

    Runs that differ in anything else are not of one grid. A cell that was run several times shows its last run.
    """
    summaries = list(summaries)
    cells: dict[tuple[str, str, str, str], dict[tuple, float | None]] = {}
    rest = zip(pair_names(summaries), _differing(summaries, ("pair",)))
    for summary, varied, (pair, more) in zip(summaries, varied_settings(summaries), rest):
        if len(varied) == 2:
            down, across = varied
            key = (", ".join([method_label(summary), *more]), pair, down, across)
            coordinates = tuple(
                str(value) if isinstance(value, list | dict) else value for value in varied.values()
            )
            cells.setdefault(key, {})[coordinates] = summary["overall"]["speedup"]
    all_grids = [Grid(*key, of_key) for key, of_key in cells.items()]
    return [grid for grid in all_grids if len(grid.rows) > 1 and len(grid.columns) > 1]


def named(names: list[str]) -> str:
    """The first few of many names, and how many more there are."""
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
