"""How far a training is: a bar on a real terminal, lines elsewhere, nothing unless asked for."""

from __future__ import annotations

import io
import os
import pty
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from holdfast.bar import LINE_SECONDS, Bar, drawn, words
from holdfast.cli.display import Display
from holdfast.cli.printer import Printer
from holdfast.errors import UsageError
from holdfast.run.run import Run
from tests.harness import launch

FACTS = {"step": 120, "total": 1000, "loss": 2.31, "lr": 3e-4, "workers": 4, "rate": 0.5}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    for name in ("HOLDFAST_WORKER", "HOLDFAST_FAULTS", "HOLDFAST_EVENTS", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    data = TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
    optimizer = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    return Run(
        layers=nn.Linear(2, 1),
        loss=nn.functional.mse_loss,
        data=data,
        optimizer=optimizer,
        global_batch=4,
        micro_batch=2,
    )


def all_of(terminal: int) -> str:
    """All that was written to a terminal, whose other side is closed: one read may give only the begin."""
    found = b""
    with os.fdopen(terminal, "rb", buffering=0) as file:
        while True:
            try:
                part = file.read(2**16)
            except OSError:  # EIO: that was all
                part = b""
            if not part:
                return found.decode()
            found += part


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_a_script_of_one_process_shows_nothing_unless_asked(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    assert len([*run.steps(3)]) == 3
    assert capfd.readouterr() == ("", "")
    for step in run.steps(5, progress=True):
        print("mine", step.number)
    out, err = capfd.readouterr()
    assert out == "mine 3\nmine 4\n"
    lines = err.splitlines()
    assert len(lines) == 2, "the first one, and the last"
    assert lines[-1].startswith("holdfast: step 5/5, loss ")


def test_progress_is_asked_for_by_true_or_false(run: Run) -> None:
    with pytest.raises(UsageError, match="progress='no' is neither True nor False"):
        next(run.steps(3, progress="no"))  # type: ignore[arg-type]


def test_a_bar_on_a_terminal_leaves_the_scripts_lines_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patched:
        patched.setenv("TERM", "xterm")
        patched.setattr(sys, "stderr", terminal)
        patched.setattr(sys, "stdout", terminal)
        bar = Bar()
        bar.show(FACTS)
        print("mine")
        bar.show({**FACTS, "step": 121})
        bar.close()
    shown = plain(all_of(ours))
    assert re.search(r"(^|[\r\n])mine *\r?\n", shown)
    assert "step 121/1,000" in shown


def test_a_narrow_terminal_gets_one_line() -> None:
    for width in (20, 40, 80, 200):
        shown = plain(drawn(FACTS, width))
        assert "\n" not in shown
        assert len(shown) <= width
    assert plain(drawn(FACTS, 200)).rstrip().endswith(", ".join(words(FACTS)))


def test_below_the_workers_lines_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal, Printer(terminal) as say:
        monkeypatch.setattr(Printer, "columns", 100)
        display = Display(say)
        say("[0.0] one")
        display.show(FACTS)
        say("[0.0] two")
    shown = all_of(ours)
    lines = [plain(line.split("\x1b[2K")[-1]).strip() for line in shown.split("\n")]
    assert lines == ["[0.0] one", "[0.0] two", ""], "each line is whole, and at the end the bar is gone"


def test_a_line_now_and_then_in_a_pipe() -> None:
    now = [0.0]
    paper = io.StringIO()
    with Printer(paper) as say:
        display = Display(say, clock=lambda: now[0])
        for seconds in (1.0, 2.0, LINE_SECONDS, LINE_SECONDS + 1, 2 * LINE_SECONDS):
            now[0] = seconds
            display.show(FACTS)
    assert paper.getvalue().splitlines() == [f"holdfast: {', '.join(words(FACTS))}"] * 2


def test_the_first_worker_tells_its_agent(tmp_path: Path) -> None:
    told: list[dict[str, object]] = []

    async def watch(agent: object) -> None:
        agent._show_progress = told.append  # type: ignore[attr-defined]

    result = launch(tmp_path, workers=2, meddle=watch, environment={"STEPS": "4"})
    assert result.code == 0
    assert told
    assert told[-1].items() >= {"step": 4, "total": 4, "loss": result.losses[-1], "workers": 2}.items()
