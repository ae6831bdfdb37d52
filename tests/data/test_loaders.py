"""Loaders: the bits do not depend on them, they read ahead within bounds, and neither outlive nor hide a worker."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.data import fetch, loader_process
from holdfast.data.fetch import Request
from holdfast.data.loaded_feed import LoadedFeed
from holdfast.data.order import Order
from holdfast.data.parcel import pack, unpack
from holdfast.data.pool import DEATHS, LoaderTraceback, Pool
from holdfast.data.source import Data
from holdfast.errors import HoldfastError, UsageError
from holdfast.processes import facts_of, loaders_of
from tests.harness import wait_until

ORDER = Order(size=22, global_batch=8, micro_batch=2, seed=3)  # the last batch of an epoch has three micro-batches


class Noisy:
    """Samples with random numbers of every generator. It notes who reads what."""

    def __init__(self, journal: Path | None = None) -> None:
        self.journal = journal

    def __len__(self) -> int:
        return ORDER.size

    def __getitem__(self, i: int) -> dict[str, Any]:
        if self.journal is not None:
            with self.journal.open("a") as file:
                file.write(f"{os.getpid()} {i}\n")
        return {"x": torch.rand(3) + i, "n": np.random.rand(2), "p": random.random()}

    def read(self) -> list[int]:
        assert self.journal is not None
        return [int(line.split()[1]) for line in self.journal.read_text().splitlines()] if self.journal.exists() else []

    def readers(self) -> set[int]:
        assert self.journal is not None
        return (
            {int(line.split()[0]) for line in self.journal.read_text().splitlines()} if self.journal.exists() else set()
        )


def hash_of(*values: Any) -> str:
    digest = hashlib.sha256()
    for value in values:
        digest.update(repr({k: v.tolist() for k, v in value.items()} if isinstance(value, dict) else value).encode())
    return digest.hexdigest()


def share(step: int) -> range:
    """The second half of each step's micro-batches."""
    count = ORDER.micro_batches(step)
    return range(count // 2, count)


def train(data: Any, loaders: int, *, steps: int = 4) -> str:
    """Read the share of some steps, and draw after each batch as a loss does; return the hash of everything."""
    feed = Data(data, num_workers=loaders).feed(ORDER)
    feed.enter(share)
    seen: list[Any] = []
    for step in range(steps):
        feed.begin(step, share(step))
        for index in share(step):
            seen += [feed.read(step, index), float(torch.rand(1)), float(np.random.rand()), random.random()]
        feed.keep()
    if isinstance(feed, LoadedFeed):
        feed._pool.close()
    return hash_of(*seen)


def test_any_number_of_loaders_gives_the_same_bits() -> None:
    assert len({train(Noisy(), loaders) for loaders in (0, 1, 4)}) == 1


def test_loaders_that_were_not_seeded_would_give_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    monkeypatch.setattr(fetch, "seed_everything", lambda seed, device: None)
    assert train(Noisy(), 1) != train(Noisy(), 4)


def test_batches_of_another_data_set_are_read_ahead_too() -> None:
    requests = [Request(seed=n, samples=(n, n + 1)) for n in range(5)]
    found = []
    for loaders in (0, 2):
        with Data(Noisy(), num_workers=loaders).feed(ORDER).reading(Noisy(), requests) as read:
            found.append(hash_of(*[(read(request), random.random()) for request in requests]))
    assert found[0] == found[1]


def test_what_is_read_ahead_is_bounded_and_crosses_steps(tmp_path: Path) -> None:
    data = Noisy(tmp_path / "journal")
    feed = LoadedFeed(data, order=ORDER, loaders=2, prefetch=2)
    feed.enter(share)
    feed.begin(0, share(0))  # two micro-batches of it are this worker's, and four may be ahead
    ahead = [(0, 2), (0, 3), (1, 2), (1, 3), (2, 1)]
    samples = [sorted(sample for key in ahead[:n] for sample in ORDER.samples(*key)) for n in range(6)]
    wait_until("four micro-batches are read", lambda: sorted(data.read()) == samples[4])
    feed.read(0, 2)
    wait_until("one more is read", lambda: sorted(data.read()) == samples[5])
    feed._pool.close()  # had a loader begun on another, it would have noted it
    assert sorted(data.read()) == samples[5]


def test_another_layout_drops_what_was_read_in_vain(tmp_path: Path) -> None:
    data = Noisy(tmp_path / "journal")
    feed = LoadedFeed(data, order=ORDER, loaders=1, prefetch=4)
    expected = Data(Noisy()).feed(ORDER)
    feed.enter(share)
    feed.begin(0, share(0))
    wait_until("all is read", lambda: len(data.read()) == 8)
    feed.enter(lambda step: [0])
    feed.begin(0, [0, 3])  # one that was read already, one that was not
    for index in (0, 3):
        assert hash_of(feed.read(0, index)) == hash_of(expected.read(0, index))
    assert len(feed._pool._done) + len(feed._pool._asked) == 4
    assert len([sample for sample in data.read() if sample in ORDER.samples(0, 3)]) == 2, "it was kept"
    feed.begin(0, [0, 3])  # the attempt was dropped: batches that were handed out are read again
    assert hash_of(feed.read(0, 0)) == hash_of(expected.read(0, 0))
    feed._pool.close()


# --- what goes wrong in a loader -----------------------------------------------------------------------


class Wrong:
    """A data set whose sample 3 does something else."""

    def __init__(self, do: Callable[[], Any]) -> None:
        self.do = do

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Any:
        return self.do() if i == 3 else torch.tensor(i)


@contextmanager
def pool_of(data: Any, *, loaders: int = 1) -> Iterator[Pool]:
    pool = Pool(data, collate=torch.utils.data.default_collate, loaders=loaders)
    try:
        yield pool
    finally:
        pool.close()


def ask(*samples: int) -> Request:
    return Request(seed=0, samples=samples)


class Picky(Exception):
    """An exception that cannot be made again from its text."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


@pytest.mark.parametrize("loaders", [0, 1])
@pytest.mark.parametrize(("error", "raised"), [(KeyError("lost"), KeyError), (Picky(1, 2), RuntimeError)])
def test_an_exception_of_the_data_set_names_the_sample(loaders: int, error: Exception, raised: Any) -> None:
    def fail() -> None:
        raise error

    if loaders == 0:
        with pytest.raises(type(error)) as caught:
            fetch.fetch(Wrong(fail), ask(2, 3), torch.utils.data.default_collate)
    else:
        with pool_of(Wrong(fail)) as pool:
            pool.want([ask(0), ask(2, 3), ask(1)])
            assert pool.take(ask(0)) == 0, "what was read ahead fails when it is needed"
            with pytest.raises(raised) as caught:
                pool.take(ask(2, 3))
            assert isinstance(caught.value.__cause__, LoaderTraceback)
            assert "in fail" in str(caught.value.__cause__), "the line of the user's code"
            assert pool.take(ask(1)) == 1
    assert "sample 3" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("loaders", [0, 1])
def test_a_data_set_that_raises_stop_iteration_ends_no_generator_of_ours(loaders: int) -> None:
    def fail() -> None:
        next(iter(()))

    if loaders == 0:
        with pytest.raises(RuntimeError, match="sample 3"):
            fetch.fetch(Wrong(fail), ask(2, 3), torch.utils.data.default_collate)
    else:
        with pool_of(Wrong(fail)) as pool, pytest.raises(RuntimeError, match="sample 3"):
            pool.take(ask(2, 3))


def test_a_connection_of_the_worker_is_said_to_be_closed() -> None:
    ours, theirs = socket.socketpair()
    with pool_of(Wrong(lambda: ours.send(b"a query"))) as pool, pytest.raises(OSError, match="socket") as caught:
        pool.take(ask(3))
    assert "closed in loaders" in "".join(caught.value.__notes__)
    ours.close()
    theirs.close()


def test_more_batches_ahead_than_files_may_be_open_are_named() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pool_of([1, 2, 3], loaders=1) as pool:
        pool.take(ask(0))
        spare = os.open(os.devnull, os.O_RDONLY)
        os.close(spare)
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare, before[1]))
        try:
            with pytest.raises(HoldfastError, match="too many open files"):
                pool.take(ask(1))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_batch_that_cannot_be_handed_over_is_named() -> None:
    pool = Pool([lambda: 0], collate=lambda samples: samples[0], loaders=1)
    with pytest.raises(UsageError, match=r"samples \[0\]"):
        pool.take(ask(0))
    pool.close()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_loader_that_dies_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    died = tmp_path / "died"

    def die_once() -> torch.Tensor:
        if not died.exists():
            died.touch()
            die()
        return torch.tensor(3)

    with pool_of(Wrong(die_once), loaders=2) as pool:
        pool.want([ask(3, 4), ask(0), ask(1), ask(2)])
        assert [pool.take(request).tolist() for request in (ask(0), ask(1), ask(2), ask(3, 4))] == [
            [0],
            [1],
            [2],
            [3, 4],
        ]
        assert len(pool._loaders) == 2
    assert "SIGKILL while it read samples [3, 4]" in caplog.text


def test_a_loader_that_dies_idle_is_not_said_to_have_read(caplog: pytest.LogCaptureFixture) -> None:
    with pool_of([1, 2, 3]) as pool:
        pool.take(ask(0))
        (loader,) = loaders_of(os.getpid())
        os.kill(loader, signal.SIGKILL)
        wait_until("it is replaced", lambda: pool.want([]) or "replaced" in caplog.text)
    assert "SIGKILL while it had nothing to read" in caplog.text


def test_ps_tells_loaders_from_their_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(pid: int) -> str:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode()

    monkeypatch.setenv("HOLDFAST_WORKER", "0.2")
    mine = shown(os.getpid())
    with pool_of([1, 2, 3]) as pool:
        pool.take(ask(0))
        (loader,) = loaders_of(os.getpid())
        assert shown(loader) == "holdfast: loader 0 of worker 0.2"
        assert shown(pool._nursery) == "holdfast: loaders of worker 0.2"
    assert shown(os.getpid()) == mine


def test_a_batch_that_kills_loaders_again_and_again_is_named() -> None:
    with pool_of(Wrong(die), loaders=2) as pool:
        pool.want([ask(0), ask(2, 3), ask(4)])
        with pytest.raises(HoldfastError, match=rf"^{DEATHS} loaders .*samples \[2, 3\].*SIGKILL"):
            pool.take(ask(2, 3))
        assert pool.take(ask(4)) == 4


def test_a_nursery_that_dies_is_replaced() -> None:
    with pool_of(Wrong(die)) as pool:
        assert pool.take(ask(0)) == 0
        first = pool._nursery
        os.kill(first, signal.SIGKILL)
        wait_until("it is over", lambda: is_over(first))
        assert pool.take(ask(1)) == 1
        assert pool._nursery != first
    wait_until("both are over", lambda: is_over(first) and is_over(pool._nursery))


def test_parcels_keep_strides_and_alignment() -> None:
    """Kernels may give other bits for other strides, or for memory that lies differently."""
    x = torch.arange(96.0).reshape(2, 3, 4, 4)
    given = [x, x.to(memory_format=torch.channels_last), x[:, 1:, ::2], x[0, 0, 0].expand(5, 4), x.bool(), x.bfloat16()]
    given += [torch.empty(0, 3), torch.tensor(7), torch.randn(3, dtype=torch.complex64).conj(), x.requires_grad_()]
    for before, after in zip(given, unpack(pack(given)), strict=True):
        assert torch.equal(before, after)
        assert (before.dtype, before.stride(), before.requires_grad) == (
            after.dtype,
            after.stride(),
            after.requires_grad,
        )
        assert before.data_ptr() % 64 == after.data_ptr() % 64
    part = pack(torch.zeros(1_000_000)[:3])
    assert os.fstat(part).st_size < 10_000, "the rest of a large tensor stays behind"
    os.close(part)


# --- worker and loaders --------------------------------------------------------------------------------


def is_over(pid: int) -> bool:
    facts = facts_of(pid)
    return facts is None or facts.is_over


def test_loaders_compute_with_one_thread_and_ignore_notices(tmp_path: Path) -> None:
    """Batch systems send notices to every process of a job: it is for the agent to act on them."""
    data = Noisy(tmp_path / "journal")
    with pool_of(Wrong(lambda: torch.tensor([torch.get_num_threads(), int(os.environ["OMP_NUM_THREADS"])]))) as pool:
        assert pool.take(ask(3)).tolist() == [[1, 1]]
    with pool_of(data) as pool:
        pool.take(ask(0))
        (loader,) = data.readers()
        for number in loader_process.NOTICES:
            os.kill(loader, number)
            os.kill(pool._nursery, number)
        pool.take(ask(1))
        assert data.readers() == {loader}


def test_a_data_set_may_use_processes_of_its_own() -> None:
    """A pool ends its processes by SIGTERM, which loaders ignore, and waits for them."""

    def work() -> int:
        with multiprocessing.get_context("fork").Pool(1) as others:
            return others.map(abs, [-3])[0]

    with pool_of(Wrong(work)) as pool:
        assert pool.take(ask(3)) == 3


class Worker:
    """A forked process with a connection and a pool of loaders, all of whose processes are known."""

    def __init__(self, folder: Path, *, lets_go: bool) -> None:
        data = Noisy(folder / "journal")
        self.connection, theirs = socket.socketpair()
        told, tell = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            if not lets_go:
                loader_process.let_go = lambda kept: None
            self.connection.close()
            pool = Pool(data, collate=torch.utils.data.default_collate, loaders=2)  # after there is a connection
            pool.want([ask(n, n) for n in range(12)])
            for n in range(12):
                pool.take(ask(n, n))
            os.write(tell, b"%d" % pool._nursery)
            time.sleep(1000)
            os._exit(0)
        theirs.close()
        os.close(tell)
        nursery = int(os.read(told, 100))
        os.close(told)
        self.others = {nursery, *data.readers()}

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def test_a_killed_worker_takes_its_loaders_along(tmp_path: Path) -> None:
    worker = Worker(tmp_path, lets_go=True)
    assert len(worker.others) > 1
    worker.kill()
    wait_until("all are over", lambda: all(map(is_over, worker.others)))


@pytest.mark.parametrize("lets_go", [True, False], ids=["", "control"])
def test_loaders_do_not_hide_the_death_of_their_worker(tmp_path: Path, lets_go: bool) -> None:
    """They are stopped, so they outlive it. Without ``let_go`` its connection would stay open meanwhile."""
    worker = Worker(tmp_path, lets_go=lets_go)
    for pid in worker.others:
        os.kill(pid, signal.SIGSTOP)
    worker.kill()
    assert not any(map(is_over, worker.others))
    worker.connection.setblocking(False)
    if lets_go:
        assert worker.connection.recv(1) == b""
    else:
        with pytest.raises(BlockingIOError):
            worker.connection.recv(1)
    for pid in worker.others:
        os.kill(pid, signal.SIGCONT)
    wait_until("all are over", lambda: all(map(is_over, worker.others)))


@pytest.mark.parametrize(
    "setting",
    [
        {"num_workers": -1},
        {"num_workers": 1.5},
        {"num_workers": 100_000},
        {"prefetch": 0},
        {"num_workers": 1, "prefetch": 10**9},
        {"pin_memory": 2},
    ],
)
def test_bad_settings_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(setting))):
        Data([1], **setting)
