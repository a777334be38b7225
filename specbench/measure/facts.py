"""The facts of a run: what its summary needs in addition to the records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from specbench.decoding.cpu import native
from specbench.decoding.cpu.compiled_layers import uncompiled
from specbench.decoding.model.graphs import options_of
from specbench.decoding.trace import counted
from specbench.models.devices import name_of
from specbench.models.names import draft_source
from specbench.system.settings import flat
from specbench.system.threads import present_cores

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from specbench.measure.arms import Setup
    from specbench.measure.bench import Bench


def facts(bench: Bench) -> dict:
    """All facts that a prepared run knows of itself."""
    setup, conductor = bench.setup, bench.conductor
    pair = setup.pair
    same_weights = setup.served is None or setup.served.same_weights
    options, on_cuda = options_of(setup.target.model), pair.device.type == "cuda"
    plain, widest = setup.spec.batch_size, setup.spec.batch_size * setup.verify_tokens
    return {
        "target_pass_bytes": counted(setup.target.pass_bytes()) if same_weights else None,
        "threads": torch.get_num_threads(),
        "extra_cores": setup.drafter.extra_cores,
        "cores": present_cores(),
        "dtype": name_of(pair.dtype),
        "device": str(pair.device),
        "weights": pair.init,
        "anatomy": pair.anatomy,
        "prompting": pair.prompting,
        "weights_source": pair.source,
        "kernels": setup.target.uses_torch,
        "tiles": native.has_tiles(setup.target.device, pair.dtype),
        "beyond_kernels": widest if plain <= native.MOST_TOKENS < widest and not on_cuda else None,
        "compiled": setup.target.stack.is_compiled or (on_cuda and options.compile),
        "graphs": options.graphs if on_cuda else None,
        "uncompiled": uncompiled(),
        "unit": setup.spec.unit,
        "reference_answer": setup.spec.needs.reference_answer,
        "any_length": setup.spec.needs.any_length,
        # A batch's token budget may shorten drafts.
        "longest_path": min(setup.drafter.max_draft_tokens, setup.verify_tokens - 1),
        "max_nodes": min(setup.drafter.max_nodes, setup.verify_tokens - 1),
        "slice_seconds": conductor.slice_seconds,
        "training": bench.training,
        "trained_weights": bench.trained_weights,
        **changing_facts(bench),
    }


def models_in_place(setup: Setup, pair: DictConfig, weights: Mapping) -> dict[str, str | None]:
    """What runs in place of the pair's models.

    Args:
        setup: of the run.
        pair: its configuration.
        weights: of the provenance.

    Returns:
        `engine_target`, another engine's own file for the target; `draft`, such a file or the pair's draft model, with
        its changed dimensions. None: there is none, or the engine was started elsewhere.
    """
    files = {
        name: next((f"{file} ({digest[:8]})" for file, digest in one["files"].items()), None)
        for name in ("target", "draft")
        if (one := weights.get(f"engine.{name}"))
    }
    needs = setup.spec.needs
    draft = draft_source(pair, needs)
    if draft is not None and needs.part is None:
        shaped = [
            f"{key}={pair[key]}" for key in ("draft_layers", "draft_width") if pair.get(key) is not None
        ]
        draft += f" ({', '.join(shaped)})" if shaped else ""
    return {"engine_target": files.get("target"), "draft": files.get("draft", draft)}


def changing_facts(bench: Bench) -> dict:
    """The facts that change while a run is measured."""
    served, engine = bench.setup.served, bench.setup.spec.engine
    of_engine = None
    if served is not None and engine is not None:
        plain = flat(engine.get("plain") or {})
        of_engine = {
            "name": engine["name"],
            "version": served.version,
            "plain": plain,
            "started": served.is_ours,
            "faults": [*served.faults],
        }
    return {"peak_memory_bytes": bench.conductor.peak_memory, "engine": of_engine}
