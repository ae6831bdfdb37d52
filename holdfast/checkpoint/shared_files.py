"""Files that the checkpoints of a series share: frozen weights, which are written once and referred to afterwards.

They lie in a folder of their own beside the checkpoints, ``runs/gpt/frozen/``, and indexes refer to them as
``../frozen/data-….safetensors``.

Why there, and not in the folder of the checkpoint that wrote them: deleting any checkpoint, by hand too, never takes
away what another one needs, and a folder without an index is litter as before. Why a reference, and not a hard link:
object stores have none, and neither have all file systems.
"""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

from holdfast.checkpoint.disk import explained
from holdfast.checkpoint.inside import check_inside
from holdfast.checkpoint.pieces import DataFile
from holdfast.checkpoint.places import Place, Remote
from holdfast.errors import CheckpointError

FOLDER = "frozen"
_SHARED = re.compile(rf"\.\./{FOLDER}/data-[0-9a-f]{{12}}-\d+\.safetensors")

# Held while an index that refers to shared files gets its name, and while shared files are removed: a save in another
# thread must not find a file that is gone a moment later.
SHARING = threading.Lock()


def reference(name: str) -> str:
    """The name in an index of a file in the shared folder.

    >>> reference("data-3f9a01c2b7d4-0.safetensors")
    '../frozen/data-3f9a01c2b7d4-0.safetensors'
    """
    return f"../{FOLDER}/{name}"


def is_shared(name: str) -> bool:
    """Whether a name in an index is that of a shared file. No other name may lead out of a checkpoint's folder."""
    return _SHARED.fullmatch(name) is not None


def folder_beside(checkpoint: Place) -> Place:
    """The shared folder of the series that a checkpoint is in, which has to be there; where it is really, if a link."""
    if isinstance(checkpoint, Remote):
        return checkpoint.parent / FOLDER
    return Path(os.path.realpath(checkpoint / ".." / FOLDER))


def check_file(root: Place, name: str, file: DataFile) -> None:
    """Raises ``CheckpointError`` if a data file of a checkpoint is missing, elsewhere, or of another length."""
    path, shared = root / name, is_shared(name)
    check_inside(path, root / ".." / FOLDER if shared else root)
    if shared and not path.exists():
        raise CheckpointError(
            f"{folder_beside(root) / path.name} does not exist, and {root} has its frozen weights in it",
            hint=f"checkpoints of a run share their frozen weights: copy the folder {FOLDER!r} with them, or take one "
            "out with holdfast ckpt convert",
        )
    with explained(path, "read"):
        actual = path.stat().st_size
    if actual != file.bytes:
        raise CheckpointError(
            f"{path} is {actual} bytes long, it was written with {file.bytes}", hint="the file is truncated or replaced"
        )
