"""What a user gives a ``Run``: checked before anything starts, so that a mistake is told in words; and its parts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.cluster.membership import Solo
from holdfast.data.fetch import Dataset
from holdfast.data.order import BatchedOrder, Batches, Order
from holdfast.data.partition import Partition
from holdfast.engine.engine import Engine
from holdfast.engine.memory import keep_freed_memory
from holdfast.engine.model import LayeredModel, Layers
from holdfast.engine.profile.measure import difference, read_facts
from holdfast.engine.statistics import layer_with_running_statistics, refuse_running_statistics
from holdfast.engine.update import Schedule, Update
from holdfast.errors import UsageError
from holdfast.log.log import Log, LogSettings
from holdfast.plan.profile import Profile
from holdfast.sync.policy import Policy
from holdfast.undo.undo import check, undo_step
from holdfast.words import parse_size, say_aloud


def bytes_of(memory: int | str | None) -> int | None:
    return parse_size(memory) if isinstance(memory, str) else memory


def profile_of(path: str | os.PathLike[str] | None, engine: Engine) -> Profile | None:
    """A profile that was measured before, if it is one of this run."""
    if path is None:
        return None
    profile = Profile.read(Path(path))
    if (reason := difference(profile, read_facts(engine)[0], engine.model)) is not None:
        raise UsageError(f"{path}: {reason}", hint="make a new one: holdfast profile SCRIPT")
    return profile


def check_settings(numerics: str, seed: int) -> None:
    if numerics not in ("exact", "fast"):
        raise UsageError(f"numerics={numerics!r} is not known", hint="'exact' or 'fast'")
    if seed < 0:
        raise UsageError("seed cannot be negative")


def check_update(update: Any, *, clip_norm: float | None) -> None:
    if update not in ("commit", "eager"):
        raise UsageError(f"update={update!r} is not known", hint="'commit' or 'eager'")
    if update == "eager" and clip_norm is not None:
        raise UsageError(
            "clip_norm needs all gradients before the first update", hint="leave it out, or update='commit'"
        )


def check_sync(
    sync: Any, *, stages: Any, memory: Any, profile: Any, update: str, log: Any, partition: Partition | None
) -> None:
    """A policy's replicas train apart, so each needs the whole model, and nothing of the others at each step."""
    if sync == "every-step":
        if partition is not None:
            raise UsageError(
                "a partition says what each replica reads, and with sync='every-step' all read one batch",
                hint="give a policy: sync=SelSync(target=0.1), or SelSync(delta=0) for every step",
            )
        return
    if not isinstance(sync, Policy):
        raise UsageError(
            f"sync={sync!r} is not known", hint="'every-step', or a policy: SelSync(target=0.1), LocalSGD …"
        )
    if stages not in (None, 1) or memory is not None or profile is not None:
        raise UsageError(
            f"{type(sync).__name__} needs workers that hold the whole model",
            hint="leave out stages=, memory= and profile=, or sync='every-step'",
        )
    if update != "commit" or log:
        raise UsageError(
            f"{type(sync).__name__} cannot serve update={update!r} or a log: replicas update themselves",
            hint="leave them out, or sync='every-step'",
        )


def batches_of(order: Order, partition: Partition | None) -> Batches:
    """Which samples each micro-batch has: one order for all, or each worker's own part."""
    if partition is None:
        return order
    if partition.size != order.size:
        raise UsageError(
            f"the partition is of {partition.size} samples, and the data set has {order.size}",
            hint="make it with size=len(data)",
        )
    return BatchedOrder(
        partition=partition, global_batch=order.global_batch, micro_batch=order.micro_batch, seed=order.seed
    )


def check_layout(tolerate: Any, stages: Any, memory: Any, profile: Any) -> None:
    if tolerate is not None and (type(tolerate) is not int or tolerate < 0):
        raise UsageError(f"tolerate={tolerate!r} is no number of losses", hint="0, 1, 2 …")
    counts = stages if isinstance(stages, list | tuple) else [stages]
    if stages is not None and (not counts or any(type(n) is not int or n < 1 for n in counts)):
        raise UsageError(
            f"stages={stages!r} is neither a number of stages nor the layers of each", hint="2, or [3, 3, 4]"
        )
    if memory is not None and (bytes_of(memory) or 0) < 1:
        raise UsageError(f"memory={memory!r} is no memory to plan with", hint="bytes, or text as in '2GB'")
    if (memory is not None or profile is not None) and stages is not None and (stages == 1 or counts is stages):
        raise UsageError(f"with stages={stages!r} there is nothing to plan", hint="leave out memory= and profile=")


def log_of(
    log: bool | int | str | LogSettings, checkpoint: str | os.PathLike[str] | None, module: nn.Module
) -> Log | None:
    """The log that a user asks for."""
    if log is False or log is None:
        return None
    if checkpoint is None:
        raise UsageError("a log is of no use without a checkpoint to begin from", hint="give the run checkpoint= too")
    name = layer_with_running_statistics(module)
    if name is not None:
        raise UsageError(
            f"layer '{name}' keeps running statistics, which a log does not have", hint="use GroupNorm or LayerNorm"
        )
    if not isinstance(log, bool | int | float | str | LogSettings):
        raise UsageError(f"log={log!r} is no log", hint="True, a number of bytes, or text as in '2GB'")
    settings = log if isinstance(log, LogSettings) else LogSettings(budget=None if log is True else bytes_of(log))
    placed = replace(settings, folder=settings.folder or Path(checkpoint) / "log")

    def say(reason: str) -> None:
        say_aloud(f"the log is given up until there is a new checkpoint: {reason}")

    return Log(placed, name=os.environ.get("HOLDFAST_WORKER", Solo.worker), say=say)


def check_batches(data: Dataset, global_batch: int, micro_batch: int) -> None:
    if global_batch < 1 or micro_batch < 1 or global_batch % micro_batch:
        nearest = max(1, round(global_batch / max(1, micro_batch))) * max(1, micro_batch)
        raise UsageError(
            f"global_batch={global_batch} is not a multiple of micro_batch={micro_batch}",
            hint=f"global_batch={nearest} would be",
        )
    streams = isinstance(data, torch.utils.data.IterableDataset)
    if streams or not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise UsageError(
            "data must be map-style: len(data) and data[i]", hint="a stream has no order that can be repeated"
        )
    if len(data) < global_batch:
        raise UsageError(
            f"the data set has {len(data)} samples, fewer than global_batch={global_batch}",
            hint=f"global_batch={len(data) // micro_batch * micro_batch} or less"
            if len(data) >= micro_batch
            else f"micro_batch={len(data)} or less",
        )


def choose_device(device: str | torch.device | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    if torch.cuda.is_available():  # untested here
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def model_of(layers: Layers, *, seed: int, device: torch.device, exact: bool) -> LayeredModel:
    keep_freed_memory()
    if exact:  # sums inside an operator depend on the number of threads
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    model = LayeredModel(layers, seed=seed, device=device)
    if exact:
        refuse_running_statistics(model.module)
    return model


def update_of(
    model: LayeredModel,
    optimizer: Callable[[Sequence[nn.Parameter]], Optimizer],
    schedule: Schedule | None,
    clip_norm: float | None,
    *,
    eager: bool,
) -> Update:
    inverse = undo_step if eager else None
    update = Update(model.trainable, optimizer, schedule=schedule, clip_norm=clip_norm, inverse=inverse)
    if eager:
        check(update.optimizer)
    return update
