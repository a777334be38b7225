"""A toy method of one module and one YAML, with everything that the contract offers, in every scheduler."""

from __future__ import annotations

import importlib
import random
import sys

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import methods
from methods.eqspec import EqSpec
from methods.exspec import ExSpec
from methods.ragged import RaggedBatch
from specbench.config.combinations import check_method
from specbench.config.compose import CONF
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.scheduler import Scheduler
from specbench.decoding.state import NORMED, Request
from specbench.system.settings import parameters
from tests.support.aligned import AlignedChaos
from tests.support.batches import Chaos, assert_lossless, cases
from tests.support.decoding import random_pair

MODULE = '''
"""A tree of what the target's own head says at three depths, checked against what it is told."""

import torch

from specbench.decoding.drafter import Drafter
from specbench.decoding.state import NORMED, Draft
from specbench.decoding.tree import Tree
from specbench.system.settings import Count


class Toy(Drafter):
    """Children of the pending token: what each tapped depth says of the last state; one more after each."""

    deterministic = True

    def __init__(self, pair, low: Count = 1):
        layers = pair.target.config.num_hidden_layers
        self.taps = (low, layers, NORMED)
        self.max_draft_tokens, self.max_nodes = 2, 6
        self.log = []

    def open(self, slots, target):
        self.target = target
        self.states = {tap: slots.tensor(target.hidden_size, dtype=target.dtype) for tap in self.taps}
        self.owner = slots.values(lambda: None)

    def begin(self, slot, sequence, prefill):
        self.owner[slot] = sequence
        for tap, states in self.states.items():
            assert prefill.hidden_states[tap].shape == (1, sequence.length - 1, self.target.hidden_size)
            states[slot] = prefill.hidden_states[tap][0, -1]

    def heads(self, b):
        """[b, 3, vocab]: of each tap."""
        low, last, normed = (self.states[tap][:b] for tap in self.taps)
        return torch.stack([self.target.head(low), self.target.head(last), self.target.unembed(normed)], 1)

    def draft(self, batch):
        assert all(own is one for own, one in zip(self.owner, batch.sequences)), "a state went to another slot"
        self.reached = []
        first = self.heads(batch.size).topk(2, -1).indices.transpose(1, 2).reshape(batch.size, 6)
        tree = Tree.of(torch.tensor([-1, -1, -1, 0, 1, 2]))
        self.drafted = first
        report = first[:, :1] + 1
        every = first.new_full((batch.size,), 6)
        stats = {"toy": report, "rows": batch.size}
        return Draft(first, tree=tree, candidates=every, report=lambda logits: report, stats=stats)

    def on_hidden(self, layer, hidden_states):
        self.reached.append(layer)
        assert hidden_states.shape[1] == 7

    def commit(self, batch, verified):
        assert self.reached == list(self.taps), "every tap is told of, in the order of the pass"
        assert verified.logits.shape[:2] == (batch.size, 7)
        assert verified.report == (self.drafted[:, :1] + 1).tolist()
        # The states after the norm are those that the logits were made of.
        assert torch.allclose(self.target.unembed(verified.hidden_states[NORMED]), verified.logits, atol=1e-4)
        last = verified.last(verified.logits).argmax(-1)
        for slot, (one, new, count) in enumerate(zip(batch.sequences, verified.tokens, verified.counts)):
            assert one.tokens[batch.lengths[slot] :] == new and len(new) <= count + 1
            kept = verified.accepted_states(verified.logits)[slot, : count + 1].argmax(-1).tolist()
            # Greedy: what follows each token of the path is the next token of it.
            assert kept[: len(new)] == new and kept[-1] == last[slot]
            self.log.append(count)
        for tap, states in self.states.items():
            states[: batch.size] = verified.last(verified.hidden_states[tap])

    def end(self, slot):
        self.owner[slot] = None
'''
YAML = """# A toy.
_target_: methods.toy.Toy
name: toy
low: 2
"""


@pytest.fixture
def drafter(tmp_path, monkeypatch):
    """Made of the module and the YAML alone, as the runner makes one."""
    for name, content in (("methods/toy.py", MODULE), ("conf/method/toy.yaml", YAML)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path / "methods")])
    importlib.invalidate_caches()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("bench", overrides=[f"hydra.searchpath=[file://{tmp_path / 'conf'}]", "method=toy"])
    OmegaConf.resolve(cfg)
    check_method(cfg)
    module, _, cls = cfg.method._target_.rpartition(".")
    yield lambda pair: getattr(importlib.import_module(module), cls)(pair, **parameters(cfg.method))
    sys.modules.pop("methods.toy", None)


SCHEDULERS = {
    "batch size 1": lambda: Scheduler(1),
    "ragged": lambda: RaggedBatch(5),
    "eqspec": lambda: EqSpec(4),
    "exspec": lambda: ExSpec(4, window=7),
    "aligned chaos": lambda: AlignedChaos(4, random.Random(3)),
    "chaos": lambda: Chaos(4, random.Random(3)),
}


@pytest.mark.one_in(2)
@pytest.mark.first_fast
@pytest.mark.parametrize("arch", ["llama", "opt", "mistral"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_toy_in_every_scheduler(drafter, arch, name):
    pair, (requests, expected) = random_pair(arch), cases(arch)
    toy = drafter(pair)
    assert toy.taps == (2, pair.target.config.num_hidden_layers, NORMED)
    engine = Engine(StagedModel(pair.target), toy, frozenset(), SCHEDULERS[name]())
    steps = assert_lossless(engine, requests, expected)
    assert {0, 1} <= set(toy.log) and any(s.accepted for s in steps)
    drafted = [s for s in steps if s.drafted]
    # Where another sequence has more room, the first level alone is a draft of this one.
    assert all(s.drafted in (6, 3) and s.depth <= 2 and len(s.stats["toy"]) == 1 for s in drafted)
    assert all(s.drafted == 6 or s.depth == 1 for s in drafted)
    assert {s.stats["rows"] for s in drafted} == {s.sequences for s in drafted}


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_certain_tree_says_what_autoregressive_decoding_samples(drafter, name):
    pair = random_pair("llama")
    toy = drafter(pair)
    toy.commit = lambda batch, verified: None  # its checks are for greedy decoding
    target = StagedModel(pair.target)
    requests = [Request(r.prompt, SamplingParams(14, 0.8), r.seed) for r in cases("llama")[0]]
    plain = Engine(target, type(toy).__mro__[1](), frozenset())
    expected = [plain.generate([request])[0].tokens for request in requests]
    engine = Engine(target, toy, frozenset(), SCHEDULERS[name]())
    answers = engine.generate(requests)
    assert [answer.tokens for answer in answers] == expected
    assert any(step.accepted for answer in answers for step in answer.steps)
