"""Who takes part in ``bench sync``, and with which settings."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KINDS = {  # where a policy is found
    "LocalSGD": "periodic",
    "FedAvg": "periodic",
    "RandomSync": "periodic",
    "DiLoCo": "diloco",
    "SelSync": "selsync",
    "SSP": "ssp",
}

# Learning rate of each method by task, found with ``--tune``: seed 1000, no limit on the network, the best mean over
# the last third of the evaluations. Tried were 1, 1.5 and 2.2e-3 for the GPT (100 steps), and 8, 16 and 32e-3 for
# digits (140 steps); half of each for DiLoCo. Methods that differ only in how often they synchronise share a rate.
# Some were tuned with other settings than they run with now. For the GPT: "delta" with 0.05, "local overlapped" with
# every 25 and an overlap of 12, "variance overlapped" with a target of 0.04 and an overlap of 12. DiLoCo's 0.5 to
# 1.1e-3 were tried with 88 steps and its 1 to 2.2e-3 with 100, so they do not compare. Several methods took the end
# of their grid.
RATES: dict[str, dict[str, float]] = {
    "gpt": {
        "bsp": 1.5e-3,
        "power": 1.5e-3,
        "local 10": 1.5e-3,
        "local 25": 1e-3,
        "local 50": 1e-3,
        "local overlapped": 1e-3,
        "diloco": 1e-3,
        "ssp": 1.5e-3,
        "delta": 1.5e-3,
        "target": 1e-3,
        "variance": 1.5e-3,
        "variance overlapped": 1e-3,
    },
    "digits": {
        "bsp": 8e-3,
        "power": 16e-3,
        "local 10": 16e-3,
        "local 25": 16e-3,
        "local 50": 16e-3,
        "local overlapped": 16e-3,
        "diloco": 16e-3,
        "ssp": 8e-3,
        "delta": 16e-3,
        "target": 16e-3,
        "variance": 16e-3,
        "variance overlapped": 8e-3,
    },
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
