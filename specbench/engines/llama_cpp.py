"""llama.cpp as an engine of a run, through the server of the package xllamacpp."""

from __future__ import annotations

from typing import Any

from specbench.engines.environments import program, variables
from specbench.engines.served import PLAIN, SPECULATIVE, ServedEngine
from specbench.engines.server import STANDALONE, scripted
from specbench.models.export import as_gguf
from specbench.models.pairs import Pair
from specbench.system.paths import existing_file
from specbench.system.settings import Positive

SCRIPT = STANDALONE / "serve_llama_cpp.py"


class LlamaCpp(ServedEngine):
    """Two servers of llama.cpp, alive side by side on the same cores.

    Args:
        pair: provides their target and draft model, as GGUF files in the pair's dtype.
        drafter: configuration of the run's drafter, whose name selects an entry of `speculative`.
        threads: of each server.
        plain: parameters of both, as xllamacpp spells them.
        speculative: by method, parameters of the speculative one, those of `speculative` there.
        install: what the environment holds.
        python: an interpreter that has xllamacpp; None: that of the environment.
        target: a GGUF file in place of the pair's target, such as a quantised one.
        draft: likewise of the draft model.
        start_seconds: time limit for starting a server.
        answer_seconds: time without an event after which a server counts as hung.
        batch_size: requests that a server gets at once.

    Raises:
        UserError: A model cannot become a GGUF file.
    """

    module = "xllamacpp"

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
        draft: str | None = None,
        start_seconds: Positive = 120.0,
        answer_seconds: Positive = 120.0,
        batch_size: int = 1,
    ):
        name = "llama_cpp"
        interpreter, self.version = program(name, install, python, self.module)
        self.has_own_file = target is not None
        self.same_weights = not self.has_own_file
        of_target = (
            existing_file(target)
            if target
            else as_gguf(pair.target, pair.exported_tokenizer, f"{pair.name}-target")
        )
        every = {
            "model": {"path": str(of_target)},
            "n_ctx": pair.context_length * batch_size,  # of all its slots together
            "n_parallel": batch_size,
            "cpuparams": {"n_threads": threads},
            "cpuparams_batch": {"n_threads": threads},
            **plain,
        }
        drafts = dict(speculative[drafter["name"]])
        of_draft = existing_file(draft) if draft else None
        if of_draft is None and pair.draft is not None:
            of_draft = as_gguf(pair.draft, pair.exported_tokenizer, f"{pair.name}-draft")
        if of_draft is not None:
            threads_of_it = {"cpuparams": {"n_threads": threads}, "cpuparams_batch": {"n_threads": threads}}
            drafts["draft"] = {
                "mparams": {"path": str(of_draft)},
                **threads_of_it,
                **(drafts.get("draft") or {}),
            }
        settings = {PLAIN: every, SPECULATIVE: every | {"speculative": drafts}}
        servers = scripted(interpreter, SCRIPT, settings, threads, start_seconds, variables(python))
        super().__init__(pair, servers, name, answer_seconds, batch_size)
