"""A group of threads instead of processes, as strict as the contract allows.

What is sent is read only when the receiver waits for it, so a sender that changes it too early is found
out; a vote succeeds once all was read.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from holdfast.cluster.group import Transfer

T = TypeVar("T")
PATIENCE = 20.0  # seconds until a test that would hang fails instead


class Network:
    """Letters from one worker to another, in order for each tag, and a table around which all meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=PATIENCE)
        self.table: list[torch.Tensor] = [torch.empty(0)] * size
        self._boxes: dict[tuple[int, int, int], queue.SimpleQueue[Any]] = defaultdict(queue.SimpleQueue)
        self._lock = threading.Lock()

    def box(self, sender: int, receiver: int, tag: int) -> queue.SimpleQueue[Any]:
        with self._lock:
            return self._boxes[sender, receiver, tag]


class MemoryGroup:
    """What ``Reduction``, ``copy_state`` and others use of a ``Group``."""

    def __init__(self, rank: int, network: Network) -> None:
        self.rank = rank
        self.size = network.size
        self._network = network
        self._sent: list[Callable[[], None]] = []

    def check(self) -> None: ...

    def start(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> list[Callable[[], None]]:
        waits = [self._receive(*transfer) for transfer in receives]
        self._sent += [self._send(*transfer) for transfer in sends]
        return waits

    def _send(self, peer: int, tensor: torch.Tensor, tag: int) -> Callable[[], None]:
        assert tensor.is_contiguous()
        assert peer != self.rank
        read = threading.Event()
        self._network.box(self.rank, peer, tag).put((tensor, read))

        def wait() -> None:
            assert read.wait(PATIENCE), f"{self.rank} → {peer}, tag {tag}: nobody receives"

        return wait

    def _receive(self, peer: int, tensor: torch.Tensor, tag: int) -> Callable[[], None]:
        assert tensor.is_contiguous()

        def wait() -> None:
            sent, read = self._network.box(peer, self.rank, tag).get(timeout=PATIENCE)
            tensor.copy_(sent)
            read.set()

        return wait

    def finish(self, works: Sequence[Callable[[], None]]) -> None:
        for wait in works:
            wait()

    def vote(self, ballot: torch.Tensor) -> None:
        for wait in self._sent:
            wait()
        self._sent.clear()
        self.sum(ballot)

    def sum(self, values: torch.Tensor) -> None:
        network = self._network
        network.table[self.rank] = values.clone()
        network.barrier.wait()
        total = sum(network.table[1:], network.table[0].clone())
        network.barrier.wait()
        values.copy_(total)


def on_workers(size: int, work: Callable[[Any], T]) -> list[T]:
    """Runs ``work(group)`` on so many threads; returns the results by rank, or raises the first error."""
    network = Network(size)
    results: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = work(MemoryGroup(rank, network))
        except BaseException as e:
            results[rank] = e

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    return [results[rank] for rank in range(size)]
