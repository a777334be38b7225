"""Writes tests/longer.txt, the fast tests that `make test-fast` leaves out: `python -m tests.support.longer LOG`.

LOG is what `make test ARGS="-m 'not slow and not process and not nightly' --durations=0 --durations-min=0.01"` printed
on an idle machine.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

FILE = Path(__file__).parents[1] / "longer.txt"
SECONDS = 0.2  # of a case, with its fixtures
TIMED = re.compile(r"^\s*([\d.]+)s (?:call|setup)\s+(\S.*)$", re.MULTILINE)


def longer(log: str) -> list[str]:
    """Functions of which a case took `SECONDS` or more, by a log of pytest's."""
    seconds: Counter[str] = Counter()
    for spent, case in TIMED.findall(log):
        seconds[case] += float(spent)
    return sorted({case.partition("[")[0] for case, spent in seconds.items() if spent >= SECONDS})


if __name__ == "__main__":
    FILE.write_text("\n".join(longer(Path(sys.argv[1]).read_text(encoding="utf-8"))) + "\n", encoding="utf-8")
