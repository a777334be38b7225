"""Writes the page of conversations that SmolLM2 wrote by itself: `python docs/conversations.py FILE`."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter, defaultdict
from pathlib import Path

from specbench.commands.converse import counted, log_of

PAGE = Path(__file__).resolve().parent / "results" / "smollm2-conversations.md"
SHOWN = 24  # conversations, as many of each kind as its share allows, but one at least
MOST_CHARACTERS = 1200  # of a message
FENCE = "`" * 4


def chosen(rows: list[dict]) -> list[dict]:
    """Some conversations of each kind, drawn by chance, the most frequent kind first."""
    by_kind = defaultdict(list)
    for row in rows:
        by_kind[row["kind"]].append(row)
    kinds = sorted(by_kind, key=lambda kind: -len(by_kind[kind]))
    counts = Counter(dict.fromkeys(kinds, 1))
    while counts.total() < min(SHOWN, len(rows)):
        counts[max(kinds, key=lambda kind: len(by_kind[kind]) / (1 + counts[kind]))] += 1
    drawn = random.Random(0)
    return [
        row for kind in kinds for row in drawn.sample(by_kind[kind], min(counts[kind], len(by_kind[kind])))
    ]


def table(header: str, counts: Counter[str]) -> list[str]:
    """How often each name was counted, the most frequent first."""
    rows = [f"| {name} | {count:,} | {count / counts.total():.1%} |" for name, count in counts.most_common()]
    return [f"| {header} | number | share |", "|---|---:|---:|", *rows, ""]


def message(role: str, text: str) -> list[str]:
    """A message as it was written, cut where it is long."""
    shown = text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + " [...]"
    return [f"{role}:", "", f"{FENCE}text", shown, FENCE, ""]


def page(rows: list[dict], log: list[dict]) -> str:
    """The page in Markdown."""
    header, *pools = log
    kept, dropped = counted(pools, "conversations"), counted(pools, "dropped")
    tokens, turns, cut = (sum(pool[key] for pool in pools) for key in ("tokens", "turns", "cut"))
    lines = [
        "# Conversations that SmolLM2-135M wrote",
        "",
        f"`specbench converse pair=smollm2-135m` ([how it works](../training.md#without-a-data-set)), target "
        f"`{header['settings']['target']}`: {kept.total():,} conversations of {turns:,} turns, {tokens:,} tokens of "
        f"answers. {cut / turns:.0%} of the answers were cut, at their cap or where they began to repeat themselves.",
        "",
        *table("kind", kept),
        "What was not kept, by reason:",
        "",
        *table("dropped", dropped),
        f"{SHOWN} conversations, drawn by chance:",
        "",
    ]
    for number, row in enumerate(chosen(rows), 1):
        lines += [f"## {number}. {row['kind']}", ""]
        for one in row["messages"]:
            role = (
                "Question"
                if one["role"] == "user"
                else "Answer"
                if one.get("complete", True)
                else "Answer, cut"
            )
            lines += message(role, one["content"])
    return "\n".join(lines)


def main() -> int:
    """Writes the page; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="what `specbench converse` wrote")
    path = parser.parse_args().file
    rows = [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
    log = log_of(path).read_text(encoding="utf-8").splitlines()
    PAGE.write_text(page(rows, list(map(json.loads, log))), encoding="utf-8")
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
