"""Drafters whose layers are compiled: they draft what they draft without, and the layers are compiled indeed."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from omegaconf import OmegaConf

from specbench.decoding.cpu.compiled_layers import CompiledLayer
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import Request
from specbench.decoding.trace import Generation
from specbench.measure.runner import prepare
from tests.support.conf import composed
from tests.support.kernel_passes import needs_kernels

pytestmark = [
    pytest.mark.slow,
    needs_kernels,
]


def answer(method: str, compile: bool) -> tuple[Generation, list[CompiledLayer]]:
    """What a method says on the embedded pair, and the compiled layers that its drafter has."""
    settings = (
        f"method={method}",
        "pair.device=cpu",
        f"pair.compile={str(compile).lower()}",
        "generate=false",
    )
    cfg = composed("bench", *settings)
    OmegaConf.resolve(cfg)
    setup = prepare(cfg).setup
    with closing(setup.drafter):
        (generation,) = setup.answers("method", [Request(list(range(11, 71, 3)), SamplingParams(40))])
    models = [part for part in vars(setup.drafter).values() if isinstance(part, torch.nn.Module)]
    return generation, [
        part for model in models for part in model.modules() if isinstance(part, CompiledLayer)
    ]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "method",
    ["kangaroo", "eagle", "eagle3", "peagle", "mtp", "dflash", "dspark", "dflash2", "hydra_heads", "sps"],
)
def test_a_compiled_drafter_drafts_what_it_drafts_without(method):
    (compiled, layers), (plain, none) = answer(method, True), answer(method, False)
    assert compiled.tokens == plain.tokens
    assert [step.accepted for step in compiled.steps] == [step.accepted for step in plain.steps]
    assert [step.drafted for step in compiled.steps] == [step.drafted for step in plain.steps]
    assert all(layer.is_compiled for layer in layers) and not none
    assert layers or method == "sps"  # whose draft model is a model
