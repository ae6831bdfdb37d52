"""The wheel: built from the sdist, installed in an empty venv, and used there as a newcomer would."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import holdfast

ROOT = Path(__file__).parents[1]
BUILD = "from setuptools import build_meta; import sys; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc")


def files_of_package(root: Path) -> set[str]:
    """What the package has in a source tree, data included."""
    found = (path for path in (root / "holdfast").rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path.relative_to(root).as_posix() for path in found}


def build(what: str, source: Path, into: Path) -> Path:
    """``build_sdist`` or ``build_wheel`` in a process of its own; nothing is written to ``source``'s original."""
    into.mkdir(exist_ok=True)
    command = [sys.executable, "-c", BUILD, what, str(into)]
    done = subprocess.run(command, cwd=source, env=clean(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return into / done.stdout.splitlines()[-1]


def clean() -> dict[str, str]:
    """The environment without ways to see this source tree."""
    gone = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    return {name: value for name, value in os.environ.items() if name not in gone} | {"OMP_NUM_THREADS": "1"}


def copy_tree(into: Path) -> Path:
    """A copy of what a build may see, with folders beside the package that must not get in."""
    for folder in ("holdfast", "bench", "docs", "examples"):
        shutil.copytree(ROOT / folder, into / folder, ignore=IGNORED)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, into / name)
    return into


def make_sdist_and_wheel(tree: Path, into: Path) -> tuple[Path, Path, Path]:
    """The sdist, what is in it, and the wheel that is built from that."""
    sdist = build("build_sdist", tree, into / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(into / "unpacked", filter="data")
    [unpacked] = (into / "unpacked").iterdir()
    return sdist, unpacked, build("build_wheel", unpacked, into / "wheel")


def missing_from(wheel: Path, tree: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return files_of_package(tree) - set(archive.namelist())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return make_sdist_and_wheel(copy_tree(tmp_path_factory.mktemp("tree")), tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def venv(built: tuple[Path, Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A venv with the wheel. It sees the dependencies of this environment by a path, so no torch is loaded again."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    own = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    # A .pth file in a folder that is named in a .pth file is not read, so an editable install there stays unseen.
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--disable-pip-version-check"]
    command = [*pip, "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed", str(built[2])]
    done = subprocess.run(command, env=clean(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder


def in_venv(venv: Path, folder: Path, program: str, *words: str) -> str:
    command = [str(venv / "bin" / program), *words]
    done = subprocess.run(command, cwd=folder, env=clean(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_has_the_package_and_nothing_else(built: tuple[Path, Path, Path]) -> None:
    with zipfile.ZipFile(built[2]) as archive:
        names = archive.namelist()
        [metadata] = [archive.read(name).decode() for name in names if name.endswith("/METADATA")]
    assert not missing_from(built[2], ROOT)
    assert {name.partition("/")[0] for name in names} == {"holdfast", f"holdfast-{holdfast.__version__}.dist-info"}
    assert any(name.endswith("LICENSE") for name in names)
    assert f"Version: {holdfast.__version__}\n" in metadata
    assert "Requires-Dist: torch" in metadata


def test_the_sdist_has_what_a_build_needs(built: tuple[Path, Path, Path]) -> None:
    sdist, unpacked, _ = built
    assert sdist.name == f"holdfast-{holdfast.__version__}.tar.gz"
    assert files_of_package(unpacked) == files_of_package(ROOT)
    assert {"pyproject.toml", "README.md", "LICENSE"} <= {path.name for path in unpacked.iterdir()}


def test_a_data_file_that_is_forgotten_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "tree" / "holdfast").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", "holdfast/__init__.py"):
        shutil.copy(ROOT / name, tmp_path / "tree" / name)
    (tmp_path / "tree" / "holdfast" / "table.csv").write_text("1,2")
    *_, wheel = make_sdist_and_wheel(tmp_path / "tree", tmp_path)
    assert missing_from(wheel, tmp_path / "tree") == {"holdfast/table.csv"}


def test_the_command_of_the_wheel_says_its_version(venv: Path, tmp_path: Path) -> None:
    assert in_venv(venv, tmp_path, "holdfast", "--version") == f"holdfast {holdfast.__version__}\n"


def test_the_wheel_in_an_empty_venv_shows_the_first_steps_of_the_demo(venv: Path, tmp_path: Path) -> None:
    origin = in_venv(venv, tmp_path, "python", "-c", "import holdfast; print(holdfast.__file__)")
    assert Path(origin.strip()).is_relative_to(venv)
    words = ["--steps", "2", "--kills", "0", "--workers", "1", "--json", "--out", str(tmp_path / "out")]
    verdict = json.loads(in_venv(venv, tmp_path, "holdfast", "demo", *words).splitlines()[-1])
    assert (verdict["steps"], verdict["identical"]) == (2, True)
