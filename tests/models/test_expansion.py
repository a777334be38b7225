"""Expanded models compute what the model computes that they are made of, at other dimensions; or are refused."""

from __future__ import annotations

import copy
import subprocess
import sys
from contextlib import closing
from functools import cache

import pytest
import torch
from omegaconf import OmegaConf
from torch.nn.functional import pad
from transformers import LlamaForCausalLM

from methods.kangaroo.adapter import load_adapter, save_adapter
from methods.mirror_sd.streams import load_streams, save_streams
from methods.s2d import SortedDraft
from specbench import CONF, ROOT
from specbench.config.checks import check
from specbench.data.questions import load_questions
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.measure.machine.provenance import differences
from specbench.measure.runner import prepare
from specbench.models.expansion import Expansion, embedded, expand_model, wide
from specbench.models.pairs import load_pair
from specbench.system.errors import UserError
from tests.models.test_real_pairs import REAL, SIZES
from tests.support.conf import composed
from tests.support.decoding import generate_with_transformers, random_pair
from tests.support.expanded import SHAPES, expanded_config
from tests.support.methods import near_identity_adapter
from tests.support.models import random_model

CPU = torch.device("cpu")
# Of the small random model: 64 wide, 4 heads of 16 over 2 key/value heads, 5 layers, 61 tokens, no ties.
SAME = {
    "model_type": "llama",
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 61,
}
CHANGES = {
    "wider": {},
    "as wide": {"hidden_size": 64, "intermediate_size": 96},
    "wider heads": {"head_dim": 40},
    "more heads": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "larger groups": {"num_attention_heads": 12, "num_key_value_heads": 3},
    "more layers": {"num_hidden_layers": 8},
    "larger vocabulary": {"vocab_size": 70},
    "larger tied vocabulary": {"vocab_size": 70, "tie_word_embeddings": True},
    "of another family": {"model_type": "qwen3", "head_dim": 24, "num_hidden_layers": 7, "vocab_size": 64},
}
IDS = torch.arange(3, 45).unsqueeze(0)


@cache
@torch.inference_mode(False)
def source(tied: bool = False) -> LlamaForCausalLM:
    """A small random model, with an eps that matters."""
    return random_model("llama", 3, tie_word_embeddings=tied, rms_norm_eps=1e-3)


def expanded(
    changes: dict, dtype: torch.dtype = torch.float32
) -> tuple[LlamaForCausalLM, LlamaForCausalLM, Expansion]:
    """The model, what it is expanded to, and how."""
    model = source(changes.get("tie_word_embeddings", False))
    expansion = Expansion(model.config.to_dict(), SAME | changes, "x")
    return model, expand_model(model, expansion, CPU, dtype), expansion


# -- the function


@pytest.mark.parametrize("shape", CHANGES)
def test_logits_are_those_of_the_model(shape):
    changes = CHANGES[shape]
    old, new, _ = expanded(changes)
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim", "vocab_size"):
        assert getattr(new.config, key) == (SAME | changes)[key]
    expected, logits = old(IDS).logits, new(IDS).logits
    assert (logits[..., :61] - expected).abs().max() < 1e-4 * expected.abs().max().clamp(min=1)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert not any(parameter.requires_grad for parameter in new.parameters()) and not new.training


@pytest.mark.parametrize("shape", [name for name in CHANGES if "vocabulary" in name])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_added_tokens_are_never_drawn(shape, dtype):
    _, new, _ = expanded(CHANGES[shape], dtype)
    logits = new(IDS).logits
    assert logits.isfinite().all()
    assert torch.softmax(logits.float(), -1)[..., 61:].amax() == 0
    assert logits[..., 61:].amax() < -100


def test_layers_of_the_new_model_compute_what_the_first_ones_of_the_old_did():
    old, new, expansion = expanded({"num_hidden_layers": 12, "vocab_size": 70})
    old, new = StagedModel(old), StagedModel(new)
    seen = set()
    for count in range(6):
        states = [
            model.run_layers(model.embed(IDS), model.new_cache(IDS.shape[1]), 0, 0, layers)
            for model, layers in ((old, count), (new, expansion.layers(count)))
            if layers
        ]
        if states:
            assert (states[1][..., :64] - states[0]).abs().max() < 1e-4 * states[0].abs().max()
        seen.add(expansion.layers(count))
    assert sorted(seen) == [0, 2, 4, 7, 9, 12]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """It rounds as the model itself does in that dtype, though not alike: scales are no powers of two."""
    old, new, _ = expanded(CHANGES["of another family"], dtype)
    assert {p.dtype for p in new.parameters()} == {dtype} and new.dtype == dtype
    assert new.model.rotary_emb.inv_freq.dtype == torch.float32
    expected, own = old(IDS).logits, copy.deepcopy(old).to(dtype)(IDS).logits
    error = (new(IDS).logits[..., :61].float() - expected).abs().mean()
    assert error < 2 * (own.float() - expected).abs().mean()


def test_no_denormal_numbers():
    for shape in ("larger tied vocabulary", "of another family"):
        _, new, _ = expanded(CHANGES[shape])
        sizes = torch.cat([p.flatten() for p in new.parameters()]).abs()
        assert sizes[sizes > 0].min() > torch.finfo(torch.float32).tiny


# -- what cannot be built


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "hidden size of 32, and 64"),
        ({"intermediate_size": 80}, "intermediate size of 80, and 96"),
        ({"num_key_value_heads": 1}, "key/value heads of 1, and 2"),
        ({"num_key_value_heads": 4}, "query heads per key/value head of 1, and 2"),
        ({"head_dim": 8}, "head width of 8, and 16"),
        ({"num_hidden_layers": 4}, r"layers of 4, and 5 .*pair\.draft_layers=4"),
        ({"vocab_size": 60}, "vocabulary of 60, and 61"),
        ({"hidden_size": 64, "vocab_size": 62}, "hidden size above 64"),
        ({"hidden_size": 98}, "multiple of the number of heads, not 98 with 4"),
        ({"tie_word_embeddings": True}, "ties head and embedding"),
        ({"hidden_size": None}, "needs hidden_size of 1 or more, not None"),
        ({"num_attention_heads": 0}, "needs num_attention_heads of 1 or more, not 0"),
        ({"intermediate_size": "wide"}, "needs intermediate_size or ffn_dim of 1 or more, not wide"),
    ],
)
def test_shapes_that_are_too_small(changes, message):
    with pytest.raises(UserError, match=message) as caught:
        Expansion(source().config.to_dict(), SAME | changes, "x")
    assert "'x'" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "qwen2"},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0}},
    ],
)
def test_models_that_cannot_be_expanded(changes):
    with pytest.raises(UserError, match="only Llama models without biases and rotary scaling"):
        Expansion(source().config.to_dict() | changes, SAME, "x")


FLAT = "pair.draft_shape.num_hidden_layers=1"


@pytest.mark.first_fast
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["pair=glm-4-9b", "pair.init=expanded", "method=pld"], "'glm-4-9b'.* key/value heads of 2, and 4"),
        (["pair=tiny", "pair.init=expanded"], r"pair\.target_shape or pair\.width: set one"),
        (["pair=llama-3.1-8b", "pair.init=expanded", "pair.width=512"], r"pair\.target_shape or pair\.width"),
        (["pair=tiny_wide", "pair.width=500"], "multiple of its own, 128"),
        (["pair=tiny_wide", "pair.draft_width=200", "method=sps"], "multiple of its own, 96, not 200"),
        (["pair=tiny_wide", "pair.draft_width=192", "method=s2d"], "multiple of its own, 128, not 192"),
        (["pair=tiny", "pair.draft_width=192"], r"pair\.draft_width .* set pair\.init=expanded"),
        (["pair=tiny_wide", "pair.width=wide"], r"pair\.width must be a whole number"),
        (["pair=tiny", "pair.width=512"], r"set pair\.init=expanded"),
        (["pair=tiny_wide", "pair.device_map=auto"], r"set pair\.init=pretrained"),
        (["pair=vicuna-7b", "pair.init=expanded", "method=sps", FLAT], r"draft model.*pair\.draft_layers=1"),
        (
            ["pair=llama-3.1-8b", "pair.init=expanded", "pair.parts.eagle=mine"],
            r"would ignore yours: leave it out",
        ),
    ],
)
def test_pairs_that_are_refused_before_anything_is_loaded(settings, message):
    with pytest.raises(UserError, match=message) as caught:
        check(composed("bench", *settings))
    assert "\n" not in str(caught.value)


# -- pairs


@pytest.mark.slow
def test_a_real_pair_is_built_from_the_embedded_family():
    cfg = composed("bench", "pair=llama-3.1-8b", "pair.init=expanded", "method=mirror_sd")
    check(cfg)
    pair = cfg.pair
    assert (pair.name, pair.dtype, pair.target_shape.num_hidden_layers) == ("llama-3.1-8b", "bfloat16", 32)
    assert pair.target.startswith("specbench/tiny/") and pair.tokenizer.startswith("specbench/tiny/")
    assert not pair.gated and pair.stop_ids is None and pair.target_revision is None
    assert set(pair) == set(OmegaConf.load(CONF / "pair" / "_base.yaml"))
    assert (pair.draft, pair.draft_layers) == ("specbench/tiny/weights/draft", None)
    assert embedded(pair) is pair
    check(composed("bench", "pair=llama-3.1-8b", "pair.init=expanded", "method=kangaroo", "vocab=trim"))


def test_other_pairs_stay_as_they_are():
    for choice in ("pair=tiny", "pair=tiny_wide", "pair=qwen3-8b"):
        pair = composed("bench", choice).pair
        assert embedded(pair) is pair


@cache
def _embedded_target() -> LlamaForCausalLM:
    return load_pair(composed("bench", "pair=tiny", "pair.device=cpu").pair, 0, with_draft=False).target


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_every_real_shape_is_built_or_refused_in_one_line(name):
    """Without memory for it: on the device that holds nothing."""
    pair = embedded(composed("bench", f"pair={name}", "pair.init=expanded").pair)
    shape = OmegaConf.to_container(pair.target_shape)
    model, meta = _embedded_target(), torch.device("meta")
    try:
        expansion = Expansion(model.config.to_dict(), shape, name)
    except UserError as refusal:
        assert f"cannot build '{name}'" in str(refusal) and "\n" not in str(refusal)
        # One has other parts than Llama's, the other fewer layers than the embedded target.
        assert name in ("glm-4-9b", "llama-3.2-1b") or name not in SIZES
        return
    new = expand_model(model, expansion, meta, torch.bfloat16)
    assert {p.device for p in new.parameters()} == {meta}
    assert new.config.num_attention_heads == shape["num_attention_heads"]
    if name in ("llama-3.1-8b", "qwen3-8b", "vicuna-7b", "mistral-small-24b"):
        assert sum(p.numel() for p in new.parameters()) / 1e9 == pytest.approx(SIZES[name], rel=0.02)


@pytest.mark.parametrize(
    ("width", "heads", "head_dim"),
    [(64, 2, 16), (128, 2, 32), (192, 2, 48), (512, 2, 128), (640, 4, 80), (1024, 4, 128)],
)
def test_wide(width, heads, head_dim):
    shape = wide(source().config.to_dict(), width)
    assert (shape["hidden_size"], shape["intermediate_size"]) == (width, width * 96 // 64)
    assert (shape["num_key_value_heads"], shape["num_attention_heads"]) == (heads, 2 * heads)
    assert shape["head_dim"] == head_dim and 2 * heads * head_dim == width


@pytest.mark.slow
def test_tiny_wide():
    pair = load_pair(composed("bench", "pair=tiny_wide", "pair.device=cpu").pair, 0, with_draft=True)
    assert pair.anatomy == "Llama of 24 layers x 512" and pair.init == "expanded"
    assert sum(p.numel() for p in pair.target.parameters()) == 90202624
    assert pair.draft.config.hidden_size == 96 and pair.draft_expansion is None
    assert pair.stop_ids == {3} and pair.context_length == 4096


@pytest.mark.slow
def test_a_wide_draft_model_drafts_the_same():
    """Plain and sorted draft models alike, whole and cut to some layers."""
    ids = torch.arange(5, 25).unsqueeze(0)
    for preset, layers in [("specbench/tiny/weights/draft", 2), ("specbench/tiny/weights/s2d", 4)]:
        logits = []
        for width in (None, 384):
            cfg = composed(
                "bench",
                "pair=tiny_wide",
                "pair.device=cpu",
                f"pair.draft={preset}",
                f"pair.draft_layers={layers}",
            ).pair
            cfg.draft_width = width
            draft = load_pair(cfg, 0, with_draft=True).draft
            assert draft.config.num_hidden_layers == layers and draft.config.hidden_size in (width, 96, 128)
            with torch.inference_mode():
                logits.append(draft(ids).logits)
        torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


def test_runs_at_other_dimensions_are_not_comparable():
    pairs = [
        OmegaConf.to_container(composed("bench", "pair=tiny_wide", f"pair.width={width}").pair)
        for width in (512, 1024)
    ]
    assert differences(*({"config": {"pair": pair}} for pair in pairs)) == [
        "config.pair.width 512 against 1024"
    ]


@pytest.mark.cuda
def test_on_a_gpu_nothing_is_allocated_twice():
    cuda = torch.device("cuda")
    load_pair(composed("bench", "pair=tiny", "pair.device=cuda").pair, 0, with_draft=False)
    torch.cuda.reset_peak_memory_stats(cuda)
    before = torch.cuda.memory_allocated(cuda)
    pair = load_pair(composed("bench", "pair=tiny_wide", "pair.device=cuda").pair, 0, with_draft=False)
    size = sum(weight.nbytes for weight in pair.target.parameters())
    assert size <= torch.cuda.max_memory_allocated(cuda) - before < 1.1 * size


MEASURED = """
import torch
from specbench.measure.machine.hardware import peak_memory
from specbench.models.pairs import load_pair
from tests.support.conf import composed

before = []
for overrides in (["pair=tiny"], ["pair=tiny_wide", "pair.width=1024"]):
    pair = load_pair(composed("bench", *overrides, "pair.device=cpu", "pair.dtype=bfloat16").pair, 0, False)
    before.append(peak_memory(torch.device("cpu")))  # not getrusage, which counts what this process was forked from
print(before[1] - before[0], sum(weight.nbytes for weight in pair.target.parameters()))
"""


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.process
def test_memory_is_written_once_and_for_all():
    """All of the 660 MB is in memory, and there is no second copy of it while it is built."""
    command = [sys.executable, "-c", MEASURED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    risen, size = map(int, done.stdout.split()[-2:])
    assert 0.9 * size < risen < 1.2 * size


# -- trained parts


def test_kangaroos_adapter(tmp_path):
    pair = random_pair("llama")
    adapter = near_identity_adapter(pair)
    save_adapter(adapter, tmp_path, torch.float32, exit_layer=2)
    shape = SAME | {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4}
    for vocab in (61, 70):
        expansion = Expansion(pair.target.config.to_dict(), shape | {"vocab_size": vocab}, "x")
        target = StagedModel(expand_model(pair.target, expansion, CPU, torch.float32))
        new = load_adapter(tmp_path, target, expansion)
        assert new.config.exit_layer == 3
        assert new.layers[0].self_attn.q_proj.weight.shape == (8 * 16, 96)
        states, positions = torch.randn(1, 9, 64), torch.arange(9).unsqueeze(0)
        wider = expansion.pad(states)
        wider[..., 64] = 2.0**-10 * (vocab > 61)  # what the embeddings of an expanded target have there
        expected = adapter(states, position_embeddings=adapter.rope(positions, states))
        found = new(wider, position_embeddings=new.rope(positions, wider))
        assert torch.allclose(found[..., :64], expected, atol=1e-5)
        assert found[..., 65:].abs().max() == 0 and (found[..., 64] > 0).all() == (vocab > 61)
    wrong = Expansion(random_model("llama", 0, hidden_size=32).config.to_dict(), SAME, "x")
    with pytest.raises(UserError, match="64 wide, the target 32"):
        load_adapter(tmp_path, target, wrong)


def test_streams(tmp_path):
    model, new, expansion = expanded(CHANGES["wider"])
    save_streams(torch.ones(2, 64), tmp_path)
    assert torch.equal(load_streams(tmp_path, new, expansion), pad(torch.ones(2, 64), (0, 32)))
    assert load_streams(tmp_path, model).shape == (2, 64)
    with pytest.raises(UserError, match="96 wide"):
        load_streams(tmp_path, new)


def test_exits_of_a_sorted_draft_model_that_was_made_deeper():
    pair = random_pair("llama", draft_layers=5)
    pair.draft.config.exits = [1, 2, 5]
    assert SortedDraft(pair).exits == [1, 2, 5]
    pair.draft_expansion = Expansion(pair.draft.config.to_dict(), SAME | {"num_hidden_layers": 8}, "x")
    pair.draft = expand_model(pair.draft, pair.draft_expansion, CPU, torch.float32)
    assert SortedDraft(pair).exits == [1, 3, 8]


# -- the whole of it, on the embedded family

METHODS = ("pld", "sps", "kangaroo", "eagle", "eagle2", "s2d", "vocabtrim", "mirror_sd", "mirror_ss", "ssd")
QUESTIONS, TOKENS = 2, 16


def _answers(shape: str | None, method: str, *overrides: str):
    """The pair, some prompts, and what a method answers to them."""
    inline = ["method.placement=inline"] if method in ("mirror_sd", "mirror_ss", "ssd") else []
    cfg = expanded_config(shape, f"method={method}", *inline, *overrides)
    bench = prepare(cfg)
    setup = bench.setup
    prompts = [bench.protocol.prompt(q, []) for q in load_questions(cfg.data, cfg.task)[:QUESTIONS]]
    with closing(setup.drafter):
        engine = Engine(
            setup.target, setup.drafter, setup.pair.stop_ids, context_length=setup.pair.context_length
        )
        return setup.pair, prompts, [engine.answer(prompt, SamplingParams(TOKENS)) for prompt in prompts]


@cache
def _expected() -> list[list[int]]:
    """What the embedded target says without a drafter."""
    return [one.tokens for one in _answers(None, "ar")[2]]


def _acceptance(answers) -> float:
    steps = [step for one in answers for step in one.steps]
    return sum(s.accepted for s in steps) / sum(s.drafted for s in steps)


@pytest.mark.one_in(6)
@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_methods_say_and_accept_what_they_do_on_the_embedded_pair(method):
    """At every shape: `python -m tests.benchmarks.expansion`."""
    (_, _, drafted), (_, _, own) = (_answers(shape, method) for shape in ("all of it", None))
    assert [one.tokens for one in drafted] == [one.tokens for one in own] == _expected()
    assert _acceptance(drafted) == pytest.approx(_acceptance(own), rel=0.01)


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_text_is_the_embedded_pairs(shape):
    """In our loop and in transformers' generate."""
    pair, prompts, plain = _answers(shape, "ar")
    assert [one.tokens for one in plain] == _expected()
    for prompt, expected in zip(prompts, _expected()):
        assert generate_with_transformers(pair.target, prompt, TOKENS, pair.stop_ids) == expected


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("method", ["sps", "kangaroo"])
def test_methods_are_lossless_in_half_precision(method):
    """But for ties: where an answer leaves the baseline's, the two tokens are all but equally likely."""
    pair, prompts, drafted = _answers("all of it", method, "pair.dtype=bfloat16")
    plain = _answers("all of it", "ar", "pair.dtype=bfloat16")[2]
    for prompt, one, other in zip(prompts, plain, drafted):
        same = next((i for i, (a, b) in enumerate(zip(one.tokens, other.tokens)) if a != b), None)
        if same is None:
            assert one.tokens == other.tokens
            continue
        ids = torch.tensor([prompt + one.tokens[:same]])
        logits = pair.target(ids).logits[0, -1].float()
        assert abs(logits[one.tokens[same]] - logits[other.tokens[same]]) < 0.5
