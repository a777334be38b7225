"""OpenVINO GenAI as an engine of a run, behind a server of this project's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specbench.engines.environments import program, variables
from specbench.engines.served import PLAIN, SPECULATIVE, ServedEngine
from specbench.engines.server import STANDALONE, scripted
from specbench.models.export import as_gguf
from specbench.models.pairs import Pair
from specbench.system.errors import UserError
from specbench.system.paths import existing_file
from specbench.system.settings import Positive, check

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SCRIPT = STANDALONE / "serve_openvino.py"
PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
KIND = "F16"  # type of the matrices in its GGUF files: it reads neither F32 nor BF16
PRE_TOKENIZER = "smollm"  # one of the ways to split text that it knows; requests hold only token ids
LOOKUP, CACHING = "lookup", "enable_prefix_caching"


class OpenVINO(ServedEngine):
    """Two servers of OpenVINO, alive side by side on the same cores.

    Args:
        pair: provides their target and draft model, as GGUF files with matrices in float16. They compute in the pair's
            dtype.
        drafter: configuration of the run's drafter, whose name selects an entry of `speculative`.
        threads: of each server.
        plain: properties of the device for both, as OpenVINO spells them; `scheduler` holds settings of its scheduler.
        speculative: by method, settings of the speculative one's generation; `lookup: true` looks drafts up, else the
            draft model drafts.
        install: what the environment holds.
        python: an interpreter that has openvino_genai; None: that of the environment.
        target: a GGUF file in place of the pair's target, such as a quantised one.
        start_seconds: time limit for starting a server.
        answer_seconds: time without an event after which a server counts as hung.
        batch_size: requests that a server gets at once: 1.

    Raises:
        UserError: A model cannot become a GGUF file, or a required draft model is missing.
    """

    module = "openvino_genai"

    def __init__(
        self,
        pair: Pair,
        drafter: dict[str, Any],
        threads: int,
        plain: dict,
        speculative: dict,
        install: dict,
        python: str | None = None,
        target: str | None = None,
        start_seconds: Positive = 120.0,
        answer_seconds: Positive = 120.0,
        batch_size: int = 1,
    ):
        properties = dict(plain)
        scheduler = properties.pop("scheduler", {})
        interpreter, self.version = program("openvino", install, python, self.module)
        self.has_own_file = target is not None
        self.same_weights = not self.has_own_file and _fits(pair.target)
        precision = PRECISIONS[pair.dtype]
        generation = dict(speculative[drafter["name"]])
        lookup = bool(generation.pop(LOOKUP, False))
        of_draft = None if lookup or pair.draft is None else str(_as_file(pair, pair.draft, "draft"))
        if not lookup and of_draft is None:
            raise UserError(f"engine openvino drafts as {drafter['name']} with a draft model: set pair.draft")
        every = {
            "target": str(existing_file(target) if target else _as_file(pair, pair.target, "target")),
            "properties": {
                "INFERENCE_NUM_THREADS": threads,
                "INFERENCE_PRECISION_HINT": precision,
                "KV_CACHE_PRECISION": precision,
                **properties,
            },
            "scheduler": scheduler,
            "draft": None,
            LOOKUP: False,
            "generation": {},
        }
        drafts = {"draft": of_draft, LOOKUP: lookup, "generation": generation}
        settings = {PLAIN: every, SPECULATIVE: every | drafts}
        servers = scripted(interpreter, SCRIPT, settings, threads, start_seconds, variables(python))
        super().__init__(pair, servers, "openai", answer_seconds, batch_size)

    @classmethod
    def check(cls, settings: Mapping[str, Any], drafter: Mapping[str, Any], batch_size: int) -> None:
        """As in `ServedEngine`. Also raises UserError for a batch, or for a scheduler that caches prompts."""
        super().check(settings, drafter, batch_size)
        if batch_size > 1:
            raise UserError("engine openvino takes one answer at a time: leave batch_size out")
        scheduler = settings["plain"].get("scheduler", {})
        check("engine.plain.scheduler", scheduler, dict)
        if scheduler.get(CACHING, True):
            raise UserError(
                "a scheduler that keeps prompts makes second answers faster: "
                f"set engine.plain.scheduler.{CACHING}=false"
            )


def _as_file(pair: Pair, model: PreTrainedModel, what: str) -> Path:
    return as_gguf(model, pair.exported_tokenizer, f"{pair.name}-{what}", KIND, PRE_TOKENIZER)


def _fits(model: PreTrainedModel) -> bool:
    """Whether all matrices are exact in float16."""
    matrices = (weight for weight in model.state_dict().values() if weight.ndim == 2)
    return all(bool((weight.half().to(weight.dtype) == weight).all()) for weight in matrices)
