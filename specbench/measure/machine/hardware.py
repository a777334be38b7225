"""What a machine is: processor, cores, memory, GPUs, threads and peak memory. torch is imported where it is needed."""

from __future__ import annotations

import csv
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

RESET_PEAK = Path("/proc/self/clear_refs")
ARM_NUMBERS = ("implementer", "part", "variant")
GPU_FIELDS = ("index", "name", "driver_version", "memory.total", "clocks.max.sm", "power.limit")
GPU_STATE = ("index", "clocks.sm", "power.draw", "temperature.gpu")


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
    """The name of the GPU if the device is "cuda", else of the processor."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The name of the processor; Arm reports none: the numbers of its implementer, part and variant."""
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    facts = dict(re.findall(r"^([^:\n]*\S)\s*:[^\S\n]*(.+)$", text, re.MULTILINE))
    if "model name" in facts:
        return facts["model name"]
    numbers = [f"{name} {facts[f'CPU {name}']}" for name in ARM_NUMBERS if f"CPU {name}" in facts]
    return ", ".join([platform.processor() or platform.machine(), *numbers])


def gpus(fields: Sequence[str] = GPU_FIELDS, device: torch.device | None = None) -> list[dict[str, str]]:
    """nvidia-smi's fields of a device, or of each GPU if it is None (MiB, MHz, W, degrees Celsius); [] without any."""
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


def reset_peak_memory(device: torch.device) -> None:
    """Resets what `peak_memory` returns."""
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif os.access(RESET_PEAK, os.W_OK):  # some containers have it, and refuse
        RESET_PEAK.write_text("5")  # resets the high-water mark of resident memory, see proc(5)


def peak_memory(device: torch.device) -> int | None:
    """The most bytes in use since `reset_peak_memory`; None if the system does not count them.

    On a GPU those allocated, else the resident memory of this process, models included.
    """
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if not os.access(RESET_PEAK, os.W_OK):
        return None
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match[1]) * 1024 if match else None
