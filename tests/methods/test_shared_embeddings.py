"""Draft models that have the embeddings and the head of their target, and write neither."""

from __future__ import annotations

import json

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from methods.common import training as common
from methods.common.training import pair_to_train, save_model
from methods.mirror_sd import train as mirror_train
from methods.s2d import train as s2d_train
from methods.s2d.drafter import SortedDraft
from methods.sps import train as sps_train
from methods.sps.drafter import SpeculativeSampling
from specbench.data.training_folder import LOG, RECORD
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.models.pairs import draft_of, load_pair
from specbench.models.surgery import saved_weights, shares_embeddings
from specbench.system.errors import UserError
from specbench.system.files import read_json
from tests.support.decoding import generate_with_transformers
from tests.support.models import save_pair
from tests.support.training import training_settings, training_workplace

SHARED = ("layers=[0,2,3]", "share_embeddings=true", "learning_rate=1e-2")


pytestmark = pytest.mark.usefixtures("fresh_accelerator")


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def workplace(request, tmp_path_factory):
    folder = training_workplace(tmp_path_factory.mktemp("shared"))
    save_pair(folder, num_hidden_layers=4, tie_word_embeddings=request.param)
    return folder


def of_draft(cfg, folder):
    """The trainer's pair with a folder as its draft model."""
    return load_pair(OmegaConf.merge(cfg.pair, {"draft": str(folder)}), 0, with_draft=True)


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "name", "more"),
    [
        (sps_train, "train_sps", ()),
        (s2d_train, "train_s2d", ("exits=[1,3]",)),
        (mirror_train, "train_mirror_sd", ()),
    ],
    ids=["sps", "s2d", "mirror_sd"],
)
def test_what_is_loaded_is_what_was_trained_with_the_targets_embeddings(
    workplace, tmp_path, monkeypatch, trainer, name, more
):
    ids, trained = torch.tensor([[5, 9, 31, 7, 22]]), []

    def save(model, *rest) -> None:
        trained.append(model(ids).logits)
        save_model(model, *rest)

    # A trainer saves by itself, or as all that only distil a draft model do.
    monkeypatch.setattr(trainer if hasattr(trainer, "save_model") else common, "save_model", save)
    cfg = training_settings(name, workplace, tmp_path / "draft", *SHARED, *more)
    folder = trainer.train(cfg)
    written = load_file(folder / "model.safetensors")
    assert written and not any("embed_tokens" in key or "lm_head" in key for key in written)
    assert "layers 0, 2, 3 of the target" in read_json(folder / RECORD)["begins"]
    first, *_, last = map(json.loads, (folder / LOG).read_text().splitlines())
    assert last["loss"] < first["loss"]
    pair = of_draft(cfg, folder)
    draft = draft_of(pair)
    assert shares_embeddings(draft) and draft.config.num_hidden_layers == 3
    assert draft.get_input_embeddings() is pair.target.get_input_embeddings()
    assert draft.get_output_embeddings() is pair.target.get_output_embeddings()
    torch.testing.assert_close(draft(ids).logits, trained[0])


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("method", [SpeculativeSampling, SortedDraft])
def test_answers_are_the_targets_own(workplace, tmp_path, method):
    name, more = ("train_s2d", ("exits=[1,3]",)) if method is SortedDraft else ("train_sps", ())
    cfg = training_settings(name, workplace, tmp_path / "draft", *SHARED, *more)
    (s2d_train if more else sps_train).train(cfg)
    pair = of_draft(cfg, tmp_path / "draft")
    engine = Engine(StagedModel(pair.target), method(pair), pair.stop_ids)
    for word in ("ab", "ba", "aa"):
        prompt = pair.prompt_ids([{"role": "user", "content": f"say {word}"}])
        answer = engine.answer(prompt, SamplingParams(12))
        assert answer.tokens == generate_with_transformers(pair.target, prompt, 12, sorted(pair.stop_ids))
        assert sum(step.drafted for step in answer.steps)


@pytest.mark.slow
def test_a_further_training_leaves_the_targets_as_they_are(workplace, tmp_path):
    cfg = training_settings("train_sps", workplace, tmp_path / "first", *SHARED)
    first = sps_train.train(cfg)
    more = ("share_embeddings=true", f"draft={first}", "learning_rate=1e-2")
    again = training_settings("train_sps", workplace, tmp_path / "second", *more)
    pair = pair_to_train(again)
    draft = draft_of(pair)
    assert draft.get_input_embeddings() is not pair.target.get_input_embeddings()
    trained = [name for name, weight in draft.named_parameters() if weight.requires_grad]
    assert trained and not any("embed_tokens" in name or "lm_head" in name for name in trained)
    second = sps_train.train(again)
    weights = [load_file(folder / "model.safetensors") for folder in (first, second)]
    assert weights[0].keys() == weights[1].keys()
    assert any(not torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_what_does_not_fit_is_one_line(tmp_path):
    save_pair(tmp_path, num_hidden_layers=4)
    (tmp_path / "talk.jsonl").write_text("")
    with pytest.raises(UserError, match=r"share_embeddings=true is for .*layers="):
        pair_to_train(training_settings("train_sps", tmp_path, tmp_path / "x", "share_embeddings=true"))
    cfg = training_settings("train_sps", tmp_path, tmp_path / "x", *SHARED)
    with pytest.raises(UserError, match=r"layers must be .*0 to 3.*\[0, 9\]"):
        pair_to_train(OmegaConf.merge(cfg, {"layers": [0, 9]}))
    with pytest.raises(UserError, match=r"draft=FOLDER or as layers of the target, not as both"):
        pair_to_train(OmegaConf.merge(cfg, {"draft": "elsewhere"}))


def test_another_target_is_refused(tmp_path):
    save_pair(tmp_path, num_hidden_layers=4)
    draft = draft_of(pair_to_train(training_settings("train_sps", tmp_path, tmp_path / "x", *SHARED)))
    draft.save_pretrained(tmp_path / "cut", state_dict=saved_weights(draft))
    other = save_pair(tmp_path / "other", num_hidden_layers=2, hidden_size=48)
    other.draft = str(tmp_path / "cut")
    with pytest.raises(
        UserError, match=r"cut' has the embeddings of its target, with hidden_size=\d+; .* has 48"
    ):
        load_pair(other, 0, with_draft=True)
