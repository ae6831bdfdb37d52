"""A venv for each framework, made from pins under ``.study/`` and used again by later studies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

STUDY = Path(".study")
# The arguments of pip, call after call. Chainer's setup needs numpy and an old setuptools before itself.
PINS: dict[str, tuple[tuple[str, ...], ...]] = {
    "pytorch": (("torch==2.13.0", "numpy==2.4.6", "safetensors==0.8.0", "torchdata==0.11.0"),),
    "tensorflow": (("tensorflow-cpu==2.21.0", "keras==3.15.1", "h5py==3.14.0"),),
    "jax": (("jax==0.10.2", "orbax-checkpoint==0.12.8", "flax==0.12.8", "optax==0.2.8"),),
    "chainer": (
        ("setuptools==65.5.0", "wheel==0.48.0", "numpy==1.23.5"),
        ("--no-build-isolation", "chainer==7.8.1", "h5py==3.11.0", "numpy==1.23.5"),
    ),
    "holdfast": (),  # installed where this runs
}
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Installed:
    """A framework's interpreter, or why there is none."""

    framework: str
    python: Path | None
    why: str
    seconds: float = 0.0


def ensure(framework: str, say: Say, *, root: Path = STUDY) -> Installed:
    """Return the interpreter of a framework; its venv is made on first use, and anew if the pins have changed.

    ``say`` is called with what pip does, ``root`` is the folder of the venvs. A failure is told in ``Installed.why``.
    """
    calls = PINS[framework]
    if not calls:
        return Installed(framework=framework, python=Path(sys.executable), why="where holdfast is installed")
    venv = (root / framework).absolute()
    python = venv / "bin" / "python"
    ready, recipe = venv / "ready", json.dumps([sys.version, calls])
    if ready.exists() and ready.read_text() == recipe:
        return Installed(framework=framework, python=python, why="made before")
    begin = time.monotonic()
    why = _make(venv, calls, lambda text: say(f"{framework}: {text}"), root / f"{framework}.log")
    seconds = time.monotonic() - begin
    if why:
        return Installed(framework=framework, python=None, why=why, seconds=seconds)
    ready.write_text(recipe)
    return Installed(framework=framework, python=python, why="made now", seconds=seconds)


def _make(venv: Path, calls: Sequence[Sequence[str]], say: Say, log: Path) -> str:
    """Make a venv; return why it cannot be made, or an empty text."""
    say(f"installing {' '.join(part for call in calls for part in call if '==' in part)}")
    try:
        venv.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
    except OSError as e:
        return f"{venv.parent} cannot be made: {e.strerror or e}"
    commands = [[sys.executable, "-m", "venv", "--clear", str(venv)]]
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--retries", "2"]
    for command in [*commands, *([*pip, *call] for call in calls)]:
        try:
            lines = _run(command, say, log)
        except OSError as e:
            return f"{command[0]} cannot be started: {e.strerror or e}"
        if lines is not None:
            return f"{_reason(lines)} (see {log})"
    return ""


def _run(command: Sequence[str], say: Say, log: Path) -> list[str] | None:
    """Run a command; return its output if it failed, else None. Progress of pip is told to ``say``."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    lines = []
    with (
        log.open("a") as file,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                file.write(line)
                lines.append(line.strip())
                if line.startswith(("Collecting", "Installing")):
                    say(line.strip().partition(" (from")[0])
        except BaseException:
            process.kill()  # a study that was interrupted installs no more
            raise
    return lines if process.returncode else None


def _reason(lines: Sequence[str]) -> str:
    """Return the most telling line of pip's output: the last that it calls an error.

    >>> _reason(["Collecting x", "ERROR: No matching distribution found for x==9", "[notice] a new pip"])
    'No matching distribution found for x==9'
    """
    errors = [line for line in lines if line.upper().startswith("ERROR")]
    said = errors[-1].partition(":")[2].strip() if errors else next((line for line in reversed(lines) if line), "")
    return said or "pip failed without a word"


if __name__ == "__main__":
    for name in PINS:
        found = ensure(name, print)
        print(f"{name}: {found.why}")
