"""Checks of the path that a picture is to be written to."""

from __future__ import annotations

from pathlib import Path

from holdfast.errors import UsageError

FORMATS = (".png", ".svg")


def check_path(path: Path) -> None:
    """Raise UsageError if a picture cannot be written to ``path``. Commands call it before they compute anything.

    >>> check_path(Path("plan.gif"))
    Traceback (most recent call last):
    holdfast.errors.UsageError: the picture plan.gif is neither .png nor .svg (name it so)
    """
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"the picture {path} is neither .png nor .svg", hint="name it so")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {path.absolute().parent} for the picture")
    is_new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as e:
        raise UsageError(f"the picture {path} cannot be written: {e.strerror or e}") from e
    if is_new:
        path.unlink()
