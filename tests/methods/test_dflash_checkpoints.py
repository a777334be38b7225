"""DFlash, DDTree, DSpark, DFlash2: files as the authors, DeepSpec and speculators write them; what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from methods.dflash import DDTree, DFlash, DFlash2, DSpark
from methods.dflash.checkpoint import CHOICE, NESTED, load_blocks, save_blocks
from methods.dflash.model import BlockConfig, BlockModel, default_taps
from specbench.config.checks import check
from specbench.decoding.model.staged_model import StagedModel
from specbench.system.errors import UserError
from tests.support.blocks import BLOCK, HEADS, KINDS, MASK, drafting_model, filled_by_transformers, saved
from tests.support.conf import composed
from tests.support.decoding import random_pair
from tests.support.lossless import assert_lossless
from tests.support.methods import trimming
from tests.support.models import edit_json


def z_lab(model: BlockModel, folder) -> dict:
    save_blocks(model, folder, torch.float32)
    return json.loads((folder / "config.json").read_text())


def test_files_are_those_of_the_authors(tmp_path):
    """Keys and settings as the authors' code and vLLM read them."""
    pair = random_pair("llama")
    filled, chained = (drafting_model(pair, head) for head in ("independent", "markov"))
    settings = z_lab(filled, tmp_path / "dflash")
    assert settings[NESTED] == {"mask_token_id": MASK, "target_layer_ids": [tap - 1 for tap in filled.taps]}
    layer = {f"self_attn.{name}_proj" for name in "qkvo"} | {"self_attn.q_norm", "self_attn.k_norm"}
    layer |= {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    layer |= {"input_layernorm", "post_attention_layernorm"}
    shared = {f"layers.{i}.{name}.weight" for i in range(2) for name in layer}
    shared |= {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert set(filled.state_dict()) == shared
    heads = {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
    heads |= {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    assert set(chained.state_dict()) == shared | heads
    settings = z_lab(chained, tmp_path / "dspark")
    assert settings["markov_rank"] == 6 and settings["markov_head_type"] == "vanilla"
    assert settings["enable_confidence_head"] and settings["confidence_head_with_markov"]


@pytest.mark.parametrize("head", HEADS)
def test_what_is_trained_drafts_the_same_when_loaded(head, tmp_path):
    pair = random_pair("qwen2")
    target, model = StagedModel(pair.target), drafting_model(random_pair("qwen2"), head)
    save_blocks(model, tmp_path / "first", torch.bfloat16, loss=1.0)
    loaded = load_blocks(tmp_path / "first", target)
    save_blocks(loaded, tmp_path / "second", torch.bfloat16)
    again = load_blocks(tmp_path / "second", target)
    assert again.taps == model.taps and again.config.block_size == BLOCK
    assert (again.config.fills_in, again.config.confidence) == (head != "markov", head == "markov")
    assert again.config.head == head
    hidden, features = torch.randn(2, 3, 64), torch.randn(2, 3, 64)
    rope = model.rope(torch.arange(3)[None], hidden)
    outputs = [
        (one(hidden, position_embeddings=rope, attention_mask=None), *one.context(features, rope))
        for one in (loaded, again)
    ]
    assert all(torch.equal(*pair) for pair in zip(*outputs))
    for name, weight in model.state_dict().items():
        assert torch.equal(weight.bfloat16().float(), again.state_dict()[name]), name


def of_speculators(folder, head: str, **changes: object) -> BlockModel:
    """A checkpoint of a fresh model as speculators writes it, with a head of its own over a third of the tokens."""
    model = drafting_model(random_pair("llama"), head)
    settings = z_lab(model, folder)
    state = load_file(folder / "model.safetensors")
    layer = {name: value for name, value in settings.items() if name in Qwen3Config().to_dict()}
    layer = {
        name: value for name, value in layer.items() if name not in ("architectures", "transformers_version")
    }
    nested = {
        "transformer_layer_config": layer | {"model_type": "qwen3"},
        "block_size": BLOCK,
        "mask_token_id": MASK,
    }
    nested |= {"aux_hidden_state_layer_ids": [*model.taps], "draft_vocab_size": len(KEPT)}
    if head == "markov":
        nested |= {
            "speculators_model_type": "dspark",
            "sample_from_anchor": True,
            "architectures": ["DSparkSpeculator"],
            "markov_rank": 6,
        }
        nested |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
        state["markov_head.markov_w2.weight"] = state["markov_head.markov_w2.weight"][KEPT].clone()
    elif head == "selector":
        nested |= {"speculators_model_type": "dflash2", "architectures": ["DFlash2DraftModel"]}
        nested |= {name: getattr(model.config, name) for name in CHOICE}
    else:
        nested |= {"speculators_model_type": "dflash", "architectures": ["DFlashSpeculator"]}
    torch.manual_seed(8)
    scored = torch.zeros(model.config.vocab_size, dtype=torch.bool)
    scored[KEPT] = True
    state |= {"lm_head.weight": torch.randn(len(KEPT), 64), "t2d": scored}
    state["d2t"] = torch.tensor(KEPT) - torch.arange(len(KEPT))
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(nested | changes))
    return model


KEPT = [3, 4, 9, 11, 17, 20, 29, 33, 40]


@pytest.mark.first_fast
@pytest.mark.parametrize("kind", KINDS)
def test_files_of_speculators_draft_with_the_head_that_they_hold(kind, tmp_path):
    """Over the tokens that it scores; the rest is as in the other forms."""
    pair = random_pair("llama")
    model = of_speculators(tmp_path, KINDS[kind])
    loaded = load_blocks(tmp_path, StagedModel(pair.target))
    assert loaded.taps == model.taps and loaded.token_ids.tolist() == KEPT
    assert loaded.config.fills_in == (kind is not DSpark)
    head = load_file(tmp_path / "model.safetensors")["lm_head.weight"]
    drafter = kind(pair, str(tmp_path))
    draft_of, compared = drafter.draft, []

    def check(batch):
        draft = draft_of(batch)
        known, k = batch.sequences[0].tokens, draft.tokens.shape[1]
        logits = filled_by_transformers(pair, model, known)[model.config.fills_in :] @ head.T
        if kind is DFlash:
            assert draft.tokens[0].tolist() == [KEPT[row] for row in logits[:k].argmax(-1)]
        if kind is DSpark:
            correction = load_file(tmp_path / "model.safetensors")["markov_head.markov_w2.weight"]
            row = (logits[0] + correction @ model.markov_head.markov_w1.weight[known[-1]]).argmax()
            assert int(draft.tokens[0, 0]) == KEPT[row]
        assert {*draft.tokens.flatten().tolist()} <= {*KEPT}
        compared.append(k)
        return draft

    drafter.draft = check
    assert_lossless("llama", drafter, third=1)
    assert len(compared) > 10


def test_a_head_of_its_own_is_not_trimmed(tmp_path):
    of_speculators(tmp_path, "independent")
    with pytest.raises(UserError, match="set vocab=full"):
        DFlash(trimming(random_pair("llama"), "somewhere"), str(tmp_path))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"projector_type": "domino"}, "projector_type=domino"),
        ({"speculators_model_type": "eagle3"}, "speculators' eagle3"),
        ({"aux_hidden_state_layer_ids": [2, 50]}, "states after layers"),
        (
            {"speculators_model_type": None, "architectures": ["DSparkSpeculator"]},
            "does not say speculators_model_type",
        ),
    ],
)
def test_other_files_of_speculators_are_refused(change, says, tmp_path):
    of_speculators(tmp_path, "independent", **change)
    with pytest.raises(UserError, match=says):
        load_blocks(tmp_path, StagedModel(random_pair("llama").target))


def proposing(tokens: int) -> dict:
    """The part of a config.json of speculators that says how many tokens are drafted."""
    return {"speculators_config": {"proposal_methods": [{"speculative_tokens": tokens}]}}


@pytest.mark.parametrize(
    ("head", "changes", "fills_in"),
    [
        ("markov", {"max_anchors": 256, "sample_from_anchor": True}, False),
        ("markov", {"sample_from_anchor": False}, True),
        ("markov", {"sample_from_anchor": None} | proposing(BLOCK), False),
        ("markov", {"sample_from_anchor": None} | proposing(BLOCK - 1), True),
        ("independent", {}, True),
        ("independent", {"sample_from_anchor": True}, False),
    ],
)
def test_places_of_speculators_guess_their_own_token_or_the_one_after_it(head, changes, fills_in, tmp_path):
    """Files of before July 2026 say so by the number of tokens alone; the wrong one is accepted nowhere."""
    of_speculators(tmp_path, head, **changes)
    assert load_blocks(tmp_path, StagedModel(random_pair("llama").target)).config.fills_in is fills_in


def test_a_file_of_speculators_that_does_not_say_which_token_a_place_guesses_is_refused(tmp_path):
    for more in ({}, proposing(BLOCK + 1)):
        of_speculators(tmp_path, "markov", sample_from_anchor=None, **more)
        with pytest.raises(UserError, match="does not say whether each place guesses the token after it"):
            load_blocks(tmp_path, StagedModel(random_pair("llama").target))


@pytest.mark.parametrize("after", [False, None])
def test_other_files_may_say_which_token_a_place_guesses(after, tmp_path):
    pair = random_pair("llama")
    save_blocks(drafting_model(pair, "markov"), tmp_path, torch.float32)
    edit_json(tmp_path / "config.json", sample_from_anchor=after)
    assert load_blocks(tmp_path, StagedModel(pair.target)).config.fills_in is (after is False)


def test_only_speculators_names_the_state_after_the_last_layer(tmp_path):
    """transformers' own list has the normed one there."""
    pair = random_pair("llama")
    save_blocks(drafting_model(pair, "independent"), tmp_path, torch.float32)
    layers = pair.target.config.num_hidden_layers
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["dflash_config"]["target_layer_ids"][-1] = layers - 1
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=f"the target has {layers} layers"):
        load_blocks(tmp_path, StagedModel(pair.target))


def test_drafting_layers_rotate_whole_heads(tmp_path):
    pair = random_pair("llama")
    save_blocks(drafting_model(pair, "independent"), tmp_path, torch.float32)
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    edit_json(tmp_path / "config.json", rope_parameters=rope)
    with pytest.raises(UserError, match="partial_rotary_factor=0.25, and drafting layers rotate whole heads"):
        load_blocks(tmp_path, StagedModel(pair.target))


def test_a_draft_vocabulary_without_a_head_is_refused(tmp_path):
    of_speculators(tmp_path, "independent")
    state = load_file(tmp_path / "model.safetensors")
    del state["lm_head.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="d2t without lm_head.weight"):
        load_blocks(tmp_path, StagedModel(random_pair("llama").target))


def test_files_may_hold_the_targets_embedding_and_head(tmp_path):
    """As DeepSpec writes them; those of another target are refused."""
    pair = random_pair("llama")
    model, target = drafting_model(pair, "markov"), StagedModel(pair.target)
    copies = {"embed_tokens.weight": target.embed_tokens.weight, "lm_head.weight": target.lm_head.weight}

    class WithCopies:
        config, taps = model.config, model.taps

        def __init__(self, factor: float):
            self.factor = factor

        def state_dict(self):
            return model.state_dict() | {name: weight * self.factor for name, weight in copies.items()}

    save_blocks(WithCopies(1.0), tmp_path / "same", torch.bfloat16)
    assert load_blocks(tmp_path / "same", target).markov_head is not None
    save_blocks(WithCopies(1.5), tmp_path / "other", torch.bfloat16)
    with pytest.raises(UserError, match="another target"):
        load_blocks(tmp_path / "other", target)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": ["Domino"]}, "Domino"),
        ({"selector_rank": 256}, "missing candidate_selector"),
        ({"conv_kernel_size": 2}, "missing layers.0.attention_conv"),
        ({"conv_kernel_size": 2, "conv_group_size": 7}, "conv_group_size=7"),
        ({NESTED: {"mask_token_id": MASK, "target_layer_ids": [0], "use_swa": True}}, "use_swa"),
        ({NESTED: {"mask_token_id": MASK, "target_layer_ids": [50]}}, "states after layers"),
        ({NESTED: {"target_layer_ids": [0, 1]}}, "lacks mask_token_id"),
        ({NESTED: {"mask_token_id": 10**6, "target_layer_ids": [0, 1]}}, "no token 1000000"),
        ({"layer_types": ["sliding_attention"] * 2}, "layers of type sliding_attention"),
        ({"hidden_size": 32}, "another target"),
        ({"num_hidden_layers": 3}, "missing layers.2"),
        ({"markov_rank": 4}, "markov_head"),
        ({"model_type": "gemma"}, "model_type=gemma"),
        ({"enable_confidence_head": True}, "enable_confidence_head without"),
    ],
)
def test_what_is_not_known_is_refused_by_its_name(change, says, tmp_path):
    pair = random_pair("llama")
    settings = z_lab(drafting_model(pair, "independent"), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(settings | change))
    with pytest.raises(UserError, match=says):
        load_blocks(tmp_path, StagedModel(pair.target))


@pytest.mark.parametrize("head", ["markov", "selector"])
def test_a_correction_of_another_vocabulary_is_refused(head, tmp_path):
    model = drafting_model(random_pair("llama", vocab_size=70), head)
    save_blocks(model, tmp_path, torch.float32)
    with pytest.raises(UserError, match="made for another target: they correct 70 tokens, and it has 61"):
        load_blocks(tmp_path, StagedModel(random_pair("llama").target))


def test_who_lacks_the_part_is_told_how_it_is_trained():
    with pytest.raises(UserError, match="`specbench train dflash pair=tiny head=markov`"):
        check(composed("bench", "method=dspark", "pair=tiny", "pair.parts.dspark=null"))


def test_weights_of_the_other_method_are_refused(tmp_path):
    pair = random_pair("llama")
    for kind, other in ((DFlash, DSpark), (DSpark, DFlash2), (DFlash2, DDTree), (DDTree, DSpark)):
        folder = saved("llama", kind, tmp_path / kind.__name__)
        name = {DFlash: "dflash", DDTree: "dflash", DSpark: "dspark", DFlash2: "dflash2"}[kind]
        with pytest.raises(UserError, match=f"drafted with by {name}$"):
            other(pair, folder)
    model = drafting_model(pair, "markov")
    without = BlockModel(BlockConfig(**model.config.to_dict() | {"confidence": False}), model.taps)
    save_blocks(without, tmp_path / "without", torch.float32)
    with pytest.raises(UserError, match="no confidence head"):
        DSpark(pair, str(tmp_path / "without"), confidence_threshold=0.5)


def test_taps_of_the_authors():
    assert default_taps(36, 5) == (2, 10, 18, 26, 34)  # after layers 1, 9, 17, 25, 33
    assert default_taps(28, 5)[0] == 2 and default_taps(28, 5)[-1] == 26
    assert default_taps(36, 1) == (19,) and default_taps(2, 1) == (1,)
    for layers in range(2, 12):
        taps = default_taps(layers, 3)
        assert 0 < taps[0] <= taps[-1] < layers and len(set(taps)) == len(taps)
