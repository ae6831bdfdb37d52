"""Construction of a run's parts from its settings: model, update, log, engine, arranger."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import torch

from holdfast.checkpoint.places import on_disk
from holdfast.cluster.events import Events
from holdfast.cluster.membership import Solo
from holdfast.engine.engine import Engine
from holdfast.engine.layers_of import CutModel
from holdfast.engine.memory import keep_freed_memory
from holdfast.engine.model import LayeredModel
from holdfast.engine.names import Names
from holdfast.engine.profile.measure import difference, read_facts
from holdfast.engine.state import State
from holdfast.engine.update import Update
from holdfast.errors import UsageError
from holdfast.journal.journal import FOLDER
from holdfast.log.log import Log
from holdfast.plan.profile import Profile
from holdfast.recovery.arrange import Arranger, Wishes
from holdfast.recovery.replay import Replayer
from holdfast.run.saver import Saver
from holdfast.run.settings import Settings
from holdfast.sync.policy import refuse_talking_layers, refuse_wrapped
from holdfast.undo.undo import check, undo_step

logger = logging.getLogger(__name__)


def make_engine(settings: Settings) -> tuple[Engine, Log | None]:
    """Return the engine of a run with all layers in it, and the log it writes to.

    Raises ``UsageError`` if layers or the optimizer cannot do what the settings ask.
    """
    numerics = settings.numerics
    feed = settings.data.feed(settings.order)  # first: loaders are forks, and need no memory of the model
    model = _make_model(settings)
    log = _make_log(settings)
    engine = Engine(
        model=model,
        update=_make_update(settings, model),
        loss=settings.loss,
        weight=settings.weight,
        takes_model=settings.model is not None,
        stays_whole=settings.stages == 1,
        feed=feed,
        exact=numerics.is_exact,
        autocast=numerics.autocast,
        log=log,
    )
    if log is not None:
        _refuse_shared_statistics(engine)
    return engine, log


def make_arranger(
    settings: Settings, engine: Engine, state: State, events: Events, saver: Saver | None, log: Log | None
) -> Arranger:
    """Return this worker's part in getting generations ready.

    Raises ``UsageError`` if a given profile is not one of this model.
    """
    wishes = Wishes(
        tolerate=settings.placement.tolerate,
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
    layers = settings.layers if settings.model is None else CutModel(module=settings.model, layers=[settings.model])
    assert layers is not None  # Settings has checked it
    model = LayeredModel(layers, seed=settings.seed, device=settings.numerics.choose_device())
    refuse_wrapped(model.module)
    if exact or settings.policy is not None:
        refuse_talking_layers(model.module)
    return model


def _make_update(settings: Settings, model: LayeredModel) -> Update:
    eager = settings.numerics.is_eager
    update = Update(
        model.trainable,
        settings.optimizer,
        names=list(Names(model).trained()),
        schedule=settings.schedule,
        clip_norm=settings.clip_norm,
        inverse=undo_step if eager else None,
    )
    if eager:
        check(update.optimizer)
    return update


def _make_log(settings: Settings) -> Log | None:
    wanted = settings.log
    if wanted is None:
        return None
    assert settings.checkpoint is not None  # Settings has checked it
    events = os.environ.get("HOLDFAST_EVENTS")
    # The tensor log is of this machine: where checkpoints are in a store, it is beside the workers' output.
    beside = on_disk(settings.checkpoint.root) or (Path(events).parent if events else FOLDER)
    placed = replace(wanted, folder=wanted.folder or beside / "log")

    def say(reason: str) -> None:
        logger.warning("the log is given up until there is a new checkpoint: %s", reason)

    return Log(placed, name=os.environ.get("HOLDFAST_WORKER", Solo.worker), say=say)


def _refuse_shared_statistics(engine: Engine) -> None:
    """Raise ``UsageError`` for running statistics of several layers: these may be lost, and replayed, one by one."""
    for use in engine.statistics.uses:
        if len(use.wanted) > 1:
            raise UsageError(
                f"'{use.name}' shares running statistics with other layers, which a log does not have",
                hint="give each layer its own, or train without a log",
            )


def _read_profile(path: str | os.PathLike[str] | None, engine: Engine) -> Profile | None:
    """Read a profile that was measured before, and refuse it if it is not one of this run."""
    if path is None:
        return None
    profile = Profile.read(Path(path))
    if (reason := difference(profile, read_facts(engine)[0], engine.model)) is not None:
        raise UsageError(f"{path}: {reason}", hint="make a new one: holdfast profile SCRIPT")
    return profile
