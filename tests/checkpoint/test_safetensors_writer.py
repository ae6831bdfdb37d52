"""Safetensors files, with the safetensors library as the judge."""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.disk import ALIGN
from holdfast.checkpoint.safetensors_writer import (
    DTYPES,
    PAIRS,
    Array,
    Image,
    StagedImage,
    array_of,
    bytes_of,
    write_safetensors,
)
from holdfast.errors import UsageError
from tests.checkpoint.cases import blocks

EVERY = [*DTYPES, *PAIRS]
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def some(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    numbers = np.random.default_rng(seed).integers(0, 2 if dtype == torch.bool else 256, size, dtype=np.uint8)
    return torch.from_numpy(numbers).view(dtype).reshape(shape)


def raw(tensor: torch.Tensor) -> bytes:
    """Independent of :func:`bytes_of`."""
    copy = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return ctypes.string_at(copy.data_ptr(), copy.nbytes) if copy.numel() else b""


def whole(image: Image) -> bytes:
    out = np.empty(image.size, dtype=np.uint8)
    return image.fill(0, image.size, out).tobytes()


# --- what the library says --------------------------------------------------------------------------------


def test_the_library_reads_every_dtype(tmp_path: Path) -> None:
    tensors = {str(dtype): some(dtype, (3, 5)) for dtype in EVERY}
    tensors |= {"empty": torch.zeros(0, 4), "scalar": torch.tensor(2.5), "name with / and \u00e9": torch.ones(1)}
    written = write_safetensors(tmp_path / "x.safetensors", [array_of(n, t) for n, t in tensors.items()])
    assert written.bytes == (tmp_path / "x.safetensors").stat().st_size
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert {*file.keys()} == {*tensors}
        for name, tensor in tensors.items():
            if tensor.dtype not in PAIRS and tensor.dtype != torch.float8_e8m0fnu:  # which it writes but cannot load
                found = file.get_tensor(name)
                assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
                assert raw(found) == raw(tensor)
    content = (tmp_path / "x.safetensors").read_bytes()
    for name, tensor in tensors.items():
        assert content[written.offsets[name] :][: tensor.nbytes] == raw(tensor)


@pytest.mark.parametrize("dtype", PAIRS)
def test_what_the_library_has_no_name_for_is_a_pair(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = some(dtype, (2, 3))
    write_safetensors(tmp_path / "x.safetensors", [array_of("w", tensor)])
    found = safetensors.torch.load_file(tmp_path / "x.safetensors")["w"]
    assert (found.dtype, found.shape) == (PAIRS[dtype], (2, 3, 2))
    assert raw(found) == raw(tensor)


@pytest.mark.parametrize("arrays", [[], [array_of("a", torch.zeros(0))]])
def test_a_file_without_data(tmp_path: Path, arrays: list[Array]) -> None:
    write_safetensors(tmp_path / "x.safetensors", arrays)
    assert [*safetensors.torch.load_file(tmp_path / "x.safetensors")] == [array.name for array in arrays]


def test_metadata(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x.safetensors", [array_of("w", torch.ones(2))], metadata={"format": "pt"})
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_the_data_begins_on_a_page_and_every_array_on_its_elements() -> None:
    image = Image([array_of(str(dtype), some(dtype, (3,))) for dtype in EVERY])
    (length,) = struct.unpack("<Q", whole(image)[:8])
    assert (length + 8) % ALIGN == 0
    header = json.loads(whole(image)[8 : 8 + length])
    for dtype in EVERY:
        assert image.offsets[str(dtype)] % dtype.itemsize == 0
        assert image.offsets[str(dtype)] == 8 + length + header[str(dtype)]["data_offsets"][0]


@pytest.mark.parametrize("name", ["w", "__metadata__"])
def test_names_that_cannot_be(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        Image([array_of("w", torch.ones(1)), array_of(name, torch.ones(1))])


def test_a_dtype_that_cannot_be() -> None:
    with pytest.raises(UsageError, match=r"w is torch\.quint8"):
        Image([Array(name="w", dtype=torch.quint8, shape=(1,), fill=lambda start, stop, out: None)])


# --- every byte of it ---------------------------------------------------------------------------------------


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """Tensors that are strided in all ways."""
    dtype = draw(st.sampled_from(EVERY))
    shape = draw(st.lists(st.integers(0, 5), max_size=4).map(tuple))
    tensor = some(dtype, shape, draw(st.integers(0, 99)))
    if shape:
        tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
        tensor = tensor[tuple(slice(draw(st.integers(0, n)), None, draw(st.integers(1, 2))) for n in tensor.shape)]
    if dtype.is_complex and draw(st.booleans()):
        tensor = tensor.conj()
    return tensor.expand(2, *tensor.shape) if draw(st.booleans()) else tensor


@given(tensor=views())
@settings(max_examples=150, deadline=None)
def test_bytes_of_any_tensor(tensor: torch.Tensor) -> None:
    assert bytes_of(tensor).tobytes() == raw(tensor)


@given(data=st.data(), tensors=st.lists(views(), max_size=5))
@settings(max_examples=150, deadline=None)
def test_an_image_is_the_same_in_any_parts(data: st.DataObject, tensors: list[torch.Tensor]) -> None:
    image = Image([array_of(str(number), tensor) for number, tensor in enumerate(tensors)])
    complete = whole(image)
    for number, tensor in enumerate(tensors):
        assert complete[image.offsets[str(number)] :][: tensor.nbytes] == raw(tensor)
    cuts = sorted({0, image.size, *(16 * data.draw(st.integers(0, image.size // 16)) for _ in range(4))})
    out = np.empty(image.size, dtype=np.uint8)
    parts = [image.fill(a, b, out)[: b - a].tobytes() for a, b in itertools.pairwise(cuts)]
    assert b"".join(parts) == complete


def test_a_strided_tensor_in_blocks() -> None:
    tensor = some(torch.float32, (500, 300)).t().requires_grad_()
    image = Image([array_of("w", tensor)])
    out = np.empty(10_000, dtype=np.uint8)
    filled = [image.fill(a, min(a + 10_000, image.size), out)[:10_000].tobytes() for a in range(0, image.size, 10_000)]
    assert b"".join(filled)[: image.size].endswith(raw(tensor))


def test_a_staged_image_is_a_copy_in_the_same_memory() -> None:
    tensor = some(torch.float32, (50, 300))
    staged = StagedImage()
    with blocks():
        staged.take(Image([array_of("w", tensor)]))
        expected, memory = raw(tensor), staged._memory
        image = Image([array_of("w", tensor)])
        tensor.zero_()
        assert staged.fill(0, image.size, memory)[: image.size].tobytes().endswith(expected)
        staged.take(Image([array_of("w", tensor[:2])]))
    assert staged._memory is memory
