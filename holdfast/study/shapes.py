"""The shapes of the models that are saved. What a checkpoint costs depends on little else."""

from __future__ import annotations

from collections.abc import Iterator

Shape = tuple[str, tuple[int, ...]]


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
    """One that is saved in no time, though in enough of it to be killed.

    >>> elements(small_gpt())
    2615424
    """
    return gpt(layers=4, width=192, vocabulary=4096, context=256)


MODELS = {"lenet": lenet, "small-gpt": small_gpt, "gpt": gpt, "resnet50": resnet50, "vgg16": vgg16}


def elements(shapes: Iterator[Shape]) -> int:
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
