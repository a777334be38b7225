"""What older folders hold, brought to today's form on reading. All other code knows today's form alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from specbench.config.spec import POOL, QUESTION
from specbench.measure.metrics import summary as metrics
from specbench.system.settings import CONSTANT, TOKEN

# Numbers of single methods that had columns of their own, before `stats` held them.
COLUMNS = (
    *("exits", "grouped", "exit_seconds", "hit"),
    *("early_seconds", "beside_seconds", "after_seconds", "idle_seconds", "handover_seconds"),
)
# Former names of Mirror-SD's statistics.
STATS = {
    "early_seconds": "overlapped_before_exit_seconds",
    "beside_seconds": "overlapped_behind_exit_seconds",
    "after_seconds": "exposed_seconds",
    "handover_seconds": "ipc_seconds",
}
# What older runs did not record, with its value for them: None where it is unknown.
OF_BOTH = dict.fromkeys((*metrics.LATER_FACTS, "engine")) | {"training": {}, "trained_weights": {}}
LATER_FACTS = OF_BOTH | {"questions": None, "processor": None}
LATER_DECODING = {
    "verification": TOKEN,
    "draft_length": CONSTANT,
    "verify_width": None,
    "round_costs": None,
}
LATER = dict.fromkeys(
    (
        *("settings_source", "settings_tuned_on", "target", "verify_width", "experiment", "split", "turns"),
        *("pool", "questions_sha256", "set_round_costs", "ties", "changed_drafts", "target_pass_bytes"),
    )
) | {
    **OF_BOTH,
    "verification": TOKEN,
    "draft_length": CONSTANT,
    "settings_published": {},
    "processes": 1,
    "notes": [],
}
LATER_COUNTS = dict.fromkeys(("tie_margin", "tie_noise"))


def migrated_facts(facts: dict) -> dict:
    """The content of facts.json with the run's `unit`: older folders have `batched` in its place."""
    facts = LATER_FACTS | facts
    return facts if "unit" in facts else facts | {"unit": POOL if facts.get("batched") else QUESTION}


def migrated_config(config: dict) -> dict:
    """The content of config.yaml with today's settings."""
    return {"pool": None} | config | {"decoding": LATER_DECODING | config["decoding"]}


def migrated_summary(summary: Any) -> Any:
    """The content of summary.json with all of today's keys that have a meaning for older runs.

    Older ones name a drafter only for batches; one without that key gets no unit. What is no summary is unchanged.
    """
    if not isinstance(summary, dict):
        return summary
    summary = LATER | {"drift": summary.get("thirds", {})} | summary
    summary.setdefault("learns", bool(summary["drift"]))
    summary["machine"] = {"speed": None} | (summary.get("machine") or {})
    if "records" not in summary:  # one for each question, whatever the repeats
        summary["records"] = None
        with suppress(KeyError, TypeError):
            summary["records"] = summary["overall"]["questions"] + summary["failed"]
    if isinstance(summary.get("equivalence"), dict):
        summary["equivalence"] = LATER_COUNTS | summary["equivalence"]
    if summary.get("layouts"):  # what was compiled meant something else
        summary["compiled"] = None
    if "likelihood" not in summary:  # once of other engines alone, among their numbers
        arms = (summary["engine"] or {}).get("likelihood") or {}
        summary["likelihood"] = {arm: one for arm, one in arms.items() if one is not None}
    later = dict.fromkeys(("rare_p", "spread_p", "lean"))  # tests that older runs did not make
    summary["likelihood"] = {arm: later | one for arm, one in summary["likelihood"].items()}
    if "unit" in summary or "drafter" not in summary:
        return summary
    return summary | {"unit": QUESTION if summary["drafter"] is None else POOL}


def migrated(records: Iterable[dict]) -> list[dict]:
    """Records of one repeat each, whatever version wrote them."""
    return [new for record in records for new in _by_repeat(record)]


def _by_repeat(record: dict) -> Iterator[dict]:
    """A record for each repeat: older folders have one for each question, with all repeats in it."""
    record = record | {"turns": [_watched(turn) for turn in record["turns"]]}
    runs = [len(generations) for turn in record["turns"] for generations in turn["arms"].values()]
    first = record.get("repeat", 0)
    for i in range(max(runs, default=1)):
        turns = [
            turn
            | {
                "arms": {
                    arm: [_generation(generations[i])]
                    for arm, generations in turn["arms"].items()
                    if i < len(generations)
                }
            }
            for turn in record["turns"]
        ]
        yield record | {"repeat": first + i, "process": record.get("process", 0), "turns": turns}


def _watched(turn: dict) -> dict:
    """The turn with `goes`, its number of attempts, as `attempts`."""
    machine = turn.get("machine") or {}
    return turn | {"machine": machine | {"attempts": machine["goes"]}} if "goes" in machine else turn


def _generation(generation: dict) -> dict:
    steps = generation["steps"]
    if "sequences" not in steps:
        steps = steps | {"sequences": steps["rows"]}
    if "stats" not in steps:
        steps = steps | {"stats": [_of_columns(steps, i) for i in range(len(steps["sequences"]))]}
    if any(stats and STATS.keys() & stats.keys() for stats in steps["stats"]):
        renamed = [stats and {STATS.get(k, k): v for k, v in stats.items()} for stats in steps["stats"]]
        steps = steps | {"stats": renamed}
    return generation if steps is generation["steps"] else generation | {"steps": steps}


def _of_columns(steps: dict[str, list], i: int) -> dict[str, Any] | None:
    """The statistics of round i, from the columns of single methods."""
    every = {name: steps[name][i] for name in COLUMNS if name in steps}
    stats = {name: value for name, value in every.items() if value is not None and value != []}
    if (
        "exit_seconds" in stats or "idle_seconds" in stats
    ):  # of a draft that nothing was launched for it is known, too
        stats["hit"] = every["hit"]
    return stats or None
