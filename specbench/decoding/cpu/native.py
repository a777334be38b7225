"""Kernels of our own for a CPU: compiled when they are first needed, and kept in the user's cache.

Torch's kernels read a small matrix at two thirds of the speed of memory, and bfloat16 at a fifth where the processor
has no instructions for it; those in `kernels/` read both at the speed of memory, see docs/cpu.md. They need a C++
compiler. Without one everything works as before, at the speed of torch's kernels.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from specbench.system.errors import UserError, one_line
from specbench.system.files import made_once
from specbench.system.paths import cache_folder

KERNELS = "kernels"  # name of the folder of sources, and of the one of libraries in the user's cache
SOURCES = Path(__file__).parent / KERNELS
COMPILERS = ("g++", "clang++")
FLAGS = (
    *("-std=c++20", "-O3", "-march=native", "-fPIC", "-shared", "-fopenmp", "-Wno-psabi"),
    "-ffp-contract=off",  # fused operations are explicit, see simd.h
)
TYPES = (torch.float32, torch.bfloat16)
# Most tokens of a pass on our own kernels. Longer passes are compute-bound, where torch is as fast (in float32 from
# some 128 tokens on, docs/cpu.md), and copies of keys and values cost little beside the attention.
MOST_TOKENS = 128
SECONDS = 600  # time limit for the compiler
SWITCH = "SPECBENCH_KERNELS"  # an environment variable; 0: none are compiled or loaded


def reason() -> str | None:
    """None if the kernels can be called as `torch.ops.specbench`; otherwise the reason in a few words."""
    return load()[1]


def compiler() -> list[str]:
    """The command that compiled the kernels; [] without kernels."""
    return load()[0]


@cache
def load() -> tuple[list[str], str | None]:
    """Loads the kernels, compiling them first if needed; returns `compiler` and `reason`."""
    if os.environ.get(SWITCH) == "0":
        return [], f"{SWITCH}=0"
    reasons = []
    # Compiled libraries first: a compiler that fails would do so in every process.
    folder = cache_folder() / KERNELS
    libraries = []
    for command in _compilers():
        try:
            libraries.append((command, folder / f"{_digest(command)}.so"))
        except OSError as error:  # it is there, but cannot be run
            reasons.append(one_line(error))
    for command, library in sorted(libraries, key=lambda one: not os.path.exists(one[1])):
        try:
            torch.ops.load_library(str(made_once(library, "filled", partial(_compile, command))))
        except UserError as error:
            reasons.append(str(error))
        except OSError as error:
            reasons.append(one_line(error))
        else:
            _register_shapes()
            return command, None
    named = os.environ.get("CXX")
    nothing = f"$CXX={named} is not a C++ compiler" if named else "there is no C++ compiler"
    return [], next(iter(reasons), nothing)


def _register_shapes() -> None:
    """Registers the output shapes of the kernels, for tracing layers."""
    for name in ("product", "layer_product"):
        torch.library.register_fake(f"specbench::{name}", _shape_of_product)
    for name in ("attend", "layer_attend"):
        torch.library.register_fake(f"specbench::{name}", _shape_of_attention)


def _shape_of_product(states: torch.Tensor, *rest: Any) -> torch.Tensor:
    """[..., rows] of states [..., in]; the number of rows comes last."""
    return states.new_empty(*states.shape[:-1], rest[-1])


def _shape_of_attention(query: torch.Tensor, *_: object) -> torch.Tensor:
    """[b, n, heads, d] of queries [b, heads, n, d]."""
    b, heads, n, d = query.shape
    return query.new_empty(b, n, heads, d)


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are kernels for tensors of a device and a type: with them a token has the same bits in any pass."""
    return device.type == "cpu" and dtype in TYPES and _available()


def has_tiles(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of a device and a type run on the tiles of a processor with AMX."""
    return dtype == torch.bfloat16 and has_kernel(device, dtype) and torch.ops.specbench.has_tiles()


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Logits [..., n, vocab] on a CPU -> index of the largest [..., n], the first of several.

    It uses our own kernel or NumPy's argmax, which are vectorised: over six rows of 16384 NumPy's takes a twentieth of
    the time of torch's.
    """
    if has_kernel(logits.device, logits.dtype):
        return torch.ops.specbench.argmax(logits.detach())
    if logits.dtype not in (torch.float32, torch.float64):  # NumPy has no bfloat16, and is slow with float16
        logits = logits.float()
    return torch.from_numpy(logits.detach().numpy().argmax(-1))


def _available() -> bool:
    return reason() is None


def _compilers() -> list[list[str]]:
    """Commands of the available C++ compilers: $CXX, or those of `COMPILERS`."""
    commands = map(shlex.split, [os.environ["CXX"]] if os.environ.get("CXX") else COMPILERS)
    return [command for command in commands if command and shutil.which(command[0])]


def _digest(compiler: list[str]) -> str:
    """Hashes all that a library depends on: the sources, the compiler, the processor and the version of torch."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
    parts = [version, torch.__version__, " ".join([*compiler[1:], *FLAGS]), processor()]
    sources = [*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]
    parts += [path.read_text(encoding="utf-8") for path in sorted(sources)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def processor() -> str:
    """Model and features of the processor, as far as the system reports them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(
        dict.fromkeys(line for line in lines if line.startswith(("model name", "flags", "Features")))
    )


def _compile(compiler: list[str], library: Path) -> None:
    """Compiles all sources into one library. Raises UserError if they cannot be compiled."""
    print("compiling kernels for this processor, once: up to a minute", file=sys.stderr, flush=True)
    root = Path(torch.__file__).parent
    command = [*compiler, *FLAGS, f"-I{root / 'include'}", *map(str, sorted(SOURCES.glob("*.cpp")))]
    command += ["-o", str(library), f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"kernels cannot be compiled within {SECONDS} s") from error
    if done.returncode:
        lines = done.stderr.splitlines()
        errors = [line for line in lines if "error" in line] or lines or ["no reason was printed"]
        raise UserError(f"kernels cannot be compiled: {errors[0]}")
    with library.open("rb") as file:
        # A library truncated by a power cut would exist and never be rebuilt.
        os.fsync(file.fileno())
