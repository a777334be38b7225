"""GGUF files of small Llama models, whole or with faults."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specbench.models import gguf_writer


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    kind: str = "F32",
    architecture: str = "llama",
    left_out: str | None = None,
    renamed: dict[int, str] | None = None,
    added: dict[str, int] | None = None,
    padding: int = 0,
) -> None:
    """Writes a Llama model and its byte-level BPE tokenizer.

    Args:
        path: of the file.
        model: with or without a tied head.
        tokenizer: of it.
        kind: of all matrices: F32, F16, Q8_0, Q4_1 ...
        architecture: what the file says it is.
        left_out: a tensor that the file lacks.
        renamed: other names of tokens, by their ids.
        added: sizes of tensors of ones, by their names.
        padding: number of tokens at the end that stand for no text.
    """
    weights = {name: values for name, values in gguf_writer.tensors(model).items() if name != left_out}
    weights |= {name: np.ones(size, dtype=np.float32) for name, size in (added or {}).items()}
    tokens = gguf_writer.tokens_of(tokenizer, len(tokenizer) + padding)
    for number, name in (renamed or {}).items():
        tokens[number] = name
    writer = gguf.GGUFWriter
    with (
        patch.object(gguf_writer, "tensors", lambda _: weights),
        patch.object(gguf_writer, "tokens_of", lambda *_: tokens),
        patch.object(gguf, "GGUFWriter", lambda path, _: writer(path, architecture)),
    ):
        gguf_writer.write_gguf(path, model, tokenizer, kind, "default")


def rounded(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    """The model with its matrices as a file of that kind gives them back, in place."""
    wanted = gguf.GGMLQuantizationType[kind]
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), wanted), wanted)))
    return model
