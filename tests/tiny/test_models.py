"""Growth in depth, the optimiser, the schedule, and the shipped models."""

from __future__ import annotations

import json

import pytest
import torch
from accelerate.state import AcceleratorState
from omegaconf import OmegaConf

from specbench.data.training import train
from specbench.data.training_folder import RECORD
from specbench.system.errors import UserError
from specbench.tiny import models
from specbench.tiny.muon import Muon, orthogonalise
from specbench.tiny.optimise import Schedule, Text
from specbench.tiny.tokenizer import load_tokenizer
from specbench.tiny.train import MODELS, SHIPPED, SUMS, checksums
from tests.support.training import strided

WEIGHTS = SHIPPED / "weights"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(WEIGHTS / "tokenizer")


def test_growth_leaves_the_logits_alone(tokenizer):
    small = models.build(models.Shape(2, 64, 96), tokenizer, seed=0).eval()
    ids = torch.randint(0, 16384, (2, 40), generator=torch.Generator().manual_seed(0))
    grown = models.grow(models.grow(small)).eval()
    assert grown.config.num_hidden_layers == len(grown.model.layers) == 8
    with torch.no_grad():
        assert (grown(ids).logits - small(ids).logits).abs().max() <= 1e-6
    grown.model.embed_tokens.weight.data.zero_()
    assert not grown.lm_head.weight.any(), "the head of the grown model must stay tied to its embedding"
    assert small.lm_head.weight.any(), "growing must not share weights with the smaller model"


def test_a_fresh_model_already_looks_up_what_followed_a_token(tokenizer):
    model = models.build(models.Shape(2, 96, 64), tokenizer, seed=0).eval()
    ids = torch.randint(8, 16384, (4, 40), generator=torch.Generator().manual_seed(0)).repeat(1, 2)
    with torch.no_grad():
        logits = model(ids).logits[:, 40:-1]
    logits.scatter_(
        2, ids[:, 40:-1, None], float("-inf")
    )  # training soon unlearns to repeat the token at hand
    assert (logits.argmax(-1) == ids[:, 41:]).float().mean() > 0.9


def test_one_layer_is_too_few_for_the_lookup(tokenizer):
    with pytest.raises(ValueError, match="two layers"):
        models.build(models.Shape(1, 64, 64), tokenizer, seed=0)


def test_a_width_that_heads_cannot_share_is_refused(tokenizer):
    with pytest.raises(ValueError, match="100"):
        models.build(models.Shape(2, 100, 64), tokenizer, seed=0)


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 48, 16), (2, 16, 48)])
def test_orthogonalise_brings_singular_values_near_one(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert values.min() > 0.3 and values.max() < 1.5


def test_muon_refuses_vectors():
    with pytest.raises(ValueError, match="2-D"):
        Muon([torch.nn.Parameter(torch.zeros(3))])


def test_the_schedule_rises_stays_and_falls():
    schedule = Schedule(steps=100, warmup=10, decay=20)
    assert schedule.factor(0, 100) == pytest.approx(0.1)
    assert schedule.factor(50, 100) == 1.0
    assert schedule.factor(99, 100) == pytest.approx(1 / 20)
    assert Schedule(steps=10, warmup=1, decay=0).factor(9, 10) == 1.0


def _batches(seed: int):
    generator = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(0, 50, (1, 32), generator=generator)
        yield {"input_ids": ids, "loss_weight": torch.full((1, 32), 1.0)}


def learn(model, schedule: Schedule, out, batches=None) -> None:
    """Trains a model as a stage does, and keeps a state after every step."""
    text = _batches(1) if batches is None else batches
    AcceleratorState._reset_state(reset_partial_state=True)
    own = {
        "steps": schedule.steps,
        "batch_size": 1,
        "length": 32,
        "accumulate": 1,
        "prompt_weight": 0.2,
        "seed": 1,
    }
    stream = {"conversations": None, "pair": {"training": {"_target_": "tests"}}}
    fixed = {"precision": "no", "save_every": 1, "threads": torch.get_num_threads(), "out": str(out)}
    torch.manual_seed(1)
    train(
        Text(model),
        strided(text),
        dict,
        lambda folder, figures: None,
        OmegaConf.create(own | stream | fixed),
        "random weights",
        optimizers=schedule.optimizers,
        rate=schedule.factor,
    )


def test_a_stage_goes_on_from_its_state_as_if_never_stopped(tokenizer, tmp_path):
    """Also where chance chooses the prompt tokens of a step."""
    schedule = Schedule(steps=6, warmup=2, decay=2)
    straight = models.build(models.Shape(2, 64, 32), tokenizer, seed=0)
    learn(straight, schedule, tmp_path / "a")

    def breaking():
        stream = _batches(1)
        for _ in range(4):
            yield next(stream)
        raise KeyboardInterrupt

    broken = models.build(models.Shape(2, 64, 32), tokenizer, seed=0)
    with pytest.raises(KeyboardInterrupt):
        learn(broken, schedule, tmp_path / "b", breaking())
    resumed = models.build(models.Shape(2, 64, 32), tokenizer, seed=5)
    learn(resumed, schedule, tmp_path / "b")
    for one, other in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    assert json.loads((tmp_path / "b" / RECORD).read_text())["tokens"] == 6 * 32


def test_a_diverged_stage_says_so(tokenizer, tmp_path):
    model = models.build(models.Shape(2, 64, 32), tokenizer, seed=0)
    model.model.norm.weight.data.fill_(float("inf"))
    with pytest.raises(UserError, match="boom"):
        learn(model, Schedule(2, 1, 0), tmp_path / "boom")


@pytest.mark.slow
def test_sampling_prompt_tokens_keeps_the_expected_loss(tokenizer):
    model = models.build(models.Shape(2, 64, 32), tokenizer, seed=0)
    ids = torch.randint(0, 16384, (1, 256), generator=torch.Generator().manual_seed(2))
    weight = torch.full((1, 256), 0.2)
    weight[0, 128:] = 1.0
    batch = {"input_ids": ids, "loss_weight": weight}
    full = Text(model).eval()(batch).item()
    torch.manual_seed(0)
    draws = [Text(model)(batch).item() for _ in range(40)]
    assert sum(draws) / 40 == pytest.approx(full, rel=0.05)
    assert len({round(draw, 3) for draw in draws}) > 20


def test_shipped_files_are_those_of_the_list():
    listed = dict(line.split("  ")[::-1] for line in (WEIGHTS / SUMS).read_text().splitlines())
    assert listed == checksums(WEIGHTS)
    assert {name.split("/")[0] for name in listed} >= {*MODELS, "tokenizer"}


def test_shipped_files_fit_their_budget():
    assert sum(p.stat().st_size for p in WEIGHTS.rglob("*")) <= 60_000_000


@pytest.mark.parametrize("name", [*MODELS, "draft"])
def test_shipped_models_are_stock_llamas_over_one_vocabulary(name, tokenizer):
    model = models.load(WEIGHTS / name, torch.bfloat16)
    config = model.config
    assert config.model_type == "llama" and config.vocab_size == len(tokenizer)
    assert config.tie_word_embeddings and config.max_position_embeddings == 4096 and config.head_dim == 32
    assert config.num_hidden_layers == {"target": 24, "target_shallow": 12, "draft": 2}[name]
    for holder in (config, model.generation_config):
        assert holder.bos_token_id == tokenizer.bos_token_id
        assert holder.eos_token_id == tokenizer.eos_token_id
        assert holder.pad_token_id == tokenizer.pad_token_id
    assert model.generation_config.do_sample is False
