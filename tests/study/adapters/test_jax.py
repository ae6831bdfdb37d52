"""JAX, in its own interpreter."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from holdfast.study.adapters.base import EVERY_RANK, RANK_ZERO
from holdfast.study.process import INSIDE
from tests.study.adapters import conformance
from tests.study.conftest import Start, interpreter_of

SAVE_AND_TRAIN_ON = """
import runpy, sys
from pathlib import Path
runpy.run_path(sys.argv[1])["know_holdfast"]()
from holdfast.study.adapters import find
training = find("jax").make([("weight", (1000, 2000)), ("bias", (1000,))], 0)
training.step()
before = training.digests()
wait = training.save(sys.argv[2], Path(sys.argv[3]))
for _ in range(5):
    training.step()
wait()
after = training.digests()
assert all(after[name] != before[name] for name in before)
training.load(sys.argv[2], Path(sys.argv[3]))
assert training.digests() == before
"""


def test_it_saves_and_loads(start: Start, tmp_path: Path) -> None:
    conformance.check_saves(start("jax"), tmp_path)


@pytest.mark.timeout(300)  # every process compiles anew
def test_its_lesson_restarts(start: Start, tmp_path: Path) -> None:
    conformance.check_lesson(lambda: start("jax"), tmp_path)


@pytest.mark.parametrize("form", ["orbax", "orbax raw"])
def test_a_save_in_the_background_holds_what_was_there_when_it_began(tmp_path: Path, form: str) -> None:
    """Steps are given the state's buffers to write into, while Orbax still reads them."""
    command = [interpreter_of("jax"), "-c", SAVE_AND_TRAIN_ON, INSIDE, form, tmp_path / "state"]
    subprocess.run(command, check=True, env={"JAX_PLATFORMS": "cpu"})


@pytest.mark.parametrize(("strategy", "found"), [(RANK_ZERO, "state"), (EVERY_RANK, "rank-0")])
def test_a_save_by_ranks_is_complete_when_it_returns(start: Start, tmp_path: Path, strategy: str, found: str) -> None:
    """Although Orbax's call is not."""
    process = start("jax")
    process.ask("make", shapes=conformance.SHAPES, seed=0)
    expected = process.ask("versions_of")["2"]
    process.ask("save_ranked", strategy=strategy, folder=str(tmp_path), rank=0, ranks=1)
    (tmp_path / found).rename(tmp_path / "state")
    assert process.ask("look", form="orbax", folder=str(tmp_path)) == {"error": None, "digests": expected}
