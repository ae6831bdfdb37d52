"""Printing that stops nobody: a terminal may take no lines for a while, or for ever."""

from __future__ import annotations

import os
import queue
import select
import threading
from types import TracebackType
from typing import TextIO

LINES = 10_000  # that wait to be printed at most: minutes of a talkative script, and a few megabytes
LAST_SECONDS = 2.0  # at the end, for the lines that still wait: a terminal that takes lines needs milliseconds
ERASE = "\r\x1b[2K"  # takes away the line that the cursor is in
RENEW = "\0"  # no line, but the status anew


class Printer:
    """Prints lines on a stream from a thread of its own.

    A terminal that is paused (Ctrl-S), a pager, or an ssh connection that hangs makes ``print`` wait. An agent that
    waits sends no heartbeats, and its machine would count as lost. Here the lines wait instead. When ``LINES`` of
    them do, further ones are left out and counted; the workers' logs have them. Once the terminal is gone, nothing is
    printed any more.

    >>> import io
    >>> paper = io.StringIO()
    >>> with Printer(paper) as say:
    ...     say("saved")
    >>> paper.getvalue()
    'saved\\n'
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(LINES)
        self._left_out = 0  # lines so far
        self._told = 0  # of those, on the stream
        self._over = False
        self._status = ""  # the line at the bottom
        self._shown = False  # whether there is one on the terminal
        self._thread = threading.Thread(target=self._print, name="holdfast-printer", daemon=True)
        self._thread.start()

    @property
    def columns(self) -> int:
        """How wide the terminal is; 0 if the stream is none."""
        try:
            return os.get_terminal_size(self._stream.fileno()).columns if self._stream.isatty() else 0
        except (OSError, ValueError):
            return 0

    def status(self, text: str) -> None:
        """Keep a line at the bottom of the terminal, below all others; "" takes it away."""
        self._status = text
        if self._lines.empty():
            self(RENEW)

    def __call__(self, text: str) -> None:
        """Print a line, now or later."""
        try:
            self._lines.put_nowait(text)
        except queue.Full:
            self._left_out += 1

    def __enter__(self) -> Printer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Print the lines that still wait, for at most ``LAST_SECONDS``."""
        self._status = ""
        if self._shown:
            self(RENEW)
        self._over = True
        try:
            self._lines.put_nowait(None)
        except queue.Full:
            pass  # the thread looks whether this is the end after each line
        self._thread.join(LAST_SECONDS)

    def _print(self) -> None:
        try:
            while not (self._over and self._lines.empty()) and (text := self._lines.get()) is not None:
                if left_out := self._left_out - self._told:
                    self._told += left_out
                    self._write(f"holdfast: {left_out} lines are left out here, because nobody took them")
                self._write(text)
        except OSError:  # the terminal or the reader of a pipe is gone
            while self._lines.get() is not None:
                pass

    def _write(self, line: str) -> None:
        """Write a line, and the status below it.

        It goes past Python's buffer: an interpreter that ends would wait for the buffer's lock.
        """
        status = self._status
        text = (ERASE if self._shown else "") + ("" if line is RENEW else line + "\n") + status
        self._shown = bool(status)
        try:
            number = self._stream.fileno()
        except OSError:  # no file, as in tests
            self._stream.write(text)
            return
        data = memoryview(text.encode(errors="backslashreplace"))
        while data:
            try:
                data = data[os.write(number, data) :]
            except BlockingIOError:  # a terminal that another program has set to not block
                select.select([], [number], [])
