"""What a worker process does: it calls the user's train function. It imports nothing of Ray."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.errors import UsageError
from holdfast.words import a_kind

FOLDER = "HOLDFAST_RAY_FOLDER"  # environment variable: the folder of the run's results, which all nodes share
PATHS = "HOLDFAST_RAY_PATH"  # environment variable: where the actor finds modules
CHECKPOINTS = "checkpoints"  # in the run's folder
LOGS = "holdfast-logs"
PROGRAM = "program.pickle"  # in LOGS: the train function and its config
TrainFunction = Callable[..., Any]


def checkpoint_folder() -> Path:
    """Return the folder for a run's checkpoints, from which ``fit`` takes its ``Result.checkpoint``.

    It is ``checkpoints`` in the run's folder, ``storage_path/name``. Raises ``UsageError`` where no ``HoldfastTrainer``
    calls.

    >>> run = holdfast.Run(..., checkpoint=checkpoint_folder())  # doctest: +SKIP
    """
    if FOLDER not in os.environ:
        raise UsageError("no HoldfastTrainer has started this process", hint="choose a folder by yourself")
    return Path(os.environ[FOLDER]) / CHECKPOINTS


def takes_config(train: TrainFunction) -> bool:
    """Return whether a train function wants the config. Raises ``UsageError`` for one that wants anything else.

    >>> takes_config(lambda config: None), takes_config(lambda: None)
    (True, False)
    """
    if not callable(train):
        raise UsageError(f"train_loop_per_worker is {a_kind(train)}, and has to be a function")
    try:
        signature = inspect.signature(train)
    except (TypeError, ValueError):
        return False  # one that is written in C does not tell
    for arguments in (1, 0):
        try:
            signature.bind(*[{}] * arguments)
        except TypeError:
            continue
        return bool(arguments)
    text = f"train_loop_per_worker{signature} has to take the config or nothing"
    raise UsageError(text, hint="as in: def train(config): ...")


def returned_of(logs: Path, worker: str) -> Path:
    """Return the file for what the train function has returned on a worker."""
    return logs / f"returned-{worker}.pickle"


def main(program: Path) -> None:
    """Call the train function in ``program``, and keep what it returns.

    Raises ``UsageError`` if there is no such file here, or if no ``Run`` was made.
    """
    import cloudpickle

    from holdfast.run import process

    sys.path[:] = json.loads(os.environ[PATHS])
    try:
        train, config = cloudpickle.loads(program.read_bytes())
    except FileNotFoundError:
        text = f"a node of the cluster does not see the run's folder {program.parent.parent}"
        hint = "RunConfig(storage_path=...) has to be a folder that all nodes share"
        raise UsageError(text, hint=hint) from None
    found = train(config) if takes_config(train) else train()
    if not process.runs:
        text = "the train function has ended without a holdfast.Run or Loop"
        raise UsageError(text, hint="make one in it, and loop over its steps: docs/ray.md")
    if found is not None:
        path = returned_of(program.parent, os.environ["HOLDFAST_WORKER"])
        path.with_suffix(".new").write_bytes(_pickled(found))
        os.replace(path.with_suffix(".new"), path)


def _pickled(found: Any) -> bytes:
    """Return a result as the driver reads it. Raises ``UsageError`` if it cannot be sent."""
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(found))
    except Exception as e:  # whatever its own parts raise
        text = f"what the train function has returned, a {type(found).__name__}, cannot be sent to the driver: {e}"
        raise UsageError(text, hint="return numbers, text or tensors; all steps are done") from e
