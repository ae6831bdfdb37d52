"""Reading boxes out of pieces, with numpy as the judge."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.checkpoint import disk, tensor_reader
from holdfast.checkpoint.pieces import Box, Catalogue, DataFile, Piece, Shape, Stored, TensorEntry, whole
from holdfast.checkpoint.safetensors_writer import DTYPES, PAIRS, bytes_of
from holdfast.checkpoint.tensor_reader import Want, read_range, read_tensor
from holdfast.errors import CheckpointError
from tests.checkpoint.cases import blocks

Numbers = np.ndarray[Any, np.dtype[np.uint8]]  # of a tensor: its shape, and the bytes of each element
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
examples = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

dtypes = st.sampled_from([*DTYPES, *PAIRS])
shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)


# --- files to read from -------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Store:
    """Files that grow by one array after the other, in any layout."""

    folder: Path
    checked: bool
    files: dict[str, bytearray] = field(repr=False)

    def put(self, draw: st.DrawFn, numbers: Numbers, dtype: torch.dtype) -> Stored:
        name = draw(st.sampled_from(["a.bin", "b.bin"]))
        content = self.files.setdefault(name, bytearray())
        content += bytes(draw(st.integers(0, 40)))
        shape = numbers.shape[:-1]
        memory, view = strided(draw, shape, dtype.itemsize)
        view[...] = numbers
        strides = tuple(s // dtype.itemsize for s in view.strides[:-1])
        stored = Stored(file=name, offset=len(content), dtype=dtype, shape=shape, strides=strides)
        content += memory.tobytes()
        return stored

    def catalogue(self, **entries: TensorEntry) -> Catalogue:
        files = {}
        for name, content in self.files.items():
            (self.folder / name).write_bytes(content)
            data = np.frombuffer(bytes(content), dtype=np.uint8)
            sums = tuple(disk.checksum(data[start : start + disk.BLOCK]) for start in disk.blocks_of(len(data)))
            files[name] = DataFile(bytes=len(content), checksums=sums if self.checked else None)
        return Catalogue(format="test", root=self.folder, tensors=entries, files=files)


def strided(draw: st.DrawFn, shape: Shape, itemsize: int) -> tuple[Numbers, Numbers]:
    """Memory, and an array of a shape in it: its dimensions in any order, with room between its elements."""
    order = draw(st.permutations(range(len(shape))))
    room = [shape[d] + draw(st.sampled_from([0, 0, 0, 1, 3])) for d in order]
    memory = np.full((*room, itemsize), 0xAB, dtype=np.uint8)
    view = memory.transpose(*(order.index(d) for d in range(len(shape))), len(shape))
    return memory, view[tuple(slice(0, n) for n in shape)]


def some(seed: int, shape: Shape, itemsize: int) -> Numbers:
    return np.random.default_rng(seed).integers(0, 256, (*shape, itemsize), dtype=np.uint8)


def tensor_in(draw: st.DrawFn, shape: Shape, dtype: torch.dtype) -> tuple[Numbers, Numbers, torch.Tensor]:
    """A tensor in any layout, with its memory and an array that are the same bytes."""
    memory, view = strided(draw, shape, dtype.itemsize)
    if not memory.size:
        return memory, view, torch.empty(shape, dtype=dtype)
    strides = [s // dtype.itemsize for s in view.strides[:-1]]
    flat = torch.from_numpy(memory.reshape(-1)).view(dtype)
    return memory, view, flat.as_strided(shape, strides)


def tiles(draw: st.DrawFn, box: Box, depth: int = 3) -> list[Box]:
    """Boxes that cover a box, each element once, in any order."""
    if not depth or not box.shape or max(box.shape) < 2 or not draw(st.booleans()):
        return [box]
    dim = draw(st.sampled_from([d for d, n in enumerate(box.shape) if n > 1]))
    cut = draw(st.integers(1, box.shape[dim] - 1))
    halves = []
    for start, length in ((0, cut), (cut, box.shape[dim] - cut)):
        offset, shape = [*box.offset], [*box.shape]
        offset[dim] += start
        shape[dim] = length
        halves += tiles(draw, Box(offset=tuple(offset), shape=tuple(shape)), depth - 1)
    return draw(st.permutations(halves))


def box_in(draw: st.DrawFn, shape: Shape) -> Box:
    offset = tuple(draw(st.integers(0, n)) for n in shape)
    return Box(offset=offset, shape=tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True)))


def pieces_of(draw: st.DrawFn, store: Store, numbers: Numbers, dtype: torch.dtype) -> list[Piece]:
    return [
        Piece(box=box, stored=store.put(draw, numbers[box.slices()], dtype))
        for box in tiles(draw, whole(numbers.shape[:-1]))
    ]


def numbers_of(tensor: torch.Tensor) -> Numbers:
    return bytes_of(tensor).reshape(*tensor.shape, tensor.element_size())


@pytest.fixture(params=["unchecked, tiny blocks", "checked"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    checked = request.param == "checked"
    with blocks(disk.ALIGN if checked else 64):
        yield Store(folder=tmp_path, checked=checked, files={})


# --- properties ---------------------------------------------------------------------------------------------


@given(data=st.data(), shape=shapes, dtype=dtypes, seed=st.integers(0, 99))
@examples
def test_any_box_of_any_pieces_into_any_memory(
    store: Store, data: st.DataObject, shape: Shape, dtype: torch.dtype, seed: int
) -> None:
    store.files.clear()
    logical = some(seed, shape, dtype.itemsize)
    pieces = pieces_of(data.draw, store, logical, dtype)
    for _ in range(data.draw(st.integers(0, 2))):  # later copies, of which nothing may be taken
        box = box_in(data.draw, shape)
        pieces.append(Piece(box=box, stored=store.put(data.draw, some(seed + 1, box.shape, dtype.itemsize), dtype)))
    catalogue = store.catalogue(w=TensorEntry(shape=shape, dtype=dtype, pieces=tuple(pieces)))
    boxes = [box_in(data.draw, shape) for _ in range(2)]
    targets = [tensor_in(data.draw, box.shape, dtype) for box in boxes]
    done: list[int] = []
    wants = [Want(name="w", box=box, out=out) for box, (_, _, out) in zip(boxes, targets, strict=True)]
    tensor_reader.read(catalogue, wants, threads=data.draw(st.sampled_from([1, 3])), progress=done.append)
    for box, (memory, view, _) in zip(boxes, targets, strict=True):
        assert np.array_equal(view, logical[box.slices()])
        view[...] = 0xAB
        assert (memory == 0xAB).all()  # nothing beside the target was touched
    assert sum(done) == sum(box.numel for box in boxes) * dtype.itemsize
    assert np.array_equal(numbers_of(read_tensor(catalogue, "w")), logical)


@given(data=st.data(), shape=shapes, dtype=dtypes)
@examples
def test_any_range_of_the_flattened_tensor(store: Store, data: st.DataObject, shape: Shape, dtype: torch.dtype) -> None:
    store.files.clear()
    logical = some(1, shape, dtype.itemsize)
    pieces = pieces_of(data.draw, store, logical, dtype)
    catalogue = store.catalogue(w=TensorEntry(shape=shape, dtype=dtype, pieces=tuple(pieces)))
    start = data.draw(st.integers(0, math.prod(shape)))
    stop = data.draw(st.integers(start, math.prod(shape)))
    out = np.full((stop - start) * dtype.itemsize, 0xAB, dtype=np.uint8)
    read_range(catalogue, "w", start, stop, out)
    assert np.array_equal(out.reshape(-1, dtype.itemsize), logical.reshape(-1, dtype.itemsize)[start:stop])


CASTS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float8_e4m3fn]


@given(data=st.data(), shape=shapes, stored=st.sampled_from(CASTS), wanted=st.sampled_from(CASTS))
@examples
def test_casts(store: Store, data: st.DataObject, shape: Shape, stored: torch.dtype, wanted: torch.dtype) -> None:
    store.files.clear()
    values = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(1)).to(stored)
    pieces = pieces_of(data.draw, store, numbers_of(values), stored)
    box = box_in(data.draw, shape)
    pieces.append(Piece(box=box, stored=store.put(data.draw, some(1, box.shape, stored.itemsize), stored)))
    declared = data.draw(st.sampled_from([stored, torch.float64]))  # a format may say more than its pieces do
    catalogue = store.catalogue(w=TensorEntry(shape=shape, dtype=declared, pieces=tuple(pieces)))
    _, view, out = tensor_in(data.draw, box.shape, wanted)
    tensor_reader.read(catalogue, [Want(name="w", box=box, out=out)])
    assert np.array_equal(view, numbers_of(values[box.slices()].to(declared).to(wanted)))


@given(data=st.data(), shape=shapes, count=st.integers(1, 4), wanted=st.sampled_from([torch.float32, torch.bfloat16]))
@examples
def test_means(store: Store, data: st.DataObject, shape: Shape, count: int, wanted: torch.dtype) -> None:
    store.files.clear()
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, generator=generator) for _ in range(count)]
    stored = [store.put(data.draw, numbers_of(value), torch.float32) for value in values]
    pieces = tuple(Piece(box=whole(shape), stored=one) for one in stored)
    catalogue = store.catalogue(w=TensorEntry(shape=shape, dtype=torch.float32, pieces=pieces, mean=True))
    box = box_in(data.draw, shape)
    out = torch.empty(box.shape, dtype=wanted)
    tensor_reader.read(catalogue, [Want(name="w", box=box, out=out)])
    expected = (sum(value.double() for value in values) / count).float()[box.slices()].to(wanted)
    assert torch.equal(out, expected)


@given(data=st.data(), shape=shapes.filter(math.prod), dtype=dtypes, cast=st.booleans())
@examples
def test_a_gap_is_refused_by_name(
    store: Store, data: st.DataObject, shape: Shape, dtype: torch.dtype, cast: bool
) -> None:
    store.files.clear()
    pieces = pieces_of(data.draw, store, some(1, shape, dtype.itemsize), dtype)
    missing = pieces.pop(data.draw(st.integers(0, len(pieces) - 1)))
    catalogue = store.catalogue(**{"model/w": TensorEntry(shape=shape, dtype=dtype, pieces=tuple(pieces))})
    out = torch.zeros(shape, dtype=torch.int16 if cast else dtype)
    with pytest.raises(CheckpointError, match="model/w"):
        tensor_reader.read(catalogue, [Want(name="model/w", box=whole(shape), out=out)])
    assert not numbers_of(out).any()  # and nothing was read
    for piece in pieces:
        read_tensor(catalogue, "model/w", piece.box)
    assert missing.box.numel


# --- single cases -------------------------------------------------------------------------------------------


def line_of(folder: Path, count: int, *, checked: bool = True, start: int = 0) -> tuple[Catalogue, torch.Tensor]:
    """A tensor in one file."""
    values = torch.arange(count, dtype=torch.int32)
    store = Store(folder=folder, checked=checked, files={"a.bin": bytearray(bytes(start) + bytes_of(values).tobytes())})
    stored = Stored(file="a.bin", offset=start, dtype=torch.int32, shape=(count,), strides=(1,))
    piece = Piece(box=whole((count,)), stored=stored)
    return store.catalogue(w=TensorEntry(shape=(count,), dtype=torch.int32, pieces=(piece,))), values


@pytest.mark.parametrize("start", [0, 4, 1001])
@pytest.mark.parametrize("checked", [True, False])
def test_more_than_one_block_of_the_real_size(tmp_path: Path, checked: bool, start: int) -> None:
    catalogue, values = line_of(tmp_path, 2_500_000, checked=checked, start=start)
    assert torch.equal(read_tensor(catalogue, "w"), values)
    box = Box(offset=(1_040_000,), shape=(20_000,))
    assert torch.equal(read_tensor(catalogue, "w", box), values[1_040_000:1_060_000])


def test_a_transposed_array_larger_than_a_span(tmp_path: Path) -> None:
    catalogue, values = line_of(tmp_path, 3000 * 1000)
    [piece] = catalogue.tensors["w"].pieces
    stored = Stored(file="a.bin", offset=piece.stored.offset, dtype=torch.int32, shape=(1000, 3000), strides=(1, 1000))
    entry = TensorEntry(shape=(1000, 3000), dtype=torch.int32, pieces=(Piece(box=whole((1000, 3000)), stored=stored),))
    catalogue.tensors["t"] = entry
    assert torch.equal(read_tensor(catalogue, "t"), values.view(3000, 1000).t())
    spans = tensor_reader.plan(catalogue, [Want(name="t", box=whole(entry.shape), out=torch.empty(entry.shape).int())])
    assert len(spans) > 1
    assert max(span.stop - span.start for span in spans) <= tensor_reader.SPAN + 2 * disk.BLOCK


def test_neighbours_share_a_block(tmp_path: Path) -> None:
    catalogue, _ = line_of(tmp_path, 3000)
    boxes = [Box(offset=(start,), shape=(10,)) for start in range(0, 3000, 100)]
    outs = [torch.empty(10, dtype=torch.int32) for _ in boxes]
    wants = [Want(name="w", box=box, out=out) for box, out in zip(boxes, outs, strict=True)]
    assert len(tensor_reader.plan(catalogue, wants)) == 1


def test_only_what_is_needed_is_read(tmp_path: Path) -> None:
    with blocks(disk.ALIGN):
        catalogue, values = line_of(tmp_path, 10 * 1024)
        with (tmp_path / "a.bin").open("r+b") as file:
            file.seek(5 * disk.ALIGN + 7)
            file.write(b"\xff")
        good = Box(offset=(6 * 1024,), shape=(1024,))
        assert torch.equal(read_tensor(catalogue, "w", good), values[6 * 1024 : 7 * 1024])
        with pytest.raises(CheckpointError, match=r"a\.bin.*20480.*24576.*\bw\b"):
            read_tensor(catalogue, "w")


def test_a_damaged_block_names_some_of_what_it_holds(tmp_path: Path) -> None:
    catalogue, _ = line_of(tmp_path, 1000)
    [piece] = catalogue.tensors.pop("w").pieces
    for number in range(5):
        box = Box(offset=(10 * number,), shape=(10,))
        catalogue.tensors[f"t{number}"] = TensorEntry(
            shape=(10,), dtype=torch.int32, pieces=(Piece(box=whole((10,)), stored=piece.stored.part(box)),)
        )
    (tmp_path / "a.bin").write_bytes(b"\xff" * 4000)
    with pytest.raises(CheckpointError, match="t0, t1, t2"):
        read_tensor(catalogue, "t4")


def test_a_file_that_shrinks_after_it_was_opened(tmp_path: Path) -> None:
    for checked in (True, False):
        catalogue, _ = line_of(tmp_path, 5000, checked=checked)
        os.truncate(tmp_path / "a.bin", 4100)
        with pytest.raises(CheckpointError, match=r"a\.bin.*4100"):
            read_tensor(catalogue, "w")


def test_a_file_that_goes_after_it_was_opened(tmp_path: Path) -> None:
    catalogue, _ = line_of(tmp_path, 5000)
    (tmp_path / "a.bin").unlink()
    with pytest.raises(CheckpointError, match=r"a\.bin"):
        read_tensor(catalogue, "w")


def test_a_name_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nobody"):
        read_tensor(Catalogue(format="test", root=tmp_path), "nobody")


def test_a_mean_needs_every_value(tmp_path: Path) -> None:
    catalogue, values = line_of(tmp_path, 10)
    [piece] = catalogue.tensors["w"].pieces
    half = Box(offset=(0,), shape=(5,))
    part = Piece(box=half, stored=piece.stored.part(half))
    for pieces in ((piece, part), ()):
        catalogue.tensors["w"] = TensorEntry(shape=(10,), dtype=torch.float32, pieces=pieces, mean=True)
        with pytest.raises(CheckpointError, match="of w"):
            read_tensor(catalogue, "w")
    catalogue.tensors["w"] = TensorEntry(shape=(10,), dtype=torch.float32, pieces=(piece, piece), mean=True)
    assert torch.equal(read_tensor(catalogue, "w"), values.float())


def test_what_is_cast_goes_through_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalogue, values = line_of(tmp_path, 10_000)
    sizes: list[int] = []
    real = tensor_reader._read_indirect

    def watched(catalogue: Catalogue, name: str, box: Box, threads: int) -> torch.Tensor:
        sizes.append(box.numel)
        return real(catalogue, name, box, threads)

    monkeypatch.setattr(tensor_reader, "_read_indirect", watched)
    monkeypatch.setattr(tensor_reader, "CHUNK", 8 * 1000)
    out = torch.empty(10_000, dtype=torch.uint8)
    tensor_reader.read(catalogue, [Want(name="w", box=whole((10_000,)), out=out)])
    assert torch.equal(out, values.to(torch.uint8))
    assert max(sizes) == 1000  # what is wanted is small, but what it comes from is not


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 0)])
def test_tensors_that_the_want_does_not_fit_are_our_mistake(tmp_path: Path, shape: Shape) -> None:
    catalogue, _ = line_of(tmp_path, 1)
    with pytest.raises(AssertionError, match="cannot take"):
        tensor_reader.read(catalogue, [Want(name="w", box=whole((1,)), out=torch.empty(shape, dtype=torch.int32))])


def test_all_small_boxes(tmp_path: Path) -> None:
    """Not by chance: every box of a tensor that two blocks hold."""
    with blocks(64, span=96):
        catalogue, values = line_of(tmp_path, 5 * 6, checked=False)
        [piece] = catalogue.tensors["w"].pieces
        entry = TensorEntry(
            shape=(5, 6), dtype=torch.int32, pieces=(Piece(box=whole((5, 6)), stored=piece.stored.reshaped((5, 6))),)
        )
        catalogue.tensors["m"] = entry
        matrix = values.view(5, 6)
        for a, b, c, d in itertools.product(range(6), range(6), range(7), range(7)):
            if a <= b and c <= d:
                box = Box(offset=(a, c), shape=(b - a, d - c))
                assert torch.equal(read_tensor(catalogue, "m", box), matrix[a:b, c:d])
