"""What a profile is a profile of: model, micro-batch and device, each as facts and as a part of its key.

Two runs with the same key cost the same, as far as can be seen from outside: layers, their settings and their code,
loss and optimizer (but not its learning rate), the shapes of a micro-batch, the device and its threads. What cannot
be seen is a function or table that a layer reaches for from elsewhere.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from holdfast.engine.engine import Engine
from holdfast.errors import UsageError
from holdfast.plan.profile import Profile


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What decides about a profile, readable and comparable."""

    model: dict[str, Any]
    micro_batch: dict[str, Any]
    device: dict[str, Any]

    @property
    def key(self) -> str:
        """Three parts, so that one can say which of them differs.

        >>> Facts(model={"layers": []}, micro_batch={"samples": 4}, device={}).key
        '1b4f42ea2721-2cff45ba94ab-44136fa355b3'
        """
        return "-".join(_digest(part) for part in (self.model, self.micro_batch, self.device))


def facts_of(engine: Engine, inputs: Any, targets: Any) -> Facts:
    """The facts of a run, given one of its micro-batches."""
    optimizer = engine.update.optimizer
    model = {
        "layers": [_module(layer) for layer in engine.model.layers],
        "loss": _function(engine.loss),
        "optimizer": type(optimizer).__name__,
        "settings": {name: repr(value) for name, value in optimizer.defaults.items() if name != "lr"},
        "clip_norm": engine.update.clip_norm is not None,
    }
    shapes = {"inputs": _shapes(inputs), "targets": _shapes(targets)}
    return Facts(
        model=model,
        micro_batch={"samples": engine.order.micro_batch, **shapes},
        device=_device(engine.model.device, engine.autocast),
    )


def _digest(part: Any) -> str:
    return hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()[:12]


def _shapes(value: Any) -> list[str]:
    return [
        f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}" if isinstance(leaf, Tensor) else _name(leaf)
        for leaf in tree_leaves(value)
    ]


# --- the model ------------------------------------------------------------------------------------


def _module(layer: nn.Module) -> dict[str, Any]:
    """Classes, settings, tensors and code of a layer and all in it."""
    parts = {name: [_name(part), _settings(part)] for name, part in layer.named_modules()}
    tensors = {
        name: f"{tensor.dtype} {list(tensor.shape)} {tensor.requires_grad}"
        for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]
    }
    classes = {type(part) for part in layer.modules()}
    return {"parts": parts, "tensors": tensors, "code": sorted(_class(cls) for cls in classes)}


def _name(value: Any) -> str:
    return type(value).__name__


def _settings(module: nn.Module) -> dict[str, Any]:
    """Numbers and names among its attributes. Measuring makes it train, whatever it did before."""
    plain = {name: value for name, value in vars(module).items() if isinstance(value, bool | int | float | str)}
    shown = {name: repr(value) for name, value in plain.items() if name != "training" and name[0] != "_"}
    return {**shown, "": module.extra_repr()}


def _function(function: Any) -> Any:
    if isinstance(function, nn.Module):
        return _module(function)
    if isinstance(function, functools.partial):
        return _function(function.func)
    name = getattr(function, "__qualname__", _name(function))
    return [name, _code(function) if inspect.isroutine(function) else _class(type(function))]


def _class(cls: type) -> str:
    """A digest of what a class and those above it do; torch's own are known by torch's version."""
    bases = [base for base in cls.__mro__ if base.__module__.partition(".")[0] not in ("torch", "builtins")]
    members = [[name, _code(vars(base)[name])] for base in bases for name in sorted(vars(base))]
    return _digest([cls.__qualname__, members])


def _code(thing: Any) -> Any:
    """What a function does, without comments and line numbers; nothing for what is not written in Python."""
    function = getattr(thing, "__func__", None) or getattr(thing, "fget", None) or thing
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    return _instructions(code) if isinstance(code, CodeType) else ""


def _instructions(code: CodeType) -> list[Any]:
    return [code.co_code.hex(), code.co_names, [_constant(value) for value in code.co_consts]]


def _constant(value: Any) -> Any:
    if isinstance(value, CodeType):
        return _instructions(value)
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)  # whose order is a random one


# --- the device -----------------------------------------------------------------------------------


def _device(device: torch.device, autocast: torch.dtype | None) -> dict[str, Any]:
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
    """A device as a person would name it.

    >>> device_text({"name": "EPYC", "type": "cpu", "threads": 1, "torch": "2.13.0", "autocast": "off"})
    'cpu: EPYC, 1 thread, torch 2.13.0, autocast off'
    """
    threads = f"{device['threads']} thread" + ("s" if device["threads"] != 1 else "")
    return f"{device['type']}: {device['name']}, {threads}, torch {device['torch']}, autocast {device['autocast']}"


# --- the cache ------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where profiles are kept: below XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "holdfast" / "profiles"


def cached(key: str) -> Profile | None:
    """The profile with this key, unless there is none that can be read."""
    try:
        profile = Profile.from_json(json.loads((cache_folder() / f"{key}.json").read_text()))
    except (OSError, ValueError, UsageError):  # never made, or damaged: it is made again
        return None
    return profile if profile.key == key else None


def write_profile(path: Path, profile: Profile) -> None:
    """Writes a profile whole or not at all. May raise ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(json.dumps(profile.to_json(), indent=1) + "\n")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
