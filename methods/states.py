"""A target's states of conversations, computed once and kept on the disk: `python -m methods.states taps=[...]`.

Trainers that are given the folder as `states=FOLDER` read rows, weights and states from it, so that an epoch costs what
is trained, not a pass of the target. The folder holds flat files, to which rows are appended: a command that was
stopped goes on with the row that follows.

    ids.bin [rows, length] int32, weights.bin [rows, length] float32, hidden_<tap>.bin [rows, length, d] bfloat16,
    likeliest.bin [rows, length, top] int32, probs.bin [rows, length, top] bfloat16: of the token that follows

`held_out/` has the same of rows that are never trained on.
"""

from __future__ import annotations

import hashlib
import json
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch
from tqdm import tqdm

from methods.common.losses import CHUNK, LIKELIEST, PROBS, Head
from specbench.config.compose import with_hydra
from specbench.data.conversations import Tokens, batched, conversations, packed_rows, tokenizer_of
from specbench.data.training import data_of
from specbench.decoding.state import NORMED
from specbench.models.pairs import Pair, load_pair
from specbench.system.errors import UserError, one_line_errors
from specbench.system.files import check_settings, write_json
from specbench.system.settings import Count, Range, Seed, check_all

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from omegaconf import DictConfig
    from transformers import PreTrainedModel

    from specbench.data.training import Batch

RECORD, BEGUN, IDS, WEIGHTS = "states.json", "begun.json", "ids.bin", "weights.bin"
SAMPLED = 64  # values of each weight, which tell targets apart
HELD_OUT, HELD_OUT_ROWS = "held_out", 64
TOO_MANY = 10_000  # conversations in a row without anything to learn from
# What rows depend on: a trainer must ask for the same.
SAME = ("length", "prompt_weight", "seed")
SETTINGS = {
    "length": Count,
    "batch_size": Count,
    "tokens": Count | None,
    "seed": Seed,
    "taps": list[int],
    "top": Annotated[int, Range(0)],
    "precision": Literal["no", "bf16"],
}


def key_of(tap: int) -> str:
    """What a batch calls the target's states of a tap."""
    return f"hidden_{'normed' if tap == NORMED else tap}"


def states_of(decoder: Any, ids: torch.Tensor, taps: Collection[int]) -> dict[int, torch.Tensor]:
    """The states [B, T, d] of each tap of token ids [B, T], from a model without its head."""
    inner = any(tap != NORMED for tap in taps)
    output = decoder(ids, use_cache=False, output_hidden_states=inner)
    return {tap: output.last_hidden_state if tap == NORMED else output.hidden_states[tap] for tap in taps}


def rows_of(
    cfg: DictConfig, pair: Pair, held_out: bool = False, epochs: int | None = None
) -> Iterator[Tokens]:
    """Packed rows of `cfg.length` tokens of conversations, endless unless `epochs` are given."""
    tokenize = tokenizer_of(pair, cfg.prompt_weight)
    stream = conversations(cfg.conversations, cfg.pair, cfg.seed, held_out, cfg.split, epochs)
    full_rows = (row for messages in stream for row in tokenize(messages))
    cut = ((ids[: cfg.length], weights[: cfg.length]) for ids, weights in full_rows)
    pad_id = pair.tokenizer.pad_token_id
    return packed_rows(
        _answered(cut, cfg.length), cfg.length, min(pair.stop_ids) if pad_id is None else pad_id
    )


def _answered(rows: Iterator[Tokens], length: int) -> Iterator[Tokens]:
    """The rows in which the assistant says something. Raises UserError where none comes for long."""
    skipped = 0
    for row in rows:
        skipped = 0 if 1.0 in row[1] else skipped + 1
        if not skipped:
            yield row
        elif skipped > TOO_MANY:
            raise UserError(f"the conversations hold nothing that the assistant says within {length} tokens")


def facts(cfg: DictConfig, pair: Pair) -> dict[str, Any]:
    """What the rows and states of a folder depend on."""
    width = pair.target.config.get_text_config().hidden_size
    of_target = {"hidden_size": width, "target_sha256": target_sha256(pair.target)}
    return {"data": data_of(cfg)} | of_target | {name: cfg[name] for name in SAME}


@torch.no_grad()
def target_sha256(target: PreTrainedModel) -> str:
    """Hex digest of some values of every weight, in bfloat16: the same for a target in float32 and in bfloat16."""
    digest = hashlib.sha256()
    for weight in target.parameters():
        values = weight.flatten()[:: max(1, weight.numel() // SAMPLED)][:SAMPLED]
        digest.update(values.to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()


@torch.inference_mode()
def write(cfg: DictConfig) -> Path:
    """Computes states as configured (conf/states.yaml) and returns their folder."""
    check_all(cfg, SETTINGS)
    pair = load_pair(cfg.pair, cfg.seed, with_draft=False)
    if cfg.conversations is None and cfg.tokens is None:
        raise UserError("a pair's own text does not end: say how much of it with tokens=1000000")
    layers = pair.target.config.get_text_config().num_hidden_layers
    if wrong := [tap for tap in cfg.taps if not NORMED <= tap <= layers]:
        raise UserError(
            f"taps holds {wrong[0]}, and the target has the depths 0 to {layers}, and -1 after its norm"
        )
    out = Path(cfg.out)
    wanted = facts(cfg, pair) | {
        "taps": sorted(set(cfg.taps)),
        "precision": cfg.precision,
        "top": min(cfg.top, len(pair.tokenizer), pair.target.get_output_embeddings().weight.shape[0]),
    }
    for file in (out / HELD_OUT / RECORD, out / BEGUN, out / RECORD):
        check_settings(file, wanted, f"the folder of states '{out}'")
    if (out / RECORD).exists():
        print(f"already there: {out}")
        return out
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / BEGUN, wanted)
    most = None if cfg.tokens is None else -(-cfg.tokens // cfg.length)
    store(islice(rows_of(cfg, pair, held_out=True), HELD_OUT_ROWS), cfg, pair, out / HELD_OUT, wanted)
    store(islice(rows_of(cfg, pair, epochs=1), most), cfg, pair, out, wanted)
    print(out)
    return out


def store(rows: Iterator[Tokens], cfg: DictConfig, pair: Pair, out: Path, record: dict[str, Any]) -> None:
    """Writes rows and the target's states of them, after the rows that the folder holds already, and then `record`."""
    if (out / RECORD).exists():
        return
    out.mkdir(parents=True, exist_ok=True)
    taps, top, width = record["taps"], record["top"], record["hidden_size"]
    bytes_of = {IDS: 4, WEIGHTS: 4} | {f"{key_of(tap)}.bin": 2 * width for tap in taps}
    if top:
        bytes_of |= {f"{LIKELIEST}.bin": 4 * top, f"{PROBS}.bin": 2 * top}
    sizes = {out / name: cfg.length * size for name, size in bytes_of.items()}
    done = min((path.stat().st_size // size if path.exists() else 0) for path, size in sizes.items())
    done -= done % cfg.batch_size
    decoder: Any = pair.target.get_decoder()
    files = {path.stem: path.open("ab") for path in sizes}
    for path, size in sizes.items():
        files[path.stem].truncate(done * size)
    todo = batched(islice(rows, done, None), cfg.batch_size)
    for batch in tqdm(todo, desc=out.name, unit="batch", initial=done // cfg.batch_size):
        ids = batch["input_ids"].to(pair.target.device)
        with torch.autocast(ids.device.type, torch.bfloat16, cfg.precision == "bf16"):
            states_by_tap = states_of(decoder, ids, {*taps, NORMED})
        tensors = {"ids": batch["input_ids"].to(torch.int32), "weights": batch["loss_weight"]}
        tensors |= {key_of(tap): states_by_tap[tap].to(torch.bfloat16) for tap in taps}
        if top:
            tensors |= distributions(states_by_tap[NORMED], batch, pair, top)
        for name, tensor in tensors.items():
            tensor = tensor.cpu()
            raw = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
            files[name].write(raw.numpy().tobytes())
    for file in files.values():
        file.close()
    (out / RECORD).write_text(json.dumps(record, indent=2) + "\n")


def distributions(finals: torch.Tensor, batch: Batch, pair: Pair, top: int) -> dict[str, torch.Tensor]:
    """The target's `top` likeliest tokens after each place, and their probabilities, which sum to 1.

    Args:
        finals: [B, T, d] its states after its final norm.
        batch: whose weights say which tokens count: places in front of others get zeros.
        pair: the target.
        top: how many tokens.
    """
    head = Head.of(pair.target)
    ids = torch.zeros(*finals.shape[:2], top, dtype=torch.int32, device=finals.device)
    probs = torch.zeros(ids.shape, dtype=torch.bfloat16, device=finals.device)
    counts = (batch["loss_weight"][:, 1:] > 0).to(finals.device)
    for places in counts.nonzero().split(CHUNK):
        at = places.unbind(1)
        logits = head(finals[at])[:, : len(pair.tokenizer)].float()
        likeliest = logits.topk(top)
        ids[at] = likeliest.indices.to(torch.int32)
        probs[at] = likeliest.values.softmax(-1).to(torch.bfloat16)
    return {LIKELIEST: ids, PROBS: probs}


def batches_of_states(cfg: DictConfig, pair: Pair, held_out: bool = False) -> Iterator[Batch]:
    """Endless batches of the rows in `cfg.states`, each epoch in an order of its own, with the states of all taps.

    Raises:
        UserError: the folder is not finished, or holds the states of other rows or of another target.
    """
    folder, length = Path(cfg.states) / (HELD_OUT if held_out else ""), cfg.length
    if not (folder / RECORD).is_file():
        raise UserError(f"there are no states in '{folder}': `python -m methods.states` makes them")
    record = json.loads((folder / RECORD).read_text())
    for name, value in facts(cfg, pair).items():
        if record.get(name, value) != value:
            raise UserError(f"the states in '{folder}' have {name}={record[name]}, and the training {value}")
    widths = {key_of(tap): record["hidden_size"] for tap in record["taps"]}
    kinds = {"ids": np.int32, "weights": np.float32} | dict.fromkeys(widths, np.int16)
    if top := record["top"]:
        widths |= {LIKELIEST: top, PROBS: top}
        kinds |= {LIKELIEST: np.int32, PROBS: np.int16}
    rows = {
        name: np.memmap(folder / f"{name}.bin", kind, "r").reshape(-1, length, widths.get(name, 1))
        for name, kind in kinds.items()
    }
    count = len(rows["ids"])
    if count < cfg.batch_size:
        raise UserError(f"'{folder}' holds {count} rows, fewer than batch_size={cfg.batch_size}")
    generator = torch.Generator().manual_seed(cfg.seed)
    while True:
        order = torch.randperm(count, generator=generator).numpy()
        for start in range(0, count - cfg.batch_size + 1, cfg.batch_size):
            chosen = np.sort(order[start : start + cfg.batch_size])
            batch = {name: torch.from_numpy(array[chosen]) for name, array in rows.items()}
            ids, weights = batch.pop("ids").squeeze(-1).long(), batch.pop("weights").squeeze(-1)
            shorts = {name: part for name, part in batch.items() if part.dtype == torch.int16}
            batch |= {name: part.view(torch.bfloat16) for name, part in shorts.items()}
            yield {"input_ids": ids, "loss_weight": weights} | batch


@one_line_errors()
def main() -> int:
    """Does what the command line says; returns the exit code."""
    return with_hydra("states", one_line_errors()(write))


if __name__ == "__main__":
    sys.exit(main())
