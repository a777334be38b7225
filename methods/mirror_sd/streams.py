"""The embeddings of a draft model's streams, a file in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from methods.common.checkpoints import fetched
from specbench.system.errors import UserError
from specbench.system.files import share_weights
from specbench.system.paths import packaged

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from specbench.models.expansion import Expansion

FILE, NAME = "streams.safetensors", "streams"


def save_streams(streams: torch.Tensor, folder: str | Path) -> None:
    """Writes [s, d] embeddings into the folder of their draft model."""
    save_file({NAME: streams.cpu().contiguous()}, Path(folder) / FILE)
    share_weights(Path(folder))


def load_streams(
    folder: str | Path, model: PreTrainedModel, expansion: Expansion | None = None
) -> torch.Tensor:
    """The embeddings of the streams of a draft model.

    Args:
        folder: of the draft model, as a configuration names it, or a hub id.
        model: the draft model.
        expansion: how it was expanded; None if it was not.

    Returns:
        [s, d] in the draft model's dtype, on its device.

    Raises:
        UserError: they are missing, or another model's.
    """
    path = fetched(packaged(folder), [FILE]) / FILE
    if not path.is_file():
        raise UserError(
            f"there is no {FILE} in '{folder}': train it with `specbench train mirror_sd pair=...`"
        )
    try:
        streams = load_file(path)[NAME]
    except (SafetensorError, KeyError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    embeddings: Any = model.get_input_embeddings()
    width = embeddings.weight.shape[1] if expansion is None else expansion.old.hidden
    if streams.dim() != 2 or streams.shape[1] != width:
        raise UserError(
            f"{path} holds streams of shape {list(streams.shape)}; the draft model is {width} wide"
        )
    streams = streams if expansion is None else expansion.pad(streams)
    return streams.to(model.device, model.dtype)
