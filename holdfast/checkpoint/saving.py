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
from typing import Any

import torch
import torch.distributed as dist

from holdfast import codec
from holdfast.checkpoint import frozen_saving, index, series
from holdfast.checkpoint.background import Work
from holdfast.checkpoint.digests import in_order
from holdfast.checkpoint.disk import THREADS, Bytes, Progress, explained, make_folder, silent, write_blocks
from holdfast.checkpoint.frozen_saving import plan_frozen
from holdfast.checkpoint.held import Held
from holdfast.checkpoint.pieces import Box, Catalogue, DataFile, Digested, Piece, Ref, Shape, TensorEntry, dense
from holdfast.checkpoint.places import Place, Remote, place_of
from holdfast.checkpoint.progress_bar import bar
from holdfast.checkpoint.ranks import Ranks, current, together
from holdfast.checkpoint.rules import Rules
from holdfast.checkpoint.rules.hand_cut import locals_of
from holdfast.checkpoint.safetensors_writer import Array, Image, StagedImages, Written, array_of
from holdfast.checkpoint.save_texts import WriteReport, agreed, cut, holdings, plain, prepare, read_report, write_report
from holdfast.checkpoint.shared_files import folder_beside, reference
from holdfast.checkpoint.trees import merge_trees
from holdfast.checkpoint.who_writes import Job, share
from holdfast.errors import CheckpointError

Fill = Callable[[int, int, Bytes], Bytes]  # bytes [start, stop) of a file, in the buffer or elsewhere


def save(
    path: str | os.PathLike[str] | Remote,
    tree: Mapping[str, Any],
    *,
    group: dist.ProcessGroup | None = None,
    ranks: Ranks | None = None,
    rules: Rules | None = None,
    place: Mapping[str, int] | None = None,
    trainable_only: bool = False,
) -> None:
    """Saves a tree of modules, optimizers, tensors and values into a folder, durable when it returns.

    Every rank of the process group calls it with what it has: whole modules, DDP, FSDP2, tensor parallel,
    pipeline stages. The folder must be seen by all of them. A checkpoint that is in it stays until the
    new one is complete. Where plain tensors are parts that a script has cut by hand, ``rules`` say of what,
    and ``place`` where this rank stands, as in ``{"tp": 1}``. ``group`` is the process group (default: all ranks),
    ``ranks`` replaces it by another way to talk.

    Frozen parameters: ``trainable_only=True`` leaves those of trained modules out, for adapters whose base the script
    makes itself; only their digests are saved, by which ``load`` tells whether the base is the same. Otherwise they
    are written once for all checkpoints of a series: in a folder named ``step-…``, frozen weights of a megabyte and
    more go to the folder ``frozen`` beside it, and later checkpoints refer to them there as long as they are the same.

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
    work = Save(place_of(path).absolute(), tree, ranks, rules=rules, place=place, trainable_only=trainable_only)
    with bar(f"saving {path}", work.size, show=work.ranks.rank == 0) as progress:
        work.carry_out([image.fill for image in work.images], progress=progress, threads=THREADS)


class PendingSave(Work):
    """A save that goes on in the background, see :func:`async_save`.

    ``wait()`` returns when it is durable and raises its error; the next save does so too. ``done`` tells whether it has
    ended.
    """


_pending: list[PendingSave] = []
_staged: list[StagedImages] = []  # copies that no save uses at the moment: at most one is kept


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
    path: str | os.PathLike[str] | Remote,
    tree: Mapping[str, Any],
    *,
    group: dist.ProcessGroup | None = None,
    ranks: Ranks | None = None,
    rules: Rules | None = None,
    place: Mapping[str, int] | None = None,
    trainable_only: bool = False,
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
    work = Save(place_of(path).absolute(), tree, ranks, rules=rules, place=place, trainable_only=trainable_only)
    staged = _staged.pop() if _staged else StagedImages()
    together(ranks, "save", lambda: staged.take(work.images))

    def carry_out() -> None:
        try:  # two threads keep the disk busy enough, and leave the processor to the training
            work.carry_out(staged.fills, threads=2)
        finally:
            _staged[:] = [staged]  # kept for the next save: memory touched for the first time is slow

    pending = PendingSave(carry_out, f"saving {path}")
    _pending.append(pending)
    return pending


class Save:
    """One save, as one of its ranks sees it.

    All ranks make it together, each writes its file alone (:meth:`write`), one commits it (:meth:`commit`).
    """

    def __init__(
        self,
        path: Place,
        tree: Mapping[str, Any],
        ranks: Ranks,
        *,
        rules: Rules | None = None,
        place: Mapping[str, int] | None = None,
        trainable_only: bool = False,
    ) -> None:
        self.path = path
        self.ranks = ranks
        self.details: dict[str, Any] = {"ranks": ranks.size}
        self._replaces = ""  # the version of the index that is there when the writing begins
        in_series = series.is_step(path)
        described, text = together(
            ranks, "save", lambda: prepare(tree, ranks, place, trainable_only, path if in_series else None)
        )
        self._all = [json.loads(text) for text in ranks.exchange(text)]
        self.id = str(self._all[0]["id"])
        # From here on only pure functions of these texts: all ranks come to the same plan, or to the same error.
        self._holdings, held = [holdings(said) for said in self._all], described.held
        if rules is not None:
            # Tensors that a script has cut by hand are boxes of larger ones: replace what the ranks said of them.
            parts_of = locals_of([plain(said) for said in self._all], [said["place"] for said in self._all], rules)
            self._holdings = [
                {**mine, **cut(mine, parts)} for mine, parts in zip(self._holdings, parts_of, strict=True)
            ]
            mine = parts_of[ranks.rank]
            held = {
                **held,
                **together(ranks, "save", lambda: {n: one.held(held[n].parts[0].tensor) for n, one in mine.items()}),
            }
        self._tree = merge_trees([codec.decode(said["tree"], lambda name: Ref(name=name)) for said in self._all])
        known = self._all[0]["stored"]
        self._frozen = plan_frozen(
            self._holdings,
            held,
            ranks,
            still=agreed("still", self._all),
            left_out=agreed("left_out", self._all),
            stored=None if known is None else frozen_saving.from_json(known),
        )
        own = [{name: one for name, one in mine.items() if name not in self._frozen.apart} for mine in self._holdings]
        self._jobs = share(own)  # for each rank, the boxes that it writes
        self.images = together(ranks, "save", lambda: self._make_images(held))

    def _make_images(self, held: Mapping[str, Held]) -> list[Image]:
        """The files that this rank writes: one in the checkpoint, and one in the shared folder if it has to."""
        plans = [self._jobs, self._frozen.jobs] if self._shares else [self._jobs]
        return [Image([_array(job, held) for job in jobs[self.ranks.rank]]) for jobs in plans]

    @property
    def _shares(self) -> bool:
        """Whether this rank writes a file into the shared folder."""
        return bool(self._frozen.jobs and self._frozen.jobs[self.ranks.rank])

    @property
    def is_first_with_frozen(self) -> bool:
        """Whether any rank writes frozen weights for the series: later saves can refer to them once it is committed."""
        return any(self._frozen.jobs)

    @property
    def size(self) -> int:
        """The number of bytes that this rank writes."""
        return sum(image.size for image in self.images)

    def carry_out(self, fills: Sequence[Fill], *, progress: Progress = silent, threads: int = THREADS) -> None:
        """Writes and commits, all ranks together; ``fills`` give the bytes of each of ``images`` (``write_blocks``)."""
        try:
            report = together(self.ranks, "save", lambda: self.write(fills, progress, threads))
        except Exception:
            # Without this rank's files nobody commits: remove them, they only fill the disk.
            name = index.data_name(self.id, self.ranks.rank)
            for path in (self.path / reference(name), self.path / name):
                with suppress(OSError):
                    path.unlink()
            raise
        reports = [read_report(text) for text in self.ranks.exchange(write_report(report))]
        together(self.ranks, "save", lambda: self._finish(reports) if self.ranks.rank == 0 else None)

    def _finish(self, reports: Sequence[WriteReport]) -> None:
        self.commit(reports)
        if series.is_step(self.path):
            series.clean_shared(self.path.parent)

    def write(self, fills: Sequence[Fill], progress: Progress = silent, threads: int = THREADS) -> WriteReport:
        """Writes this rank's files, durable when it returns."""
        name = index.data_name(self.id, self.ranks.rank)
        with explained(self.path, "create"):
            make_folder(self.path)
        if self.ranks.rank == 0:
            self._replaces = index.version_in(self.path)
            index.clean_before(self.path, self.id)
        # The shared file comes second: as long as the first one is there, it belongs to a save that may go on.
        places: list[Place] = [self.path / name]
        if self._shares:
            with explained(folder_beside(self.path), "create"):
                make_folder(folder_beside(self.path))
            places.append(folder_beside(self.path) / name)
        written = []
        for place, image, fill in zip(places, self.images, fills, strict=True):
            sums = write_blocks(place, image.size, fill, progress=progress, threads=threads)
            written.append(Written(bytes=image.size, checksums=sums, offsets=image.offsets))
        return WriteReport(
            file=name,
            writer=f"rank {self.ranks.rank} of {self.ranks.size} on {socket.gethostname()}",
            written=written[0],
            shared=written[1] if self._shares else None,
            digests=self._frozen.digests,
        )

    def commit(self, reports: Sequence[WriteReport], *, guard: Callable[[], object] | None = None) -> None:
        """Writes the index from the reports of all ranks; then removes what the checkpoint replaces.

        ``guard`` raises if this rank may not commit any more. It is called just before and just after the index gets
        its name.
        """
        for report in reports:
            with explained(self.path, "read"):
                missing = not (self.path / report.file).exists()
            if missing:
                raise CheckpointError(
                    f"{self.path / report.file}, written by {report.writer}, is not here",
                    hint="all workers must see the same folder",
                )
        catalogue = Catalogue(
            format="holdfast",
            root=self.path,
            tree=self._tree,
            tensors=self._entries(reports),
            files=self._files(reports),
            tied={k: v for said in self._all for k, v in said["tied"].items()},
            frozen=tuple(dict.fromkeys(n for said in self._all for n in said["frozen"])),
            buffers=tuple(dict.fromkeys(n for said in self._all for n in said["buffers"])),
            digests=self._digests(reports),
            details=self.details,
        )
        index.commit(catalogue, self.id, guard=guard, replaces=self._replaces)
        if guard is not None:
            guard()  # who has lost the folder in between must not remove anything
        index.clean(self.path, keep=catalogue.files)

    def _entries(self, reports: Sequence[WriteReport]) -> dict[str, TensorEntry]:
        known = {
            name: one for mine in self._holdings for name, one in mine.items() if name not in self._frozen.left_out
        }
        pieces: dict[str, list[Piece]] = {name: [] for name in known}
        written = [(jobs, r.file, r.written) for jobs, r in zip(self._jobs, reports, strict=True)]
        if self._frozen.jobs:
            parts = zip(self._frozen.jobs, reports, strict=True)
            written += [(jobs, reference(r.file), r.shared) for jobs, r in parts if r.shared is not None]
        for jobs, file, content in written:
            for name, box in jobs:
                offset = content.offsets[_piece_name(name, box, known[name].shape)]
                stored = dense(file=file, offset=offset, dtype=known[name].dtype, shape=box.shape)
                pieces[name].append(Piece(box=box, stored=stored))
        made = {
            name: TensorEntry(shape=holding.shape, dtype=holding.dtype, pieces=tuple(pieces[name]))
            for name, holding in known.items()
        }
        return {**made, **self._frozen.referred.tensors}

    def _files(self, reports: Sequence[WriteReport]) -> dict[str, DataFile]:
        files = {
            r.file: DataFile(bytes=r.written.bytes, checksums=r.written.checksums, writer=r.writer) for r in reports
        }
        for r in reports:
            if r.shared is not None:
                shared = DataFile(bytes=r.shared.bytes, checksums=r.shared.checksums, writer=r.writer)
                files[reference(r.file)] = shared
        return {**files, **self._frozen.referred.files}

    def _digests(self, reports: Sequence[WriteReport]) -> dict[str, Digested]:
        known = {name: one for mine in self._holdings for name, one in mine.items()}
        boxes: dict[str, list[tuple[Box, str]]] = {}
        for report in reports:
            for name, found in report.digests.items():
                boxes.setdefault(name, []).extend(found)
        new = {
            name: Digested(shape=known[name].shape, dtype=known[name].dtype, boxes=in_order(found))
            for name, found in boxes.items()
        }
        return {**new, **self._frozen.referred.digests}


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
