"""What a check of the staged forward finds in each dtype, and what it does not take for a fault."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch

from specbench.decoding.model import layer_stack
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.state import Draft
from specbench.measure import runner
from specbench.measure.agreement import _checked_length, agreement, check_staged, filled, own_ways
from specbench.measure.runner import prepare
from specbench.models.devices import place_weights
from specbench.models.pairs import load_pair
from specbench.system.errors import UserError
from tests.support.conf import composed
from tests.support.decoding import checked, random_ids
from tests.support.models import random_model

HALF = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, *HALF]
# A trained family, and random weights of two.
MODELS = ["tiny", "llama", "qwen3"]


@cache
@torch.inference_mode(False)
def tiny():
    return load_pair(composed("bench", "pair=tiny", "pair.device=cpu").pair, seed=0, with_draft=False)


@cache
@torch.inference_mode(False)
def model_in(name: str, dtype: torch.dtype):
    """A model and the text to check it on."""
    model = copy.deepcopy(tiny().target) if name == "tiny" else random_model(name, 0)
    place_weights(model, torch.device("cpu"), dtype)
    text = tiny().sample_ids() if name == "tiny" else random_ids(model.config, model.config.vocab_size)
    return model, text


def shift_positions(target: StagedModel, monkeypatch) -> None:
    """After the prompt they are one too large."""
    target._make_angles(2048)
    ropes = target.stack.ropes
    monkeypatch.setattr(
        target.stack, "ropes", lambda ctx, n: ropes(replace(ctx, start=ctx.start + (ctx.start > 0)), n)
    )


def change_theta(target: StagedModel, monkeypatch) -> None:
    config = copy.deepcopy(target.config)
    config.rope_parameters["rope_theta"] *= 10
    target.stack.rotary = type(target.stack.rotary)(config)


def leave_out_a_layer(target: StagedModel, monkeypatch) -> None:
    target.layers[len(target.layers) // 2] = lambda hidden, **arguments: hidden


def swap_layers(target: StagedModel, monkeypatch) -> None:
    target.layers[1], target.layers[-1] = target.layers[-1], target.layers[1]


def mask_that(allows) -> object:
    """A fault in the masks of passes after the prompt: `allows` tells from how far back a token is visible."""

    def plant(target: StagedModel, monkeypatch) -> None:
        def mask(ctx, n, like, window=None, implied=True):
            if ctx.start == 0:
                return None
            positions = torch.arange(ctx.start, ctx.kv_len)
            back = positions.unsqueeze(-1) - torch.arange(ctx.kv_len)
            return torch.zeros(1, 1, *back.shape, dtype=like.dtype).masked_fill_(~allows(back), float("-inf"))

        monkeypatch.setattr(layer_stack, "attention_mask", mask)

    return plant


def change_epsilon(target: StagedModel, monkeypatch) -> None:
    for layer in target.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.variance_epsilon = 0.1


def leave_out_the_norm(target: StagedModel, monkeypatch) -> None:
    target._norm = torch.nn.Identity()  # that the head is given, of the same weights as `norm`


def scale_logits(target: StagedModel, monkeypatch) -> None:
    target._logit_steps = [(lambda logits, scale: logits * scale, 1.1)]


FAULTS = {
    "positions": shift_positions,
    "theta": change_theta,
    "layer": leave_out_a_layer,
    "order": swap_layers,
    "next": mask_that(lambda back: back >= -1),
    "previous": mask_that(lambda back: (back >= 0) & (back != 1)),
    "epsilon": change_epsilon,
    "norm": leave_out_the_norm,
    "scale": scale_logits,
}


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, name, dtype, monkeypatch):
    model, text = model_in(name, dtype)
    target = StagedModel(model)
    FAULTS[fault](target, monkeypatch)
    with pytest.raises(UserError, match="its logits differ"):
        check_staged(target, text)


@pytest.mark.one_in(3)
@pytest.mark.first_fast
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("width", [None, 8])
def test_a_model_without_a_fault_is_accepted(name, dtype, width):
    model, text = model_in(name, dtype)
    found = check_staged(StagedModel(model, width=width), text)
    assert 0 <= found.distance <= found.limit / 1.4 and found.noise > 0
    assert found.limit < (1e-4 if dtype == torch.float32 else 0.1)


@torch.inference_mode()
def largest_difference(model, ids: torch.Tensor) -> float:
    """What was judged before: the largest difference from the model's whole pass, as a share of the largest logit."""
    target, cut = StagedModel(model), ids.shape[1] // 2
    cache = target.new_cache(ids.shape[1])
    first = target.head(target.run_layers(target.embed(ids[:, :cut]), cache, 0))
    second = target.verify(ids[:, cut : cut + 1], Draft(ids[:, cut + 1 :]), cache, cut)
    staged, own = torch.cat([first, second], dim=1), model(ids, use_cache=False).logits
    return ((staged - own).abs().max() / own.abs().max()).item()


@pytest.mark.slow
def test_a_model_whose_own_ways_lie_far_apart_is_accepted():
    """Thirty layers of random weights in bfloat16: by how much depends on the processor's kernels, from 0.09 on."""
    differences = []
    for seed in (1, 2, 3):
        model = random_model("llama", seed, vocab_size=256, num_hidden_layers=30)
        place_weights(model, torch.device("cpu"), torch.bfloat16)
        differences.append(largest_difference(model, torch.arange(24).unsqueeze(0)))
        found = checked(StagedModel(model))
        assert found.distance < found.noise
    assert max(differences) > 0.05, "a fixed bound that finds faults in other models would accept all of them"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_refusal_names_both_figures_and_the_dtype(dtype):
    model, text = model_in("llama", dtype)
    target = StagedModel(model)
    accepted = check_staged(target, text)
    leave_out_a_layer(target, None)
    figure = r"\d\.\de[-+]\d\d"
    told = rf"model's own by {figure} of their scale, and the model's own by {accepted.noise:.1e} among themselves"
    with pytest.raises(UserError, match=rf"model type 'llama' .*{told}, in {str(dtype)[6:]}; ") as refused:
        check_staged(target, text)
    assert "\n" not in str(refused.value)


def test_attention_is_as_before_afterwards(monkeypatch):
    model, text = model_in("llama", torch.float32)
    asked = []
    forward = type(model).forward

    def watched(self, *args, **options):
        asked.append(self.config._attn_implementation)
        if fails and asked[-1] == "eager":
            raise RuntimeError("no eager attention")
        return forward(self, *args, **options)

    monkeypatch.setattr(type(model), "forward", watched)
    for fails in (False, True):
        asked.clear()
        if fails:
            with pytest.raises(UserError, match="no eager attention"):
                check_staged(StagedModel(model), text)
        else:
            check_staged(StagedModel(model), text)
        assert asked[-1] == "eager" and set(asked) == {"sdpa", "eager"}
        assert model.config._attn_implementation == "sdpa"


def test_a_family_with_eager_attention_alone_has_two_ways():
    model, ids = random_model("gemma2", 0), torch.arange(3, 43).unsqueeze(0)
    assert model.config._attn_implementation == "eager"
    with torch.inference_mode():
        assert len(own_ways(model, ids, [0, 30, 40])) == 2


def test_ways_that_agree_to_the_bit_leave_room_for_a_rounding():
    logits = torch.randn(40, 61, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    groups, eps = [(0, 40)], torch.finfo(torch.bfloat16).eps
    rounded = torch.nextafter(logits, torch.zeros_like(logits))
    found = agreement(rounded, [logits, logits.clone()], groups)
    assert found.noise == 0 and 0 < found.distance < eps and found.holds
    assert not agreement(logits * 1.05, [logits, logits], groups).holds
    assert not agreement(logits * float("nan"), [logits, logits], groups).holds


def test_positions_that_hang_on_a_rounding_refuse_no_model_and_a_kind_of_pass_is_not_outvoted():
    generator = torch.Generator().manual_seed(0)
    logits, others, noise = (torch.randn(40, 61, generator=generator) for _ in range(3))
    ways, groups = [logits, logits + 1e-6 * noise], [(0, 30), (30, 40)]
    outlier, kind = logits.clone(), logits.clone()
    outlier[[3, 35]] = others[[3, 35]]
    assert agreement(outlier, ways, groups).holds
    kind[30:] += 1e-3 * others[30:]
    assert not agreement(kind, ways, groups).holds


@pytest.mark.parametrize(("dtype", "wrong"), [(torch.float32, 1e-3), (torch.bfloat16, 0.6)], ids=str)
def test_ways_that_compute_something_else_hide_no_fault(dtype, wrong):
    """As they would with an eager attention that leaves something out."""
    generator = torch.Generator().manual_seed(0)
    logits, others, fault = (torch.randn(40, 61, generator=generator) for _ in range(3))
    ways = [logits.to(dtype), logits.to(dtype), (logits + others).to(dtype)]
    assert not agreement((logits + wrong * fault).to(dtype), ways, [(0, 40)]).holds


def test_eager_attention_that_overflows_is_no_way():
    model = copy.deepcopy(model_in("llama", torch.float16)[0])
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.weight.data *= 100
    ids = torch.tensor([filled(random_ids(model.config, 61), 72)])
    with torch.inference_mode():
        assert len(own_ways(model, ids, [0, 60, 72])) == 2
    check_staged(StagedModel(model), ids[0].tolist())


def test_logits_that_are_no_numbers_are_told():
    model = copy.deepcopy(model_in("llama", torch.float16)[0])
    model.model.norm.weight.data[0] = float("inf")
    with pytest.raises(UserError, match="'llama' gives logits that are not finite in float16"):
        checked(StagedModel(model))


def test_a_run_checks_its_target_on_text_of_its_tokenizer(monkeypatch):
    given = []
    monkeypatch.setattr(runner, "check_staged", lambda target, text: given.append(text))
    bench = prepare(composed("bench", "pair=tiny", "method=ar", "generate=false"))
    [ids] = given
    text = bench.setup.pair.tokenizer.decode(ids)
    assert "the ferry to the island" in text and len(ids) > 200
    assert ids == bench.setup.pair.sample_ids()


def test_the_text_fills_short_windows_and_the_positions_that_there_are():
    for overrides, length in (
        ({}, 72),
        ({"sliding_window": 100}, 132),
        ({"max_position_embeddings": 40}, 40),
    ):
        target = StagedModel(random_model("mistral", 0, **overrides))
        assert _checked_length(target) == length
        check_staged(target, [5, 9, 20])
