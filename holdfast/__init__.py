"""Holdfast keeps PyTorch training going while the machines under it come and go.

The public names are few: ``Run``, ``Loop``, their steps, the settings that they take in groups, ``layers_of``,
``tied``, the policies of when replicas talk, and the errors. They are imported on first use, so that
``holdfast --help`` and the agent do not pay for importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast.errors import (
    CheckpointError,
    Drift,
    HoldfastError,
    LossNotFinite,
    NoCheckpoint,
    TooFewWorkers,
    UsageError,
)

if TYPE_CHECKING:
    from holdfast.data.source import Data
    from holdfast.data.stream import Stream
    from holdfast.engine.layers_of import layers_of
    from holdfast.engine.numerics import Numerics
    from holdfast.engine.tied_weights import tied
    from holdfast.log.log import LogSettings
    from holdfast.plan.placement import Placement
    from holdfast.recovery.resume import Checkpoints
    from holdfast.run.loop import Loop
    from holdfast.run.loop_step import LoopStep
    from holdfast.run.run import Run, Step
    from holdfast.sync.diloco import DiLoCo
    from holdfast.sync.periodic import FedAvg, LocalSGD
    from holdfast.sync.selsync import SelSync
    from holdfast.sync.ssp import SSP

__version__ = "0.1.0"
__all__ = [
    "SSP",
    "CheckpointError",
    "Checkpoints",
    "Data",
    "DiLoCo",
    "Drift",
    "FedAvg",
    "HoldfastError",
    "LocalSGD",
    "LogSettings",
    "Loop",
    "LoopStep",
    "LossNotFinite",
    "NoCheckpoint",
    "Numerics",
    "Placement",
    "Run",
    "SelSync",
    "Step",
    "Stream",
    "TooFewWorkers",
    "UsageError",
    "layers_of",
    "tied",
]

_HOMES = {
    "Checkpoints": "holdfast.recovery.resume",
    "Data": "holdfast.data.source",
    "DiLoCo": "holdfast.sync.diloco",
    "FedAvg": "holdfast.sync.periodic",
    "LocalSGD": "holdfast.sync.periodic",
    "LogSettings": "holdfast.log.log",
    "Loop": "holdfast.run.loop",
    "LoopStep": "holdfast.run.loop_step",
    "Numerics": "holdfast.engine.numerics",
    "Placement": "holdfast.plan.placement",
    "SSP": "holdfast.sync.ssp",
    "SelSync": "holdfast.sync.selsync",
    "Run": "holdfast.run.run",
    "Step": "holdfast.run.run",
    "Stream": "holdfast.data.stream",
    "layers_of": "holdfast.engine.layers_of",
    "tied": "holdfast.engine.tied_weights",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
