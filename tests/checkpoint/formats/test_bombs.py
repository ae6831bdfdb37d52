"""Pickles that ask for far more memory or time than their size: refused by name, in little memory."""

from __future__ import annotations

import io
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.checkpoint import open_checkpoint
from holdfast.checkpoint.formats.pickled import load
from holdfast.errors import CheckpointError
from tests.checkpoint.bounded import bounded
from tests.checkpoint.formats.test_pickled import Pickler, Storage, write_archive

MEGABYTE = 1 << 20
TEXT = b"X" + struct.pack("<I", 300_000) + b"a" * 300_000
MANY = b"(" + b"K\x01" * 100_000
HEAD = b"\x80\x04"
SAVED = b"X\x05\x00\x00\x00model}X\x05\x00\x00\x00extra"  # begins {"model": {"extra": …}}


def number(value: int) -> bytes:
    data = value.to_bytes(16, "little", signed=True)
    return b"\x8a\x10" + data


def colliding(count: int) -> list[bytes]:
    """Numbers with the same hash, which is the rest of a division by 2**61 - 1."""
    return [number(k * (2**61 - 1) + 7) for k in range(1, count)]


def unhashable(count: int) -> bytes:
    """Keys that are objects whose state cannot be hashed: all of them have one hash."""
    begin = b"cdeepspeed.a\nB\nq\x010}("
    items = (b"h\x01)\x81}X\x01\x00\x00\x00a](J%besbN" % struct.pack("<i", k) for k in range(count))
    return begin + b"".join(items) + b"u"


def array() -> bytes:
    stream = io.BytesIO()
    pickle._Pickler(stream, protocol=2).dump(np.zeros(200_000, dtype=np.uint8))
    return stream.getvalue()[2:-1]


BOMBS: dict[str, bytes] = {
    "copies of a list": MANY + b"lq\x000cbuiltins\nlist\nq\x010(" + b"h\x01h\x00\x85R" * 10_000 + b"l",
    "copies of a tuple": MANY + b"lq\x000ctorch\nSize\nq\x010(" + b"h\x01h\x00\x85R" * 10_000 + b"l",
    "copies of a set": MANY + b"lq\x000cbuiltins\nset\nq\x010(" + b"h\x01h\x00\x85R" * 10_000 + b"l",
    "copies of arguments": MANY + b"tq\x000cdeepspeed.a\nB\nq\x010(" + b"h\x01h\x00\x81" * 10_000 + b"l",
    "a text as a list": TEXT + b"q\x000cbuiltins\nlist\nq\x010(" + b"h\x01h\x00\x85R" * 5000 + b"l",
    "encoded texts": TEXT
    + b"q\x000X\x06\x00\x00\x00latin1q\x020c_codecs\nencode\nq\x010("
    + b"h\x01h\x00h\x02\x86R" * 50_000
    + b"l",
    "encoded texts, in a tensor's clothes": TEXT + b"q\x000X\x06\x00\x00\x00latin1q\x020c_codecs\nencode\nq\x010"
    b"h\x00h\x02\x86q\x030ctorch\nTensor\nq\x040ctorch._tensor\n_rebuild_from_type_v2\nq\x050("
    + b"h\x05(h\x01h\x04h\x03NtR" * 20_000
    + b"l",
    "one list under many names": MANY + b"lq\x000(" + b"h\x00" * 50_000 + b"l",
    "lists that double": b"]q\x000" + b"".join(b"h%ch%c\x86q%c0" % (i, i, i + 1) for i in range(60)) + b"h\x3c",
    "one array under many names": array() + b"q\xf00(" + b"h\xf0" * 100_000 + b"l",
    "objects without a hash": unhashable(20_000),
    "empty sets": b"(" + b"\x8f" * 100_000 + b"l",
    "empty lists": b"(" + b"]" * 100_000 + b"l",
    "keys of long texts": TEXT + b"q\x000" + b"(" + b"h\x00" * 900 + b"tq\x010}(" + b"h\x01h\x00h\x01\x87NN\x87Nu",
    "a key that is walked again and again": b"(" + b"K\x01" * 990 + b"tq\x010}" + b"h\x01Ns" * 250_000,
    "keys of one hash": b"}(" + b"N".join(colliding(40_000)) + b"Nu",
    "keys of one hash, one by one": b"}" + b"Ns".join(colliding(40_000)) + b"Ns",
    "a number without end": b"\x8b" + struct.pack("<i", 500_000) + b"\x7f" * 500_000,
    "a number from a text": b"cbuiltins\nint\n(X" + struct.pack("<I", 500_000) + b"f" * 500_000 + b"K\x10tR",
    "a claim of bytes": b"\x8e" + struct.pack("<Q", 1 << 42) + b"short",
    "a claim of a bytearray": b"\x96" + struct.pack("<Q", 1 << 42) + b"short",
    "a claim of a frame": b"\x95" + struct.pack("<Q", 1 << 42) + b"short",
    "a line without end": b"I" + b"1" * (3 * MEGABYTE),
    "nested without end": b"(" * 10_000 + b"l" * 50_000,
}


def attempt(path: Path) -> str:
    try:
        open_checkpoint(path, format="torch")
    except CheckpointError as error:
        return f"refused: {error}"
    return "opened"


@pytest.mark.parametrize("what", BOMBS)
def test_a_bomb_is_refused_in_little_memory(tmp_path: Path, what: str) -> None:
    """A catalogue is what costs: the tree is copied on the way to it, and nothing is shared in the copy."""
    code = HEAD + b"}" + SAVED + BOMBS[what] + b"ss."
    write_archive(tmp_path / "a.pt", code, {})
    said = bounded(lambda: attempt(tmp_path / "a.pt"), memory=250 * MEGABYTE, seconds=20)
    assert said.startswith("refused: "), said[:300]
    assert "more memory than there is" not in said
    assert str(tmp_path / "a.pt") in said
    assert len(said) < 1000, "one sentence"


def tensors(names: int, *, key: bytes, shape: tuple[int, ...]) -> bytes:
    """One tensor under many names, in a dict under a key."""
    stream = io.BytesIO()
    Pickler(stream, protocol=2).dump((Storage("FloatStorage", "0", 4), 0, shape, (0,) * len(shape), False, {}))
    made = b"ctorch._utils\n_rebuild_tensor_v2\n" + stream.getvalue()[2:-1] + b"Rq\xfe0"
    items = b"".join(b"J%bh\xfe" % struct.pack("<i", k) for k in range(names))
    return made + b"X" + struct.pack("<I", len(key)) + key + b"}(" + items + b"us"


@pytest.mark.parametrize(
    ("code", "match"),
    [
        (tensors(2000, key=b"a" * 500_000, shape=(4,)), "repeats its own parts"),
        (tensors(2, key=b"a" * 5000, shape=(4,)), "a name of"),
        (tensors(100, key=b"a", shape=(4_000_000,)), "claim"),
        (tensors(100_000, key=b"a", shape=(4,)), "repeats its own parts"),
    ],
)
def test_names_and_bytes_of_tensors_are_bounded(tmp_path: Path, code: bytes, match: str) -> None:
    write_archive(tmp_path / "a.pt", HEAD + b"}" + code + b".", {"0": bytes(16)})
    said = bounded(lambda: attempt(tmp_path / "a.pt"), memory=250 * MEGABYTE, seconds=20)
    assert said.startswith("refused: "), said[:300]
    assert match in said


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_honest_pickles_have_what_they_need(tmp_path: Path, protocol: int) -> None:
    """The control: the hungriest values for their size, and an optimizer's many small dicts."""
    values: dict[str, Any] = {
        "empty": [{} for _ in range(10_000)],
        "lists": [[k % 200] for k in range(10_000)],
        "tuples": [(k % 200, 2) for k in range(10_000)],
        "sets": [{k} for k in range(5000)],
        "dict": dict.fromkeys(range(10_000)),
        "truths": [bool(k % 2) for k in range(10_000)],
        "floats": [k / 7 for k in range(10_000)],
        "names": {f"layers.{k}.weight": {"step": k, "betas": (0.9, 0.99)} for k in range(5000)},
        "pairs": {(k, str(k)): k for k in range(5000)},
    }
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(values, protocol))
    assert load(tmp_path / "a.pkl", root=tmp_path) == values


def test_tied_tensors_and_arrays_have_what_they_need(tmp_path: Path) -> None:
    torch.save({"array": np.arange(9000), "tied": [torch.ones(3)] * 1000}, tmp_path / "a.pt")
    assert len(open_checkpoint(tmp_path / "a.pt").tensors) == 1000
