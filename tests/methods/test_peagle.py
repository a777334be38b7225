"""P-EAGLE: what is drafted, checked against a pass without a cache; training; checkpoints."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file

from methods.common import losses
from methods.common.losses import Loss
from methods.eagle3 import Eagle3
from methods.eagle3.checkpoint import load_eagle3, save_eagle3
from methods.eagle3.model import Eagle3Model
from methods.eagle3.train import fresh_model
from methods.peagle import ParallelEagle
from methods.peagle import train as peagle_train
from methods.peagle.train import MaskDistillation
from methods.ragged import RaggedBatch
from specbench.data.training_folder import RECORD
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import Request
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
    randomise,
    taught,
)
from tests.support.models import EVERY_ARCHITECTURE
from tests.support.schedulers import EVERY_SCHEDULER, assert_lossless_with
from tests.support.training import training_settings

MASK, AHEAD = 1, 4


def drafting_model(pair, layers: int = 2) -> Eagle3Model:
    """Random weights, as large as those of the target; two thirds of its tokens are kept."""
    target = StagedModel(pair.target)
    kept = torch.tensor([i for i in range(target.vocab_size) if i % 3])
    model = fresh_model(target, kept, num_hidden_layers=layers, mask_token_id=MASK)
    randomise(model, "lm_head")
    return model.eval()


@cache
@torch.inference_mode(False)
def trained_model(arch: str) -> Eagle3Model:
    pair = random_pair(arch)
    model = drafting_model(pair)
    return taught(MaskDistillation(model, pair.staged, AHEAD, 0.8, 0.5), model, arch, 25)


def saved(arch: str, folder) -> str:
    save_eagle3(trained_model(arch), folder, torch.float32)
    return str(folder)


def drafter_of(arch: str, folder, k: int = AHEAD) -> ParallelEagle:
    return ParallelEagle(random_pair(arch), saved(arch, folder), k)


def filled(pair, model: Eagle3Model, known: list[int], masks: int) -> torch.Tensor:
    """Logits [1 + masks, rows] after all true pairs of known tokens, and of masks after them, without a cache."""
    tokens, embed = torch.tensor([known]), pair.target.get_input_embeddings()
    output = pair.target(tokens[:, :-1], use_cache=False, output_hidden_states=True)
    features = model.features({tap: output.hidden_states[tap] for tap in model.taps})
    state = model.fc(model.mask_hidden).expand(1, masks, -1)
    features = torch.cat([features, state], dim=1)
    embeds = embed(torch.cat([tokens[:, 1:], torch.full((1, masks), MASK)], dim=1))
    rope = model.rope(torch.arange(features.shape[1])[None], features)
    out = model(features, embeds, position_embeddings=rope)
    return model.logits(out[0, -1 - masks :])


# -- drafting


@pytest.mark.first_fast
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_a_draft_is_what_masks_guess(arch, tmp_path):
    pair = random_pair(arch)
    drafter, model, compared = drafter_of(arch, tmp_path), trained_model(arch), []
    draft_of = drafter.draft

    def check(batch):
        draft = draft_of(batch)
        k = draft.tokens.shape[1]
        logits = filled(pair, model, batch.sequences[0].tokens, AHEAD - 1)[:k]
        assert draft.tokens[0].tolist() == model.token_ids[logits.argmax(-1)].tolist()
        compared.append(k)
        return draft

    drafter.draft = check
    prompt, cap, *_ = cases(arch)[6]
    steps = Engine(StagedModel(pair.target), drafter, frozenset()).answer(prompt, SamplingParams(cap)).steps
    assert len(compared) > 5 and {*compared} > {AHEAD} and {0, 1} <= {step.accepted for step in steps}


def test_a_round_reads_the_model_once(tmp_path):
    drafter = drafter_of("llama", tmp_path)
    steps = Engine(StagedModel(random_pair("llama").target), drafter, frozenset()).answer(
        PROMPT, SamplingParams(9)
    )
    weights = trained_model("llama").state_dict()
    assert steps.steps[0].draft_bytes == sum(weight.nbytes for weight in weights.values())


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("arch", EVERY_ARCHITECTURE)
def test_lossless(arch, tmp_path):
    steps = assert_lossless(arch, drafter_of(arch, tmp_path))
    assert_rounds_of_every_kind(steps, partly=True)


@pytest.mark.slow
@EVERY_SCHEDULER
def test_lossless_in_batches(scheduler, tmp_path):
    """Masks stand after the last true pair of each sequence, however many tokens it keeps."""
    assert_lossless_with(scheduler, "qwen2", drafter_of("qwen2", tmp_path))


def test_a_batch_drafts_what_each_of_its_sequences_drafts_alone(tmp_path):
    """Also where they keep different numbers of tokens in a round."""
    pair, folder = random_pair("llama"), saved("llama", tmp_path)
    model, uneven, kept = trained_model("llama"), [], []
    drafter = ParallelEagle(pair, folder, AHEAD)
    draft_of, commit_of = drafter.draft, drafter.commit

    def check(batch):
        draft = draft_of(batch)
        k = draft.tokens.shape[1]
        found = drafter.head.logits(drafter._outputs[: batch.size, :k])
        for row, sequence in enumerate(batch.sequences):
            logits = filled(pair, model, sequence.tokens, AHEAD - 1)[:k]
            assert draft.tokens[row].tolist() == model.token_ids[logits.argmax(-1)].tolist()
            torch.testing.assert_close(found[row], logits, atol=1e-3, rtol=1e-3)
        uneven.append(len({len(sequence.tokens) for sequence in batch.sequences}) > 1)
        return draft

    def commit(batch, verified):
        kept.append(len({*verified.counts}) > 1)
        commit_of(batch, verified)

    drafter.draft, drafter.commit = check, commit
    # What the model has learnt, so that some drafts are accepted and others are not.
    requests = [Request(prompt, SamplingParams(cap)) for prompt, cap, *_ in cases("llama")[3:]]
    Engine(StagedModel(pair.target), drafter, frozenset(), RaggedBatch(4)).generate(requests)
    assert sum(uneven) > 5 and sum(kept) > 5


@pytest.mark.slow
def test_samples_follow_the_target(tmp_path):
    pair = random_pair("llama", **SHAPE | {"num_hidden_layers": 4})  # EAGLE-3 reads three depths
    save_eagle3(drafting_model(pair), tmp_path, torch.float32)
    assert p_value_alone(pair, ParallelEagle(pair, str(tmp_path), 3)) > 1e-3


def test_an_oracle_proposes_its_tokens_in_place_of_these(tmp_path):
    assert_an_oracle_proposes_in_place_of("methods.peagle.ParallelEagle", saved("llama", tmp_path))


@pytest.mark.slow
def test_the_drafter_of_an_expanded_target_drafts_the_same(tmp_path):
    pair, folder = random_pair("llama"), saved("llama", tmp_path)
    more = {"hidden_size": 96, "num_hidden_layers": 10, "head_dim": 24}
    wide = expanded_pair(pair, pair.target.config.to_dict() | more)
    assert_drafts_the_same(lambda which: ParallelEagle(which, folder, AHEAD), pair, wide, PROMPT, 20)


# -- training


def test_training_sees_what_drafting_sees():
    """Masks of several pairs, all in one pass, are those of a draft after each."""
    for arch in ("llama", "qwen2"):
        pair = random_pair(arch)
        model = drafting_model(pair)
        module = MaskDistillation(model, StagedModel(pair.target), 3, 0.5, 0.0)
        ids = torch.tensor([PROMPT, PROMPT[::-1]])
        by_masks = [torch.arange(len(PROMPT) - 1), torch.tensor([1, 3, 4]), torch.tensor([3])]
        with torch.no_grad():
            outputs, _ = module.filled({"input_ids": ids}, by_masks)
            for row in range(2):
                for j, places in enumerate(by_masks):
                    for column, place in enumerate(places.tolist()):
                        expected = filled(pair, model, ids[row, : place + 2].tolist(), 2)[j]
                        found = model.logits(outputs[j][row, column])
                        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_the_loss_by_hand():
    """Pair t with j masks against the target at t + 1 + j, where token t + 2 + j counts and its likeliest is kept."""
    pair = random_pair("qwen2")
    model = drafting_model(pair)
    module = MaskDistillation(model, StagedModel(pair.target), 3, 1.0, 1.0)
    said = torch.tensor([[0, 0, 1, 0, 1, 0.5, 1.0]])
    found = module({"input_ids": torch.tensor([PROMPT]), "loss_weight": said})
    logits = pair.target(torch.tensor([PROMPT]), use_cache=False).logits[0]
    expected, left_out = torch.zeros(()), 0
    for place in range(len(PROMPT) - 2):
        guessed = filled(pair, model, PROMPT[: place + 2], 2)
        for j in range(min(3, len(PROMPT) - 2 - place)):
            teacher = logits[place + 1 + j]
            if teacher.argmax() % 3 == 0:  # not kept
                left_out += said[0, place + 2 + j] > 0
                continue
            goal = teacher[model.token_ids].softmax(-1)
            loss = -(goal * guessed[j].log_softmax(-1)).sum()
            expected = expected + said[0, place + 2 + j] * loss / 3
    assert left_out
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    found.backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None and weight.grad.abs().sum() > 0, name
    assert pair.target.lm_head.weight.grad is None


def test_the_loss_has_the_gradients_of_all_masks_and_tokens_at_once(monkeypatch):
    """Though it is taken in parts of four tokens, and no distribution stays in memory until the gradient."""
    monkeypatch.setattr(losses, "CHUNK", 4)
    pair, ahead = random_pair("llama"), 3
    model = drafting_model(pair)
    module = MaskDistillation(model, StagedModel(pair.target), ahead, 1.0, 1.0)
    ids, weight = torch.tensor([[*PROMPT, 5, 40, 2], [2, 40, 5, *PROMPT]]), torch.rand(2, 10)
    batch = {"input_ids": ids, "loss_weight": weight}
    with no_distribution_stays(pair.vocab_size, len(model.token_ids)):
        loss = module(batch)
    by_masks = [torch.arange(8 - j) for j in range(ahead)]
    outputs, finals = module.filled(batch, by_masks)
    teacher, joint = pair.target.lm_head(finals), torch.zeros(())
    for j, (places, output) in enumerate(zip(by_masks, outputs)):
        logits = teacher[:, places + 1 + j]
        inside = torch.isin(logits.argmax(-1), model.token_ids)
        goal = logits[..., model.token_ids].softmax(-1)
        entropy = -(goal * model.logits(output).log_softmax(-1)).sum(-1)
        joint = joint + (weight[:, places + 2 + j] * inside * entropy).sum() / ahead
    assert_same_gradients(model, loss, joint)


def test_a_sample_stands_for_the_vocabulary():
    """For that of the draft: what it has no token for is not among the target's likeliest ones."""
    pair = random_pair("llama")
    model = drafting_model(pair)

    def module_of(loss: Loss) -> MaskDistillation:
        return MaskDistillation(model, StagedModel(pair.target), 3, 1.0, 1.0, loss)

    assert_learns_from_a_sample(module_of, model, pair, [[*PROMPT, 5, 40, 2], [2, 40, 5, *PROMPT]])


def test_agreements_are_of_what_would_be_drafted():
    pair = random_pair("qwen2")
    model = drafting_model(pair)
    module = MaskDistillation(model, StagedModel(pair.target), 2, 1.0, 1.0)
    ids = [*PROMPT, 5, 40, 2]
    student, truth = module.agreed({"input_ids": torch.tensor([ids]), "loss_weight": torch.ones(1, 10)})
    logits = pair.target(torch.tensor([ids]), use_cache=False).logits[0]
    for column, place in enumerate((0, 4)):
        guessed = model.token_ids[filled(pair, model, ids[: place + 2], 1).argmax(-1)]
        assert student[:, column].tolist() == guessed.tolist()
        assert truth[:, column].tolist() == logits[[place + 1, place + 2]].argmax(-1).tolist()


@pytest.mark.slow
def test_some_tokens_may_stand_for_all_of_each_number_of_masks():
    """As many are drawn by their weight, with the same sum of weights: the same loss on average."""
    pair = random_pair("llama")
    model, target = drafting_model(pair), StagedModel(pair.target)
    batch = {"input_ids": torch.tensor([[*PROMPT, 5, 40, 2]]), "loss_weight": torch.ones(1, 10)}
    torch.manual_seed(0)
    with torch.no_grad():
        whole = MaskDistillation(model, target, 2, 1.0, 1.0)(batch)
        some = MaskDistillation(model, target, 2, 1.0, 1.0, Loss(tokens=3))
        mean = torch.stack([some(batch) for _ in range(300)]).mean()
    assert mean == pytest.approx(whole.item(), rel=0.05)


def test_nothing_to_judge_costs_nothing():
    pair = random_pair("llama")
    module = MaskDistillation(drafting_model(pair), StagedModel(pair.target), 2, 0.5, 0.0)
    nothing = module({"input_ids": torch.tensor([PROMPT]), "loss_weight": torch.zeros(1, 7)})
    assert nothing == 0 and nothing.requires_grad
    nothing.backward()


@pytest.mark.slow
def test_training_teaches_masks(workplace, tmp_path):
    more = (
        *("steps=60", "save_every=20", "tokens_ahead=3", "draft_layers=2", "mask_token=255"),
        *("draft_vocab=200", "learning_rate=5e-3"),
    )
    out = peagle_train.train(training_settings("train_peagle", workplace, tmp_path / "out", *more))
    rows = [json.loads(line) for line in (out / "train_log.jsonl").read_text().splitlines()]
    assert rows[-1]["token_1_agreement"] > rows[0]["token_1_agreement"]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert json.loads((out / RECORD).read_text())["token_3_agreement"] == rows[-1]["token_3_agreement"]


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("mask_token=100000", "mask_token=100000"),
        ("tokens_ahead=1", "tokens_ahead"),
        ("tokens_ahead=64", "no room"),
        ("draft_layers=0", "draft_layers"),
        ("retention=0", "retention"),
    ],
)
def test_a_setting_of_the_training_that_cannot_work(workplace, tmp_path, setting, says):
    with pytest.raises(UserError, match=says):
        peagle_train.train(training_settings("train_peagle", workplace, tmp_path / "out", setting))


# -- checkpoints


def changed(folder, state=None, **settings: object):
    """A checkpoint of a fresh model with some settings (None: left out) and tensors (likewise) changed."""
    save_eagle3(drafting_model(random_pair("llama")), folder, torch.float32)
    for name, change in (("config.json", settings), ("model.safetensors", state or {})):
        held = json.loads((folder / name).read_text()) if name == "config.json" else load_file(folder / name)
        held = {key: value for key, value in (held | change).items() if value is not None}
        if name == "config.json":
            (folder / name).write_text(json.dumps(held))
        else:
            save_file(held, folder / name)
    return folder


def loaded(folder, masks: bool = True) -> Eagle3Model:
    return load_eagle3(folder, StagedModel(random_pair("llama").target), masks=masks)


def test_what_is_trained_drafts_the_same_when_loaded(tmp_path):
    model = drafting_model(random_pair("llama"))
    save_eagle3(model, tmp_path / "first", torch.float32)
    once = loaded(tmp_path / "first")
    save_eagle3(once, tmp_path / "second", torch.float32)
    again = loaded(tmp_path / "second")
    assert again.depth == 2 and again.config.mask_token_id == MASK and again.taps == model.taps
    state = again.state_dict()
    assert all(torch.equal(weight, state[name]) for name, weight in model.state_dict().items())
    settings = json.loads((tmp_path / "first" / "config.json").read_text())
    # As vLLM asks for them.
    assert (settings["ptd_token_id"], settings["parallel_drafting"], settings["num_hidden_layers"]) == (
        *(MASK, True, 2),
    )


def test_files_of_speculators_are_read(tmp_path):
    """Their layers are `layers.0` and on, the layer's settings are nested, and the mask's token has another name."""
    model = drafting_model(random_pair("llama"))
    save_eagle3(model, tmp_path, torch.float32)
    settings = json.loads((tmp_path / "config.json").read_text())
    layer = {name: settings.pop(name) for name in ("hidden_size", "num_attention_heads", "rms_norm_eps")}
    layer |= {name: settings.pop(name) for name in ("num_key_value_heads", "head_dim", "intermediate_size")}
    layer |= {"vocab_size": settings.pop("vocab_size"), "model_type": "llama", "num_hidden_layers": 2}
    nested = {
        "architectures": ["PEagleSpeculator"],
        "speculators_model_type": "peagle",
        "transformer_layer_config": layer,
        "norm_before_residual": False,
        "mask_token_id": MASK,
        "draft_vocab_size": settings["draft_vocab_size"],
        "embed_requires_grad": True,
        "num_depths": 8,  # of an older version
        "eagle_aux_hidden_state_layer_ids": settings["eagle_aux_hidden_state_layer_ids"],
    }
    (tmp_path / "config.json").write_text(json.dumps(nested))
    state = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in state.items()}
    renamed["mask_hidden"] = renamed["mask_hidden"].view(1, -1)  # as some trainers write it
    save_file(renamed, tmp_path / "model.safetensors")
    found = loaded(tmp_path)
    assert found.depth == 2 and found.config.mask_token_id == MASK
    assert torch.equal(found.mask_hidden, model.mask_hidden)
    assert torch.equal(found.midlayer.mlp.up_proj.weight, model.midlayer.mlp.up_proj.weight)


def test_an_embedding_of_its_own_is_used_for_masks_too(tmp_path):
    pair = random_pair("llama")
    own = torch.randn_like(pair.target.get_input_embeddings().weight)
    folder = changed(tmp_path, {"embed_tokens.weight": own})
    model = loaded(folder)
    drafter = ParallelEagle(pair, str(folder), 3)
    drafter.open(*opened(pair))
    assert torch.equal(model.embed(torch.tensor([[MASK]]), StagedModel(pair.target))[0, 0], own[MASK])
    assert torch.equal(drafter._mask[1][0, 0], own[MASK])


def opened(pair):
    from specbench.decoding.slots import Slots

    return Slots(1, 32, torch.device("cpu")), StagedModel(pair.target)


@pytest.mark.parametrize(
    ("settings", "state", "says"),
    [
        ({"ptd_token_id": None}, {}, "names no ptd_token_id"),
        ({"mask_token_id": 7}, {}, "several mask tokens: 1, 7"),
        ({"ptd_token_id": 10**6}, {}, "no token 1000000"),
        ({"speculators_model_type": "dflash"}, {}, "speculators' dflash"),
        ({}, {"mask_hidden": None}, "sets parallel_drafting, without mask_hidden"),
        ({"parallel_drafting": None}, {"mask_hidden": None}, "use eagle3"),
        ({}, {"mask_hidden": torch.zeros(1, 1, 5)}, "mask_hidden"),
        ({}, {"layers.1.mlp.up_proj.weight": None}, "missing layers.1.mlp.up_proj.weight"),
        ({}, {"layers.2.mlp.up_proj.weight": torch.zeros(2, 2)}, "missing layers.2"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_name(settings, state, says, tmp_path):
    with pytest.raises(UserError, match=says):
        loaded(changed(tmp_path, state, **settings))


def test_a_model_that_fills_masks_is_not_drafted_with_token_by_token(tmp_path):
    with pytest.raises(UserError, match="use peagle"):
        Eagle3(random_pair("llama"), saved("llama", tmp_path))
