"""Which tokens a trimmed draft head keeps: a small, readable JSON file, made by `methods.vocab_trim.calibrate`.

    {"source": ..., "tokens": how many were counted, "tokenizer": checksum, "data": checksum,
     "rows": [[id, count, "token"], ...]}     likeliest first, special tokens before all others

A run takes the first `vocab.size` rows, so that one map serves every size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.system.errors import UserError, warn
from specbench.system.paths import packaged

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specbench.models.pairs import Pair

FILE = "vocab_map.json"


def tokenizer_checksum(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 over every token and its id."""
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


def always_kept(tokenizer: PreTrainedTokenizerBase, stop_ids: frozenset[int]) -> list[int]:
    """Ids that are kept whatever their frequency: stop tokens, and those the tokenizer marks as special or added.

    Added ones are chat roles, tools, thinking. Without them a draft could never end an answer.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return sorted({*stop_ids, *tokenizer.all_special_ids, *added})


def rank(
    counts: Mapping[int, int], tokenizer: PreTrainedTokenizerBase, stop_ids: frozenset[int]
) -> list[list]:
    """Rows [id, count, token]: the always kept ones, then by count, equal counts by id. Only ids that were seen."""
    forced = always_kept(tokenizer, stop_ids)
    seen = sorted((i for i in counts if i not in set(forced)), key=lambda i: (-counts[i], i))
    order = forced + seen
    return [[i, counts.get(i, 0), token] for i, token in zip(order, tokenizer.convert_ids_to_tokens(order))]


def save_vocab_map(
    folder: str | Path, rows: list[list], tokenizer: PreTrainedTokenizerBase, **facts: Any
) -> Path:
    """Writes a map, one row a line."""
    path = Path(folder) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps({**facts, "tokenizer": tokenizer_checksum(tokenizer)}, indent=1)
    lines = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text(f'{head[:-2]},\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")
    return path


def kept_ids(source: str | Path, pair: Pair, size: int | None) -> list[int]:
    """Ids that a head trimmed by a vocabulary map keeps, ascending.

    Args:
        source: folder of the map.
        pair: whose tokenizer the map must be made for.
        size: number of the map's rows to keep; None for all. A size beyond the map also keeps the lowest ids that it
            does not list, with a warning.

    Raises:
        UserError: the map is missing or broken, was made for another tokenizer, or its special tokens alone do not fit
            into `size`.
    """
    path = packaged(source) / FILE
    if not path.is_file():
        raise UserError(f"no vocabulary map '{path}': `specbench calibrate` makes one")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        ids, made_for = [int(row[0]) for row in content["rows"]], content["tokenizer"]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(f"the vocabulary map '{path}' is broken ({error!r})") from error
    if made_for != tokenizer_checksum(pair.tokenizer):
        raise UserError(
            f"the vocabulary map '{path}' was made for another tokenizer: calibrate one for '{pair.name}'"
        )
    counted = content.get("tokens")
    vocabulary = sorted(pair.tokenizer.get_vocab().values())
    forced = always_kept(pair.tokenizer, pair.stop_ids)
    if len({*ids}) < len(ids) or not {*ids} <= {*vocabulary}:
        raise UserError(
            f"the vocabulary map '{path}' is broken: it lists an id twice, or an id without a token"
        )
    # A tokenizer may have tokens that no head scores, such as one for images.
    ids, vocabulary, forced = ([i for i in some if i < pair.vocab_size] for some in (ids, vocabulary, forced))
    if size is not None and not len(forced) <= size <= len(vocabulary):
        raise UserError(
            f"vocab.size must lie between {len(forced)} (special tokens) and {len(vocabulary)}, not {size}"
        )
    if lacking := {*forced} - {*ids[:size]}:
        raise UserError(
            f"the vocabulary map '{path}' lacks {len(lacking)} special or stop tokens of pair '{pair.name}', such as "
            f"{min(lacking)}: calibrate one for it"
        )
    if size is not None and size > len(ids):
        filler, listed = size - len(ids), set(ids)
        warn(
            f"{filler} of vocab.size={size} rows ({filler / size:.0%}) are filler: '{path}' lists {len(ids)} tokens, "
            f"all that came up among the {counted} counted; count more text, or choose a smaller size"
        )
        ids += [i for i in vocabulary if i not in listed]
    return sorted(ids[:size])
