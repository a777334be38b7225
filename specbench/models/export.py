"""Models as files of the user's cache, for other engines: GGUF files, folders as transformers saves them, heads.

Each is written once, by default in the model's own dtype, under a name that is derived from its weights and its
tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specbench.models.gguf_writer import check_writable, write_gguf
from specbench.system.errors import UserError, file_errors
from specbench.system.files import made_once, make_folder, share_weights
from specbench.system.paths import cache_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from specbench.decoding.drafter import Drafter

FORM = 4  # of the cached files; those of another form are written anew
KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # of a GGUF file's matrices


def as_gguf(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    kind: str | None = None,
    pre_tokenizer: str = "default",
) -> Path:
    """The GGUF file of a model.

    Args:
        model: of the Llama family.
        tokenizer: byte-level BPE.
        name: prefix of the file name.
        kind: of its matrices; None: that of the model's dtype.
        pre_tokenizer: as in `write_gguf`.

    Raises:
        UserError: The kind of the model or of its tokenizer is not supported.
    """
    check_writable(model, tokenizer)
    kind = kind or KINDS[model.dtype]
    ending = f"{kind}.gguf" if pre_tokenizer == "default" else f"{kind}-{pre_tokenizer}.gguf"

    def write(path: Path) -> None:
        write_gguf(path, model, tokenizer, kind, pre_tokenizer)

    return made_once(_folder(model, tokenizer) / f"{name}-{ending}", "written", write)


def as_folder(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> Path:
    """The folder of a model and its tokenizer, as transformers saves them; arguments as of `as_gguf`."""

    def save(path: Path) -> None:
        model.save_pretrained(path)
        share_weights(path)
        tokenizer.save_pretrained(path)

    return made_once(_folder(model, tokenizer) / name, "written", save)


def as_part(drafter: Drafter, name: str) -> Path:
    """The folder of a drafter's trained part, in the form that serving engines read.

    Args:
        drafter: its `export` writes the part into a new folder.
        name: of the folder.

    Raises:
        UserError: It has no such form.
    """
    if (export := getattr(drafter, "export", None)) is None:
        raise UserError(
            f"{type(drafter).__name__} has nothing to export; engines read supported parts as they are"
        )
    root = make_folder(cache_folder() / "export")
    with file_errors(writing=root), tempfile.TemporaryDirectory(dir=root) as scratch:
        written = Path(scratch) / name
        export(written)
        digest = hashlib.sha256()
        for path in sorted(written.iterdir()):
            digest.update(path.read_bytes())
        return made_once(root / digest.hexdigest()[:12] / name, "written", written.rename)


def _folder(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Path:
    """The folder of the cache that is named by a digest of configs, weights, tokens and chat template."""
    rules = getattr(tokenizer, "backend_tokenizer", None)
    tokens = [tokenizer.get_vocab(), tokenizer.special_tokens_map, None if rules is None else rules.to_str()]
    configs = [one.to_dict() for one in (model.config, model.generation_config) if one is not None]
    form = [FORM, configs, tokens, tokenizer.chat_template]
    digest = hashlib.sha256(json.dumps(form, sort_keys=True, default=str).encode())
    for name, weight in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return cache_folder() / "export" / digest.hexdigest()[:12]
