"""What the name of a model means."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specbench.models.gguf import is_gguf
from specbench.models.packages import is_package
from specbench.system.errors import UserError
from specbench.system.paths import existing_file, packaged

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from specbench.decoding.drafter import Needs


def is_hub_id(name: str) -> bool:
    """Whether `name` means a model of the hub. Raises UserError as `local_folder`."""
    return local_folder(name) is None and not is_package(name) and not is_gguf(name)


def local_folder(name: str) -> Path | None:
    """The folder that `name` means, None if it is a hub id, a package or a GGUF file.

    Raises UserError for a path that does not exist.
    """
    if is_package(name):
        return None
    folder = packaged(name)
    if folder.is_dir():
        return folder
    if is_gguf(name):
        existing_file(name)
        return None
    if name.startswith("specbench/tiny/"):
        raise UserError(f"there is no folder '{name}': `make tiny` trains the embedded family")
    if is_path(name):
        raise UserError(f"there is no folder '{name}'")
    return None


def is_path(name: str) -> bool:
    """Whether a name can only be that of a folder, whether or not it exists."""
    return name.startswith(("/", ".", "~", "specbench/")) or name.count("/") > 1


def draft_source(pair_cfg: DictConfig, needs: Needs) -> str | None:
    """The draft model that a pair has for a drafter with these needs; None if it has none or none is needed."""
    if not needs.draft_model:
        return None
    return pair_cfg.draft if needs.part is None else pair_cfg.parts.get(needs.part)
