"""Exchange of texts between all workers of a group."""

from __future__ import annotations

import torch

from holdfast.cluster import tags
from holdfast.cluster.group import Group


class Texts:
    """Exchange of texts in a group: the ``Ranks`` that checkpoints need, for the workers that train together."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self.rank = group.rank
        self.size = group.size
        self._group = group
        self._device = device

    def exchange(self, text: bytes) -> list[bytes]:
        """Send this worker's text to all; return everybody's texts, by rank. May raise ``Broken``."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        lengths = {rank: torch.zeros(1, dtype=torch.int64, device=self._device) for rank in others}
        self._swap(torch.tensor([len(text)], device=self._device), lengths, tags.LENGTH)
        sizes = {rank: int(length) for rank, length in lengths.items()}
        texts = {rank: torch.zeros(max(n, 1), dtype=torch.uint8, device=self._device) for rank, n in sizes.items()}
        # At least one byte, because Gloo cannot send an empty tensor.
        self._swap(torch.frombuffer(bytearray(text or b" "), dtype=torch.uint8).to(self._device), texts, tags.TEXT)
        found = {rank: texts[rank].cpu().numpy().tobytes()[: sizes[rank]] for rank in others}
        return [text if rank == self.rank else found[rank] for rank in range(self.size)]

    def _swap(self, mine: torch.Tensor, theirs: dict[int, torch.Tensor], tag: int) -> None:
        sends = [(rank, mine, tag) for rank in theirs]
        self._group.finish(self._group.start(sends, [(rank, tensor, tag) for rank, tensor in theirs.items()]))
