"""Environments of engines: what is installed into them, what is left out, and what went wrong in one line."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from specbench.commands import engine as command
from specbench.engines import environments
from specbench.engines.environments import (
    COMPLETE,
    _requirements_of,
    environment,
    interpreter,
    make_environment,
    program,
)
from specbench.system.errors import UserError
from tests.support.commands import exit_code

pytestmark = pytest.mark.process  # makes environments and runs pip in them


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return tmp_path / "cache"


def wheel(folder: Path, name: str, *requires: str) -> str:
    """A wheel of one module; returns the requirement that installs it."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        "Version: 1.0",
        *(f"Requires-Dist: {one}" for one in requires),
    ]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return f"{name} @ {path.as_uri()}"


def has(python: Path, module: str) -> bool:
    return (
        subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False).returncode == 0
    )


def test_the_last_one_comes_with_what_it_requires_but_what_is_left_out(tmp_path):
    helper, base = wheel(tmp_path, "helper"), wheel(tmp_path, "base")
    engine = wheel(tmp_path, "engine", helper, "torchaudio>=2", "huge; extra == 'all'")
    install = {"requirements": [base, engine], "without": ["torchaudio"]}
    python = make_environment("one", install)
    assert python == interpreter("one", install)
    assert all(has(python, name) for name in ("base", "engine", "helper"))
    marker = environment(install) / COMPLETE
    before = marker.stat().st_mtime_ns
    assert make_environment("one", install) == python and marker.stat().st_mtime_ns == before
    python.unlink()
    python.symlink_to(tmp_path / "gone")  # the Python that it was made with was removed
    with pytest.raises(UserError, match="is not installed"):
        interpreter("one", install)
    python.unlink()
    assert make_environment("one", install) == python and has(python, "engine")


def test_a_users_interpreter_tells_the_version_that_it_has():
    install = {"requirements": ["pytest==1.0"]}
    python, version = program("own", install, sys.executable, "pytest")
    assert python == Path(sys.executable) and version == f"pytest=={pytest.__version__}"
    for other, module in ((sys.executable, "no_such_module"), ("/no/such/python", "pytest")):
        with pytest.raises(UserError, match=f"engine own: {other} is not a Python interpreter with {module}"):
            program("own", install, other, module)


def test_the_version_is_that_of_what_was_installed(monkeypatch):
    """A requirement may name none."""
    monkeypatch.setattr(environments, "interpreter", lambda name, install: Path(sys.executable))
    python, version = program("own", {"requirements": ["pytest"]}, None, "pytest")
    assert python == Path(sys.executable) and version == f"pytest=={pytest.__version__}"


@pytest.mark.parametrize(
    ("install", "says"),
    [
        ({"requirements": "xllamacpp"}, "engine.install.requirements must be"),
        ({"requirements": None}, "engine.install.requirements must be"),
        ({"requirements": []}, "engine.install.requirements is empty"),
        ({"requirements": ["a"], "without": "torch"}, "engine.install.without must be"),
    ],
)
def test_a_text_is_no_list_of_letters_to_install(monkeypatch, install, says):
    monkeypatch.setattr(environments, "_pip", None)
    with pytest.raises(UserError, match=says):
        make_environment("five", install)


def test_what_lies_elsewhere_is_not_taken_for_installed(tmp_path, monkeypatch):
    """Such as a module of a cluster that PYTHONPATH names."""
    elsewhere = tmp_path / "elsewhere"
    for file, content in (
        ("there.py", ""),
        ("there-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: there\nVersion: 1.0\n"),
        ("there-1.0.dist-info/RECORD", "there.py,,\n"),
        ("there-1.0.dist-info/INSTALLER", "pip\n"),
    ):
        (elsewhere / file).parent.mkdir(parents=True, exist_ok=True)
        (elsewhere / file).write_text(content)
    monkeypatch.setenv("PYTHONPATH", str(elsewhere))
    install = {"requirements": [wheel(tmp_path, "there")]}
    python = make_environment("six", install)
    assert [*(environment(install) / "lib").glob("python*/site-packages/there*")]
    monkeypatch.delenv("PYTHONPATH")
    assert has(python, "there")


def test_what_pip_cannot_install_is_one_line_and_no_environment(tmp_path):
    install = {"requirements": ["no-such-package==1"]}
    with pytest.raises(UserError, match="cannot install engine two: .*no-such-package") as raised:
        make_environment("two", install)
    assert "\n" not in str(raised.value)
    with pytest.raises(UserError, match="is not installed"):
        interpreter("two", install)


def test_an_environment_without_pip_is_one_line(monkeypatch):
    """As of a Debian without python3-venv."""

    def call(builder, context, *arguments, **_):
        raise subprocess.CalledProcessError(1, arguments)

    monkeypatch.setattr(venv.EnvBuilder, "_call_new_python", call)
    install = {"requirements": ["one==1"]}
    with pytest.raises(UserError, match="engine three: install python3-venv, or .* engine.python"):
        make_environment("three", install)
    assert (environment(install) / "bin" / "python").is_symlink()  # a copy does not find a library beside it


def test_requirements_of_what_is_not_installed_under_its_name_are_one_line():
    with pytest.raises(UserError, match="cannot install engine four: .*PackageNotFoundError") as raised:
        _requirements_of("four", Path(sys.executable), "git+https://none/engine", set())
    assert "\n" not in str(raised.value)


def test_the_command_says_what_it_takes(monkeypatch, capsys):
    for words, message in (
        (["install"], "usage"),
        (["instal", "vllm"], "usage"),
        (["install", "vlm"], "vllm"),
    ):
        monkeypatch.setattr(sys, "argv", ["engine", *words])
        assert exit_code(command.main) == 2 and message in capsys.readouterr().err
