"""Tests against the frameworks themselves, in an interpreter of their own that ``make test-formats`` sets up."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".bench" / "formats" / "bin" / "python"


@pytest.fixture(scope="session")
def formats_python() -> Path:
    """The interpreter with DeepSpeed, transformers and Megatron."""
    if not PYTHON.exists():
        pytest.skip("DeepSpeed, transformers and Megatron are not installed here: make test-formats installs them")
    return PYTHON


@pytest.fixture(scope="session")
def run_formats(formats_python: Path) -> Callable[..., str]:
    """Runs a script with that interpreter; what it printed is shown if it fails."""

    def run(script: Path, *arguments: str | Path, timeout: float = 300) -> str:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        command = [str(formats_python), str(script), *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
        assert done.returncode == 0, f"{script.name} failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return done.stdout

    return run
