"""The bytes of weights that a pass is said to read: of experts, and of quantised layers, which are left as they are."""

from __future__ import annotations

import math

import pytest
import torch

from specbench.decoding.cpu.packed_linear import FusedSlice, PackedLinear
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.model.cost import Experts, weight_bytes
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.scheduler import Scheduler
from specbench.decoding.state import Request
from tests.support.decoding import checked, generate_with_transformers, random_pair
from tests.support.drafters import ModelChain
from tests.support.models import random_model

PROMPT = [5, 9, 20, 9, 31]


@pytest.mark.parametrize(("arch", "shared"), [("mixtral", 0), ("qwen2_moe", 3 * 64 * 32 + 64)])
def test_experts_that_a_token_uses_are_counted(arch, shared):
    """By hand: 8 experts of three matrices, of which a token uses 2; a shared expert, with its gate, is read always."""
    target = StagedModel(random_model(arch, 0))
    config = target.config
    width = getattr(config, "moe_intermediate_size", config.intermediate_size)
    expert = 3 * 64 * width
    attention = 64 * 64 * 2 + 2 * 64 * 32 + (64 + 2 * 32 if arch == "qwen2_moe" else 0)
    always = attention + 2 * 64 + 8 * 64 + shared  # norms, router
    assert target.pass_bytes(0, 1, head=False) == 4 * (always + 2 * expert)
    assert target.pass_bytes() == 4 * (4 * (always + 2 * expert) + 64 + 61 * 64)
    assert target.pass_bytes(0, 1, head=False, tokens=1000) == pytest.approx(4 * (always + 8 * expert))
    several = [target.pass_bytes(tokens=n) for n in range(1, 9)]
    assert several == sorted(set(several)), "more tokens choose more experts"


@pytest.mark.parametrize(("count", "chosen", "tokens"), [(8, 2, 3), (60, 4, 6), (16, 1, 40)])
def test_expected_experts_are_those_of_independent_choices(count, chosen, tokens):
    rounds, generator = 4000, torch.Generator().manual_seed(0)
    drawn = torch.rand(rounds, tokens, count, generator=generator).topk(chosen).indices.flatten(1)
    distinct = torch.zeros(rounds, count).scatter_(1, drawn, 1.0).sum(1).mean().item()
    assert Experts(1000 * count, count, chosen).read(tokens) == pytest.approx(1000 * distinct, rel=0.02)
    assert Experts(1000 * count, count, chosen).read(1) == 1000 * chosen


def test_one_token_reads_the_experts_that_are_counted():
    """Measured: with the weights of all other experts gone, the answer of a token is the same."""
    model = random_model("qwen2_moe", 0)
    chosen, ids = [], torch.tensor([[7]])
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda _, args: chosen.append(args[1].unique()))
    with torch.inference_mode():
        whole = model(ids).logits
        for layer, some in zip(model.model.layers, list(chosen)):
            others = [i for i in range(8) if i not in some]
            layer.mlp.experts.gate_up_proj[others] = math.nan
            layer.mlp.experts.down_proj[others] = math.nan
        assert torch.equal(model(ids).logits, whole)
    assert {len(some) for some in chosen} == {2}


def test_rounds_count_the_tokens_that_they_verify():
    pair = random_pair("mixtral")
    target = StagedModel(pair.target)
    for drafter in (Drafter(), ModelChain(pair.draft, 3)):
        steps = Engine(target, drafter, frozenset()).answer(PROMPT, SamplingParams(12)).steps
        assert [s.target_bytes for s in steps] == [target.pass_bytes(tokens=1 + s.drafted) for s in steps]


def test_a_pass_of_a_batch_reads_the_experts_of_all_its_tokens():
    pair, target = random_pair("mixtral"), StagedModel(random_pair("mixtral").target)
    engine = Engine(target, ModelChain(pair.draft, 3), frozenset(), Scheduler(2))
    answers = engine.generate([Request(PROMPT, SamplingParams(12))] * 2)
    steps = [step for answer in answers for step in answer.steps if step.sequences == 2]
    assert steps and all(
        step.target_bytes == target.pass_bytes(tokens=2 * (1 + step.drafted)) for step in steps
    )


def test_experts_that_cannot_be_counted_are_not_made_up():
    """Where no layer says how many a token uses, or none is found, bytes and what rests on them are null."""
    silent, hidden = random_model("mixtral", 0), random_model("mixtral", 0)
    for layer in silent.model.layers:
        del layer.mlp.top_k, layer.mlp.gate.top_k
        layer.mlp.gate.register_forward_pre_hook(lambda gate, _: gate.__dict__.update(top_k=2))
    for layer in hidden.model.layers:
        layer.mlp.experts.num_experts = -1
    for model in (silent, hidden):
        assert math.isnan(StagedModel(model).pass_bytes())
        assert StagedModel(model).pass_bytes(0, 0) > 0, "the head alone"
    steps = Engine(StagedModel(silent), Drafter(), frozenset()).answer(PROMPT, SamplingParams(3)).steps
    assert [s.target_bytes for s in steps] == [None, None]


class Int8(torch.nn.Module):
    """A linear layer as quantising libraries make it: no torch.nn.Linear; whole numbers and a scale are stored."""

    def __init__(self, linear: torch.nn.Linear):
        super().__init__()
        scale = linear.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("qweight", (linear.weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("scratch", torch.zeros(1000), persistent=False)
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, states):
        return torch.nn.functional.linear(states, self.qweight * self.scale)


class Int8Weight(torch.Tensor):
    """A weight that stands for whole numbers and a scale, within a plain torch.nn.Linear."""

    @staticmethod
    def __new__(cls, qweight, scale):
        return torch.Tensor._make_wrapper_subclass(cls, qweight.shape, dtype=scale.dtype)

    def __init__(self, qweight, scale):
        self.qweight, self.scale = qweight, scale

    def __tensor_flatten__(self):
        return ["qweight", "scale"], None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.linear:
            states, weight, *bias = args
            return func(states, weight.qweight * weight.scale, *bias)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].qweight, args[0].scale)
        raise NotImplementedError(f"{func} of a quantised weight")


def with_int8_weight(linear: torch.nn.Linear) -> torch.nn.Linear:
    made = Int8(linear)
    linear.weight = torch.nn.Parameter(Int8Weight(made.qweight, made.scale), requires_grad=False)
    return linear


@pytest.mark.parametrize("quantise", [Int8, with_int8_weight])
def test_quantised_layers_are_left_as_they_are_and_counted_as_stored(quantise):
    model = random_model("llama", 0)
    plain = StagedModel(random_model("llama", 0))
    for layer in model.model.layers:
        for parent, name in ((layer.mlp, "up_proj"), (layer.self_attn, "q_proj")):
            setattr(parent, name, quantise(getattr(parent, name)))
    target = StagedModel(model)
    checked(target)
    for layer in target.layers:
        assert type(layer.mlp.up_proj).__name__ == quantise(torch.nn.Linear(2, 2)).__class__.__name__
        assert isinstance(layer.mlp.down_proj, PackedLinear | FusedSlice), "the others are laid out"
    # Of 96 x 64 and 64 x 64 numbers each takes a byte instead of four; every row has a scale.
    saved = 3 * (96 * 64 + 64 * 64) - 4 * (96 + 64)
    assert target.pass_bytes() == plain.pass_bytes() - 5 * saved
    answer = Engine(target, ModelChain(model, 3), frozenset()).answer(PROMPT, SamplingParams(16)).tokens
    assert answer == generate_with_transformers(model, PROMPT, 16, stop_ids=())


def test_a_quantised_head_is_driven():
    model = random_model("llama", 0)
    model.lm_head = Int8(model.lm_head)
    target = StagedModel(model)
    checked(target)
    assert target.vocab_size == 61 and target.pass_bytes(0, 0) == 4 * 64 + 61 * 64 + 4 * 61


def test_a_tied_weight_counts_once():
    pair = torch.nn.ModuleList([torch.nn.Linear(3, 5, bias=False), torch.nn.Linear(3, 5, bias=False)])
    assert weight_bytes(pair) == 120
    pair[1].weight = pair[0].weight
    assert weight_bytes(pair) == 60
