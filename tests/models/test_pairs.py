"""Pairs are loaded the way real ones are: from folders in the Hugging Face format, or refused in one line."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from omegaconf import OmegaConf
from transformers import AutoTokenizer, SmolLM3Config, SmolLM3ForCausalLM

from specbench.decoding.model.graphs import Options, options_of
from specbench.decoding.model.staged_model import StagedModel
from specbench.models import model_source, pairs
from specbench.models.devices import SWITCH, choose_device, compiles, place_weights, prepare_device
from specbench.models.pairs import load_pair
from specbench.models.surgery import cut
from specbench.system.errors import UserError
from specbench.system.files import read_json
from tests.support.conf import composed
from tests.support.decoding import checked
from tests.support.models import TEMPLATE, byte_tokenizer, edit_json, random_model, save_pair

CHAT = [
    {"role": "user", "content": "Zwölf?"},
    {"role": "assistant", "content": "12"},
    {"role": "user", "content": "Ja"},
]


@pytest.fixture
def cfg(tmp_path):
    """The config of a freshly saved pair that a test may spoil."""
    return save_pair(tmp_path / "pair")


@pytest.mark.parametrize(
    ("files", "fetched"),
    [
        (["model.safetensors", "pytorch_model.bin", "training.pt"], ["model.safetensors"]),
        (["model-1.safetensors", "consolidated.safetensors"], ["model-1.safetensors"]),
        (["pytorch_model.bin", "heads.pt"], ["pytorch_model.bin", "heads.pt"]),
        ([], []),
    ],
)
def test_weights_are_fetched_once(tmp_path, monkeypatch, files, fetched):
    def snapshot(name, revision, allow_patterns, ignore_patterns):
        assert (name, revision) == ("someone/model", "main")
        for file in filter_repo_objects(
            ["config.json", "README.md", *files],
            allow_patterns=allow_patterns,
            ignore_patterns=ignore_patterns,
        ):
            (tmp_path / file).touch()
        return str(tmp_path)

    monkeypatch.setattr(model_source, "snapshot_download", snapshot)
    assert model_source.fetch_with_weights("someone/model", "main") == tmp_path
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["config.json", *fetched])


def test_loads_target_and_draft(cfg):
    pair = load_pair(cfg, seed=0, with_draft=True)
    for model in (pair.target, pair.draft):
        assert model.dtype == torch.float32 and model.device.type == "cpu" and not model.training
        assert model.config._attn_implementation == "sdpa"
        assert not any(p.requires_grad for p in model.parameters())
    assert pair.context_length == 512
    assert (pair.name, pair.init, pair.parts) == ("saved", "pretrained", {})


def test_a_family_that_torch_has_no_attention_for_is_loaded_with_its_own(cfg):
    target = random_model("gemma2", 0, vocab_size=260, eos_token_id=257, bos_token_id=256, pad_token_id=None)
    cfg.tokenizer = cfg.target
    cfg.target = str(Path(cfg.target).parent / "gemma2")
    target.save_pretrained(cfg.target)
    pair = load_pair(cfg, seed=0, with_draft=True)
    assert pair.target.config._attn_implementation == "eager"
    checked(StagedModel(pair.target))


def test_options_of_graphs_are_the_pairs_own(cfg):
    """A second pair in a process says nothing about the first."""
    cfg.graphs, cfg.compile = False, True
    first = load_pair(cfg, seed=0, with_draft=True)
    cfg.graphs, cfg.compile = None, None
    second = load_pair(cfg, seed=0, with_draft=False)
    assert options_of(first.target) == options_of(first.draft) == Options(graphs=False, compile=True)
    assert options_of(second.target) == Options()


def test_draft_is_left_alone_unless_asked_for(cfg):
    cfg.draft = "/nowhere"
    assert load_pair(cfg, seed=0, with_draft=False).draft is None
    with pytest.raises(UserError, match="'/nowhere'"):
        load_pair(cfg, seed=0, with_draft=True)
    cfg.draft = None
    with pytest.raises(UserError, match="draft model"):
        load_pair(cfg, seed=0, with_draft=True)


def test_context_is_the_shorter_one(cfg):
    edit_json(_file(cfg.draft, "config.json"), max_position_embeddings=100)
    assert load_pair(cfg, seed=0, with_draft=True).context_length == 100
    assert load_pair(cfg, seed=0, with_draft=False).context_length == 512


def test_one_dtype_for_both_whatever_is_stored(cfg):
    cfg.dtype = "bfloat16"
    pair = load_pair(cfg, seed=0, with_draft=True)
    assert pair.target.dtype == pair.draft.dtype == pair.dtype == torch.bfloat16


def test_weights_of_another_size_than_the_config_says_are_named(cfg):
    vocab = read_json(_file(cfg.target, "config.json"))["vocab_size"]
    edit_json(_file(cfg.target, "config.json"), vocab_size=vocab + 8)
    with pytest.raises(UserError, match=rf"do not fit its config: .*\[{vocab}, .*\[{vocab + 8}, "):
        load_pair(cfg, seed=0, with_draft=False)


def test_weights_that_the_config_does_not_use_are_told(cfg, capsys):
    layers = read_json(_file(cfg.target, "config.json"))["num_hidden_layers"]
    load_pair(cfg, seed=0, with_draft=False)
    assert "does not use" not in capsys.readouterr().err
    edit_json(_file(cfg.target, "config.json"), num_hidden_layers=layers - 1)
    load_pair(cfg, seed=0, with_draft=False)
    said = capsys.readouterr().err
    assert f"tensors that its config does not use, such as model.layers.{layers - 1}." in said


@pytest.mark.parametrize(
    ("more", "layers"), [([], 2), (["pair.draft=other"], None), (["pair.draft_layers=1"], 1)]
)
def test_layers_of_a_pairs_own_draft_model_are_those_of_no_other(more, layers):
    assert composed("bench", "pair=smollm2-135m", "method=sps", *more).pair.draft_layers == layers


def test_a_part_as_draft_model_is_of_no_revision_of_the_pairs_own():
    cfg = composed("bench", "pair=tiny", "pair.draft_revision=abc").pair
    assert cfg.draft_revision == "abc" and pairs.with_part(cfg, "another/model").draft_revision is None


def test_a_trainer_takes_all_layers_of_another_draft_model():
    pair_cfg = composed("train_sps", "pair=smollm2-135m", "draft=other").pair
    assert pair_cfg.draft_layers == 2
    assert OmegaConf.merge(pair_cfg, {"draft": "other"}).draft_layers is None


@pytest.mark.first_fast
@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_a_draft_model_of_fewer_layers(cfg, init):
    """It is what the whole one is after so many layers: its embeddings, its norm, its head."""
    cfg.init, cfg.dtype, cfg.draft = init, "bfloat16", cfg.target
    whole = load_pair(cfg, seed=0, with_draft=True).draft
    cfg.draft_layers = 1
    short = load_pair(cfg, seed=0, with_draft=True).draft
    assert short.dtype == torch.bfloat16 and not any(p.requires_grad for p in short.parameters())
    assert short.config._attn_implementation == "sdpa"
    whole, short, ids = StagedModel(whole), StagedModel(short), torch.tensor([[3, 5, 8]])
    depth = len(whole.layers)
    assert depth > len(short.layers) == 1
    early = whole.run_layers(whole.embed(ids), whole.new_cache(3), 0, 0, 1)
    assert torch.equal(
        whole.head(early), short.head(short.run_layers(short.embed(ids), short.new_cache(3), 0))
    )
    cfg.draft_layers = depth + 1
    with pytest.raises(UserError, match=rf"pair\.draft_layers .*\b{depth + 1}\b.*\b{depth}\b"):
        load_pair(cfg, seed=0, with_draft=True)


def test_a_cut_model_keeps_what_its_own_layers_are_like():
    """SmolLM3 says in a list of its own which layers have rotary positions."""
    size = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": 40}
    size |= {"num_key_value_heads": 1, "pad_token_id": 0, "tie_word_embeddings": False}
    uses_rope, stops = [1, 1, 1, 0, 1, 1], [2, 9, 11, 17, 21, 30]
    layers = {"num_hidden_layers": 6, "no_rope_layers": uses_rope, "eos_token_id": stops}
    torch.manual_seed(0)
    whole = SmolLM3ForCausalLM(SmolLM3Config(**size, **layers)).eval()
    short = cut(whole, [0, 3, 5])
    assert short.config.no_rope_layers == [1, 0, 1]
    assert [layer.self_attn.use_rope for layer in short.model.layers] == [1, 0, 1]
    assert len(short.config.layer_types) == 3
    assert short.config.eos_token_id == stops, "as many stop tokens as layers"
    assert whole.config.no_rope_layers == uses_rope


def test_a_model_that_also_sees_is_not_cut():
    """Its layers have names of their own, and so has its vision tower."""
    composite = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: None))
    with pytest.raises(UserError, match="more than a language model"):
        cut(composite, [0])


def test_prompt_has_one_bos_and_survives_the_way_back(cfg):
    pair = load_pair(cfg, seed=0, with_draft=False)
    ids = pair.prompt_ids(CHAT)
    assert ids.count(pair.tokenizer.bos_token_id) == 1 and ids[0] == pair.tokenizer.bos_token_id
    assert pair.tokenizer.decode(ids) == "<s><user>Zwölf?<assistant>12</s><user>Ja<assistant>"
    assert pair.decode(ids) == "Zwölf?12Ja"


def test_template_of_the_config_and_its_variables(cfg):
    cfg.chat_template = "{{ bos_token }}{{ mood }}: {{ messages[-1].content }}"
    cfg.template_kwargs = {"mood": "calm"}
    pair = load_pair(cfg, seed=0, with_draft=False)
    assert pair.tokenizer.decode(pair.prompt_ids(CHAT)) == "<s>calm: Ja"


@pytest.mark.parametrize(
    "template",
    [TEMPLATE, "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}A:"],
)
def test_what_stands_around_a_users_turn(cfg, template):
    cfg.chat_template = template
    pair = load_pair(cfg, 0, with_draft=False)
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for messages in ([], talk):
        before, after = pair.user_turn(messages)
        asked = [*messages, {"role": "user", "content": "Who?"}]
        assert pair.encode(f"{before}Who?{after}") == pair.prompt_ids(asked)


def test_a_template_without_the_users_words(cfg):
    cfg.chat_template = "{{ bos_token }}hello"
    with pytest.raises(UserError, match="does not write what the user says"):
        load_pair(cfg, 0, with_draft=False).user_turn([])


def test_templates_are_told_one_day_as_the_date(cfg):
    """By today's, prompts would differ from day to day."""
    cfg.chat_template = "{{ strftime_now('%d %b %Y, %Y-%m-%d, %-d %B') }}: {{ messages[0].content }}"
    pair = load_pair(cfg, 0, with_draft=False)
    assert pair.rendered(CHAT) == "26 Jul 2024, 2024-07-26, 26 July: Zwölf?"


def test_a_conversation_that_the_template_refuses_is_one_line(cfg):
    cfg.chat_template = "{{ raise_exception('System role not supported') }}"
    pair = load_pair(cfg, 0, with_draft=False)
    with pytest.raises(UserError, match="template of pair .* refuses: .*System role not supported"):
        pair.prompt_ids(CHAT)


@pytest.mark.parametrize("names", [["default", "tool_use"], ["tool_use"]])
def test_of_several_templates_the_default_is_taken(cfg, names):
    edit_json(
        Path(cfg.target) / "tokenizer_config.json",
        chat_template=[{"name": name, "template": f"{name} {{{{ messages[0].content }}}}"} for name in names],
    )
    (Path(cfg.target) / "chat_template.jinja").unlink(missing_ok=True)
    if "default" not in names:
        with pytest.raises(UserError, match="no chat template: set pair.chat_template"):
            load_pair(cfg, 0, with_draft=False)
    else:
        assert load_pair(cfg, 0, with_draft=False).rendered(CHAT) == "default Zwölf?"


def test_neither_template(cfg):
    byte_tokenizer(chat_template=None).save_pretrained(cfg.target)
    _file(cfg.target, "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(UserError, match=r"pair\.chat_template"):
        load_pair(cfg, seed=0, with_draft=False)
    cfg.chat_template = TEMPLATE
    assert load_pair(cfg, seed=0, with_draft=False).prompt_ids(CHAT)


def test_stop_ids_are_the_union(cfg):
    eos = byte_tokenizer().eos_token_id
    edit_json(_file(cfg.target, "generation_config.json"), eos_token_id=[eos, 7])
    edit_json(_file(cfg.target, "config.json"), eos_token_id=9)
    edit_json(_file(cfg.draft, "config.json"), eos_token_id=11)
    assert load_pair(cfg, seed=0, with_draft=True).stop_ids == {eos, 7, 9}
    cfg.stop_ids = [5]
    pair = load_pair(cfg, seed=0, with_draft=False)
    assert pair.stop_ids == {5}
    assert pair.decode([65, 5, 66]) == pair.decode([65, 66])
    rows = pair.target.config.vocab_size
    cfg.stop_ids = [5, rows]
    with pytest.raises(UserError, match=rf"pair\.stop_ids holds {rows}, .* the tokens 0 to {rows - 1}$"):
        load_pair(cfg, seed=0, with_draft=False)


def test_bin_weights_load_without_running_code(cfg):
    state = load_pair(cfg, seed=0, with_draft=False).target.state_dict()
    _file(cfg.target, "model.safetensors").unlink()
    torch.save(state, _file(cfg.target, "pytorch_model.bin"))
    loaded = load_pair(cfg, seed=0, with_draft=False).target.state_dict()
    assert all(torch.equal(state[name], loaded[name]) for name in state)

    class Code:
        def __reduce__(self):
            return print, ("code ran",)

    whole = _file(cfg.target, "pytorch_model.bin").read_bytes()
    _file(cfg.target, "pytorch_model.bin").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="cannot load"):
        load_pair(cfg, seed=0, with_draft=False)
    torch.save({**state, "evil": Code()}, _file(cfg.target, "pytorch_model.bin"))
    with pytest.raises(UserError, match="[Ww]eights.only"):
        load_pair(cfg, seed=0, with_draft=False)


def test_incomplete_weights_are_refused(cfg):
    layers = json.loads(_file(cfg.target, "config.json").read_text())["num_hidden_layers"]
    edit_json(_file(cfg.target, "config.json"), num_hidden_layers=layers + 1, layer_types=None)
    with pytest.raises(UserError, match=r"\b9\b.*model\.layers\.5"):
        load_pair(cfg, seed=0, with_draft=False)


def test_random_weights_come_from_the_seed_alone(cfg):
    cfg.init = "random"
    _file(cfg.target, "model.safetensors").unlink()
    one, same, other = (load_pair(cfg, seed=s, with_draft=False).target.lm_head.weight for s in (3, 3, 4))
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert one.dtype == torch.float32


def test_many_random_weights_are_told_of_before_they_are_drawn(cfg, monkeypatch, capsys):
    cfg.init = "random"
    load_pair(cfg, seed=0, with_draft=False)
    assert "random" not in capsys.readouterr().err
    monkeypatch.setattr(model_source, "MANY_PARAMETERS", 10_000)
    load_pair(cfg, seed=0, with_draft=False)
    assert "making random weights (0.0 B parameters) ...\n" in capsys.readouterr().err


def with_token_beyond(cfg, token: str = "<image>") -> None:
    """A pair whose tokenizer has an added token for which neither model has a row."""
    tokenizer = byte_tokenizer()
    rows = read_json(_file(cfg.target, "config.json"))["vocab_size"]
    tokenizer.add_tokens([f"<filler{i}>" for i in range(rows - len(tokenizer))])
    tokenizer.add_tokens([token], special_tokens=True)
    assert tokenizer.convert_tokens_to_ids(token) == rows
    for folder in (cfg.target, cfg.draft):
        tokenizer.save_pretrained(folder)


def test_an_added_token_that_no_text_holds_needs_no_row(cfg):
    """The small models of Gemma 3 lack one for their tokenizer's token for images."""
    with_token_beyond(cfg)
    pair = load_pair(cfg, seed=0, with_draft=True)
    assert pair.vocab_size == pair.target.config.vocab_size and pair.prompt_ids(CHAT)
    with pytest.raises(
        UserError, match="a text holds <image>, and the models of pair 'saved' have no such token"
    ):
        pair.prompt_ids([{"role": "user", "content": "What is <image>?"}])
    cfg.chat_template = TEMPLATE + "<image>"
    with pytest.raises(UserError, match="the vocabularies differ: .* has ids up to"):
        load_pair(cfg, seed=0, with_draft=False)


@pytest.mark.parametrize(("family", "told"), [("mistral", {"fix_mistral_regex": True}), ("llama", {})])
def test_large_tokenizers_of_mistral_are_told_to_split_words_rightly(cfg, monkeypatch, family, told):
    edit_json(_file(cfg.target, "config.json"), model_type=family)
    given, read = [], AutoTokenizer.from_pretrained
    monkeypatch.setattr(
        AutoTokenizer,
        "from_pretrained",
        lambda *folder, **options: given.append(options) or read(*folder, **options),
    )
    load_pair(cfg, seed=0, with_draft=False)
    assert given == [{"trust_remote_code": False} | told]


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("tokenizer.json", lambda text: text[: len(text) // 2]),
        ("tokenizer.json", lambda text: "version https://git-lfs.github.com/spec/v1\n"),
        ("config.json", lambda text: text.replace('"hidden_size": ', '"hidden_size": "wide", "was": ')),
        ("config.json", lambda text: text.replace('"hidden_size": ', '"hidden_size": 7, "was": ')),
    ],
)
def test_damaged_files_are_one_line(cfg, file, damage):
    path = _file(cfg.target, file)
    path.write_text(damaged := damage(path.read_text()))
    assert damaged
    with pytest.raises(UserError, match=f"cannot load '{cfg.target}': ") as caught:
        load_pair(cfg, seed=0, with_draft=False)
    assert "\n" not in str(caught.value)


def test_draft_with_another_vocabulary(cfg):
    byte_tokenizer(first_special="<bos>").save_pretrained(cfg.draft)
    expected = rf"256 .*'<s>' .*{cfg.target}.*'<bos>' .*{cfg.draft}"
    with pytest.raises(UserError, match=expected):
        load_pair(cfg, seed=0, with_draft=True)
    byte_tokenizer().save_pretrained(cfg.draft)
    assert load_pair(cfg, seed=0, with_draft=True).draft is not None


def test_draft_too_narrow_and_draft_padded(tmp_path, cfg):
    narrow = save_pair(tmp_path / "narrow", vocab_size=258)
    cfg.draft = narrow.draft
    with pytest.raises(UserError, match=r"\b258\b.*\b259\b"):
        load_pair(cfg, seed=0, with_draft=True)
    cfg.draft = save_pair(tmp_path / "padded", vocab_size=320).draft
    assert load_pair(cfg, seed=0, with_draft=True).draft.config.vocab_size == 320


def test_models_that_are_not_there(cfg):
    for name, message in {
        "no-such-org/no-such-model": "no-such-model.* hub ",
        "not a name": "'not a name'",
        "specbench/tiny/weights/nothing": "`make tiny`",
        "some/folder/below": "'some/folder/below'",
    }.items():
        cfg.target = name
        with pytest.raises(UserError, match=message) as caught:
            load_pair(cfg, seed=0, with_draft=False)
        assert "\n" not in str(caught.value)


def test_gated_model_says_what_to_do(cfg):
    cfg.target, cfg.gated = "some-org/some-model", True
    with pytest.raises(UserError, match="licence"):
        load_pair(cfg, seed=0, with_draft=False)


def test_broken_folders(cfg):
    _file(cfg.target, "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(UserError, match="cannot load"):
        load_pair(cfg, seed=0, with_draft=False)
    edit_json(_file(cfg.target, "config.json"), model_type="nonesuch")
    with pytest.raises(UserError, match="cannot load"):
        load_pair(cfg, seed=0, with_draft=False)
    _file(cfg.target, "tokenizer.json").unlink()
    with pytest.raises(UserError, match="no tokenizer"):
        load_pair(cfg, seed=0, with_draft=False)


@pytest.mark.parametrize(
    ("scheme", "package"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}, "gptqmodel"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64}, "optimum|gptqmodel"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        (
            {
                "quant_method": "torchao",
                "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}},
            },
            "torchao",
        ),
    ],
)
def test_quantised_weights_need_a_package(cfg, scheme, package):
    if any(importlib.util.find_spec(name) for name in package.split("|")):
        pytest.skip("it is installed")
    edit_json(_file(cfg.target, "config.json"), quantization_config=scheme)
    with pytest.raises(UserError, match=f"cannot load '.*({package})") as caught:
        load_pair(cfg, seed=0, with_draft=False)
    assert "\n" not in str(caught.value)


def test_quantised_weights_are_not_cut(cfg, monkeypatch):
    cfg.draft_layers = 1
    edit_json(_file(cfg.draft, "config.json"), quantization_config={"quant_method": "of the future"})
    with pytest.raises(UserError, match=r"quantised weights .*pair\.draft_layers"):
        load_pair(cfg, seed=0, with_draft=True)


def test_devices():
    assert choose_device("cpu").type == "cpu"
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(UserError, match=r"pair\.device .*'cuda:99'"):
        choose_device("cuda:99")
    with pytest.raises(UserError, match=r"pair\.device 'gpu'"):
        choose_device("gpu")
    with pytest.raises(UserError, match=r"method\.draft_device 'gpu'"):
        choose_device("gpu", "method.draft_device")


def test_more_processes_than_gpus_are_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device("auto") == torch.device("cuda:1")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match="process 3 has no CUDA device: this machine has 2"):
        choose_device("auto")


@pytest.mark.parametrize("error", [PermissionError("the cache is read-only"), ValueError("Unknown scheme")])
def test_whatever_keeps_the_hub_away_is_one_line(monkeypatch, error):
    def failing(*_, **__):
        raise error

    monkeypatch.setattr(model_source, "snapshot_download", failing)
    with pytest.raises(UserError, match=f"cannot fetch 'some/model' from the hub: .*{error}"):
        model_source.fetch_small_files("some/model")


def test_a_shape_without_a_type_is_one_line(cfg):
    cfg.init, cfg.target, cfg.target_shape = "random", "some/model", {"hidden_size": 64}
    with pytest.raises(UserError, match="the shape of 'some/model' names no model_type"):
        load_pair(cfg, seed=0, with_draft=False)


def test_a_gpu_is_prepared_where_a_pair_is_loaded(cfg, monkeypatch):
    called, cpu, second_gpu = [], torch.device("cpu"), torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: called.append(("current", device)))
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda on: called.append(("cudnn", on)))
    prepare_device(cpu)
    assert called == []
    prepare_device(second_gpu)
    assert called == [("current", second_gpu), ("cudnn", False)]
    seen = []
    monkeypatch.setattr(pairs, "prepare_device", seen.append)
    load_pair(cfg, seed=0, with_draft=False)
    assert seen == [cpu]


def test_weights_are_cast_and_buffers_are_not():
    module = torch.nn.Linear(2, 3)
    module.register_buffer("inv_freq", torch.rand(4))
    place_weights(module, torch.device("cpu"), torch.bfloat16)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert module.inv_freq.dtype == torch.float32


def test_what_is_compiled_depends_on_setting_and_device(monkeypatch):
    monkeypatch.delenv(SWITCH, raising=False)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert [compiles(None, device) for device in (cpu, cuda)] == [True, False]
    assert [compiles(value, device) for value in (True, False) for device in (cpu, cuda)] == [True] * 2 + [
        False
    ] * 2
    monkeypatch.setenv(SWITCH, "0")
    assert not compiles(None, cpu)
    assert compiles(True, cpu)


def _file(folder, name):
    return Path(folder) / name
