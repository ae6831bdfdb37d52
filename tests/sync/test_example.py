"""The example of a loop of one's own does what its text says."""

from __future__ import annotations

import io
import re
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from tests.sync.processes import on_processes

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"


def test_two_processes_learn_and_seldom_talk() -> None:
    """In forked processes that have their group already: torchrun takes ten times as long to start."""

    def work(rank: int) -> str:
        sys.path.insert(0, str(EXAMPLE.parent))
        with redirect_stdout(io.StringIO()) as said, mock.patch.object(dist, "init_process_group"):
            runpy.run_path(str(EXAMPLE), run_name="__main__")
        return said.getvalue()

    first, second = on_processes(2, work, seconds=100)
    found = re.search(r"([\d.]+)% of the test digits right; (\d+)% of the steps without a word", first)
    assert found is not None, first
    assert float(found[1]) > 80
    assert 75 <= int(found[2]) <= 95
    assert second == "", "only the first one speaks"
