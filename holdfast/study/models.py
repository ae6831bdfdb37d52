"""Which models a study saves: those of the paper, a GPT, or the user's own, whose shapes a checkpoint tells."""

from __future__ import annotations

from pathlib import Path

from holdfast.errors import UsageError
from holdfast.study.shapes import MODELS, Shape
from holdfast.study.turns import Model


def model_of(name: str) -> Model:
    """A model by its name, or by the path of a checkpoint of any format.

    >>> model_of("lenet").nbytes
    493648
    """
    if name in MODELS:
        return Model(name=name, shapes=[*MODELS[name]()])
    if not Path(name).exists():
        hint = f"there are {', '.join(MODELS)}, or give the path of a checkpoint"
        raise UsageError(f"{name!r} is no model of the study", hint=hint)
    own = Path(name).resolve().name
    return Model(name=f"your {own}" if own in MODELS else own, shapes=shapes_in(Path(name)))


def shapes_in(path: Path) -> list[Shape]:
    """The weights in a checkpoint: those of its section ``model``, or all if it has no sections."""
    from holdfast.checkpoint import open_checkpoint  # torch, which --help should not wait for

    tensors = open_checkpoint(path).tensors
    own = {name: entry for name, entry in tensors.items() if name.startswith("model/")} or tensors
    found = [
        (name.removeprefix("model/"), tuple(entry.shape))
        for name, entry in own.items()
        if entry.dtype.is_floating_point
    ]
    if not found:
        raise UsageError(f"{path} has no weights in it")
    return [(name, shape or (1,)) for name, shape in found]
