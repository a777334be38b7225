"""EAGLE-3's files as others write and read them: key lists of the authors, SpecForge, speculators, vLLM and SGLang."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from methods.eagle3 import Eagle3
from methods.eagle3.checkpoint import load_eagle3, save_eagle3
from methods.eagle3.model import Eagle3Config, Eagle3Model
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.system.errors import UserError
from tests.support.checkpoints import RunsCode, spoil
from tests.support.decoding import random_pair

V, H, ROWS = 61, 64, 40  # of the random Llama: tokens, width; rows of the head
KEPT = [i for i in range(V) if i % 3]

MLP = {"gate_proj": (96, H), "up_proj": (96, H), "down_proj": (H, 96)}
ATTENTION = {"q_proj": (64, 2 * H), "k_proj": (32, 2 * H), "v_proj": (32, 2 * H), "o_proj": (H, 64)}
LAYER = {
    **{f"self_attn.{name}.weight": shape for name, shape in ATTENTION.items()},
    **{f"mlp.{name}.weight": shape for name, shape in MLP.items()},
    **{f"{name}.weight": (H,) for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")},
}
OFFICIAL = {
    "fc.weight": (H, 3 * H),
    "norm.weight": (H,),
    "lm_head.weight": (ROWS, H),
    **{f"midlayer.{name}": shape for name, shape in LAYER.items()},
}
OFFICIAL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "use_cache": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.02,
    "hidden_size": H,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "vocab_size": V,
    "draft_vocab_size": ROWS,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
}
SPECFORGE_CONFIG = OFFICIAL_CONFIG | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 16,
    "max_window_layers": 36,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
}
SPECULATORS_CONFIG = {
    "architectures": ["Eagle3Speculator"],
    "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
    "speculators_model_type": "eagle3",
    "speculators_version": "0.1.0.dev",
    "torch_dtype": "bfloat16",
    "draft_vocab_size": ROWS,
    "target_hidden_size": None,
    "norm_before_residual": True,
    "has_no_defaults_at_init": False,
    "transformers_version": "4.55.0",
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": "x", "architectures": ["Qwen3ForCausalLM"]},
    },
    "transformer_layer_config": {
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": H,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "vocab_size": V,
        "max_position_embeddings": 4096,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "use_cache": True,
        "pretraining_tp": 1,
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
    },
}


def tensors(shapes: dict, dtype: torch.dtype = torch.float16) -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    return {name: (torch.randn(shape) * 0.2).to(dtype) for name, shape in shapes.items()}


def mapping(kept: list[int] = KEPT) -> dict[str, torch.Tensor]:
    known = torch.zeros(V, dtype=torch.bool)
    known[kept] = True
    return {"d2t": torch.tensor(kept) - torch.arange(len(kept)), "t2d": known}


def written(folder, config: dict, state: dict, pickled: bool = False) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(state, folder / "pytorch_model.bin")
    else:
        save_file(state, folder / "model.safetensors")
    return str(folder)


def official(folder, **changes) -> str:
    return written(folder, OFFICIAL_CONFIG | changes, tensors(OFFICIAL) | mapping(), pickled=True)


def ours(folder) -> str:
    """Our own file; in float32, so that tests can change it."""
    save_eagle3(load_eagle3(official(folder), target()), folder, torch.float32)
    return str(folder)


def target(arch: str = "llama") -> StagedModel:
    return StagedModel(random_pair(arch).target)


def assert_holds(model: Eagle3Model, state: dict, prefix: str = "midlayer.") -> None:
    """The model's weights are exactly these."""
    own = {name.replace("midlayer.", prefix): weight for name, weight in model.state_dict().items()}
    floats = {name: weight for name, weight in state.items() if weight.is_floating_point()}
    assert own.keys() == floats.keys()
    for name, weight in own.items():
        assert torch.equal(weight, floats[name].float()), name


# -- what others write


def test_the_authors_files(tmp_path):
    model = load_eagle3(official(tmp_path), target())
    assert_holds(model, tensors(OFFICIAL))
    assert model.token_ids.tolist() == KEPT and model.taps == (1, 2, 3)
    config = model.config
    assert (config.num_key_value_heads, config.head_dim, config.rms_norm_eps) == (2, 16, 1e-5)
    assert config.rope_parameters["rope_theta"] == 10000
    assert not (config.norm_before_residual or config.norm_output or config.norm_before_fc or config.fc_norm)


def test_a_draft_vocabulary_of_all_tokens(tmp_path):
    """As for Vicuna 13B: the table is all zeros; it may be missing."""
    shapes = OFFICIAL | {"lm_head.weight": (V, H)}
    config = OFFICIAL_CONFIG | {"draft_vocab_size": V}
    for name, table in (("table", mapping([*range(V)])), ("none", {})):
        model = load_eagle3(written(tmp_path / name, config, tensors(shapes) | table), target())
        assert model.token_ids.tolist() == [*range(V)]


def test_specforge_files(tmp_path):
    state = tensors(OFFICIAL, torch.bfloat16)
    model = load_eagle3(written(tmp_path, SPECFORGE_CONFIG, state | mapping()), target())
    assert_holds(model, state)
    assert model.config.rope_parameters["rope_theta"] == 1000000
    other = load_eagle3(str(tmp_path), target(), rope_theta=10000.0)
    assert other.config.rope_parameters["rope_theta"] == 10000
    at = torch.arange(40).unsqueeze(0), torch.ones(1)
    own = load_eagle3(official(tmp_path / "official"), target()).rope(*at)
    assert torch.equal(other.rope(*at)[0], own[0]) and not torch.equal(model.rope(*at)[0], own[0])


def test_specforge_files_of_version_3_1(tmp_path):
    state = tensors(OFFICIAL | {f"fc_norm.{i}.weight": (H,) for i in range(3)})
    config = SPECFORGE_CONFIG | {"fc_norm": True, "norm_output": True}
    model = load_eagle3(written(tmp_path, config, state | mapping()), target())
    assert_holds(model, state)
    assert model.config.fc_norm and model.config.norm_output


@pytest.mark.parametrize("architecture", ["Eagle3Speculator", "Eagle3DraftModel"])
def test_speculators_files(architecture, tmp_path):
    embedding = random_pair("llama").target.get_input_embeddings().weight.detach().clone()
    state = tensors({name.replace("midlayer", "layers.0"): shape for name, shape in OFFICIAL.items()})
    more = {"norm_before_fc": True, "norm_output": False} if architecture == "Eagle3DraftModel" else {}
    if more:
        state["input_norm.weight"] = torch.rand(3 * H)
    config = SPECULATORS_CONFIG | more | {"architectures": [architecture]}
    folder = written(tmp_path, config, state | mapping() | {"embed_tokens.weight": embedding})
    model = load_eagle3(folder, target())
    assert_holds(model, state, "layers.0.")
    assert model.config.norm_before_residual and model.config.rms_norm_eps == 1e-6
    assert model.embed_tokens is None and model.config.rope_parameters["rope_theta"] == 1000000


def test_a_drafter_narrower_than_its_target(tmp_path):
    """It has an embedding of its own, and drafts with it."""
    pair = random_pair("llama")
    narrow = {name: tuple(32 if n == H else n for n in shape) for name, shape in OFFICIAL.items()}
    narrow |= {"fc.weight": (32, 3 * H), "embed_tokens.weight": (V, 32)}
    narrow |= {
        f"midlayer.self_attn.{name}_proj.weight": (rows, 64)
        for name, rows in (("q", 64), ("k", 32), ("v", 32))
    }
    narrow["midlayer.self_attn.o_proj.weight"] = (32, 64)
    config = SPECFORGE_CONFIG | {"hidden_size": 32, "target_hidden_size": H}
    state = tensors(narrow)
    folder = written(tmp_path, config, state | mapping())
    model = load_eagle3(folder, StagedModel(pair.target))
    assert_holds(model, state)
    drafter = Eagle3(pair, folder, 8, 3, 3)
    plain = Engine(StagedModel(pair.target), Drafter(), frozenset())
    engine = Engine(StagedModel(pair.target), drafter, frozenset())
    assert (
        engine.answer([5, 9, 20], SamplingParams(12)).tokens
        == plain.answer([5, 9, 20], SamplingParams(12)).tokens
    )
    assert torch.equal(
        drafter.model.embed(torch.tensor([[7]]), drafter.target),
        state["embed_tokens.weight"][7].float().view(1, 1, 32),
    )
    counted = sum(
        w.nbytes for name, w in model.state_dict().items() if name not in ("embed_tokens.weight", "fc.weight")
    )
    assert drafter._bytes == counted
    again = tmp_path / "again"
    save_eagle3(model, again, torch.float16)
    assert_holds(load_eagle3(again, StagedModel(pair.target)), state)


def test_biases_of_queries_keys_and_values(tmp_path):
    state = tensors(
        OFFICIAL | {f"midlayer.self_attn.{n}_proj.bias": (k,) for n, k in (("q", 64), ("k", 32), ("v", 32))}
    )
    model = load_eagle3(written(tmp_path, OFFICIAL_CONFIG, state | mapping()), target())
    assert_holds(model, state)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (1, 2, 3)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}, (2, 3, 4)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, (2, 3, 4)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, (2, 3, 4)),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]},
            },
            (1, 3, 4),
        ),
    ],
)
def test_both_ways_to_name_depths(changes, expected, tmp_path):
    assert load_eagle3(official(tmp_path, **changes), target()).taps == expected
    assert load_eagle3(str(tmp_path), target(), taps=(0, 1, 3)).taps == (0, 1, 3)


# -- what is refused, by its name


def test_a_pickle_that_runs_code_is_not_loaded(tmp_path):
    with pytest.raises(UserError, match="[Ww]eights.only"):
        load_eagle3(written(tmp_path, OFFICIAL_CONFIG, {"fc.weight": RunsCode()}, pickled=True), target())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel_drafting": True}, "sets parallel_drafting"),
        ({"eagle_config": {"next_thing": 1}}, "sets next_thing"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False"),
        ({"eagle_config": {"use_last_layernorm": False}}, "use_last_layernorm=False"),
        ({"architectures": ["Eagle3MoEForCausalLM"]}, "Eagle3MoEForCausalLM"),
        ({"model_type": "deepseek_v3"}, "deepseek_v3"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"sliding_window": 512}, "sliding window"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"norm_before_fc": True}, "missing input_norm.weight"),
        ({"fc_norm": True}, "missing fc_norm.0.weight"),
        (
            {"attention_bias": True},
            "missing midlayer.self_attn.k_proj.bias; missing midlayer.self_attn.o_proj",
        ),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"head_dim": 32}, "head_dim=32.*16"),
        ({"draft_vocab_size": 32}, "draft_vocab_size=32.*40"),
        ({"target_hidden_size": 128}, "target_hidden_size=128.*64"),
        ({"vocab_size": 64}, "t2d is"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}, "set layers"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3]}, "96 wide"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1, 2, 3, 3]}, "192 columns, and 5 depths"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3, 5]}, r"0 to 4 layers.*\[2, 3, 5\]"),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [2, 3, 4],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 3]},
            },
            "set layers",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
    ],
)
def test_a_config_that_is_not_understood(changes, message, tmp_path):
    with pytest.raises(UserError, match=message):
        load_eagle3(official(tmp_path, **changes), target())


def test_speculators_must_say_what_the_residual_is(tmp_path):
    config = {name: value for name, value in SPECULATORS_CONFIG.items() if name != "norm_before_residual"}
    state = tensors({name.replace("midlayer", "layers.0"): shape for name, shape in OFFICIAL.items()})
    with pytest.raises(UserError, match="norm_before_residual"):
        load_eagle3(written(tmp_path, config, state | mapping()), target())


def ids_for_offsets(state: dict) -> None:
    state["d2t"] = torch.tensor(KEPT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("midlayer.hidden_norm.weight"), "missing midlayer.hidden_norm.weight"),
        (lambda s: s.pop("fc.weight"), "missing fc.weight"),
        (lambda s: s.update({"midlayer.self_attn.q_norm.weight": torch.ones(16)}), "unknown .*q_norm"),
        (lambda s: s.update({"layers.1.mlp.up_proj.weight": torch.ones(2)}), "missing layers.1"),
        (lambda s: s.update({"fc.bias": torch.ones(H)}), "unknown fc.bias"),
        (lambda s: s.update({"norm.weight": torch.ones(3)}), r"norm.weight is \(3,\)"),
        (lambda s: s.update({"fc.weight": torch.ones(H, 3 * 48)}), "48 wide, the target 64"),
        (lambda s: s.pop("d2t"), "d2t is missing"),
        (ids_for_offsets, "d2t does not hold"),
        (lambda s: (ids_for_offsets(s), s.pop("t2d")), "d2t does not hold"),
        (lambda s: s.update(d2t=torch.zeros(ROWS, dtype=torch.int64)), "d2t does not hold"),
        (lambda s: (s.update(d2t=torch.zeros(ROWS, dtype=torch.int64)), s.pop("t2d")), "d2t does not hold"),
        (lambda s: s.update(d2t=s["d2t"].clone().fill_(30)), "d2t does not hold"),
        (lambda s: s.update(d2t=-s["d2t"]), "d2t does not hold"),
        (lambda s: s.update(d2t=s["d2t"].float()), "d2t is torch.float32"),
        (lambda s: s.update(d2t=s["d2t"][1:].clone()), "d2t is"),
        (lambda s: s.update(t2d=s["t2d"].roll(1)), "d2t does not hold"),
        (lambda s: s.update({"embed_tokens.weight": torch.ones(3, H)}), "embed_tokens.weight has 3 rows"),
    ],
)
def test_tensors_that_do_not_fit(change, message, tmp_path):
    ours(tmp_path)
    spoil(tmp_path, change)
    with pytest.raises(UserError, match=message) as error:
        load_eagle3(tmp_path, target())
    assert "\n" not in str(error.value)


def test_a_drafter_of_another_vocabulary(tmp_path):
    """It would draft tokens that the target does not have."""
    known = torch.zeros(100, dtype=torch.bool)
    known[60:] = True
    state = tensors(OFFICIAL) | {"d2t": torch.full((ROWS,), 60), "t2d": known}
    with pytest.raises(UserError, match="token 99, the target has 61"):
        load_eagle3(written(tmp_path, OFFICIAL_CONFIG | {"vocab_size": 100}, state), target())


# -- what others read


def test_what_is_saved_is_what_vllm_and_sglang_read(tmp_path):
    """Their names of parameters, and of the settings that they take from config.json."""
    model = load_eagle3(official(tmp_path / "official"), target())
    save_eagle3(model, tmp_path / "ours", torch.bfloat16, held_out_agreement=0.5)
    state = load_file(tmp_path / "ours" / "model.safetensors")
    joined = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
    joined |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
    parts = {
        *("input_layernorm", "hidden_norm", "post_attention_layernorm"),
        *("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"),
    }
    body = {"model.fc.weight", "model.norm.weight"}
    vllm = (
        {f"model.layers.0.{part}.weight" for part in parts}
        | body
        | {"lm_head.weight", "draft_id_to_target_id"}
    )
    sglang = {f"model.midlayer.{part}.weight" for part in parts} | body | {"lm_head.weight"}
    taken: tuple[set, set] = (set(), set())
    for name in state:
        words = [joined.get(word, word) for word in name.split(".")]
        if name == "d2t":
            taken[0].add("draft_id_to_target_id")
        elif name != "t2d":
            plain = ".".join(words) if name.startswith("lm_head") else ".".join(["model", *words])
            taken[0].add(plain.replace("midlayer", "layers.0"))
            taken[1].add(plain)
    assert taken == (vllm, sglang)
    assert state["d2t"].dtype == torch.int64 and state["t2d"].dtype == torch.bool
    assert {weight.dtype for name, weight in state.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}
    assert (torch.arange(ROWS) + state["d2t"]).tolist() == KEPT == state["t2d"].nonzero().flatten().tolist()
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    for name in (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    ):
        assert config[name] == OFFICIAL_CONFIG[name]
    assert (
        config["num_hidden_layers"] == 1 and config["draft_vocab_size"] == ROWS and config["head_dim"] == 16
    )
    assert config["rope_theta"] == 10000 and config["rope_scaling"] is None and config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is False and config["torch_dtype"] == "bfloat16"
    assert "target_hidden_size" not in config and not config["attention_bias"]
    # vLLM: in front of which layer; SGLang adds 1 to what it finds here.
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["eagle_config"] == {
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        "use_aux_hidden_state": True,
    }


@pytest.mark.parametrize("flag", [None, "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"])
def test_what_is_saved_is_loaded(flag, tmp_path):
    config = Eagle3Config(
        hidden_size=H,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=V,
        num_hidden_layers=1,
        head_dim=16,
        rope_theta=5000.0,
        **({flag: True} if flag else {}),
    )
    torch.manual_seed(1)
    model = Eagle3Model(config, (0, 2, 4), torch.tensor(KEPT))
    save_eagle3(model, tmp_path, torch.float32)
    found = load_eagle3(tmp_path, target())
    assert_holds(found, model.state_dict())
    assert found.taps == (0, 2, 4) and found.token_ids.tolist() == KEPT
    assert found.config.rope_parameters["rope_theta"] == 5000
    if flag:
        assert getattr(found.config, flag) is True
