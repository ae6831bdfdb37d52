"""A group on GPUs: its members meet over links, then NCCL carries their tensors. Untested here: there is no GPU."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from holdfast.cluster import tags
from holdfast.cluster.group import Group


class NcclGroup(Group):
    """A group whose tensors are on CUDA devices."""

    def gather(self) -> None:
        """Wait until all members are here, then make NCCL's process group."""
        super().gather()
        store = self._store()
        self._links = self._backend
        self._backend = dist.ProcessGroupNCCL(store, self.rank, self.size, dist.ProcessGroupNCCL.Options())
        self.check()  # an abort may have come meanwhile, when there was nothing to abort

    def _store(self) -> dist.Store:  # type: ignore[name-defined]
        """Make the store in which NCCL's communicators find each other, at the first member."""
        first = self.generation.members[0].address
        hosts = None
        if self.rank == 0:
            hosts = TCPStore(first, 0, is_master=True, wait_for_workers=False)
        port = torch.tensor([0 if hosts is None else hosts.port], dtype=torch.float64)
        self.sum(port, tag=tags.GATHER)
        return hosts or TCPStore(first, int(port), is_master=False)

    @property
    def unreached(self) -> tuple[str, ...]:
        links = getattr(self, "_links", self._backend)
        return tuple(links.unreached)

    def abort(self, reason: str) -> None:
        super().abort(reason)
        links = getattr(self, "_links", None)
        if links is not None:
            links.abort()
