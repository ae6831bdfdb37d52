"""Frozen weights in a save: left out, referred to, or written into the folder that a series of checkpoints shares.

What the newest checkpoint of the series has in that folder is known with its digests. The ranks share out the work of
comparing them with what they hold: what is the same is referred to, the rest is written. Nothing is taken on trust: a
parameter without a gradient may change all the same, as an average of weights does.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from holdfast.checkpoint import digests, index, series
from holdfast.checkpoint.digests import Task, chunks
from holdfast.checkpoint.held import Held
from holdfast.checkpoint.pieces import Box, Catalogue, DataFile, Digested, Piece, TensorEntry, dense
from holdfast.checkpoint.places import Place
from holdfast.checkpoint.ranks import Ranks, together
from holdfast.checkpoint.shared_files import check_file, is_shared
from holdfast.checkpoint.who_writes import HeldBoxes, Inventory, Job, share
from holdfast.errors import CheckpointError

LEAST = 1 << 20  # bytes of frozen weights that are worth files of their own; fewer are in each checkpoint
LOOK_BACK = 3  # newest checkpoints that are asked for shared files: one may be damaged


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Frozen tensors that a checkpoint of the series has in shared files, with their digests."""

    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)
    digests: Mapping[str, Digested] = field(default_factory=dict)
    files: Mapping[str, DataFile] = field(default_factory=dict)


@dataclass(kw_only=True)
class FrozenPlan:
    """Decision on the frozen tensors of a save, the same on all ranks.

    ``apart``: those that the checkpoint's own data files do not hold. Of these, ``left_out`` are in no file,
    ``referred`` are in shared files already, and the rest is written to new ones: ``jobs`` are the boxes of each rank.
    ``digests``: those of the boxes that this rank writes or leaves out.
    """

    apart: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()
    referred: Stored = field(default_factory=Stored)
    jobs: list[list[Job]] = field(default_factory=list)
    digests: dict[str, list[tuple[Box, str]]] = field(default_factory=dict)


def stored_beside(path: Place) -> Stored:
    """What the newest checkpoints beside one have in shared files that are there; nothing if they have none."""
    for step in islice(reversed(series.steps_in(path.parent)), LOOK_BACK):
        try:
            catalogue = index.read(series.folder_of(path.parent, step))
            found = _shared_in(catalogue)
            for name, file in found.files.items():
                check_file(catalogue.root, name, file)
        except CheckpointError:
            continue  # it is written anew
        if found.tensors:
            return found
    return Stored()


def _shared_in(catalogue: Catalogue) -> Stored:
    tensors = {
        name: entry
        for name, entry in catalogue.tensors.items()
        if name in catalogue.digests and entry.pieces and all(is_shared(p.stored.file) for p in entry.pieces)
    }
    return Stored(
        tensors=tensors,
        digests={name: catalogue.digests[name] for name in tensors},
        files=_files(tensors, catalogue.files),
    )


def _files(tensors: Mapping[str, TensorEntry], files: Mapping[str, DataFile]) -> dict[str, DataFile]:
    used = {piece.stored.file for entry in tensors.values() for piece in entry.pieces}
    return {name: file for name, file in files.items() if name in used}


def plan_frozen(
    inventories: Sequence[Inventory],
    held: Mapping[str, Held],
    ranks: Ranks,
    *,
    still: Collection[str],
    left_out: Collection[str],
    stored: Stored | None,
) -> FrozenPlan:
    """Decides what becomes of frozen tensors; all ranks call it, and talk to each other.

    ``still``: the names of all frozen tensors. ``left_out``: those of them that are not to be saved. ``stored``: what
    the series has already; None: this checkpoint is in no series, and holds everything itself.
    """
    absent = frozenset(left_out)
    shared = frozenset(still) - absent
    if stored is None or _size(inventories, shared) < LEAST:
        shared = frozenset()
    if not absent and not shared:
        return FrozenPlan()
    same = _same(inventories, held, ranks, shared, stored or Stored())
    referred = {name: entry for name, entry in (stored or Stored()).tensors.items() if name in same}
    plan = FrozenPlan(apart=absent | shared, left_out=absent, jobs=share(_only(inventories, shared - same)))
    if stored is not None and referred:
        known = {name: stored.digests[name] for name in referred}
        plan.referred = Stored(tensors=referred, digests=known, files=_files(referred, stored.files))
    mine = [*plan.jobs[ranks.rank], *share(_only(inventories, absent))[ranks.rank]]
    plan.digests = together(ranks, "save", lambda: _digests(mine, held))
    return plan


def _only(inventories: Sequence[Inventory], names: Collection[str]) -> list[Inventory]:
    return [{name: one for name, one in inventory.items() if name in names} for inventory in inventories]


def _size(inventories: Sequence[Inventory], names: Collection[str]) -> int:
    """The bytes of some tensors."""
    known = {name: one for inventory in inventories for name, one in inventory.items() if name in names}
    return sum(Box(offset=(), shape=one.shape).numel * one.dtype.itemsize for one in known.values())


def _digests(jobs: Sequence[Job], held: Mapping[str, Held]) -> dict[str, list[tuple[Box, str]]]:
    tasks = [(name, part) for name, box in jobs for part in chunks(box, held[name].dtype.itemsize)]
    found: dict[str, list[tuple[Box, str]]] = {name: [] for name, _ in jobs}
    for (name, box), digest in zip(tasks, digests.digests(tasks, held), strict=True):
        assert digest is not None, f"{name} is written by a rank that does not hold it"
        found[name].append((box, digest))
    return found


def _same(
    inventories: Sequence[Inventory], held: Mapping[str, Held], ranks: Ranks, names: Collection[str], stored: Stored
) -> frozenset[str]:
    """The frozen tensors whose content is in shared files already."""
    candidates, tasks = comparisons(inventories, {n: one for n, one in stored.digests.items() if n in names})
    if not candidates:
        return frozenset()
    mine = tasks[ranks.rank]
    known = {(name, box): digest for name in candidates for box, digest in stored.digests[name].boxes}
    found = together(ranks, "save", lambda: digests.digests(mine, held))
    changed = sorted({task[0] for task, digest in zip(mine, found, strict=True) if digest != known[task]})
    said = [json.loads(text) for text in ranks.exchange(json.dumps(changed).encode())]
    return candidates - {name for theirs in said for name in theirs}


def comparisons(
    inventories: Sequence[Inventory], known: Mapping[str, Digested]
) -> tuple[frozenset[str], list[list[Task]]]:
    """The tensors that can be compared with known digests, and the boxes that each rank is to compare.

    A tensor with a box that no rank holds whole cannot: its layout has changed.

    >>> import torch
    >>> box = Box(offset=(0,), shape=(4,))
    >>> inventory = {"w": HeldBoxes(shape=(4,), dtype=torch.float32, boxes=(box,))}
    >>> comparisons([inventory], {"w": Digested(shape=(4,), dtype=torch.float32, boxes=((box, "00"),))})
    (frozenset({'w'}), [[('w', Box(offset=(0,), shape=(4,)))]])
    """
    tasks: list[list[Task]] = [[] for _ in inventories]
    loads = [0] * len(inventories)
    possible: set[str] = set()
    for name, digested in known.items():
        holders = [(rank, inv[name]) for rank, inv in enumerate(inventories) if name in inv]
        if not holders or any((one.shape, one.dtype) != (digested.shape, digested.dtype) for _, one in holders):
            continue
        able = [[rank for rank, one in holders if _holds(one, box)] for box, _ in digested.boxes]
        if not all(able):
            continue
        possible.add(name)
        for (box, _), candidates in zip(digested.boxes, able, strict=True):
            rank = min(candidates, key=lambda r: (loads[r], r))
            tasks[rank].append((name, box))
            loads[rank] += box.numel * digested.dtype.itemsize
    return frozenset(possible), tasks


def _holds(holding: HeldBoxes, box: Box) -> bool:
    return any(mine.intersect(box) == box for mine in holding.boxes)


# --- between ranks --------------------------------------------------------------------------------


def to_json(stored: Stored) -> dict[str, Any]:
    """What the series has, as plain values: the first rank tells the others."""
    return {
        "tensors": {
            name: [[p.stored.file, p.stored.offset, p.box.offset, p.box.shape] for p in entry.pieces]
            for name, entry in stored.tensors.items()
        },
        "digests": {name: digests.to_json(one) for name, one in stored.digests.items()},
        "files": {name: [file.bytes, file.checksums, file.writer] for name, file in stored.files.items()},
    }


def from_json(said: Mapping[str, Any]) -> Stored:
    """What :func:`to_json` has told."""
    known = {name: digests.from_json(one) for name, one in said["digests"].items()}
    files = {
        name: DataFile(bytes=size, checksums=tuple(sums), writer=writer)
        for name, (size, sums, writer) in said["files"].items()
    }
    return Stored(
        tensors={name: _entry(known[name], pieces) for name, pieces in said["tensors"].items()},
        digests=known,
        files=files,
    )


def _entry(digested: Digested, pieces: Sequence[Any]) -> TensorEntry:
    dtype = digested.dtype
    return TensorEntry(
        shape=digested.shape,
        dtype=dtype,
        pieces=tuple(
            Piece(
                box=Box(offset=tuple(offset), shape=tuple(size)),
                stored=dense(file=file, offset=position, dtype=dtype, shape=tuple(size)),
            )
            for file, position, offset, size in pieces
        ),
    )
