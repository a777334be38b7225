"""`python -m specbench.tiny.train` from nothing, at toy scale."""

from __future__ import annotations

import pytest
import torch
from accelerate.state import AcceleratorState

from specbench.system.errors import UserError
from specbench.tiny import models, train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    out = tmp_path_factory.mktemp("build")
    deterministic = torch.are_deterministic_algorithms_enabled()
    AcceleratorState._reset_state(reset_partial_state=True)  # it keeps its precision for the whole process
    assert train.main(["--smoke", "--out", str(out)]) == 0
    torch.use_deterministic_algorithms(deterministic)
    AcceleratorState._reset_state(reset_partial_state=True)
    return out


def test_everything_is_written(built):
    names = set(train.checksums(built / "weights"))
    for model in train.MODELS:
        assert {
            f"{model}/model.safetensors",
            f"{model}/config.json",
            f"{model}/generation_config.json",
        } <= names
    assert "tokenizer/tokenizer.json" in names
    assert (built / "weights" / train.SUMS).exists()
    assert (built / train.QUESTIONS).exists() and (built / train.WARMUP).exists()


def test_weights_are_bf16_and_of_growing_depth(built):
    depths = {}
    for name in train.MODELS:
        model = models.LlamaForCausalLM.from_pretrained(built / "weights" / name)
        assert model.dtype == torch.bfloat16
        depths[name] = model.config.num_hidden_layers
    assert depths["target"] == 2 * depths["target_shallow"]


def test_install_replaces_the_whole_folder(built, tmp_path):
    (tmp_path / "weights" / "target").mkdir(parents=True)
    (tmp_path / "weights" / "target" / "stale").write_text("old")
    (tmp_path / "weights" / "adapter").mkdir()
    (tmp_path / "weights" / "adapter" / "part").write_text("of a method")
    train.install(built, tmp_path)
    installed = train.checksums(tmp_path / "weights")
    assert installed.pop("adapter/part"), "what a method has put there stays"
    assert installed == train.checksums(built / "weights")
    assert {p.name for p in tmp_path.iterdir()} == {"weights", train.QUESTIONS, train.WARMUP}


def test_a_stage_that_does_not_exist_is_named(built):
    with pytest.raises(UserError, match="unknown stage 'target_shalow': did you mean target_shallow"):
        train.Build(built, train.SMOKE).make("target_shalow")


def test_a_stage_that_is_done_is_left_out(built, monkeypatch):
    monkeypatch.setattr(train.training, "train", lambda *_: pytest.fail("trained again"))
    deterministic = torch.are_deterministic_algorithms_enabled()
    train.Build(built, train.SMOKE).make()
    torch.use_deterministic_algorithms(deterministic)
