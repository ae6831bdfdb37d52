"""Helpers of all writers of foreign formats: files that appear whole or not at all, and tensors read while written."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.checkpoint.disk import Bytes, explained, sync_folder
from holdfast.checkpoint.pieces import NUMPY, Catalogue
from holdfast.checkpoint.safetensors_writer import Array
from holdfast.checkpoint.tensor_reader import find, read_range
from holdfast.checkpoint.trees import replace_refs
from holdfast.errors import UsageError


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A temporary name to write a file or folder under; it gets its own name when all of it is durable.

    After an error nothing is left. ``UsageError`` if the path exists.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with appearing(Path(folder, "a")) as unfinished:
    ...         _ = unfinished.write_text("hello")
    ...         before = Path(folder, "a").exists()
    ...     before, Path(folder, "a").read_text()
    (False, 'hello')
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"{path} exists already", hint="give a new name")
    unfinished = path.with_name(f".{path.name}-{secrets.token_hex(6)}")
    try:
        yield unfinished
        with explained(unfinished, "write"):
            if unfinished.is_dir():
                sync_folder(unfinished)
            if path.is_dir():
                path.rmdir()
            os.rename(unfinished, path)
            sync_folder(path.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.unlink(missing_ok=True)


def array(catalogue: Catalogue, name: str, *, called: str | None = None) -> Array:
    """A logical tensor as an array to write, which is read block by block; ``called`` is another name for it."""
    entry = find(catalogue, name)
    size = entry.dtype.itemsize

    def fill(start: int, stop: int, out: Bytes) -> None:
        assert start % size == stop % size == 0, f"{name} is cut inside an element"
        read_range(catalogue, name, start // size, stop // size, out)

    return Array(name=name if called is None else called, dtype=entry.dtype, shape=entry.shape, fill=fill)


def without_numpy(node: Any) -> Any:
    """A part of a tree with plain tensors in the place of numpy arrays: other readers do not know our mark of those.

    >>> from holdfast.checkpoint.pieces import Ref
    >>> without_numpy({"rng": {"__numpy__": Ref(name="rng")}})
    {'rng': Ref(name='rng')}
    """
    if isinstance(node, dict):
        if node.keys() == {NUMPY}:
            return node[NUMPY]
        return {key: without_numpy(value) for key, value in node.items()}
    return type(node)(map(without_numpy, node)) if isinstance(node, list | tuple) else node


def with_arrays(catalogue: Catalogue, node: Any) -> Any:
    """A part of the catalogue's tree with an array to write in the place of each reference."""
    return replace_refs(node, lambda ref: array(catalogue, ref.name))
