"""The formats that can be read. Each is a module that translates a checkpoint into a catalogue:

- ``recognise(path)``: whether a path looks like one of its checkpoints; never raises
- ``open(path)``, or ``open(path, rules)``: the catalogue; reads no tensor
- ``write(catalogue, path, progress=…)``: only in modules that can write, see ``convert.TARGETS``
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from inspect import signature
from types import ModuleType

from holdfast.checkpoint import series
from holdfast.checkpoint.disk import explained
from holdfast.checkpoint.inside import check_inside
from holdfast.checkpoint.pieces import Catalogue
from holdfast.checkpoint.places import Place, Remote, place_of
from holdfast.checkpoint.rules import Rules
from holdfast.checkpoint.rules.renaming import renamed
from holdfast.errors import CheckpointError, HoldfastError, NoCheckpoint, UsageError

# By the names that users give; tried in this order, formats with unmistakable files first.
_MODULES = {
    "holdfast": "holdfast.checkpoint.index",
    "deepspeed-universal": "holdfast.checkpoint.formats.deepspeed_universal",
    "deepspeed": "holdfast.checkpoint.formats.deepspeed",
    "megatron": "holdfast.checkpoint.formats.megatron",
    "dcp": "holdfast.checkpoint.formats.dcp",
    "hf": "holdfast.checkpoint.formats.hf",
    "torch": "holdfast.checkpoint.formats.torchsave",
    "fragments": "holdfast.checkpoint.formats.fragments",
}
_SENTENCE = 2000  # characters of an error: a name or a value in a file may be as long as the file
_DISTRUST = "it is damaged; copy it again, or do not trust it"


def format_of(name: str) -> ModuleType:
    """The module of a format, by the name users give it; ``UsageError`` for another name."""
    if name not in _MODULES:
        raise UsageError(f"there is no format {name!r}", hint=f"one of {', '.join(_MODULES)}")
    return import_module(_MODULES[name])


def recognise(path: Place) -> str | None:
    """The name of the format that a path looks like; None if it looks like none.

    In an object store only our own format is known: others are read from files.
    """
    if isinstance(path, Remote):
        return "holdfast" if format_of("holdfast").recognise(path) else None
    return next((name for name in _MODULES if format_of(name).recognise(path)), None)


def open_checkpoint(
    path: str | os.PathLike[str] | Remote,
    *,
    format: str | None = None,
    rules: Rules | None = None,
) -> Catalogue:
    """Opens a checkpoint of any format, without reading a tensor; of a run's folder, its newest checkpoint.

    ``format`` is a key of ``_MODULES`` (default: the format that the path looks like). ``rules`` (see
    :mod:`holdfast.checkpoint.rules`) describe a layout that cannot be derived. Returns a catalogue, which ``load`` and
    the functions of this package take. Raises ``NoCheckpoint`` if there is none, ``CheckpointError`` if it is damaged.
    """
    place = place_of(path).absolute()
    with explained(place, "read"):
        missing = not place.exists()
    if isinstance(place, Remote) and (format or "holdfast") != "holdfast":
        hint = "copy it to a folder, and name that"
        raise UsageError(f"{place} is in an object store, where a {format} checkpoint cannot be read", hint=hint)
    if missing and (isinstance(place, Remote) or not format_of("fragments").recognise(place)):
        raise NoCheckpoint(f"{place} does not exist", hint="check the path")
    newest = series.newest(place)
    chosen = format or recognise(place)
    if newest is not None and chosen is not None and format is None:
        raise CheckpointError(
            f"{place} is a checkpoint ({chosen}) and has {newest.name} in it", hint="name one of them"
        )
    if newest is not None and format is None:
        check_inside(newest, place)
        place, chosen = newest, recognise(newest)
    if chosen is None:
        raise NoCheckpoint(f"{place} is not a checkpoint of a known format", hint=f"known are {', '.join(_MODULES)}")
    module = format_of(chosen)
    with only_named_errors(place, chosen):
        if rules is None:
            return module.open(place)
        if "rules" in signature(module.open).parameters:
            return module.open(place, rules=rules)
        return renamed(module.open(place), rules)  # its layout is known: rules can only rename


@contextmanager
def only_named_errors(place: Place, format: str) -> Iterator[None]:
    """Turns whatever a checkpoint's content makes a reader raise into a ``CheckpointError``.

    Readers check what they use. But a file may hold any value in the place of any other, and what follows from that
    is the file's fault, not the user's.
    """
    try:
        yield
    except CheckpointError as error:
        if len(str(error)) <= _SENTENCE:
            raise
        raise type(error)(f"{str(error)[:_SENTENCE]}…") from error
    except HoldfastError:
        raise
    except RecursionError as error:
        raise CheckpointError(f"{place} is refused: it is nested too deeply", hint=_DISTRUST) from error
    except MemoryError as error:
        raise CheckpointError(f"{place} needs more memory than there is", hint=_DISTRUST) from error
    except (LookupError, TypeError, ValueError, AttributeError, AssertionError, ArithmeticError, OSError) as error:
        said = f"{type(error).__name__}: {str(error)[:200]}"
        raise CheckpointError(f"{place} is not a readable {format} checkpoint, {said}", hint=_DISTRUST) from error
