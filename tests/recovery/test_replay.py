"""What a worker reads of its own log in a replay. Replays themselves are in ``tests/world/test_replays.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from holdfast.engine.pipe import describe
from holdfast.log.log import Log, LogSettings
from holdfast.plan.log_records import Direction, Key
from holdfast.plan.replay_plan import Sources
from holdfast.recovery import replay
from tests.engine.memory_group import MemoryGroup, Network
from tests.engine.pipelines import CPU


def test_what_a_worker_finds_in_its_own_log_is_a_copy(tmp_path: Path) -> None:
    """Autograd may give it to a parameter as its gradient, and add to it: the next replay needs it as it was."""
    log = Log(LogSettings(folder=tmp_path), name="0.0", say=print)
    key = Key(step=0, boundary=1, micro_batch=0, direction=Direction.BACKWARD)
    log.keep(key, describe([torch.ones(16)]))
    group: Any = MemoryGroup(0, Network(1))
    traffic = replay._Traffic(group, log, Sources([log.holdings(1)]), lambda step, rank: [], range(1), CPU)
    (gradient,) = traffic.find(key)
    gradient.add_(1.0)
    (once_more,) = traffic.find(key)
    assert torch.equal(once_more, torch.ones(16))
