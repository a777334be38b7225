"""README and docs/: links resolve, commands compose, examples run, the site builds."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from transformers import LlamaConfig, LlamaForCausalLM

import methods
from specbench import ROOT
from specbench.commands import cli
from specbench.config.checks import check_method
from specbench.config.compose import CONF
from specbench.config.spec import RunSpec
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.system.errors import UserError
from tests.support.conf import batches, composed, drafters, drafts
from tests.support.pages import load_script
from tests.support.samples import SUMMARY, faster, run_of, wrong

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omegaconf import DictConfig

    from specbench.report.runs import Run

pytestmark = pytest.mark.slow  # together: two hundred short tests

README, DOCS = ROOT / "README.md", ROOT / "docs"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
MOST_LINES = 150
# Written by commands, to look things up in.
LONG = {DOCS / "results" / name for name in ("family-answers.md", "smollm2-conversations.md")}

# Commands that Hydra composes: the configuration of each.
COMPOSED = {
    "run": "bench",
    "sweep": "bench",
    "tune": "tune",
    "answer": "answer",
    "calibrate": "calibrate_vocab",
    "converse": "converse",
    "lengthen": "lengthen",
    "serve": "serve",
    "doctor": "bench",
}
MODULES = {  # python -m MODULE: the configuration that it composes
    "specbench.commands.run": "bench",
    "specbench.commands.tune": "tune",
    "methods.answer": "answer",
    "methods.parts": "parts",
    "methods.vocab_trim.calibrate": "calibrate_vocab",
    **{f"methods.{name}.train": f"train_{name}" for name in cli.trainers()},
}


def test_the_list_of_modules_is_that_of_the_packages():
    assert load_script("modules").content() in (DOCS / "design.md").read_text(encoding="utf-8"), (
        "run python docs/modules.py"
    )


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


# -- Markdown


def blocks(text: str) -> list[tuple[str, str]]:
    """(language, content) of every code block, fenced or indented; an indented one has no language."""
    found, lines, fence, before = [], [], None, ""
    for line in [*text.splitlines(), ""]:
        if fence is not None:
            if line.startswith("```"):
                found.append((fence, "\n".join(lines)))
                fence, lines = None, []
            else:
                lines.append(line)
        elif line.startswith("    ") and (lines or before == ""):
            lines.append(line[4:])
        else:
            if lines:
                found.append(("", "\n".join(lines)))
                lines = []
            if line.startswith("```"):
                fence = line[3:].strip()
        before = line
    return found


def prose(text: str) -> str:
    """The text without its code blocks."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"(?<=\n\n)(    .*\n)+", "", text)


def spans(text: str) -> list[str]:
    """The inline code of a text, each in one line."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(text))]


def anchors(text: str) -> set[str]:
    """Anchors of all headings, as GitHub and mkdocs make them."""
    heads = re.findall(r"^#+ +(.+)$", prose(text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def links(text: str) -> list[str]:
    """Targets of links and images."""
    return re.findall(r"\]\(([^)\s]+)\)", prose(text))


def broken_links(page: Path) -> list[str]:
    """Relative links of a page that lead nowhere."""
    found = []
    for link in links(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_resolve(page):
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A title: two\n\n[a](#a-title-two) [b](#none) [c](none.md) ![d](none.png) [e](https://x.y)\n"
    )
    assert broken_links(page) == ["#none", "none.md", "none.png"]


def test_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


@pytest.mark.parametrize("page", sorted({*DOCS.rglob("*.md")} - LONG), ids=ids)
def test_pages_are_short(page):
    assert len(page.read_text(encoding="utf-8").splitlines()) <= MOST_LINES + 20


def test_every_page_is_in_the_navigation():
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"^ +- ([\w/-]+\.md)$", config, flags=re.MULTILINE))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert not pages - named, f"add to `nav` in mkdocs.yml: {', '.join(sorted(pages - named))}"
    assert not named - pages, f"named in mkdocs.yml, but not in docs/: {', '.join(sorted(named - pages))}"


# -- every method has its page

METHODS = sorted(path.stem for path in (CONF / "method").glob("[!_]*.yaml"))
INDEX = DOCS / "methods" / "index.md"
DIFFERS = "## Where it differs from the paper"
MAP = "vocab_map"  # the part that a trimmed head needs
IN_BATCHES = r"^\*\*In batches:\*\* (.*?)\. "  # the list of drafters in the index


def redirects(name: str) -> bool:
    """Whether a method is another one with other settings, and so may stand on that one's page."""
    defaults = OmegaConf.load(CONF / "method" / f"{name}.yaml").get("defaults", [])
    return any(entry in METHODS for entry in defaults)


@cache
def required(name: str) -> tuple[bool, set[str]]:
    """Whether a method needs a draft model, as its configuration is, and which parts of a pair."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("bench", overrides=[f"method={name}"])
    OmegaConf.resolve(cfg)
    needs = RunSpec.of(cfg).needs
    parts = {needs.part, MAP if cfg.method.get("vocab_map") else None} - {None}
    return needs.draft_model, parts


def told(text: str) -> tuple[bool, set[str]]:
    """As `required`, of what a page says up to the first semicolon."""
    return "draft model" in text, set(re.findall(r"\bparts\.(\w+)", text))


def wording(name: str) -> str:
    """What a page may say of a method's needs."""
    draft_model, parts = required(name)
    said = ["a draft model"] * draft_model + [
        f"trained weights (`pair.parts.{part}`)" for part in sorted(parts)
    ]
    return ", ".join(said) or "nothing"


def needs_lines(page: Path) -> dict[str, str]:
    """What a page says that methods need: of those that its line names, or of the method of the page's name."""
    found = {}
    for names, text in re.findall(
        r"^\*\*Needs(?: \((.*?)\))?:\*\* (.*)$", page.read_text(), flags=re.MULTILINE
    ):
        found |= dict.fromkeys(re.findall(r"`(\w+)`", names) or [page.stem], text)
    return found


def index_rows(text: str) -> dict[str, str]:
    """What the table of all methods says that each needs."""
    rows = re.findall(r"^\| (\[?`.*?) \|.*\| (.*?) \|$", text, flags=re.MULTILINE)
    return {name: needs for names, needs in rows for name in re.findall(r"`(\w+)`", names)}


def faults_of_page(name: str) -> list[str]:
    """What is missing or wrong about a method in docs/, each fault with what to write."""
    page = next((page for page in DOCS.rglob("*.md") if name in needs_lines(page)), None)
    right, faults = wording(name), []
    if page is None:
        faults.append(
            f"docs/methods/{name}.md: write this page, and name it in mkdocs.yml; "
            f"below its title the line '**Needs:** {right}.'"
        )
    elif told(needs_lines(page)[name].partition(";")[0]) != required(name):
        faults.append(
            f"{ids(page)}: '**Needs:**' of {name} must say '{right}', not '{needs_lines(page)[name]}'"
        )
    if page is None or DIFFERS not in page.read_text(encoding="utf-8").splitlines():
        faults.append(
            f"{f'docs/methods/{name}.md' if page is None else ids(page)}: add a section '{DIFFERS}'"
        )
    row = index_rows(INDEX.read_text(encoding="utf-8")).get(name)
    if row is None:
        faults.append(f"docs/methods/index.md: add a row '| [`{name}`]({name}.md) | what drafts | {right} |'")
    elif told(row.partition(";")[0]) != required(name):
        faults.append(f"docs/methods/index.md: the row of {name} must say '{right}', not '{row}'")
    if batches(name) and drafts(name) and not redirects(name) and name not in drafters_in_batches():
        faults.append(f"docs/methods/index.md: add `{name}` to the list after '**In batches:**'")
    return faults


def drafters_in_batches() -> set[str]:
    """The drafters that the index lists for batches."""
    (listed,) = re.findall(IN_BATCHES, INDEX.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return set(re.findall(r"`(\w+)`", listed))


def in_readme(name: str) -> bool:
    """Whether the README names a method: its readers look for a page; of one that is not named, nothing is asked."""
    return f"`{name}`" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name in METHODS if in_readme(name) and not redirects(name)])
def test_every_method_of_the_readme_has_its_page(name):
    faults = faults_of_page(name)
    assert not faults, "\n" + "\n".join(faults)


@pytest.mark.parametrize("name", [name for name in METHODS if redirects(name)])
def test_what_is_said_of_a_method_with_other_settings_is_right(name):
    said = [lines[name] for page in DOCS.rglob("*.md") if name in (lines := needs_lines(page))]
    said += [row for other, row in index_rows(INDEX.read_text(encoding="utf-8")).items() if other == name]
    assert all(told(text.partition(";")[0]) == required(name) for text in said), (said, wording(name))


def published(page: Path) -> list[tuple[str, str, str]]:
    """Method, setting and value of what a page says is published, of the methods named in front or of its own name."""
    text = page.read_text(encoding="utf-8")
    found = []
    for line in re.findall(
        r"^\*\*Published\*\* \(`settings=published`\): (.*?)\n\n", text, flags=re.M | re.S
    ):
        for part in line.split(";"):
            names = re.match(r"\s*((?:`\w+`(?:, )?)+):", part)
            pairs = re.findall(r"`(\w+)=([\w.]+)`", part)
            for name in re.findall(r"\w+", names[1]) if names else [page.stem]:
                found += [(name, *pair) for pair in pairs]
    return found


@cache
def settings_of(name: str) -> DictConfig:
    """A method's published settings."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("bench", overrides=[f"method={name}", "settings=published"])
    return cfg.method


def test_what_pages_call_published_is_the_configuration():
    said = [(ids(page), *one) for page in DOCS.rglob("*.md") for one in published(page)]
    wrong = [
        f"{page}: {name}.{key} is {settings_of(name)[key]}, not {value}"
        for page, name, key, value in said
        if settings_of(name)[key] != OmegaConf.create(f"value: {value}").value
    ]
    assert len(said) > 50 and not wrong, "\n" + "\n".join(wrong)


def test_pages_name_methods_that_there_are():
    named = {name for page in DOCS.rglob("*.md") for name in needs_lines(page)}
    assert named | set(index_rows(INDEX.read_text(encoding="utf-8"))) <= set(METHODS)
    assert {"none", "sps"} < drafters_in_batches() <= set(drafters())


def test_who_drafts_with_the_pair_s_draft_model():
    found = [
        (ids(page), name)
        for page in PAGES
        for names in re.findall(
            r"((?:`\w+`(?:,| and|, and)?\s)+)draft with the pair's\s+draft model", page.read_text("utf-8")
        )
        for name in re.findall(r"`(\w+)`", names)
    ]
    assert len(found) > 3
    assert [
        (page, name) for page, name in found if required(name)[0] is False or required(name)[1] - {MAP}
    ] == []


def test_a_method_without_a_page_is_told_what_to_add(tmp_path, monkeypatch):
    """A page that is not there, one of wrong needs and without a section, and an index that lacks the method."""
    pages = tmp_path / "methods"
    pages.mkdir()
    (pages / "index.md").write_text(
        "| [`sps`](sps.md) | ... | a draft model |\n\n**In batches:** `sps`. Any.\n"
    )
    (pages / "kangaroo.md").write_text("# `kangaroo`\n\n**Needs:** a draft model.\n\n## Cost\n")
    for name, value in (("DOCS", tmp_path), ("INDEX", pages / "index.md"), ("ROOT", tmp_path)):
        monkeypatch.setattr(sys.modules[__name__], name, value)
    adapter = "trained weights (`pair.parts.kangaroo`)"
    assert faults_of_page("kangaroo") == [
        f"methods/kangaroo.md: '**Needs:**' of kangaroo must say '{adapter}', not 'a draft model.'",
        f"methods/kangaroo.md: add a section '{DIFFERS}'",
        f"docs/methods/index.md: add a row '| [`kangaroo`](kangaroo.md) | what drafts | {adapter} |'",
        "docs/methods/index.md: add `kangaroo` to the list after '**In batches:**'",
    ]
    missing = faults_of_page("sps")
    assert (
        missing[0].startswith("docs/methods/sps.md: write this page")
        and "'**Needs:** a draft model.'" in missing[0]
    )
    assert missing[1:] == [f"docs/methods/sps.md: add a section '{DIFFERS}'"]


# -- commands


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
    if module in MODULES:
        return MODULES[module], [word for word in rest if word != "-m"]
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
    if name == "--help" or rest == ["--help"]:
        return None
    if name in COMPOSED:
        return COMPOSED[name], rest
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
    # Left out: placeholders, and the method of a page's own example.
    overrides = [override for override in overrides if override != "method=bigram"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        jobs = as_jobs([*of_preset(overrides), *overrides])
        launched = any(override.startswith("hydra") for override in overrides)
        made = [compose(config, overrides=job) for job in jobs] if launched else []
    for cfg in made or [composed(config, *job) for job in jobs]:
        if config == "bench":
            OmegaConf.resolve(cfg)
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
        "python -m methods.sps.train laers=3",
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


# -- the examples of "adding a method"

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
    return SimpleNamespace(target=target, vocab_size=29, device=target.device, dtype=target.dtype, parts={})


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
    sampled = Engine(target, drafter, frozenset()).answer([5, 9, 5], SamplingParams(30, 0.7), seed=1)
    assert len(sampled.tokens) == 30


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
            imports = [line for line in content.splitlines() if re.match(r"(from|import) ", line)]
            exec(compile("\n".join(imports), str(page), "exec"), {})


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page != EXAMPLE_PAGE and "```yaml" in page.read_text()], ids=ids
)
def test_pair_and_task_examples_compose(page, tmp_path):
    for language, content in blocks(page.read_text(encoding="utf-8")):
        if language != "yaml" or "_target_:" in content or "defaults:" in content:
            continue  # methods run in tests/test_extending.py
        group = "task" if "\ntasks:" in content else "pair"
        name = OmegaConf.create(content).name
        (tmp_path / group).mkdir()
        (tmp_path / group / f"{name}.yaml").write_text(content)
        with initialize_config_dir(str(CONF), version_base="1.3"):
            searched = f"hydra.searchpath=[file://{tmp_path}]"
            cfg = compose("bench", overrides=[searched, f"{group}={name}", "method=pld"])
        OmegaConf.resolve(cfg)
        assert cfg[group].name == name and not OmegaConf.missing_keys(cfg)


# -- the results table


@pytest.fixture(scope="module")
def figures():
    return load_script("figures")


@pytest.fixture
def pages(figures, tmp_path) -> Path:
    """A root with empty pages."""
    for page in figures.PAGES:
        path = tmp_path / page.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"before\n\n{figures.BEGIN}\nold\n{figures.END}\n\nbehind\n")
    return tmp_path


def two_runs(folder: Path) -> list[Run]:
    return [
        run_of(folder, "a", faster(1.52)),
        run_of(folder, "b", faster(1.8, method="sps", settings={"max_draft_tokens": 5})),
    ]


def test_results_stand_between_the_markers(figures, pages, tmp_path):
    figures.write(two_runs(tmp_path / "runs"), pages)
    of_tiny = [page for page in figures.PAGES if page.pair == "tiny"]
    for page in of_tiny:
        text = (pages / page.path).read_text()
        assert text.startswith(f"before\n\n{figures.BEGIN}\n") and text.endswith(f"{figures.END}\n\nbehind\n")
        assert "old" not in text
        assert "| kangaroo | 160 | 1200.0 | 41.2 | 1.52 [1.42, 1.62] | 3.21 | 0.61 | 1.90 | 79/1/0 |" in text
        assert "| sps | 160 | 1200.0 | 41.2 | 1.80 [1.70, 1.90] |" in text
        assert "`make readme-figures`, 2026-01-02; EPYC, 2 cores" in text
        assert broken_links(pages / page.path) == []
    assert (pages / "docs" / "figures" / "tiny" / "speedup_by_task.png").stat().st_size > 1000
    again = [(pages / page.path).read_text() for page in of_tiny]
    figures.write(two_runs(tmp_path / "once_more"), pages)
    assert [(pages / page.path).read_text() for page in of_tiny] == again
    others = [page for page in figures.PAGES if page not in of_tiny]
    assert others and all("old" in (pages / page.path).read_text() for page in others)


def test_a_violation_is_bold_in_the_results(figures, pages, tmp_path):
    figures.write([run_of(tmp_path / "runs", "a", wrong())], pages)
    assert "**77/0/3**" in (pages / figures.PAGES[0].path).read_text()


def test_results_of_two_machines_are_refused(figures, pages, tmp_path):
    first, second = two_runs(tmp_path / "runs")
    second.provenance["machine"]["cpu"] = "Xeon"
    with pytest.raises(UserError, match="one machine"):
        figures.write([first, second], pages)
    assert "old" in (pages / figures.PAGES[0].path).read_text()


def test_a_page_without_markers_is_refused(figures, pages, tmp_path):
    (pages / figures.PAGES[0].path).write_text("nothing\n")
    with pytest.raises(UserError, match="no lines"):
        figures.write([run_of(tmp_path / "runs", "a", SUMMARY)], pages)


def test_pages_have_their_markers(figures):
    for page in figures.PAGES:
        text = (ROOT / page.path).read_text(encoding="utf-8")
        assert figures.between_markers(text, "x").count("x")
        assert "| kangaroo |" in text  # it was written


# -- the site


def test_the_site_builds(tmp_path):
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    html = "".join(path.read_text(encoding="utf-8") for path in (tmp_path / "site").rglob("*.html"))
    assert not re.findall(
        r'(?:src=|<link[^>]*href=)"https?://[^"]*', html
    )  # nothing is fetched from elsewhere
