"""How the workers of a run tell each other about a checkpoint: before it through the group, after it through files.

Training goes on while a checkpoint is written, so the group is busy then. A worker leaves its report beside
its data; the first one collects them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence

import torch

from holdfast.checkpoint import index
from holdfast.checkpoint.saving import Save, WriteReport, read_report, write_report
from holdfast.cluster.group import Group
from holdfast.errors import CheckpointError

LENGTH_TAG, TEXT_TAG = 1, 2
PATIENCE = 3.0  # seconds for a report that was written to be seen through a network's file system
FAILED = b"failed"


class GroupRanks:
    """A generation's group, seen as those who save together."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self.rank = group.rank
        self.size = group.size
        self._group = group
        self._device = device

    def exchange(self, text: bytes) -> list[bytes]:
        others = [rank for rank in range(self.size) if rank != self.rank]
        lengths = {rank: torch.zeros(1, dtype=torch.int64, device=self._device) for rank in others}
        self._swap(torch.tensor([len(text)], device=self._device), lengths, LENGTH_TAG)
        sizes = {rank: int(length) for rank, length in lengths.items()}
        texts = {rank: torch.zeros(max(n, 1), dtype=torch.uint8, device=self._device) for rank, n in sizes.items()}
        # At least one byte: Gloo does not send nothing.
        self._swap(torch.frombuffer(bytearray(text or b" "), dtype=torch.uint8).to(self._device), texts, TEXT_TAG)
        found = {rank: texts[rank].cpu().numpy().tobytes()[: sizes[rank]] for rank in others}
        return [text if rank == self.rank else found[rank] for rank in range(self.size)]

    def _swap(self, mine: torch.Tensor, theirs: dict[int, torch.Tensor], tag: int) -> None:
        sends = [(rank, mine, tag) for rank in theirs]
        self._group.finish(self._group.start(sends, [(rank, tensor, tag) for rank, tensor in theirs.items()]))


def post(save: Save, report: WriteReport | None) -> None:
    """Leaves this worker's report beside its data, or the word that there will be none."""
    target = save.path / index.report_name(save.id, save.ranks.rank)
    unfinished = target.with_suffix(".unfinished")
    try:
        unfinished.write_bytes(FAILED if report is None else write_report(report))
        unfinished.replace(target)  # under its name only when it is complete
    except OSError:
        if report is not None:
            raise


def collect(
    save: Save,
    members: Sequence[str],
    *,
    alive: Callable[[], Collection[str]],
    everywhere: threading.Event,
) -> list[WriteReport]:
    """All reports, in the order of the ranks. Does not wait for one that cannot come any more.

    None will come from a worker that is lost, nor from anybody once it is known that all have written
    what they ever will (``everywhere``).
    """
    found: dict[int, bytes] = {}
    hopeless_since: float | None = None
    while len(found) < len(members):
        for rank in range(len(members)):
            path = save.path / index.report_name(save.id, rank)
            if rank not in found and path.exists():
                found[rank] = path.read_bytes()
        failed = [members[rank] for rank, text in found.items() if text == FAILED]
        away = [name for rank, name in enumerate(members) if rank not in found]
        hopeless = everywhere.is_set() or any(name not in alive() for name in away)
        hopeless_since = (hopeless_since or time.monotonic()) if hopeless else None
        if failed or (away and hopeless_since is not None and time.monotonic() - hopeless_since > PATIENCE):
            raise CheckpointError(f"worker {', '.join(failed or away)} did not write its share")
        if away:
            time.sleep(0.01)
    return [read_report(found[rank]) for rank in range(len(members))]
