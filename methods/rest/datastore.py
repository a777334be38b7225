"""A datastore: a text as token ids, its suffix array, and a record of where it comes from; a folder of three files.

A token takes two bytes if the vocabulary allows it, else four; a place takes four. Files are memory-mapped, so that a
look-up reads only what it needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from methods.common.counted_trees import Counted, likeliest, most_frequent
from methods.common.suffix_array import READ, Index, Interval, suffix_array
from methods.common.vocab_map import tokenizer_checksum
from specbench.data.training_folder import DATASTORE
from specbench.system.errors import UserError, file_errors
from specbench.system.files import file_sha256, make_folder
from specbench.system.paths import packaged

if TYPE_CHECKING:
    from specbench.models.pairs import Pair

RECORD, TOKENS, PLACES = DATASTORE, "tokens.bin", "places.bin"
FOLLOWERS = 8  # children of a node at most
FEW = 4  # up to this many places, node by node is as fast as at once


def tree_after(index: Index, interval: Interval, nodes: int, depth: int) -> Counted:
    """The most frequent nodes after the tokens of an interval."""
    if FEW < interval.occurrences <= READ and depth and nodes:
        return most_frequent(index.tokens_after(interval, depth), index.separator, nodes, FOLLOWERS)

    def followers(interval: Interval, _: int) -> list[tuple[int, Interval, float]]:
        ahead = index.followers(interval, FOLLOWERS)
        return [(token, after, after.occurrences / interval.occurrences) for token, after in ahead]

    return likeliest(interval, followers, nodes, depth)


def save_datastore(folder: str | Path, rows: Iterable[Sequence[int]], pair: Pair, **facts: Any) -> Path:
    """Writes a datastore.

    Args:
        folder: of the files.
        rows: token ids; nothing is found across the end of a row.
        pair: with the tokenizer.
        facts: for the record.

    Returns:
        The folder.

    Raises:
        UserError: there are no tokens.
    """
    kind = np.dtype(">u2" if pair.vocab_size < 2**16 else ">u4")
    separator = np.array([np.iinfo(kind).max], dtype=kind)
    arrays = [array for row in rows if len(row) for array in (np.array(row, dtype=kind), separator)]
    if not arrays:
        raise UserError(
            "there are no tokens to look up: the conversations hold none, or none that may be used"
        )
    tokens = np.concatenate(arrays).astype(kind)  # concatenated in the machine's own order of bytes
    positions = suffix_array(tokens)
    folder = make_folder(Path(folder))
    with file_errors(writing=folder):
        (folder / RECORD).unlink(
            missing_ok=True
        )  # of another datastore: an unfinished one must not look like it
        tokens.tofile(folder / TOKENS)
        positions.tofile(folder / PLACES)
        record = {
            "tokens": len(tokens) - len(arrays) // 2,
            "rows": len(arrays) // 2,
            "tokenizer": tokenizer_checksum(pair.tokenizer),
            "types": [tokens.dtype.str, positions.dtype.str],
            "sha256": {name: file_sha256(folder / name) for name in (TOKENS, PLACES)},
            **facts,
        }
        (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return folder


def load_datastore(source: str | Path, pair: Pair) -> Index:
    """A datastore to look things up in.

    Args:
        source: its folder.
        pair: whose tokenizer it must have been made with.

    Raises:
        UserError: it is missing or broken, or was made with another tokenizer.
    """
    folder = packaged(source)
    if not (folder / RECORD).is_file():
        raise UserError(f"no datastore '{folder}': `specbench train rest` makes one")
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        kinds = [np.dtype(name) for name in record["types"]]
        tokens, positions = (
            np.memmap(folder / name, kind, "r") for name, kind in zip((TOKENS, PLACES), kinds, strict=True)
        )
        index = Index(tokens, positions, int(np.iinfo(tokens.dtype).max))
        is_complete = record["tokens"] + record["rows"] == len(tokens) == len(positions)
        made_with = record["tokenizer"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"the datastore '{folder}' is broken ({error!r})") from error
    if not is_complete:
        raise UserError(f"the datastore '{folder}' is broken: a file was cut short")
    if made_with != tokenizer_checksum(pair.tokenizer):
        raise UserError(
            f"the datastore '{folder}' was made with another tokenizer: make one for '{pair.name}'"
        )
    return index
