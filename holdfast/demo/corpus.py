"""A data set without a download: the source of Python's own standard library, in windows of bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

CORPUS_BYTES = 1_500_000  # enough that no demo sees a window twice, and read in no time


def read_standard_library(limit: int = CORPUS_BYTES) -> bytes:
    """Return the first ``limit`` bytes of the standard library's modules, in alphabetical order.

    >>> len(read_standard_library(limit=1000))
    1000
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    return join_until(limit, (path.read_bytes() for path in sorted(folder.glob("*.py"))))


def join_until(limit: int, texts: Iterable[bytes]) -> bytes:
    """Return the first ``limit`` bytes of joined texts; texts after the cut are not even read.

    >>> join_until(5, [b"abc", b"defg", b"h"])
    b'abcde'
    """
    joined = bytearray()
    for text in texts:
        joined += text
        if len(joined) >= limit:
            break
    return bytes(joined[:limit])


class Windows:
    """A map-style data set. Item i is the i-th window of the text, and the same window one byte later.

    >>> data = Windows(b"abcdefg", window=3)
    >>> len(data), [bytes(t.tolist()) for t in data[1]]
    (2, [b'def', b'efg'])
    """

    def __init__(self, text: bytes, *, window: int) -> None:
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._window = window

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // self._window

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        first = i * self._window
        piece = self._bytes[first : first + self._window + 1].long()
        return piece[:-1], piece[1:]


def standard_library(*, window: int, held_out: float = 0.05) -> tuple[Windows, Windows]:
    """Return windows to train on, and windows of the last part of the text for evaluation.

    ``window`` is in bytes; ``held_out`` is the share of the text that is held out.
    """
    text = read_standard_library()
    cut = int(len(text) * (1 - held_out))
    return Windows(text[:cut], window=window), Windows(text[cut:], window=window)
