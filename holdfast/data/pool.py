"""A pool of loaders: has batches read ahead by other processes, and replaces those that die."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.data.fetch import Collate, Dataset, Request
from holdfast.data.loader_process import Failure, receive, send, start_nursery
from holdfast.data.parcel import unpack
from holdfast.errors import HoldfastError

logger = logging.getLogger(__name__)

DEATHS = 3  # of loaders that read the same batch: then it is the batch that kills them
END_SECONDS = 5.0  # for a nursery to end, or to say how a loader has: both take milliseconds
SLOW_SECONDS = 30.0  # of waiting for one batch, after which the log says so


class LoaderTraceback(Exception):
    """The traceback that an exception had in a loader. It is shown above that exception."""

    def __str__(self) -> str:
        return f"in a loader:\n\n{self.args[0]}"


@dataclass(kw_only=True, eq=False)
class _Loader:
    """A loader as its worker knows it."""

    number: int  # no other loader of this pool ever has it
    line: socket.socket
    unanswered: dict[int, Request] = field(default_factory=dict)  # by number, the oldest first


class Pool:
    """Loaders of one data set. ``want`` says what to read ahead, ``take`` waits for a batch.

    A pool remembers batches by their requests. It holds no more of them than ``want`` was last given.

    >>> from torch.utils.data import default_collate
    >>> pool = Pool([1, 2, 3], collate=default_collate, loaders=2)
    >>> pool.take(Request(seed=0, samples=(2, 0)))
    tensor([3, 1])
    >>> pool.close()
    """

    def __init__(self, data: Dataset, *, collate: Collate, loaders: int) -> None:
        self._data, self._collate, self._size = data, collate, loaders
        self._owner = os.getpid()
        self._loaders: dict[int, _Loader] = {}  # by the descriptors of their lines; started when first needed
        self._asked: dict[Request, tuple[_Loader, int]] = {}  # wanted and not answered
        self._done: dict[Request, tuple[int, bool]] = {}  # wanted and answered: the parcel, whether it is a failure
        self._deaths: Counter[Request] = Counter()
        self._codes: dict[int, int] = {}  # exit codes of ended loaders, by number
        self._started = 0  # loaders so far
        self._count = 0  # requests so far
        self._control, self._nursery = start_nursery(data, collate)

    # --- what the worker asks for -----------------------------------------------------------------

    def want(self, requests: Sequence[Request]) -> None:
        """Have these batches read, in this order. What was read or asked for in vain is dropped."""
        while self._hear(0.0):
            pass
        wanted = set(requests)
        for request in [known for known in self._done if known not in wanted]:
            os.close(self._done.pop(request)[0])
        for request in [known for known in self._asked if known not in wanted]:
            loader, number = self._asked.pop(request)
            self._tell(loader, {"drop": number})
        for request in requests:
            if request not in self._done and request not in self._asked:
                self._start_loaders()
                self._ask(min(self._loaders.values(), key=lambda one: len(one.unanswered)), request)

    def take(self, request: Request) -> Any:
        """Return a batch, when it has been read. It is not remembered: whoever gets it may change it.

        Raises what the data set has raised, and ``HoldfastError`` if loaders die of this batch.
        """
        if request not in self._done and request not in self._asked:
            self.want([*self._asked, *self._done, request])
        begin = time.monotonic()
        while request not in self._done:
            if not self._hear(SLOW_SECONDS):
                waited = time.monotonic() - begin
                logger.warning("waiting for samples %s from a loader for %.0f s", list(request.samples), waited)
        file, failed = self._done.pop(request)
        self._deaths.pop(request, None)
        value = unpack(file)
        if failed:
            assert isinstance(value, Failure)
            raise value.error from LoaderTraceback(value.text)
        return value

    def close(self) -> None:
        """End all loaders and their nursery."""
        if os.getpid() != self._owner or self._control.fileno() < 0:
            return  # in a fork of the worker they are not its own
        for file, _ in self._done.values():
            os.close(file)
        for loader in self._loaders.values():
            loader.line.close()
        self._done.clear()
        self._asked.clear()
        self._loaders.clear()
        self._end_nursery()

    # --- loaders ----------------------------------------------------------------------------------

    def _start_loaders(self) -> None:
        while len(self._loaders) < self._size:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._loaders[ours.fileno()] = _Loader(number=self._started, line=ours)
            try:
                socket.send_fds(self._control, [b'{"start": %d}' % self._started], [theirs.fileno()])
            except OSError:
                pass  # the nursery has ended; ``_hear`` finds it out
            self._started += 1
            theirs.close()

    def _ask(self, loader: _Loader, request: Request) -> None:
        self._count += 1
        loader.unanswered[self._count] = request
        self._asked[request] = (loader, self._count)
        self._tell(loader, {"number": self._count, "seed": request.seed, "samples": request.samples})

    @staticmethod
    def _tell(loader: _Loader, message: dict[str, Any]) -> None:
        try:
            send(loader.line, message)
        except OSError:
            pass  # it has ended; ``_hear`` finds it out

    def _hear(self, seconds: float) -> bool:
        """Take in what loaders and the nursery say, waiting for it at most so long; return whether they said a thing.

        Raises ``HoldfastError`` if loaders die of the same batch again and again.
        """
        waiting = select.poll()
        waiting.register(self._control, select.POLLIN)
        for line in self._loaders:
            waiting.register(line, select.POLLIN)
        found = [descriptor for descriptor, _ in waiting.poll(1000 * seconds)]
        if self._control.fileno() in found and not self._hear_nursery():
            self._replace_nursery()
            return True
        for line in found:
            if line in self._loaders:
                self._hear_loader(self._loaders[line])
        return bool(found)

    def _hear_loader(self, loader: _Loader) -> None:
        try:
            received = receive(loader.line)
        except ConnectionError:
            received = None
        if received is None:
            self._replace([self._forget(loader)])
            return
        message, files = received
        if "failed" in message and not files:  # the kernel has left out what it had no number for
            raise HoldfastError(
                f"too many open files: each micro-batch that is read ahead is one, and {len(self._done)} are here",
                hint="a smaller prefetch= or num_workers=, or a higher ulimit -n",
            )
        number = message["dropped"] if "dropped" in message else message["number"]
        request = loader.unanswered.pop(number)
        if self._asked.get(request, (None, 0))[1] == number:
            del self._asked[request]
            self._done[request] = (files[0], message["failed"])
        elif files:
            os.close(files[0])  # it was dropped too late

    def _hear_nursery(self) -> bool:
        """Take in one report of the nursery; return False if it has ended."""
        try:
            received = receive(self._control)
        except ConnectionError:
            received = None
        if received is None:
            return False
        self._codes[received[0]["ended"]] = received[0]["code"]
        return True

    # --- deaths -----------------------------------------------------------------------------------

    def _forget(self, loader: _Loader) -> _Loader:
        del self._loaders[loader.line.fileno()]
        loader.line.close()
        return loader

    def _replace(self, dead: Sequence[_Loader]) -> None:
        """Have others read what dead loaders were asked for. Raises ``HoldfastError`` if that kills them too."""
        self._start_loaders()
        for loader in dead:
            how = self._cause(loader)
            wanted = [r for number, r in loader.unanswered.items() if self._asked.get(r) == (loader, number)]
            reading = list(next(iter(loader.unanswered.values())).samples) if loader.unanswered else []
            busy = f"while it read samples {reading}" if reading else "while it had nothing to read"
            logger.warning("loader %s %s %s; it is replaced", loader.number, how, busy)
            for request in wanted:
                del self._asked[request]
            if wanted and list(wanted[0].samples) == reading:
                self._deaths[wanted[0]] += 1
                if self._deaths[wanted[0]] >= DEATHS:
                    raise HoldfastError(
                        f"{DEATHS} loaders have died while they read samples {reading}: the last one {how}",
                        hint="a lack of memory? fewer num_workers=, a smaller prefetch=; num_workers=0 reads them here",
                    )
            for request in wanted:
                self._ask(min(self._loaders.values(), key=lambda one: len(one.unanswered)), request)

    def _cause(self, loader: _Loader) -> str:
        """Return how a loader has ended, as its nursery tells."""
        end = time.monotonic() + END_SECONDS
        waiting = select.poll()
        waiting.register(self._control, select.POLLIN)
        while loader.number not in self._codes and time.monotonic() < end:
            if not waiting.poll(1000 * END_SECONDS) or not self._hear_nursery():
                break  # the next ``_hear`` replaces a nursery that has ended
        code = self._codes.pop(loader.number, None)
        if code is None:
            return "has ended"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with code {code}"

    def _replace_nursery(self) -> None:
        """Fork another nursery, now from a worker that has connections. Loaders have died with the old one."""
        logger.warning("the process that starts loaders has ended; it is replaced")
        self._end_nursery()
        dead = [self._forget(loader) for loader in list(self._loaders.values())]
        self._codes = {loader.number: -signal.SIGKILL for loader in dead}
        self._control, self._nursery = start_nursery(self._data, self._collate)
        self._replace(dead)

    def _end_nursery(self) -> None:
        self._control.close()
        try:
            life = os.pidfd_open(self._nursery)
        except OSError:
            return  # the script has waited for it
        waiting = select.poll()
        waiting.register(life, select.POLLIN)
        if not waiting.poll(1000 * END_SECONDS):
            os.kill(self._nursery, signal.SIGKILL)  # it was stopped, say
        try:
            os.waitpid(self._nursery, 0)
        except ChildProcessError:
            pass
        os.close(life)
