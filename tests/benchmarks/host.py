"""The host's own work of drafting, per round: `python -m tests.benchmarks.host [--nodes 80] [--profile samd]`.

Drafters answer every prompt one after the other, in an order that rotates. What is counted are the seconds of `draft`
and `commit` on the core that runs them, which load of others does not add to; without those of a model's passes, the
places of its tokens included, and of the search for the largest of whole rows of logits: on a GPU these are the
device's. All else is the host's: look-ups of tokens, lists, the shape of a tree. `full`: of the rounds with nearly as
many nodes as any round of the method had.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from unittest.mock import patch

import numpy as np
import torch
from tqdm import tqdm

import methods.common.rank_trees
import methods.recycling
from methods.lookahead import Lookahead
from methods.recycling import TokenRecycling
from methods.rest import REST
from methods.samd import SAMDecoding
from methods.sps_tree import DraftModelTree
from methods.suffix import SuffixDecoding
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.models.pairs import Pair
from tests.benchmarks.common import pair_and_requests
from tests.support.conf import composed

DEVICE = (  # whose time is the device's
    (StagedModel, "unembed"),
    *((DraftModelTree, one) for one in ("_next", "_level")),  # passes of the draft model
    *((module, "likeliest_ids") for module in (methods.recycling, methods.common.rank_trees)),
)
FULL = 0.9  # share of the most nodes that a full round has


@dataclass
class Watch:
    """Seconds of each round's `draft` and `commit`, and its nodes.

    Attributes:
        draft: of the host.
        commit: of the host.
        device: in both, within a model or over whole rows of logits.
        nodes: that were drafted.
        profile: runs in the host's time, if there is one.
    """

    draft: list[float] = field(default_factory=list)
    commit: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    profile: cProfile.Profile | None = None
    _spent: float = 0.0
    _within: bool = False

    def on(self, drafter: Drafter) -> Drafter:
        """The drafter with its rounds watched."""
        draft, commit = drafter.draft, drafter.commit

        def drafts(batch):
            made, host, device = self._timed(draft, batch)
            self.draft.append(host)
            self.device.append(device)
            self.nodes.append(made.tokens.shape[1])
            return made

        def commits(batch, verified):
            _, host, device = self._timed(commit, batch, verified)
            self.commit.append(host)
            self.device[-1] += device

        drafter.draft, drafter.commit = drafts, commits  # type: ignore[method-assign]
        return drafter

    def _timed(self, call: Callable, *arguments):
        self._spent, self._within = 0.0, True
        if self.profile is not None:
            self.profile.enable()
        begun = time.thread_time()
        made = call(*arguments)
        spent = time.thread_time() - begun
        if self.profile is not None:
            self.profile.disable()
        self._within = False
        return made, spent - self._spent, self._spent

    def device_work(self, call: Callable) -> Callable:
        """A function whose time is the device's."""

        @wraps(call)
        def timed(*arguments, **named):
            if not self._within:
                return call(*arguments, **named)
            self._within, begun = False, time.thread_time()
            try:
                return call(*arguments, **named)
            finally:
                self._spent += time.thread_time() - begun
                self._within = True

        return timed

    @contextmanager
    def active(self) -> Iterator[None]:
        """While it is, what the device does is told from what the host does."""
        with ExitStack() as stack:
            for owner, name in DEVICE:
                stack.enter_context(patch.object(owner, name, self.device_work(getattr(owner, name))))
            yield


def drafters(pair: Pair, nodes: int) -> dict[str, Drafter]:
    """Every method that drafts by look-ups, with drafts of so many nodes, and a draft model's tree of as many."""
    parts = composed("bench", f"pair={pair.name}").pair.parts
    width = max(1, nodes // 4)
    return {
        "recycling": TokenRecycling(pair, nodes=min(nodes, 80)),
        "samd": SAMDecoding(pair, max_draft_tokens=nodes),
        "samd, corpus": SAMDecoding(pair, max_draft_tokens=16, corpus=parts.rest),
        "rest": REST(pair, parts.rest, nodes=nodes),
        "suffix": SuffixDecoding(pair, max_draft_tokens=nodes, factor=float(nodes), min_probability=0.0),
        "suffix, run": SuffixDecoding(
            pair, max_draft_tokens=nodes, factor=float(nodes), min_probability=0.0, memory="run"
        ),
        "lookahead": Lookahead(pair, window=width // 2, ngram=5, guesses=width - width // 2),
        "lookahead, text": Lookahead(pair, window=width // 2, ngram=5, guesses=width - width // 2, text=True),
        "sps_tree": DraftModelTree(pair, tree=parts.sps_tree, max_draft_tokens=5, nodes=nodes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", default="tiny")
    parser.add_argument("--limit", type=int, default=1, help="questions per task")
    parser.add_argument("--nodes", type=int, default=80, help="of a draft at most")
    parser.add_argument("--methods", nargs="+", help="of the table; all of them if none is named")
    parser.add_argument("--profile", help="a method of the table: where its time goes, instead of the table")
    options = parser.parse_args()
    pair, requests = pair_and_requests(options.pair, options.limit)
    target = StagedModel(pair.target)
    made = drafters(pair, options.nodes)
    chosen = [options.profile] if options.profile else options.methods
    made = {name: drafter for name, drafter in made.items() if chosen is None or name in chosen}
    watches = {name: Watch() for name in made}
    engines = {
        name: Engine(target, watches[name].on(drafter), pair.stop_ids, context_length=pair.context_length)
        for name, drafter in made.items()
    }
    for name, engine in engines.items():  # what is made once: shapes of trees, kernels
        engine.answer(requests[0].prompt, requests[0].decoding)
        watches[name].__init__(profile=cProfile.Profile() if options.profile else None)  # type: ignore[misc]
    names = list(engines)
    for place, request in enumerate(tqdm(requests, unit="prompt")):
        shift = place % len(names)
        for name in names[shift:] + names[:shift]:
            with watches[name].active():
                engines[name].answer(request.prompt, request.decoding)
    if options.profile is not None:
        pstats.Stats(watches[options.profile].profile).sort_stats("tottime").print_stats(25)
        return
    print(f"{torch.get_num_threads()} threads of torch; ms a round")
    print(f"{'':16}{'rounds':>7}{'nodes':>7}{'draft':>8}{'commit':>8}{'both':>8}{'full':>8}{'device':>8}")
    for name, watch in watches.items():
        draft, commit = 1e3 * np.array(watch.draft), 1e3 * np.array(watch.commit)
        both, nodes = draft + commit, np.array(watch.nodes)
        full = both[nodes >= FULL * nodes.max()]
        print(
            f"{name:16}{len(both):7}{nodes.mean():7.1f}{draft.mean():8.3f}{commit.mean():8.3f}"
            f"{both.mean():8.3f}{full.mean():8.3f}{1e3 * np.mean(watch.device):8.3f}"
        )


if __name__ == "__main__":
    main()
