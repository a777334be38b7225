"""README and docs/: links resolve, pages are short, every method has its page, the site builds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from specbench import ROOT
from specbench.config.compose import CONF
from specbench.config.spec import RunSpec
from tests.support.conf import batches, drafters, drafts
from tests.support.pages import DOCS, PAGES, README, broken_links, ids, load_script

if TYPE_CHECKING:
    from omegaconf import DictConfig

pytestmark = pytest.mark.slow  # together: two hundred short tests

MOST_LINES = 150
# Written by commands, to look things up in.
LONG = {DOCS / "results" / name for name in ("family-answers.md", "smollm2-conversations.md")}


def test_the_list_of_modules_is_that_of_the_packages():
    assert load_script("modules").content() in (DOCS / "design.md").read_text(encoding="utf-8"), (
        "run python docs/modules.py"
    )


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
    spec = RunSpec.of(cfg)
    parts = {spec.needs.part, MAP if spec.trimmed else None} - {None}
    return spec.needs.draft_model, parts


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
    for name, value in (("DOCS", tmp_path), ("INDEX", pages / "index.md")):
        monkeypatch.setattr(sys.modules[__name__], name, value)
    monkeypatch.setattr("tests.support.pages.ROOT", tmp_path)
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
