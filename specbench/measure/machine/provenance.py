"""Where numbers come from: code, machine, settings, inputs; written down before the first question is timed.

torch is imported where it is needed: a report compares provenance without it.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.metadata
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open

from specbench import ROOT
from specbench.config.spec import OWN
from specbench.measure.records.source import method_sha256, source_sha256
from specbench.models.names import is_path
from specbench.models.packages import described, is_package
from specbench.system.errors import UserError
from specbench.system.files import file_sha256, finite, read_json, write_json
from specbench.system.paths import packaged
from specbench.system.processes import free_memory
from specbench.system.settings import NO_PARAMETERS

if TYPE_CHECKING:
    import torch

PACKAGES = {
    *("torch", "transformers", "tokenizers", "accelerate", "safetensors"),
    *("numpy", "scipy", "pandas", "pyarrow", "specbench"),
}
RESET_PEAK = Path("/proc/self/clear_refs")
# Named one by one: any other variable may hold a secret.
ENVIRONMENT = (
    *("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "OMP_SCHEDULE", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"),
    *("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_DYNAMIC"),
    *("KMP_BLOCKTIME", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "ATEN_CPU_CAPABILITY", "LD_PRELOAD"),
    *("ONEDNN_MAX_CPU_ISA", "DNNL_DEFAULT_FPMATH_MODE", "MALLOC_ARENA_MAX", "TOKENIZERS_PARALLELISM"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "CUBLAS_WORKSPACE_CONFIG"),
    *("NVIDIA_TF32_OVERRIDE", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
)
ARM_NUMBERS = ("implementer", "part", "variant")
GPU_FIELDS = ("index", "name", "driver_version", "memory.total", "clocks.max.sm", "power.limit")
GPU_STATE = ("index", "clocks.sm", "power.draw", "temperature.gpu")

# What must be equal for two runs to be compared, and for one to go on: dotted names, each with all below it.
COMPARABLE = (
    *("source_sha256", "versions", "machine", "threads", "environment", "questions.sha256", "weights.target"),
    *("weights.engine.target", "config.engine.python"),
    *("config.pair.target", "config.pair.dtype", "config.pair.device", "config.pair.init", "config.data"),
    *("config.pair.target_shape", "config.pair.width", "config.pair.graphs", "config.pair.compile"),
    *("config.pair.stop_ids", "config.pair.tokenizer", "config.pair.chat_template"),
    *("config.pair.template_kwargs", "config.pair.device_map"),
    *("config.decoding.max_new_tokens", "config.decoding.temperature"),
    *("config.decoding.verification", "config.decoding.verify_width"),
    *("config.batch_size", "config.protocol", "config.engine.name"),
    "config.engine.plain.",  # not plain_url
)
PROVENANCE = "provenance.json"
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
)

LEAST_BUFFER_BYTES = {"cpu": 2**28, "cuda": 2**30}  # so much that starting a pass is small beside it
# Sums between two marks in time. On a GPU one takes as little as 0.2 ms, its start on an idle stream up to a tenth of
# that: the others start while it runs.
SUMS = {"cpu": 1, "cuda": 16}
UNKNOWN_CACHE_BYTES = 2**30  # where the system does not tell: no processor of one socket has much more
COLUMNS = 1024  # of the matrix that a product reads to measure the bandwidth
PASSES = 7
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
        "command": [_without_secret_value(argument) for argument in sys.orig_argv],
        "config": without_secrets(config),
        "versions": versions(),
        "machine": machine(),
        "load_average": list(os.getloadavg()),
        "threads": threads(),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        "source_sha256": source_sha256(),
        "method_sha256": method_sha256(config),
        "git": git_state(ROOT),
        "questions": {"path": str(questions_file), "sha256": file_sha256(questions_file)},
        "weights": weights(config["pair"], drafter, config.get("engine")),
    }


def record(run_dir: Path, provenance: dict) -> None:
    """Writes provenance.json; in a run that goes on, checks instead that nothing has changed since it began.

    Raises UserError naming what has: half a run from another machine is no measurement.
    """
    path = run_dir / PROVENANCE
    if not path.exists():
        write_json(path, provenance)
        return
    changed = differences(read_json(path), finite(provenance), SAME_RUN)
    if changed:
        begun = f"{run_dir} began under other conditions ({'; '.join(changed)})"
        anew = (
            "name another folder" if provenance["config"]["run_dir"] else "the same command now starts over"
        )
        raise UserError(f"{begun}: {anew}; once they are restored, run_dir={run_dir} resumes it")


def differences(first: dict, second: dict, names: Sequence[str] = COMPARABLE) -> list[str]:
    """Why two runs are not comparable, each as "versions.torch 2.11 against 2.13"; [] if they are.

    Weights of which one of them had no file, such as of a model that was not fetched then, are no difference: a run
    has all that it reads.
    """
    absent = tuple(
        f"weights.{name}."
        for provenance in (first, second)
        for name, one in (provenance.get("weights") or {}).items()
        if not one.get("files") and one.get("commit") is None
    )
    left, right = (
        {"config.engine.name": OWN}
        | {k: v for k, v in _flat(provenance) if k.startswith(tuple(names)) and k != PLACEMENT}
        for provenance in (first, second)
    )
    return [
        f"{key} {_shown(key, left.get(key))} against {_shown(key, right.get(key))}"
        for key in sorted(left.keys() | right.keys())
        if left.get(key) != right.get(key) and not key.startswith(absent)
    ]


def _shown(key: str, value: object) -> str:
    """The beginning of a value, of a digest as much as tells two apart."""
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


def machine() -> dict:
    """Operating system, processor, cores (of the machine; usable by this process), memory in GiB, GPUs."""
    return {
        "os": platform.platform(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "gpus": gpus(),
    }


def processor(device: torch.device) -> str:
    """The name of what computes: of the GPU that a "cuda" device is, else of the processor."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()


def gpus(fields: Sequence[str] = GPU_FIELDS, device: torch.device | None = None) -> list[dict[str, str]]:
    """The fields that nvidia-smi reports of a device, None: of each GPU (MiB, MHz, W, degrees Celsius); [] without."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    if device is not None:  # nvidia-smi counts GPUs in another order than torch, hidden ones too
        import torch

        query.append(f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}")
    try:
        completed = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):  # there is no GPU, or its driver hangs
        return []
    rows = csv.reader(completed.stdout.splitlines(), skipinitialspace=True)
    return [dict(zip(fields, row)) for row in rows if len(row) == len(fields)]


def threads() -> dict:
    """Threads of torch within an operation and between operations, and its CUDA (None: built without)."""
    import torch

    return {
        "torch": torch.get_num_threads(),
        "interop": torch.get_num_interop_threads(),
        "cuda": torch.version.cuda,
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

    Of a model of the hub: its id, the revision asked for, and the commit that the local cache has of it.

    Args:
        pair: its configuration.
        method: settings of its drafter, those of a wrapped one included; other folders and files that they name are
            read, too.
        engine: settings of another engine, which may have files of its own.

    Returns:
        Facts by "target", "draft", "parts.<name>", "method.<name>", "engine.target", "engine.draft"; without secrets.
    """
    sources = {"target": pair["target"], "draft": pair["draft"]}
    sources |= {f"parts.{name}": path for name, path in pair["parts"].items()}
    folders = {
        f"method.{key}": path
        for key, path in _paths(method)
        if path not in sources.values() and packaged(path).exists()
    }
    sources |= folders
    sources |= {f"engine.{name}": (engine or {}).get(name) for name in ("target", "draft")}
    packages = pair.get("packages", {})
    return without_secrets(
        {
            name: _weights(source, pair.get(f"{name}_revision"), packages)
            for name, source in sources.items()
            if source is not None
        }
    )


def trained(pair: Mapping, drafting: Mapping, with_draft: bool) -> dict[str, dict]:
    """What text the parts saw that a drafter is made of, as the record in their folders tells.

    Args:
        pair: its configuration, with the draft model that the drafter takes.
        drafting: settings of the drafter, those of a wrapped one included.
        with_draft: whether it takes the draft model.

    Returns:
        Records by "draft", or by the name of the setting that names the part; without those that have none.
    """
    from specbench.data.training import DATASTORE, RECORD

    sources = {"draft": pair["draft"]} if with_draft else {}
    sources |= dict(_paths(drafting))
    records = (
        (name, packaged(source) / file) for name, source in sources.items() for file in (DATASTORE, RECORD)
    )
    return {name: {"source": sources[name], **read_json(path)} for name, path in records if path.is_file()}


def trained_weights(drafting: Mapping) -> dict[str, dict]:
    """How large the trained weights of a drafter are, and in which form, as their files say.

    Args:
        drafting: settings of the drafter, those of a wrapped one included.

    Returns:
        By the name of the setting that names a folder with safetensors: `source`; `parameters`, how many
        floating-point numbers are in them; `shared_head`, whether draft tokens are scored by the target's own head
        (`original_lm_head` of config.json; None: it does not say).
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
    """Dotted name and value of every setting of a drafter that may name a file or a folder; its own name is none."""
    for key, value in _flat(dict(drafting)):
        if isinstance(value, str) and value and key.rpartition(".")[2] not in NO_PARAMETERS:
            yield key, value


def _floats(file: Path) -> int:
    """How many floating-point numbers a safetensors file holds, by its header."""
    with safe_open(file, "numpy") as tensors:
        slices = [tensors.get_slice(name) for name in tensors.keys()]  # noqa: SIM118 - no dictionary
        return sum(math.prod(one.get_shape()) for one in slices if "F" in one.get_dtype())


def _weights(source: str, revision: str | None, packages: Mapping) -> dict:
    path = described(source, packages).path if is_package(source) else packaged(source)
    if path.exists():
        files = (
            [path]
            if path.is_file()
            else sorted(p for p in path.iterdir() if p.suffix in (".safetensors", ".bin", ".pt", ".json"))
        )
        return {"source": source, "files": {file.name: file_sha256(file) for file in files}}
    if is_path(source):  # of a part that the method at hand may not need
        return {"source": source, "files": {}}
    cached = try_to_load_from_cache(source, "config.json", revision=revision)
    commit = Path(cached).parent.name if isinstance(cached, str) else None
    return {"source": source, "revision": revision, "commit": commit}


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The name of the processor; of an Arm one, which has none there, the numbers of its maker and design."""
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    facts = dict(re.findall(r"^([^:\n]*\S)\s*:[^\S\n]*(.+)$", text, re.MULTILINE))
    if "model name" in facts:
        return facts["model name"]
    numbers = [f"{name} {facts[f'CPU {name}']}" for name in ARM_NUMBERS if f"CPU {name}" in facts]
    return ", ".join([platform.processor() or platform.machine(), *numbers])


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every leaf of nested dictionaries and lists."""
    items = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    )
    if items is None:
        yield prefix, value
        return
    for key, item in items:
        yield from _flat(item, f"{prefix}.{key}" if prefix else str(key))


# -- secrets

SECRET_NAME = re.compile(
    r"(?:^|[.\s_-])(?:(?:api|access|secret|private|auth|client|refresh|bearer)_?)?"
    r"(?:key|token|secret|password|passwd|passphrase|credentials?|auth|authorization|bearer|signature)$",
    re.IGNORECASE,
)
SECRET_TEXT = re.compile(
    # keys that are known by their form
    r"(?<![A-Za-z0-9])(?:(?:hf_|gh[pousr]_)[A-Za-z0-9]{16,}|(?:github_pat_|glpat-|sk-|AIza)[\w-]{16,}"
    r"|xox[a-z]-[\w-]{8,}|A[KS]IA[0-9A-Z]{16}|eyJ[\w-]{8,}(?:\.[\w-]+)+)"
    # credentials in a header; of `Basic` base64 alone, which is no lower-case word
    r"|(?i:\bbearer\s+)[^\s\"',]+|(?i:\bbasic\s+)(?=[a-z+/_-]*[A-Z0-9=])[\w+/=-]{4,}"
)
URL = re.compile(r"(?<=://)(\S*@)?([^\s?#@]*)(\S*)")  # user and password, address, query
BLANK = "***"


def without_secrets(value: Any, name: str = "") -> Any:
    """The same value without secrets; whatever leaves a run folder, or is shown, must pass through here.

    Blanked are values that are named like a secret, texts that look like one, and of every URL user, password, query
    and fragment.
    """
    if SECRET_NAME.search(name) and value is not None and not isinstance(value, bool):
        return BLANK
    if isinstance(value, Mapping):
        return {key: without_secrets(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item, name) for item in value]
    return SECRET_TEXT.sub(BLANK, URL.sub(_without_credentials, value)) if isinstance(value, str) else value


def _without_credentials(url: re.Match) -> str:
    user, address, query = url.groups(default="")
    if "?" in user or "#" in user:  # in a password, or in front of an @ in the query: nobody can tell
        return BLANK
    return (user and f"{BLANK}@") + address + (query and query[0] + BLANK)


def _without_secret_value(argument: str) -> str:
    """A command-line argument, `name=secret` blanked."""
    name, equals, _ = argument.partition("=")
    return f"{name}={BLANK}" if equals and SECRET_NAME.search(name) else without_secrets(argument)


# -- the ceiling


def bandwidth(device: torch.device) -> float:
    """Bytes per second at which the memory of `device` is read: the ceiling of work that is bound by it.

    The median over passes that each read a large buffer of float32 numbers, once or several times, after a warm-up,
    with the threads torch has now. A sum reads every byte once, writes nothing, and of torch's operations is closest to
    what the memory gives. On a CPU a product by the kernel of our own reads several streams side by side: the faster of
    the two counts. The type of the weights plays no part. Weights that fit into a cache can be read faster.
    """
    import torch

    from specbench.decoding.cpu.native import has_kernel
    from specbench.decoding.cpu.packed_linear import Panels

    sums, size = SUMS[device.type], buffer_bytes(device.type)
    buffer = torch.ones(size // 4, dtype=torch.float32, device=device)

    def median(read: Callable[[], object]) -> float:
        seconds_of(device, read, sums)
        return statistics.median(seconds_of(device, read, sums) for _ in range(PASSES))

    fastest = median(buffer.sum)
    if has_kernel(device, torch.float32):
        panels, state = Panels(buffer.view(-1, COLUMNS)), torch.ones(1, COLUMNS)
        del buffer
        fastest = min(fastest, median(lambda: panels.times(state, None)))
    return sums * size / fastest


def seconds_of(device: torch.device, work: Callable[[], object], times: int) -> float:
    """Seconds that some work takes a device, done so many times in a row."""
    from specbench.decoding.trace import Clock

    clock = Clock(device)
    clock.synchronize()
    start = clock.mark()
    for _ in range(times):
        work()
    end = clock.mark()
    clock.synchronize()
    return clock.seconds(start, end)


def buffer_bytes(kind: str) -> int:
    """Bytes that are read to measure the bandwidth of a "cpu" or "cuda".

    On a CPU twice what its caches hold, if its copy in panels then leaves half of the free memory.
    """
    least = LEAST_BUFFER_BYTES[kind]
    if kind != "cpu":
        return least
    wanted, free, row = max(least, 2 * last_level_cache_bytes()), free_memory(), 4 * COLUMNS
    return wanted if free is None else min(wanted, max(1, free // 4 // row) * row)


def last_level_cache_bytes(folder: Path = Path("/sys/devices/system/cpu")) -> int:
    """Bytes of all level 3 caches of this machine together; a safe guess where the system does not report them."""
    sizes = {}
    for cache in folder.glob("cpu[0-9]*/cache/index3"):
        match = re.fullmatch(r"(\d+)([KM])", (cache / "size").read_text().strip())
        if match:
            shared_by = (cache / "shared_cpu_list").read_text().strip()
            sizes[shared_by] = int(match[1]) * {"K": 2**10, "M": 2**20}[match[2]]
    return sum(sizes.values()) or UNKNOWN_CACHE_BYTES


# -- memory


def reset_peak_memory(device: torch.device) -> None:
    """Makes `peak_memory` count anew from now on."""
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif os.access(RESET_PEAK, os.W_OK):  # some containers have it, and refuse
        RESET_PEAK.write_text("5")  # resets the high-water mark of resident memory, see proc(5)


def peak_memory(device: torch.device) -> int | None:
    """The most bytes in use since `reset_peak_memory`; None where the system does not count them.

    On a GPU those allocated, else the resident memory of this process, models included.
    """
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if not os.access(RESET_PEAK, os.W_OK):
        return None
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match[1]) * 1024 if match else None
