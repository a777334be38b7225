"""What can be known of a configuration without weights: values, names and combinations that cannot work."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING

import hydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specbench.errors import UserError, near
from specbench.measure import metrics
from specbench.questions import load_questions, packaged, warmup_questions
from specbench.tracking import check as check_tracker

if TYPE_CHECKING:
    from specbench.decoding.draft import Needs

WHOLE_NUMBERS = {
    "batch_size": 1,
    "pool": 1,
    "repeats": 1,
    "seed": 0,
    "decoding.max_new_tokens": 1,
}  # and the least of each
OR_NULL = {"data.limit": 1, "vocab.size": 1, "threads": 1}
# To sample at: logits that are divided by less can overflow, and give no distribution.
LOWEST_TEMPERATURE = 1e-6
WORDS = {
    "protocol": ("paired", "spec_bench"),
    "pair.dtype": ("float32", "bfloat16", "float16"),
    "pair.init": ("pretrained", "random"),
}
# Of transformers and accelerate.
WORDS_OR_NULL = {"pair.device_map": ("auto", "balanced", "balanced_low_0", "sequential")}


def check(cfg: DictConfig) -> None:
    """Resolves the configuration; raises UserError for all that can be known to fail without weights."""
    try:
        OmegaConf.resolve(cfg)
        missing = OmegaConf.missing_keys(cfg)
    except OmegaConfBaseException as error:
        raise UserError(str(error)) from error
    if missing:
        raise UserError(f"there is no value for {', '.join(sorted(missing))}")
    check_values(cfg)
    check_tracker(cfg.tracker)
    needs = check_method(cfg)
    check_folders(cfg, needs)
    load_questions(cfg.data, cfg.task)
    warmup_questions(cfg.data)


def check_values(cfg: DictConfig) -> None:
    """Raises UserError for a number that is none or too small, and for a word that is not a known one."""
    for key, low in (WHOLE_NUMBERS | OR_NULL).items():
        value = OmegaConf.select(cfg, key)
        if value is None and key in OR_NULL:
            continue
        if type(value) is not int or value < low:
            raise UserError(f"{key} must be a whole number of at least {low}, not {value!r}")
    temperature = cfg.decoding.temperature
    fits = type(temperature) in (int, float) and (
        temperature == 0 or LOWEST_TEMPERATURE <= temperature < float("inf")
    )
    if not fits:
        raise UserError(
            f"decoding.temperature must be 0 (greedy) or a number of at least {LOWEST_TEMPERATURE}, not {temperature!r}"
        )
    if type(cfg.generate) is not bool:
        raise UserError(f"generate must be true or false, not {cfg.generate!r}")
    for key, known in (WORDS | WORDS_OR_NULL).items():
        value = OmegaConf.select(cfg, key)
        if value not in known and not (value is None and key in WORDS_OR_NULL):
            raise UserError(f"unknown {key} '{value}': {near(value, known)}")
    if cfg.pair.device_map is not None and cfg.pair.init == "random":
        raise UserError("pair.device_map spreads weights that are loaded: set pair.init=pretrained")
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(cfg.pair.device)):
        raise UserError(f"pair.device must be auto, cpu or cuda:0, not {cfg.pair.device!r}")


def check_method(cfg: DictConfig) -> Needs:
    """What the drafter needs. Raises UserError when pair or decoding lack it, or for an unknown parameter."""
    from specbench.decoding.batch import Scheduler  # late: a misspelt name need not wait for torch

    cls = hydra.utils.get_class(cfg.method._target_)
    takes = parameters(cls, "method", cfg.method)
    batched, what, group = issubclass(cls, Scheduler), "method", cfg.method
    if batched:
        what, group = "drafter", cfg.drafter
        cls = hydra.utils.get_class(group._target_)
        takes = parameters(cls, what, group)
    name = group.name
    if not batched and cfg.drafter.name != "none":
        raise UserError(
            f"method {name} drafts by itself: set drafter=none, or method=ragged drafter={cfg.drafter.name}"
        )

    needs = cls.needs
    if needs.draft_model and needs.part is None and cfg.pair.draft is None:
        raise UserError(
            f"{what} {name} needs a draft model and pair {cfg.pair.name} has none: set pair.draft"
        )
    required = [key for key, parameter in takes.items() if parameter.default is parameter.empty]
    by_hand = required and all(group.get(key) is not None for key in required)
    if needs.part is not None and cfg.pair.parts.get(needs.part) is None and not by_hand:
        training = f"python -m {group._target_.rpartition('.')[0]}.train pair={cfg.pair.name}"
        raise UserError(
            f"pair {cfg.pair.name} has no part '{needs.part}', which {what} {name} needs: "
            f"train it with `{training}`, then name it with ++pair.parts.{needs.part}=FOLDER"
        )
    check_vocab(cfg, what, group, takes)
    if batched and cfg.pool < cfg.batch_size:
        raise UserError(
            f"pool={cfg.pool} questions cannot fill batch_size={cfg.batch_size} rows: set pool higher"
        )
    if batched and cfg.pair.device_map is not None:
        raise UserError(
            f"method {cfg.method.name} needs the whole target on one device: set pair.device_map=null"
        )
    if batched and not needs.batching:
        raise UserError(f"drafter {name} cannot batch")
    if cfg.batch_size > 1 and not batched:
        way = (
            f"use method=ragged drafter={name} batch_size={cfg.batch_size}"
            if needs.batching
            else "set batch_size=1"
        )
        raise UserError(f"method {name} decodes one sequence at a time: {way}")
    if cfg.decoding.temperature > 0 and not needs.sampling:
        raise UserError(f"{what} {name} cannot sample: set decoding=greedy")
    return needs


def check_vocab(cfg: DictConfig, what: str, group: DictConfig, takes: dict) -> None:
    """Raises UserError where what `vocab` says of the head is not what the method or drafter of `group`, which `takes`
    these parameters, would draft with."""
    if cfg.vocab.name == "full":
        if cfg.vocab.map is not None or cfg.vocab.size is not None:
            raise UserError("vocab.map and vocab.size are of a trimmed head: set vocab=trim too")
        return
    name = group.name
    if "vocab_map" not in takes:
        raise UserError(f"{what} {name} has no head to trim: set vocab=full")
    own = group.get("vocab_map"), group.get("vocab_size")
    if own[0] is None:
        raise UserError(
            f"pair {cfg.pair.name} has no vocabulary map: make one with `python -m methods.vocab_trim.calibrate "
            f"pair={cfg.pair.name}`, then name it with vocab.map=FOLDER"
        )
    if own != (cfg.vocab.map, cfg.vocab.size):
        raise UserError(
            f"{what} {name} has a head of its own: {what}.vocab_map={own[0]} "
            f"{what}.vocab_size={own[1]}; set these, too, to what vocab.map and vocab.size are"
        )


def parameters(cls: type, what: str, group: DictConfig) -> dict[str, inspect.Parameter]:
    """What a method or drafter can be made with. Raises UserError for a parameter that it does not have."""
    takes = {key: p for key, p in inspect.signature(cls).parameters.items() if key != "pair"}
    for key in metrics.parameters(group):
        if key not in takes:
            raise UserError(f"{what} {group.name} has no parameter '{key}': {near(key, takes)}")
    return takes


def check_folders(cfg: DictConfig, needs: Needs) -> None:
    """Raises UserError when a model, tokenizer or part that will be read is a path where no folder is."""
    from specbench.pairs import local_folder  # late: a misspelt name need not wait for torch

    names = [cfg.pair.target, cfg.pair.tokenizer, needs.draft_of(cfg.pair)]
    if needs.part is not None:
        names.append(cfg.pair.parts.get(needs.part))
    for name in names:
        if name is not None:
            local_folder(name)
    if cfg.vocab.map is not None and not packaged(cfg.vocab.map).is_dir():
        raise UserError(f"there is no folder '{cfg.vocab.map}' with a vocabulary map")
