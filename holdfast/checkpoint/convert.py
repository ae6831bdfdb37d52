"""Converts checkpoints from any format that can be read to any that can be written, a few megabytes at a time."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from holdfast import codec
from holdfast.checkpoint import index
from holdfast.checkpoint.disk import Bytes, Progress, explained, make_folder, silent, sync_folder, write_blocks
from holdfast.checkpoint.formats import deepspeed_universal_write, format_of, recognise
from holdfast.checkpoint.formats.output import appearing
from holdfast.checkpoint.formats.torchsave import in_model_order
from holdfast.checkpoint.pieces import NUMPY, Catalogue, DataFile, Ref, TensorEntry, dense, entry_of, name_of, path_of
from holdfast.checkpoint.places import Place, Remote
from holdfast.checkpoint.safetensors_writer import Array, Image
from holdfast.checkpoint.tensor_reader import Want, flat_wants, read
from holdfast.checkpoint.trees import dicts, groups_of, refs
from holdfast.errors import CheckpointError, UsageError
from holdfast.words import count

# Formats that can be written.
TARGETS = ("holdfast", "hf", "dcp", "torch", "deepspeed-universal")
FILE = 4 << 30  # bytes in a data file, unless one tensor has more: few files, none too large to copy
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def convert(
    catalogue: Catalogue, path: Place, to: str, *, overwrite: bool = False, progress: Progress = silent
) -> list[str]:
    """Writes a checkpoint in another format, whole or not at all.

    ``to`` is one of ``TARGETS``, ``progress`` is called with the bytes done. Returns in words what that format
    cannot hold. Raises ``UsageError`` if ``path`` exists (unless ``overwrite``), ``CheckpointError`` if a byte of the
    source is damaged.

    >>> import tempfile
    >>> from holdfast.checkpoint import open_checkpoint, save
    >>> folder = Path(tempfile.mkdtemp())
    >>> save(folder / "a", {"model": torch.nn.Linear(2, 1), "step": 7})
    >>> convert(open_checkpoint(folder / "a"), folder / "a.pt", "torch")
    []
    """
    lost = left_behind(catalogue, to)
    if isinstance(path, Remote):
        _to_store(catalogue, path, to, overwrite=overwrite, progress=progress)
        return lost
    writer = write if to == "holdfast" else format_of(to).write
    with explained(path, "create"):
        path.parent.mkdir(parents=True, exist_ok=True)
    if check_destination(path, catalogue.root, overwrite=overwrite):
        writer(catalogue, path, progress=progress)
        return lost
    unfinished = path.with_name(f".{path.name}-{secrets.token_hex(6)}")
    writer(catalogue, unfinished, progress=progress)
    _replace(path, unfinished)
    return lost


def _to_store(catalogue: Catalogue, path: Remote, to: str, *, overwrite: bool, progress: Progress) -> None:
    """Writes a checkpoint of our own format into an object store; its index, which comes last, replaces an old one."""
    if to != "holdfast":
        hint = "convert it into a folder, and copy that"
        raise UsageError(f"{path} is in an object store, and {to} cannot be written there", hint=hint)
    check_destination(path, catalogue.root, overwrite=overwrite)
    with explained(path, "write"):
        make_folder(path)
    made = _write_into(catalogue, path, progress, index.version_in(path))
    index.clean(path, keep=made.files)


def check_destination(path: Place, source: Place, *, overwrite: bool) -> bool:
    """Whether ``path`` is free; False if a checkpoint is there that is to be replaced, ``UsageError`` otherwise."""
    with explained(path, "read"):
        if not path.exists() or (path.is_dir() and not any(path.iterdir())):
            return True
    if not overwrite:
        raise UsageError(f"{path} exists already", hint="--overwrite replaces it")
    if recognise(path) is None:
        raise UsageError(f"{path} is not a checkpoint, and is not replaced", hint="choose another name")
    if path.resolve() in (source.resolve(), *source.resolve().parents):
        raise UsageError(f"{path} holds what is to be converted", hint="choose another name")
    return False


def _replace(path: Path, new: Path) -> None:
    """Puts a new checkpoint in the place of an old one.

    The old one stays until the new one is durable; between the two renames both are there, under hidden names.
    """
    old = path.with_name(f".{path.name}-{secrets.token_hex(6)}")
    with explained(path, "replace"):
        os.rename(path, old)
        os.rename(new, path)
        sync_folder(path.parent)
        # Only the link itself, if it is one: its target is not ours to remove.
        old.unlink() if old.is_symlink() or old.is_file() else shutil.rmtree(old, ignore_errors=True)


# --- what is converted ----------------------------------------------------------------------------


def select(catalogue: Catalogue, sections: Sequence[str]) -> Catalogue:
    """A catalogue of some sections (keys of the tree) alone; ``CheckpointError`` if one is not there."""
    for section in sections:
        if section not in catalogue.tree:
            known = ", ".join(map(str, catalogue.tree)) or "nothing"
            raise CheckpointError(f"{catalogue.root} has no section {section!r}", hint=f"it has {known}")
    tree = {key: node for key, node in catalogue.tree.items() if key in sections}
    used = {ref.name for ref in refs(tree)}
    tensors = {name: entry for name, entry in catalogue.tensors.items() if name in used}
    digests = {name: one for name, one in catalogue.digests.items() if path_of(name)[0] in sections}
    chosen = replace(catalogue, tree=tree, tensors=tensors, digests=digests)
    return chosen if "model" in sections else replace(chosen, tied={}, frozen=(), buffers=())


def cast(catalogue: Catalogue, name: str) -> Catalogue:
    """A catalogue with the model's floating-point tensors in another dtype; they are rounded as they are read.

    ``name`` is one of ``DTYPES``.
    """
    if name not in DTYPES:
        raise UsageError(f"--dtype {name} is not known", hint=f"one of {', '.join(DTYPES)}")
    model = {ref.name for ref in refs(catalogue.tree.get("model"))}
    tensors = {
        key: replace(entry, dtype=DTYPES[name]) if key in model and entry.dtype.is_floating_point else entry
        for key, entry in catalogue.tensors.items()
    }
    known = {name: one for name, one in catalogue.digests.items() if name not in model}
    return replace(catalogue, tensors=tensors, digests=known)


def left_behind(catalogue: Catalogue, to: str) -> list[str]:
    """Parts of a checkpoint that a format cannot hold, in words; ``CheckpointError`` if it could hold nothing of it."""
    if to not in TARGETS:
        raise UsageError(f"there is no writer for {to!r}", hint=f"one of {', '.join(TARGETS)}")
    if to == "holdfast":
        return [f"{name}, which is not a plain value" for name in keepable(catalogue.tree)[1]]
    lost = []
    if to == "hf":
        if not isinstance(catalogue.tree.get("model"), dict):
            raise CheckpointError(
                f"{catalogue.root} has no model, and hf holds nothing else",
                hint="holdfast ckpt inspect shows what it has",
            )
        lost += [_section(key, node) for key, node in catalogue.tree.items() if key != "model"]
    if to == "deepspeed-universal":
        if halves := _halves(catalogue):
            lost.append(f"the dtype of {count(len(halves), 'tensor')}, as {halves[0]} (they become float32)")
        lost += deepspeed_universal_write.changes(catalogue)
    if to in ("torch", "dcp"):
        lost += _changed(catalogue, to)
    marked = [("frozen parameter", catalogue.frozen), ("buffer", catalogue.buffers)]
    marks = [count(len(names), noun) for noun, names in marked if names and to != "deepspeed-universal"]
    lost += [f"the marks of {' and '.join(marks)}"] if marks else []
    if absent := catalogue.left_out:
        lost.append(f"the digests of {count(len(absent), 'frozen weight')}, as {absent[0]} (they are not in it)")
    return lost


def _changed(catalogue: Catalogue, to: str) -> list[str]:
    """Values that become something else in torch's own formats, in words."""
    lost = []
    if arrays := [name_of(path) for path, node in dicts(catalogue.tree) if node.keys() == {NUMPY}]:
        lost.append(f"the marks of {count(len(arrays), 'numpy array')}, as {arrays[0]} (they become tensors)")
    if to == "dcp" and (keys := _other_keys(catalogue)):
        lost.append(f"the type of {count(len(keys), 'key')}, as {keys[0]} (they become texts)")
    optimizer = catalogue.tree.get("optimizer")
    if to == "torch" and isinstance(optimizer, dict) and in_model_order(catalogue) != optimizer:
        lost.append(
            f"the order in which {catalogue.details['ranks']} ranks had the optimizer's parameters (torch loads "
            "optimizers by position: within each group they are in the model's order)"
        )
    return lost


def _other_keys(catalogue: Catalogue) -> list[str]:
    """Names of values under a key that is not a text. An optimizer's numbers do not count: readers restore them."""
    return [
        name_of((*path, key))
        for path, node in dicts(catalogue.tree)
        for key in node
        if not isinstance(key, str) and path != ("optimizer", "state")
    ]


def written(catalogue: Catalogue, to: str) -> dict[str, TensorEntry]:
    """The tensors that will be in the new checkpoint."""
    names = {ref.name for ref in refs(catalogue.tree.get("model") if to == "hf" else catalogue.tree)}
    return {name: entry for name, entry in catalogue.tensors.items() if name in names}


def _halves(catalogue: Catalogue) -> list[str]:
    """Names of trained parameters and optimizer slots that are in 16 bits."""
    optimizer, model = catalogue.tree.get("optimizer"), catalogue.tree.get("model") or {}
    trained = [model.get(name) for group in groups_of(optimizer) or () for name in group["params"]]
    names = dict.fromkeys(ref.name for ref in refs([*trained, optimizer]))
    return [name for name in names if catalogue.tensors[name].dtype in (torch.bfloat16, torch.float16)]


def _section(key: str, node: Any) -> str:
    tensors = len({ref.name for ref in refs(node)})
    return f"{key} ({count(tensors, 'tensor')})" if tensors else str(key)


# --- the writer of our own format -----------------------------------------------------------------


def write(catalogue: Catalogue, path: Path, *, progress: Progress = silent) -> None:
    """Writes a checkpoint of our own format, as ``save`` does, from another checkpoint."""
    with appearing(path) as unfinished:
        with explained(unfinished, "create"):
            unfinished.mkdir()
        _write_into(catalogue, unfinished, progress)


def _write_into(catalogue: Catalogue, folder: Place, progress: Progress, replaces: str = "") -> Catalogue:
    """Writes data files and index into a folder; returns what the index says."""
    tree, dropped = keepable(catalogue.tree)
    save = index.new_id()
    writer = f"holdfast ckpt convert on {socket.gethostname()}"
    files: dict[str, DataFile] = {}
    tensors: dict[str, TensorEntry] = {}
    for number, names in enumerate(_shared_out(catalogue)):
        file = index.data_name(save, number)
        image, fill = _image(catalogue, names)
        sums = write_blocks(folder / file, image.size, fill, progress=progress)
        files[file] = DataFile(bytes=image.size, checksums=sums, writer=writer)
        for name in names:
            old = catalogue.tensors[name]
            stored = dense(file=file, offset=image.offsets[name], dtype=old.dtype, shape=old.shape)
            tensors[name] = entry_of(stored)
    left_out = [*catalogue.details.get("left_out", ()), *dropped]
    kept = {key: catalogue.details[key] for key in ("ranks",) if key in catalogue.details}
    details = {**kept, "converted_from": catalogue.format, **({"left_out": left_out} if left_out else {})}
    tensors = {name: tensors[name] for name in catalogue.tensors}
    made = replace(catalogue, root=folder, tensors=tensors, tree=tree, files=files, details=details)
    index.commit(made, save, replaces=replaces)
    return made


def _shared_out(catalogue: Catalogue) -> Iterator[list[str]]:
    """The names of the tensors of each data file; there is at least one file."""
    names: list[str] = []
    size = 0
    for name, entry in catalogue.tensors.items():
        if names and size + entry.nbytes > FILE:
            yield names
            names, size = [], 0
        names.append(name)
        size += entry.nbytes
    yield names


def _image(catalogue: Catalogue, names: Sequence[str]) -> tuple[Image, Callable[[int, int, Bytes], Bytes]]:
    """A data file, and the function that fills a block of it.

    For each block, the tensors in it first collect what they want, then all of that is read at once: a source with
    checksums has to be read in whole blocks, even for a few bytes.
    """
    local = threading.local()  # several threads fill blocks at the same time

    def array(name: str, entry: TensorEntry) -> Array:
        def collect(start: int, stop: int, out: Bytes) -> None:
            line = torch.from_numpy(out).view(entry.dtype)
            local.wants += flat_wants(name, entry.shape, start // entry.dtype.itemsize, line)

        return Array(name=name, dtype=entry.dtype, shape=entry.shape, fill=collect)

    image = Image([array(name, catalogue.tensors[name]) for name in names])

    def fill(start: int, stop: int, out: Bytes) -> Bytes:
        wants: list[Want] = []
        local.wants = wants
        image.fill(start, stop, out)
        read(catalogue, wants, threads=1)
        return out

    return image, fill


def keepable(tree: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The part of a tree that our index can hold, and the names of the rest: objects of other programs.

    >>> keepable({"step": 7, "args": {"lr": 0.1, "device": torch.device("cpu")}})
    ({'step': 7, 'args': {'lr': 0.1}}, ['args/device'])
    """
    dropped: list[str] = []

    def keep(node: Any, path: tuple[Any, ...]) -> tuple[Any, bool]:
        if isinstance(node, dict):
            kept = {key: keep(value, (*path, key)) for key, value in node.items()}
            return {key: value for key, (value, does) in kept.items() if does}, True
        if isinstance(node, list | tuple):
            items = [keep(value, (*path, number)) for number, value in enumerate(node)]
            return type(node)(value for value, _ in items), True  # None holds the place of what is dropped
        try:
            codec.encode(node, lambda value: value.name if isinstance(value, Ref) else None)
        except UsageError:
            dropped.append(name_of(path))
            return None, False
        return node, True

    return keep(tree, ())[0], dropped
