"""Was a trained part made for this target? Seen from its folder, before weights are loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.config.folders import base_pair, group_file
from specbench.data.training_folder import CONDITIONS
from specbench.system.errors import UserError
from specbench.system.files import read_record
from specbench.system.paths import packaged

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from specbench.decoding.drafter import Needs

CONFIG = "config.json"  # of a model or a part
SIZES = {"hidden_size": "wide", "num_hidden_layers": "layers deep"}  # of a target, with words for messages


def check_part(pair: DictConfig, needs: Needs, folders: Iterable[Any]) -> None:
    """Compares the target that a trained part was made for with the pair's, as far as both are certain.

    A part that is a draft model, or looks up text, also serves other targets. An expanded target and its parts are
    compared by their sizes before expansion; vocabularies are not, since a target may be padded.

    Args:
        pair: the configuration, with the models that will be loaded.
        needs: of the drafter.
        folders: values of the settings that name its weights.

    Raises:
        UserError: The part was made for a target of another width or depth.
    """
    if needs.part is None or needs.draft_model or needs.text_alone:
        return
    target = target_sizes(pair)
    for folder in folders:
        sizes, origin = sizes_made_for(folder, needs.part) if isinstance(folder, str) else ({}, "")
        if any(target.get(key, size) != size for key, size in sizes.items()):
            raise UserError(
                f"the part in '{folder}' is for a target {_size_words(sizes)}{origin}, but the target of pair "
                f"{pair.name} is {_size_words(target)}: name another folder as pair.parts.{needs.part}"
            )


def sizes_made_for(folder: str, part: str) -> tuple[dict[str, int], str]:
    """The sizes of the target that a trained part was made for, as far as its folder records them, and " (pair NAME)".

    Args:
        folder: of the part; a missing one yields no sizes.
        part: its name. The config.json of this project's parts names the width of the target.
    """
    sizes: dict[str, int] = {}
    if part in base_pair()["parts"]:
        settings = _json(packaged(folder) / CONFIG)
        settings |= settings.get("transformer_layer_config") or {}
        width = settings.get("target_hidden_size") or settings.get("hidden_size")
        sizes = {"hidden_size": width} if isinstance(width, int) else {}
    trained = _json(packaged(folder) / CONDITIONS).get("pair") or {}
    # Its target is read unless it was expanded (the part is wider) or its relative path may name another one now.
    if not trained or trained["init"] == "expanded" or _is_relative_folder(trained["target"]):
        return sizes, ""
    return sizes | target_sizes(trained), f" (pair {trained['name']})"


def target_sizes(pair: Mapping[str, Any]) -> dict[str, int]:
    """The `SIZES` of a pair's target before expansion, as far as they are certain without weights.

    They are read from its config.json if it is a folder; else from the pair's shape, if the target is still the one of
    the pair's YAML or is made from that shape.
    """
    settings: Mapping[str, Any] = _json(packaged(pair["target"]) / CONFIG)
    settings = settings.get("text_config") or settings
    if not settings and (
        pair["init"] == "random" or pair["target"] == group_file("pair", pair["name"]).get("target")
    ):
        settings = pair["target_shape"] or {}
    return {key: settings[key] for key in SIZES if isinstance(settings.get(key), int)}


def _is_relative_folder(name: str) -> bool:
    """Whether a model's name is a folder of the working directory."""
    return not packaged(name).is_absolute() and packaged(name).exists()


def _size_words(sizes: Mapping[str, int]) -> str:
    """Sizes as messages write them: "128 wide and 24 layers deep"."""
    return " and ".join(f"{sizes[key]} {word}" for key, word in SIZES.items() if key in sizes)


def _json(file: Path) -> dict[str, Any]:
    """The content of a JSON file; {} if there is none. Raises UserError if it is damaged."""
    return read_record(file) if file.is_file() else {}
