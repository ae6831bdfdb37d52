"""Reads foreign pickles without running their code; of tensors, only where they lie.

A pickle is a program that may call anything it can import. Here it reaches what ``rebuild.ALLOWED`` lists and
nothing else; objects of frameworks become :class:`Foreign` records, tensors become ``Stored``.
"""

from __future__ import annotations

import io
import os
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, cast

import torch

from holdfast.checkpoint.formats.archive import DAMAGED, LEGACY_MAGIC, ZIP, Archive, StorageSpan, Window, legacy_spans
from holdfast.checkpoint.formats.budget import Budget
from holdfast.checkpoint.formats.metered import MeteredUnpickler
from holdfast.checkpoint.formats.rebuild import (
    ALLOWED,
    NumpyType,
    PickleRefused,
    RawArray,
    RawStorage,
    RawTensor,
    StorageType,
    Stub,
    shown,
    stub,
)
from holdfast.checkpoint.inside import check_inside, open_regular
from holdfast.checkpoint.pieces import Stored
from holdfast.errors import CheckpointError
from holdfast.words import a_kind

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
_NODE = 150  # bytes of a cleaned container: itself, and the note that it is done
_COPY = 64  # bytes of a container in the tree, under each of its names
_TENSOR = 1500  # bytes of a tensor in a catalogue: its name, its entry, piece and boxes
_SENTENCE = 400  # bytes of the sentence that says that a value has become something else


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


def load(
    path: Path, *, root: Path, offset: int = 0, length: int | None = None, allow: Allow = (), given: bool = False
) -> Any:
    """Reads what ``torch.save`` or ``pickle`` wrote into a file, or into some bytes of it, with ``Stored`` for tensors.

    ``root`` is the checkpoint's folder, to which names of files are relative; ``allow`` are further classes that may
    appear, as :class:`Foreign`; ``given``: the user has named this file, so it may be a link to elsewhere. Raises
    ``CheckpointError`` for a damaged file, and for a pickle that does more than hold data or wants too much memory.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"w": torch.ones(2, 3), "step": 7}, Path(folder, "a.pt"))
    ...     tree = load(Path(folder, "a.pt"), root=Path(folder))
    >>> tree["step"], tree["w"].file, tree["w"].shape
    (7, 'a.pt', (2, 3))
    """
    with PickleFile(path, root=root, given=given) as source:
        return source.load(offset=offset, length=length, allow=allow)


class PickleFile:
    """An open file with pickles: one, or thousands of small ones at their offsets.

    It must not lead out of the folder ``root``, unless it is ``given`` by the user.
    """

    def __init__(self, path: Path, *, root: Path, given: bool = False) -> None:
        self.path, self.name = path, path.relative_to(root).as_posix()
        if not given:
            check_inside(path, root)
        try:
            self._fd = open_regular(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from error
        self.bytes = os.fstat(self._fd).st_size
        self._budget = Budget(self.bytes)

    def __enter__(self) -> PickleFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._fd)

    def window(self, offset: int, length: int) -> BinaryIO:
        """A part of the file, as a file."""
        return cast(BinaryIO, io.BufferedReader(Window(self._fd, start=offset, length=length)))

    def claim(self, found: Any) -> None:
        """Counts the bytes of what was loaded once more, for another name that it has."""
        try:
            self._budget.claim(found.nbytes if isinstance(found, Stored) else 0)
            self._budget.spend(_TENSOR)
        except PickleRefused as error:
            raise CheckpointError(f"{self.path} is refused: {error}", hint=error.hint) from error

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
        reader = _Reader(file=self.name, where=where, allow=allow, budget=self._budget)
        try:
            return _load(stream, reader, start=offset, length=length)
        except PickleRefused as error:
            raise CheckpointError(f"{where} is refused: {error}", hint=error.hint) from error
        except RecursionError as error:
            raise CheckpointError(f"{where} is refused: it is nested too deeply") from error
        except MemoryError as error:
            raise CheckpointError(f"{where} needs more memory than there is") from error
        except OSError as error:
            raise CheckpointError(f"{where} cannot be read: {error.strerror}") from error


def _load(stream: BinaryIO, reader: _Reader, *, start: int, length: int) -> Any:
    if stream.read(4) == ZIP:
        archive = Archive(stream, start=start, length=length, where=reader.where)
        code = archive.read("data.pkl")
        return reader.read(io.BytesIO(code), lambda key: archive.span(f"data/{key}"))
    stream.seek(0)
    first = reader.read(stream, None)
    if first != LEGACY_MAGIC:
        return first
    reader.read(stream, None)  # the version of the protocol
    system = reader.read(stream, None)
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise PickleRefused("it was not written on a little-endian machine", "only little-endian files are read")
    at = stream.tell()
    # The places of the storages stand behind the tree that needs them, so the tree is read twice.
    reader.read(stream, lambda _: StorageSpan(offset=0, length=1 << 62))
    keys = reader.read(stream, None)
    itemsizes = {key: kind.dtype.itemsize for key, kind in reader.storages.items()}
    locate = legacy_spans(stream, keys, itemsizes, start=start, length=length, where=reader.where)
    stream.seek(at)
    return reader.read(stream, locate)


@dataclass(kw_only=True)
class _Reader:
    """Reads the pickles of one file."""

    file: str
    where: str
    allow: Allow
    budget: Budget
    storages: dict[str, StorageType] = field(default_factory=dict)

    def read(self, stream: BinaryIO, locate: Callable[[str], StorageSpan] | None) -> Any:
        """The next pickle of a stream; ``locate`` gives the bytes of a storage."""
        try:
            found = _Unpickler(stream, reader=self, locate=locate).load()
        except (PickleRefused, CheckpointError, OSError, RecursionError, MemoryError):
            raise
        except Exception as error:  # bytes that are no pickle can raise anything
            raise PickleRefused(f"it is not a readable pickle, {shown(str(error))}", DAMAGED) from error
        return _Cleaner(file=self.file, budget=self.budget).clean(found)

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


class _Unpickler(MeteredUnpickler):
    """An unpickler that reaches only what its reader allows."""

    def __init__(self, stream: BinaryIO, *, reader: _Reader, locate: Callable[[str], StorageSpan] | None) -> None:
        super().__init__(stream, reader.budget)
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
    """Turns what the unpickler made into plain dicts, lists and tuples, ``Stored`` and ``Foreign``.

    What is done is noted with two numbers: the memory it will take in a tree, and the bytes that its tensors have.
    Those of a part that has many names count under each of them, since nothing is shared in a catalogue.
    """

    file: str
    budget: Budget
    done: dict[int, tuple[Any, int, int]] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)

    def clean(self, found: Any) -> Any:
        """The plain form of a tree; refuses loops, and what is too large."""
        made, size, claimed = self._clean(found)
        self.budget.spend(size)
        self.budget.claim(claimed)
        return made

    def _clean(self, node: Any) -> tuple[Any, int, int]:
        if type(node) in _LEAVES:
            return node, 8, 0
        if id(node) in self.done:
            return self.done[id(node)]
        if id(node) in self.open:
            raise PickleRefused("its pickle contains itself", "save it without the loop")
        self.open.add(id(node))
        self.done[id(node)] = self._make(node)
        self.open.remove(id(node))
        return self.done[id(node)]

    def _make(self, node: Any) -> tuple[Any, int, int]:
        self.budget.spend(_NODE)
        if isinstance(node, RawTensor):
            return self._stored(node.offset, node.dtype, node.shape, node.strides)
        if isinstance(node, RawStorage):
            return self._stored(node.offset, node.dtype, (node.nbytes // node.dtype.itemsize,), (1,))
        if isinstance(node, RawArray):
            if node.value is None:
                raise PickleRefused("it holds a numpy array without its data", DAMAGED)
            return node.value, _SENTENCE + 40 * node.value.size, 0  # it becomes a list
        if isinstance(node, NumpyType):
            return Foreign(module="numpy", name="dtype", args=(node.code,)), _COPY, 0
        if isinstance(node, Stub):
            (args, state), size, claimed = self._items((node.args, node.state))
            return Foreign(module=node.module, name=node.name, args=args, state=state), 4 * _COPY + size, claimed
        if isinstance(node, dict):
            return self._dict(node)
        if isinstance(node, list | tuple):
            items, size, claimed = self._items(node)
            return type(node)(items), size, claimed
        if isinstance(node, set | frozenset):
            items, size, claimed = self._items(node)
            self.budget.keys(items)
            return type(node)(items), _SENTENCE + size + 64 * len(node), claimed
        made = node if isinstance(node, torch.dtype | torch.device | complex) else _named(node)
        return made, _SENTENCE, 0

    def _dict(self, node: dict[Any, Any]) -> tuple[dict[Any, Any], int, int]:
        self.budget.spend(16 * len(node))
        made: list[tuple[Any, Any]] = []
        size, claimed = _COPY, 0
        for key, value in node.items():
            clean_key, more, _ = self._clean(key)
            item, below, bytes = self._clean(value)
            made.append((clean_key, item))
            # What lies below has the key in its name.
            size += 32 + more + below + (len(key) * (1 + below // _COPY) if isinstance(key, str) else 0)
            claimed += bytes
        self.budget.keys(key for key, _ in made)
        return dict(made), size, claimed

    def _stored(
        self, offset: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> tuple[Stored, int, int]:
        stored = Stored(file=self.file, offset=offset, dtype=dtype, shape=shape, strides=strides)
        return stored, _TENSOR, stored.nbytes

    def _items(self, nodes: Collection[Any]) -> tuple[list[Any], int, int]:
        self.budget.spend(8 * len(nodes))
        items, size, claimed = [], _COPY, 0
        for node in nodes:
            item, more, bytes = (node, 8, 0) if type(node) in _LEAVES else self._clean(node)
            items.append(item)
            size += more
            claimed += bytes
        return items, size, claimed


def _named(node: Any) -> Foreign:
    """A class or function that is a value in a pickle, as its name."""
    if isinstance(node, type) and issubclass(node, Stub):
        return Foreign(module=node.module, name=node.name)
    for (module, name), allowed in ALLOWED.items():
        if node is allowed:
            return Foreign(module=module, name=name)
    raise PickleRefused(f"it holds {a_kind(node)}, which is no plain data")
