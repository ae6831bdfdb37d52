"""Memory for results that may be large: plain memory up to a limit, and beyond it files that have no names.

A file without a name takes its space on the disk, is read and written as memory is, and is gone with the last tensor
in it, or with the process: a worker that is killed leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
import tempfile

import torch

from holdfast.errors import HoldfastError

MEMORY = 2**28  # bytes of a result that a worker keeps in plain memory: 256 MiB, which any machine has to spare
CHUNK = 2**24  # bytes that are taken at once for small tensors: 16 MiB, so that 10 GB are a few hundred files


class Rooms:
    """Hands out memory. ``folder``: where files are made; None: the system's folder for temporary files.

    >>> rooms = Rooms(memory=4)
    >>> rooms.take(3).numel(), rooms.in_files, rooms.take(3).numel(), rooms.in_files
    (3, 0, 3, 3)
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, *, memory: int = MEMORY) -> None:
        self._folder = folder
        self._left = memory
        self.in_files = 0  # bytes
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> torch.Tensor:
        """Return so many bytes, as a tensor. Raises ``HoldfastError`` if the disk has no room for them."""
        if size <= self._left:
            self._left -= size
            return torch.empty(size, dtype=torch.uint8)
        try:
            if self._folder is not None:
                os.makedirs(self._folder, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk fails here, not later by a signal
                memory = mmap.mmap(file.fileno(), size)
        except OSError as e:
            where = self._folder or tempfile.gettempdir()
            raise HoldfastError(
                f"no room for {size:,} bytes of predictions in {where}: {e.strerror or e}",
                hint="predict(…, to=another folder), or keep less of each output, such as argmax",
            ) from e
        self.in_files += size
        return torch.frombuffer(memory, dtype=torch.uint8)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor's bytes; return the copy."""
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        if flat.numel() > self._chunk.numel():
            self._chunk = self.take(max(CHUNK if self._left < CHUNK else 0, flat.numel()))
        place, self._chunk = self._chunk[: flat.numel()], self._chunk[flat.numel() :]
        place.copy_(flat)
        return place
