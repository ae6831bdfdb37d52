"""Where a ``Trainer`` is: all that a worker which joins, or a run that resumes, has to take over from its loops.

It is taken where Lightning asks for its next batch. There the loops of Lightning have no local variables, so what is in
their attributes is all there is. A worker that joins comes to the same place by itself, in its first epoch; then its
attributes become those of the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden

# What ModelCheckpoint leaves out of its state_dict, or does not take back.
OF_CHECKPOINTS = ("current_score", "_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")
METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
OF_CONNECTOR = ("_first_loop_iter", "_current_fx")
OF_META = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx")
OF_RESULT = ("value", "cumulated_batch_size", "_forward_cache", "has_reset", "_update_count")


class Position:
    """The state of a trainer's loops, callbacks, metrics and folders, in ``Loop(state=…)``.

    ``taken``: as it was when the last batch was asked for; empty before. It does not change in between, for a step that
    comes again begins behind that place.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer: Any = trainer
        self.taken: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return what was taken."""
        return self.taken

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what was taken elsewhere; ``restore`` puts it into the trainer."""
        self.taken = state

    # --- there and back --------------------------------------------------------------------------

    def take(self, *, at_end: bool = False) -> None:
        """Note where the trainer is. ``at_end``: behind its last epoch, and not where it asks for a batch."""
        trainer = self._trainer
        connector, epoch = trainer._logger_connector, trainer.fit_loop.epoch_loop
        datamodule = trainer.datamodule
        self.taken = {
            "loops": trainer.fit_loop.state_dict(),
            "callbacks": call._call_callbacks_state_dict(trainer),
            "checkpoints": [{name: getattr(each, name) for name in OF_CHECKPOINTS} for each in self._checkpoints()],
            "datamodule": datamodule.state_dict() if datamodule is not None else {},
            "module": self._of_module(),
            "metrics": {name: dict(getattr(connector, name)) for name in METRICS},
            "connector": {name: getattr(connector, name) for name in OF_CONNECTOR},
            "results": [_of_result(metric) for metric in epoch._results.values() if metric.is_tensor],
            "seen": dict(epoch.val_loop._seen_batches_per_dataloader),
            "should_stop": trainer.should_stop,
            "folders": self.folders(),
            "at_end": at_end,
        }

    def restore(self) -> None:
        """Put the trainer where it was taken."""
        trainer, taken = self._trainer, self.taken
        self.set_folders(taken["folders"])
        call._call_callbacks_load_state_dict(trainer, {"callbacks": taken["callbacks"]})
        for callback, values in zip(self._checkpoints(), taken["checkpoints"], strict=True):
            vars(callback).update(values)
        if trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(taken["datamodule"])
        if is_overridden("on_load_checkpoint", trainer.lightning_module, pl.LightningModule):
            trainer.lightning_module.on_load_checkpoint(dict(taken["module"]))
        connector = trainer._logger_connector
        vars(connector).update(taken["connector"])
        vars(connector).update({name: dict(values) for name, values in taken["metrics"].items()})
        trainer.should_stop = taken["should_stop"]
        self._restore_loops()

    def arrive(self) -> None:
        """Put the trainer where it was taken, once more: it has come to its first batch, through the begin of an epoch.

        After the end of a training, that is where it has to be.
        """
        if not self.taken["at_end"]:
            self.restore()
        self._trainer.fit_loop.epoch_loop.val_loop._seen_batches_per_dataloader.update(self.taken["seen"])

    def _restore_loops(self) -> None:
        fit, taken = self._trainer.fit_loop, self.taken
        fit.load_state_dict(taken["loops"])
        for loop in _all_loops(fit):  # else Lightning would go on as from a checkpoint of its own, at another place
            loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
            loop.reset_restart_stage()
        epoch = fit.epoch_loop
        if fit._data_fetcher is not None:
            fit._data_fetcher.fetched = epoch.batch_progress.current.ready
        epoch._results.clear()
        for values in taken["results"]:
            _restore_result(self._trainer, epoch._results, values)

    def _of_module(self) -> dict[str, Any]:
        module = self._trainer.lightning_module
        found: dict[str, Any] = {"state_dict": {}}
        if is_overridden("on_save_checkpoint", module, pl.LightningModule):
            module.on_save_checkpoint(found)
        return found

    def _checkpoints(self) -> list[Any]:
        return [each for each in self._trainer.callbacks if isinstance(each, pl.callbacks.ModelCheckpoint)]

    # --- folders ---------------------------------------------------------------------------------

    def folders(self) -> dict[str, Any]:
        """Return where loggers and checkpoints are written: a worker that came later would choose others."""
        return {
            "versions": [getattr(each, "version", None) for each in self._trainer.loggers],
            "checkpoints": [each.dirpath for each in self._checkpoints()],
        }

    def set_folders(self, folders: dict[str, Any]) -> None:
        """Write where another worker does."""
        for logger, version in zip(self._trainer.loggers, folders["versions"], strict=True):
            if hasattr(logger, "_version"):
                logger._version = version
        for callback, folder in zip(self._checkpoints(), folders["checkpoints"], strict=True):
            callback.dirpath = folder


def _all_loops(loop: _Loop) -> Iterator[Any]:
    yield loop
    for each in vars(loop).values():
        if isinstance(each, _Loop):
            yield from _all_loops(each)


def _of_result(metric: Any) -> dict[str, Any]:
    """Return what was logged under one name in this epoch."""
    meta = {name: getattr(metric.meta, name) for name in OF_META}
    values = {name: getattr(metric, name) for name in OF_RESULT if hasattr(metric, name)}
    return {"meta": {**meta, "reduce_fx": metric.meta.reduce_fx.__name__}, "values": values}


def _restore_result(trainer: Any, results: Any, known: dict[str, Any]) -> None:
    meta = dict(known["meta"])
    fx, name = meta.pop("fx"), meta.pop("name")
    results.log(fx, name, torch.zeros(()), sync_dist_fn=trainer.strategy.reduce, batch_size=1, **meta)
    metric = results[f"{fx}.{name}"]
    metric._computed = None
    for key, value in known["values"].items():
        setattr(metric, key, value)
