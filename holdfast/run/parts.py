"""Construction of a run's parts from its settings: model, update, log, engine, arranger."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from holdfast.cluster.events import Events
from holdfast.cluster.membership import Solo
from holdfast.engine.engine import Engine
from holdfast.engine.memory import keep_freed_memory
from holdfast.engine.model import LayeredModel
from holdfast.engine.profile.measure import difference, read_facts
from holdfast.engine.state import State
from holdfast.engine.statistics import layer_with_running_statistics, refuse_running_statistics
from holdfast.engine.update import Update
from holdfast.errors import UsageError
from holdfast.log.log import Log, LogSettings
from holdfast.plan.profile import Profile
from holdfast.recovery.arrange import Arranger, Wishes
from holdfast.recovery.replay import Replayer
from holdfast.run.saver import Saver
from holdfast.run.settings import Settings
from holdfast.sync.policy import refuse_talking_layers
from holdfast.undo.undo import check, undo_step

logger = logging.getLogger(__name__)


def make_engine(settings: Settings) -> tuple[Engine, Log | None]:
    """Return the engine of a run with all layers in it, and the log it writes to.

    Raises ``UsageError`` if layers or the optimizer cannot do what the settings ask.
    """
    numerics = settings.numerics
    model = _make_model(settings)
    log = _make_log(settings, model.module)
    engine = Engine(
        model=model,
        update=_make_update(settings, model),
        loss=settings.loss,
        data=settings.data.dataset,
        order=settings.data.batches(settings.order),
        collate=settings.collate,
        exact=numerics.is_exact,
        autocast=numerics.autocast,
        log=log,
    )
    return engine, log


def make_arranger(
    settings: Settings, engine: Engine, state: State, events: Events, saver: Saver | None, log: Log | None
) -> Arranger:
    """Return this worker's part in getting generations ready.

    Raises ``UsageError`` if a given profile is not one of this model.
    """
    wishes = Wishes(
        tolerate=settings.tolerate,
        stages=settings.stages,
        memory=settings.placement.memory_bytes,
        profile=_read_profile(settings.placement.profile, engine),
        budget=None if log is None else log.settings.budget,
        votes_each_step=settings.policy is None,
    )
    replayer = None
    if log is not None and saver is not None:
        replayer = Replayer(engine, state, log, saver, events)
    return Arranger(engine, state, events, wishes, saver, replayer)


def _make_model(settings: Settings) -> LayeredModel:
    exact = settings.numerics.is_exact
    keep_freed_memory()
    if exact:  # sums inside an operator depend on the number of threads
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    model = LayeredModel(settings.layers, seed=settings.seed, device=settings.numerics.choose_device())
    if exact:
        refuse_running_statistics(model.module)
    if settings.policy is not None:
        refuse_talking_layers(model.module)
    return model


def _make_update(settings: Settings, model: LayeredModel) -> Update:
    eager = settings.numerics.is_eager
    update = Update(
        model.trainable,
        settings.optimizer,
        schedule=settings.schedule,
        clip_norm=settings.clip_norm,
        inverse=undo_step if eager else None,
    )
    if eager:
        check(update.optimizer)
    return update


def _make_log(settings: Settings, module: nn.Module) -> Log | None:
    wanted = LogSettings.of(settings.log)
    if wanted is None:
        return None
    assert settings.checkpoint is not None  # Settings has checked it
    name = layer_with_running_statistics(module)
    if name is not None:
        raise UsageError(
            f"layer '{name}' keeps running statistics, which a log does not have", hint="use GroupNorm or LayerNorm"
        )
    placed = replace(wanted, folder=wanted.folder or settings.checkpoint.root / "log")

    def say(reason: str) -> None:
        logger.warning("the log is given up until there is a new checkpoint: %s", reason)

    return Log(placed, name=os.environ.get("HOLDFAST_WORKER", Solo.worker), say=say)


def _read_profile(path: str | os.PathLike[str] | None, engine: Engine) -> Profile | None:
    """Read a profile that was measured before, and refuse it if it is not one of this run."""
    if path is None:
        return None
    profile = Profile.read(Path(path))
    if (reason := difference(profile, read_facts(engine)[0], engine.model)) is not None:
        raise UsageError(f"{path}: {reason}", hint="make a new one: holdfast profile SCRIPT")
    return profile
