"""A group of threads instead of processes, as strict as the contract allows.

What is sent is read only when the receiver waits for it, so a sender that changes it too early, or does not keep it,
is found out; a vote succeeds once all was read. Only memory travels: what a tensor's flags say of it does not.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from holdfast.cluster.membership import Generation, Member
from holdfast.cluster.talk import Transfer
from holdfast.cluster.team import ALONE

T = TypeVar("T")
PATIENCE = 20.0  # seconds until a test that would hang fails instead


class Lost(RuntimeError):
    """Another worker of the test has failed: that one's error is the one to look at."""


class Letter:
    """A tensor under way. Whoever sent it must keep this until it was read."""

    def __init__(self, tensor: torch.Tensor, address: str) -> None:
        assert tensor.is_contiguous()
        assert not tensor.is_conj()
        assert not tensor.is_neg()
        self.tensor, self.address = tensor, address
        self.read = threading.Event()

    def __call__(self) -> None:
        assert self.read.wait(PATIENCE), f"{self.address}: nobody receives"


class Receive:
    """Room that was asked to be filled. Waited for once: Gloo never comes back from a second time."""

    def __init__(self, fill: Callable[[], None]) -> None:
        self._fill = fill
        self.waited = False

    def __call__(self) -> None:
        self.let_go()
        self._fill()

    def let_go(self) -> None:
        assert not self.waited, "a receive is waited for a second time"
        self.waited = True


class Network:
    """Letters from one worker to another, in order for each tag, and a table around which all meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=PATIENCE)
        self.table: list[torch.Tensor] = [torch.empty(0)] * size
        self.failed = threading.Event()
        self.letters: weakref.WeakSet[Letter] = weakref.WeakSet()  # those that somebody keeps
        self.bytes = 0
        self._boxes: dict[tuple[int, int, int], queue.SimpleQueue[Any]] = defaultdict(queue.SimpleQueue)
        self._lock = threading.Lock()

    def box(self, sender: int, receiver: int, tag: int) -> queue.SimpleQueue[Any]:
        with self._lock:
            return self._boxes[sender, receiver, tag]

    def fail(self) -> None:
        self.failed.set()
        self.barrier.abort()

    def put(self, sender: int, receiver: int, tag: int, tensor: torch.Tensor) -> Letter:
        letter = Letter(tensor, f"{sender} → {receiver}, tag {tag}")
        with self._lock:
            self.letters.add(letter)
            self.bytes += tensor.nbytes
        self.box(sender, receiver, tag).put((weakref.ref(letter), letter.address))
        return letter

    def get(self, sender: int, receiver: int, tag: int, tensor: torch.Tensor) -> None:
        box = self.box(sender, receiver, tag)
        for _ in range(int(PATIENCE / 0.02)):
            try:
                reference, address = box.get(timeout=0.02)
                break
            except queue.Empty:
                if self.failed.is_set():
                    raise Lost(f"{sender} → {receiver}, tag {tag}") from None
        else:
            raise AssertionError(f"{sender} → {receiver}, tag {tag}: nothing comes")
        letter = reference()
        assert letter is not None, f"{address}: let go before it was read"
        assert tensor.numel() == letter.tensor.numel(), f"{address}: {letter.tensor.shape} into {tensor.shape}"
        assert tensor.dtype == letter.tensor.dtype, f"{address}: {letter.tensor.dtype} into {tensor.dtype}"
        with torch.no_grad():
            tensor.copy_(letter.tensor)
        letter.read.set()


class MemoryGroup:
    """What ``Reduction``, ``Stage``, ``carry_out`` and others use of a ``Group``."""

    team = ALONE

    def __init__(self, rank: int, network: Network) -> None:
        self.rank = rank
        self.size = network.size
        self.network = network
        self.bytes = 0
        members = tuple(Member(worker=f"0.{number}", address="") for number in range(network.size))
        self.generation = Generation(number=1, members=members)
        self._sent: list[Letter] = []

    def check(self) -> None:
        if self.network.failed.is_set():
            raise Lost("another worker has failed")

    gate = check

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def start(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> list[Receive]:
        waits = [self._receive(*transfer) for transfer in receives]
        self._sent += self.send(sends)
        return waits

    def _receive(self, peer: int, tensor: torch.Tensor, tag: int) -> Receive:
        assert tensor.is_contiguous()
        return Receive(lambda: self.network.get(peer, self.rank, tag, tensor))

    def finish(self, works: Iterable[Receive]) -> None:
        """As ``Group`` does it: after a failure the others are let go, and what decides on more of them hears of it."""
        error: BaseException | None = None
        try:
            for work in works:
                if error is not None:
                    work.let_go()
                    continue
                try:
                    self.wait(work)
                except BaseException as e:
                    error = e
                    self.network.fail()
        except Exception as e:
            error = error or e
        if error is not None:
            raise error

    def wait(self, work: Receive) -> None:
        work()

    def send(self, sends: Sequence[Transfer]) -> list[Letter]:
        assert all(peer != self.rank for peer, _, _ in sends)
        self.bytes += sum(tensor.nbytes for _, tensor, _ in sends)
        return [self.network.put(self.rank, peer, tag, tensor) for peer, tensor, tag in sends]

    def keep(self, works: Sequence[Letter]) -> None:
        self._sent += works

    def drain(self, works: Sequence[Receive]) -> None:
        for work in works:
            work.let_go()

    def vote(self, ballot: torch.Tensor) -> None:
        for wait in self._sent:
            wait()
        self._sent.clear()
        self.sum(ballot)

    def sum(self, values: torch.Tensor, ranks: Sequence[int] | None = None, *, tag: int = 0) -> None:
        if ranks is not None:
            self._sum_of(values, ranks)
            return
        network = self.network
        network.table[self.rank] = values.clone()
        network.barrier.wait()
        total = sum(network.table[1:], network.table[0].clone())
        network.barrier.wait()
        values.copy_(total)

    def _sum_of(self, values: torch.Tensor, ranks: Sequence[int]) -> None:
        mine = values.clone()
        heard = {rank: torch.empty_like(values) for rank in ranks if rank != self.rank}
        works = self.start([(rank, mine, 0) for rank in heard], [(rank, other, 0) for rank, other in heard.items()])
        self.finish(works)
        heard[self.rank] = mine
        values.copy_(sum((heard[rank] for rank in sorted(ranks)[1:]), heard[min(ranks)].clone()))


def on_workers(size: int, work: Callable[[Any], T], network: Network | None = None) -> list[T]:
    """Runs ``work(group)`` on so many threads; returns the results by rank, or raises the first error."""
    network = network or Network(size)
    groups = [MemoryGroup(rank, network) for rank in range(size)]  # they last until all are done
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(groups[rank])
        except BaseException as e:
            errors.append(e)
            network.fail()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda e: isinstance(e, Lost | threading.BrokenBarrierError)):
        raise error
    return [results[rank] for rank in range(size)]
