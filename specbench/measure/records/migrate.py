"""What older folders hold, brought to today's form on reading. All other code knows today's form alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from specbench.measure.metrics.summary import LATER_FACTS
from specbench.system.settings import CONSTANT, TOKEN

# What older runs did not record, with its value for them: None where it is unknown.
OF_BOTH = dict.fromkeys((*LATER_FACTS, "engine")) | {"training": {}, "trained_weights": {}}
LATER_OF_FACTS = OF_BOTH | {"questions": None, "processor": None}
LATER_CHOICES = {"verification": TOKEN, "draft_length": CONSTANT, "top_k": 0, "top_p": 1.0}
LATER_DECODING = LATER_CHOICES | {"verify_width": None, "round_costs": None}
LATER = dict.fromkeys(
    (
        *("settings_source", "settings_tuned_on", "target", "verify_width", "experiment", "split", "turns"),
        *("pool", "questions_sha256", "set_round_costs", "ties", "changed_drafts", "target_pass_bytes"),
    )
) | {
    **OF_BOTH,
    **LATER_CHOICES,
    "settings_published": {},
    "processes": 1,
    "notes": [],
}
LATER_COUNTS = dict.fromkeys(("tie_margin", "tie_noise"))


def migrated_facts(facts: dict) -> dict:
    """The content of facts.json with all of today's facts."""
    return LATER_OF_FACTS | facts


def migrated_config(config: dict) -> dict:
    """The content of config.yaml with today's settings."""
    return {"pool": None} | config | {"decoding": LATER_DECODING | config.get("decoding", {})}


def migrated_summary(summary: Any) -> Any:
    """The content of summary.json with all of today's keys that have a meaning for older runs.

    What is no summary is unchanged.
    """
    if not isinstance(summary, dict):
        return summary
    summary = LATER | {"drift": summary.get("thirds", {})} | summary
    summary.setdefault("learns", bool(summary["drift"]))
    if isinstance(summary.get("equivalence"), dict):
        summary["equivalence"] = LATER_COUNTS | summary["equivalence"]
    if summary.get("layouts"):  # what was compiled meant something else
        summary["compiled"] = None
    if "likelihood" not in summary:  # once of other engines alone, among their numbers
        arms = (summary["engine"] or {}).get("likelihood") or {}
        summary["likelihood"] = {arm: one for arm, one in arms.items() if one is not None}
    later = dict.fromkeys(("rare_p", "spread_p", "lean"))  # tests that older runs did not make
    summary["likelihood"] = {arm: later | one for arm, one in summary["likelihood"].items()}
    return summary


def migrated(records: Iterable[dict]) -> list[dict]:
    """Records whose turns have today's keys."""
    return [record | {"turns": [_watched(turn) for turn in record["turns"]]} for record in records]


def _watched(turn: dict) -> dict:
    """The turn with `goes`, its number of attempts, as `attempts`."""
    machine = turn.get("machine") or {}
    return turn | {"machine": machine | {"attempts": machine["goes"]}} if "goes" in machine else turn
