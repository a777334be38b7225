"""Counts the best tree for a pair: `specbench train sps_tree pair=... [conversations=FILE nodes=64]`.

The target answers prompts. After every token of its answers the ranks of the tokens that follow are looked up in the
draft model's distributions, each given the target's own tokens before it. These ranks are the one path of a tree that
would have been accepted there. The most frequent paths are the tree that has most tokens accepted, for its size and for
greedy decoding, without assuming that ranks are right independently of each other.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from methods.common.heads import target_ids
from methods.common.rank_trees import best_tree, counted_paths, ranks_in
from methods.common.training import Answered, answered
from methods.sps_tree.drafter import FILE
from specbench.config.compose import program
from specbench.data.conversations import check_conversations, count_left_out
from specbench.data.training_folder import questions_of
from specbench.decoding.model.staged_model import StagedModel
from specbench.models.pairs import draft_of, load_pair
from specbench.system.errors import UserError, stoppable
from specbench.system.files import make_folder, write_atomic
from specbench.system.settings import Count, Seed, Temperature, check_all

if TYPE_CHECKING:
    from omegaconf import DictConfig

SETTINGS = {
    "tokens": Count,
    "max_new_tokens": Count,
    "temperature": Temperature,
    "seed": Seed,
    "nodes": Count,
    "depth": Count,
    "ranks": Count,
}


@torch.inference_mode()
def ranks_of(draft: StagedModel, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """The rank [n] under a draft model of each of the n tokens of an answer, given the tokens before it."""
    ids = torch.tensor([prompt + answer], device=draft.device)
    states = draft.run_layers(draft.embed(ids), draft.new_cache(ids.shape[1]), 0)
    logits = draft.head(states[0, len(prompt) - 1 : -1])
    inside = ids[0, len(prompt) :].clamp(max=logits.shape[1] - 1)
    # A token that only the target has is never drafted.
    return torch.where(inside == ids[0, len(prompt) :], ranks_in(logits, inside), logits.shape[1])


def paths_of(ranks: torch.Tensor, depth: int, limit: int) -> Counter[tuple[int, ...]]:
    """Counts the paths of ranks after the pending tokens of an answer.

    Args:
        ranks: [n] of its tokens. Every token but the last is pending once; the paths begin after it.
        depth: of the longest path.
        limit: ranks that a path may have.
    """
    ranks_after = torch.nn.functional.pad(ranks[1:], (0, depth), value=limit)
    return counted_paths(ranks_after.unfold(0, depth, 1)[: len(ranks) - 1].tolist(), limit)


def count(
    draft: StagedModel, stream: Iterator[Answered], tokens: int, depth: int, limit: int
) -> tuple[Counter[tuple[int, ...]], int, str]:
    """Paths on answers of `tokens` tokens or a few more, the number of places, and the text's checksum."""
    path_counts: Counter[tuple[int, ...]] = Counter()
    answered_tokens, positions, digest = 0, 0, hashlib.sha256()
    with tqdm(total=tokens, desc="answers", unit="token") as bar:
        for prompt, answer in stream:
            path_counts += paths_of(ranks_of(draft, prompt, answer), depth, limit)
            digest.update(json.dumps([prompt, answer]).encode())
            positions += len(answer) - 1
            bar.update(len(answer))
            answered_tokens += len(answer)
            if answered_tokens >= tokens:
                return path_counts, positions, digest.hexdigest()
    raise AssertionError("conversations do not end")


@stoppable(lambda: None)
def train(cfg: DictConfig) -> Path:
    """Counts as configured (conf/train_sps_tree.yaml), writes the tree and returns its folder."""
    check_all(cfg, SETTINGS)
    check_conversations(cfg)
    pair = load_pair(cfg.pair, cfg.seed, with_draft=True)
    draft = StagedModel(draft_of(pair), pair.vocab_size, target_ids(pair))
    stream = answered(cfg, pair, StagedModel(pair.target, pair.vocab_size))
    path_counts, positions, data = count(draft, stream, cfg.tokens, cfg.depth, cfg.ranks)
    if not path_counts:
        raise UserError(
            f"the draft model has nothing of the target's answers among its first {cfg.ranks} ranks"
        )
    tree = best_tree(path_counts, cfg.nodes)
    facts = {
        "pair": pair.name,
        "data": f"sha256:{data}",
        "questions": questions_of(cfg),
        "left_out": count_left_out(cfg),
        "temperature": cfg.temperature,
        "places": positions,
        "tree": tree,
        "tree_counts": [path_counts[path] for path in tree],
    }
    path = Path(cfg.out) / FILE
    make_folder(path.parent)
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in facts.items())
    write_atomic(path, f"{{\n{lines}\n}}\n")
    print("tokens a round, if all places were equally likely starts:")
    for nodes in (*(n for n in (1, 2, 4, 8, 16, 32) if n < len(tree)), len(tree)):
        deepest = max(map(len, tree[:nodes]))
        expected = 1 + sum(facts["tree_counts"][:nodes]) / positions
        print(f"  {nodes:4} nodes, {deepest:2} levels: {expected:.2f}")
    print(path)
    return Path(cfg.out)


main = program("train_sps_tree", train)
