"""The label of a run: named facts that must be the same on all workers. Checkpoints keep most of them.

``cluster/labels.py`` compares labels and says in words what differs.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

import holdfast
from holdfast.cluster.labels import Label
from holdfast.engine.engine import Engine
from holdfast.engine.probe import probe_passes, probe_update
from holdfast.engine.profile.sight import origin
from holdfast.engine.update import Update
from holdfast.run.describe import describe, digest, modules_of, optimizer_settings, settings_text, shortened
from holdfast.run.settings import Settings
from holdfast.run.sources import code_of_modules, code_of_the_script

STEPS = (0, 1, 10, 100, 1000, 10_000)  # at which a schedule of the step is asked for its rate
PASSES = "the processor's probe (machines of one kind agree, and numerics='fast' does not ask)"
UPDATE = "the processor's probe of updates (machines of one kind agree)"


def make_label(settings: Settings, engine: Engine) -> Label:
    """Return what decides the weights of a run, by name. It is the same on all workers and whenever the run goes on.

    A file that only some workers have imported is in their labels alone.
    """
    label = _settings(settings, engine)
    update = engine.update
    optimizer = optimizer_settings(update.optimizer, update.parameters)
    label |= {f"the optimizer's {name}": text for name, text in optimizer.items()}
    label |= _functions(settings, update)
    label |= {f"module {name or 'of the model'}": text for name, text in modules_of(engine.model.module).items()}
    script = code_of_the_script()
    label |= {} if script is None else {"the script": script}
    label |= {f"the code of {place}": content for place, content in code_of_modules().items()}
    return label | _versions(settings, engine) | _processor(settings, engine)


def make_shape(settings: Settings) -> Label:
    """Return the settings that may differ from run to run, but not from worker to worker."""
    log = settings.log
    return {
        "tolerate": str(settings.placement.tolerate),
        "stages": str(describe(settings.stages)),
        "memory": str(settings.placement.memory_bytes),
        "update": settings.numerics.update,
        "check_every": str(settings.numerics.check_every),
        "state": ", ".join(settings.state) or "None",
        "log": "None" if log is None else settings_text(log, ["folder"]),  # each machine may have a folder of its own
        "sync": "every-step" if settings.policy is None else settings_text(settings.policy),
    }


def _settings(settings: Settings, engine: Engine) -> Label:
    numerics, partition = settings.numerics, settings.data.partition
    shown: dict[str, Any] = {"parameters": sum(p.numel() for p in engine.model.module.parameters())}
    shown |= {"numerics": numerics.mode, "clip_norm": settings.clip_norm, "autocast": numerics.autocast}
    shown |= {**asdict(settings.order), "threads": torch.get_num_threads()}
    label = {name: str(describe(value)) for name, value in shown.items()}
    return label if partition is None else label | {"partition": _without_addresses(repr(partition))}


def _without_addresses(text: str) -> str:
    """Return a ``repr`` without the addresses that Python's own has in it, in one line."""
    return shortened(re.sub(r" at 0x[0-9a-fA-F]+", "", text))


def _functions(settings: Settings, update: Update) -> Label:
    """Return the functions that a user gives, and the rates of the schedule."""
    given: dict[str, Any] = {
        "the loss": settings.loss,
        "collate": settings.data.collate,
        "the schedule": settings.schedule,
    }
    given |= {} if settings.weight is None else {"the weight": settings.weight}
    stream = settings.data.stream
    if stream is not None:  # folders may differ from machine to machine; another order of files must not
        names = [os.path.basename(stream.name(shard)) for shard in range(stream.count)]
        given |= {"the stream": stream.source, "the names of the shards": f"{len(names)}, {digest(json.dumps(names))}"}
    label = {name: shortened(str(describe(function))) for name, function in given.items()}
    if update.scheduler is not None:
        label["the scheduler"] = shortened(settings_text(update.scheduler, ["optimizer"]))
    elif settings.schedule is not None:
        label["the learning rate"] = shortened(", ".join(str(_rate(settings.schedule, step)) for step in STEPS))
    return label


def _rate(schedule: Callable[[Any], Any], step: int) -> str | None:
    """Return the rate of a step; None if there is none: a schedule may know the run's own steps alone."""
    try:
        return describe(schedule(step))
    except Exception:
        return None


def _versions(settings: Settings, engine: Engine) -> Label:
    """Return the versions of Python, torch, holdfast, and of the packages that model, optimizer and loss are from."""
    versions = {"python": ".".join(platform.python_version_tuple()[:2]), "torch": str(torch.__version__)}
    versions["holdfast"] = holdfast.__version__
    kinds = {type(module) for module in engine.model.module.modules()} | {type(engine.update.optimizer)}
    homes = {kind.__module__ for kind in kinds} | {str(getattr(settings.loss, "__module__", ""))}
    for package in sorted({home.partition(".")[0] for home in homes if origin(home) == "library"}):
        version = getattr(sys.modules.get(package), "__version__", None)
        if isinstance(version, str):
            versions.setdefault(package, version)
    return versions


def _processor(settings: Settings, engine: Engine) -> Label:
    """Return what tells this processor from others.

    In exact mode, that is the bits of whole passes. In fast mode gradients may differ from worker to worker, for they
    are summed for all. Updates may not: each worker makes them for itself, and replicas must stay equal.
    """
    device, numerics = engine.model.device, settings.numerics
    dtypes = {p.dtype for p in engine.model.module.parameters()}
    label = {UPDATE: probe_update(device, dtypes, clipped=settings.clip_norm is not None)}
    if numerics.is_exact:
        passes = dtypes | ({numerics.autocast} if numerics.autocast is not None else set())
        label |= {"cpu": torch.backends.cpu.get_cpu_capability(), PASSES: probe_passes(device, passes)}
    return label
