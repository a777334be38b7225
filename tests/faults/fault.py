"""What a fault is, and how it is planted."""

from dataclasses import dataclass
from pathlib import Path

D, M = "specbench/decoding", "specbench/measure"
ACCEPT = ("tests/decoding/test_acceptance.py", "tests/decoding/test_lossless.py")
LOSSLESS = ("tests/decoding/test_lossless.py", "tests/methods/test_lossless.py")
BATCHES = ("tests/decoding/test_batch.py", "tests/methods/test_batches.py")


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        name: its name.
        area: what it breaks.
        file: where, from the project's root.
        before: text that stands there exactly once.
        after: what takes its place.
        tests: files, or ids, of the tests that should find it.
    """

    name: str
    area: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


def planted(fault: Fault, root: Path) -> None:
    """Plants a fault in a copy of the project. Raises ValueError unless its text stands there exactly once."""
    path = root / fault.file
    text = path.read_text(encoding="utf-8")
    if text.count(fault.before) != 1:
        raise ValueError(f"{fault.name}: found {text.count(fault.before)} times in {fault.file}")
    path.write_text(text.replace(fault.before, fault.after), encoding="utf-8")
