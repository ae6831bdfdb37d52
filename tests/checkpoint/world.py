"""Worlds of Gloo ranks on this machine that live through many tests, and run a function on each of their ranks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_PARENT = "tests.checkpoint.layouts"  # imported once; ranks are forked from there


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a rank's function returned or raised; a rank that died has neither."""

    value: Any = None
    error: str | None = None
    trace: str = ""
    died: bool = False


START_SECONDS = 120.0  # to import torch and to form a group, on a busy machine


class World:
    """So many ranks with a default process group. ``run`` gives what each of them returned."""

    def __init__(self, size: int) -> None:
        self.closed = False
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([_PARENT])
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        pipes = [context.Pipe() for _ in range(size)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(theirs, store, rank, size), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        end = time.monotonic() + START_SECONDS
        for pipe in self._pipes:
            assert pipe.poll(max(end - time.monotonic(), 0)), "a rank has not started"
            _receive(pipe)

    def run(self, function: Callable[..., Any], *arguments: Any, seconds: float = 60.0) -> list[Any]:
        outcomes = self.outcomes(function, *arguments, seconds=seconds)
        failures = [f"rank {rank}: {one.trace or 'died'}" for rank, one in enumerate(outcomes) if one.error or one.died]
        assert not failures, "\n".join(failures)
        return [outcome.value for outcome in outcomes]

    def outcomes(self, function: Callable[..., Any], *arguments: Any, seconds: float = 60.0) -> list[Outcome]:
        for pipe in self._pipes:
            pipe.send((function, arguments))
        found: dict[Connection, Outcome] = {}
        end = time.monotonic() + seconds
        while waiting := [pipe for pipe in self._pipes if pipe not in found]:
            ready = wait(waiting, max(end - time.monotonic(), 0))
            for pipe in ready:
                found[pipe] = _receive(pipe)
                if found[pipe].error is not None:
                    end = min(end, time.monotonic() + 10)  # the others may wait for this one
            if not ready:
                self.close()
                found |= dict.fromkeys(waiting, Outcome(error="is silent", trace=f"silent for {seconds} seconds"))
        return [found[pipe] for pipe in self._pipes]

    def close(self) -> None:
        self.closed = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def _receive(pipe: Connection) -> Outcome:
    try:
        return pipe.recv()
    except EOFError:
        return Outcome(died=True)


def _serve(pipe: Connection, store: str, rank: int, size: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    pipe.send(Outcome())  # it is there: its start is no part of the first function's time
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            outcome = Outcome(value=function(*arguments))
        except Exception as e:
            outcome = Outcome(error=f"{type(e).__name__}: {e}", trace=traceback.format_exc())
        pipe.send(outcome)


_worlds: dict[int, World] = {}


def world(size: int) -> World:
    """The world of this size that all tests share; whoever breaks one makes one of its own."""
    if size not in _worlds or _worlds[size].closed:
        _worlds[size] = World(size)
    return _worlds[size]
