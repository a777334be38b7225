"""The device of the models: how numbers of the host get there without a wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import numpy as np


def on_device(
    values: Sequence | np.ndarray, device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Copies numbers of the host, an array or nested lists of equal lengths, to a device.

    On a GPU, `torch.tensor(values, device=...)`, like an index that is a list, waits until all queued work is done.
    This function does not: it copies from pinned memory.
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
