"""The folder of a training: what it began with, whether it is finished or resumes, and the record of its data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.data.contamination import stages
from specbench.data.conversations import count_left_out, data_set_of
from specbench.data.questions import questions_sha256
from specbench.models.weight_files import digests
from specbench.system.errors import UserError
from specbench.system.files import file_sha256, read_json
from specbench.system.paths import packaged
from specbench.system.settings import plain

if TYPE_CHECKING:
    from omegaconf import DictConfig

LOG, CONDITIONS, RECORD = "train_log.jsonl", "conditions.json", "training.json"
DATASTORE = "datastore.json"  # the record of a part that is a text to look up in, not weights
STATES = "states.json"  # the record of a target's stored states
# Settings that may change before a training resumes; of the text, only the content matters, not the path.
FREE = ("out", "save_every", "save_dtype", "conversations", "states", "data", "task")
# Likewise, keys of the pair: those for device and speed, and the parts trained so far.
FREE_OF_PAIR = ("parts", "limit", "max_new_tokens", "graphs", "compile", "device", "device_map")
# Older files lack them, and a model may not be fetched yet.
ONLY_IF_KNOWN = ("target_files", "tokenizer_files")


def conditions(cfg: DictConfig) -> dict[str, Any]:
    """The settings, the target and the text, which must be the same for a training to resume."""
    settings = {key: value for key, value in plain(cfg).items() if key not in FREE}
    settings["pair"] = {key: value for key, value in settings["pair"].items() if key not in FREE_OF_PAIR}
    target = digests(settings["pair"]) if "target" in settings["pair"] else {}  # that is what is trained
    states = _stored_states(cfg)
    text = {
        "conversations": data_of(cfg),
        "questions": questions_of(cfg) if states is None else states.get("questions"),
        # Stored states have another order of rows, and keep only the `top` tokens of the target's distributions.
        "states": None if states is None else {key: states.get(key) for key in ("precision", "rows", "top")},
    }
    return settings | target | text | {"processes": int(os.environ.get("WORLD_SIZE", 1))}


def data_of(cfg: DictConfig) -> str:
    """Identifies a training's text: a file's sha256, a data set's commit and split, or a stream's settings."""
    if cfg.conversations is None:
        settings = plain(cfg.pair.training)
        name = settings.pop("_target_")
        return (
            f"{name}({', '.join(f'{key}={value}' for key, value in settings.items())})" if settings else name
        )
    path = packaged(cfg.conversations)
    if path.is_file():
        return f"sha256:{file_sha256(path)}"
    name, revision = data_set_of(cfg.conversations)
    return f"{name}{f'@{revision}' if revision else ''}:{cfg.split}"


def questions_of(cfg: DictConfig) -> str | None:
    """sha256 of the questions that conversations must not hold; None: there are none to look for."""
    return None if cfg.get("data") is None else questions_sha256(cfg.data)


def _stored_states(cfg: DictConfig) -> dict[str, Any] | None:
    """The record of the states that a training reads; None if it computes them."""
    return None if cfg.get("states") is None else read_json(Path(cfg.states) / STATES)


def is_finished(cfg: DictConfig) -> bool:
    """Whether the folder of a training holds its result; prints the folder if so.

    Raises:
        UserError: it holds the result of another training, an incomplete result, or a model that no training has made.
    """
    out = Path(cfg.out)
    if not (out / RECORD).exists():
        if (out / "config.json").exists() and not (out / "checkpoints").exists():
            raise UserError(f"{out} holds a model that no training run wrote: name another folder with out=")
        return False
    if not (out / CONDITIONS).exists():
        raise UserError(
            f"{out} holds a finished training without {CONDITIONS}, which records its settings: "
            "remove it to start anew, or name another folder with out="
        )
    now = conditions(cfg)
    if "save_dtype" in read_json(out / CONDITIONS):  # older files do not tell
        now["save_dtype"] = cfg.get("save_dtype")
    check_same_training(out, out / CONDITIONS, now)
    missing = [name for name in read_json(out / RECORD).get("weights", ()) if not (out / name).is_file()]
    if missing:
        raise UserError(
            f"{out} holds a finished training without {', '.join(missing)}: remove it to start anew, or name another "
            "folder with out="
        )
    print(f"already there: {out}")
    return True


def check_stopped(cfg: DictConfig) -> None:
    """Raises UserError if the folder of a training holds a state of another one; for use before weights are loaded."""
    state = newest_state(Path(cfg.out) / "checkpoints")
    if state is not None:
        check_same_training(state.parent, state / CONDITIONS, conditions(cfg))


def check_same_training(folder: Path, file: Path, now: dict[str, Any]) -> dict[str, Any]:
    """Returns the conditions in a file. Raises UserError if they differ from `now`."""
    then = read_json(file)
    if isinstance(then.get("pair"), dict):  # older files hold the whole pair
        then["pair"] = {key: value for key, value in then["pair"].items() if key not in FREE_OF_PAIR}
    unknown = {key for key in ONLY_IF_KNOWN if None in (then.get(key), now.get(key))}
    keys = sorted((then.keys() | now.keys()) - {"torch_threads"} - unknown)
    differing = [key for key in keys if then.get(key) != now.get(key)]
    if foreign := [key for key in differing if key in then.keys() ^ now.keys()]:
        raise UserError(
            f"{folder} holds a training of another trainer or version (only one of the two has {', '.join(foreign)}): "
            "remove it to start anew, or name another folder with out="
        )
    if differing:
        key = differing[0]
        had, has = then.get(key), now.get(key)
        if isinstance(had, dict) and isinstance(has, dict):  # of the pair: the setting that differs
            inner = next(name for name in sorted(had.keys() | has.keys()) if had.get(name) != has.get(name))
            key, had, has = f"{key}.{inner}", had.get(inner), has.get(inner)
        raise UserError(
            f"{folder} holds a training with {key}={had}, not {has}: "
            "give its settings to continue, remove it to start over, or name another folder with out="
        )
    return then


def saved(cfg: DictConfig) -> str | None:
    """Where a stopped training resumes; None if it starts over."""
    state = newest_state(Path(cfg.out) / "checkpoints")
    return None if state is None else f"step {steps_of(state)}"


def newest_state(checkpoints: Path) -> Path | None:
    """The newest complete state of a stopped training; None if there is none."""
    return max(checkpoints.glob("state-*"), key=steps_of, default=None)


def steps_of(state: Path) -> int:
    """Number of steps that led to a state."""
    return int(state.name.removeprefix("state-"))


def record_of(
    cfg: DictConfig,
    began_with: dict[str, Any],
    left_out: int | None,
    processes: int,
    figures: dict[str, float],
    begins: str,
    earlier: list[dict],
) -> dict:
    """The record of a training's data and figures; only trainings on the same data, over all stages, are comparable."""
    tokens = cfg.steps * cfg.accumulate * processes * cfg.batch_size * cfg.length
    return {
        "begins": begins,
        "data": began_with["conversations"],
        "questions": began_with["questions"],
        "left_out": left_out,
        "states": began_with["states"],
        "steps": cfg.steps,
        "tokens": tokens,
        "tokens_in_all": tokens + sum(stage["tokens"] for stage in earlier),
        "loss_tokens": cfg.get("loss_tokens"),
        "vocab_sample": cfg.get("vocab_sample"),
        "prompt_weight": cfg.prompt_weight,
        "seed": cfg.seed,
        **figures,
        "earlier": earlier,
    }


def left_out_of(cfg: DictConfig) -> int | None:
    """Number of conversations left out of a training's text; None if that was not counted."""
    record = _stored_states(cfg)
    return count_left_out(cfg) if record is None else record.get("left_out")


def stages_of(folder: str | Path | None) -> list[dict]:
    """The records of all training stages of a folder's content, the first one first; [] if there are none."""
    path = None if folder is None else packaged(folder) / RECORD
    if path is None or not path.is_file():
        return []
    return stages(read_json(path))
