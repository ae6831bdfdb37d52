"""What a run has reported: rows of its journal, its checkpoints, and what its train function has returned."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint import series
from holdfast.cluster.membership import worker_order
from holdfast.integrations.ray.worker import CHECKPOINTS, LOGS, returned_of
from holdfast.journal import rows

if TYPE_CHECKING:
    from ray.train import Checkpoint, Result, UserCallback

logger = logging.getLogger(__name__)


def latest(found: list[rows.Row]) -> dict[str, Any]:
    """Return the last row; what was logged after a loop is added to that of the loop's last step.

    >>> latest([{"step": 8, "loss": 2.0}, {"step": 9, "loss": 1.0}, {"step": 9, "after": True, "accuracy": 0.9}])
    {'step': 9, 'loss': 1.0, 'accuracy': 0.9}
    """
    metrics: dict[str, Any] = {}
    for row in [row for row in found if row["step"] == found[-1]["step"]]:
        metrics |= {name: value for name, value in row.items() if name != "after"}
    return metrics


class Reports:
    """Reads the run's folder, and tells Ray's callbacks what is new there. ``context``: what they get to know."""

    def __init__(self, folder: Path, callbacks: list[UserCallback], context: Any) -> None:
        self._folder, self._callbacks, self._context = folder, callbacks, context
        found = self._rows() if series.newest(self._root) is not None else []  # else the run begins anew
        self._told = rows.key_of(found[-1]) if found else (-1, False)
        self._seen = self._mark()

    @property
    def _journal(self) -> Path:
        """The journal is beside the checkpoints if the run has some, else beside the logs."""
        found = self._folder / CHECKPOINTS / rows.NAME
        return found if found.exists() else self._folder / LOGS / rows.NAME

    def _rows(self) -> list[rows.Row]:
        return rows.read(self._journal)

    def look(self) -> None:
        """Tell the callbacks each new row. A run that goes on from a checkpoint does not tell its steps again."""
        mark = self._mark()
        if not self._callbacks or mark is None or mark == self._seen:
            return
        self._seen = mark
        for row in self._rows():
            if rows.key_of(row) > self._told:
                self._told = rows.key_of(row)
                for callback in self._callbacks:
                    callback.after_report(self._context, [row], self._checkpoint(series.newest(self._root)))

    def _mark(self) -> tuple[int, int, int] | None:
        """Return what changes with the journal; None if there is none. One that is begun anew is another file."""
        try:
            found = self._journal.stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns

    def failed(self, error: Exception) -> None:
        """Tell the callbacks the error that ends an attempt."""
        for callback in self._callbacks:
            callback.after_exception(self._context, {0: error})

    @property
    def _root(self) -> Path:
        return self._folder / CHECKPOINTS

    def _checkpoint(self, folder: Path | None) -> Checkpoint | None:
        from ray.train import Checkpoint

        return None if folder is None else Checkpoint.from_directory(str(folder))

    def clear(self) -> None:
        """Forget what the train function has returned before."""
        for path in returned_of(self._folder / LOGS, "0.0").parent.glob(returned_of(Path(), "*").name):
            path.unlink(missing_ok=True)

    def _returned(self) -> Any:
        """Return what the train function has returned on the first of the workers that were there at the end."""
        import cloudpickle

        prefix, suffix = returned_of(Path(), "*").name.split("*")
        found = {
            path.name.removeprefix(prefix).removesuffix(suffix): path
            for path in (self._folder / LOGS).glob(f"{prefix}*{suffix}")
        }
        return cloudpickle.loads(found[min(found, key=worker_order)].read_bytes()) if found else None

    def result(self, error: Exception | None) -> Result:
        """Return Ray's result of a run."""
        import pandas
        from ray.train import Result

        found = self._rows()
        by_step: Mapping[int, rows.Row] = {row["step"] + 1: row for row in found if not row.get("after")}
        steps = series.steps_in(self._root) if self._root.is_dir() else []
        kept = [(self._checkpoint(series.folder_of(self._root, step)), by_step.get(step, {})) for step in steps]
        return Result(
            metrics=latest(found) if found else None,
            checkpoint=kept[-1][0] if kept else None,
            error=error,
            path=str(self._folder),
            metrics_dataframe=pandas.DataFrame(found) if found else None,
            best_checkpoints=kept,
            return_value=self._returned() if error is None else None,
        )
