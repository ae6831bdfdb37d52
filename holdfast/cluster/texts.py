"""Exchange of texts between all workers of a group."""

from __future__ import annotations

import torch

from holdfast.cluster import tags
from holdfast.cluster.group import Group
from holdfast.cluster.talk import share


class Texts:
    """Exchange of texts in a group: the ``Ranks`` that checkpoints need, for the workers that train together."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self.rank = group.rank
        self.size = group.size
        self._group = group
        self._device = device

    def exchange(self, text: bytes) -> list[bytes]:
        """Send this worker's text to all; return everybody's texts, by rank. May raise ``Broken``."""
        if self.size == 1:
            return [text]
        ones = [1] * self.size
        length = torch.tensor([len(text)], device=self._device)
        sizes = [int(size) for size in share(self._group, length, ones, tag=tags.LENGTH)]
        mine = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
        found = share(self._group, mine.to(self._device), sizes, tag=tags.TEXT)
        return [part.cpu().numpy().tobytes() for part in found]


class Everybody:
    """All ranks of all teams: the ``Ranks`` that write and read a run's checkpoints. Their texts go through columns."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._team, self._column = group.team, Texts(group, device)
        self.rank = group.rank * group.team.size + group.team.rank
        self.size = group.size * group.team.size
        self.workers = [worker for worker in group.generation.workers for _ in range(group.team.size)]

    def exchange(self, text: bytes) -> list[bytes]:
        """Return the texts of all ranks, team by team. May raise ``Broken``, on all ranks of a team."""
        with self._team.together("the texts of a column"):
            column = self._column.exchange(text)
        if self._team.size == 1:
            return column
        said = self._team.exchange("the texts of all columns", [one.hex() for one in column])
        return [bytes.fromhex(texts[worker]) for worker in range(self._column.size) for texts in said]
