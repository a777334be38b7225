"""A target's states of conversations, computed once and stored on disk: `specbench states taps=[...]`.

Trainers that get the folder as `states=FOLDER` read rows, weights and states from it, so an epoch costs only the
trained part, not a pass of the target (methods/common/stored_states.py has the files). A stopped command continues with
the next row, and so does a finished one that is given more `tokens`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from tqdm import tqdm

from methods.common.losses import CHUNK, LIKELIEST, PROBS, Head
from methods.common.stored_states import (
    HELD_OUT,
    RECORD,
    check_context,
    facts,
    key_of,
    row_sizes,
    rows_of,
    states_of,
)
from specbench.config.compose import program
from specbench.data.conversations import (
    Tokens,
    batched,
    check_conversations,
    check_prompt_weight,
    count_left_out,
    watched,
)
from specbench.data.training import training_pair
from specbench.data.training_folder import questions_of
from specbench.decoding.state import NORMED
from specbench.models.pairs import Pair, load_pair
from specbench.system.errors import UserError, file_errors, stoppable, warn
from specbench.system.files import (
    check_settings,
    lock_folder,
    make_folder,
    read_json,
    write_json,
)
from specbench.system.settings import Count, Natural, NotNegative, Seed, check_all

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from specbench.data.training import Batch

BEGUN = "begun.json"
HELD_OUT_ROWS = 64
SETTINGS = {
    "length": Count,
    "batch_size": Count,
    "tokens": Count | None,
    "seed": Seed,
    "taps": list[int],
    "top": Natural,
    "prompt_weight": NotNegative,
    "precision": Literal["no", "bf16"],
}


def held_out_rows(cfg: DictConfig, pair: Pair) -> list[Tokens]:
    """The rows that are never trained on, each once: repeated, those of a small file would look like more."""
    rows = list(islice(rows_of(cfg, pair, held_out=True, epochs=1), HELD_OUT_ROWS))
    if len(rows) < HELD_OUT_ROWS:
        warn(
            f"only {len(rows)} rows of {cfg.length} tokens are held out, not {HELD_OUT_ROWS}: "
            "what a training measures on them is uncertain; give more conversations"
        )
    return rows


def write(cfg: DictConfig) -> Path:
    """Computes states as configured (conf/states.yaml) and returns their folder."""
    with stoppable(lambda: saved(cfg)):
        return _write(cfg)


def saved(cfg: DictConfig) -> str | None:
    """Returns where a stopped command resumes, or None if it restarts."""
    out = Path(cfg.out)
    if not (out / BEGUN).exists():
        return None
    record = read_json(out / BEGUN)
    done, held_out = (_rows_in(folder, cfg, record) for folder in (out, out / HELD_OUT))
    return f"row {done}" if done else f"row {held_out} of those that are held out" if held_out else None


@torch.inference_mode()
def _write(cfg: DictConfig) -> Path:
    check_all(cfg, SETTINGS)
    check_prompt_weight(cfg.prompt_weight)
    check_conversations(cfg)
    if cfg.conversations is None and cfg.tokens is None:
        raise UserError("a pair's own text has no end: limit it, such as tokens=1000000")
    pair = load_pair(training_pair(cfg.pair), cfg.seed, with_draft=False)
    check_context(cfg, pair)
    layers = pair.target.config.get_text_config().num_hidden_layers
    # The states after the last layer are normed already in transformers.
    if wrong := [tap for tap in cfg.taps if not NORMED <= tap < layers]:
        raise UserError(
            f"taps holds {wrong[0]}, and the target has the depths 0 to {layers - 1}, and -1 after its norm"
        )
    out = make_folder(Path(cfg.out))
    wanted = facts(cfg, pair) | {
        "questions": questions_of(cfg),
        "split": cfg.split,
        "taps": sorted(set(cfg.taps)),
        "precision": cfg.precision,
        "top": min(cfg.top, pair.vocab_size, pair.target.get_output_embeddings().weight.shape[0]),
    }
    with lock_folder(out, "written"):
        for file in (out / HELD_OUT / RECORD, out / BEGUN, out / RECORD):
            check_settings(file, wanted, f"the folder of states '{out}'")
        if is_finished(out, cfg.tokens):
            print(f"already there: {out}")
            return out
        (out / RECORD).unlink(missing_ok=True)  # of fewer tokens
        write_json(out / BEGUN, wanted)
        if not (out / HELD_OUT / RECORD).exists():
            held_out = held_out_rows(cfg, pair)
            store(iter(held_out), len(held_out), cfg, pair, out / HELD_OUT, wanted)
        record = wanted | {"tokens": cfg.tokens, "left_out": count_left_out(cfg)}
        if cfg.tokens is None:
            # Counting rows takes far less time than their states; the bar then has an end.
            count = sum(1 for _ in watched(rows_of(cfg, pair, epochs=1), "counting rows", "row"))
        else:
            count = -(-cfg.tokens // cfg.length)
        store(islice(rows_of(cfg, pair, epochs=1), count), count, cfg, pair, out, record)
    print(out)
    return out


def is_finished(out: Path, tokens: int | None) -> bool:
    """Whether a folder holds the states of `tokens` tokens (None: of all).

    Raises:
        UserError: it holds more.
    """
    if not (out / RECORD).exists():
        return False
    stored = read_json(out / RECORD).get("tokens", tokens)  # older folders lack it
    if (stored or inf) > (tokens or inf):
        raise UserError(
            f"the folder of states '{out}' was made with tokens={stored or 'null'}, which is more than {tokens}: "
            "give the same, or another out="
        )
    return stored == tokens


def _rows_in(folder: Path, cfg: DictConfig, record: dict[str, Any]) -> int:
    """Rows of full batches that every file of a folder holds: a stopped command resumes after them."""
    sizes = row_sizes(folder, cfg.length, record).items()
    done = min((path.stat().st_size // size if path.exists() else 0) for path, size in sizes)
    return done - done % cfg.batch_size


def store(
    rows: Iterator[Tokens], count: int, cfg: DictConfig, pair: Pair, out: Path, record: dict[str, Any]
) -> None:
    """Writes rows and the target's states of them, after the rows that the folder holds already, and then `record`.

    Args:
        rows: from the first one on.
        count: how many there are at most.
        cfg: conf/states.yaml.
        pair: with the target.
        out: the folder.
        record: content of its record, beside its number of rows.
    """
    make_folder(out)
    done = _rows_in(out, cfg, record)
    decoder: Any = pair.target.get_decoder()
    todo = batched(islice(rows, done, None), cfg.batch_size)
    files = {}
    for path, size in row_sizes(out, cfg.length, record).items():
        files[path.stem] = path.open("ab")
        files[path.stem].truncate(done * size)
    total = -(-count // cfg.batch_size)
    for batch in tqdm(todo, desc=out.name, unit="batch", initial=done // cfg.batch_size, total=total):
        ids = batch["input_ids"].to(pair.target.device)
        with torch.autocast(ids.device.type, torch.bfloat16, cfg.precision == "bf16"):
            states_by_tap = states_of(decoder, ids, {*record["taps"], NORMED})
        tensors = {"ids": batch["input_ids"].to(torch.int32), "weights": batch["loss_weight"]}
        tensors |= {key_of(tap): states_by_tap[tap].to(torch.bfloat16) for tap in record["taps"]}
        if record["top"]:
            tensors |= distributions(states_by_tap[NORMED], batch, pair, record["top"])
        for name, tensor in tensors.items():
            tensor = tensor.cpu()
            raw = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
            with file_errors(writing=out):
                files[name].write(raw.numpy().tobytes())
                files[name].flush()  # so that all of it counts if the command is stopped
        done += len(ids)
    with file_errors(writing=out):
        for file in files.values():
            file.close()
    write_json(out / RECORD, record | {"rows": done})


def distributions(finals: torch.Tensor, batch: Batch, pair: Pair, top: int) -> dict[str, torch.Tensor]:
    """The target's `top` likeliest tokens after each place, and their probabilities, which sum to 1.

    Args:
        finals: [B, T, d] its states after its final norm.
        batch: its weights define which tokens count: places in front of others get zeros.
        pair: the target.
        top: how many tokens.
    """
    head = Head.of(pair.target)
    ids = torch.zeros(*finals.shape[:2], top, dtype=torch.int32, device=finals.device)
    probs = torch.zeros(ids.shape, dtype=torch.bfloat16, device=finals.device)
    counts = (batch["loss_weight"][:, 1:] > 0).to(finals.device)
    for places in counts.nonzero().split(CHUNK):
        at = places.unbind(1)
        logits = head(finals[at])[:, : pair.vocab_size].float()
        likeliest = logits.topk(top)
        ids[at] = likeliest.indices.to(torch.int32)
        probs[at] = likeliest.values.softmax(-1).to(torch.bfloat16)
    return {LIKELIEST: ids, PROBS: probs}


main = program("states", write)
