"""What the sorted draft model, the distilled one and streams learn, and their losses by hand."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from methods.common.stored_states import key_of
from methods.common.training import agreement, held_out_batches
from methods.mirror_sd import train as mirror_train
from methods.mirror_sd.streams import load_streams
from methods.s2d import train as s2d_train
from methods.sps import train as sps_train
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.state import NORMED
from specbench.models.pairs import load_pair
from specbench.models.surgery import cut
from specbench.system.errors import UserError
from tests.support.decoding import random_pair
from tests.support.models import EVERY_ARCHITECTURE
from tests.support.training import SORTED, Stopped, log, stop_after, training_settings

pytestmark = pytest.mark.usefixtures("fresh_accelerator")


@pytest.mark.slow
def test_sorted_training_learns_at_every_exit_and_goes_on_when_stopped(workplace, tmp_path, monkeypatch):
    cfg = training_settings("train_s2d", workplace, tmp_path / "whole", *SORTED)
    whole = AutoModelForCausalLM.from_pretrained(s2d_train.train(cfg))
    assert whole.config.exits == [1, 3] and whole.config.num_hidden_layers == 3
    rows = log(tmp_path / "whole")
    assert [row["step"] for row in rows] == [15, 30, 40]
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]
    assert set(rows[0]) == {"step", "threads", "loss", "held_out_agreement_1", "held_out_agreement_3"}
    assert {row["threads"] for row in rows} == {torch.get_num_threads()}

    pair = load_pair(cfg.pair, 0, with_draft=False)
    module = s2d_train.Sorted(whole.eval(), [1, 3])
    said = [row for batch in held_out_batches(cfg, pair) for row in [said_tokens(module, batch)]]
    for number in range(2):  # "ab ab ab": the text itself is learnt, by both exits
        assert torch.cat([row[number] for row in said]).float().mean() > 0.6

    stop_after(monkeypatch, s2d_train.Sorted, 35)
    cfg = training_settings("train_s2d", workplace, tmp_path / "stopped", *SORTED)
    with pytest.raises(Stopped):
        s2d_train.train(cfg)
    monkeypatch.undo()
    resumed = AutoModelForCausalLM.from_pretrained(s2d_train.train(cfg))
    for name, weight in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], weight, msg=name)


@torch.no_grad()
def said_tokens(module, batch) -> list[torch.Tensor]:
    """For each exit, whether its first choice is the token that the assistant says."""
    goals = batch["input_ids"][:, 1:][batch["loss_weight"][:, 1:] == 1.0]
    chosen = [s2d_train.predicting(states, batch, 1.0) for states in module.states(batch)]
    return [module.model.lm_head(states).argmax(-1) == goals for states in chosen]


@torch.no_grad()
def test_exits_are_judged_on_the_states_that_were_stored(monkeypatch):
    """As those of the other trainers, without a pass of the target."""
    pair = random_pair("llama", seed=3)
    target, module = StagedModel(pair.target), s2d_train.Sorted(pair.draft, [1, 3])
    batch = {"input_ids": torch.tensor([[5, 9, 31, 7, 22, 14]]), "loss_weight": torch.ones(1, 6)}
    expected = module.choices(batch, target)
    batch |= {key_of(NORMED): pair.target.model(batch["input_ids"]).last_hidden_state}
    monkeypatch.setattr(pair.target.model, "forward", None)
    for found, computed in zip(module.choices(batch, target), expected, strict=True):
        assert torch.equal(found, computed)


FINISHED_LOGITS = ["cohere", "granite", "gemma2"]  # scaled, divided, capped


@pytest.mark.parametrize("arch", [*EVERY_ARCHITECTURE, *FINISHED_LOGITS])
def test_sorted_loss_is_the_mean_of_the_exits_own_losses(arch):
    model = random_pair(arch, seed=3).draft
    exits = (1, 2, model.config.num_hidden_layers)
    batch = {
        "input_ids": torch.tensor([[5, 9, 31, 7, 22, 14]]),
        "loss_weight": torch.tensor([[0.0, 0.0, 0.2, 1.0, 0.0, 1.0]]),
    }
    expected = []
    for exit in exits:
        short = cut(model, list(range(exit)))
        with torch.no_grad():
            logits = short(batch["input_ids"]).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, batch["input_ids"][0, 1:], reduction="none")
        expected.append((losses * batch["loss_weight"][0, 1:]).sum())
    with torch.no_grad():
        loss = s2d_train.Sorted(model, list(exits))(batch)
    torch.testing.assert_close(loss, torch.stack(expected).mean())


@pytest.mark.parametrize("arch", FINISHED_LOGITS)
def test_a_teacher_and_a_student_whose_logits_are_scaled_or_capped(arch):
    """Both distributions are those that the models have by themselves, not those of states times head."""
    pair = random_pair(arch, seed=3)
    batch = {
        "input_ids": torch.tensor([[5, 9, 31, 7, 22, 14]]),
        "loss_weight": torch.tensor([[0.0, 0.0, 0.2, 1.0, 0.0, 1.0]]),
    }
    with torch.no_grad():
        own, goal = (model(batch["input_ids"]).logits[0, :-1] for model in (pair.draft, pair.target))
        losses = -(goal.softmax(-1) * own.log_softmax(-1)).sum(-1)
        loss = sps_train.Distillation(pair.draft, StagedModel(pair.target))(batch)
    torch.testing.assert_close(loss, (losses * batch["loss_weight"][0, 1:]).sum())


@pytest.mark.parametrize("arch", FINISHED_LOGITS)
def test_streams_of_a_model_whose_logits_are_scaled_or_capped(arch):
    """The next token against the target's distribution, the stream's against the text, of tokens that both guess."""
    pair = random_pair(arch, seed=3)
    ids = torch.tensor([[5, 9, 31, 7]])
    module = mirror_train.Streaming(pair.draft, StagedModel(pair.target), 1, 0.5)
    with torch.no_grad():
        states, head = module.states(ids)[0], StagedModel(pair.draft).unembed
        goal = pair.target(ids).logits[0, 1:-1].softmax(-1)
        main = -(goal * head(states[1:-1, 0]).log_softmax(-1)).sum()
        stream = torch.nn.functional.cross_entropy(head(states[:-2, 1]), ids[0, 2:], reduction="sum")
        loss = module({"input_ids": ids, "loss_weight": torch.ones(1, 4)})
    torch.testing.assert_close(loss, main + 0.5 * stream)


def test_a_cut_of_all_layers_is_the_target_itself():
    target = random_pair("qwen3", seed=3).target
    whole = cut(target, list(range(4)))
    ids = torch.arange(3, 20).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(whole(ids).logits, target(ids).logits, atol=1e-4, rtol=1e-4)
    assert all(p.requires_grad for p in whole.parameters())
    picked = cut(target, [0, 3])
    ours, theirs = picked.model.layers[1].state_dict(), target.model.layers[3].state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("layers=9",), "layers .*0 .*3"),
        (("layers=3", "exits=[1,2]"), "exits .*1 .*3 layers"),
    ],
)
def test_sorted_shapes_that_cannot_be_are_refused(workplace, tmp_path, wrong, message):
    with pytest.raises(UserError, match=message):
        s2d_train.train(training_settings("train_s2d", workplace, tmp_path, *wrong))


@pytest.mark.slow
def test_distillation_brings_a_draft_model_closer_to_its_target(workplace, tmp_path):
    cfg = training_settings("train_sps", workplace, tmp_path, "learning_rate=1e-2")
    pair = load_pair(cfg.pair, 0, with_draft=True)
    target, held_out = StagedModel(pair.target), held_out_batches(cfg, pair)
    before = agreement(sps_train.Distillation(pair.draft, target).choices, held_out)
    out = sps_train.train(cfg)
    draft = AutoModelForCausalLM.from_pretrained(out)
    after = agreement(sps_train.Distillation(draft, target).choices, held_out)
    assert after > before + 0.3
    assert log(tmp_path)[-1]["held_out_agreement"] == pytest.approx(after)
    assert not (out / "checkpoints").exists()


@pytest.mark.slow
def test_streams_learn_what_comes_after_next(workplace, tmp_path):
    more = ("learning_rate=1e-2", "steps=60", "save_every=30", "stream_weight=0.5")
    cfg = training_settings("train_mirror_sd", workplace, tmp_path, *more)
    whole = AutoModelForCausalLM.from_pretrained(mirror_train.train(cfg))
    rows = log(tmp_path)
    # The target, which is not trained, does not say "ab ab ab": the main stream learns it, the others the text.
    assert rows[-1]["held_out_agreement"] > 0.3
    # The first of three tokens on is a fourth of the time the stop token, else it can be known.
    assert min(rows[-1][f"held_out_right_{j}"] for j in (2, 3)) > 0.5
    streams = load_streams(tmp_path, whole)
    assert streams.shape == (2, 64) and streams.std() > 0


@pytest.mark.parametrize("arch", ["llama", "qwen3", "mistral"])
def test_stream_loss_against_one_position_at_a_time(arch):
    """The main stream is the model as it is, which learns the target's distribution; stream j is the model's next state
    after j tokens that stand for what is not known yet, and learns the text."""
    pair = random_pair(arch, seed=3)
    model = pair.draft
    module = mirror_train.Streaming(model, StagedModel(pair.target), 2, 0.1)
    ids = torch.tensor([[5, 9, 31, 7, 22, 14]])
    weights = torch.tensor([[0.0, 0.0, 0.2, 1.0, 0.0, 1.0]])
    with torch.no_grad():
        module.streams.normal_()
        loss = module({"input_ids": ids, "loss_weight": weights})
        expected = torch.zeros(())
        embedded = model.get_input_embeddings()(ids)
        goals = pair.target(ids).logits[0].softmax(-1)
        for t in range(6):
            known = [embedded[:, : t + 1], *(embedded[:, t : t + 1] + p for p in module.streams)]
            logits = model(inputs_embeds=torch.cat(known, dim=1), use_cache=False).logits[0, t:]
            for j, scale in enumerate((1.0, 0.1, 0.1)):
                if 3 <= t + 1 + j < 6:  # tokens with enough in front for the last stream
                    goal = goals[t] if j == 0 else ids[0, t + 1 + j]
                    own = torch.nn.functional.cross_entropy(logits[j], goal)
                    expected += scale * weights[0, t + 1 + j] * own
    torch.testing.assert_close(loss, expected)
