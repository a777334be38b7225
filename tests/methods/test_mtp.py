"""MTP heads: what is drafted, checked against passes without a cache; training; checkpoints."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file

from methods.common import initialisation, losses
from methods.common.losses import Loss
from methods.common.step_distillation import StepDistillation
from methods.mtp import Mtp
from methods.mtp import train as mtp_train
from methods.mtp.checkpoint import load_mtp, save_mtp
from methods.mtp.model import MtpModel
from methods.mtp.train import fit, fresh_model
from specbench.data.training_folder import RECORD
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import NORMED
from specbench.system.errors import UserError
from tests.support.decoding import PROMPT, random_pair
from tests.support.distribution import SHAPE, p_value_alone
from tests.support.gradients import (
    assert_learns_from_a_sample,
    assert_same_gradients,
    no_distribution_stays,
)
from tests.support.lossless import assert_lossless, assert_rounds_of_every_kind, cases
from tests.support.methods import (
    assert_an_oracle_proposes_in_place_of,
    assert_drafts_the_same,
    expanded_pair,
    norm,
    randomise,
    taught,
)
from tests.support.models import EVERY_ARCHITECTURE
from tests.support.schedulers import EVERY_SCHEDULER, assert_lossless_with
from tests.support.training import training_settings


def head_of(pair) -> MtpModel:
    """Random weights, as large as those of the target."""
    model = fresh_model(StagedModel(pair.target))
    randomise(model, "final_layernorm")
    return model.eval()


@cache
@torch.inference_mode(False)
def trained_model(arch: str) -> MtpModel:
    pair = random_pair(arch)
    model = head_of(pair)
    return taught(StepDistillation(model, pair.staged, 3, 0.6), model, arch, 20)


def saved(arch: str, folder) -> str:
    save_mtp(trained_model(arch), folder, torch.float32)
    return str(folder)


def drafter_of(arch: str, folder, k: int = 4) -> Mtp:
    return Mtp(random_pair(arch), saved(arch, folder), k)


def chain(pair, model: MtpModel, known: list[int], k: int) -> list[int]:
    """The likeliest chain after known tokens: each token from a pass over all pairs so far, without a cache."""
    tokens, embed = torch.tensor([known]), pair.target.get_input_embeddings()
    features, embeds = pair.target.get_decoder()(tokens[:, :-1]).last_hidden_state, embed(tokens[:, 1:])
    found: list[int] = []
    for _ in range(k):
        rope = model.rope(torch.arange(features.shape[1])[None], features)
        out = model(features, embeds, position_embeddings=rope)
        found.append(int(pair.target.lm_head(out[0, -1]).argmax()))
        features = torch.cat([features, out[:, -1:]], dim=1)
        embeds = torch.cat([embeds, embed(torch.tensor([[found[-1]]]))], dim=1)
    return found


# -- the head


def test_the_head_by_hand():
    """Of one pair, which attends to itself alone: attention gives its own values."""
    model = head_of(random_pair("llama"))
    w, eps = model.state_dict(), model.config.rms_norm_eps
    state, embed = torch.randn(64), torch.randn(64)
    both = [norm(embed, w["token_layernorm.weight"], eps), norm(state, w["hidden_layernorm.weight"], eps)]
    x = w["input_proj.weight"] @ torch.cat(both)
    layer = {name.removeprefix("layers.0."): weight for name, weight in w.items()}
    y = norm(x, layer["input_layernorm.weight"], eps)
    heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    values = (layer["self_attn.v_proj.weight"] @ y).view(kv_heads, -1).repeat_interleave(heads // kv_heads, 0)
    v = x + layer["self_attn.o_proj.weight"] @ values.flatten()
    inner = norm(v, layer["post_attention_layernorm.weight"], eps)
    gate, up = layer["mlp.gate_proj.weight"] @ inner, layer["mlp.up_proj.weight"] @ inner
    expected = v + layer["mlp.down_proj.weight"] @ (torch.nn.functional.silu(gate) * up)
    rope = model.rope(torch.tensor([[7]]), embed)
    found = model(state.view(1, 1, -1), embed.view(1, 1, -1), position_embeddings=rope)
    torch.testing.assert_close(
        found[0, 0], norm(expected, w["final_layernorm.weight"], eps), rtol=1e-4, atol=1e-4
    )


# -- drafting


@pytest.mark.first_fast
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_a_draft_is_a_chain_of_the_heads_guesses(arch, tmp_path):
    pair = random_pair(arch)
    drafter, model, compared = drafter_of(arch, tmp_path), trained_model(arch), []
    draft_of = drafter.draft

    def check(batch):
        draft = draft_of(batch)
        k = draft.tokens.shape[1]
        assert draft.tokens[0].tolist() == chain(pair, model, batch.sequences[0].tokens, k)
        compared.append(k)
        return draft

    drafter.draft = check
    prompt, cap, *_ = cases(arch)[6]
    steps = Engine(StagedModel(pair.target), drafter, frozenset()).answer(prompt, SamplingParams(cap)).steps
    assert len(compared) > 5 and {*compared} > {4} and {0, 1} <= {step.accepted for step in steps}


def test_each_token_reads_the_layer_and_the_head(tmp_path):
    pair = random_pair("llama")
    head = pair.target.lm_head.weight.nbytes + pair.target.model.norm.weight.nbytes
    weights = sum(weight.nbytes for weight in trained_model("llama").state_dict().values())
    steps = Engine(StagedModel(pair.target), drafter_of("llama", tmp_path), frozenset()).answer(
        PROMPT, SamplingParams(9)
    )
    assert steps.steps[0].draft_bytes == 4 * (weights + head)


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("arch", EVERY_ARCHITECTURE)
def test_lossless(arch, tmp_path):
    steps = assert_lossless(arch, drafter_of(arch, tmp_path))
    assert_rounds_of_every_kind(steps, partly=True)


@pytest.mark.slow
@EVERY_SCHEDULER
def test_lossless_in_batches(scheduler, tmp_path):
    assert_lossless_with(scheduler, "qwen2", drafter_of("qwen2", tmp_path))


@pytest.mark.slow
def test_samples_follow_the_target(tmp_path):
    pair = random_pair("llama", **SHAPE)
    save_mtp(head_of(pair), tmp_path, torch.float32)
    assert p_value_alone(pair, Mtp(pair, str(tmp_path), 3)) > 1e-3


def test_an_oracle_proposes_its_tokens_in_place_of_these(tmp_path):
    assert_an_oracle_proposes_in_place_of("methods.mtp.Mtp", saved("llama", tmp_path))


@pytest.mark.slow
def test_the_drafter_of_an_expanded_target_drafts_the_same(tmp_path):
    pair, folder = random_pair("llama"), saved("llama", tmp_path)
    more = {"hidden_size": 96, "num_hidden_layers": 10, "head_dim": 24}
    wide = expanded_pair(pair, pair.target.config.to_dict() | more)
    assert_drafts_the_same(lambda which: Mtp(which, folder, 3), pair, wide, PROMPT, 20)


def test_tokens_that_an_expanded_target_adds_are_not_drafted(tmp_path):
    pair = random_pair("llama")
    more = {"hidden_size": 96, "num_hidden_layers": 10, "head_dim": 24}
    shape = pair.target.config.to_dict() | more | {"vocab_size": pair.target.config.vocab_size + 40}
    wide = expanded_pair(pair, shape)
    target = StagedModel(wide.target)
    head = load_mtp(saved("llama", tmp_path), target, wide.expansion)
    hidden = torch.nn.functional.pad(torch.randn(1, 5, 64), (0, 32))
    embeds = target.embed(torch.tensor([[3, 9, 27, 11, 33]]))
    out = head(hidden, embeds, position_embeddings=head.rope(torch.arange(5)[None], hidden))
    logits = target.unembed(out)
    assert logits[..., -40:].max() < -100 < logits[..., :-40].min()


# -- training


def test_a_fresh_head_is_the_best_linear_estimate_of_the_next_state(monkeypatch):
    """Of the size that the target's states have after their norm."""
    monkeypatch.setattr(initialisation, "FITTED_PLACES", 60_000)  # all of the text below
    pair = random_pair("llama")
    target = StagedModel(pair.target)
    model = fresh_model(target)
    torch.manual_seed(3)
    text = [{"input_ids": torch.randint(0, target.vocab_size, (8, 64))} for _ in range(20)]
    fit(model, target, text)

    def known(batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        states = pair.target.get_decoder()(batch["input_ids"]).last_hidden_state
        return states[:, :-1], pair.target.get_input_embeddings()(batch["input_ids"][:, 1:]), states[:, 1:]

    with torch.no_grad():
        parts = [known(batch) for batch in text]
        flat = [torch.cat([part[i].flatten(0, 1) for part in parts]) for i in range(3)]
        normed = [one / (one.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() for one in flat[:2]]
        inputs = torch.cat([normed[1], normed[0]], dim=-1)
        wide = inputs.double()
        best = torch.linalg.solve(wide.T @ wide, wide.T @ flat[2].double()).float()
        states, embeds, goal = parts[0]
        rope = model.rope(torch.arange(63)[None], states)
        guess = model(states, embeds, position_embeddings=rope).flatten(0, 1)
        estimate = inputs[: len(guess)] @ best
    alike = torch.nn.functional.cosine_similarity(guess, estimate, dim=-1)
    assert alike.mean() > 0.98
    assert guess.pow(2).mean() == pytest.approx(goal.pow(2).mean().item(), rel=0.05)


def test_the_loss_has_the_gradients_of_all_steps_and_tokens_at_once(monkeypatch):
    """Though it is taken in parts of two tokens, and no distribution stays in memory until the gradient."""
    steps, decay = 3, 0.6
    monkeypatch.setattr(losses, "CHUNK", 2 * steps)
    pair = random_pair("llama")
    model = head_of(pair)
    module = StepDistillation(model, StagedModel(pair.target), steps, decay)
    ids, weight = torch.tensor([[*PROMPT, 5, 40, 2], [2, 40, 5, *PROMPT]]), torch.rand(2, 10)
    batch = {"input_ids": ids, "loss_weight": weight}
    with no_distribution_stays(pair.vocab_size):
        loss = module(batch)
    outputs, finals = module.outputs(batch)
    truth, joint = pair.target.lm_head(finals).softmax(-1), torch.zeros(())
    for j, output in enumerate(outputs):
        guessed = pair.target.lm_head(output).log_softmax(-1)
        for t in range(1 + steps, 10):  # with enough tokens in front for the last step
            entropy = -(truth[:, t - 1] * guessed[:, t - 2 - j]).sum(-1)
            joint = joint + decay**j * (weight[:, t] * entropy).sum()
    assert_same_gradients(model, loss, joint)


def test_a_sample_stands_for_the_vocabulary():
    pair = random_pair("llama")
    model = head_of(pair)

    def module_of(loss: Loss) -> StepDistillation:
        return StepDistillation(model, StagedModel(pair.target), 3, 0.6, loss)

    assert_learns_from_a_sample(module_of, model, pair, [[*PROMPT, 5, 40, 2], [2, 40, 5, *PROMPT]])


@pytest.mark.slow
def test_training_teaches_a_chain(workplace, tmp_path):
    more = ("steps=60", "save_every=20", "draft_steps=2", "learning_rate=5e-3")
    out = mtp_train.train(training_settings("train_mtp", workplace, tmp_path / "out", *more))
    rows = [json.loads(line) for line in (out / "train_log.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["step_2_agreement"] > rows[0]["step_2_agreement"]
    assert json.loads((out / RECORD).read_text())["held_out_run"] == rows[-1]["held_out_run"]


def test_a_setting_of_the_training_that_cannot_work(workplace, tmp_path):
    impossible = {"draft_steps=64": "no room", "decay=2.0": "decay"}
    for setting, says in impossible.items():
        with pytest.raises(UserError, match=says):
            mtp_train.train(training_settings("train_mtp", workplace, tmp_path / "out", setting))


# -- checkpoints


def loaded(folder) -> MtpModel:
    return load_mtp(folder, StagedModel(random_pair("llama").target))


def test_files_are_those_of_speculators(tmp_path):
    model = head_of(random_pair("llama"))
    save_mtp(model, tmp_path / "first", torch.float32, loss=1.0)
    keys = {*load_file(tmp_path / "first" / "model.safetensors")}
    layer = {f"self_attn.{name}_proj" for name in "qkvo"} | {"self_attn.q_norm", "self_attn.k_norm"}
    layer |= {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    layer |= {"input_layernorm", "post_attention_layernorm"}
    parts = {"hidden_layernorm", "token_layernorm", "input_proj", "final_layernorm"}
    assert keys == {f"mtp_layers.0.{name}.weight" for name in layer | parts}
    settings = json.loads((tmp_path / "first" / "config.json").read_text())
    assert settings["speculators_model_type"] == "mtp" and settings["num_nextn_predict_layers"] == 1
    assert settings["transformer_layer_config"]["model_type"] == "qwen3"
    once = loaded(tmp_path / "first")
    save_mtp(once, tmp_path / "second", torch.float32)
    state = loaded(tmp_path / "second").state_dict()
    assert all(torch.equal(weight, state[name]) for name, weight in model.state_dict().items())


def test_heads_as_qwens_models_hold_them(tmp_path):
    model = head_of(random_pair("llama"))
    save_mtp(model, tmp_path, torch.float32)
    settings = json.loads((tmp_path / "config.json").read_text())["transformer_layer_config"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    names = {"input_proj": "fc", "hidden_layernorm": "pre_fc_norm_hidden"}
    names |= {"token_layernorm": "pre_fc_norm_embedding", "final_layernorm": "norm"}
    state = {
        f"mtp.{names.get(name.split('.')[0], name.split('.')[0])}.{name.partition('.')[2]}": weight
        for name, weight in model.state_dict().items()
    }
    assert "mtp.layers.0.self_attn.q_proj.weight" in state and "mtp.fc.weight" in state
    save_file(state, tmp_path / "model.safetensors")
    found = loaded(tmp_path).state_dict()
    assert all(torch.equal(weight, found[name]) for name, weight in model.state_dict().items())


def test_heads_of_speculators_read_states_in_front_of_the_norm(tmp_path):
    """Their trainer learns on these; ours says that it does not."""
    pair = random_pair("llama")
    save_mtp(head_of(pair), tmp_path, torch.float32)
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings.pop("target_state") == "after_norm"
    (tmp_path / "config.json").write_text(json.dumps(settings))
    depth = len(pair.target.model.layers)
    assert loaded(tmp_path).taps == (depth,)
    drafter, seen = Mtp(pair, str(tmp_path), 2), []
    features = drafter.model.features
    drafter.model.features = lambda states: seen.append(states) or features(states)
    Engine(StagedModel(pair.target), drafter, frozenset()).answer(PROMPT, SamplingParams(4))
    with torch.no_grad():
        states = pair.target(torch.tensor([PROMPT]), output_hidden_states=True)
        last = []
        with pair.target.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0])):
            pair.target(torch.tensor([PROMPT]))
    torch.testing.assert_close(seen[0][depth], last[0], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(last[0], states.hidden_states[-1], atol=1e-2)
    save_mtp(loaded(tmp_path), tmp_path, torch.float32)
    assert json.loads((tmp_path / "config.json").read_text())["target_state"] == "before_norm"


def with_copies(folder, factor: float):
    pair = random_pair("llama")
    save_mtp(head_of(pair), folder, torch.float32)
    state = load_file(folder / "model.safetensors")
    state["embed_tokens.weight"] = pair.target.get_input_embeddings().weight.detach().clone()
    state["lm_head.weight"] = (factor * pair.target.lm_head.weight.detach()).contiguous()
    save_file(state, folder / "model.safetensors")
    return folder


def test_files_may_hold_the_targets_embedding_and_head(tmp_path):
    """As speculators writes them; those of another target are refused."""
    assert loaded(with_copies(tmp_path / "same", 1.0)).taps == (NORMED,)
    with pytest.raises(UserError, match="lm_head.weight is not the target's"):
        loaded(with_copies(tmp_path / "other", 1.5))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_nextn_predict_layers": 3}, "num_nextn_predict_layers=3"),
        ({"speculators_model_type": "eagle3"}, "speculators_model_type=eagle3"),
        ({"router": "top"}, "sets router"),
        ({"target_state": "other"}, "target_state=other"),
        ({"transformer_layer_config": {"model_type": "qwen3_next", "hidden_size": 64}}, "qwen3_next"),
        ({"transformer_layer_config": {"hidden_size": 64}}, "lacks vocab_size"),
        ({"layer_types": ["linear_attention"]}, "layers of type linear_attention"),
    ],
)
def test_what_is_not_known_is_refused_by_its_name(change, says, tmp_path):
    save_mtp(head_of(random_pair("llama")), tmp_path, torch.float32)
    settings = json.loads((tmp_path / "config.json").read_text())
    if "layer_types" in change:
        settings["transformer_layer_config"] |= change
        change = {}
    (tmp_path / "config.json").write_text(json.dumps(settings | change))
    with pytest.raises(UserError, match=says):
        loaded(tmp_path)


def test_a_missing_tensor_is_named(tmp_path):
    save_mtp(head_of(random_pair("llama")), tmp_path, torch.float32)
    state = load_file(tmp_path / "model.safetensors")
    del state["mtp_layers.0.hidden_layernorm.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="missing hidden_layernorm.weight"):
        loaded(tmp_path)


def test_a_head_of_another_width_is_refused(tmp_path):
    save_mtp(head_of(random_pair("llama")), tmp_path, torch.float32)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["transformer_layer_config"]["hidden_size"] = 32
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="another target"):
        loaded(tmp_path)
