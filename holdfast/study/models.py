"""The models that a study saves: the shapes of their tensors, by name or from the user's own checkpoint.

The cost of a checkpoint depends on little else than these shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import UsageError

Shape = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class StudyModel:
    """A model to save: its name, and the names and shapes of its weights."""

    name: str
    shapes: list[Shape]

    @property
    def nbytes(self) -> int:
        """Bytes of weights and momentum in float32."""
        return 2 * 4 * elements(iter(self.shapes))


def lenet() -> Iterator[Shape]:
    """LeNet-5 for digits of 32 x 32.

    >>> elements(lenet())
    61706
    """
    yield from _conv("conv1", 1, 6, 5)
    yield from _conv("conv2", 6, 16, 5)
    for name, before, after in (("fc1", 400, 120), ("fc2", 120, 84), ("fc3", 84, 10)):
        yield from _linear(name, before, after)


def resnet50() -> Iterator[Shape]:
    """ResNet-50 for 1000 classes; scales and offsets of its normalisations, not their statistics.

    >>> elements(resnet50())
    25557032
    """
    yield from _normed("conv1", 3, 64, 7)
    before = 64
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), 1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            yield from _normed(f"{name}.conv1", before, width, 1)
            yield from _normed(f"{name}.conv2", width, width, 3)
            yield from _normed(f"{name}.conv3", width, 4 * width, 1)
            if block == 0:
                yield from _normed(f"{name}.down", before, 4 * width, 1)
            before = 4 * width
    yield from _linear("fc", before, 1000)


def vgg16() -> Iterator[Shape]:
    """VGG-16 for 1000 classes.

    >>> elements(vgg16())
    138357544
    """
    before = 3
    for number, width in enumerate((64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)):
        yield from _conv(f"conv{number}", before, width, 3)
        before = width
    for name, rows, after in (("fc1", 25088, 4096), ("fc2", 4096, 4096), ("fc3", 4096, 1000)):
        yield from _linear(name, rows, after)


def gpt(*, layers: int = 8, width: int = 256, vocabulary: int = 8192, context: int = 512) -> Iterator[Shape]:
    """A small GPT.

    >>> elements(gpt())
    8546816
    """
    yield "tokens", (vocabulary, width)
    yield "positions", (context, width)
    for layer in range(layers):
        name = f"block{layer}"
        for norm in ("norm1", "norm2"):
            yield from _norm(f"{name}.{norm}", width)
        yield from _linear(f"{name}.attention", width, 3 * width)
        yield from _linear(f"{name}.project", width, width)
        yield from _linear(f"{name}.up", width, 4 * width)
        yield from _linear(f"{name}.down", 4 * width, width)
    yield from _norm("norm", width)


def small_gpt() -> Iterator[Shape]:
    """A GPT of 21 MB with its momentum: quick to save, but slow enough to be killed on the way.

    >>> elements(small_gpt())
    2615424
    """
    return gpt(layers=4, width=192, vocabulary=4096, context=256)


MODELS = {"lenet": lenet, "small-gpt": small_gpt, "gpt": gpt, "resnet50": resnet50, "vgg16": vgg16}


def elements(shapes: Iterator[Shape]) -> int:
    """Return the number of weights."""
    total = 0
    for _, shape in shapes:
        size = 1
        for length in shape:
            size *= length
        total += size
    return total


def _conv(name: str, before: int, after: int, size: int) -> Iterator[Shape]:
    yield f"{name}.weight", (after, before, size, size)
    yield f"{name}.bias", (after,)


def _linear(name: str, before: int, after: int) -> Iterator[Shape]:
    yield f"{name}.weight", (after, before)
    yield f"{name}.bias", (after,)


def _norm(name: str, width: int) -> Iterator[Shape]:
    yield f"{name}.scale", (width,)
    yield f"{name}.offset", (width,)


def _normed(name: str, before: int, after: int, size: int) -> Iterator[Shape]:
    """A convolution without offsets, and its normalisation."""
    yield f"{name}.weight", (after, before, size, size)
    yield from _norm(f"{name}.norm", after)


def model_of(name: str) -> StudyModel:
    """Return a model by its name, or by the path of a checkpoint of any format; raises ``UsageError``.

    >>> model_of("lenet").nbytes
    493648
    """
    if name in MODELS:
        return StudyModel(name=name, shapes=[*MODELS[name]()])
    if not Path(name).exists():
        hint = f"there are {', '.join(MODELS)}, or give the path of a checkpoint"
        raise UsageError(f"{name!r} is no model of the study", hint=hint)
    own = Path(name).resolve().name
    return StudyModel(name=f"your {own}" if own in MODELS else own, shapes=shapes_in(Path(name)))


def shapes_in(path: Path) -> list[Shape]:
    """Return the weights in a checkpoint: those of its section ``model``, or all if it has no sections."""
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
