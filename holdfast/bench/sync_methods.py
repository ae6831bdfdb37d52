"""Who takes part in ``bench sync``, and with which settings."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.bench.sync_rates import RATES

KINDS = {  # where a policy is found
    "LocalSGD": "periodic",
    "FedAvg": "periodic",
    "RandomSync": "periodic",
    "DiLoCo": "diloco",
    "SelSync": "selsync",
    "SSP": "ssp",
}


@dataclass(frozen=True, kw_only=True)
class Method:
    """A contestant. ``tuned_as``: the name under which its learning rate is kept; the first that has it is tuned.

    ``matched``: synchronises as often as that other method did with the same seed, so it runs after it.
    """

    name: str
    kind: str
    tuned_as: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    matched: str | None = None

    @property
    def is_selsync(self) -> bool:
        return self.kind == "SelSync"

    @property
    def is_fixed_period(self) -> bool:
        """Local SGD as others have it: the baseline to beat."""
        return self.kind == "LocalSGD" and self.matched is None

    def lr(self, task: str) -> float:
        return RATES[task][self.tuned_as]

    def settled(self, steps: int, synchronisations: int | None) -> dict[str, Any]:
        """Its settings, once it is known how often the method it is matched to has synchronised.

        >>> Method(name="m", kind="LocalSGD", tuned_as="local", matched="SelSync").settled(100, 8)
        {'every': 12}
        """
        if self.matched is None:
            return dict(self.settings)
        assert synchronisations is not None, f"{self.name} ran before {self.matched}"
        if self.kind == "RandomSync":
            return {**self.settings, "share": max(synchronisations, 1) / steps}
        return {**self.settings, "every": max(1, steps // max(synchronisations, 1))}


def make_policy(kind: str, settings: Mapping[str, Any]) -> Any:
    module = importlib.import_module(f"holdfast.sync.{KINDS[kind]}")
    return getattr(module, kind)(**settings)
