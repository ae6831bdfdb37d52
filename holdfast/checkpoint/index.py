"""The index of a checkpoint, ``index.json``: a small file that says which tensor lies where.

A checkpoint exists from the moment on at which its index does. docs/checkpoint-format.md describes it byte by byte.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from holdfast import codec
from holdfast.checkpoint.digests import from_json, to_json
from holdfast.checkpoint.disk import (
    BLOCK,
    NO_LINKS,
    blocks_of,
    checksum,
    discard,
    discard_later,
    explained,
    sync_folder,
    write_durably,
)
from holdfast.checkpoint.inside import read_begin, read_regular
from holdfast.checkpoint.pieces import Box, Catalogue, DataFile, Digested, Piece, Ref, Shape, TensorEntry, dense, whole
from holdfast.checkpoint.places import Place, Remote
from holdfast.checkpoint.s3_uploads import abort_uploads
from holdfast.checkpoint.safetensors_writer import DTYPES, PAIRS
from holdfast.checkpoint.shared_files import SHARING, check_file, folder_beside, is_shared
from holdfast.checkpoint.tiling import sources, tiles
from holdfast.errors import CheckpointError, NoCheckpoint

P = TypeVar("P", Path, Remote, Place)
NAME = "index.json"
LAST = 1 << 37  # seconds since 1970, about the year 6300: later times are in no calendar
VERSIONS = (1, 2)  # of the format that are read; 2 is written only where files are shared, which 1 cannot say
_PREFIX = '{"xxh3":"%s","index":'
_DATA = re.compile(r"data-[0-9a-f]{12}-\d+\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_UNFINISHED = re.compile(r"\.((index-[0-9a-f]{12}|report-[0-9a-f]{12}-\d+)\.(json|unfinished)|probe-[0-9a-f]{12})")


def new_id() -> str:
    """A random identifier of one save, for the names of its files: a folder may hold files of several saves."""
    return secrets.token_hex(6)


def data_name(save: str, rank: int) -> str:
    """The name of the data file that a rank writes in a save."""
    return f"data-{save}-{rank}.safetensors"


def save_of(name: str) -> str:
    """The identifier of the save that a file is of, from the file's name.

    >>> save_of("data-3f9a01c2b7d4-0.safetensors"), save_of(".index-3f9a01c2b7d4.json")
    ('3f9a01c2b7d4', '3f9a01c2b7d4')
    """
    found = re.search(r"-([0-9a-f]{12})[-.]", name)
    return found[1] if found else ""


def report_name(save: str, rank: int) -> str:
    """The name of the file in which a worker of a run reports what it has written."""
    return f".report-{save}-{rank}.json"


# --- writing --------------------------------------------------------------------------------------


def commit(catalogue: Catalogue, save: str, *, guard: Callable[[], object] | None = None, replaces: str = "") -> None:
    """Writes the index of a checkpoint whose data files are durable; ``save`` is its identifier.

    Until the rename in here the folder holds the old checkpoint, from then on the new one. ``guard`` is called just
    before and raises if this process may not commit any more; then an index that comes up after that is not replaced.
    ``replaces``, for a store: the version of the index that this one replaces; empty: there must be none.
    Raises ``CheckpointError`` if the index cannot be written.
    """
    body = json.dumps(_describe(catalogue), separators=(",", ":"))
    text = f"{_PREFIX % _checksum(body.encode())}{body}}}".encode()
    folder = catalogue.root
    if isinstance(folder, Remote):
        _commit_to_store(catalogue, folder, save, text, guard, replaces)
        return
    unfinished = folder / f".index-{save}.json"
    shared = {name: file for name, file in catalogue.files.items() if is_shared(name)}
    with SHARING if shared else nullcontext():
        try:
            with explained(unfinished, "write"):
                # Makes the names of the data files durable before the index refers to them.
                for place in (*([folder_beside(folder)] if shared else []), folder):
                    sync_folder(place)
                write_durably(unfinished, text)
            for name, file in shared.items():
                check_file(folder, name, file)
            is_new = guard is not None and not exists(folder)
            if guard is not None:
                guard()
        except Exception:
            # Only before the rename: once it has been asked for, these files may be the only checkpoint there is. Of
            # shared files only its own: others refer to the rest.
            discard([unfinished, *(folder / name for name in catalogue.files if save in name)])
            raise
        with explained(folder / NAME, "write"):
            if not is_new or not _link(unfinished, folder / NAME):
                os.replace(unfinished, folder / NAME)
            sync_folder(folder)


def _commit_to_store(
    catalogue: Catalogue, folder: Remote, save: str, text: bytes, guard: Callable[[], object] | None, replaces: str
) -> None:
    """Makes the index of a checkpoint in a store, unless somebody else makes it at the same moment.

    It is created under the condition that there is none, or replaces exactly the one that was there. What was written
    for it is removed only if it surely does not exist.
    """
    place = folder / NAME
    own = [folder / name for name in catalogue.files if save in name]
    shared = {name: file for name, file in catalogue.files.items() if is_shared(name)}
    with SHARING if shared else nullcontext():
        try:
            for name, file in shared.items():
                check_file(folder, name, file)
            if guard is not None:
                guard()
        except Exception:
            discard(own)
            raise
        with explained(place, "write"):
            made = place.replace(text, replaces) if replaces else place.create(text)
        if not made:
            discard(own)
            raise CheckpointError(f"somebody else has saved {folder} at the same moment: it is not replaced")


def _link(unfinished: Path, path: Path) -> bool:
    """Gives a file the name of an index that is not there yet; returns False where files can have one name only.

    Raises ``CheckpointError`` if somebody who has taken the folder over has written an index,
    or has removed this one.
    """
    try:
        os.link(unfinished, path)
    except (FileExistsError, FileNotFoundError) as e:
        raise CheckpointError(f"somebody else has saved {path.parent} at the same moment: it is not replaced") from e
    except OSError as e:
        if e.errno not in NO_LINKS:
            raise
        return False
    unfinished.unlink()
    return True


def _checksum(body: bytes) -> str:
    return checksum(np.frombuffer(body, dtype=np.uint8))


def _describe(catalogue: Catalogue) -> dict[str, Any]:
    numbers = {name: number for number, name in enumerate(catalogue.files)}
    return {
        "version": 2 if any(map(is_shared, catalogue.files)) else 1,
        "block": BLOCK,
        "details": {**catalogue.details, "torch": torch.__version__, "saved": round(time.time(), 3)},
        "files": [
            {"name": name, "bytes": file.bytes, "writer": file.writer, "blocks": list(file.checksums or ())}
            for name, file in catalogue.files.items()
        ],
        "tensors": {
            name: {
                "dtype": codec.dtype_name(entry.dtype),
                "shape": list(entry.shape),
                "pieces": [
                    [numbers[p.stored.file], p.stored.offset, list(p.box.offset), list(p.box.shape)]
                    for p in entry.pieces
                ],
            }
            for name, entry in catalogue.tensors.items()
        },
        "tied": dict(catalogue.tied),
        "frozen": list(catalogue.frozen),
        "buffers": list(catalogue.buffers),
        **({"digests": {name: to_json(one) for name, one in catalogue.digests.items()}} if catalogue.digests else {}),
        "tree": codec.encode(catalogue.tree, lambda value: value.name if isinstance(value, Ref) else None, "tree"),
    }


def clean(folder: Place, keep: Iterable[str] = ()) -> None:
    """Removes the files of unfinished or replaced saves from a folder, in the background, except those to keep."""
    discard_later(litter(folder, keep))


def clean_before(folder: Place, save: str) -> None:
    """Removes files of killed saves before the save ``save`` needs the room.

    Raises ``CheckpointError`` if another program's ``index.json`` is there, which must not be replaced.
    """
    with explained(folder, "read"):
        foreign = exists(folder) and not _is_ours(folder, save)
    if foreign:
        hint = "save into another folder, or move that file"
        raise CheckpointError(
            f"{folder / NAME} is there already and not of a checkpoint: it is not replaced", hint=hint
        )
    try:
        known = open(folder).files if exists(folder) else {}
    except CheckpointError:
        return  # the files of a checkpoint whose index is damaged may still be rescued
    discard_later([path for path in litter(folder, known) if save not in path.name])
    abort_uploads(folder, lambda upload: bool(_DATA.fullmatch(upload.place.name)) and save not in upload.place.name)


def litter(folder: P, keep: Iterable[str] = ()) -> list[P]:
    """The files in a folder that are named as saves name theirs, except those to keep."""
    with explained(folder, "read"):
        found = [path for path in folder.iterdir() if _DATA.fullmatch(path.name) or _UNFINISHED.fullmatch(path.name)]
    kept = {*keep}
    return [path for path in found if path.name not in kept]


# --- reading --------------------------------------------------------------------------------------


def version_in(folder: Place) -> str:
    """The version of the index in a folder of a store, for ``commit``; empty if there is none, and on a disk."""
    if not isinstance(folder, Remote):
        return ""
    with explained(folder / NAME, "read"), suppress(FileNotFoundError):
        return folder.store.head(folder / NAME).version
    return ""


def exists(folder: Place) -> bool:
    """Whether a committed checkpoint is in a folder."""
    with explained(folder, "read"):
        return (folder / NAME).is_file()


def recognise(path: Place) -> bool:
    """Whether a folder is a checkpoint of this format.

    One that has lost its index counts too: it must not be taken for a checkpoint of another format.
    """
    try:
        return _is_ours(path)
    except (OSError, CheckpointError):
        return False


def _is_ours(folder: Place, save: str = "") -> bool:
    """Whether a folder has data files of ours (except those of ``save``), or an index that begins as ours does."""
    if any(_DATA.fullmatch(name) and not (save and save in name) for name in _names_in(folder)):
        return True
    return (folder / NAME).is_file() and read_begin(folder / NAME, 9) == _PREFIX[:9].encode()


def _names_in(folder: Place) -> list[str]:
    """The names of what is in a folder. Raises ``OSError``."""
    return [place.name for place in folder.iterdir()] if isinstance(folder, Remote) else os.listdir(folder)


def open(path: Place) -> Catalogue:
    """The catalogue of a checkpoint.

    Raises ``CheckpointError`` if the index is damaged, or a data file is missing or has another size.
    """
    catalogue = read(path)
    for name, file in catalogue.files.items():
        if file.checksums is None or len(file.checksums) != len(blocks_of(file.bytes)):
            raise CheckpointError(f"{path / name} has no checksum for each of its blocks")
        check_file(path, name, file)
    return catalogue


def files_of(path: Place) -> list[str]:
    """The names of a checkpoint's data files. Raises ``CheckpointError`` if the index is damaged."""
    try:
        return [str(file["name"]) for file in _parse(path / NAME)["files"]]
    except (KeyError, TypeError) as e:
        raise CheckpointError(f"{path / NAME} is not a valid index: {e!r:.400}") from e


def read(path: Place) -> Catalogue:
    """The catalogue of a checkpoint, without a look at its data files (see :func:`open`)."""
    if not exists(path):
        raise NoCheckpoint(f"{path} has no {NAME}", hint="a save that was not completed, or no checkpoint")
    index = _parse(path / NAME)
    try:
        return _catalogue(path, index)
    except CheckpointError as e:
        raise CheckpointError(f"{path / NAME} is not a valid index: {e}") from e
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as e:
        raise CheckpointError(f"{path / NAME} is not a valid index: {e!r:.400}") from e


def _parse(path: Place) -> dict[str, Any]:
    with explained(path, "read"):
        text = read_regular(path, path.parent)
    length = len(_PREFIX % ("0" * 16))
    body = text[length:-1]
    expected = f"{_PREFIX % _checksum(body)}".encode()
    if text[:length] != expected or text[-1:] != b"}":
        raise CheckpointError(f"{path} is damaged", hint="restore it, or load an older checkpoint")
    try:
        index = json.loads(body)
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path} is not JSON: {e}") from e
    version = index.get("version") if isinstance(index, dict) else None
    if type(version) is not int or version not in VERSIONS:
        raise CheckpointError(
            f"{path} has version {version}, this holdfast reads {' and '.join(map(str, VERSIONS))}",
            hint="use the holdfast that wrote it, or a newer one",
        )
    return index


def _catalogue(root: Place, index: Mapping[str, Any]) -> Catalogue:
    if index["block"] != BLOCK:
        raise ValueError(f"its blocks are {index['block']!r} bytes long, not {BLOCK}")
    names = [str(file["name"]) for file in index["files"]]
    for name in names:
        if not _DATA.fullmatch(name) and not (index["version"] > 1 and is_shared(name)):
            raise ValueError(f"{name!r} is not the name of a data file")
    if len(set(names)) != len(names):
        raise ValueError("a data file is listed twice")
    files = {
        file["name"]: DataFile(
            bytes=_count(file["bytes"]), checksums=_texts(file["blocks"]), writer=str(file.get("writer", ""))
        )
        for file in index["files"]
    }
    tensors = {name: _entry(name, item, names, files) for name, item in index["tensors"].items()}
    _refuse_shared_bytes(tensors)
    return Catalogue(
        format="holdfast",
        root=root,
        tensors=tensors,
        tree=_dict(codec.decode(index["tree"], lambda name: _ref(name, tensors))),
        files=files,
        tied=dict(zip(index["tied"], _texts(index["tied"].values()), strict=True)),
        frozen=_texts(index["frozen"]),
        buffers=_texts(index["buffers"]),
        digests={name: _digested(name, item) for name, item in index.get("digests", {}).items()},
        details=_details(index["details"]),
    )


def _count(value: Any) -> int:
    """A number of things or of bytes. Python would also take -1, True and 4.0 for one."""
    if type(value) is not int or not 0 <= value < 1 << 60:
        raise ValueError(f"{value!r} is no size")
    return value


def _counts(values: Iterable[Any]) -> Shape:
    return tuple(map(_count, values))


def _texts(values: Iterable[Any]) -> tuple[str, ...]:
    found = tuple(values)
    if not all(isinstance(value, str) for value in found):
        raise ValueError(f"{found!r} are not all names")
    return found


def _dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is no object")
    return value


def _details(value: Any) -> dict[str, Any]:
    """The details of an index, of which commands show a time and sentences."""
    details = _dict(value)
    saved = details.get("saved", 0)
    if type(saved) not in (int, float) or not 0 <= saved < LAST:
        raise ValueError(f"it was saved at {saved!r:.50}, which is no time")
    if not isinstance(details.get("left_out", []), list):
        raise ValueError("it does not list what was left out")
    _texts(details.get("left_out", []))
    return details


def _ref(name: Any, tensors: Mapping[str, TensorEntry]) -> Ref:
    if name not in tensors:
        raise ValueError(f"the tree has a tensor {name!r}, which is not among the tensors")
    return Ref(name=name)


def _entry(name: str, item: Mapping[str, Any], names: list[str], files: Mapping[str, DataFile]) -> TensorEntry:
    dtype, shape = codec.dtype_of(item["dtype"]), _counts(item["shape"])
    if dtype not in DTYPES and dtype not in PAIRS:
        raise ValueError(f"{name} is {dtype}, which no data file can hold")
    if math.prod(max(n, 1) for n in shape) >= 1 << 60:
        raise ValueError(f"{name} has shape {shape}, which no memory can hold")
    pieces = []
    for number, position, offset, size in item["pieces"]:
        box = Box(offset=_counts(offset), shape=_counts(size))
        stored = dense(file=names[_count(number)], offset=_count(position), dtype=dtype, shape=box.shape)
        if stored.offset + stored.span > files[stored.file].bytes:
            raise ValueError(f"a piece of {name} lies outside of {stored.file}")
        pieces.append(Piece(box=box, stored=stored))
    if not tiles((piece.box for piece in pieces), whole(shape)):
        raise ValueError(_untiled(name, shape, [piece.box for piece in pieces]))
    return TensorEntry(shape=shape, dtype=dtype, pieces=tuple(pieces))


def _digested(name: str, item: Mapping[str, Any]) -> Digested:
    """The digests of a frozen tensor, whose boxes must cover it exactly once."""
    found = from_json(item)
    _counts(found.shape)
    for box, digest in found.boxes:
        _counts((*box.offset, *box.shape))
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise ValueError(f"{digest!r:.50} is no digest of {name}")
    if not tiles((box for box, _ in found.boxes), whole(found.shape)):
        raise ValueError(_untiled(name, found.shape, [box for box, _ in found.boxes]))
    return found


def _untiled(name: str, shape: Shape, boxes: Sequence[Box]) -> str:
    """A sentence about boxes that do not cover a tensor exactly once; ``CheckpointError`` if they overlap wildly."""
    whole_rank = [box for box in boxes if len(box.offset) == len(box.shape) == len(shape)]
    _, left = sources(whole(shape), whole_rank)
    if left:
        return f"no piece holds {left[0]} of {name}"
    return f"two of the {len(boxes)} pieces of {name} hold the same part, or one lies outside of its shape {shape}"


def _refuse_shared_bytes(tensors: Mapping[str, TensorEntry]) -> None:
    """Refuses pieces that share bytes. No save makes them; a forged index could claim a huge tensor in a small file."""
    places = sorted(
        (piece.stored.file, piece.stored.offset, piece.stored.offset + piece.stored.span, name)
        for name, entry in tensors.items()
        for piece in entry.pieces
        if piece.stored.span
    )
    for (file, _, end, first), (other, start, _, second) in itertools.pairwise(places):
        if file == other and start < end:
            raise ValueError(f"a piece of {first} and one of {second} lie in the same bytes of {file}, at {start}")
