"""The document is right: its reader, which knows nothing of ours, reads what we write, byte for byte."""

from __future__ import annotations

import itertools
import json
import math
import re
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
import xxhash
from torch import nn

from holdfast.checkpoint import disk, index, per_rank, save, series
from holdfast.checkpoint.pieces import Box, Catalogue, DataFile, Piece, Ref, Stored, TensorEntry, row_major
from holdfast.checkpoint.safetensors_writer import DTYPES, PAIRS, array_of, bytes_of, write_safetensors
from holdfast.checkpoint.tensor_reader import read_tensor
from tests.checkpoint.adapters import shared, tree_at
from tests.checkpoint.cases import blocks, data_of

DOCUMENT = Path(__file__).parents[2] / "docs" / "checkpoint-format.md"
Read = Callable[[Path], Any]
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


@pytest.fixture(scope="module")
def read() -> Read:
    """The function in the document."""
    [code] = re.findall(r"## A reader\n\n```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert "holdfast" not in code
    names: dict[str, Any] = {}
    exec(code, names)
    return names["read"]


class Together:
    """Workers that are threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._texts: list[bytes] = [b""] * size
        self._barrier = threading.Barrier(size)

    def rank_of(self, rank: int) -> Any:
        outer = self

        class Rank:
            size = outer.size

            def exchange(self, text: bytes) -> list[bytes]:
                outer._texts[rank] = text
                outer._barrier.wait(20)
                found = [*outer._texts]
                outer._barrier.wait(20)
                return found

        Rank.rank = rank  # type: ignore[attr-defined]
        return Rank()


def save_together(folder: Path, trees: list[dict[str, Any]]) -> None:
    group = Together(len(trees))
    threads = [
        threading.Thread(target=save, args=(folder, tree), kwargs={"ranks": group.rank_of(rank)})
        for rank, tree in enumerate(trees)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def tensors() -> dict[str, torch.Tensor]:
    numbers = np.random.default_rng(0)
    found = {
        str(dtype): torch.from_numpy(numbers.integers(0, 2, (3, 5 * dtype.itemsize), dtype=np.uint8)).view(dtype)
        for dtype in (*DTYPES, *PAIRS)
    }
    return {**found, "scalar": torch.tensor(2.5), "empty": torch.zeros(3, 0, 2), "a/b%": torch.arange(6).view(2, 3).t()}


VALUES = {
    "tuple": (1, (2, [3])),
    "floats": [math.inf, -math.inf, 0.1, 1e-310],
    "items": {0: "a", (1, "b"): None, "$float": 1},
    "bytes": b"\x00\xff",
    "large": 3**80,
    "text": "é\n",
    "truth": True,
}


def same(found: Any, tensor: torch.Tensor) -> bool:
    dtype, shape, content = found
    return (
        f"torch.{dtype}" == str(tensor.dtype)
        and shape == [*tensor.shape]
        and content == bytes_of(tensor.clone(memory_format=torch.contiguous_format)).tobytes()
    )


def test_the_reader_is_as_short_as_it_says(read: Read) -> None:
    [code] = re.findall(r"## A reader\n\n```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    lines = [
        line for line in code.splitlines() if line.strip() and not line.startswith(("import", "SIZES", " " * 9 + '"'))
    ]
    assert len(lines) <= 42


def test_values_and_every_dtype(tmp_path: Path, read: Read) -> None:
    saved = tensors()
    save(tmp_path, {"tensors": saved, **VALUES, "nan": math.nan, "dtype": torch.bfloat16})
    tree = read(tmp_path)
    assert {key: tree[key] for key in VALUES} == VALUES
    assert math.isnan(tree["nan"])
    assert tree["dtype"] == "dtype bfloat16"
    assert all(same(tree["tensors"][name], tensor) for name, tensor in saved.items())


def test_pieces_in_several_files(tmp_path: Path, read: Read) -> None:
    model = nn.Sequential(nn.Linear(30, 50), nn.Linear(50, 7))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(30)).sum().backward()
    optimizer.step()
    save_together(tmp_path, [{"model": model, "optimizer": optimizer, "cube": torch.arange(210).view(5, 6, 7)}] * 3)
    assert len(data_of(tmp_path)) == 3
    tree = read(tmp_path)
    assert all(same(tree["model"][name], p) for name, p in model.named_parameters())
    for name, p in model.named_parameters():
        assert all(same(tree["optimizer"]["state"][name][slot], value) for slot, value in optimizer.state[p].items())
    assert tree["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)
    assert same(tree["cube"], torch.arange(210).view(5, 6, 7))


def test_boxes_of_all_kinds(tmp_path: Path, read: Read) -> None:
    cube = torch.arange(210).view(5, 6, 7)
    identity = index.new_id()
    file = index.data_name(identity, 0)
    corners = itertools.product(((3, 2), (0, 3)), ((0, 4), (4, 2)), ((2, 5), (0, 2)))
    boxes = [Box(offset=tuple(o for o, _ in c), shape=tuple(n for _, n in c)) for c in corners]
    written = write_safetensors(tmp_path / file, [array_of(str(box.offset), cube[box.slices()]) for box in boxes])
    stored = [
        Stored(
            file=file,
            offset=written.offsets[str(box.offset)],
            dtype=cube.dtype,
            shape=box.shape,
            strides=row_major(box.shape),
        )
        for box in boxes
    ]
    pieces = tuple(Piece(box=box, stored=one) for box, one in zip(boxes, stored, strict=True))
    catalogue = Catalogue(
        format="holdfast",
        root=tmp_path,
        tensors={"cube": TensorEntry(shape=(5, 6, 7), dtype=cube.dtype, pieces=pieces)},
        tree={"cube": Ref(name="cube")},
        files={file: DataFile(bytes=written.bytes, checksums=written.checksums)},
    )
    index.commit(catalogue, identity)
    assert same(read(tmp_path)["cube"], cube)
    assert torch.equal(read_tensor(index.open(tmp_path), "cube"), cube)


def test_shared_files_and_digests(tmp_path: Path, read: Read) -> None:
    for step in (1, 2):
        save(series.folder_of(tmp_path, step), tree_at(step))
    assert len(shared(tmp_path)) == 1
    folder = series.folder_of(tmp_path, 2)
    said = json.loads((folder / "index.json").read_bytes())["index"]
    assert said["version"] == 2
    model = tree_at(2)["model"]
    tree = read(folder)
    assert all(same(tree["model"][name], p) for name, p in model.named_parameters())
    weight = model[0].base.weight.detach()
    entry = said["digests"]["model/0.base.weight"]
    assert (entry["dtype"], entry["shape"]) == ("float32", [*weight.shape])
    for offset, shape, digest in entry["boxes"]:
        box = weight[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
        assert xxhash.xxh3_128_hexdigest(box.contiguous().numpy().tobytes()) == digest
    document = DOCUMENT.read_text()
    assert all(f'"{key}"' in document for key in entry)
    shared(tmp_path)[0].write_bytes(b"")
    with pytest.raises(AssertionError, match="damaged"):
        read(folder)


def test_values_of_ranks(tmp_path: Path, read: Read) -> None:
    save_together(tmp_path, [{"x": per_rank([rank, torch.tensor(rank)])} for rank in range(2)])
    values = read(tmp_path)["x"]["__per_rank__"]
    assert [values[rank][0] for rank in "01"] == [0, 1]
    assert same(values["1"][1], torch.tensor(1))


def test_many_blocks(tmp_path: Path, read: Read) -> None:
    with blocks():
        save(tmp_path, {"w": torch.arange(30_000)})
    assert same(read(tmp_path)["w"], torch.arange(30_000))


def test_the_reader_refuses_what_is_damaged(tmp_path: Path, read: Read) -> None:
    save(tmp_path, {"w": torch.arange(3000)})
    for path in tmp_path.iterdir():
        for position in (0, 20, 30, 36, path.stat().st_size - 1):
            content = bytearray(path.read_bytes())
            content[position] ^= 4
            path.write_bytes(content)
            with pytest.raises(AssertionError, match="damaged"):
                read(tmp_path)
            content[position] ^= 4
            path.write_bytes(content)
    read(tmp_path)


def test_data_files_are_safetensors(tmp_path: Path) -> None:
    saved = tensors()
    save_together(tmp_path, [{**saved, "w": torch.arange(6000).view(6, 1000)}] * 2)
    said = json.loads((tmp_path / "index.json").read_bytes())["index"]
    seen = 0
    for number, path in enumerate(data_of(tmp_path)):
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        assert (8 + length) % disk.ALIGN == 0
        header = json.loads(content[8 : 8 + length])
        with safetensors.safe_open(path, "pt") as file:
            assert {*file.keys()} == {*header}
        for name, tensor in said["tensors"].items():
            for where, start, offset, box in tensor["pieces"]:
                if where != number:
                    continue
                called = name if box == tensor["shape"] else f"{name}@{','.join(map(str, offset))}"
                begin, _ = header[called]["data_offsets"]
                assert start == 8 + length + begin
                pair = [2] if tensor["dtype"] in ("complex128", "complex32") else []
                assert header[called]["shape"] == box + pair
                seen += 1
    assert seen > len(saved)


def test_every_key_is_explained(tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.ones(2), "step": 7})
    text = (tmp_path / "index.json").read_bytes()
    assert text[:9] == b'{"xxh3":"'
    assert text[25:35] == b'","index":'
    assert text[9:25].decode() == xxhash.xxh3_64_hexdigest(text[35:-1])
    said = json.loads(text)["index"]
    document = DOCUMENT.read_text()
    for key in (*said, "digests", *said["details"], *said["files"][0], *said["tensors"]["w"]):
        assert f"`{key}`" in document, key
    for dtype in (*DTYPES, *PAIRS):
        assert str(dtype).removeprefix("torch.") in document
    assert str(disk.BLOCK) in document
    assert [*said["tensors"]["w"]] == ["dtype", "shape", "pieces"]
