"""SWIFT: what is left out, what a set is scored by, the tree, and the search."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.hooks import attach_execution_device_hook

from methods.ragged import RaggedBatch
from methods.swift import Swift
from methods.swift.search import LayerSearch, _evidence, _kernel
from methods.swift.sublayers import Sublayers, check_parts
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.scheduler import Scheduler
from specbench.decoding.state import Request
from specbench.models.pairs import load_pair
from specbench.system.errors import UserError
from tests.support.conf import composed
from tests.support.decoding import generate_with_transformers
from tests.support.models import random_model

PROMPT = list(range(5, 25))


@pytest.fixture(scope="module")
def tiny():
    return load_pair(composed("bench", "pair=tiny_shallow", "pair.device=cpu").pair, 0, with_draft=False)


def search(**changes) -> LayerSearch:
    return LayerSearch(**{"layers": 12, "ratio": 0.45, "bayes_interval": 25, "max_steps": 1000, "patience": 300,
                          "enough": 0.95, **changes})  # fmt: skip


# -- a model without some of its parts


def by_hand(model, ids: torch.Tensor, attention: set[int], mlp: set[int]) -> torch.Tensor:
    """Logits of a Llama or Qwen3 whose layers lack some parts, by its own modules and nothing of ours."""
    base, n = model.model, ids.shape[1]
    hidden = base.embed_tokens(ids)
    rope = base.rotary_emb(hidden, torch.arange(n).unsqueeze(0))
    mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
    for i, layer in enumerate(base.layers):
        if i not in attention:
            normed = layer.input_layernorm(hidden)
            hidden = hidden + layer.self_attn(normed, position_embeddings=rope, attention_mask=mask)[0]
        if i not in mlp:
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.lm_head(base.norm(hidden))


@pytest.mark.parametrize(("name", "hooked"), [("llama", False), ("qwen3", False), ("llama", True)])
def test_a_model_without_parts_computes_what_its_own_modules_say(name, hooked):
    """Also one with the hooks that accelerate gives to a target on several devices."""
    model = random_model(name, 0)
    if hooked:
        attach_execution_device_hook(model, "cpu")
    staged, ids = StagedModel(model), torch.tensor([PROMPT])
    sublayers = Sublayers(staged)
    for attention, mlp in (({1}, {2}), ({1, 2}, {1}), (set(), {0, 3}), (set(), set())):
        thin = sublayers.without(attention, mlp)
        with torch.inference_mode():
            states = thin.run_layers(thin.embed(ids), thin.new_cache(len(PROMPT)), 0)
            torch.testing.assert_close(thin.head(states), by_hand(model, ids, attention, mlp))
    with torch.inference_mode():  # the model itself has lost nothing
        states = staged.run_layers(staged.embed(ids), staged.new_cache(len(PROMPT)), 0)
        torch.testing.assert_close(staged.head(states), model(ids).logits)


def test_positions_are_those_of_the_model_itself():
    """Both have one table of angles: neither takes it for longer, or for shorter, than it is."""
    staged = StagedModel(random_model("llama", 0))
    thin = Sublayers(staged).without({1}, {2})
    staged._make_angles(40)
    thin._make_angles(30)
    assert staged.stack.positions == thin.stack.positions == 40
    thin._make_angles(50)
    assert staged.stack.positions == 50
    assert all(cos.shape[1] == sin.shape[1] == 50 for cos, sin in staged.stack.angles.values())


def test_bytes_of_a_pass_are_those_of_the_parts_that_are_left():
    model = random_model("llama", 0)
    staged = StagedModel(model)

    def size(module) -> int:
        return sum(weight.nbytes for weight in module.parameters())

    layers = model.model.layers
    lost = size(layers[1].self_attn) + size(layers[2].mlp)
    sublayers = Sublayers(staged)
    thin = sublayers.without({1}, {2})
    assert thin.pass_bytes() == staged.pass_bytes() - lost
    assert thin.stack.compiled is None
    whole = sublayers.without({3}, {3}).pass_bytes()
    assert whole == staged.pass_bytes() - size(layers[3])


def test_layers_that_lack_nothing_run_compiled_if_the_targets_do():
    staged = StagedModel(random_model("llama", 0))
    compiled = staged.stack.compiled = [torch.nn.Identity() for _ in staged.layers]
    layers = Sublayers(staged).without({1}, {1, 2}).stack.layers
    assert [i for i, layer in enumerate(layers) if layer not in compiled] == [1, 2]


def test_a_feed_forward_part_that_also_returns_scores_can_be_left_out():
    model = random_model("gpt_oss", 0)
    thin, ids = Sublayers(StagedModel(model)).without({1}, {2}), torch.tensor([PROMPT])
    with torch.inference_mode():
        states = thin.head(thin.run_layers(thin.embed(ids), thin.new_cache(len(PROMPT)), 0))
    for part in (model.model.layers[1].self_attn, model.model.layers[2].mlp):
        part.register_forward_hook(lambda part, given, gives: (torch.zeros_like(gives[0]), *gives[1:]))
    with torch.inference_mode():
        torch.testing.assert_close(states, model(ids).logits)


def test_layers_without_such_parts_are_refused():
    with pytest.raises(UserError, match="has no self_attn and mlp that could be left out"):
        check_parts(torch.nn.Linear(2, 2))
    with pytest.raises(UserError, match="that could be left out"):
        Swift(SimpleNamespace(target=random_model("opt", 0)))


# -- scoring


def drafted(pair, prompt: list[int], tokens: int, scheduler: Scheduler | None = None, **settings):
    drafter = Swift(pair, **settings)
    engine = Engine(StagedModel(pair.target), drafter, frozenset(), scheduler, pair.context_length)
    return drafter, engine.generate([Request(prompt, SamplingParams(tokens))])[0]


@pytest.mark.slow
def test_a_set_is_scored_by_how_often_it_says_what_the_target_said(tiny, monkeypatch):
    """The score of the engine's cache, in which nothing may be lost, against one with a cache of its own."""
    told: list[tuple] = []
    really = LayerSearch.tell

    def tell(self, score):
        told.append((self._proposed[0], score))
        really(self, score)

    monkeypatch.setattr(LayerSearch, "tell", tell)
    prompt = tiny.sample_ids()[:60]
    window = 8
    _, answer = drafted(tiny, prompt, 40, context_window=window, enough=1.0)
    assert len(told) >= 5
    staged = StagedModel(tiny.target)
    sublayers = Sublayers(staged)
    with torch.inference_mode():
        for skipped, score in told:
            cache = staged.new_cache(200)
            staged.prefill(torch.tensor([prompt]), cache)
            thin = sublayers.without(skipped.attention, skipped.mlp)
            ids = torch.tensor([answer.tokens[: window + 1]])
            states = thin.run_layers(thin.embed(ids[:, :-1]), cache, len(prompt))
            expected = (thin.head(states).argmax(-1) == ids[:, 1:]).float().mean().item()
            assert score == pytest.approx(expected)
    assert answer.tokens == generate_with_transformers(tiny.target, prompt, 40, [])


@pytest.mark.slow
def test_no_set_is_scored_before_the_answer_is_long_enough_or_when_the_search_has_ended(tiny):
    prompt = tiny.sample_ids()[:40]
    drafter, _ = drafted(tiny, prompt, 30, context_window=32)
    assert drafter._search.steps == 0
    drafter, _ = drafted(tiny, prompt, 30, context_window=4, max_steps=2)
    assert drafter._search.steps == 2


@pytest.mark.parametrize("memory", ["run", "answer"])
def test_the_search_goes_on_from_answer_to_answer_or_begins_anew(tiny, memory):
    drafter = Swift(tiny, context_window=4, memory=memory, enough=1.0)
    engine = Engine(StagedModel(tiny.target), drafter, frozenset(), None, tiny.context_length)
    requests = [Request(tiny.sample_ids()[:n], SamplingParams(20)) for n in (30, 40)]
    engine.generate(requests[:1])
    after_one = drafter._search.steps
    kept = drafter.snapshot()
    engine.generate(requests[1:])
    assert after_one > 0
    assert (drafter._search.steps > after_one) == (memory == "run")
    drafter.restore(kept)
    assert drafter._search.steps == after_one
    drafter.forget()
    assert drafter._search.steps == 0


def test_what_all_models_of_a_search_need_is_looked_up_once(tiny, monkeypatch):
    """Also where buffers are made anew."""
    made, really = [], Sublayers.__init__
    monkeypatch.setattr(
        Sublayers, "__init__", lambda self, target: made.append(target) or really(self, target)
    )
    drafter = Swift(tiny, context_window=4, enough=1.0)
    engine = Engine(StagedModel(tiny.target), drafter, frozenset(), None, tiny.context_length)
    for times in (1, 6):
        engine.generate([Request(tiny.sample_ids()[:40] * times, SamplingParams(20))])
    assert drafter._search.steps > 1 and made == [engine.target]


# -- the tree


def test_the_tree_is_a_chain_of_sure_tokens_with_more_beside_it_the_less_sure_it_is(tiny, monkeypatch):
    drafts = []
    really = Swift.draft
    monkeypatch.setattr(Swift, "draft", lambda self, batch: drafts.append(really(self, batch)) or drafts[-1])
    drafted(tiny, tiny.sample_ids()[:60], 40, max_steps=1)
    widths = []
    for draft in drafts:
        if draft.tree is None:
            continue
        depths = draft.tree.offsets()[0, 1:]
        levels = [int((depths == depth).sum()) for depth in range(1, int(depths.max()) + 1)]
        assert set(levels[:-1]) <= {3, 5, 8}  # the chain went on: its token was sure
        widths += levels
    assert widths
    assert set(widths) <= {3, 5, 8, 10}
    assert max(widths) == 10


# -- the search itself


def test_sets_have_the_size_that_was_asked_for_and_spare_the_first_and_the_last_layer():
    one = search(bayes_interval=3)
    assert one.best.attention == one.best.mlp == {1, 3, 5, 7, 9}
    for step in range(12):
        skipped = one.propose()
        assert len(skipped.attention) + len(skipped.mlp) == int(20 * 0.45)
        assert skipped.attention | skipped.mlp <= set(range(1, 11))
        one.tell(step / 100)


def test_the_best_set_is_kept_and_the_search_ends_for_each_of_its_reasons():
    one = search(bayes_interval=None)
    first = one.propose()
    one.tell(0.5)
    one.propose()
    one.tell(0.4)
    assert (one.best, one.score, one.without_gain) == (first, 0.5, 1)
    assert not one.done
    assert search(max_steps=0).done
    assert search(layers=2).done
    one.patience = 0
    assert one.done
    one.patience, one.enough = 300, 0.49
    assert one.done


def test_the_same_seed_proposes_the_same_sets_and_another_seed_others():
    def proposals(seed: int) -> list:
        one = search(bayes_interval=4, seed=seed)
        found = []
        for _ in range(10):
            found.append(one.propose())
            one.tell(len(found[-1].attention) / 20)
        return found

    assert proposals(1) == proposals(1)
    assert proposals(1) != proposals(2)


def test_suggestions_find_a_better_set_than_chance():
    """A score that counts the attention parts left out: what is learnt from some sets must lead to more of them."""

    def score(one: LayerSearch) -> float:
        skipped = one.propose()
        value = len(skipped.attention) / 9
        one.tell(value)
        return value

    by_chance, suggested = search(bayes_interval=None), search(bayes_interval=2)
    chance = np.mean([score(by_chance) for _ in range(60)])
    values = [score(suggested) for _ in range(60)]
    assert np.mean(values[1::2][10:]) > chance + 0.15


def test_the_kernel_and_its_evidence():
    points = np.array([[0.0], [1.0], [2.0]])
    kernel = _kernel(points, points, 1.0)
    distance = np.sqrt(5.0)
    assert kernel[0, 0] == 1.0
    assert kernel[0, 1] == pytest.approx((1 + distance + distance**2 / 3) * np.exp(-distance))
    np.testing.assert_allclose(kernel, kernel.T)
    targets = np.array([0.3, -0.1, 0.4])
    covariance = kernel + 1e-2 * np.eye(3)
    expected = -0.5 * targets @ np.linalg.solve(covariance, targets) - 0.5 * np.linalg.slogdet(covariance)[1]
    assert _evidence(points, targets, 1.0) == pytest.approx(expected)


def test_no_pass_drafts_nodes_that_there_is_no_room_for(tiny):
    """Under a budget of tokens a draft ends when it is full, however sure it is."""
    drafter = Swift(tiny, confidence_threshold=0.0, max_draft_tokens=9)
    engine = Engine(tiny.staged, drafter, frozenset(), RaggedBatch(2, 8))
    answers = engine.generate([Request(PROMPT, SamplingParams(30)), Request(PROMPT[3:], SamplingParams(30))])
    steps = [step for one in answers for step in one.steps if step.drafted]
    one_pass = drafter.model.pass_bytes(tokens=2)
    assert max(step.drafted for step in steps) == 3 and max(step.draft_bytes for step in steps) < 4 * one_pass
