"""``make test-torch VERSION=…``: the covering set with another torch, in a venv of its own under .bench/.

Only a CPU build is taken. Where the indexes that pip knows have none, this says so, with the size of what they have
instead, and installs nothing; ``BUILD=cuda`` takes that. What is printed last is whether small trainings give the same
bits as in ``.venv``: that of the quick start, and those of ``torch_bits.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# What rests on torch itself: process groups that break, random numbers, optimizers, state dicts, DTensor, autograd.
COVERING = [
    "engine",
    "checkpoint",
    "recovery",
    "run",
    "sync",
    "undo",
    "data",
    "world",
    "faults",
    "test_run.py",
    "test_rng.py",
]
LATER = ["tests/demo/test_documented.py"]  # scripts of the pages, in fresh interpreters


def cuda_packages(report: dict[str, Any]) -> list[str]:
    """Return the packages of a ``pip install --dry-run --report`` that only a CUDA build needs.

    >>> named = lambda *names: {"install": [{"metadata": {"name": name}} for name in names]}
    >>> cuda_packages(named("torch", "sympy")), cuda_packages(named("torch", "nvidia-cublas", "cuda-bindings"))
    ([], ['cuda-bindings', 'nvidia-cublas'])
    """
    names = (each["metadata"]["name"].lower() for each in report["install"])
    return sorted(name for name in names if name.startswith(("nvidia-", "cuda-", "triton")))


def spellings(version: str) -> list[str]:
    """Return how a CPU build may be called, the surest first.

    >>> spellings("2.13.0"), spellings("2.13.0+cpu")
    (['2.13.0+cpu', '2.13.0'], ['2.13.0+cpu'])
    """
    return [version] if "+" in version else [f"{version}+cpu", version]


def dependencies(project: dict[str, Any]) -> list[str]:
    """Return what the tests need beside torch, as pyproject.toml says it.

    >>> dependencies({"dependencies": ["torch>=2", "numpy>=2"], "optional-dependencies": {"dev": ["pytest>=8"]}})
    ['numpy>=2', 'pytest>=8']
    """
    listed = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    return [each for each in listed if not re.match(r"torch\b(?!\w)", each)]


def find_build(pip: list[str], version: str) -> tuple[str, dict[str, Any]] | None:
    """Return the first spelling that pip finds without CUDA, or else the first that it finds, with pip's report."""
    found = None
    for spelling in spellings(version):
        with tempfile.NamedTemporaryFile(suffix=".json") as report:
            command = [*pip, "install", "--dry-run", "--ignore-installed", "--quiet", "--report", report.name]
            if subprocess.run([*command, f"torch=={spelling}"], capture_output=True).returncode:
                continue
            read = json.loads(Path(report.name).read_text())
        if not cuda_packages(read):
            return spelling, read
        found = found or (spelling, read)
    return found


def install(venv: Path, version: str, *, may_be_cuda: bool) -> None:
    """Make the venv, unless it is ready."""
    if (venv / "ready").exists():
        return
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    if (found := find_build(pip, version)) is None:
        sys.exit(f"test-torch: pip finds no torch {version}")
    spelling, report = found
    if (cuda := cuda_packages(report)) and not may_be_cuda:
        sys.exit(
            f"test-torch: no CPU build of torch {version} is in the indexes that pip knows; the build there comes with "
            f"{len(cuda)} packages of CUDA, gigabytes in all; nothing is installed "
            "(an index with CPU builds in pip's settings, or BUILD=cuda to take that one)"
        )
    subprocess.run([*pip, "install", "--quiet", f"torch=={spelling}"], check=True)
    others = dependencies(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])
    subprocess.run([*pip, "install", "--quiet", f"torch=={spelling}", *others], check=True)
    (venv / "ready").touch()


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def run_tests(python: Path, chosen: Iterable[str]) -> int:
    paths = [*chosen] or [*[f"tests/{name}" for name in COVERING], *LATER]
    command = [str(python), "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", *paths]
    return subprocess.run(command, cwd=ROOT, env=environment()).returncode


def bits_with(python: Path) -> dict[str, str]:
    """The hashes of small trainings with this interpreter's torch, by name."""
    command = [str(python), str(ROOT / "tests" / "torch_bits.py")]
    done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
    return {"the quick start": quick_start_with(python), **json.loads(done.stdout)}


def verdict(here: dict[str, str], usual: dict[str, str]) -> str:
    """Return in words which trainings differ.

    >>> verdict({"a": "1", "b": "2"}, {"a": "1", "b": "2"})
    'the bits of 2 small trainings are the same as in this venv'
    >>> verdict({"a": "1", "b": "2"}, {"a": "1", "b": "3"})
    'the bits of 1 of 2 small trainings differ from those in this venv: b'
    """
    differ = [name for name in usual if here.get(name) != usual[name]]
    if not differ:
        return f"the bits of {len(usual)} small trainings are the same as in this venv"
    return f"the bits of {len(differ)} of {len(usual)} small trainings differ from those in this venv: " + "; ".join(
        differ
    )


def quick_start_with(python: Path) -> str:
    """The hash that the script of the quick start prints with this interpreter's torch."""
    page = (ROOT / "docs" / "quickstart.md").read_text()
    [script] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    with tempfile.TemporaryDirectory() as folder:
        command = [str(python), "-c", script]
        done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=True)
    return done.stdout.split()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version")
    parser.add_argument("--build", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("tests", nargs="*", help="in place of the covering set")
    given = parser.parse_intermixed_args()
    venv = ROOT / ".bench" / f"torch-{given.version}"
    install(venv, given.version, may_be_cuda=given.build == "cuda")
    python = venv / "bin" / "python"
    code = run_tests(python, given.tests)
    here, usual = bits_with(python), bits_with(Path(sys.executable))
    print(f"torch {given.version}: the quick start's hash is {here['the quick start']}; {verdict(here, usual)}")
    sys.exit(code)


if __name__ == "__main__":
    main()
