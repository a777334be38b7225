"""The staged forward against the model's own, and what a pass is said to read."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import chain, repeat

import pytest
import torch
import transformers
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specbench.decoding.cpu.lean_modules import lean_copy
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.kv_cache import ForwardContext
from specbench.decoding.model.layer_stack import LayerStack
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import NORMED, Draft, Resume
from specbench.decoding.tree import Tree
from specbench.models.surgery import cut
from specbench.system.errors import UserError
from tests.support.decoding import checked, generate_with_transformers, random_pair
from tests.support.drafters import ModelChain
from tests.support.models import ARCHITECTURES, COMMON, random_model


def logits_of(model, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_check_accepts_the_stock_models(arch):
    checked(StagedModel(random_pair(arch).target))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_check_refuses_shifted_positions(arch, monkeypatch):
    """A fault of ours, or a model whose positions work in another way, is found before anything is measured."""
    for name in ("ropes", "embedded_positions"):
        positions = getattr(LayerStack, name)

        def shifted(self, ctx, n, positions=positions):
            return positions(self, replace(ctx, start=ctx.start + (ctx.start > 0)), n)

        monkeypatch.setattr(LayerStack, name, shifted)
    target = StagedModel(random_pair(arch).target)
    target._make_angles(1000)
    with pytest.raises(UserError, match="model type '.*layer by layer"):
        checked(target)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_layers_spread_over_devices(arch, monkeypatch):
    """Two names of one device stand for two devices: what moves from one to the other is the same."""
    model = random_pair(arch).target
    places = chain(["cpu"], repeat("cpu:0"))  # of the layers, as the target asks for them
    monkeypatch.setattr(
        "specbench.decoding.model.layer_stack.device_of", lambda layer: torch.device(next(places))
    )
    target = StagedModel(model)
    assert len(target.new_cache(8).segments) == 2
    checked(target)


def test_check_refuses_a_model_that_does_more_than_its_parts():
    model = random_model("llama", 0)
    model.register_forward_hook(
        lambda module, args, output: setattr(output, "logits", output.logits / 7) or output
    )
    with pytest.raises(UserError, match="model type '.*layer by layer"):
        checked(StagedModel(model))


def test_a_model_without_the_parts_is_named():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=17, n_positions=32, n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(UserError, match="model type 'gpt2'"):
        StagedModel(model)


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
}
LINEAR = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
# Families whose layers want more than hidden states, a mask, a cache and positions, and one that does not.
OTHERS = {
    "DeepseekV2": ("DeepseekV2Config", LATENT),
    "DeepseekV3": ("DeepseekV3Config", LATENT),
    "Ministral3": ("Ministral3Config", {"head_dim": 16}),
    "MiniMax": ("MiniMaxConfig", {"head_dim": 16, **EXPERTS}),
    "Qwen3Next": (
        "Qwen3NextConfig",
        {
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            **EXPERTS,
            **LINEAR,
        },
    ),
    "Mistral4": ("Mistral4Config", LATENT),
    "Llama4": ("Llama4TextConfig", {"head_dim": 16, "intermediate_size_mlp": 96, **EXPERTS}),
    "Falcon": ("FalconConfig", {}),
    "Bloom": ("BloomConfig", {}),
    "GPTJ": ("GPTJConfig", {}),
    "Lfm2": ("Lfm2Config", {}),
    "Ministral": ("MinistralConfig", {"head_dim": 16}),
}


def family(name: str, **overrides):
    """A tiny random model of a family that transformers has."""
    config_name, own = OTHERS[name]
    config = getattr(transformers, config_name)(
        **{**COMMON, "vocab_size": 61, "num_hidden_layers": 4, **own, **overrides}
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)


@pytest.mark.first_fast
@pytest.mark.parametrize("name", OTHERS)
def test_a_family_is_driven_exactly_or_refused_in_one_line(name):
    model = family(name)
    try:
        target = StagedModel(model)
        checked(target)
    except UserError as refusal:
        assert str(refusal).startswith(f"model type '{model.config.model_type}' ")
        assert "\n" not in str(refusal) and name != "Ministral"
    else:
        assert name == "Ministral"
        assert_lossless_behind_itself(model)


def assert_lossless_behind_itself(model):
    """Drafts of the model's own first layers, often right, leave its answers as transformers gives them."""
    engine = Engine(StagedModel(model), ModelChain(cut(model, [0, 1, 2]), 4), frozenset())
    for prompt in ([5, 9, 20, 9], list(range(3, 50))):
        answer = engine.answer(prompt, SamplingParams(24)).tokens
        assert answer == generate_with_transformers(model, prompt, 24, stop_ids=())


def test_a_full_memory_is_not_taken_for_a_family_that_cannot_be_driven(monkeypatch):
    target = StagedModel(random_model("llama", 0))

    def full(*args):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(target, "run_layers", full)
    with pytest.raises(torch.OutOfMemoryError):
        checked(target)


def test_a_model_without_a_head_is_refused_in_one_line(monkeypatch):
    model = random_model("llama", 0)
    monkeypatch.setattr(model, "get_output_embeddings", lambda: None)
    with pytest.raises(UserError, match="model type 'llama'.*AttributeError"):
        StagedModel(model)


@pytest.mark.first_fast
@pytest.mark.parametrize(
    ("arch", "fault"),
    [
        ("gemma2", {"_logit_steps": []}),
        ("gemma2", {"implied_masks": True}),
        ("gemma2", {"kinds": [(None, None)] * 4}),
        ("gemma3", {"kinds": [(None, "full_attention"), (8, "sliding_attention")] * 2}),
        ("cohere", {"_logit_steps": []}),
        ("granite", {"embedding_scale": 1.0}),
        ("granite", {"_logit_steps": []}),
    ],
)
def test_check_refuses_what_leaves_out_a_step_of_a_family(arch, fault):
    """With some of these faults greedy answers would be right: scales and caps leave the largest logit the largest."""
    target = StagedModel(random_model(arch, 0))
    checked(target)
    for owner in (target, target.stack):
        vars(owner).update({name: value for name, value in fault.items() if hasattr(owner, name)})
    target.stack.kinds_there = frozenset(target.stack.kinds)
    with pytest.raises(UserError, match="its logits differ"):
        checked(target)


def test_the_language_model_of_one_that_also_sees_is_driven():
    text = {**COMMON, "vocab_size": 61, "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 8}
    sight = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text, vision_config={**sight, "image_size": 28, "patch_size": 14}
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval().requires_grad_(False)
    target = StagedModel(model)
    checked(target)
    answer = Engine(target, Drafter(), frozenset()).answer([5, 9, 20, 9], SamplingParams(12)).tokens
    assert answer == generate_with_transformers(model, [5, 9, 20, 9], 12, stop_ids=())


THETA = {"rope_theta": 10000.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
ROPES = {
    "longrope": LONGROPE | {"original_max_position_embeddings": 32} | THETA,
    "dynamic": {"rope_type": "dynamic", "factor": 4.0} | THETA,
}


@pytest.mark.parametrize(
    ("arch", "kind"), [("phi3", "longrope"), ("llama", "dynamic"), ("llama", "longrope")]
)
def test_angles_that_depend_on_the_pass_are_refused(arch, kind):
    model = random_model(arch, 0, rope_parameters=ROPES[kind])
    with pytest.raises(UserError, match=f"'{kind}'.*rope_type.* default, "):
        StagedModel(model)


def test_every_kind_of_angles_of_a_model_counts():
    """Some families keep rotary parameters for each type of layers."""
    ropes = {"full_attention": ROPES["dynamic"], "sliding_attention": {"rope_type": "default"} | THETA}
    with pytest.raises(UserError, match="'dynamic'.*rope_type"):
        StagedModel(random_model("gemma3", 0, rope_parameters=ropes))


@torch.inference_mode()
def test_a_draft_model_embeds_ids_that_it_lacks_as_its_last():
    model, ids = random_model("llama", 0, vocab_size=56), torch.tensor([[3, 55, 56, 63]])
    own = StagedModel(model).embed(ids.clamp(max=55))
    assert torch.equal(StagedModel(model, 50, 64).embed(ids), own)
    with pytest.raises(IndexError):
        StagedModel(model, 50, 56).embed(ids)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@torch.inference_mode()
def test_unequal_layers_resume_exactly(arch):
    """Shallow layers run ahead token by token; the deep ones follow in one pass."""
    model = random_pair(arch).target
    target, ids = StagedModel(model), list(range(3, 33))
    cache = target.new_cache(64)
    prefill = target.prefill(torch.tensor([ids[:20]]), cache, taps=(2,))
    states = [
        target.run_layers(target.embed(torch.tensor([[ids[i]]])), cache, i, 0, 2) for i in range(20, 25)
    ]
    draft = Draft(torch.tensor([ids[21:25]]), resume=Resume(2, torch.cat(states, dim=1)))
    logits = target.verify(torch.tensor([[ids[20]]]), draft, cache, 20)
    expected = logits_of(model, ids[:25])
    torch.testing.assert_close(logits[0], expected[20:25], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(prefill.logits[0], expected[19], atol=1e-4, rtol=1e-4)
    assert prefill.hidden_states[2].shape == (1, 20, target.hidden_size)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@torch.inference_mode()
def test_each_path_of_a_tree_gets_the_logits_of_its_own_sequence(arch):
    model = random_pair(arch).target
    target, prompt, pending = StagedModel(model), list(range(3, 25)), 30
    cache = target.new_cache(64)
    target.prefill(torch.tensor([prompt]), cache)
    tokens, parents = [5, 6, 7, 8, 9], [-1, 0, -1, 2, 2]
    tree, n = Tree.of(torch.tensor(parents)), len(prompt)
    ctx = ForwardContext.nodes(n, tree.offsets()[0], tree.visible[0])
    logits = target.verify(torch.tensor([[pending]]), Draft(torch.tensor([tokens]), tree=tree), cache, ctx)[0]
    for node in range(len(tokens)):
        path, at = [], node
        while at >= 0:
            path.insert(0, tokens[at])
            at = parents[at]
        expected = logits_of(model, [*prompt, pending, *path])[-1]
        torch.testing.assert_close(logits[node + 1], expected, atol=1e-4, rtol=1e-4)
    # The accepted path moves into place; what follows is computed as if nothing else had been there.
    cache.move_entries(torch.tensor([[n + 1 + 2, n + 1 + 4]]), torch.tensor([[n + 1, n + 2]]))
    after = target.verify(torch.tensor([[40]]), Draft(torch.empty(1, 0, dtype=torch.int64)), cache, n + 3)
    expected = logits_of(model, [*prompt, pending, 7, 9, 40])[-1]
    torch.testing.assert_close(after[0, 0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@torch.inference_mode()
def test_taps_are_the_models_own_hidden_states(arch):
    """At every depth, the output of the last layer and of the final norm included, in prefill and verification."""
    model = random_pair(arch).target
    target, ids = StagedModel(model), torch.arange(3, 25).unsqueeze(0)
    own, before_norm = [], []
    hook = target.norm.register_forward_pre_hook(lambda module, args: before_norm.append(args[0]))
    own = model(ids, use_cache=False, output_hidden_states=True).hidden_states
    hook.remove()
    layers = len(target.layers)
    expected = {i: own[i] for i in range(layers)} | {layers: before_norm[0], NORMED: own[layers]}
    taps = (NORMED, *range(layers + 1))
    cache = target.new_cache(32)
    prefill = target.prefill(ids[:, :18], cache, taps)
    verified: dict = {}
    target.verify(ids[:, 18:19], Draft(ids[:, 19:]), cache, 18, taps, verified.__setitem__)
    assert list(verified) == [*range(layers + 1), NORMED], "in the order in which they are reached"
    for tap in taps:
        both = torch.cat([prefill.hidden_states[tap], verified[tap]], dim=1)
        torch.testing.assert_close(both, expected[tap], atol=1e-4, rtol=1e-4)


def test_pass_bytes_count_heads_but_no_look_ups():
    for tied in (True, False):
        model = random_model("llama", 0, tie_word_embeddings=tied)
        target = StagedModel(model)
        embedding = model.model.embed_tokens.weight.numel() * 4
        everything = sum(p.numel() for p in model.parameters()) * 4
        assert target.pass_bytes() == (everything if tied else everything - embedding)
        parts = target.pass_bytes(0, 2, head=False) + target.pass_bytes(2)
        assert parts == target.pass_bytes()


def test_logits_can_be_cut_to_the_ids_that_count():
    model = random_model("llama", 0)
    hidden = torch.randn(1, 2, model.config.hidden_size)
    cut = StagedModel(model, vocab_size=50).head(hidden)
    torch.testing.assert_close(cut, StagedModel(model).head(hidden)[..., :50])


def test_driven_layers_share_weights_and_hooks_with_the_model():
    model = random_model("llama", 0)
    theirs = model.model.layers[0].mlp.up_proj
    target = StagedModel(model)
    ours = target.layers[0].mlp.up_proj
    assert isinstance(ours, torch.nn.Linear) and ours.weight is theirs.weight
    assert {"weight", "bias"} <= vars(ours).keys()
    assert not {"weight", "bias"} & vars(theirs).keys(), "the model itself stays as it is"
    seen = []
    theirs.register_forward_hook(lambda *_: seen.append(1))
    target.run_layers(target.embed(torch.tensor([[1, 2]])), target.new_cache(2), 0)
    assert seen == [1]


@pytest.mark.first_fast
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("arch", ARCHITECTURES)
@torch.inference_mode()
def test_driven_layers_give_the_bits_of_the_models_own(arch, kv_heads):
    """Prefill and a token after it, with the copies that the target makes of the weights.

    Where attention of the token after is not transformers' own, it sums in another order, and is close.
    """
    if arch == "opt" and kv_heads < 4:
        pytest.skip("OPT groups no heads")
    model = copy.deepcopy(random_pair(arch, num_key_value_heads=kv_heads).target)
    target = StagedModel(model)
    for part in model.modules():
        if hasattr(part, "variance_epsilon"):
            part.weight.copy_(0.5 + torch.rand_like(part.weight))
    cache, ids = target.new_cache(12), torch.arange(3, 15).unsqueeze(0)
    kept = DynamicCache(config=model.config)
    # Where a window is exceeded transformers drops keys that ours masks: other shapes, whose sums a CPU may round
    # differently. Elsewhere both run the same operations.
    window = getattr(model.config, "sliding_window", None)
    within = window is None or window >= ids.shape[1]
    for start, part in ((0, ids[:, :11]), (11, ids[:, 11:])):
        own = model.get_decoder()(part, past_key_values=kept, use_cache=True).last_hidden_state
        ours = target.norm(target.run_layers(target.embed(part), cache, start))
        stock = target.layers[0].self_attn.config is model.config
        same = within and (stock or start == 0)
        rounding = 0.0 if same else 64 * torch.finfo(torch.float32).eps
        torch.testing.assert_close(ours, own, rtol=0.0, atol=rounding * own.abs().max().item())


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
        twin = lean_copy(norm)
        assert torch.equal(twin(states), norm(states))
        if same is not None:
            assert (type(twin).forward is type(norm).forward) != same
