"""Every real pair at its architecture class and proportions but small: saved as the hub would hold it, loaded as a user
would load it, and proved lossless with every method; and the traps that published checkpoints set."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM

from methods.ar import Autoregressive
from methods.kangaroo import Kangaroo
from methods.mirror_sd import MirrorSD
from methods.pld import PromptLookup
from methods.s2d import SortedDraft
from methods.sps import SpeculativeSampling
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.models.pairs import load_pair
from specbench.system.errors import UserError
from tests.support.conf import composed, file_of, is_hub_id, names
from tests.support.decoding import checked, generate_with_transformers
from tests.support.methods import saved_adapter, trimmed
from tests.support.models import byte_tokenizer

pytestmark = pytest.mark.slow

# Pairs that are made small by their shapes, and those whose target the hub has: a pair may lack either.
PAIRS = {name: pair for name in names("pair") if (pair := file_of("pair", name)).target is not None}
REAL = [
    name for name, pair in PAIRS.items() if not pair.target.startswith("specbench/") and pair.target_shape
]
WITH_DRAFT = [name for name in REAL if PAIRS[name].draft and PAIRS[name].draft_shape]
OF_THE_HUB = [name for name, pair in PAIRS.items() if is_hub_id(pair.target)]
# Parameters in billions, of the pairs that are named after a size.
SIZES = {
    "vicuna-7b": 6.74,
    "vicuna-13b": 13.0,
    "vicuna-33b": 32.5,
    "llama-2-70b-chat": 69.0,
    "qwen3-8b": 8.19,
    "qwen3-14b": 14.8,
    "qwen3-32b": 32.8,
    "glm-4-9b": 9.4,
    "llama-3.1-8b": 8.03,
    "llama-3.2-3b": 3.21,
    "llama-3.2-1b": 1.24,
    "qwen3-1.7b": 1.72,
    "qwen3-4b": 4.02,
    "mistral-small-24b": 23.6,
    "opt-66b": 65.7,
}
CHAT = [
    {"role": "user", "content": "Say ab."},
    {"role": "assistant", "content": "ab ab"},
    {"role": "user", "content": "And now ba?"},
]
# How strongly the small models agree on what follows what, and how little their layers say.
LEANING, QUIET = 0.28, 0.06
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions. USER: Say ab. ASSISTANT: ab ab</s>USER: And now ba? ASSISTANT:"
)


def pair_config(name: str, *overrides: str) -> DictConfig:
    return composed("bench", f"pair={name}", "pair.device=cpu", *overrides).pair


def small(shape: DictConfig, layers: int, vocab: int | None = None) -> dict:
    """The shape with its ratios of heads, head width, feed-forward width and vocabulary, but narrow and shallow."""
    full = AutoConfig.for_model(**OmegaConf.to_container(shape))
    heads, groups = full.num_attention_heads, getattr(full, "num_key_value_heads", full.num_attention_heads)
    kv = 1 if heads // groups > 2 else 4
    width = getattr(full, "head_dim", None) or full.hidden_size // heads
    own = {"num_hidden_layers": layers, "num_attention_heads": kv * heads // groups}
    own |= {"initializer_range": 0.25, "init_std": 0.25, "tie_word_embeddings": False}
    own |= {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": None}
    if full.model_type == "opt":
        own |= {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 256}
    else:
        head_dim = 16 if width == 128 else 8
        own |= {"num_key_value_heads": kv, "head_dim": head_dim}
        own["hidden_size"] = own["num_attention_heads"] * head_dim * full.hidden_size // (heads * width)
        own["intermediate_size"] = own["hidden_size"] * full.intermediate_size // full.hidden_size
    # Never fewer rows than the tokenizer's 260 ids and some padding, which several of these models have.
    own["vocab_size"] = vocab or max(300, full.vocab_size * own["hidden_size"] // full.hidden_size)
    return OmegaConf.to_container(shape) | own


@torch.no_grad()
def think_alike(model) -> None:
    """Makes a random model lean to a successor of each token that is the same in every model, so that the drafts of one
    are often right about another."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    embedding.mul_(4.0)
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "fc2.weight")):
            weight.mul_(QUIET)
    successor = torch.randperm(260, generator=torch.Generator().manual_seed(0))
    head[successor] += embedding[:260] * LEANING


def save_small(name: str, folder: Path, **draft_changes) -> DictConfig:
    """Saves small models of a pair, an eighth as deep, as its hub repositories would hold them; its configuration."""
    cfg = pair_config(name, "pair.dtype=float32")
    vocab = small(cfg.target_shape, 1)["vocab_size"]
    for part, least in (("target", 3), ("draft", 1)):
        shape = cfg[f"{part}_shape"]
        if shape is None:
            cfg[part] = None
            continue
        layers = max(least, shape.num_hidden_layers // 8)
        torch.manual_seed(least)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**small(shape, layers, vocab)))
        think_alike(model)
        if part == "draft":
            model.config.exits = sorted({1, layers})
            for attribute, value in draft_changes.items():
                setattr(model.config, attribute, value)
        model.save_pretrained(folder / part)
        cfg[part] = str(folder / part)
    byte_tokenizer().save_pretrained(folder / "target")
    cfg.target_revision, cfg.stop_ids = None, [257]
    return cfg


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", REAL)
def test_every_method_is_lossless_on_the_small_pair(name, tmp_path):
    cfg = save_small(name, tmp_path)
    pair = load_pair(cfg, seed=0, with_draft=cfg.draft is not None)
    assert pair.target.config.model_type == pair_config(name).target_shape.model_type
    target = StagedModel(pair.target)
    checked(target)
    drafters = {
        "ar": Autoregressive(pair),
        "pld": PromptLookup(pair, 4),
        "kangaroo": Kangaroo(pair, saved_adapter(pair, tmp_path / "adapter"), 2, 4, 0.0),
    }
    if pair.draft is not None:
        drafters["sps"] = SpeculativeSampling(pair, 4)
        drafters["mirror_sd"] = MirrorSD(pair, 4, kappa=2, placement="inline")
        drafters["s2d"] = SortedDraft(pair, max_draft_tokens=4)
        drafters["trimmed"] = trimmed(SpeculativeSampling(pair, 4), [i for i in range(260) if i % 4])
    rates: dict[str, list[float]] = {method: [] for method in drafters}
    for messages in (CHAT[:1], CHAT):
        prompt = pair.prompt_ids(messages)
        expected = generate_with_transformers(pair.target, prompt, 24, stop_ids=pair.stop_ids)
        for method, drafter in drafters.items():
            engine = Engine(target, drafter, pair.stop_ids, context_length=pair.context_length)
            answer = engine.answer(prompt, SamplingParams(24))
            assert answer.tokens == expected, method
            rates[method] += [step.accepted / step.drafted for step in answer.steps if step.drafted]
    for method in rates.keys() - {"ar", "pld"}:  # accepted drafts are what is easily got wrong
        assert max(rates[method]) > 0, method


@pytest.mark.parametrize("name", WITH_DRAFT)
def test_the_drafts_own_special_ids_and_dtype_have_no_say(name, tmp_path):
    """vicuna-68m names the special ids of another tokenizer, and is stored in float32."""
    cfg = save_small(name, tmp_path, bos_token_id=0, eos_token_id=97, pad_token_id=1)
    cfg.stop_ids, cfg.dtype = None, "bfloat16"
    pair = load_pair(cfg, seed=0, with_draft=True)
    assert pair.stop_ids == {257}
    assert pair.prompt_ids(CHAT)[0] == 256
    assert (
        {p.dtype for p in pair.draft.parameters()}
        == {p.dtype for p in pair.target.parameters()}
        == {torch.bfloat16}
    )


@pytest.mark.parametrize("name", WITH_DRAFT)
def test_padded_rows_are_never_drafted(name, tmp_path):
    """A transplanted draft model has zero rows after its vocabulary: logit 0, above every negative one."""
    cfg = save_small(name, tmp_path)
    pair = load_pair(cfg, seed=0, with_draft=True)
    head = pair.draft.get_output_embeddings()
    normed = torch.randn(1, head.weight.shape[1])
    with torch.no_grad():
        rows = head.weight[: pair.vocab_size]
        rows.sub_(2 * (rows @ normed[0]).clamp(min=0)[:, None] * normed / normed.square().sum())
        head.weight[pair.vocab_size :].zero_()
    drafter = SpeculativeSampling(pair, 4)
    assert head(normed).argmax() >= pair.vocab_size
    logits = drafter.head.logits(normed)
    greedy = SimpleNamespace(decoding=SamplingParams(1), draws=lambda place: None)
    drawn = SimpleNamespace(decoding=SamplingParams(1, 1.0), draws=lambda place: torch.tensor([0.5]))
    token, _ = drafter.head.choose(logits, greedy, 0)
    assert logits.shape[-1] == pair.vocab_size == 260 and token < 260
    _, probs = drafter.head.choose(logits, drawn, 0)
    assert drafter.head.spread([probs]).shape == (1, 1, pair.target.config.vocab_size)


@pytest.mark.parametrize("name", [name for name in REAL if name.startswith("vicuna")])
def test_vicunas_prompt_is_fastchats(name, tmp_path):
    pair = load_pair(save_small(name, tmp_path), seed=0, with_draft=False)
    ids = pair.prompt_ids(CHAT)
    assert ids[0] == 256 and ids.count(256) == 1
    assert pair.tokenizer.decode(ids[1:]) == f" {VICUNA}"  # the space is SentencePiece's word mark
    assert ids.count(257) == 1  # the answer's end, inside the prompt, which stops nothing


def test_a_prompt_that_begins_with_a_stop_token_is_answered(tmp_path):
    """OPT's BOS is its EOS."""
    cfg = save_small("opt-66b", tmp_path)
    cfg.stop_ids = [256, 257]
    pair = load_pair(cfg, seed=0, with_draft=True)
    prompt = pair.prompt_ids(CHAT)
    assert prompt[0] in pair.stop_ids
    answer = Engine(StagedModel(pair.target), SpeculativeSampling(pair, 3), pair.stop_ids).answer(
        prompt, SamplingParams(8)
    )
    assert answer.tokens == generate_with_transformers(pair.target, prompt, 8, stop_ids=(256, 257))


def test_families_that_think_or_write_the_date_are_told_not_to(tmp_path):
    quiet = "{% if enable_thinking is defined and enable_thinking is false %}QUIET{% endif %}"
    template = "{{ bos_token }}" + quiet + "[{{ date_string }}]"
    for name, text in (("qwen3-8b", "QUIET[]"), ("llama-3.1-8b", "[26 Jul 2024]")):
        cfg = save_small(name, tmp_path / name)
        cfg.chat_template = template
        assert load_pair(cfg, seed=0, with_draft=False).prompt_ids(CHAT)[1:] == list(
            byte_tokenizer()(text, add_special_tokens=False)["input_ids"]
        )


def test_only_glms_draft_may_differ_in_added_tokens(tmp_path):
    for name, allowed in (("glm-4-9b", True), ("qwen3-8b", False)):
        cfg = save_small(name, tmp_path / name)
        other = byte_tokenizer(first_special="<other>")
        other.save_pretrained(cfg.draft)
        if allowed:
            assert load_pair(cfg, seed=0, with_draft=True).draft is not None
        else:
            with pytest.raises(UserError, match=r"\b256\b.*'<"):
                load_pair(cfg, seed=0, with_draft=True)


@pytest.mark.parametrize("name", REAL)
def test_random_weights_need_neither_network_nor_files(name, monkeypatch):
    """By shape alone; the hub is out of reach in these tests."""
    cfg = pair_config(name, "pair.init=random", "pair.dtype=float32")
    for part in ("target", "draft"):
        if cfg[f"{part}_shape"] is not None:
            own = {"bos_token_id": 1, "eos_token_id": 2}
            cfg[f"{part}_shape"] = small(cfg[f"{part}_shape"], 2, 16400) | own
    pair = load_pair(cfg, seed=0, with_draft=name in WITH_DRAFT)
    assert pair.init == "random" and pair.target.config.model_type == cfg.target_shape.model_type
    prompt = pair.prompt_ids(CHAT)
    answer = Engine(StagedModel(pair.target), PromptLookup(pair), pair.stop_ids).answer(
        prompt, SamplingParams(8)
    )
    assert isinstance(pair.decode(answer.tokens), str)


@pytest.mark.parametrize("name", OF_THE_HUB)
def test_a_model_that_cannot_be_had_says_what_to_do_in_one_line(name):
    cfg = pair_config(name)
    with pytest.raises(UserError, match="hf download") as caught:
        load_pair(cfg, seed=0, with_draft=False)
    assert ("gated" in str(caught.value)) == cfg.gated
    assert (f"--revision {cfg.target_revision}`" in str(caught.value)) == (cfg.target_revision is not None)


@pytest.mark.parametrize("name", SIZES)
def test_published_sizes(name):
    """Parameters, from the shape alone, within 2 % of what the models are called."""
    shape = OmegaConf.to_container(pair_config(name).target_shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(SIZES[name], rel=0.02)
