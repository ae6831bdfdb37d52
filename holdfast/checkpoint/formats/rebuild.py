"""The functions that a foreign pickle may call. They check their arguments and make records that do nothing.

Nothing here imports or runs what the pickle names. Whatever is handed to a pickle refuses ``__setstate__``,
or else a pickle could change it after it was checked.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

MOST_DIMENSIONS = 64  # of a tensor, as in torch
KEY_LIMIT = 1000  # parts of a key of a dict: tuples in tuples are hashed anew each time, and may double with each level
EXPANDED_LIMIT = 64 << 20  # bytes: a tensor that repeats its storage (``expand``) may be no larger than this


class PickleRefused(Exception):
    """An error: the pickle does something that it may not; ``hint`` says what the user can do."""

    def __init__(self, message: str, hint: str = "do not trust this file, unless you know why it does so") -> None:
        super().__init__(message)
        self.hint = hint


def shown(value: Any) -> str:
    """A value as text for an error, cut off if it is long."""
    return reprlib.repr(value)


def key_parts(key: Any) -> int:
    """The number of parts of a key of a dict, with a part for each 64 characters; refuses one that has no end."""
    parts, texts = [key], 0
    for part in parts:  # grows while it is walked through
        if isinstance(part, tuple | frozenset):
            parts += part
        elif isinstance(part, str | bytes):
            texts += len(part) // 64
        elif hasattr(part, "args"):  # an object of another program
            parts += part.args
            parts += part.state.values() if isinstance(part.state, dict) else ()
        if len(parts) + texts > KEY_LIMIT:
            raise PickleRefused("its pickle has a key of a dict, or a member of a set, that is nested without end")
    return len(parts) + texts


def check_keys(keys: Iterable[Any]) -> None:
    """Refuses keys of a dict, or members of a set, that would take too long to hash or to show."""
    for key in keys:
        if not isinstance(key, str | int):
            key_parts(key)


class Sealed:
    """Base of records that a pickle may hold but not change (a dataclass with slots would add a way to do so)."""

    def __setstate__(self, state: Any) -> None:
        raise PickleRefused("its pickle changes a tensor, storage or function after it was made")


@dataclass(frozen=True)
class Call(Sealed):
    """A function given to a pickle; a bare one could be changed by it."""

    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


@dataclass(frozen=True)
class StorageType(Sealed):
    """A stand-in for ``torch.FloatStorage`` and the like."""

    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class RawStorage(Sealed):
    """Bytes of the file that tensors look into."""

    key: str
    dtype: torch.dtype
    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class RawTensor(Sealed):
    """A tensor that has been checked to lie inside its storage; ``offset`` in bytes of the file."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Stub:
    """A stand-in for an object of a class that is not imported: its arguments and its state."""

    module = name = ""

    def __new__(cls, *args: Any, **_: Any) -> Stub:
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        self.args: tuple[Any, ...]
        self.state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state


def stub(module: str, name: str) -> type[Stub]:
    """A stand-in for one foreign class.

    >>> stub("deepspeed.runtime", "LossScaler")(8).args
    (8,)
    """
    return type(name, (Stub,), {"module": module, "name": name})


class Dict(dict[Any, Any]):
    """A stand-in for dicts with attributes (a module's state_dict has ``_metadata``), which are dropped."""

    def __init__(self, *args: Any) -> None:
        for items in args:
            check_keys([] if isinstance(items, dict) else [item[0] for item in items])
        super().__init__(*args)

    def __setstate__(self, state: Any) -> None:
        pass


class DefaultDict(Dict):
    """A stand-in for a defaultdict, whose factory is dropped."""

    def __init__(self, *_: Any) -> None:
        super().__init__()


class NumpyType:
    """A numpy dtype of plain numbers."""

    code = ""  # of the class: a pickle need not call __init__

    def __init__(self, code: str, *_: Any) -> None:
        if not isinstance(code, str) or not re.fullmatch(r"[biufc](1|2|4|8|16)", code):
            raise PickleRefused(f"it holds a numpy array of type {shown(code)}", "only arrays of numbers are read")
        self.code = code

    def __setstate__(self, state: Any) -> None:
        if state[1] not in ("<", "|", "="):
            raise PickleRefused(
                f"it holds a numpy array of byte order {shown(state[1])}", "only little-endian files are read"
            )

    def read(self, data: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """The elements in some bytes, flat; refuses bytes that do not fit the shape."""
        dtype = np.dtype(self.code)
        if not isinstance(data, bytes) or math.prod(shape) * dtype.itemsize != len(data):
            raise PickleRefused(
                f"it holds a numpy array of shape {shape} whose bytes do not fit", "the file may be damaged"
            )
        return np.frombuffer(data, dtype)


class RawArray:
    """A numpy array; its value comes when the pickle sets its state."""

    value: np.ndarray[Any, Any] | None = None  # of the class: a pickle need not call __init__

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, data = state
        if not isinstance(kind, NumpyType):
            raise PickleRefused("it holds a numpy array of no known type", "only arrays of numbers are read")
        shape = _sizes(shape)
        if not is_possible(shape):
            raise PickleRefused(f"it holds a numpy array of shape {shown(shape)}, which none can have")
        self.value = kind.read(data, shape).reshape(shape, order="F" if fortran else "C").copy()


def is_possible(shape: Sequence[int]) -> bool:
    """Whether torch could make a tensor of a shape, given memory enough; sizes of empty tensors are bounded, too.

    >>> is_possible((0, 2**40)), is_possible((0, 2**70)), is_possible([1] * 65)
    (True, False, False)
    """
    return len(shape) <= MOST_DIMENSIONS and math.prod(max(n, 1) for n in shape) < 1 << 60


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or not all(type(n) is int and 0 <= n < 1 << 60 for n in values):
        raise PickleRefused(f"a tensor has sizes or strides {shown(values)}")
    return tuple(values)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, dtype: torch.dtype | None = None) -> RawTensor:
    if not isinstance(storage, RawStorage) or type(offset) is not int or offset < 0:
        raise PickleRefused(f"a tensor lies at {shown(offset)} of {type(storage).__name__}")
    shape, strides, dtype = _sizes(size), _sizes(stride), dtype or storage.dtype
    if max(len(shape), len(strides)) > MOST_DIMENSIONS:
        raise PickleRefused(f"a tensor has the shape {shown(shape)}, which no tensor can have")
    if len(shape) != len(strides):
        raise PickleRefused(f"a tensor of shape {shape} has strides {strides}")
    width, count = dtype.itemsize, math.prod(shape)
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if count and (offset + last + 1) * width > storage.nbytes:
        raise PickleRefused(
            f"a tensor of shape {shape} and strides {strides} reaches beyond storage {storage.key}, "
            f"which has {storage.nbytes} bytes"
        )
    if count * width > max(storage.nbytes, EXPANDED_LIMIT):
        raise PickleRefused(f"a tensor of shape {shape} repeats storage {storage.key}", "save it with .contiguous()")
    if not is_possible(shape):
        raise PickleRefused(f"a tensor has the shape {shown(shape)}, which no tensor can have")
    where = storage.offset + (offset * width if count else 0)
    return RawTensor(offset=where, dtype=dtype, shape=shape, strides=strides)


def _plain(metadata: Any) -> None:
    if metadata and (not isinstance(metadata, dict) or any(metadata.values())):
        raise PickleRefused(
            f"a tensor is marked {shown(metadata)}", "call .resolve_conj().resolve_neg() before saving it"
        )


def _tensor_v2(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> RawTensor:
    _plain(rest[2] if len(rest) > 2 else None)
    return _tensor(storage, offset, size, stride)


def _tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, metadata: Any = None
) -> RawTensor:
    _plain(metadata)
    if not isinstance(dtype, torch.dtype):
        raise PickleRefused(f"a tensor has dtype {shown(dtype)}")
    return _tensor(storage, offset, size, stride, dtype)


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _from_type(function: Any, kind: Any, args: Any, _state: Any) -> Any:
    """A tensor with Python attributes, which are dropped; subclasses of tensors mean more than their bytes."""
    if not any(function is known for known in _REBUILD) or kind is not TENSOR or not isinstance(args, tuple):
        raise PickleRefused(f"it holds a tensor of the class {shown(kind)}", "save plain tensors")
    return function(*args)


def _encode(text: Any, encoding: Any) -> bytes:
    if not isinstance(text, str) or encoding != "latin1":
        raise PickleRefused(f"it encodes {type(text).__name__} as {shown(encoding)}")
    return text.encode("latin1")


def _set(kind: type[set[Any]] | type[frozenset[Any]]) -> Call:
    def make(*args: Any) -> Any:
        for items in args:
            check_keys(items)
        return kind(*args)

    return Call(make)


def _int(*args: Any) -> int:
    if args and not isinstance(args[0], int | float) and len(args[0]) > 1000:
        raise PickleRefused("it makes a number from a text without end")
    return int(*args)


def _bytes(*args: Any) -> bytes:
    if args and not (len(args) == 1 and isinstance(args[0], bytes)):
        raise PickleRefused("it makes bytes from something else than bytes")  # bytes(10**12) would fill the memory
    return b"".join(args)


def _member(kind: Any, name: Any) -> Stub:
    """Python 3.11 pickles a member of an enum as ``getattr(class, name)``; nothing else is looked up."""
    if not (isinstance(kind, type) and issubclass(kind, Stub) and isinstance(name, str)):
        raise PickleRefused(f"it calls getattr({shown(kind)}, {shown(name)})")
    return kind(name)


def _scalar(kind: Any, data: Any) -> Any:
    if not isinstance(kind, NumpyType):
        raise PickleRefused("it holds a numpy number of no known type", "only numbers are read")
    return kind.read(data, ()).item()


class NumpyArrayType(Sealed):
    """A stand-in for ``numpy.ndarray`` as an argument."""


TENSOR = Call(lambda *_: _sizes(None))  # torch.Tensor as an argument; calling it is refused
_KINDS = {
    "Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
    "Bool": torch.bool, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128,
}  # fmt: skip
STORAGES = {dtype: name for name, dtype in _KINDS.items()}  # dtypes that torch.save has names of storages for

_REBUILD = (Call(_tensor), Call(_tensor_v2), Call(_tensor_v3), Call(_parameter))

ALLOWED: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor"): _REBUILD[0],
    ("torch._utils", "_rebuild_tensor_v2"): _REBUILD[1],
    ("torch._utils", "_rebuild_tensor_v3"): _REBUILD[2],
    ("torch._utils", "_rebuild_parameter"): _REBUILD[3],
    ("torch._utils", "_rebuild_parameter_with_state"): _REBUILD[3],
    ("torch._tensor", "_rebuild_from_type_v2"): Call(_from_type),
    ("torch", "Tensor"): TENSOR,
    ("torch", "Size"): tuple,
    ("torch", "device"): torch.device,
    ("torch.storage", "UntypedStorage"): StorageType(torch.uint8),
    ("torch", "UntypedStorage"): StorageType(torch.uint8),
    ("collections", "OrderedDict"): Dict,
    ("collections", "Counter"): Dict,
    ("collections", "defaultdict"): DefaultDict,
    ("builtins", "getattr"): Call(_member),
    ("builtins", "bytes"): Call(_bytes),
    ("builtins", "bytearray"): Call(_bytes),
    ("_codecs", "encode"): Call(_encode),
    **{("builtins", kind.__name__): kind for kind in (list, tuple, float, bool, complex)},
    ("builtins", "int"): Call(_int),
    **{("builtins", kind.__name__): _set(kind) for kind in (set, frozenset)},
    ("builtins", "dict"): Dict,
    **{("torch", f"{name}Storage"): StorageType(dtype) for name, dtype in _KINDS.items()},
    **{("torch.cuda", f"{name}Storage"): StorageType(dtype) for name, dtype in _KINDS.items()},
    **{("torch", name): kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)},
    ("numpy", "dtype"): NumpyType,
    ("numpy", "ndarray"): NumpyArrayType,
    **{(f"numpy.{core}.multiarray", "scalar"): Call(_scalar) for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "_reconstruct"): RawArray for core in ("core", "_core")},
}
