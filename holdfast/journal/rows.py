"""Rows of the journal: their values, their order, and the file of JSON lines that holds them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.errors import UsageError
from holdfast.journal import NAME as NAME
from holdfast.words import a_kind

Row = dict[str, Any]
OWN = ("step", "after", "time")  # keys that are not values
FACTS = ("loss", "epoch", "lr", "grad_norm", "seconds", "tokens", "workers")  # of a committed step, in its row


def key_of(row: Mapping[str, Any]) -> tuple[int, bool]:
    """Return a row's place in the journal. What is logged after a loop comes after the row of the loop's last step.

    >>> key_of({"step": 9}) < key_of({"step": 9, "after": True}) < key_of({"step": 10})
    True
    """
    return int(row["step"]), bool(row.get("after"))


def plain(values: Mapping[str, Any]) -> Row:
    """Return values as JSON has them. Tensors and NumPy's numbers of one element are numbers; NaN is None.

    Raises ``UsageError`` for names that are no text, and for values that JSON does not have.

    >>> plain({"accuracy": torch.tensor(0.5), "lost": float("inf")})
    {'accuracy': 0.5, 'lost': None}
    """
    if not isinstance(values, Mapping):
        raise UsageError(f"{a_kind(values)} cannot be logged", hint="a dictionary, as in {'accuracy': 0.9}")
    if names := [name for name in values if not isinstance(name, str)]:
        raise UsageError(f"{names[0]!r} is no name of a logged value", hint="as in {'accuracy': 0.9}")
    if names := [name for name in OWN[1:] if name in values]:
        raise UsageError(f"'{names[0]}' is what the journal itself notes in each row", hint="choose another name")
    try:
        return {name: _plain(name, value) for name, value in values.items()}
    except RecursionError:
        raise UsageError("a value that contains itself cannot be logged", hint="a number, or text") from None


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray | np.generic) and np.prod(value.shape, dtype=np.int64) == 1:
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(f"{name}.{key}", item) for key, item in value.items()}
    raise UsageError(f"'{name}' is {a_kind(value)}, which cannot be logged", hint="a number, or text")


def read(path: Path) -> list[Row]:
    """Return the rows of a file, in order; none if there is no file. What is no row, such as half a line, is left out.

    Raises ``OSError``.
    """
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    rows: dict[tuple[int, bool], Row] = {}
    for line in lines:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            row = json.loads(line)
            rows.setdefault(key_of(row), row)
    return [rows[key] for key in sorted(rows)]


def before(rows: Iterable[Row], step: int) -> list[Row]:
    """Return the rows of steps that are not trained again by a run that goes on at ``step``.

    >>> before([{"step": 2}, {"step": 2, "after": True}, {"step": 3}], 3)
    [{'step': 2}, {'step': 2, 'after': True}]
    """
    return [row for row in rows if row["step"] < step]


def replace(path: Path, rows: Sequence[Row]) -> int:
    """Write a file with these rows in place of the one that is there; return a descriptor to append to it.

    A worker that still has the old file open writes into one that nobody sees any more. Raises ``OSError``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(6)}.unfinished")
    file = os.open(unfinished, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        _write(file, b"".join(line(row) for row in rows))
        os.fsync(file)
        unfinished.replace(path)
    except BaseException:
        os.close(file)
        unfinished.unlink(missing_ok=True)
        raise
    return file


def append(file: int, row: Row) -> None:
    """Append a row to a file that ``replace`` has opened. Raises ``OSError``."""
    _write(file, line(row))


def line(row: Row) -> bytes:
    """Return a row as a line."""
    return json.dumps(row).encode() + b"\n"


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
