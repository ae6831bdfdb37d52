"""The user's script in a worker: running it, and its errors as Python itself would show them."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from types import TracebackType

from holdfast.errors import UsageError

RUNPY = runpy.run_path.__code__.co_filename  # "<frozen runpy>" in most interpreters


def run_script(module: bool) -> None:
    """Run the script or module in ``sys.argv``. ``sys.exit(0)`` in it is a normal end.

    Raises ``UsageError`` if there is no such module, and whatever else the script raises.
    """
    name = sys.argv[0]
    sys.path.insert(0, os.getcwd() if module else os.path.dirname(os.path.abspath(name)))
    try:
        if module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
    except SystemExit as e:
        if e.code not in (None, 0):
            raise
    except ImportError as e:
        if module and _frames_of_script(e) is None:
            hint = "it is looked for in this folder, and where Python looks"
            raise UsageError(f"-m {name} cannot be run: {e}", hint=hint) from e
        raise


def text_of(error: BaseException) -> str:
    """Return an error of the script with its traceback, without the frames of ours that led to the script."""
    return "".join(traceback.format_exception(type(error), error, _frames_of_script(error)))


def _frames_of_script(error: BaseException) -> TracebackType | None:
    """Return the traceback from the script's first frame on; None if no frame is the script's."""
    first = trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not run_script.__code__:
        trace = trace.tb_next
    if trace is None:
        return first  # the script was over
    trace = trace.tb_next
    while trace is not None and trace.tb_frame.f_code.co_filename == RUNPY:
        trace = trace.tb_next
    return trace


def length_of_output() -> int | None:
    """Return how many bytes this worker's log has; None if its output goes elsewhere."""
    try:
        sys.stdout.flush()
        return os.fstat(1).st_size
    except (OSError, ValueError):  # the script has closed it
        return None
