"""Writes models as files that other engines read: `specbench export gguf|folder|part pair=NAME [out=FOLDER]`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from specbench.config.checks import check, check_sources
from specbench.config.compose import positional, with_hydra
from specbench.config.overrides import quoted
from specbench.config.spec import make_drafter
from specbench.system.errors import file_errors, one_line_errors
from specbench.system.files import make_folder
from specbench.system.settings import check_all

if TYPE_CHECKING:
    from omegaconf import DictConfig

PART = "part"
SETTINGS = {"form": Literal["gguf", "folder", "part"], "out": str | None}
USAGE = "specbench export gguf|folder|part pair=NAME [out=FOLDER], such as specbench export gguf pair=smollm2-135m"


def export(cfg: DictConfig) -> None:
    """Writes the requested files in the pair's dtype and prints their paths. Raises UserError if that fails."""
    check_all(cfg, SETTINGS)
    for what, path in (_part if cfg.form == PART else _models)(cfg):
        if cfg.out is not None:
            path = _copied(path, make_folder(Path(cfg.out)) / path.name)
        print(f"{what}: {path}")


def _models(cfg: DictConfig) -> Iterator[tuple[str, Path]]:
    """Yields names and paths of the exported target and draft model."""
    check_sources(cfg)
    from specbench.models.export import as_folder, as_gguf  # late: torch takes seconds
    from specbench.models.pairs import load_pair

    pair = load_pair(cfg.pair, 0, with_draft=cfg.pair.draft is not None)
    write = as_gguf if cfg.form == "gguf" else as_folder
    if write is as_gguf:
        print(
            "the file does not say how its tokenizer splits text before it merges bytes: give engines token ids, or "
            "set tokenizer.ggml.pre in it",
            file=sys.stderr,
        )
    for what, model in (("target", pair.target), ("draft", pair.draft)):
        if model is not None:
            yield what, write(model, pair.exported_tokenizer, f"{pair.name}-{what}")


def _part(cfg: DictConfig) -> Iterator[tuple[str, Path]]:
    """Yields name and path of a method's exported part."""
    spec = check(cfg, asks=False)
    from specbench.models.export import as_part  # late, as above
    from specbench.models.pairs import load_pair, pair_for

    name, needs = spec.drafter["name"], spec.needs
    pair = load_pair(pair_for(cfg.pair, needs), cfg.seed, with_draft=needs.draft_model, trimmed=spec.trimmed)
    yield name, as_part(make_drafter(spec.drafter, pair=pair), f"{pair.name}-{name}")


def _copied(source: Path, to: Path) -> Path:
    """Copies a file or folder, in place of what has that name. Raises UserError if it cannot be written."""
    if source.resolve() == to.resolve():
        return to
    partial = to.with_name(f"partial-{to.name}")  # what was stopped has another name than what is whole
    with file_errors(writing=to):
        shutil.rmtree(partial, ignore_errors=True)
        if source.is_dir():
            shutil.copytree(source, partial)
            shutil.rmtree(to, ignore_errors=True)
        else:
            shutil.copyfile(source, partial)
        return partial.replace(to)


@one_line_errors()
def main() -> int:
    """Does what the command line says; returns the exit code."""
    sys.argv[1:] = positional("form", sys.argv[1:], USAGE)
    # An exported part accepts every key of a run, exported models only those of the pair.
    config = "export_part" if f"form={quoted(PART)}" in sys.argv else "export"
    return with_hydra(config, one_line_errors(stops=False)(export))
