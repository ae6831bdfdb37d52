"""How far a training is, on a real terminal: what a user sees there in the end, line by line."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.warm import Command, Script

COLUMNS = 100
TRAIN = """
import os, torch, holdfast
from torch.utils.data import TensorDataset
torch.manual_seed(0)
data = TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
run = holdfast.Run(layers=torch.nn.Linear(2, 1), loss=torch.nn.functional.mse_loss, data=data, global_batch=4,
    micro_batch=2, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
for step in run.steps(3, progress=True if "ALONE" in os.environ else None):
    if step.is_first_worker: print("mine", step.number)
    if "BAD" in os.environ: run.log(3)
"""


class Terminal:
    """A pseudo-terminal, and all that was written to it."""

    def __init__(self, ours: int, path: str) -> None:
        self.path = path
        self.written = ""
        self._ours = ours
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        found = b""
        while True:
            try:
                part = os.read(self._ours, 2**16)
            except OSError:  # EIO: nobody has it open any more
                part = b""
            if not part:
                break
            found += part
        self.written = found.decode()

    def close(self) -> None:
        self._reader.join(60)
        os.close(self._ours)

    def screen(self) -> list[str]:
        """Return the lines that are left on it."""
        lines, row, column = [""], 0, 0
        for part in re.findall(r"\x1b\[\??[\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", self.written):
            if part == "\r":
                column = 0
            elif part == "\n":
                row += 1
                lines += [""] * (row == len(lines))
            elif part == "\x1b[2K":
                lines[row] = ""
            elif part.startswith("\x1b") and part.endswith("A"):
                row -= int(part[2:-1] or "1")
            elif not part.startswith("\x1b"):  # colours, and whether there is a cursor
                lines[row] = lines[row].ljust(column)[:column] + part + lines[row][column + len(part) :]
                column += len(part)
        return [line.rstrip() for line in lines if line.strip()]


@contextmanager
def terminal(folder: Path) -> Iterator[Terminal]:
    """A terminal that the next command in a folder writes to."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    for stream in ("out", "err"):
        (folder / f"command.{stream}").symlink_to(os.ttyname(theirs))
    made = Terminal(ours, os.ttyname(theirs))
    try:
        yield made
    finally:
        os.close(theirs)
        made.close()


def shown(folder: Path, words: list[str], code: int, **environment: str) -> Terminal:
    """Start ``holdfast run``, or a script of one process if there are no words, and return its terminal."""
    (folder / "train.py").write_text(TRAIN)
    with terminal(folder) as made:
        environment = {"TERM": "xterm", **environment}
        kind = Command if words else Script
        assert kind(*words, "train.py", folder=folder, **environment).wait(120) == code
    return made


MINE = [f"mine {number}" for number in range(3)]


@pytest.mark.parametrize("words", [[], ["--no-progress"]], ids=["bar", "none"])
def test_the_bar_of_holdfast_run(tmp_path: Path, words: list[str]) -> None:
    """It is below the workers' lines while they train, and gone at the end."""
    found = shown(tmp_path, ["run", *words], 0)
    assert ("step 1/3, loss" in found.written) is (not words)
    assert found.screen() == [f"[0.0] {line}" for line in MINE]


def test_an_error_has_a_line_of_its_own(tmp_path: Path) -> None:
    found = shown(tmp_path, ["run"], 2, BAD="1")
    assert found.screen()[0] == "[0.0] mine 0"
    (said,) = [line for line in found.screen() if "cannot be logged" in line]
    assert said.startswith("holdfast: ")
    assert "step 1/3" not in "\n".join(found.screen())


def test_the_bar_of_a_script_of_one_process(tmp_path: Path) -> None:
    """The script's lines are above it, whole, and the last picture stays."""
    *lines, bar = shown(tmp_path, [], 0, ALONE="1").screen()
    assert lines == MINE
    assert "step 3/3, loss" in bar
