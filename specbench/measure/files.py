"""Files that appear complete or not at all, and their checksums."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes a file under another name, on to the disk, then renames it: a reader never sees a part of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def file_sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
