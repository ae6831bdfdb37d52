"""``save`` and ``async_save``: every rank writes a part of the checkpoint, and one rank commits it.

A save has three parts. All ranks tell each other what they hold, and each comes to the same plan. Each rank writes
its file alone. The first rank writes the index, which makes the checkpoint exist.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from holdfast import codec
from holdfast.checkpoint import index
from holdfast.checkpoint.background import Work
from holdfast.checkpoint.disk import THREADS, Bytes, Progress, checksum, explained, make_folder, silent, write_blocks
from holdfast.checkpoint.held import Held
from holdfast.checkpoint.objects import Described, describe
from holdfast.checkpoint.pieces import Box, Catalogue, DataFile, Piece, Ref, Shape, TensorEntry, dense
from holdfast.checkpoint.progress_bar import bar
from holdfast.checkpoint.ranks import Ranks, current, together
from holdfast.checkpoint.rules import Rules
from holdfast.checkpoint.rules.hand_cut import Local, Plain, locals_of
from holdfast.checkpoint.safetensors_writer import Array, Image, StagedImage, Written, array_of, bytes_of
from holdfast.checkpoint.trees import merge_trees
from holdfast.checkpoint.who_writes import HeldBoxes, Job, share
from holdfast.errors import CheckpointError

SMALL = 1 << 20  # bytes; copies of larger parameters and slots are compared in samples, or hashing would take longest
SAMPLES = 16  # stretches of a sampled tensor, SMALL bytes together
Fill = Callable[[int, int, Bytes], Bytes]  # bytes [start, stop) of a file, in the buffer or elsewhere


def save(
    path: str | os.PathLike[str],
    tree: Mapping[str, Any],
    *,
    group: dist.ProcessGroup | None = None,
    ranks: Ranks | None = None,
    rules: Rules | None = None,
    place: Mapping[str, int] | None = None,
) -> None:
    """Saves a tree of modules, optimizers, tensors and values into a folder, durable when it returns.

    Every rank of the process group calls it with what it has: whole modules, DDP, FSDP2, tensor parallel,
    pipeline stages. The folder must be seen by all of them. A checkpoint that is in it stays until the
    new one is complete. Where plain tensors are parts that a script has cut by hand, ``rules`` say of what,
    and ``place`` where this rank stands, as in ``{"tp": 1}``. ``group`` is the process group (default: all ranks),
    ``ranks`` replaces it by another way to talk.

    Raises ``UsageError`` for a value that cannot be saved and for ranks that disagree, ``CheckpointError`` if the
    folder cannot be written or a rank is lost; then the old checkpoint is still there.

    >>> import tempfile, torch
    >>> folder = tempfile.mkdtemp()
    >>> save(folder, {"model": torch.nn.Linear(2, 1), "step": 7})
    >>> sorted(name.split("-")[0] for name in os.listdir(folder))
    ['data', 'index.json']
    """
    ranks = ranks or current(group)
    together(ranks, "save", wait_for_saves)
    work = Save(Path(path).absolute(), tree, ranks, rules=rules, place=place)
    with bar(f"saving {path}", work.image.size, show=work.ranks.rank == 0) as progress:
        work.carry_out(work.image.fill, progress=progress, threads=THREADS)


class PendingSave(Work):
    """A save that goes on in the background, see :func:`async_save`.

    ``wait()`` returns when it is durable and raises its error; the next save does so too. ``done`` tells whether it has
    ended.
    """


_pending: list[PendingSave] = []
_staged: list[StagedImage] = []  # copies that no save uses at the moment: at most one is kept


def wait_for_saves() -> None:
    """Waits for all saves in the background, and raises the error of one that failed."""
    for pending in list(_pending):
        pending.join()  # if this is interrupted (Ctrl-C), the save is still pending
        with suppress(ValueError):  # another thread waits too
            _pending.remove(pending)
        pending.wait()


def join_saves() -> None:
    """Waits for all saves in the background, and leaves their errors to the next save."""
    for pending in _pending:
        pending.join()


def async_save(
    path: str | os.PathLike[str],
    tree: Mapping[str, Any],
    *,
    group: dist.ProcessGroup | None = None,
    ranks: Ranks | None = None,
    rules: Rules | None = None,
    place: Mapping[str, int] | None = None,
) -> PendingSave:
    """Saves as :func:`save` does, but returns once everything is copied in memory, and writes in the background.

    Changes after it returns are not saved. Takes what :func:`save` takes; errors of writing are raised by ``wait()``
    of the result, or by the next save.

    >>> import tempfile, torch
    >>> weight = torch.zeros(2)
    >>> pending = async_save(tempfile.mkdtemp(), {"weight": weight})
    >>> weight += 1  # too late to be saved
    >>> pending.wait()
    """
    ranks = ranks or current(group)
    together(ranks, "save", wait_for_saves)
    work = Save(Path(path).absolute(), tree, ranks, rules=rules, place=place)
    staged = _staged.pop() if _staged else StagedImage()
    together(ranks, "save", lambda: staged.take(work.image))

    def carry_out() -> None:
        try:  # two threads keep the disk busy enough, and leave the processor to the training
            work.carry_out(staged.fill, threads=2)
        finally:
            _staged[:] = [staged]  # kept for the next save: memory touched for the first time is slow

    pending = PendingSave(carry_out, f"saving {path}")
    _pending.append(pending)
    return pending


@dataclass(frozen=True, kw_only=True)
class WriteReport:
    """A rank's report: the file that it has written, who wrote it (for people), and what is in it."""

    file: str
    writer: str
    written: Written


class Save:
    """One save, as one of its ranks sees it.

    All ranks make it together, each writes its file alone (:meth:`write`), one commits it (:meth:`commit`).
    """

    def __init__(
        self,
        path: Path,
        tree: Mapping[str, Any],
        ranks: Ranks,
        *,
        rules: Rules | None = None,
        place: Mapping[str, int] | None = None,
    ) -> None:
        self.path = path
        self.ranks = ranks
        self.details: dict[str, Any] = {"ranks": ranks.size}
        described, text = together(ranks, "save", lambda: _prepare(tree, ranks, place))
        self._all = [json.loads(text) for text in ranks.exchange(text)]
        self.id = str(self._all[0]["id"])
        # From here on only pure functions of these texts: all ranks come to the same plan, or to the same error.
        self._holdings, held = [_holdings(said) for said in self._all], described.held
        if rules is not None:
            # Tensors that a script has cut by hand are boxes of larger ones: replace what the ranks said of them.
            cut = locals_of([_plain(said) for said in self._all], [said["place"] for said in self._all], rules)
            self._holdings = [{**mine, **_cut(mine, parts)} for mine, parts in zip(self._holdings, cut, strict=True)]
            mine = cut[ranks.rank]
            held = {
                **held,
                **together(ranks, "save", lambda: {n: one.held(held[n].parts[0].tensor) for n, one in mine.items()}),
            }
        self._tree = merge_trees([codec.decode(said["tree"], lambda name: Ref(name=name)) for said in self._all])
        self._jobs = share(self._holdings)  # for each rank, the boxes that it writes
        jobs = self._jobs[ranks.rank]
        self.image = together(ranks, "save", lambda: Image([_array(job, held) for job in jobs]))

    def carry_out(self, fill: Fill, *, progress: Progress = silent, threads: int = THREADS) -> None:
        """Writes and commits, all ranks together; ``fill`` gives the bytes of this rank's file (``write_blocks``)."""
        try:
            report = together(self.ranks, "save", lambda: self.write(fill, progress, threads))
        except Exception:
            # Without this rank's file nobody commits: remove it, it only fills the disk.
            with suppress(OSError):
                (self.path / index.data_name(self.id, self.ranks.rank)).unlink()
            raise
        reports = [read_report(text) for text in self.ranks.exchange(write_report(report))]
        together(self.ranks, "save", lambda: self.commit(reports) if self.ranks.rank == 0 else None)

    def write(self, fill: Fill, progress: Progress = silent, threads: int = THREADS) -> WriteReport:
        """Writes this rank's file, durable when it returns."""
        name = index.data_name(self.id, self.ranks.rank)
        with explained(self.path, "create"):
            make_folder(self.path)
        if self.ranks.rank == 0:
            index.clean_before(self.path, self.id)
        sums = write_blocks(self.path / name, self.image.size, fill, progress=progress, threads=threads)
        written = Written(bytes=self.image.size, checksums=sums, offsets=self.image.offsets)
        writer = f"rank {self.ranks.rank} of {self.ranks.size} on {socket.gethostname()}"
        return WriteReport(file=name, writer=writer, written=written)

    def commit(self, reports: Sequence[WriteReport], *, guard: Callable[[], object] | None = None) -> None:
        """Writes the index from the reports of all ranks; then removes what the checkpoint replaces.

        ``guard`` raises if this rank may not commit any more. It is called just before and just after the index gets
        its name.
        """
        for report in reports:
            if not (self.path / report.file).exists():
                raise CheckpointError(
                    f"{self.path / report.file}, written by {report.writer}, is not here",
                    hint="all workers must see the same folder",
                )
        catalogue = Catalogue(
            format="holdfast",
            root=self.path,
            tree=self._tree,
            tensors=self._entries(reports),
            files={
                r.file: DataFile(bytes=r.written.bytes, checksums=r.written.checksums, writer=r.writer) for r in reports
            },
            tied={k: v for said in self._all for k, v in said["tied"].items()},
            frozen=tuple(dict.fromkeys(n for said in self._all for n in said["frozen"])),
            buffers=tuple(dict.fromkeys(n for said in self._all for n in said["buffers"])),
            details=self.details,
        )
        index.commit(catalogue, self.id, guard=guard)
        if guard is not None:
            guard()  # who has lost the folder in between must not remove anything
        index.clean(self.path, keep=catalogue.files)

    def _entries(self, reports: Sequence[WriteReport]) -> dict[str, TensorEntry]:
        known = {name: holding for holdings in self._holdings for name, holding in holdings.items()}
        pieces: dict[str, list[Piece]] = {name: [] for name in known}
        for jobs, report in zip(self._jobs, reports, strict=True):
            for name, box in jobs:
                offset = report.written.offsets[_piece_name(name, box, known[name].shape)]
                stored = dense(file=report.file, offset=offset, dtype=known[name].dtype, shape=box.shape)
                pieces[name].append(Piece(box=box, stored=stored))
        return {
            name: TensorEntry(shape=holding.shape, dtype=holding.dtype, pieces=tuple(pieces[name]))
            for name, holding in known.items()
        }


def _prepare(tree: Mapping[str, Any], ranks: Ranks, place: Mapping[str, int] | None) -> tuple[Described, bytes]:
    """A description of what this rank saves, and the text about it for the other ranks."""
    described = describe(tree)
    said = {
        "id": index.new_id(),
        "tree": codec.encode(described.tree, lambda value: value.name if isinstance(value, Ref) else None, "tree"),
        "tensors": {
            name: [
                codec.dtype_name(held.dtype),
                held.shape,
                [[part.box.offset, part.box.shape] for part in held.parts],
                name in described.leading,
                _digest(held, sample=name in described.sampled) if ranks.size > 1 else None,
            ]
            for name, held in described.held.items()
        },
        "place": dict(place or {}),
        "derived": [name for name, held in described.held.items() if held.derived],
        "tied": described.tied,
        "frozen": described.frozen,
        "buffers": described.buffers,
    }
    return described, json.dumps(said).encode()


def _digest(held: Held, *, sample: bool) -> str | None:
    """A checksum by which ranks notice that copies of a tensor differ; None if this rank holds only a part of it.

    Parts that a script has cut by hand, without rules, look like copies: such a save must not succeed. Large
    tensors that are most likely equal (``sample``) are compared in samples.
    """
    whole = [part.tensor for part in held.parts if part.box.shape == held.shape and part.box.numel]
    if not whole:
        return None
    enough = sample and whole[0].nbytes > SMALL and whole[0].is_contiguous()
    return checksum(bytes_of(_samples(whole[0]) if enough else whole[0]))


def _samples(tensor: torch.Tensor) -> torch.Tensor:
    """Some stretches of a large tensor, evenly spread."""
    flat = tensor.view(-1)
    length = SMALL // SAMPLES // tensor.element_size()
    return torch.cat([flat[start : start + length] for start in range(0, flat.numel(), flat.numel() // SAMPLES)])


def _holdings(said: Mapping[str, Any]) -> dict[str, HeldBoxes]:
    return {
        name: HeldBoxes(
            shape=tuple(shape),
            dtype=codec.dtype_of(dtype),
            boxes=tuple(Box(offset=tuple(offset), shape=tuple(size)) for offset, size in boxes),
            leading=leading,
            digest=digest,
        )
        for name, (dtype, shape, boxes, leading, digest) in said["tensors"].items()
    }


def _plain(said: Mapping[str, Any]) -> dict[str, Plain]:
    """The plain tensors of a rank: only rules can tell what they are parts of."""
    derived = set(said["derived"])
    return {
        name: Plain(shape=holding.shape, dtype=holding.dtype)
        for name, holding in _holdings(said).items()
        if name not in derived
    }


def _cut(holdings: Mapping[str, HeldBoxes], parts: Mapping[str, Local]) -> dict[str, HeldBoxes]:
    return {
        name: HeldBoxes(
            shape=part.shape,
            dtype=holdings[name].dtype,
            boxes=tuple(box for box, _ in part.boxes),
            leading=holdings[name].leading,
            digest=holdings[name].digest if part.shape == part.own else None,
        )
        for name, part in parts.items()
    }


def _piece_name(name: str, box: Box, shape: Shape) -> str:
    """The name of a piece in the data file: the tensor's, and for a part also where it begins."""
    return name if box.shape == shape else f"{name}@{','.join(map(str, box.offset))}"


def _array(job: Job, held: Mapping[str, Held]) -> Array:
    name, box = job
    called = _piece_name(name, box, held[name].shape)
    if not box.numel:
        return array_of(called, torch.empty(box.shape, dtype=held[name].dtype))
    part = next(p for p in held[name].parts if box.intersect(p.box) == box)
    return array_of(called, part.tensor[box.relative_to(part.box).slices()])


def write_report(report: WriteReport) -> bytes:
    """A report as JSON, for :func:`read_report`."""
    written = report.written
    return json.dumps([report.file, report.writer, written.bytes, written.checksums, dict(written.offsets)]).encode()


def read_report(text: bytes) -> WriteReport:
    """The report that :func:`write_report` has written."""
    file, writer, size, sums, offsets = json.loads(text)
    return WriteReport(file=file, writer=writer, written=Written(bytes=size, checksums=tuple(sums), offsets=offsets))
