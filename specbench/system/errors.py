"""Errors that are the user's to mend: one line that says what was wrong and what would be right."""

from __future__ import annotations

import difflib
import errno
import importlib
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from specbench import ROOT

SHORTEST_PART = 3  # characters of a name that is looked for within others


class UserError(Exception):
    """Something the user can put right; entry points print it as one line and exit with code 2."""


class LackingError(UserError):
    """A pair lacks what a method needs: a draft model, or trained weights."""


class BusyError(UserError):
    """Another process holds what this one needs."""


class JobError(UserError):
    """An error that ends a whole job; others only fail the question in which they occur."""


def one_line(error: BaseException) -> str:
    """Describes an error in one line."""
    message = str(error).strip()
    return f"{type(error).__name__}: {message.splitlines()[0] if message else 'no message'}"


def warn(text: str) -> None:
    """Prints a warning of one line about something that works, but perhaps not as intended."""
    print(f"warning: {text}", file=sys.stderr)


def print_error(error: UserError) -> None:
    """Prints it as one line on stderr."""
    print("error:", " ".join(str(error).split()), file=sys.stderr)


def print_stopped(place: str = "") -> int:
    """Prints on stderr that Ctrl-C has stopped a command, and what the same command will do; returns the exit code."""
    print("\nstopped" + (f"; {place}" if place else ""), file=sys.stderr)
    return 130


def suggest(name: str, choices: Iterable[str]) -> str:
    """Suggests choices instead of an unknown `name`: "did you mean kangaroo? (known: ar, kangaroo)".

    Meant as the second half of a message: f"unknown method {name!r}: {suggest(name, methods)}".
    """
    names = sorted(choices)
    by_lower = {choice.lower(): choice for choice in names}
    lower = str(name).lower()
    close = difflib.get_close_matches(lower, by_lower, n=2, cutoff=0.6)
    if not close and len(lower) >= SHORTEST_PART:
        close = [choice for choice in by_lower if lower in choice][:2]
    listed = f"known: {', '.join(names) or 'none'}"
    return f"did you mean {' or '.join(by_lower[c] for c in close)}? ({listed})" if close else listed


def require_at_least(least: int, **named: int) -> None:
    """Raises UserError for a named value below `least`."""
    for name, value in named.items():
        if value < least:
            raise UserError(f"{name} must be at least {least}, not {value}")


def import_optional(package: str, extra: str) -> ModuleType:
    """Imports a package that not every installation has; raises UserError if it is missing."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        checkout = (ROOT / "constraints.txt").exists()
        how = f"-c constraints.txt -e '.[{extra}]'" if checkout else f"'specbench[{extra}]'"
        raise UserError(f"{package} is not installed: pip install {how}") from error


@contextmanager
def file_errors(writing: Path | None = None, others: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turns an OSError (no such file, no permission, a full disk) into a UserError with the file's name.

    Args:
        writing: the file that is written in the context, for the message; None: the one that the system reports.
        others: errors that libraries raise in place of an OSError while they write.
    """
    kinds: tuple[type[Exception], ...] = (OSError, *others)
    try:
        yield
    except kinds as error:
        if out_of_memory(error) is not None:
            raise
        if not isinstance(error, OSError):
            message = f"cannot write {writing}: {one_line(error)}"
        elif writing is not None:
            message = f"cannot write {writing}: {error.strerror or one_line(error)}"
        else:
            message = f"{error.filename}: {error.strerror}" if error.filename else one_line(error)
        raise UserError(message) from error


@contextmanager
def one_line_errors(stops: bool = True) -> Iterator[None]:
    """Around an entry point, as decorator or context: a UserError becomes one line on stderr and exit code 2.

    So does running out of memory. Every other exception keeps its traceback: it is a fault of this program.

    Args:
        stops: whether Ctrl-C also becomes a line and exit code 130; False within code that reports where it resumes.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        if not stops:
            raise
        raise SystemExit(print_stopped(str(stop))) from None
    except UserError as error:
        print_error(error)
        raise SystemExit(2) from None
    except (RuntimeError, MemoryError, OSError) as error:
        what = out_of_memory(error)
        if what is None:
            raise
        print_error(
            UserError(f"{what}: a smaller batch_size, a shorter length or pair.dtype=bfloat16 needs less")
        )
        raise SystemExit(2) from None


@contextmanager
def memory_permitting(undone: str, tell: Callable[[str], None] = warn) -> Iterator[None]:
    """Within the context, a lack of memory ends the work with a warning; every other error is raised.

    Args:
        undone: what was not done then, for the warning.
        tell: prints it.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if (what := out_of_memory(error)) is None:
            raise
        tell(f"{undone}: {what}")


def out_of_memory(error: BaseException) -> str | None:
    """The message of an error about full memory, of a GPU or of the machine; None for any other error."""
    torch = sys.modules.get("torch")  # not imported for this: it takes seconds
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return str(error).partition(". GPU")[0]
    full = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if full or isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return "the machine has not enough free memory"
    return None


@contextmanager
def stoppable(saved: Callable[[], str | None]) -> Iterator[None]:
    """Within the context, SIGTERM stops a command as Ctrl-C does; both report where the same command resumes.

    Args:
        saved: returns the place from which the same command resumes, such as "step 200"; None: nothing was saved.

    Raises:
        KeyboardInterrupt: the command was stopped; the text is for its user.
    """
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt as stop:
        place = saved()
        raise KeyboardInterrupt(
            "nothing was saved yet: the same command starts over"
            if place is None
            else f"the same command resumes from {place}"
        ) from stop
    finally:
        signal.signal(signal.SIGTERM, previous)
