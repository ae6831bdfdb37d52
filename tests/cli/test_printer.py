"""Printing from a thread: nobody waits for a terminal."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from holdfast.cli import printer
from holdfast.cli.printer import Printer
from holdfast.cluster.events import read_events
from tests.warm import Command

CHATTY = """
import sys, time
import torch, holdfast
from torch import nn

class Zeros:
    def __len__(self): return 64
    def __getitem__(self, i): return torch.zeros(4), torch.zeros(1)

run = holdfast.Run(layers=nn.Sequential(nn.Linear(4, 1)), loss=nn.functional.mse_loss, data=Zeros(), global_batch=8,
                   micro_batch=2, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
for step in run.steps(20):
    print("x" * 9999)  # more than a pipe holds, after a few steps
    time.sleep(0.2)
"""


def test_nobody_reads(tmp_path: Path) -> None:
    """Heartbeats go on while the output is not taken: the run ends as it should, and not for want of machines."""
    (tmp_path / "script.py").write_text(CHATTY)
    os.mkfifo(tmp_path / "command.out")
    unread = os.open(tmp_path / "command.out", os.O_RDWR)
    try:
        words = ["run", "-n", "2", "--heartbeat-timeout", "1.5", "--patience", "0.5", "--log-dir", "logs", "script.py"]
        code = Command(*words, folder=tmp_path).wait(120.0)
    finally:
        os.close(unread)
    events = list(read_events(tmp_path / "logs" / "events.jsonl"))
    assert code == 0, (tmp_path / "command.err").read_text()
    assert {e["step"] for e in events if e["event"] == "commit"} == set(range(20))
    assert [e["cause"] for e in events if e["event"] == "host-gone"] == ["it is done"]


def test_lines_come_in_order(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as file, Printer(file) as say:
        for number in range(5000):
            say(str(number))
    assert (tmp_path / "out").read_text().split() == [str(number) for number in range(5000)]


def test_lines_that_nobody_takes_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printer, "LINES", 10)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)  # the worst kind of terminal
    while True:
        try:
            os.write(writing, b"\n" * 4096)
        except BlockingIOError:
            break
    read: list[bytes] = []

    def take_everything() -> None:
        with open(reading, "rb") as file:
            read.extend(line.strip() for line in file if line.strip())

    reader = threading.Thread(target=take_everything)
    with open(writing, "w") as stream:
        with Printer(stream) as say:
            for number in range(100):
                say(str(number))  # it waits for nobody: this is the end of the loop
            reader.start()
        say._thread.join(5.0)
    reader.join(5.0)
    assert not reader.is_alive()
    shown = [int(line) for line in read if b"left out" not in line]
    told = [int(line.split()[1]) for line in read if b"left out" in line]
    assert 10 <= len(shown) <= 11
    assert shown == list(range(len(shown)))
    assert len(shown) + sum(told) == 100


def test_the_terminal_is_gone() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stream, Printer(stream) as say:
        for _ in range(3):
            say("nobody hears it")
        ending = say._thread
    assert not ending.is_alive()


def test_the_end_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printer, "LAST_SECONDS", 0.1)
    reading, writing = os.pipe()
    stream = open(writing, "w")  # noqa: SIM115 - closed below, when its printer is done
    with Printer(stream) as say:
        say("x" * 1_000_000)  # more than a pipe holds
    assert say._thread.is_alive()
    with open(reading, "rb") as file:
        assert len(file.read(1_000_001)) == 1_000_001
        say._thread.join(5.0)
    stream.close()
    assert not say._thread.is_alive()
