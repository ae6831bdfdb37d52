"""Holdfast keeps PyTorch training going while the machines under it come and go.

The public names are few: ``Run``, ``Step`` and the errors. They are imported on first use, so that
``holdfast --help`` and the agent do not pay for importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.errors import HoldfastError, LossNotFinite, UsageError

if TYPE_CHECKING:
    from holdfast.run import Run, Step

__version__ = "0.1.0"
__all__ = ["HoldfastError", "LossNotFinite", "Run", "Step", "UsageError"]


def __getattr__(name: str) -> Any:
    if name in ("Run", "Step"):
        from holdfast import run

        return getattr(run, name)
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
