"""Holdfast keeps PyTorch training going while the machines under it come and go.

The public names are few: ``Run``, ``Step``, ``layers_of``, ``tied``, the policies of when replicas talk, and the
errors. They are imported on first use, so that ``holdfast --help`` and the agent do not pay for importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast.errors import HoldfastError, LossNotFinite, UsageError

if TYPE_CHECKING:
    from holdfast.engine.layers_of import layers_of
    from holdfast.engine.tied_weights import tied
    from holdfast.run.run import Run, Step
    from holdfast.sync.diloco import DiLoCo
    from holdfast.sync.periodic import FedAvg, LocalSGD
    from holdfast.sync.selsync import SelSync
    from holdfast.sync.ssp import SSP

__version__ = "0.1.0"
__all__ = [
    "SSP",
    "DiLoCo",
    "FedAvg",
    "HoldfastError",
    "LocalSGD",
    "LossNotFinite",
    "Run",
    "SelSync",
    "Step",
    "UsageError",
    "layers_of",
    "tied",
]

_HOMES = {
    "DiLoCo": "holdfast.sync.diloco",
    "FedAvg": "holdfast.sync.periodic",
    "LocalSGD": "holdfast.sync.periodic",
    "SSP": "holdfast.sync.ssp",
    "SelSync": "holdfast.sync.selsync",
    "Run": "holdfast.run.run",
    "Step": "holdfast.run.run",
    "layers_of": "holdfast.engine.layers_of",
    "tied": "holdfast.engine.tied_weights",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
