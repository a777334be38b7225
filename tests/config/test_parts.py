"""Trained parts are compared with the pair's target before a weight is loaded, as far as their folders tell."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from specbench.config.combinations import check_method
from specbench.config.parts import check_part
from specbench.data.training_folder import CONDITIONS
from specbench.decoding.drafter import Needs
from specbench.system.errors import UserError
from tests.support import conf
from tests.support.messages import says

composed = partial(conf.composed, "bench")
READING_STATES = (
    *("kangaroo", "medusa", "hydra_heads", "eagle", "eagle3"),
    *("peagle", "mtp", "dflash", "dflash2", "dspark"),
)


def part(folder: Path, config: dict | None = None, pair: dict | None = None) -> str:
    """A part's folder with what it says of its target; no weights."""
    folder.mkdir()
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if pair is not None:
        (folder / CONDITIONS).write_text(json.dumps({"steps": 400, "pair": pair}))
    return str(folder)


def recorded(name: str, **changes) -> dict:
    """A pair as the record of a training holds it."""
    return OmegaConf.to_container(composed(f"pair={name}").pair) | changes


def checked(*overrides: str) -> None:
    cfg = composed(*overrides)
    OmegaConf.resolve(cfg)
    check_method(cfg)


def refused(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        checked(*overrides)
    return str(caught.value)


@pytest.mark.first_fast
@pytest.mark.parametrize("method", ["kangaroo", "medusa", "eagle3"])
def test_a_part_of_a_target_of_another_depth_is_refused(tmp_path, method):
    folder = part(tmp_path / "part", {"hidden_size": 128}, recorded("tiny"))
    message = refused(f"method={method}", "pair=tiny_shallow", f"pair.parts.{method}={folder}")
    assert says(
        message,
        f"'{folder}' ... 128 wide and 24 layers deep (pair tiny) ... tiny_shallow is 128 wide and 12 ",
    )
    checked(f"method={method}", "pair=tiny", f"pair.parts.{method}={folder}")


def test_weights_that_are_named_by_the_method_are_compared_too(tmp_path):
    folder = part(tmp_path / "part", pair=recorded("tiny"))
    assert "12 layers deep" in refused("pair=tiny_shallow", f"method.weights={folder}")
    assert "12 layers deep" in refused(
        "method=oracle", "method.cost_of=kangaroo", "pair=tiny_shallow", f"pair.parts.kangaroo={folder}"
    )


@pytest.mark.parametrize(
    "config",
    [
        {"hidden_size": 128},
        {"transformer_layer_config": {"hidden_size": 128}},
        {"hidden_size": 576, "target_hidden_size": 128},
    ],
)
def test_a_part_of_another_width_is_refused(tmp_path, config):
    """The target is a package, whose shape the pair's YAML tells."""
    folder = part(tmp_path / "part", config)
    message = refused("method=eagle3", "pair=smollm2-135m", f"pair.parts.eagle3={folder}")
    assert says(message, f"'{folder}' is for a target 128 wide ... smollm2-135m is 576 wide")
    # What this hub id is like is not known yet.
    checked("method=eagle3", "pair=smollm2-135m", "pair.target=some/one", f"pair.parts.eagle3={folder}")


def test_a_target_of_the_users_tells_its_sizes_itself(tmp_path):
    target = part(tmp_path / "target", {"text_config": {"hidden_size": 64, "num_hidden_layers": 3}})
    folder = part(tmp_path / "part", {"hidden_size": 128})
    words = f"pair.parts.kangaroo={folder}"
    assert "64 wide" in refused("pair=qwen3-8b", f"pair.target={target}", words)
    (tmp_path / "part" / "config.json").write_text(json.dumps({"hidden_size": 64}))
    checked("pair=qwen3-8b", f"pair.target={target}", words)


def test_parts_of_expanded_targets_are_those_of_what_was_expanded(tmp_path):
    folder = part(tmp_path / "narrow", {"hidden_size": 128}, recorded("tiny"))
    checked("pair=tiny_wide", f"pair.parts.kangaroo={folder}")
    assert "12 layers deep" in refused("pair=tiny_shallow_wide", f"pair.parts.kangaroo={folder}")


def test_what_is_not_certain_is_not_refused(tmp_path, monkeypatch):
    shallow = "pair=tiny_shallow"
    # One draft model serves both targets, and so do a text and what has no config.json.
    drafts = part(tmp_path / "s2d", {"hidden_size": 96}, recorded("tiny"))
    checked("method=s2d", shallow, f"pair.parts.s2d={drafts}")
    texts = part(tmp_path / "rest", pair=recorded("tiny"))
    checked("method=rest", shallow, f"pair.parts.rest={texts}")
    checked(shallow, f"pair.parts.kangaroo={part(tmp_path / 'bare')}")
    # Of a wider target that was made of the same one, and of a folder that another working directory may have.
    wide = part(tmp_path / "wide", pair=recorded("tiny_wide"))
    checked(shallow, f"pair.parts.kangaroo={wide}")
    monkeypatch.chdir(tmp_path)
    part(tmp_path / "model", {"hidden_size": 64, "num_hidden_layers": 2})
    loose = part(tmp_path / "loose", pair=recorded("tiny", target="model"))
    checked(shallow, f"pair.parts.kangaroo={loose}")


def test_a_folder_that_cannot_be_read_is_one_line(tmp_path):
    folder = part(tmp_path / "part", {})
    (tmp_path / "part" / "config.json").write_text("{")
    assert says(refused(f"pair.parts.kangaroo={folder}"), "config.json cannot be read: JSONDecodeError")


@pytest.mark.parametrize("pair", ["tiny", "tiny_shallow", "tiny_wide", "smollm2-135m"])
def test_parts_that_are_shipped_fit(pair):
    cfg = composed(f"pair={pair}").pair
    assert cfg.parts.kangaroo is not None
    for name in READING_STATES:
        check_part(cfg, Needs(part=name), [cfg.parts[name]])
