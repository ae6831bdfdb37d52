"""The key of a profile, made of facts about the model, the micro-batch and the device; and the cache by that key.

Two runs with the same key cost the same, as far as ``sight.py`` can tell: the key covers the layers, their settings and
code, the loss, the optimizer (but not its learning rate), the shapes of a micro-batch, the device and its threads.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from holdfast.engine.engine import Engine
from holdfast.engine.profile.sight import Sight
from holdfast.errors import UsageError
from holdfast.plan.profile import Profile
from holdfast.words import count


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Everything about a run that its profile depends on, as plain data."""

    model: dict[str, Any]
    micro_batch: dict[str, Any]
    device: dict[str, Any]

    @property
    def key(self) -> str:
        """The facts' digests: model, micro-batch, device. Three parts, so that one can say which of them differs.

        >>> RunFacts(model={"layers": []}, micro_batch={"samples": 4}, device={}).key
        '1b4f42ea2721-2cff45ba94ab-44136fa355b3'
        """
        return "-".join(_digest(part) for part in (self.model, self.micro_batch, self.device))


def facts_of(engine: Engine, inputs: Any, targets: Any) -> RunFacts:
    """Read the facts of a run, given the inputs and targets of one of its micro-batches."""
    optimizer, sight = engine.update.optimizer, Sight()
    model = {
        "layers": [sight.see(layer) for layer in engine.model.layers],
        "shared": [sorted(unit.layers) for unit in engine.model.units if len(unit.layers) > 1],
        "loss": sight.see(engine.loss),
        "optimizer": sight.see(type(optimizer)),
        "settings": {name: sight.see(value) for name, value in optimizer.defaults.items() if name != "lr"},
        "clip_norm": engine.update.clip_norm is not None,
    }
    shapes = {"inputs": _shapes(inputs), "targets": _shapes(targets)}
    return RunFacts(
        model=model,
        micro_batch={"samples": engine.order.micro_batch, **shapes},
        device=device_facts(engine.model.device, engine.autocast),
    )


def _digest(part: Any) -> str:
    return hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()[:12]


def _shapes(value: Any) -> list[str]:
    return [_shape(leaf) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in tree_leaves(value)]


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


# --- the device -----------------------------------------------------------------------------------


def device_facts(device: torch.device, autocast: torch.dtype | None) -> dict[str, Any]:
    """Read the facts of a device; ``autocast`` is the run's type of mixed precision, or None."""
    cuda = device.type == "cuda"  # untested here
    return {
        "type": device.type,
        "name": torch.cuda.get_device_name(device) if cuda else _processor(),
        "instructions": "" if cuda else torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "autocast": str(autocast).removeprefix("torch.") if autocast is not None else "off",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def device_text(device: dict[str, Any]) -> str:
    """Return a device's facts as a line to read.

    >>> device_text({"name": "EPYC", "type": "cpu", "threads": 1, "torch": "2.13.0", "autocast": "off"})
    'cpu: EPYC, 1 thread, torch 2.13.0, autocast off'
    """
    threads = count(device["threads"], "thread")
    return f"{device['type']}: {device['name']}, {threads}, torch {device['torch']}, autocast {device['autocast']}"


# --- the cache ------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Return the folder that profiles are cached in: below ``$XDG_CACHE_HOME``, or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "holdfast" / "profiles"


def cached(folder: Path, key: str, *, rounds: int) -> Profile | None:
    """Return the cached profile with this key; None if there is none, it is damaged, or has fewer ``rounds``."""
    try:
        profile = Profile.from_json(json.loads((folder / f"{key}.json").read_text()))
        has = int(profile.notes["rounds"])
    except (OSError, ValueError, KeyError, TypeError, UsageError):  # never made, or damaged: it is made again
        return None
    return profile if profile.key == key and has >= rounds else None


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile as JSON, whole or not at all. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(6)}")  # no name that a link could lie in wait under
    try:
        with unfinished.open("x") as file:
            file.write(json.dumps(profile.to_json(), indent=1) + "\n")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
