"""Where numbers come from: code, machine, settings, inputs; written down before the first question is timed."""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import math
import os
import pkgutil
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from specbench import ROOT
from specbench.config.spec import OWN
from specbench.data.training_folder import DATASTORE, RECORD
from specbench.measure.machine import hardware
from specbench.measure.records.source import method_sha256, source_sha256
from specbench.models.weight_files import tokenizer_facts, weight_facts
from specbench.system.errors import UserError
from specbench.system.files import file_sha256, finite, read_json, write_json
from specbench.system.paths import packaged
from specbench.system.secrets import without_secret_value, without_secrets
from specbench.system.settings import NO_PARAMETERS, flat

PACKAGES = {
    *("torch", "transformers", "tokenizers", "accelerate", "safetensors"),
    *("numpy", "scipy", "pandas", "pyarrow", "specbench"),
}
# Named one by one: any other variable may hold a secret.
ENVIRONMENT = (
    *("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "OMP_SCHEDULE", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"),
    *("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_DYNAMIC"),
    *("KMP_BLOCKTIME", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "ATEN_CPU_CAPABILITY", "LD_PRELOAD"),
    *("ONEDNN_MAX_CPU_ISA", "DNNL_DEFAULT_FPMATH_MODE", "MALLOC_ARENA_MAX", "TOKENIZERS_PARALLELISM"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "CUBLAS_WORKSPACE_CONFIG"),
    *("NVIDIA_TF32_OVERRIDE", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
)

# What must be equal for two runs to be compared, and for one to resume: dotted names, each with all below it.
COMPARABLE = (
    *("source_sha256", "versions", "machine", "threads", "environment", "questions.sha256", "weights.target"),
    *("weights.engine.target", "config.engine.python"),
    *("config.pair.target", "config.pair.dtype", "config.pair.device", "config.pair.init", "config.data"),
    *("config.pair.target_shape", "config.pair.width", "config.pair.graphs", "config.pair.compile"),
    *("config.pair.stop_ids", "config.pair.tokenizer", "config.pair.chat_template"),
    *("config.pair.template_kwargs", "config.pair.device_map"),
    *("config.decoding.max_new_tokens", "config.decoding.temperature", "config.decoding.top_k"),
    *("config.decoding.top_p", "config.decoding.verification", "config.decoding.verify_width"),
    *("config.batch_size", "config.protocol", "config.engine.name"),
    "config.engine.plain.",  # not plain_url
)
PLACEMENT = "environment.CUDA_VISIBLE_DEVICES"  # another GPU of the same kind does as well
SAME_RUN = (
    "source_sha256",
    "method_sha256",
    "versions",
    "machine",
    "threads",
    "environment",
    "questions.sha256",
    "weights",
    "kernels",
    "compiled",
    "engine_version",
    "device",
    "processor",  # of a GPU: which one "cuda" means depends on the environment
)

NO_DIFF = hashlib.sha256(b"").hexdigest()  # of the code from its commit


def collect(config: Any, drafter: Mapping, questions_file: Path) -> dict:
    """Collects what is known before the first question.

    Secrets are left out: of the environment only known variables are read, and values that look like a key, or are
    named like one, are blanked.

    Args:
        config: the configuration as a plain dictionary.
        drafter: what drafts in it.
        questions_file: that is read.
    """
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": [without_secret_value(argument) for argument in sys.orig_argv],
        "config": without_secrets(config),
        **around(),
        "load_average": list(os.getloadavg()),
        "threads": hardware.threads(),
        "source_sha256": source_sha256(),
        "method_sha256": method_sha256(config),
        "git": git_state(ROOT),
        "questions": {"path": str(questions_file), "sha256": file_sha256(questions_file)},
        "weights": weights(config["pair"], drafter, config.get("engine")),
    }


def around() -> dict[str, Any]:
    """What is around a run: versions of packages, the machine, and known variables of the environment."""
    return {
        "versions": versions(),
        "machine": hardware.machine(),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    }


def record(path: Path, provenance: dict) -> None:
    """Writes the provenance of a run; if it is resumed, checks instead that nothing has changed since it began.

    Raises UserError with the changes: half a run from another machine is no measurement.
    """
    if not path.exists():
        write_json(path, provenance)
        return
    changed = differences(read_json(path), finite(provenance), SAME_RUN)
    if changed:
        begun = f"{path.parent} began under other conditions ({'; '.join(changed)})"
        anew = (
            "name another folder" if provenance["config"]["run_dir"] else "the same command now starts over"
        )
        raise UserError(f"{begun}: {anew}; once they are restored, run_dir={path.parent} resumes it")


def differences(first: dict, second: dict, names: Sequence[str] = COMPARABLE) -> list[str]:
    """Why two runs are not comparable, each as "versions.torch 2.11 against 2.13"; [] if they are.

    Weights for which one run had no file, such as a model that was not fetched then, are no difference: a run has all
    that it reads.
    """
    absent = tuple(
        f"weights.{name}."
        for provenance in (first, second)
        for name, one in (provenance.get("weights") or {}).items()
        if not one.get("files") and one.get("commit") is None
    )
    left, right = (
        {"config.engine.name": OWN}
        | {
            k: v
            for k, v in flat(provenance, lists=True).items()
            if k.startswith(tuple(names)) and k != PLACEMENT
        }
        for provenance in (first, second)
    )
    return [
        f"{key} {_shown(key, left.get(key))} against {_shown(key, right.get(key))}"
        for key in sorted(left.keys() | right.keys())
        if left.get(key) != right.get(key) and not key.startswith(absent)
    ]


def _shown(key: str, value: object) -> str:
    """The beginning of a value; of a digest, its first 8 digits."""
    return str(value)[: 8 if key.endswith("sha256") else 40]


# -- the parts


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that are installed."""
    # A broken installation leaves some without a name.
    named = ((d.metadata["Name"], d) for d in importlib.metadata.distributions())
    installed = {name.lower(): distribution.version for name, distribution in named if name}
    return {"python": platform.python_version()} | {
        name: installed[name] for name in sorted(PACKAGES & installed.keys())
    }


def git_state(root: Path) -> dict | None:
    """Commit, and what differs from it (`git diff HEAD`, and its sha256); None if `root` is no repository."""
    if shutil.which("git") is None:
        return None

    def git(*arguments: str) -> bytes | None:
        completed = subprocess.run(["git", "-C", root, *arguments], capture_output=True, check=False)
        return None if completed.returncode else completed.stdout

    top, commit, diff = git("rev-parse", "--show-toplevel"), git("rev-parse", "HEAD"), git("diff", "HEAD")
    if top is None or commit is None or diff is None:
        return None
    if Path(os.fsdecode(top.strip())) != root:  # installed into another repository
        return None
    return {
        "commit": commit.decode().strip(),
        "diff_sha256": hashlib.sha256(diff).hexdigest(),
        "diff": without_secrets(diff.decode(errors="replace")),
    }


def weights(pair: Mapping, method: Mapping, engine: Mapping | None = None) -> dict[str, dict]:
    """The weights of a pair, a method and an engine: where from, and checksums of the files on disk.

    For a model of the hub: its id, the requested revision, and the commit in the local cache.

    Args:
        pair: its configuration.
        method: settings of its drafter, those of a wrapped one included; other folders and files that they name are
            read, too.
        engine: settings of another engine, which may have files of its own.

    Returns:
        Facts by "target", "draft", "tokenizer" (of a folder, with its chat template), "parts.<name>" (those that the
        drafter names), "method.<name>", "engine.target", "engine.draft"; without secrets.
    """
    sources = {"target": pair["target"], "draft": pair["draft"]}
    named = dict(_paths(method))
    # Other parts may change while the run is interrupted.
    sources |= {f"parts.{name}": path for name, path in pair["parts"].items() if path in named.values()}
    folders = {
        f"method.{key}": path
        for key, path in named.items()
        if path not in sources.values() and packaged(path).exists()
    }
    sources |= folders
    engine = engine or {}
    sources |= {f"engine.{name}": engine.get(name) for name in ("target", "draft")}
    in_its_words = (engine.get("speculative") or {}).get(method.get("name")) or {}
    sources |= {f"engine.{key}": path for key, path in _paths(in_its_words) if packaged(path).exists()}
    packages = pair.get("packages", {})
    facts = {
        name: weight_facts(source, pair.get(f"{name}_revision"), packages)
        for name, source in sources.items()
        if source is not None
    }
    # Left out if there is none: as weights that are not there, whose arrival is no difference.
    if (tokenizer := tokenizer_facts(pair)) is not None:
        facts["tokenizer"] = tokenizer
    return without_secrets(facts)


def trained(pair: Mapping, drafting: Mapping, with_draft: bool) -> dict[str, dict]:
    """The text that a drafter's parts were trained on, from the records in their folders.

    Args:
        pair: its configuration, with the draft model that the drafter uses.
        drafting: settings of the drafter, those of a wrapped one included.
        with_draft: whether it uses the draft model.

    Returns:
        Records by "draft", or by the name of the setting that names the part; without those that have none.
    """
    sources = {"draft": pair["draft"]} if with_draft else {}
    sources |= dict(_paths(drafting))
    records = (
        (name, packaged(source) / file) for name, source in sources.items() for file in (DATASTORE, RECORD)
    )
    return {name: {"source": sources[name], **read_json(path)} for name, path in records if path.is_file()}


def trained_weights(drafting: Mapping) -> dict[str, dict]:
    """Size and form of a drafter's trained weights, from their files.

    Args:
        drafting: settings of the drafter, those of a wrapped one included.

    Returns:
        By the name of the setting that names a folder with safetensors: `source`; `parameters`, how many
        floating-point numbers are in them; `shared_head`, whether draft tokens are scored by the target's own head
        (`original_lm_head` of config.json; None: unknown).
    """
    by_setting = {}
    for name, value in _paths(drafting):
        folder = packaged(value)
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            continue
        settings = folder / "config.json"
        form = read_json(settings) if settings.is_file() else {}
        by_setting[name] = {
            "source": value,
            "parameters": sum(map(_floats, files)),
            "shared_head": form.get("original_lm_head"),
        }
    return by_setting


def _paths(drafting: Mapping) -> Iterator[tuple[str, str]]:
    """Dotted name and value of every setting of a drafter that may name a file or a folder.

    Its own name is none, nor is a word of a few, such as `memory=run`: a folder of that name has nothing to do with it.
    """
    chosen = _choices(drafting)
    for key, value in flat(drafting, lists=True).items():
        named = isinstance(value, str) and value and key not in chosen
        if named and key.rpartition(".")[2] not in NO_PARAMETERS:
            yield key, value


def _choices(drafting: Mapping) -> set[str]:
    """Dotted names of the settings of a drafter, and of one inside it, whose value is one of a few words."""
    names: set[str] = set()
    if "_target_" in drafting:
        parameters = inspect.signature(pkgutil.resolve_name(drafting["_target_"])).parameters
        names = {name for name, one in parameters.items() if "Literal[" in str(one.annotation)}
    for key, value in drafting.items():
        if isinstance(value, Mapping):
            names |= {f"{key}.{name}" for name in _choices(value)}
    return names


def _floats(file: Path) -> int:
    """Number of floating-point numbers in a safetensors file, from its header."""
    with safe_open(file, "numpy") as tensors:
        slices = [tensors.get_slice(name) for name in tensors.keys()]  # noqa: SIM118 - no dictionary
        return sum(math.prod(one.get_shape()) for one in slices if "F" in one.get_dtype())
