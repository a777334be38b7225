"""Files that appear complete or not at all, their checksums, and folders that one process has to itself."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specbench.system.errors import BusyError, UserError, file_errors, one_line


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes and syncs a file under another name, then renames it, so that no reader gets a part of it.

    Raises UserError when the disk is full or cannot be written; the file is then unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with file_errors(writing=path):
        try:
            with open(temporary, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def whole_lines(path: Path) -> int:
    """Number of complete lines of a file; an incomplete last one is truncated. 0 if there is no file."""
    if not path.exists():
        return 0
    content = path.read_bytes()
    complete_bytes = content.rfind(b"\n") + 1
    if complete_bytes < len(content):
        with path.open("r+b") as file:
            file.truncate(complete_bytes)
    return content.count(b"\n")


def file_sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@file_errors()
def make_folder(folder: Path) -> Path:
    """Makes a folder and those above it, unless they exist; raises UserError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"cannot make the folder {folder}: a file is in its place") from error
    return folder


@file_errors()
def new_folder(root: Path, label: str) -> Path:
    """Makes a new folder `root/<date>_<time>_<label>`; such names sort by time.

    Raises UserError if it cannot be made.
    """
    make_folder(root)
    while True:
        folder = root / f"{time.strftime('%Y-%m-%d_%H%M%S')}_{label}"
        try:
            folder.mkdir()
            return folder
        except FileExistsError:  # made within this very second
            time.sleep(0.1)


@contextmanager
def lock_folder(folder: Path, doing: str, wait: bool = False) -> Iterator[None]:
    """Holds a folder for this process alone; a killed process frees it.

    Args:
        folder: that holds the lock.
        doing: what a holder does with it, such as "measured".
        wait: whether to wait for another process that holds it, with a message.

    Raises:
        UserError: another process holds it and is not waited for, or it cannot be written.
    """
    with _locked(folder / ".lock", folder, doing, wait):
        yield


def made_once(path: Path, doing: str, write: Callable[[Path], object]) -> Path:
    """The path, after `write` has made what is there if nothing was, in one process at a time.

    Args:
        path: of a file or a folder, which appears complete or not at all.
        doing: what `write` does with the folder around it, as of `lock_folder`.
        write: makes it at another path.

    Raises:
        UserError: it cannot be written.
    """
    from safetensors import SafetensorError

    if path.exists():  # perhaps in a cache that others alone may write to
        return path
    partial = path.with_name(f"partial-{path.name}")
    with lock_folder(make_folder(path.parent), doing, wait=True):
        if not path.exists():
            if partial.is_dir():  # of a process that was killed
                shutil.rmtree(partial)
            with file_errors(writing=path, others=(SafetensorError,)):
                write(partial)
                partial.rename(path)
    return path


def file_named(out: str) -> Path:
    """The path of a file to write. Raises UserError if it is empty, or names no file, as "." does."""
    if not Path(out).name:
        raise UserError(f"out must name a file, not '{out}'")
    return Path(out)


@contextmanager
def lock_file(file: Path) -> Iterator[None]:
    """Holds a file that is written piece by piece for this process alone, by a lock beside it; as `lock_folder`."""
    with _locked(file.with_name(f".{file.name}.lock"), file, "written", wait=False):
        yield


@contextmanager
def _locked(lock_path: Path, what: Path, doing: str, wait: bool) -> Iterator[None]:
    with file_errors(writing=lock_path):
        lock = open(lock_path, "w")  # noqa: SIM115 - closed below
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if not wait:
                raise BusyError(f"{what} is being {doing} by another process: let it end first") from error
            print(f"{what} is being {doing} by another process: waiting for it", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:  # Lustre and NFS may be mounted without locks
            raise UserError(
                f"the file system of {lock_path.parent} has no locks: {error.strerror}"
            ) from error
        yield


def share_weights(folder: Path) -> None:
    """Gives a folder's weights the mode of any new file: safetensors lets nobody else read what it writes."""
    umask = os.umask(0)
    os.umask(umask)
    for file in folder.glob("*.safetensors"):
        file.chmod(0o666 & ~umask)


def write_json(path: Path, value: dict) -> None:
    """Writes JSON atomically; a number that is not finite becomes null."""
    write_atomic(path, json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> dict:
    """The content of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def read_record(path: Path) -> dict:
    """The content of a JSON file that describes what is beside it. Raises UserError if it is damaged."""
    try:
        record = read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from error
    if not isinstance(record, dict):
        raise UserError(f"{path} cannot be read: it holds no JSON object")
    return record


def refuse_foreign(file: Path, record: Path, tells: str) -> None:
    """Raises UserError for a file that is not empty if the record beside it, which describes it, is missing.

    Args:
        file: that is written piece by piece.
        record: the file beside it.
        tells: what the record states, for the error.
    """
    if file.exists() and file.stat().st_size:
        raise UserError(
            f"{file} exists without {record.name}, which says {tells}: move it away, or give another out=FILE"
        )


def check_settings(file: Path, wanted: Mapping[str, Any], what: str) -> None:
    """Raises UserError if a file of settings exists and is damaged or holds other settings.

    Args:
        file: the settings that it was begun with.
        wanted: those that it is to resume with.
        what: it is, for the error.
    """
    check_same(read_record(file) if file.exists() else {}, wanted, what)


def check_same(begun: Mapping[str, Any], wanted: Mapping[str, Any], what: str) -> None:
    """Raises UserError if something was begun with other settings; older records lack new ones.

    Args:
        begun: settings that it was begun with.
        wanted: those that it is to resume with.
        what: it is, for the error.
    """
    for name, value in wanted.items():
        if begun.get(name, value) != value:
            raise UserError(
                f"{what} was begun with {name}={begun[name]}, not {value}: give the same settings, or another out="
            )


def finite(value: Any) -> Any:
    """The same value with null for each NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
