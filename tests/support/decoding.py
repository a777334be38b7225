"""Pairs of small random models on which drafts are sometimes right, and a drafter that is right on command."""

from __future__ import annotations

import copy
import random
from functools import cache
from types import SimpleNamespace

import torch

from methods.heads import DraftHead
from methods.kangaroo.adapter import Adapter, adapter_config
from specbench.decoding.draft import Context, Draft, Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.sampling import Decoding
from specbench.decoding.target import Target
from specbench.pairs import cut
from tests.support.models import random_model

STOP = 2


@cache
@torch.inference_mode(
    False
)  # whoever asks first: what is kept here serves tests outside of that mode as well
def random_pair(arch: str, seed: int = 0, draft_layers: int = 3, **overrides):
    """A target whose deep layers matter little, so that an early exit often guesses right; a noisy copy of its first
    layers as draft."""
    target = random_model(arch, seed, **overrides)
    with torch.no_grad():
        for layer in Target(target).layers[2:]:
            for name, weight in layer.named_parameters():
                if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "fc2.weight")):
                    weight.mul_(0.3)
        layers = min(draft_layers, target.config.num_hidden_layers)
        draft = cut(target, list(range(layers))).requires_grad_(False)
        noise = torch.Generator().manual_seed(seed)
        for weight in draft.parameters():
            weight.add_(torch.randn(weight.shape, generator=noise) * weight.std(correction=0) * 0.1)
    return SimpleNamespace(
        name=arch,
        target=target,
        draft=draft,
        device=target.device,
        dtype=target.dtype,
        parts={},
        vocab_size=target.config.vocab_size,
        stop_ids=frozenset([STOP]),
    )


def sorted_pair(arch: str, seed: int = 0, **overrides):
    """A random pair whose draft model counts as sorted, with exits behind the first, second and last layer."""
    pair = random_pair(arch, seed, 4, **overrides)
    pair.draft.config.exits = [1, 2, pair.draft.config.num_hidden_layers]
    return pair


def padded_pair():
    """A pair whose target says ids that the draft model has no embeddings for: 64 against 56, of which the tokenizer
    has 50."""
    pair = sorted_pair("qwen2", seed=4, vocab_size=64)
    narrow = copy.deepcopy(pair.draft)
    narrow.resize_token_embeddings(56)
    return SimpleNamespace(**(vars(pair) | {"draft": narrow, "vocab_size": 50}))


def trimmed(drafter: Drafter, kept: list[int]) -> Drafter:
    """The drafter with a head that knows only the tokens `kept`."""
    drafter.head = DraftHead(drafter.head.model, drafter.head.vocab_size, torch.tensor(kept))
    return drafter


def near_identity_adapter(pair) -> Adapter:
    """An adapter that passes the exit states on nearly unchanged, so that drafts are right now and then."""
    torch.manual_seed(7)
    adapter = Adapter(adapter_config(pair.target.config))
    with torch.no_grad():
        adapter.layers[0].self_attn.o_proj.weight.mul_(0.1)
        adapter.norm.weight.copy_(Target(pair.target).norm.weight)
    return adapter.eval().requires_grad_(False)


def random_prompt(rng: random.Random, vocab: int, longest: int = 40) -> list[int]:
    """Any ids but the stop token's; sometimes with a repeated stretch, so that prompt lookup finds something."""
    prompt = [
        rng.choice([i for i in range(vocab) if i != STOP]) for _ in range(rng.choice([1, 2, 7, longest]))
    ]
    return prompt + prompt[: rng.randrange(len(prompt) + 1)]


def generate_with_transformers(model, prompt: list[int], max_new_tokens: int, stop_ids=(STOP,)) -> list[int]:
    """New token ids of transformers' own greedy generate."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=list(stop_ids),
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


def drafts(drafter: Drafter, pair, temperature: float) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """(tokens, probabilities) of every draft of one answer."""
    seen = []
    inner = drafter.draft

    def record(context: Context) -> Draft:
        draft = inner(context)
        seen.append((draft.tokens.clone(), draft.probs))
        return draft

    drafter.draft = record
    prompt = [3, 9, 27, 11, 33, 29, 17]
    Engine(Target(pair.target), drafter, frozenset()).generate(prompt, Decoding(28, temperature), seed=5)
    return seen


class Oracle(Drafter):
    """Drafts a known continuation, as a chain or a tree, and errs wherever its random numbers say so.

    answer: the tokens that plain decoding gives. error: chance of each token to be wrong. tree: adds branches.
    """

    def __init__(
        self,
        prompt_length: int,
        answer: list[int],
        vocab: int,
        seed: int,
        error: float,
        longest: int,
        tree: bool,
    ):
        self.rng = random.Random(seed)
        self.start, self.answer, self.vocab = prompt_length, answer, vocab
        self.error, self.longest, self.tree = error, longest, tree
        self.tree_nodes = 3 * longest if tree else 0
        self.committed: list[int] = []

    def draft(self, context: Context) -> Draft:
        length = min(self.rng.randint(0, self.longest), context.max_draft)
        known = context.length - self.start
        right = (self.answer + [0] * (known + length))[known : known + length]
        chain = [self._wrong(t) if self.rng.random() < self.error else t for t in right]
        if not self.tree or not chain:
            return Draft(torch.tensor(chain, dtype=torch.int64))
        tokens, parents, last = [], [], -1
        for token in chain:
            siblings = [self._wrong(token) for _ in range(self.rng.randint(0, 2))] + [token]
            self.rng.shuffle(siblings)
            at = len(tokens) + siblings.index(token)
            tokens += siblings
            parents += [last] * len(siblings)
            last = at
        return Draft(torch.tensor(tokens), parents=torch.tensor(parents))

    def commit(self, context: Context, accepted: int) -> None:
        self.committed.append(accepted)

    def _wrong(self, token: int) -> int:
        return (token + self.rng.randrange(1, self.vocab)) % self.vocab
