"""Makes what every method needs for one target: `specbench parts pair=smollm2-135m`.

The target writes conversations, its states of them are stored, and every part learns from these, for the same number of
tokens: a table then compares methods, not training sets. A step whose result exists is skipped; a stopped step
continues where it was stopped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from omegaconf import OmegaConf

from methods.common.build import Step, run_all
from methods.common.stored_states import RECORD as STATES
from methods.common.stored_states import check_context
from specbench import CONF
from specbench.config.checks import check_sources
from specbench.config.compose import program, words_of_pair
from specbench.config.overrides import quoted
from specbench.data.conversations import check_prompt_weight, check_source
from specbench.data.training import training_pair
from specbench.data.training_folder import RECORD
from specbench.decoding.state import NORMED
from specbench.models.pairs import load_pair
from specbench.system.errors import UserError
from specbench.system.files import make_folder
from specbench.system.paths import packaged
from specbench.system.settings import Count, NotNegative, Range, Seed, Threads, check, check_all, plain

if TYPE_CHECKING:
    from omegaconf import DictConfig

SETTINGS = {
    "conversations": str | None,
    "tokens": Count,
    "states_tokens": Count | None,
    "taps": list[int] | None,
    "steps": Count,
    "batch_size": Count,
    "length": Annotated[int, Range(2)],
    "loss_tokens": Count | None,
    "vocab_sample": Count | None,
    "prompt_weight": NotNegative,
    "seed": Seed,
    "save_every": Count,
    "cores": Threads,
    "out": str,
}
PART = {"module": str, "result": str | None, "draft": str | None, "settings": dict}
TEXT = ("length", "prompt_weight", "seed", "precision")  # of states and of those that read them
ALIKE = ("steps", "batch_size", "loss_tokens", "vocab_sample", "save_every")
# Settings that name layers of the target.
DEPTHS = {"exit_layer": int, "taps": Count | list[int] | None, "layers": Count | list[int] | None}
UNQUOTED = re.compile(r"[\w./:@+-]+", re.ASCII)  # what Hydra takes unquoted
EAGLE3 = ("methods.eagle3.train", "methods.peagle.train")  # without a setting, they read its depths


def arguments(settings: Mapping[str, Any]) -> list[str]:
    """Settings as words of Hydra's command line."""
    return [f"{key}={_written(value)}" for key, value in settings.items()]


def _written(value: object) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    text = str(value)
    return text if UNQUOTED.fullmatch(text) else quoted(text)


def checked_parts(cfg: DictConfig, layers: int) -> dict[str, dict[str, Any]]:
    """The parts to make, with settings for a target of `layers` layers.

    Raises:
        UserError: a part has an unknown key, a value of a wrong type, or a draft model that is not made before it.
    """
    from methods.dflash.model import default_taps  # late: it takes seconds to import
    from methods.eagle3.model import default_taps as eagle3_taps

    checked = {}
    for name, part in plain(cfg.parts).items():
        if part is None:
            continue
        for key, kind in PART.items():
            check(f"parts.{name}.{key}", part.get(key), kind)
        if unknown := part.keys() - PART.keys():
            raise UserError(f"unknown key 'parts.{name}.{min(unknown)}': a part has {', '.join(PART)}")
        settings = part["settings"] = trainers_depths(part["module"]) | part["settings"]
        for key in DEPTHS.keys() & settings:
            check(f"parts.{name}.settings.{key}", settings[key], DEPTHS[key])
        match settings:
            case {"taps": None}:
                settings["taps"] = list(eagle3_taps(layers))
            case {"taps": int(count)}:
                settings["taps"] = list(default_taps(layers, count))
            case {"layers": [*indices]}:
                settings["layers"] = [i + layers if i < 0 else i for i in indices]
        checked[name] = part
    _check_drafts(checked)
    return checked


def trainers_depths(module: str) -> dict[str, Any]:
    """The settings of a trainer, by its module, that name depths of the target, as conf/train_NAME.yaml has them."""
    file = CONF / f"train_{module.rpartition('.')[0].rpartition('.')[2]}.yaml"
    settings: Any = OmegaConf.to_container(OmegaConf.load(file)) if file.is_file() else {}
    return {key: settings[key] for key in ("taps", "exit_layer") if key in settings}


def _check_drafts(parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises UserError if a part needs a draft model that is not made before it."""
    for name, part in parts.items():
        draft = part.get("draft")
        if draft is not None and (draft not in parts or parts[draft].get("draft") is not None):
            raise UserError(
                f"parts.{name} needs the part '{draft}', which is not made before it: set parts.{name}=null, too, or "
                f"another parts.{name}.draft"
            )


def taps_of(cfg: DictConfig, parts: Mapping[str, Mapping[str, Any]], layers: int) -> list[int]:
    """The depths of a target of `layers` layers whose states are kept.

    Raises:
        UserError: a part reads a depth that the target does not have, or that is not among those configured.
    """
    from methods.eagle3.model import default_taps  # late, as above

    read = {NORMED: "every part"}
    for name, part in parts.items():
        settings = part["settings"]
        depths = settings.get("taps", [settings["exit_layer"]] if "exit_layer" in settings else [])
        if part["module"] in EAGLE3:
            depths = default_taps(layers)
        read |= {depth: f"parts.{name}" for depth in depths}
    for depth, name in read.items():
        if not NORMED <= depth < layers:
            raise UserError(
                f"{name} reads the depth {depth}, and the target has the depths 0 to {layers - 1}"
            )
        if cfg.taps is not None and depth not in cfg.taps:
            raise UserError(f"taps lacks the depth {depth}, which {name} reads: set taps=null")
    return [*sorted(read.keys() - {NORMED}), NORMED] if cfg.taps is None else list(cfg.taps)


def steps(cfg: DictConfig, pair: Sequence[str], layers: int) -> list[list[Step]]:
    """Returns all steps; those of one group are independent.

    Args:
        cfg: conf/parts.yaml.
        pair: the arguments that name the pair.
        layers: of the target.

    Raises:
        UserError: as `checked_parts` and `taps_of`.
    """
    checked = checked_parts(cfg, layers)
    out = Path(cfg.out)
    conversations = out / "conversations.jsonl" if cfg.conversations is None else packaged(cfg.conversations)
    text = arguments({"conversations": conversations} | {key: cfg[key] for key in TEXT})
    states = out / "states"
    written = arguments({"tokens": cfg.tokens, "out": conversations})
    converse = ("specbench.commands.converse", *pair, *written)
    keep = {"taps": taps_of(cfg, checked, layers), "tokens": cfg.states_tokens, "out": states}
    groups = [[Step("states", 30, states / STATES, ("methods.states", *pair, *text, *arguments(keep)))]]
    if cfg.conversations is None:
        groups.insert(0, [Step("conversations", 300, conversations.with_suffix(".done"), converse)])
    alike = {key: cfg[key] for key in ALIKE} | {"states": states, "threads": 1}
    parts: list[Step] = []
    later: list[Step] = []  # these need another part's draft model
    for name, part in checked.items():
        folder = out / "weights" / name
        shared, settings = arguments({"conversations": conversations, "seed": cfg.seed}), part["settings"]
        if part.get("result") is None:  # it is trained
            shared, settings = text, alike | settings
        draft = part.get("draft")
        drafts = {} if draft is None else {"pair.draft": out / "weights" / draft}
        words = arguments(settings | {"out": folder})
        command = (part["module"], *pair, *arguments(drafts), *shared, *words)
        step = Step(name, cfg.steps / 30, folder / (part.get("result") or RECORD), command)
        (parts if draft is None else later).append(step)
    return [*groups, parts, later]


def make(cfg: DictConfig) -> None:
    """Makes all parts as configured (conf/parts.yaml), or continues with them."""
    check_all(cfg, SETTINGS)
    check_prompt_weight(cfg.prompt_weight)
    check_sources(OmegaConf.masked_copy(cfg, ["pair"]))
    if cfg.conversations is not None:  # else the target writes its own
        check_source(cfg.conversations, cfg.pair)
    pair = words_of_pair(cfg.pair.name)
    out = Path(cfg.out)
    loaded = load_pair(training_pair(cfg.pair), cfg.seed, with_draft=False, weights=False)
    check_context(cfg, loaded)
    layers = loaded.target.config.get_text_config().num_hidden_layers
    groups = steps(cfg, pair, layers)
    run_all(groups, make_folder(out / "logs"), cfg.cores, cfg.pair.name)
    print(out / "weights")


main = program("parts", make)
