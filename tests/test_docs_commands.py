"""README and docs/: every command composes."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import nullcontext, suppress

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specbench import ROOT
from specbench.commands import cli
from specbench.config.combinations import check_method
from specbench.config.compose import CONF
from specbench.system.errors import LackingError, UserError
from tests.support.conf import composed
from tests.support.pages import PAGES, blocks, ids, spans

pytestmark = pytest.mark.slow

PYTHON = "Programming Language :: Python"  # classifiers of the package
# Commands that Hydra composes: the configuration of each.
COMPOSED = {
    "run": "bench",
    "sweep": "bench",
    "tune": "tune",
    "answer": "answer",
    "calibrate": "calibrate_vocab",
    "converse": "converse",
    "lengthen": "lengthen",
    "states": "states",
    "parts": "parts",
    "serve": "serve",
    "doctor": "bench",
}


def commands(text: str) -> Iterator[list[str]]:
    """The words of every command in a page's code blocks and inline code, without comments and shell variables."""
    lines = spans(text)
    for language, content in blocks(text):
        if language in ("", "bash", "sh", "console"):
            lines += re.sub(r"(?:#.*)?\\\n\s*", " ", content).splitlines()
    for line in lines:
        if not re.search(r"\b(specbench|make|-m)\b", line):
            continue
        for part in re.split(r" && | \| ", line.strip()):
            try:
                words = shlex.split(part, comments=True)
            except ValueError:  # not a command
                continue
            while words and re.fullmatch(r"[A-Z_a-z]+=\S*", words[0]):
                words = words[1:]
            if len(words) > 1 and words[0] in ("specbench", "make", "python", "accelerate"):
                yield words


# Every command once, with the first page that has it.
ALL = {tuple(words): page for page in PAGES[::-1] for words in commands(page.read_text(encoding="utf-8"))}


def composed_by(words: list[str]) -> tuple[str, list[str]] | None:
    """The configuration and the overrides of a command; None for one that Hydra does not compose.

    Raises:
        UserError: There is no such command.
    """
    if words[0] == "make":
        return of_make(words[1], dict(word.split("=", 1) for word in words[2:]))
    if words[0] == "specbench":
        return of_console(words[1:])
    if "-m" not in words:
        return None
    module, *rest = words[words.index("-m") + 1 :]
    if module == "specbench":
        return of_console([word for word in rest if word != "-m"])
    if importlib.util.find_spec(module) is None:
        raise UserError(f"no such module: {module}")
    return None


def of_make(target: str, given: dict[str, str]) -> tuple[str, list[str]] | None:
    """As `composed_by`, for a target of the Makefile and its variables."""
    if target != "bench":
        return None
    groups = {"METHOD": "method", "DRAFTER": "drafter", "PAIR": "pair", "DATA": "data", "TASK": "task"}
    chosen = [f"{key}={given[name]}" for name, key in groups.items() if name in given]
    return "bench", chosen + given.get("ARGS", "").split()


def of_console(words: list[str]) -> tuple[str, list[str]] | None:
    """As `composed_by`, for what follows `specbench`."""
    name, *rest = words
    if "--help" in (name, *rest[-1:]):
        return None
    if name in COMPOSED:
        return COMPOSED[name], rest
    # A placeholder, and the trainer of a page's own example.
    if name == "train" and rest[:1] in (["NAME"], ["ahead"]):
        return None
    if name == "train" and rest and rest[0] in cli.trainers():
        return f"train_{rest[0]}", rest[1:]
    if name in cli.COMMANDS and name != "train":
        known = set(re.findall(r"--[\w-]+", cli.COMMANDS[name].takes))
        if {word for word in rest if word.startswith("--")} <= known:
            return None
    raise UserError(f"no such command: specbench {' '.join(words)}")


def as_jobs(overrides: list[str]) -> list[list[str]]:
    """Jobs of a sweep in which every choice between commas occurs: fewer than all combinations."""
    parser = OverridesParser.create()
    each = []
    for text, override in zip(overrides, parser.parse_overrides(overrides)):
        if override.is_sweep_override():
            each.append(
                [f"{override.get_key_element()}={choice}" for choice in override.sweep_string_iterator()]
            )
        else:
            each.append([text])
    count = max(map(len, each), default=1)
    return [[choices[i % len(choices)] for choices in each] for i in range(count)]


def of_preset(overrides: list[str]) -> list[str]:
    """What the preset among the overrides sweeps over, but for what they give themselves."""
    presets = [override for override in overrides if override.startswith("experiment=")]
    if not presets:
        return []
    hydra = compose("bench", overrides=presets, return_hydra_config=True).hydra
    given = {override.partition("=")[0] for override in overrides}
    return [f"{key}={value}" for key, value in (hydra.sweeper.params or {}).items() if key not in given]


def check_command(words: list[str]) -> None:
    """Composes every job of a command; raises what Hydra raises for a group, name or key that is not there."""
    found = composed_by(words)
    if found is None:
        return
    config, overrides = found
    if overrides and overrides[-1] == "...":
        overrides = overrides[:-1]
    overrides = [override for override in overrides if not re.search(r"=(\.\.\.|FOLDER|NAME)$", override)]
    # Left out: placeholders, and methods of pages' own examples; of that with a trained part, which most pairs lack, a
    # method stands in that needs nothing.
    own = re.compile(r"method=bigram$|pair\.parts\.ahead=")
    overrides = [re.sub("^method=ahead$", "method=pld", one) for one in overrides if not own.match(one)]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        jobs = as_jobs([*of_preset(overrides), *overrides])
        launched = any(override.startswith("hydra") for override in overrides)
        made = [compose(config, overrides=job) for job in jobs] if launched else []
    for cfg in made or [composed(config, *job) for job in jobs]:
        if config == "bench":
            OmegaConf.resolve(cfg)
            with suppress(LackingError) if cfg.leave_out else nullcontext():
                check_method(cfg)


def commands_of(name: str) -> list:
    """Parameters of a test: the commands that begin with a word."""
    return [
        pytest.param(list(words), id=f"{ids(page)}: {' '.join(words)}")
        for words, page in ALL.items()
        if words[0] == name
    ]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "words", commands_of("specbench") + commands_of("python") + commands_of("accelerate")
)
def test_commands_compose(words):
    check_command(words)


@pytest.mark.parametrize("words", commands_of("make"))
def test_make_targets_exist(words):
    targets = re.findall(
        r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert words[1] in targets
    check_command([word for word in words if word not in ("METHOD=...", "METHOD=bigram")])


def test_make_clean_leaves_what_was_trained(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    kept = [tmp_path / "build" / name for name in ("tiny/draft", "smollm2-135m/conversations", "gpu/report")]
    caches = [
        tmp_path / name for name in ("build/mypy/a", "build/pycache/a", "build/site/a", "a/__pycache__/a")
    ]
    for path in (*kept, *caches):
        path.mkdir(parents=True)
    subprocess.run(["make", "clean"], cwd=tmp_path, check=True, timeout=60)
    assert all(path.exists() for path in kept) and not any(path.exists() for path in caches)


@pytest.mark.parametrize("version", [(3, 10, 9), (3, 14, 0)])
def test_a_python_that_does_not_suit_is_one_line(tmp_path, version):
    shutil.copy(ROOT / "Makefile", tmp_path)
    other = tmp_path / "other"
    replaced = f"import sys; sys.version_info = {version}; exec(sys.argv[1])"
    other.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{replaced}" "$2"\n')
    other.chmod(0o755)
    command = ["make", "--silent", ".venv/bin/python", f"PYTHONS={other}"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert said.returncode and said.stderr.startswith(
        f"error: no Python 3.11 to 3.13 found (tried: {other});"
    )


def test_the_versions_of_python_are_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    low, above = map(int, re.fullmatch(r">=3\.(\d+),<3\.(\d+)", project["requires-python"]).groups())
    named = {word for text in project["classifiers"] if (word := text.removeprefix(f"{PYTHON} :: ")) != text}
    assert named == {"3", *(f"3.{minor}" for minor in range(low, above))}
    for page in ("Makefile", "README.md", "CONTRIBUTING.md", "docs/quick-start.md"):
        assert f"Python 3.{low} to 3.{above - 1}" in (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "line",
    [
        "specbench run method=kangaro",
        "specbench sweep method=sps,kangaro",
        "specbench run method.max_draft=3",
        "specbench compare A B --fail-under 0.9",
        "specbench trian sps",
        "specbench train falcon",
        "python -m specbench.benhc method=sps",
        "python -m specbench train sps laers=3",
        "specbench run method=pld vocab=trim",
    ],
)
def test_a_wrong_command_is_found(line):
    with pytest.raises((UserError, HydraException, OmegaConfBaseException)):
        check_command(line.split())


def test_commands_are_found_at_all():
    found = [" ".join(words) for words in ALL]
    assert "specbench run method=sps task=math_reasoning" in found
    assert "make bench METHOD=kangaroo" in found
    long = next(line for line in found if line.startswith("specbench train s2d"))
    assert long.endswith("gradient_checkpointing=true")  # from the next line
    assert len(found) > 60
