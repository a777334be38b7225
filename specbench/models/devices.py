"""Where a model computes, and in which dtype."""

from __future__ import annotations

import os

import torch

from specbench.system.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SWITCH = "SPECBENCH_COMPILE"  # an environment variable; 0: layers on a CPU are compiled only on request


def choose_device(name: str, key: str = "pair.device") -> torch.device:
    """The device of that name; "auto" is CUDA if available, each of several processes with its own device.

    Args:
        name: such as "auto", "cpu" or "cuda:0".
        key: the setting that it comes from, for messages.

    Raises:
        UserError: this machine does not have it.
    """
    there = torch.cuda.device_count()
    if name == "auto":
        rank = int(os.environ.get("LOCAL_RANK", 0))
        if there and rank >= there:
            raise UserError(
                f"process {rank + 1} has no CUDA device: this machine has {there}, one per process"
            )
        return torch.device(f"cuda:{rank}" if torch.cuda.is_available() else "cpu")
    if name != "cpu" and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError(f"several processes cannot share {key}={name}: use auto, which gives each its own")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"{key} '{name}' is not a device: use auto, cpu or cuda:0") from error
    if device.type == "cuda" and (device.index or 0) >= there:
        raise UserError(f"{key} is '{name}', but this machine has {there} CUDA devices")
    # With its number: torch does not match a device without one to the current device.
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def prepare_device(device: torch.device) -> None:
    """Prepares a GPU for decoding; does nothing on a CPU.

    It becomes the current device of this process, used if none is named. Attention never uses cuDNN's kernels: those
    need a plan, tens of ms of the host's time, for each new number of keys, which every decoded token brings. This
    applies to the whole process, transformers' generate included.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.enable_cudnn_sdp(False)


def place_weights(module: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Moves a module to a device, and only its parameters to a dtype.

    Its buffers keep theirs: with rotary frequencies in bfloat16, the cosine of position 512 would be off by 0.4.
    """
    for parameter in module.parameters():  # first, or the device would hold both
        parameter.data = parameter.data.to(dtype)
    module.to(device)


def name_of(dtype: torch.dtype) -> str:
    """A dtype as the configuration names it, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def compiles(setting: bool | None, device: torch.device) -> bool:
    """Whether a pair's models are compiled, by its setting `compile`: if that is null, only on a CPU."""
    return device.type == "cpu" and os.environ.get(SWITCH) != "0" if setting is None else setting
