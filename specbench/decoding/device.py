"""The device of the models: how it is prepared, and how numbers get there without a wait for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np


def prepare_device(device: torch.device) -> None:
    """Makes a GPU ready to decode on; on a CPU there is nothing to do.

    It becomes the current device of this process, for whatever names none. Attention never takes cuDNN's kernels: those
    need a plan, tens of ms of the host's time, for each new number of keys, and every decoded token is a new number.
    That holds for the whole process, and so for transformers' generate, too.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.enable_cudnn_sdp(False)


def place_weights(module: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Moves a module to a device, and its parameters alone to a dtype.

    Its buffers keep theirs: frequencies of rotary positions in bfloat16 put the cosine of position 512 wrong by 0.4.
    """
    module.to(device)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def on_device(
    values: Sequence | np.ndarray, device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Numbers of the host, an array or nested lists of equal lengths, on a device.

    `torch.tensor(values, device=...)`, like an index that is a list, waits on a GPU until all that is queued there is
    done. This does not: the numbers are copied from pinned memory.
    """
    numbers = torch.tensor(values, dtype=dtype)
    # Pinned afterwards: torch.tensor(array, pin_memory=True) is refused for an array of numpy.
    return numbers if device.type == "cpu" else numbers.pin_memory().to(device, non_blocking=True)


def span(starts: torch.Tensor, n: int) -> torch.Tensor:
    """[b, n] the n positions from `starts` [b] on."""
    return starts.unsqueeze(1) + torch.arange(n, device=starts.device)


def move_slots(buffer: torch.Tensor, sources: Sequence[int], destinations: Sequence[int]) -> None:
    """Copies entries of a buffer [slots, ...] to others, all at once, without a wait; see `Slots.move`."""
    both = on_device([sources, destinations], buffer.device)
    buffer[both[1]] = buffer[both[0]]
