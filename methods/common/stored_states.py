"""A target's stored states (`specbench states`): the files of a folder, and the batches that trainers read from them.

The folder holds flat files, to which rows are appended:

    ids.bin [rows, length] int32, weights.bin [rows, length] float32, hidden_<tap>.bin [rows, length, d] bfloat16,
    likeliest.bin [rows, length, top] int32, probs.bin [rows, length, top] bfloat16: of the token that follows

`held_out/` has the same for rows that are never trained on.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from methods.common.losses import LIKELIEST, PROBS
from specbench.config.compose import words_of_pair
from specbench.data.conversations import Tokens, conversations, packed_rows, tokenizer_of
from specbench.data.training_folder import STATES as RECORD
from specbench.data.training_folder import data_of
from specbench.decoding.state import NORMED
from specbench.models.pairs import Pair
from specbench.system.errors import UserError
from specbench.system.files import read_record
from specbench.system.paths import packaged
from specbench.system.settings import Count, Natural, check

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from transformers import PreTrainedModel

    from specbench.data.training import Batch

HELD_OUT, IDS = "held_out", "ids.bin"
HIDDEN = "hidden_"  # prefix of a batch's keys for states
ANEW = "remove the folder, and `specbench states` makes it anew"
SAMPLED = 64  # values of each weight, which identify a target
TOO_MANY = 10_000  # conversations in a row without anything to learn from
Item = TypeVar("Item")
# What rows depend on: a trainer must ask for the same.
SAME = ("length", "prompt_weight", "seed")
# What the sizes of files depend on.
OF_FILES = {"hidden_size": Count, "taps": list[int], "top": Natural}


def key_of(tap: int) -> str:
    """Returns a batch's key for the states of a tap."""
    return f"{HIDDEN}{'normed' if tap == NORMED else tap}"


def arrays_for(taps: Iterable[int] = ()) -> frozenset[str]:
    """Returns what a training reads beside ids and weights: these depths, the normed states, the distributions."""
    return frozenset({LIKELIEST, PROBS, *map(key_of, (*taps, NORMED))})


FINALS = arrays_for()


def check_context(cfg: DictConfig, pair: Pair) -> None:
    """Raises UserError if rows of `cfg.length` tokens do not fit into the context of a pair."""
    if cfg.length > pair.context_length:
        raise UserError(f"length={cfg.length} does not fit into the context of {pair.context_length} tokens")


def states_of(decoder: Any, ids: torch.Tensor, taps: Collection[int]) -> dict[int, torch.Tensor]:
    """The states [B, T, d] of each tap of token ids [B, T], from a model without its head; on the device of the ids."""
    inner = any(tap != NORMED for tap in taps)
    output = decoder(ids, use_cache=False, output_hidden_states=inner)
    states = {tap: output.last_hidden_state if tap == NORMED else output.hidden_states[tap] for tap in taps}
    return {tap: state.to(ids.device) for tap, state in states.items()}


def rows_of(
    cfg: DictConfig, pair: Pair, held_out: bool = False, epochs: int | None = None
) -> Iterator[Tokens]:
    """Packed rows of `cfg.length` tokens of conversations, endless unless `epochs` are given."""
    tokenize = tokenizer_of(pair, cfg.prompt_weight)
    full_rows = (row for messages in conversations(cfg, held_out, epochs) for row in tokenize(messages))
    cut = ((ids[: cfg.length], weights[: cfg.length]) for ids, weights in full_rows)
    pad_id = pair.tokenizer.pad_token_id
    which = "those that are held out of the conversations" if held_out else "the conversations"
    lacking = f"{which} hold nothing that the assistant says within {cfg.length} tokens"
    answered = wanted(cut, lambda row: 1.0 in row[1], lacking)
    return packed_rows(answered, cfg.length, min(pair.stop_ids, default=0) if pad_id is None else pad_id)


def wanted(items: Iterable[Item], is_wanted: Callable[[Item], bool], lacking: str) -> Iterator[Item]:
    """The items that are wanted. Raises UserError with the text `lacking` if none comes for long, or none at all."""
    skipped, none_yet = 0, True
    for item in items:
        skipped = 0 if is_wanted(item) else skipped + 1
        if not skipped:
            none_yet = False
            yield item
        elif skipped > TOO_MANY:
            raise UserError(lacking)
    if none_yet:
        raise UserError(lacking)


def text_facts(cfg: DictConfig) -> dict[str, Any]:
    """What the rows of a folder depend on."""
    return {"data": data_of(cfg)} | {name: cfg[name] for name in SAME}


def facts(cfg: DictConfig, pair: Pair) -> dict[str, Any]:
    """What the rows and states of a folder depend on."""
    width = pair.target.config.get_text_config().hidden_size
    of_pair = {"hidden_size": width, "target_sha256": target_sha256(pair.target), "prompting": pair.prompting}
    return text_facts(cfg) | of_pair


@torch.no_grad()
def target_sha256(target: PreTrainedModel) -> str:
    """Hex digest of some values of every weight, in bfloat16: the same for a target in float32 and in bfloat16."""
    digest = hashlib.sha256()
    for weight in target.parameters():
        values = weight.flatten()[:: max(1, weight.numel() // SAMPLED)][:SAMPLED]
        digest.update(values.to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()


def command_for(cfg: DictConfig) -> str:
    """The command that stores the states which a training reads."""
    text = "tokens=1000000" if cfg.conversations is None else f"conversations={cfg.conversations}"
    if cfg.conversations is not None and not packaged(cfg.conversations).is_file():
        text += f" split={cfg.split}"
    same = " ".join(f"{name}={cfg[name]}" for name in SAME)
    # Those of EAGLE-3's and DFlash's kinds depend on how many layers the target has.
    unknown = ["DEPTHS"] if cfg.keys() & {"draft_vocab", "taps"} else []
    depths = ",".join(map(str, [*([cfg.exit_layer] if "exit_layer" in cfg else unknown), NORMED]))
    return f"specbench states {shlex.join(words_of_pair(cfg.pair.name))} {text} {same} taps=[{depths}] out=FOLDER"


def arrays_of(record: dict[str, Any]) -> dict[str, tuple[type, int]]:
    """Returns the files of a folder (NAME.bin) by their key in a batch: dtype, and number of values per token.

    Integers of 16 bits are bfloat16, which numpy lacks.
    """
    arrays: dict[str, tuple[type, int]] = {"ids": (np.int32, 1), "weights": (np.float32, 1)}
    arrays |= {key_of(tap): (np.int16, record["hidden_size"]) for tap in record["taps"]}
    if top := record["top"]:
        arrays |= {LIKELIEST: (np.int32, top), PROBS: (np.int16, top)}
    return arrays


def row_sizes(folder: Path, length: int, record: dict[str, Any]) -> dict[Path, int]:
    """Bytes of a row in each file of a folder."""
    return {
        folder / f"{name}.bin": length * width * np.dtype(kind).itemsize
        for name, (kind, width) in arrays_of(record).items()
    }


def check_states(cfg: DictConfig) -> None:
    """Checks the folder `cfg.states` of a training as far as possible without weights.

    Raises:
        UserError: it is not finished or is damaged, holds other rows, or lacks what the training needs.
    """
    for held_out in (False, True):
        record = _record(cfg, text_facts(cfg), held_out)
        if cfg.vocab_sample is not None and not record["top"]:
            raise UserError(
                f"vocab_sample needs the target's likeliest tokens, and the states in '{cfg.states}' have none: "
                "make them with top=64"
            )


def _record(cfg: DictConfig, wanted: dict[str, Any], held_out: bool) -> dict[str, Any]:
    """The record of the rows in `cfg.states`.

    Raises UserError if it or a file beside it is damaged, if it has other facts, or if there are too few rows.
    """
    folder = _folder(cfg, held_out)
    if not (folder / RECORD).is_file():
        raise UserError(f"there are no states in '{folder}': `specbench states` makes them")
    record = read_record(folder / RECORD)
    for name, kind in OF_FILES.items():
        check(f"{folder / RECORD}: {name}", record.get(name), kind)
    for name, value in wanted.items():
        if record.get(name, value) != value:
            raise UserError(f"the states in '{folder}' have {name}={record[name]}; the training has {value}")
    sizes = row_sizes(folder, cfg.length, record)
    if missing := [path for path in sizes if not path.is_file()]:
        raise UserError(f"the states in '{folder}' lack {missing[0].name}: {ANEW}")
    count, least = _count(cfg, folder), 1 if held_out else cfg.batch_size
    if damaged := [path for path, size in sizes.items() if path.stat().st_size != count * size]:
        raise UserError(f"{damaged[0]} does not hold {count} rows, as {IDS} does: {ANEW}")
    if count < least:
        raise UserError(f"'{folder}' holds {count} rows, fewer than batch_size={least}")
    return record


def _folder(cfg: DictConfig, held_out: bool) -> Path:
    return Path(cfg.states) / (HELD_OUT if held_out else "")


def _count(cfg: DictConfig, folder: Path) -> int:
    return (folder / IDS).stat().st_size // (4 * cfg.length)


def batches_of_states(
    cfg: DictConfig,
    pair: Pair,
    held_out: bool = False,
    start: int = 0,
    stride: int = 1,
    arrays: Collection[str] | None = None,
) -> Iterator[Batch]:
    """Yields batches of the rows in `cfg.states` endlessly, each epoch in a new order.

    There are few held-out rows: a batch may have fewer than `cfg.batch_size`.

    Args:
        cfg: settings of the trainer.
        pair: with the target.
        held_out: whether the rows are those that are never trained on.
        start: batches in front of the first one; those that are skipped are not read.
        stride: every `stride`-th batch is yielded.
        arrays: keys of a batch beside ids and weights; None: those of the states of all taps, and of the
            distributions.

    Raises:
        UserError: the folder is not finished, or holds the states of other rows or of another target, or too few.
    """
    folder, record = _folder(cfg, held_out), _record(cfg, facts(cfg, pair), held_out)
    files = {
        name: np.memmap(folder / f"{name}.bin", kind, "r").reshape(-1, cfg.length, width)
        for name, (kind, width) in arrays_of(record).items()
        if arrays is None or name in {"ids", "weights", *arrays}
    }
    count = _count(cfg, folder)
    size = min(cfg.batch_size, count)
    generator = torch.Generator().manual_seed(cfg.seed)

    def drawn() -> Iterator[np.ndarray]:
        while True:
            order = torch.randperm(count, generator=generator).numpy()
            yield from (order[i : i + size] for i in range(0, count - size + 1, size))

    for rows in islice(drawn(), start, None, stride):
        chosen = np.sort(rows)
        batch: Batch = {}
        for name, file in files.items():
            tensor = torch.from_numpy(file[chosen])
            batch[name] = tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor
        ids, weights = batch.pop("ids").squeeze(-1).long(), batch.pop("weights").squeeze(-1)
        yield {"input_ids": ids, "loss_weight": weights} | batch
