"""Safetensors files in Hugging Face's layout (one, or several with an index), and in DCP's, in pieces.

DCP's shards (``HuggingFaceStorageWriter``) hold boxes of tensors, with the offset of each box in the header. The
full shape of a tensor is written nowhere: it is where its boxes end, so a lost *last* shard shows only when
the tensor is loaded into something.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from holdfast.checkpoint.coverage import check_tiling
from holdfast.checkpoint.disk import Progress, explained, silent
from holdfast.checkpoint.formats.canonical import assemble
from holdfast.checkpoint.formats.output import appearing, array
from holdfast.checkpoint.formats.pickled import PickleFile
from holdfast.checkpoint.formats.safetensors_header import read_header
from holdfast.checkpoint.inside import read_regular
from holdfast.checkpoint.pieces import Box, Catalogue, Piece, Ref, Shape, TensorEntry
from holdfast.checkpoint.safetensors_writer import PAIRS, Array, write_safetensors
from holdfast.errors import CheckpointError, UsageError
from holdfast.words import a_kind

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = "sharded"  # the folder of DCP's shards, when it also writes whole tensors beside it
SHARD_BYTES = 5_000_000_000  # of a file before the next begins, as in transformers
_NUMBERED = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
_DCP_SHARD = re.compile(r"shard-(\d{5})-model-(\d{5})-of-(\d{5})\.safetensors")
_OFFSETS = "DCP_SHARDING_INFO"
_TIED = "holdfast.tied"
_INCOMPLETE = "download or copy it again"


def recognise(path: Path) -> bool:
    """Whether a path is a safetensors file, or a folder of them under Hugging Face's or DCP's names."""
    try:
        if path.is_file():
            with path.open("rb") as file:
                return path.suffix == ".safetensors" and file.read(9)[8:] == b"{"
        return path.is_dir() and ((path / INDEX).is_file() or bool(_data_files(path)))
    except OSError:
        return False


def open(path: Path) -> Catalogue:
    """The catalogue of a model, with tied names if the file notes them as ``save_model`` of safetensors does."""
    root = path.parent if path.is_file() else path
    index = _read_index(path) if (path / INDEX).is_file() else {}
    names = [path.name] if path.is_file() else _files(path, index)
    parts, ties = _read_parts(root, names, given=path.is_file())
    for name, file in index.items():
        if not any(part.piece.stored.file == file for part in parts.get(name, ())):
            raise CheckpointError(f"{root / file} has no {name}, which {INDEX} says it has", hint=_INCOMPLETE)
    model: dict[str, Any] = {name: _entry(name, found, root) for name, found in parts.items()}
    for name, first in ties.items():
        if first in model and name not in model:
            model[name] = model[first]
    read = [*names, *([INDEX] if index else [])]
    return assemble(format="hf", root=root, tree={"model": model}, where=path, read=read)


# --- which files ----------------------------------------------------------------------------------


def _data_files(folder: Path) -> list[str]:
    """The data files of a folder, by their names alone: one, numbered ones, or DCP's shards."""
    names = sorted(os.listdir(folder))
    if SINGLE in names:
        return [SINGLE]
    numbered = [name for name in names if _NUMBERED.fullmatch(name)]
    shards = [name for name in names if _DCP_SHARD.fullmatch(name)]
    if not numbered and not shards and (folder / SHARDS).is_dir():
        inside = sorted(os.listdir(folder / SHARDS))
        shards = [f"{SHARDS}/{name}" for name in inside if _DCP_SHARD.fullmatch(name)]
    return numbered or shards


def _files(folder: Path, index: Mapping[str, str]) -> list[str]:
    names = _data_files(folder)
    if index:
        files = sorted(set(index.values()))
        if SINGLE in names and SINGLE not in files:
            text = f"{folder} has {SINGLE} and {INDEX}, which does not mention it"
            raise CheckpointError(text, hint="open the one you mean, or move it")
        return files
    if not names:
        raise CheckpointError(f"{folder} has no {SINGLE} and no {INDEX}", hint=_INCOMPLETE)
    if names == [SINGLE]:
        return names
    pattern = _NUMBERED if _NUMBERED.fullmatch(names[0]) else _DCP_SHARD
    _check_numbers(folder, names, [[int(n) for n in _groups(pattern, name)] for name in names])
    return names


def _groups(pattern: re.Pattern[str], name: str) -> Iterable[str]:
    found = pattern.fullmatch(PurePosixPath(name).name)
    assert found is not None
    return found.groups()


def _check_numbers(folder: Path, names: list[str], numbers: list[list[int]]) -> None:
    """Refuses a set of files of which one is missing, or which are of two sets."""
    if len({number[-1] for number in numbers}) > 1:
        hint = "remove what an older save has left"
        raise CheckpointError(f"{folder}: {names[0]} and {names[-1]} are not of the same set", hint=hint)
    first = sorted({number[0] for number in numbers})
    last = numbers[0][-1] if len(numbers[0]) == 2 else first[-1]
    missing = sorted(set(range(1, last + 1)) - set(first))
    if missing:
        example = re.sub(r"\d{5}", f"{missing[0]:05}", names[0], count=1)
        raise CheckpointError(f"{folder / example} is missing", hint=_INCOMPLETE)


def _read_index(folder: Path) -> dict[str, str]:
    """The file of each tensor."""
    where = folder / INDEX
    try:
        index = {
            str(name): str(PurePosixPath(file))
            for name, file in json.loads(read_regular(where, folder))["weight_map"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise CheckpointError(f"{where} is damaged: {error!r:.300}", hint=_INCOMPLETE) from error
    if not index:
        raise CheckpointError(f"{where} names no tensor", hint=_INCOMPLETE)
    for name, file in index.items():
        if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
            raise CheckpointError(f"{where} refers to {file}, outside of its folder", hint="do not trust this file")
        if not (folder / file).is_file():
            raise CheckpointError(f"{folder / file}, which holds {name}, is missing", hint=_INCOMPLETE)
    return index


# --- what is in them ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _TensorPart:
    """A piece of a tensor in one file."""

    piece: Piece
    is_whole: bool  # the file says nothing of offsets


def _read_parts(root: Path, names: list[str], *, given: bool) -> tuple[dict[str, list[_TensorPart]], dict[str, str]]:
    """The parts of each tensor, and second names with their first ones."""
    parts: dict[str, list[_TensorPart]] = defaultdict(list)
    ties: dict[str, str] = {}
    for file in names:
        with PickleFile(root / file, root=root, given=given) as source:
            header = read_header(source)
        ties.update(_ties(header.metadata))
        offsets = _offsets(header.metadata, root / file)
        for name, stored in header.arrays.items():
            offset = (0,) * len(stored.shape) if offsets is None else offsets.get(name)
            if offset is None or len(offset) != len(stored.shape):
                raise CheckpointError(f"{root / file} does not say which part of {name} it holds", hint=_INCOMPLETE)
            piece = Piece(box=Box(offset=offset, shape=stored.shape), stored=stored)
            parts[name].append(_TensorPart(piece=piece, is_whole=offsets is None))
    return parts, ties


def _ties(metadata: Mapping[str, str]) -> dict[str, str]:
    """Second names with their first ones, among whatever else people note in a file.

    ``save_model`` of safetensors notes them as if they were any text. A key with a dot is taken for a parameter's
    name if its value is a tensor's; ours without a dot are marked.

    >>> _ties({"format": "pt", "head.weight": "embed.weight", "holdfast.tied": '{"head": "embed"}', "base": "w"})
    {'head.weight': 'embed.weight', 'head': 'embed'}
    """
    try:
        marked = json.loads(metadata.get(_TIED, "{}"))
    except (ValueError, RecursionError):
        marked = None
    sure = {key: text for key, text in marked.items() if isinstance(text, str)} if isinstance(marked, dict) else {}
    return {**{key: text for key, text in metadata.items() if "." in key and key != _TIED}, **sure}


def _noted(tied: Mapping[str, str]) -> dict[str, str]:
    """Metadata about second names, which :func:`_ties` reads."""
    bare = {second: first for second, first in tied.items() if "." not in second}
    dotted = {second: first for second, first in tied.items() if "." in second}
    return {**dotted, **({_TIED: json.dumps(bare)} if bare else {})}


def _offsets(metadata: Mapping[str, str], where: Path) -> dict[str, Shape] | None:
    """The offsets of a DCP shard's boxes in their tensors; None for an ordinary file."""
    if _OFFSETS not in metadata:
        return None
    try:
        return {name: tuple(map(int, item["saved_offsets"])) for name, item in json.loads(metadata[_OFFSETS]).items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where}: its {_OFFSETS} is damaged: {error!r:.300}", hint=_INCOMPLETE) from error


def _entry(name: str, parts: list[_TensorPart], root: Path) -> TensorEntry:
    pieces = tuple(part.piece for part in parts)
    files = [piece.stored.file for piece in pieces]
    if len(parts) > 1 and any(part.is_whole for part in parts):
        raise CheckpointError(f"{root}: {name} is in {files[0]} and in {files[1]}", hint="remove the one that is old")
    kinds = {(piece.stored.dtype, len(piece.box.shape)) for piece in pieces}
    if len(kinds) > 1:
        raise CheckpointError(f"{root}: parts of {name} differ in dtype: {files}", hint="remove what is old")
    ends = [[o + n for o, n in zip(piece.box.offset, piece.box.shape, strict=True)] for piece in pieces]
    shape = tuple(max(column) for column in zip(*ends, strict=True))
    check_tiling([piece.box for piece in pieces], shape, name=name, where=root)
    return TensorEntry(shape=shape, dtype=pieces[0].stored.dtype, pieces=pieces)


# --- writing --------------------------------------------------------------------------------------


def write(catalogue: Catalogue, path: Path, *, progress: Progress = silent, max_shard_bytes: int = SHARD_BYTES) -> None:
    """Writes the model into a folder for ``from_pretrained``, or into one file if the path ends in .safetensors.

    Of tied names the first is kept, and the file says which others are the same.
    """
    arrays, tied = _model(catalogue)
    for one in arrays:
        if one.dtype in PAIRS:  # our own files hold them as pairs; nobody else would know
            raise UsageError(f"{one.name} is {one.dtype}, which safetensors files cannot hold")
    if path.suffix == ".safetensors":
        with appearing(path) as unfinished:
            write_safetensors(unfinished, arrays, metadata={"format": "pt", **_noted(tied)}, progress=progress)
        return
    shards = split(arrays, max_shard_bytes)
    with appearing(path) as folder:
        with explained(folder, "write"):
            folder.mkdir()
        names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
        for name, shard in zip(names if len(shards) > 1 else [SINGLE], shards, strict=True):
            kept = {one.name for one in shard}
            inside = {second: first for second, first in tied.items() if first in kept}
            write_safetensors(folder / name, shard, metadata={"format": "pt", **_noted(inside)}, progress=progress)
        if len(shards) > 1:
            with explained(folder / INDEX, "write"):
                _write_index(folder / INDEX, dict(zip(names, shards, strict=True)))


def _model(catalogue: Catalogue) -> tuple[list[Array], dict[str, str]]:
    model = catalogue.tree.get("model")
    if not isinstance(model, dict) or not model:
        raise CheckpointError(f"{catalogue.root} has no model", hint="only the weights can be written as safetensors")
    arrays: dict[str, Array] = {}
    first: dict[str, str] = {}
    tied: dict[str, str] = {}
    for name, value in model.items():
        if value is None:
            continue
        if not isinstance(value, Ref):
            text = f"{catalogue.root}: the model's {name} is {a_kind(value)}, not a tensor"
            raise CheckpointError(text, hint="safetensors files hold tensors only")
        known = first.setdefault(value.name, name)
        if known == name:
            arrays[name] = array(catalogue, value.name, called=name)
        else:
            tied[name] = known
    return list(arrays.values()), tied


def split(arrays: Iterable[Array], limit: int) -> list[list[Array]]:
    """Arrays in their order, distributed over files of at most ``limit`` bytes; a larger array is alone."""
    shards: list[list[Array]] = [[]]
    size = 0
    for one in arrays:
        if shards[-1] and size + one.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(one)
        size += one.nbytes
    return shards


def _write_index(path: Path, shards: Mapping[str, list[Array]]) -> None:
    total = sum(one.nbytes for shard in shards.values() for one in shard)
    names = {one.name: file for file, shard in shards.items() for one in shard}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=2)
    with path.open("x") as stream:
        stream.write(text + "\n")
        stream.flush()
        os.fsync(stream.fileno())
