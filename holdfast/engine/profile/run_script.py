"""Runs a user's script up to the point where its training would begin."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from holdfast.engine.profile.hook import instead_of_training
from holdfast.errors import HoldfastError, UsageError

if TYPE_CHECKING:
    from holdfast.run.training import Training

T = TypeVar("T")


def until_training(command: Sequence[str], measure: Callable[[Training], T], *, module: bool = False) -> T:
    """Run a script as ``python`` would, and return ``measure(run)`` of its ``Run`` that is about to train.

    ``command`` is the script and its arguments; with ``module``, its first word is a module's name.

    An error of the script before that is printed as ``python`` prints it, and ends this process with the script's exit
    code (``SystemExit``). An error after that is ignored: the script was stopped in its middle. Raises ``UsageError``
    if the script ends without training.
    """
    results: list[T] = []
    failures: list[BaseException] = []  # in order; the first one counts, a script's `finally` may add another

    def look(run: Training) -> None:
        try:
            if run.engine.loss is None:
                raise UsageError("a Loop computes its passes itself, and cannot be measured", hint="profile a Run")
            results.append(measure(run))
        except BaseException as e:
            failures.append(e)
            raise

    try:
        with instead_of_training(look):
            _run(command, module=module)
    except (Exception, SystemExit) as e:
        failures.append(e)
    if not results:
        if failures:
            _end_as_python_would(failures[0])
        raise UsageError(
            f"{command[0]} has ended without training: it never came to 'for step in run.steps(...)'",
            hint="holdfast profile measures a holdfast.Run at its first step",
        )
    return results[0]


def _end_as_python_would(error: BaseException) -> None:
    """Raise the script's error, or print it and raise ``SystemExit``. Return if the script ended without an error."""
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return
    if isinstance(error, Exception) and not isinstance(error, HoldfastError):
        _print_error(error)
        raise SystemExit(1) from None
    raise error


def _run(command: Sequence[str], *, module: bool) -> None:
    """Run the script in this process, with ``sys.argv`` and ``sys.path`` as ``python`` sets them."""
    before, path = sys.argv, list(sys.path)
    sys.argv = list(command)
    try:
        if module:
            sys.path.insert(0, os.getcwd())
            _check_module(command[0])
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
            runpy.run_path(command[0], run_name="__main__")
    finally:
        sys.argv, sys.path = before, path


def _check_module(name: str) -> None:
    """Raise ``UsageError`` if the module does not exist. An error while it is looked for is the script's own."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as e:
        if not f"{name}.".startswith(f"{e.name}."):
            raise
        spec = None
    except ValueError:  # '' or 'a..b'
        spec = None
    if spec is None:
        raise UsageError(f"there is no module '{name}' to run", hint="a module's name has no .py; without -m, a file")


def _print_error(error: Exception) -> None:
    """Print the traceback from the script's first frame on, without ours and those of ``runpy``."""
    frames = own = error.__traceback__
    while frames is not None:
        if frames.tb_frame.f_globals.get("__name__") == "runpy":
            own = frames.tb_next
        frames = frames.tb_next
    traceback.print_exception(type(error), error, own)
