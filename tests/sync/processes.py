"""Work on forked processes with a process group of Gloo's, for what threads cannot show."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def on_processes(size: int, work: Callable[[int], Any], *, seconds: int = 60) -> list[Any]:
    """Runs ``work(rank)`` in so many processes; by rank what it returned, or None if it was killed.

    Results travel as files of torch's, which hold tensors and plain values. A process that takes too long is ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        children = [_fork(rank, size, work, Path(folder), seconds) for rank in range(size)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert all(code in (0, -signal.SIGKILL) for code in codes), f"exit codes {codes}"
        files = [Path(folder, f"result{rank}") for rank in range(size)]
        return [torch.load(file) if file.exists() else None for file in files]


def _fork(rank: int, size: int, work: Callable[[int], Any], folder: Path, seconds: int) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # not pytest's
    signal.alarm(seconds)  # ends a process that hangs
    code = 1
    try:
        torch.set_num_threads(1)
        store = dist.FileStore(str(folder / "store"), size)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        torch.save(work(rank), folder / f"result{rank}")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
