"""Keeps the reading of a checkpoint inside of its folder: no links that lead out of it, no devices, no pipes.

A downloaded folder may hold a link to anything that its reader may read, or a pipe that nobody writes to. What the
user names is followed wherever it leads; what the checkpoint names is not. Two things are in order: links inside of the
folder, and those of Hugging Face's cache, where ``snapshots/<revision>/`` has links to ``blobs/`` beside it.
"""

from __future__ import annotations

import os
import stat
from itertools import pairwise
from pathlib import Path

from holdfast.checkpoint.places import Place, Remote
from holdfast.errors import CheckpointError

FOLLOW = "HOLDFAST_FOLLOW_LINKS"  # a variable of the environment: 1 has links out of the folder followed
_CACHES = ("models--", "datasets--", "spaces--")  # begin the names of repositories in Hugging Face's cache
_POINTER = 4096  # bytes of a file that names another one


def check_inside(path: Place, root: Place) -> None:
    """Refuses a path that leads out of the folder ``root``, by links or by ``..``; ``CheckpointError`` says whereto.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "a.pt").symlink_to("/etc/hostname")
    >>> try:
    ...     check_inside(folder / "a.pt", folder)
    ... except CheckpointError as error:
    ...     "leads out of" in str(error)
    True
    """
    if os.environ.get(FOLLOW) == "1" or isinstance(path, Remote) or isinstance(root, Remote):
        return  # an object is no link, and an index may only name data files
    try:
        real, top = Path(os.path.realpath(path)), Path(os.path.realpath(root))
    except ValueError as error:  # a name with a zero byte
        raise CheckpointError(f"{str(path)!r} is no name of a file", hint="do not trust this checkpoint") from error
    if not any(real.is_relative_to(folder) for folder in (top, *_blobs(top))):
        raise CheckpointError(
            f"{path} leads out of its folder, to {real}",
            hint=f"put the file itself there, or set {FOLLOW}=1 if you trust this checkpoint",
        )


def _blobs(folder: Path) -> list[Path]:
    """The folder with the files of a repository in Hugging Face's cache, if ``folder`` lies in a snapshot of it."""
    parts = [folder, *folder.parents]
    return [
        repository / "blobs"
        for snapshots, repository in pairwise(parts)
        if snapshots.name == "snapshots" and repository.name.startswith(_CACHES)
    ]


def open_regular(path: Path) -> int:
    """Opens a file for reading, if it is an ordinary one; ``OSError`` and ``CheckpointError`` otherwise.

    Returns the descriptor. A pipe would be waited for without end, and a device may never end.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except ValueError as error:  # a name with a zero byte
        raise CheckpointError(f"{str(path)!r} is no name of a file", hint="do not trust this checkpoint") from error
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise CheckpointError(f"{path} is not an ordinary file", hint="do not trust this checkpoint")


def read_regular(path: Place, root: Place) -> bytes:
    """The content of an ordinary file inside of ``root``."""
    check_inside(path, root)
    return read_begin(path, -1)


def read_begin(path: Place, size: int) -> bytes:
    """The first bytes of an ordinary file, or of an object; all of them if ``size`` is negative."""
    if isinstance(path, Remote):
        return path.read_bytes() if size < 0 else path.read_range(0, size).tobytes()
    with open(open_regular(path), "rb") as file:
        return file.read(size)


def read_pointer(path: Path) -> str:
    """The text of a small file that names another file or folder; what is too long for a name is cut."""
    check_inside(path, path.parent)
    return read_begin(path, _POINTER).decode(errors="replace").strip()
