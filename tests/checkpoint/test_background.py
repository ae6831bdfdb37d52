"""The end of a process that still writes in the background."""

from __future__ import annotations

import subprocess
import sys

HANGS = "threading.Event().wait()"
WRITES = "\nfor _ in range(8):\n    time.sleep(0.25)\n    os.write(1, b'more ')"
SCRIPT = """
import os, threading, time
from holdfast.checkpoint import background
background.LONGEST_SECONDS, background.LOOK_SECONDS = 1.0, 0.1
def work():
    {work}
background.Work(work, "saving runs/gpt")
"""


def end_of(work: str) -> subprocess.CompletedProcess[str]:
    script = SCRIPT.format(work=work.replace("\n", "\n    "))
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)


def test_a_disk_that_hangs_does_not_keep_the_process() -> None:
    ended = end_of(HANGS)
    assert ended.returncode == 1
    assert "saving runs/gpt hangs" in ended.stderr


def test_work_that_goes_on_is_waited_for() -> None:
    ended = end_of(WRITES)
    assert ended.returncode == 0
    assert ended.stdout.split() == ["more"] * 8, "it has taken twice the limit, but never rested so long"
    assert not ended.stderr
