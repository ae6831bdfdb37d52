"""Runs a user's script up to the point where its training would begin."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from holdfast.engine.profile.hook import Measured, instead_of_training
from holdfast.errors import HoldfastError, UsageError

if TYPE_CHECKING:
    from holdfast.run import Run

T = TypeVar("T")


def until_training(command: Sequence[str], measure: Callable[[Run], T], *, module: bool = False) -> T:
    """Runs a script as ``python`` would and returns what ``measure`` made of the ``Run`` that starts to train.

    What the script does wrong is told as ``python`` tells it; the exit code is the script's.
    """
    results: list[T] = []
    try:
        with instead_of_training(lambda run: results.append(measure(run))):
            _run(command, module=module)
    except Measured:
        pass
    except HoldfastError:
        raise
    except Exception as e:
        _print_error(e)
        raise SystemExit(1) from None
    except SystemExit as e:
        if e.code not in (None, 0):
            raise
    if not results:
        raise UsageError(
            f"{command[0]} has ended without training: it never came to 'for step in run.steps(...)'",
            hint="holdfast profile measures a holdfast.Run at its first step",
        )
    return results[0]


def _run(command: Sequence[str], *, module: bool) -> None:
    before, path = sys.argv, list(sys.path)
    sys.argv = list(command)
    try:
        if module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
            runpy.run_path(command[0], run_name="__main__")
    finally:
        sys.argv, sys.path = before, path


def _print_error(error: Exception) -> None:
    """The traceback from the script on: how it was started is no business of its author."""
    frames = own = error.__traceback__
    while frames is not None:
        if frames.tb_frame.f_globals.get("__name__") == "runpy":
            own = frames.tb_next
        frames = frames.tb_next
    traceback.print_exception(type(error), error, own)
