"""A worker's process as a library sees it: one that trains alone. Holdfast is what connects it with the others."""

from __future__ import annotations

import os

from holdfast.errors import UsageError

# What `holdfast run` sets for scripts without a Run. A library that finds it would make a process group, which one
# lost worker ends for all.
OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def be_alone() -> None:
    """Hide the other workers from libraries that look for torchrun's variables, if ``holdfast run`` has set these.

    On a machine with several GPUs this worker sees the one of its number (untested). Raises ``UsageError`` in a team.
    """
    if "HOLDFAST_WORKER" not in os.environ:
        return
    if os.environ.get("HOLDFAST_TEAM", "1") != "1":
        raise UsageError(
            "trainers of other libraries are not for teams: each worker holds the whole model",
            hint="leave out --team; holdfast.Loop trains in teams",
        )
    slot = os.environ.get("LOCAL_RANK")
    if slot is not None:
        seen = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
        os.environ["CUDA_VISIBLE_DEVICES"] = seen[int(slot) % len(seen)] if seen else slot
    for name in OF_TORCHRUN:
        os.environ.pop(name, None)
