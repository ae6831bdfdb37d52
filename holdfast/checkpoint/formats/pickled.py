"""Reads foreign pickles without running their code; of tensors, only where they lie.

A pickle is a program that may call anything it can import. Here it reaches what ``rebuild.ALLOWED`` lists and
nothing else; objects of frameworks become :class:`Foreign` records, tensors become ``Stored``.
"""

from __future__ import annotations

import io
import os
import pickle
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, ClassVar, cast

import torch

from holdfast.checkpoint.formats.archive import DAMAGED, LEGACY_MAGIC, ZIP, Archive, StorageSpan, Window, legacy_spans
from holdfast.checkpoint.formats.rebuild import (
    ALLOWED,
    NumpyType,
    PickleRefused,
    RawArray,
    RawStorage,
    RawTensor,
    StorageType,
    Stub,
    check_keys,
    shown,
    stub,
)
from holdfast.checkpoint.pieces import Stored
from holdfast.errors import CheckpointError

Allow = Collection[tuple[str, str]]
# Classes that hold data only, in files that Megatron and DeepSpeed write. They are never imported.
FOREIGN: Allow = {
    ("argparse", "Namespace"),
    ("types", "SimpleNamespace"),
    ("_io", "BytesIO"),
    *(("pathlib", name) for name in ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")),
}
FOREIGN_PACKAGES = ("deepspeed", "megatron")
# Values without parts.
_LEAVES = frozenset((str, int, float, bool, bytes, type(None)))
# Where on the stack the keys are that an instruction is about to put into a dict or set, and so to hash.
_KEYS = {
    pickle.SETITEM: slice(-2, -1),
    pickle.SETITEMS: slice(0, None, 2),
    pickle.DICT: slice(0, None, 2),
    pickle.ADDITEMS: slice(None),
    pickle.FROZENSET: slice(None),
}
_SHARING = 1000  # how many times larger than its pickle a tree may be, by naming the same parts again and again


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """An object of a class that is not imported: the arguments it was made with, and its state.

    >>> Foreign(module="megatron.core", name="Kind", args=(1,)).fields
    {}
    """

    module: str
    name: str
    args: tuple[Any, ...] = ()
    state: Any = None

    @property
    def fields(self) -> dict[str, Any]:
        """The attributes it had."""
        return dict(self.state) if isinstance(self.state, dict) else {}

    def __hash__(self) -> int:
        try:
            return hash((self.module, self.name, self.args, *self.fields.items()))
        except TypeError:  # what cannot be hashed is told apart by comparing
            return hash((self.module, self.name))


def load(path: Path, *, root: Path, offset: int = 0, length: int | None = None, allow: Allow = ()) -> Any:
    """Reads what ``torch.save`` or ``pickle`` wrote into a file, or into some bytes of it, with ``Stored`` for tensors.

    ``root`` is the checkpoint's folder, to which names of files are relative; ``allow`` are further classes that may
    appear, as :class:`Foreign`. Raises ``CheckpointError`` for a damaged file, and for a pickle that does more than
    hold data.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"w": torch.ones(2, 3), "step": 7}, Path(folder, "a.pt"))
    ...     tree = load(Path(folder, "a.pt"), root=Path(folder))
    >>> tree["step"], tree["w"].file, tree["w"].shape
    (7, 'a.pt', (2, 3))
    """
    with PickleFile(path, root=root) as source:
        return source.load(offset=offset, length=length, allow=allow)


class PickleFile:
    """An open file with pickles: one, or thousands of small ones at their offsets."""

    def __init__(self, path: Path, *, root: Path) -> None:
        self.path, self.name = path, path.relative_to(root).as_posix()
        try:
            self._fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from error
        self.bytes = os.fstat(self._fd).st_size

    def __enter__(self) -> PickleFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._fd)

    def window(self, offset: int, length: int) -> BinaryIO:
        """A part of the file, as a file."""
        return cast(BinaryIO, io.BufferedReader(Window(self._fd, start=offset, length=length)))

    def load(self, *, offset: int = 0, length: int | None = None, allow: Allow = (), name: str = "") -> Any:
        """Reads what was saved at an offset, see :func:`load`; ``name`` says in errors what it should be."""
        where = f"{self.path} at byte {offset}" if offset or length is not None else str(self.path)
        where += f" ({name})" if name else ""
        length = self.bytes - offset if length is None else length
        if offset < 0 or length <= 0 or offset + length > self.bytes:
            raise CheckpointError(
                f"{where} should have {length} bytes, the file has {self.bytes}", hint="copy it again"
            )
        stream = self.window(offset, length)
        reader = _Reader(file=self.name, where=where, allow=allow)
        try:
            return _load(stream, reader, start=offset, length=length)
        except PickleRefused as error:
            raise CheckpointError(f"{where} is refused: {error}", hint=error.hint) from error
        except RecursionError as error:
            raise CheckpointError(f"{where} is refused: it is nested too deeply") from error
        except OSError as error:
            raise CheckpointError(f"{where} cannot be read: {error.strerror}") from error


def _load(stream: BinaryIO, reader: _Reader, *, start: int, length: int) -> Any:
    if stream.read(4) == ZIP:
        archive = Archive(stream, start=start, length=length, where=reader.where)
        code = archive.read("data.pkl")
        return reader.read(io.BytesIO(code), lambda key: archive.span(f"data/{key}"), size=len(code))
    stream.seek(0)
    first = reader.read(stream, None, size=length)
    if first != LEGACY_MAGIC:
        return first
    reader.read(stream, None, size=length)  # the version of the protocol
    system = reader.read(stream, None, size=length)
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise PickleRefused("it was not written on a little-endian machine", "only little-endian files are read")
    at = stream.tell()
    # The places of the storages stand behind the tree that needs them, so the tree is read twice.
    reader.read(stream, lambda _: StorageSpan(offset=0, length=1 << 62), size=length)
    keys = reader.read(stream, None, size=length)
    itemsizes = {key: kind.dtype.itemsize for key, kind in reader.storages.items()}
    locate = legacy_spans(stream, keys, itemsizes, start=start, length=length, where=reader.where)
    stream.seek(at)
    return reader.read(stream, locate, size=length)


@dataclass(kw_only=True)
class _Reader:
    """Reads the pickles of one file."""

    file: str
    where: str
    allow: Allow
    storages: dict[str, StorageType] = field(default_factory=dict)

    def read(self, stream: BinaryIO, locate: Callable[[str], StorageSpan] | None, *, size: int) -> Any:
        """The next pickle of a stream of ``size`` bytes; ``locate`` gives the bytes of a storage."""
        try:
            found = _Unpickler(stream, reader=self, locate=locate).load()
        except (PickleRefused, CheckpointError, OSError, RecursionError):
            raise
        except Exception as error:  # bytes that are no pickle can raise anything
            raise PickleRefused(f"it is not a readable pickle, {error}", DAMAGED) from error
        return _Cleaner(file=self.file).clean(found, limit=size * _SHARING)

    def find(self, module: str, name: str) -> Any:
        """The stand-in for a class or function that a pickle names; refuses all that are not listed."""
        # Pickles of protocol 2, as torch writes them, use the names of Python 2.
        wanted = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        if wanted in ALLOWED:
            return ALLOWED[wanted]
        module, name = wanted
        if wanted in FOREIGN or wanted in self.allow or module.split(".")[0] in FOREIGN_PACKAGES:
            return stub(module, name)
        raise PickleRefused(
            f"its pickle needs {module}.{name}, which is not on the list of harmless classes",
            "do not trust this file, or save it again with plain tensors, numbers, texts, lists and dicts only",
        )


def _checked(load: Callable[[Any], None], keys: slice) -> Callable[[Any], None]:
    def checked(unpickler: Any) -> None:
        check_keys(unpickler.stack[keys])
        load(unpickler)

    return checked


class _Unpickler(pickle._Unpickler):
    """An unpickler that reaches only what its reader allows.

    Based on the one in Python: in the faster one in C, a pickle of ten bytes can claim 64 GB for its memo.
    """

    dispatch: ClassVar = {
        **pickle._Unpickler.dispatch,
        **{code[0]: _checked(pickle._Unpickler.dispatch[code[0]], keys) for code, keys in _KEYS.items()},
    }

    def __init__(self, stream: BinaryIO, *, reader: _Reader, locate: Callable[[str], StorageSpan] | None) -> None:
        super().__init__(stream)
        self._reader, self._locate = reader, locate
        self._known: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Called by pickle for each class or function."""
        if (module, name) not in self._known:
            self._known[module, name] = self._reader.find(module, name)
        return self._known[module, name]

    def persistent_load(self, pid: Any) -> RawStorage:
        """Called by pickle for each storage of a tensor."""
        if self._locate is None or not isinstance(pid, tuple) or len(pid) not in (5, 6) or pid[0] != "storage":
            raise PickleRefused(f"its pickle refers to {shown(pid)}")
        _, kind, key, _, count, *view = pid
        if not isinstance(kind, StorageType) or not isinstance(key, str) or type(count) is not int or count < 0:
            raise PickleRefused(f"its pickle refers to storage {shown(pid)}")
        if self._reader.storages.setdefault(key, kind).dtype.itemsize != kind.dtype.itemsize:
            raise PickleRefused(f"storage {key} is used with two types")
        span, width = self._locate(key), kind.dtype.itemsize
        if count * width > span.length:
            raise PickleRefused(
                f"storage {key} has {span.length} bytes and should have {count * width}", "copy it again"
            )
        skip = 0
        if view and view[0] is not None:  # old files: a storage that is part of another
            _, start, count = view[0]
            if type(start) is not int or type(count) is not int or start < 0 or (start + count) * width > span.length:
                raise PickleRefused(f"its pickle refers to storage {shown(pid)}")
            skip = start * width
        return RawStorage(key=key, dtype=kind.dtype, offset=span.offset + skip, nbytes=count * width)


@dataclass
class _Cleaner:
    """Turns what the unpickler made into plain dicts, lists and tuples, ``Stored`` and ``Foreign``."""

    file: str
    done: dict[int, tuple[Any, int]] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)

    def clean(self, found: Any, *, limit: int) -> Any:
        """The plain form of a tree of at most ``limit`` nodes; refuses loops."""
        made, size = self._clean(found)
        if size > limit:
            raise PickleRefused("its pickle repeats its own parts without end")
        return made

    def _clean(self, node: Any) -> tuple[Any, int]:
        """The plain form of a node, and how many nodes it stands for."""
        if type(node) in _LEAVES:
            return node, 1
        if id(node) in self.done:
            return self.done[id(node)]
        if id(node) in self.open:
            raise PickleRefused("its pickle contains itself", "save it without the loop")
        self.open.add(id(node))
        self.done[id(node)] = self._make(node)
        self.open.remove(id(node))
        return self.done[id(node)]

    def _make(self, node: Any) -> tuple[Any, int]:
        if isinstance(node, RawTensor):
            at, kind, shape = node.offset, node.dtype, node.shape
            return Stored(file=self.file, offset=at, dtype=kind, shape=shape, strides=node.strides), 1
        if isinstance(node, RawStorage):
            at, kind, shape = node.offset, node.dtype, (node.nbytes // node.dtype.itemsize,)
            return Stored(file=self.file, offset=at, dtype=kind, shape=shape, strides=(1,)), 1
        if isinstance(node, RawArray):
            if node.value is None:
                raise PickleRefused("it holds a numpy array without its data", DAMAGED)
            return node.value, 1
        if isinstance(node, NumpyType):
            return Foreign(module="numpy", name="dtype", args=(node.code,)), 1
        if isinstance(node, Stub):
            (args, state), size = self._items((node.args, node.state))
            return Foreign(module=node.module, name=node.name, args=args, state=state), size
        if isinstance(node, dict):
            keys, size = self._items(node)
            values, more = self._items(node.values())
            check_keys(keys)
            return dict(zip(keys, values, strict=True)), size + more
        if isinstance(node, list | tuple | set | frozenset):
            items, size = self._items(node)
            check_keys(items if isinstance(node, set | frozenset) else ())
            return type(node)(items), size
        return node if isinstance(node, torch.dtype | torch.device | complex) else _named(node), 1

    def _items(self, nodes: Iterable[Any]) -> tuple[list[Any], int]:
        items, size = [], 1
        for node in nodes:
            item, more = (node, 1) if type(node) in _LEAVES else self._clean(node)
            items.append(item)
            size += more
        return items, size


def _named(node: Any) -> Foreign:
    """A class or function that is a value in a pickle, as its name."""
    if isinstance(node, type) and issubclass(node, Stub):
        return Foreign(module=node.module, name=node.name)
    for (module, name), allowed in ALLOWED.items():
        if node is allowed:
            return Foreign(module=module, name=name)
    raise PickleRefused(f"it holds a {type(node).__name__}, which is no plain data")
