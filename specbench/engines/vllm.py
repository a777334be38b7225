"""vLLM as an engine of a run, through its OpenAI-compatible server."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import specbench
from specbench import METHODS
from specbench.config.spec import OWN_CODE, make_drafter, needs_of
from specbench.data.warm_start import WARM
from specbench.engines.environments import program, variables
from specbench.engines.served import PLAIN, SPECULATIVE, ServedEngine
from specbench.engines.server import HOST, Server, shared_cores
from specbench.engines.vllm_proposer import DRAFTER
from specbench.models.devices import name_of
from specbench.models.export import as_folder, as_part
from specbench.models.model_source import fetch_with_weights
from specbench.models.names import local_folder
from specbench.models.pairs import Pair
from specbench.system.errors import UserError
from specbench.system.files import make_folder, read_json
from specbench.system.paths import cache_folder
from specbench.system.settings import LASTING, MEMORY, Positive

# Variables of its processes: no network, no reports of use; one GiB of keys and values, unless the user sets it.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
CACHE_SPACE = "VLLM_CPU_KVCACHE_SPACE"
PROPOSER = "specbench.engines.vllm_proposer.Proposer"
EXPORTED = "exported"  # set if the model is what a drafter's `export` writes
LENGTH = "num_speculative_tokens"
PRELOADED = ("lib/libiomp5.so",)  # of the environment, if it exists: vLLM's threads need it


class Vllm(ServedEngine):
    """Two servers of vLLM, alive side by side on the same cores.

    Args:
        pair: provides their target and draft model, as folders in the pair's dtype.
        drafter: configuration of the run's drafter, whose name selects an entry of `speculative`.
        threads: of each server, on a CPU.
        plain: options of both, without `--`: {enforce-eager: true}.
        speculative: by method, the `--speculative-config` of the second one. Its `model` is a folder, by default the
            pair's draft model; `exported: true` means what the drafter exports, and `own_code: true` makes this
            project's own code draft there, with the drafter's settings.
        install: what the environment holds.
        python: an interpreter that has vLLM; None: that of the environment.
        start_seconds: time limit for starting a server, which compiles.
        answer_seconds: time without an event after which a server counts as hung.
        batch_size: requests that a server gets at once.

    Raises:
        UserError: A drafter has nothing that vLLM reads.
    """

    module = "vllm"

    def __init__(
        self,
        pair: Pair,
        drafter: dict[str, Any],
        threads: int,
        plain: dict,
        speculative: dict,
        install: dict,
        python: str | None = None,
        start_seconds: Positive = 600.0,
        answer_seconds: Positive = 120.0,
        batch_size: int = 1,
    ):
        interpreter, self.version = program("vllm", install, python, self.module)
        # First of all: a drafter may change the layout of the target's weights.
        folder = as_folder(pair.target, pair.exported_tokenizer, f"{pair.name}-target")
        drafts = dict(speculative[drafter["name"]])
        environment = ENVIRONMENT | variables(python) | {CACHE_SPACE: os.environ.get(CACHE_SPACE, "1")}
        if drafts.pop(EXPORTED, False):
            part = as_part(make_drafter(drafter, pair=pair), f"{pair.name}-{drafter['name']}")
            drafts |= {"model": str(part), LENGTH: _length_of(part, drafter["name"], drafts.get(LENGTH))}
        elif drafts.pop(OWN_CODE, False):
            environment |= {"PYTHONPATH": str(_importable()), DRAFTER: json.dumps(drafter)}
            drafts = {"method": "custom_class", "model": PROPOSER, LENGTH: drafter["max_draft_tokens"]}
        elif "model" in drafts:
            name = drafts["model"]  # fetched here: the servers have no network
            drafts["model"] = str(local_folder(name) or fetch_with_weights(name))
        elif pair.draft is not None:
            drafts["model"] = str(as_folder(pair.draft, pair.exported_tokenizer, f"{pair.name}-draft"))
        if not plain.get("enforce-eager"):
            self.start_hint = ", which compile for minutes: +engine.plain.enforce-eager=true does without"
        cores = shared_cores(threads)
        preloaded = [str(path) for name in PRELOADED if (path := interpreter.parent.parent / name).exists()]
        environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        if preloaded:
            environment["LD_PRELOAD"] = ":".join(preloaded)
        options = {
            "model": str(folder),
            "dtype": name_of(pair.dtype),
            "host": HOST,
            "max-model-len": pair.context_length,
            "generation-config": "vllm",
            "no-enable-prefix-caching": True,
            "enable-prompt-tokens-details": True,  # they count the tokens from a prefix cache
            "max-num-seqs": batch_size,
            **plain,
        }
        speculating = {
            "speculative-config": json.dumps(drafts),
            "per-request-spec-decode-metrics": "detailed",
        }

        def server(arm: str, options: dict[str, Any]) -> Server:
            words = [word for name, value in options.items() for word in _words(name, value)]
            module = [str(interpreter), "-m", "vllm.entrypoints.openai.api_server", *words]
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

    @classmethod
    def check(cls, settings: Mapping[str, Any], drafter: Mapping[str, Any], batch_size: int) -> None:
        """As in `ServedEngine`. Also raises UserError for a prefix cache, or a drafter that cannot draft in vLLM."""
        super().check(settings, drafter, batch_size)
        plain = {key.replace("_", "-"): value for key, value in (settings.get("plain") or {}).items()}
        if plain.get("enable-prefix-caching") or plain.get("no-enable-prefix-caching") is False:
            raise UserError("a prefix cache makes second answers faster: leave it out of engine.plain")
        if settings["speculative"][drafter["name"]].get(OWN_CODE):
            _check_text_alone(drafter)


def _check_text_alone(drafter: Mapping[str, Any]) -> None:
    """Raises UserError for a drafter that needs more than the text of one answer."""
    name = drafter["name"]
    if not needs_of(drafter).text_alone:
        raise UserError(f"{name} needs models or states: engine vllm does this only with its own code")
    if drafter.get(MEMORY) == LASTING or drafter.get(WARM):
        raise UserError(
            f"inside vLLM {name} knows one answer at a time: leave out {MEMORY}={LASTING} and {WARM}"
        )


def _length_of(part: Path, name: str, chosen: int | None) -> int:
    """Number of draft tokens of an exported part: vLLM drafts one with each head, whatever is configured.

    Raises:
        UserError: Another number is chosen: with fewer its server dies, with more the run would report a wrong length.
    """
    heads = read_json(part / "config.json")["num_heads"]
    if chosen not in (None, heads):
        raise UserError(
            f"vLLM drafts one token with each of the {heads} heads, not engine.speculative.{name}.{LENGTH}={chosen}: "
            "leave it out"
        )
    return heads


def _importable() -> Path:
    """A folder from which Python imports this project, and nothing else of its environment."""
    of_checkout = hashlib.sha256(str(METHODS).encode()).hexdigest()[:8]
    folder = make_folder(cache_folder() / "engines" / f"imports-{of_checkout}")
    for package in (Path(specbench.__file__).parent, METHODS):
        with suppress(FileExistsError):
            (folder / package.name).symlink_to(package)
    return folder


def _words(name: str, value: Any) -> list[str]:
    """An option as words of a command line: dictionaries as JSON, and none for an option without a value."""
    if value is None or (value is False and name.startswith("no-")):
        return []
    if value is False:
        return [f"--no-{name}"]
    if value is True:
        return [f"--{name}"]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
