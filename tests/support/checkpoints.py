"""Checkpoints that something is wrong with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file


def spoil(folder: str | Path, change: Callable[[dict], object]) -> None:
    """Changes the tensors of a checkpoint."""
    state = load_file(f"{folder}/model.safetensors")
    change(state)
    save_file(state, f"{folder}/model.safetensors")


class RunsCode:
    """Runs code when a pickle of it is loaded."""

    def __reduce__(self):
        return (print, ("code ran",))
