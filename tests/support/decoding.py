"""Pairs of small random models on which drafts are sometimes right, prompts, and what transformers makes of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace

import torch

from specbench.decoding.model.staged_model import StagedModel
from specbench.measure.agreement import Agreement, check_staged
from specbench.models.surgery import cut
from tests.support.models import random_model

PROMPT = [3, 9, 27, 11, 33, 29, 17]
STOP = 2
# What families call the weights that write to the hidden states; a tuple of experts' weights has no ".weight".
OUTPUTS = (
    *("o_proj.weight", "out_proj.weight", "dense.weight"),
    *("down_proj.weight", "down_proj", "fc2.weight", "dense_4h_to_h.weight", "c_proj.weight"),
)


class RandomPair(SimpleNamespace):
    """What drafters take of a `Pair`."""

    @property
    def staged(self) -> StagedModel:
        return StagedModel(self.target)

    @property
    def context_length(self) -> int:
        return self.target.config.max_position_embeddings


@cache
# Outside inference mode, whichever test asks first: the pair is kept for tests that train, too.
@torch.inference_mode(False)
def random_pair(arch: str, seed: int = 0, draft_layers: int = 3, **overrides):
    """A target whose deep layers matter little, so that an early exit often guesses right; a noisy copy of its first
    layers as draft."""
    target = random_model(arch, seed, **overrides)
    with torch.no_grad():
        for layer in StagedModel(target).layers[2:]:
            for name, weight in layer.named_parameters():
                if name.endswith(OUTPUTS):
                    weight.mul_(0.3)
        layers = min(draft_layers, target.config.num_hidden_layers)
        draft = cut(target, list(range(layers))).requires_grad_(False)
        noise = torch.Generator().manual_seed(seed)
        for weight in draft.parameters():
            weight.add_(torch.randn(weight.shape, generator=noise) * weight.std(correction=0) * 0.1)
    return RandomPair(
        name=arch,
        target=target,
        draft=draft,
        device=target.device,
        dtype=target.dtype,
        parts={},
        trimmed=None,
        expansion=None,
        draft_expansion=None,
        vocab_size=target.config.vocab_size,
        stop_ids=frozenset([STOP]),
    )


@contextmanager
def tokens_through_layers(model) -> Iterator[list[int]]:
    """Counts, while it is open, the tokens that go through each layer of a model."""
    tokens = [0] * len(model.model.layers)

    def count(layer: int, output: torch.Tensor) -> None:
        tokens[layer] += output.shape[1]

    hooks = [
        layer.register_forward_hook(lambda module, args, output, i=i: count(i, output))
        for i, layer in enumerate(model.model.layers)
    ]
    try:
        yield tokens
    finally:
        for hook in hooks:
            hook.remove()


def random_ids(config, vocab_size: int) -> list[int]:
    """All token ids in random order, from a fixed seed, without the special ones of a config."""
    named = (getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad"))
    special = {i for ids in named for i in (ids if isinstance(ids, list) else [ids])}
    drawn = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0)).tolist()
    return [i for i in drawn if i not in special]


def checked(target: StagedModel) -> Agreement:
    """`check_staged` of a model without a tokenizer, on random token ids."""
    return check_staged(target, random_ids(target.config, target.vocab_size))


def random_prompt(rng: random.Random, vocab: int, longest: int = 40) -> list[int]:
    """Any ids but the stop token's; sometimes with a repeated stretch, so that prompt lookup finds something."""
    prompt = [
        rng.choice([i for i in range(vocab) if i != STOP]) for _ in range(rng.choice([1, 2, 7, longest]))
    ]
    return prompt + prompt[: rng.randrange(len(prompt) + 1)]


def generate_with_transformers(model, prompt: list[int], max_new_tokens: int, stop_ids=(STOP,)) -> list[int]:
    """New token ids of transformers' own greedy generate."""
    ids = torch.tensor([prompt], device=model.device)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=list(stop_ids),
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()
