"""README and docs/: the examples of methods are lossless, those of pairs and tasks compose, the others import."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from transformers import LlamaConfig, LlamaForCausalLM

import methods
from specbench.config.combinations import check_method
from specbench.config.compose import CONF
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from tests.support.pages import DOCS, PAGES, blocks, ids

pytestmark = pytest.mark.slow

EXAMPLE_PAGE = DOCS / "adding-a-method.md"


def examples() -> dict[str, str]:
    """Path: content of every example that its page shows after a line with its path."""
    text = EXAMPLE_PAGE.read_text(encoding="utf-8")
    return dict(re.findall(r"^`([\w/.]+)`:\n\n```\w+\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL))


@pytest.fixture
def written(tmp_path, monkeypatch) -> Path:
    """The examples in a folder, whose modules are part of `methods` while a test runs."""
    for name, content in examples().items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path / "methods")])
    importlib.invalidate_caches()
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("methods.bigram")]:
        del sys.modules[name]
        delattr(methods, name.rpartition(".")[2])


def tiny_pair() -> SimpleNamespace:
    """A random target whose answers repeat themselves now and then."""
    torch.manual_seed(3)
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=29, max_position_embeddings=256, initializer_range=0.3, **size)
    target = LlamaForCausalLM(config).eval().requires_grad_(False)
    return SimpleNamespace(
        target=target, vocab_size=29, device=target.device, dtype=target.dtype, parts={}, trimmed=None
    )


@pytest.mark.parametrize("name", ["bigram", "bigram_tree"])
def test_an_example_is_lossless(written, name):
    searched = f"hydra.searchpath=[file://{written / 'conf'}]"
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("bench", overrides=[searched, f"method={name}"])
    OmegaConf.resolve(cfg)
    check_method(cfg)
    settings = {key: value for key, value in cfg.method.items() if key not in ("_target_", "name")}
    module, _, cls = cfg.method._target_.rpartition(".")
    pair = tiny_pair()
    drafter = getattr(importlib.import_module(module), cls)(pair, **settings)
    target = StagedModel(pair.target)
    accepted = branches = 0
    for prompt in ([5, 9, 5, 9, 5], [1, 2, 3, 4, 2, 3, 1], [7]):
        for cap, stop in ((1, 2), (2, 2), (40, 2), (60, 28)):
            plain = Engine(target, Drafter(), frozenset({stop})).answer(prompt, SamplingParams(cap))
            answer = Engine(target, drafter, frozenset({stop})).answer(prompt, SamplingParams(cap))
            assert answer.tokens == plain.tokens
            accepted += sum(step.accepted for step in answer.steps)
            branches += sum(step.drafted - step.depth for step in answer.steps)
    assert accepted > 20
    assert (branches > 0) == (name == "bigram_tree")
    plain, sampled = (
        Engine(target, one, frozenset()).answer([5, 9, 5], SamplingParams(30, 0.7), seed=1)
        for one in (Drafter(), drafter)
    )
    assert len(sampled.tokens) == 30 and sampled.tokens == plain.tokens


def test_all_examples_are_run():
    assert set(examples()) == {
        "methods/bigram.py",
        "methods/bigram_tree.py",
        "conf/method/bigram.yaml",
        "conf/method/bigram_tree.yaml",
    }


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page != EXAMPLE_PAGE and "```python" in page.read_text()], ids=ids
)
def test_other_python_examples_name_what_exists(page):
    for language, content in blocks(page.read_text(encoding="utf-8")):
        if language == "python":
            imports = [
                line
                for line in content.splitlines()
                if re.match(r"(from|import) (?!methods.(?:ahead|bigram|on_states))", line)
            ]
            exec(compile("\n".join(imports), str(page), "exec"), {})


# Pairs and tasks; methods and their trainers run in tests/test_extending.py.
OF_GROUPS = {
    OmegaConf.create(content).name: content
    for page in PAGES
    if page != EXAMPLE_PAGE
    for language, content in blocks(page.read_text(encoding="utf-8"))
    if language == "yaml" and "_target_:" not in content and "defaults: [train" not in content
}


def test_pair_and_task_examples_are_found():
    assert {"\ntasks:" in content for content in OF_GROUPS.values()} == {True, False}


@pytest.mark.parametrize("name", OF_GROUPS)
def test_pair_and_task_examples_compose(name, tmp_path):
    group = "task" if "\ntasks:" in OF_GROUPS[name] else "pair"
    (tmp_path / group).mkdir()
    (tmp_path / group / f"{name}.yaml").write_text(OF_GROUPS[name])
    with initialize_config_dir(str(CONF), version_base="1.3"):
        searched = f"hydra.searchpath=[file://{tmp_path}]"
        cfg = compose("bench", overrides=[searched, f"{group}={name}", "method=pld"])
    OmegaConf.resolve(cfg)
    assert cfg[group].name == name and not OmegaConf.missing_keys(cfg)
