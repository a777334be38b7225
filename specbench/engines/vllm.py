"""vLLM as an engine of a run, through its OpenAI-compatible server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.engines.environments import interpreter
from specbench.engines.served import PLAIN, SPECULATIVE, ServedEngine
from specbench.engines.server import HOST, Server, shared_cores
from specbench.models.export import as_folder
from specbench.system.paths import packaged

if TYPE_CHECKING:
    from specbench.models.pairs import Pair

# What its processes are told: no network, no reports of use, one GiB of keys and values on a CPU.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
PRELOADED = ("lib/libiomp5.so",)  # of the environment, where it is there: vLLM's threads want it


class Vllm(ServedEngine):
    """Two servers of vLLM, alive side by side on the same cores.

    Args:
        pair: whose target and draft model they get, as folders in the pair's dtype.
        method: the name of what the speculative one drafts as.
        threads: of each server, on a CPU.
        plain: options of both, without `--`: {enforce-eager: true}.
        speculative: by method, the `--speculative-config` of the second one. Its `model` is a folder, and the pair's
            draft model where none is named.
        install: what the environment holds.
        python: an interpreter that has vLLM; None: that of the environment.
        start_seconds: that starting a server may take: it compiles.
        answer_seconds: without an event, after which a server counts as hung.
        batch_size: requests that a server is given at once.

    Raises:
        UserError: The engine is not installed.
    """

    def __init__(
        self,
        pair: Pair,
        method: str,
        threads: int,
        plain: dict,
        speculative: dict,
        install: dict,
        python: str | None = None,
        start_seconds: float = 600.0,
        answer_seconds: float = 120.0,
        batch_size: int = 1,
    ):
        program = Path(python) if python else interpreter("vllm", install)
        self.version = install["requirements"][-1]
        drafts = dict(speculative[method])
        if "model" in drafts:
            drafts["model"] = str(packaged(drafts["model"]))
        elif pair.draft is not None:
            drafts["model"] = str(as_folder(pair.draft, pair.tokenizer, f"{pair.name}-draft"))
        folder = as_folder(pair.target, pair.tokenizer, f"{pair.name}-target")
        cores = shared_cores(threads)
        preloaded = [str(path) for name in PRELOADED if (path := program.parent.parent / name).exists()]
        environment = {**ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))}
        if preloaded:
            environment["LD_PRELOAD"] = ":".join(preloaded)
        options = {
            "model": str(folder),
            "dtype": str(pair.dtype).removeprefix("torch."),
            "host": HOST,
            "max-model-len": pair.context_length,
            "generation-config": "vllm",
            "no-enable-prefix-caching": True,
            "max-num-seqs": batch_size,
            **plain,
        }
        speculating = {
            "speculative-config": json.dumps(drafts),
            "per-request-spec-decode-metrics": "detailed",
        }

        def server(arm: str, options: dict[str, Any]) -> Server:
            words = [word for name, value in options.items() for word in _words(name, value)]
            module = [str(program), "-m", "vllm.entrypoints.openai.api_server", *words]
            return Server(
                arm,
                "",
                lambda port: [*module, "--port", str(port)],
                seconds=start_seconds,
                cores=cores,
                environment=environment,
            )

        servers = {
            PLAIN: server(PLAIN, options),
            SPECULATIVE: server(SPECULATIVE, options | speculating),
        }
        super().__init__(pair, servers, "openai", answer_seconds, batch_size)


def _words(name: str, value: Any) -> list[str]:
    """An option as a command line has it; nothing for one that is switched off."""
    if value is True:
        return [f"--{name}"]
    return [] if value is False or value is None else [f"--{name}", str(value)]
