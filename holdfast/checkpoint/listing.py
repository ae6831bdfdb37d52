"""A list of the checkpoints in a folder and below it, complete or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from holdfast.checkpoint import formats, index, series
from holdfast.checkpoint.disk import explained
from holdfast.checkpoint.pieces import Catalogue
from holdfast.checkpoint.places import Place, Remote
from holdfast.checkpoint.shared_files import FOLDER, is_shared
from holdfast.checkpoint.trees import bytes_of, step_of
from holdfast.errors import CheckpointError, HoldfastError

DEPTH = 3  # levels of folders that are searched: deep enough for runs/name/step, quick on a large disk
COMPLETE, UNFINISHED = "complete", "not completed"


@dataclass(frozen=True, kw_only=True)
class Found:
    """A checkpoint, or what an interrupted save has left of one.

    ``state`` is "complete", "not completed", or what is wrong with it; ``saved`` is in seconds since 1970; ``newest``
    marks the one that a run would resume from. ``bytes`` are those of its own files, ``shared`` those of files that
    it shares with others.
    """

    path: Place
    format: str
    state: str = COMPLETE
    step: int | None = None
    bytes: int = 0
    shared: int = 0
    tensors: int = 0
    files: int = 0
    saved: float = 0.0
    newest: bool = False

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values."""
        when = datetime.fromtimestamp(self.saved).astimezone().isoformat(timespec="seconds")
        return {**vars(self), "path": str(self.path), "saved": when}


def find(root: Place) -> list[Found]:
    """The checkpoints in a folder and below it, by name and step. ``CheckpointError`` if the folder does not exist."""
    with explained(root, "read"):
        missing = not root.exists()
    if missing:
        raise CheckpointError(f"{root} does not exist", hint="check the path")
    top = root.absolute()  # catalogues have absolute paths
    found = sorted(_below(top, DEPTH), key=lambda one: (one.path.parent, one.step or 0, one.path))
    newest = _newest(top, [one for one in found if one.state == COMPLETE])
    return [replace(one, path=_as_given(one.path, root), newest=one.path == newest) for one in found]


def _as_given(path: Place, root: Place) -> Place:
    top = root.absolute()
    if isinstance(path, Remote) or isinstance(top, Remote):
        return path
    return root / path.relative_to(top) if path.is_relative_to(top) else path


def _newest(root: Place, complete: list[Found]) -> Place | None:
    """The checkpoint that a run would resume from; where there is no run, the one that was saved last."""
    last = max(complete, key=lambda one: one.saved, default=None)
    return series.newest(root) or (last.path if last and len(complete) > 1 else None)


def _below(place: Place, depth: int) -> Iterator[Found]:
    known = formats.recognise(place)
    if known == "holdfast" and not index.exists(place):
        yield _unfinished(place)
        return
    here = None if known is None else _describe(place, known)
    # DeepSpeed and Megatron keep a pointer to the newest of several folders: the folders are listed, not the pointer.
    inside = [] if here is not None and here.path == place else [*_inside(place, depth)]
    if here is not None and here.path not in [one.path for one in inside]:
        yield here
    yield from inside


def _inside(place: Place, depth: int) -> Iterator[Found]:
    if not place.is_dir() or not depth:
        return
    with explained(place, "read"):
        children: list[Place] = [*place.iterdir()]
    for child in sorted(children, key=str):
        if not child.name.startswith(".") and not child.is_symlink() and not _is_shared_folder(child):
            try:
                yield from [*_below(child, depth - 1)]
            except HoldfastError as error:  # one folder without rights must not hide the others
                yield Found(path=child, format="", state=str(error), saved=_changed(child))


def _is_shared_folder(place: Place) -> bool:
    """Whether a folder has the frozen weights of the checkpoints beside it."""
    return place.name == FOLDER and not index.exists(place) and index.recognise(place)


def _describe(place: Place, known: str) -> Found:
    try:
        catalogue = formats.open_checkpoint(place, format=known)
    except HoldfastError as error:
        return Found(path=place, format=known, state=str(error), saved=_changed(place))
    root = place if place.is_file() else catalogue.root
    return Found(
        path=root,
        format=known,
        step=step_of(catalogue),
        bytes=bytes_of(catalogue) - _shared(catalogue),
        shared=_shared(catalogue),
        tensors=len(catalogue.tensors),
        files=len(catalogue.files),
        saved=_saved(catalogue),
    )


def _shared(catalogue: Catalogue) -> int:
    return sum(file.bytes for name, file in catalogue.files.items() if is_shared(name))


def _saved(catalogue: Catalogue) -> float:
    """The time of a save, in seconds since 1970: as the checkpoint says, or when its last file was changed."""
    said = catalogue.details.get("saved")
    if isinstance(said, float | int) and 0 <= said < index.LAST:
        return float(said)
    return max((_changed(catalogue.root / name) for name in catalogue.files), default=0.0)


def _changed(path: Place) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _unfinished(place: Place) -> Found:
    files = index.litter(place)
    name, _, number = place.name.rpartition("-")
    return Found(
        path=place,
        format="holdfast",
        state=UNFINISHED,
        step=int(number) if name == "step" and number.isdigit() else None,
        bytes=sum(path.stat().st_size for path in files),
        files=len(files),
        saved=max(map(_changed, [place, *files])),
    )
