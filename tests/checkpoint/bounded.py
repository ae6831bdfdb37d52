"""Runs a function in a child process that may take only so much memory and processor time."""

from __future__ import annotations

import multiprocessing
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any


def memory_now() -> int:
    """The address space of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def bounded(work: Callable[[], Any], *, memory: int, seconds: int) -> str:
    """What ``work`` returned or raised, as text, in a fork of this process that may take so many bytes more.

    "killed" if it took more seconds of processor time, "no memory" if Python itself ran out of it.
    """
    here, there = multiprocessing.get_context("fork").Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        try:
            limit = memory_now() + memory
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            used = int(resource.getrusage(resource.RUSAGE_SELF).ru_utime) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, used + seconds))
            there.send(str(work()))
        except MemoryError:
            there.send("no memory")
        except BaseException as error:
            there.send(f"{type(error).__name__}: {error}")
        finally:
            os._exit(0)
    there.close()
    try:
        return str(here.recv())
    except EOFError:
        return "killed"
    finally:
        os.waitpid(pid, 0)
