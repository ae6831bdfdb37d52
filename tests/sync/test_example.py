"""The example of a loop of one's own does what its text says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"


def test_two_processes_learn_and_seldom_talk() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    found = re.search(r"([\d.]+)% of the test digits right; (\d+)% of the steps without a word", done.stdout)
    assert found is not None, done.stdout
    assert float(found[1]) > 80
    assert 75 <= int(found[2]) <= 95
