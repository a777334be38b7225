"""The staged forward against the model's own, and what a pass is said to read."""

from __future__ import annotations

import copy
from itertools import chain, repeat

import pytest
import torch
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specbench.decoding.draft import Draft, Resume
from specbench.decoding.layers import by_columns, quick
from specbench.decoding.target import Target
from specbench.errors import UserError
from tests.decoding.helpers import random_pair
from tests.models import ARCHITECTURES, random_model


def logits_of(model, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_check_accepts_the_stock_models(arch):
    Target(random_pair(arch).target).check()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_check_refuses_shifted_positions(arch, monkeypatch):
    """A fault of ours, or a model whose positions work in another way, is found before anything is measured."""
    for name in ("_rope", "_learned"):
        positions = getattr(Target, name)

        def shifted(self, start, n, offsets, *capacity, positions=positions):
            return positions(self, start + (start > 0), n, offsets, *(c + 1 for c in capacity))

        monkeypatch.setattr(Target, name, shifted)
    with pytest.raises(UserError, match="cannot be driven layer by layer"):
        Target(random_pair(arch).target).check()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_layers_spread_over_devices(arch, monkeypatch):
    """Two names of one device stand for two devices: what moves from one to the other is the same."""
    model = random_pair(arch).target
    places = chain(["cpu"], repeat("cpu:0"))  # of the layers, as the target asks for them
    monkeypatch.setattr("specbench.decoding.target.device_of", lambda layer: torch.device(next(places)))
    target = Target(model)
    assert len(target.new_cache(8).parts) == 2
    target.check()


def test_check_refuses_a_model_that_does_more_than_its_parts():
    model = random_model("llama", 0)
    model.register_forward_hook(
        lambda module, args, output: setattr(output, "logits", output.logits / 7) or output
    )
    with pytest.raises(UserError, match="cannot be driven layer by layer"):
        Target(model).check()


def test_a_model_without_the_parts_is_named():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=17, n_positions=32, n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(UserError, match="model type 'gpt2'"):
        Target(model)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@torch.inference_mode()
def test_unequal_layers_resume_exactly(arch):
    """Shallow layers run ahead token by token; the deep ones follow in one pass."""
    model = random_pair(arch).target
    target, ids = Target(model), list(range(3, 33))
    cache = target.new_cache(64)
    prefill = target.prefill(torch.tensor([ids[:20]]), cache, taps=(2,))
    states = [target.run_layers(target.embed(torch.tensor([[i]])), cache, 0, 2) for i in ids[20:25]]
    assert cache.lengths == [25, 25] + [20] * (len(target.layers) - 2)
    draft = Draft(torch.tensor(ids[21:25]), resume=Resume(2, torch.cat(states, dim=1)))
    logits = target.verify(torch.tensor([[ids[20]]]), draft, cache)
    expected = logits_of(model, ids[:25])
    torch.testing.assert_close(logits, expected[20:25], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(prefill.logits[0], expected[19], atol=1e-4, rtol=1e-4)
    assert prefill.hidden[2].shape == (1, 20, target.hidden_size)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@torch.inference_mode()
def test_each_path_of_a_tree_gets_the_logits_of_its_own_sequence(arch):
    model = random_pair(arch).target
    target, prompt, pending = Target(model), list(range(3, 25)), 30
    cache = target.new_cache(64)
    target.prefill(torch.tensor([prompt]), cache)
    tokens, parents = [5, 6, 7, 8, 9], [-1, 0, -1, 2, 2]
    draft = Draft(torch.tensor(tokens), parents=torch.tensor(parents))
    logits = target.verify(torch.tensor([[pending]]), draft, cache)
    for node in range(len(tokens)):
        path, at = [], node
        while at >= 0:
            path.insert(0, tokens[at])
            at = parents[at]
        expected = logits_of(model, [*prompt, pending, *path])[-1]
        torch.testing.assert_close(logits[node + 1], expected, atol=1e-4, rtol=1e-4)
    # The accepted path moves into place; what follows is computed as if nothing else had been there.
    cache.keep(len(prompt) + 1, torch.tensor([2, 4]))
    after = target.verify(torch.tensor([[40]]), Draft(torch.tensor([], dtype=torch.int64)), cache)
    expected = logits_of(model, [*prompt, pending, 7, 9, 40])[-1]
    torch.testing.assert_close(after[0], expected, atol=1e-4, rtol=1e-4)


def test_pass_bytes_count_heads_but_no_look_ups():
    for tied in (True, False):
        model = random_model("llama", 0, tie_word_embeddings=tied)
        target = Target(model)
        embedding = model.model.embed_tokens.weight.numel() * 4
        everything = sum(p.numel() for p in model.parameters()) * 4
        assert target.pass_bytes() == (everything if tied else everything - embedding)
        parts = target.pass_bytes(0, 2, head=False) + target.pass_bytes(2)
        assert parts == target.pass_bytes()


def test_logits_can_be_cut_to_the_ids_that_count():
    model = random_model("llama", 0)
    hidden = torch.randn(1, 2, model.config.hidden_size)
    assert Target(model, vocab_size=50).head(hidden).shape == (1, 2, 50)


def test_driven_layers_share_weights_and_hooks_with_the_model():
    model = random_model("llama", 0)
    theirs = model.model.layers[0].mlp.up_proj
    target = Target(model)
    ours = target.layers[0].mlp.up_proj
    assert isinstance(ours, torch.nn.Linear) and ours.weight is theirs.weight
    assert {"weight", "bias"} <= vars(ours).keys()
    assert not {"weight", "bias"} & vars(theirs).keys(), "the model itself stays as it is"
    seen = []
    theirs.register_forward_hook(lambda *_: seen.append(1))
    target.run_layers(target.embed(torch.tensor([[1, 2]])), target.new_cache(2))
    assert seen == [1]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@torch.inference_mode()
def test_driven_layers_give_the_bits_of_the_models_own(arch):
    """Prefill and a token behind it, in the layout that the target gives to the weights."""
    model = copy.deepcopy(random_pair(arch).target)
    target = Target(model)
    for part in model.modules():
        if hasattr(part, "variance_epsilon"):
            part.weight.copy_(0.5 + torch.rand_like(part.weight))
    cache, ids = target.new_cache(12), torch.arange(3, 15).unsqueeze(0)
    kept = DynamicCache(config=model.config)
    for part in (ids[:, :11], ids[:, 11:]):
        own = model.get_decoder()(part, past_key_values=kept, use_cache=True).last_hidden_state
        assert torch.equal(target.norm(target.run_layers(target.embed(part), cache)), own)


def test_a_norm_that_is_computed_otherwise_stays_what_it_is():
    class Shifted(LlamaRMSNorm):
        """As Gemma's, whose weights are kept around zero."""

        def forward(self, hidden):
            return super().forward(hidden) + super().forward(hidden) / self.weight

    class Gated(LlamaRMSNorm):
        def forward(self, hidden, gate=None):
            return super().forward(hidden)

    norms = (
        (LlamaRMSNorm(24), True),
        (Shifted(24), False),
        (Gated(24), False),
        (LlamaRMSNorm(24).bfloat16(), None),
    )
    for norm, same in norms:
        states = torch.randn(3, 24, dtype=norm.weight.dtype)
        twin = quick(norm)
        assert torch.equal(twin(states), norm(states))
        if same is not None:
            assert (type(twin).forward is type(norm).forward) != same


def test_weights_are_laid_out_by_columns_and_stay_what_they_are():
    model = random_model("llama", 0, tie_word_embeddings=True)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    target = Target(model)
    assert target.layers[0].mlp.up_proj.weight.stride(0) == 1
    assert model.get_input_embeddings().weight.stride(1) == 1, "an embedding is read row by row"
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    hidden = torch.randn(1, 2, target.hidden_size)
    assert torch.allclose(target.unembed(hidden), model.lm_head(hidden), atol=1e-5)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)  # a weight that is trained on must not leave a stale copy behind
    assert torch.allclose(target.unembed(hidden), model.lm_head(hidden), atol=1e-5)


def test_columns_do_not_begin_a_whole_number_of_pages_apart():
    weight = torch.randn(2048, 24)
    laid = by_columns(weight)
    assert torch.equal(laid, weight) and laid.stride(0) == 1 and laid.stride(1) * 4 % 4096
    assert by_columns(laid) is laid
    assert by_columns(torch.randn(24, 2048)).stride() == (1, 24)
