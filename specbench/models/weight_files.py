"""The files that a model is read from, and their checksums."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.models.names import is_hub_id, is_path
from specbench.models.packages import described, is_package
from specbench.system.files import file_sha256
from specbench.system.paths import packaged
from specbench.system.settings import plain

if TYPE_CHECKING:
    from omegaconf import DictConfig

# How the files of a model end (its own code included), those beside them of its tokenizer, and all of a tokenizer in a
# folder of its own.
OF_WEIGHTS = (".safetensors", ".bin", ".pt", ".json", ".py")
BESIDE_WEIGHTS = (".jinja", ".model", ".txt")
OF_TOKENIZERS = (*BESIDE_WEIGHTS, ".json", ".py")
# Keys of a pair that its target's answers depend on.
ANSWERING = (
    *("target", "target_revision", "target_shape", "init", "width", "dtype"),
    *("tokenizer", "chat_template", "template_kwargs", "stop_ids"),
)


def weight_facts(source: str, revision: str | None, packages: Mapping) -> dict:
    """Where weights come from.

    Args:
        source: a model's name (models/names.py), or the path of a part.
        revision: the requested one, of a model of the hub.
        packages: of the pair.

    Returns:
        `source`, and `files`, with a checksum by name; for a model of the hub its `revision` and the `commit` in the
        local cache (None: not there).
    """
    path = described(source, packages).path if is_package(source) else packaged(source)
    if path.exists():
        return {"source": source, "files": _checksums(path, OF_WEIGHTS)}
    if is_path(source):  # of a part that the method at hand may not need
        return {"source": source, "files": {}}
    from huggingface_hub import try_to_load_from_cache  # late: bad input is refused without it
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(source, "config.json", revision=revision)
    except HFValidationError:  # no name that the hub has: who loads it says so
        cached = None
    commit = Path(cached).parent.name if isinstance(cached, str) else None
    return {"source": source, "revision": revision, "commit": commit}


def tokenizer_facts(pair: Mapping) -> dict | None:
    """Where a pair's tokenizer and chat template come from, as `weight_facts`; None unless files of a folder do."""
    source = pair.get("tokenizer") or pair["target"]
    endings: tuple[str, ...] = OF_TOKENIZERS if pair.get("tokenizer") else BESIDE_WEIGHTS
    in_folder = not is_package(source) and packaged(source).is_dir()
    files = _checksums(packaged(source), endings) if in_folder else {}
    return {"source": source, "files": files} if files else None


def answer_facts(pair: DictConfig) -> dict[str, Any]:
    """The settings and files of a pair that its target's answers depend on.

    A file of answers resumes only with the same ones. Raises UserError if the target is nowhere.
    """
    if is_hub_id(pair.target):  # or the commit in the cache would not be the one that is loaded
        from specbench.models.model_source import fetch_small_files  # late: torch takes seconds

        fetch_small_files(pair.target, pair.target_revision, pair.gated)
    settings = plain(pair)
    return {name: settings[name] for name in ANSWERING} | digests(settings)


def digests(pair: Mapping) -> dict[str, str]:
    """Digests of the files of a pair's target and tokenizer, on which its answers depend.

    Args:
        pair: its configuration.

    Returns:
        `target_files` and `tokenizer_files`, without what is not on this machine, such as a model not fetched yet.
    """
    target = pair["target"]
    if is_package(target):  # fetched or not
        files: Any = described(target, pair["packages"]).sha256
    else:
        facts = weight_facts(target, pair["target_revision"], {})
        files = facts.get("files") or facts.get("commit")
    beside = tokenizer_facts(pair)
    contents = {"target_files": files, "tokenizer_files": beside and beside["files"]}
    return {name: _digest(content) for name, content in contents.items() if content}


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _checksums(path: Path, endings: tuple[str, ...]) -> dict[str, str]:
    """The checksum of a file, or of the files in a folder that end so, by name."""
    files = (
        [path] if path.is_file() else sorted(file for file in path.iterdir() if file.name.endswith(endings))
    )
    return {file.name: _sha256(file, file.stat().st_size, file.stat().st_mtime_ns) for file in files}


@cache  # gigabytes, which the jobs of a sweep and the checks of a training share
def _sha256(file: Path, _size: int, _changed: int) -> str:
    return file_sha256(file)
