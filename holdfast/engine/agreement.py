"""Agreement: digests of what workers hold, compared and combined. Only digests travel, never the state itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from holdfast import codec
from holdfast.errors import Drift, HoldfastError

Digests = Mapping[str, str]
MODEL, SLOTS, SCRIPT = "model/", "optimizer/", "state/"
SETTINGS = "settings"  # of the optimizer's groups and of the scheduler
_WORDS = {MODEL: "", SLOTS: "the optimizer's state of ", SCRIPT: "the script's state "}


class Hash(Protocol):
    """A hash function's state, as in ``hashlib``."""

    def update(self, data: Any, /) -> None: ...

    def hexdigest(self) -> str: ...


NewHash = Callable[[bytes], Hash]


def digest_of(value: Any, new: NewHash = hashlib.sha256) -> str:
    """Return the digest of a value of plain values and tensors."""
    text, tensors = codec.flatten(value)
    digest = new(text)
    for tensor in tensors:
        digest.update(as_bytes(tensor))
    return digest.hexdigest()


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes, of any dtype."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


def combine(names: Sequence[str], parts: Sequence[Digests], workers: Sequence[str] = ()) -> str:
    """Return one hash of several workers' digests, in the order of the names. ``workers``: their names.

    Raises ``HoldfastError`` if a name is missing, ``Drift`` if two workers have different digests of it.

    >>> whole = combine(["a", "b"], [{"a": "12", "b": "34"}])
    >>> combine(["a", "b"], [{"b": "34"}, {"a": "12"}, {"b": "34"}]) == whole
    True
    """
    digest = hashlib.sha256()
    refuse_to_drift(names, parts, workers)
    for name in names:
        found = next((part[name] for part in parts if name in part), None)
        if found is None:
            raise HoldfastError(f"no worker holds {name}", hint="the hash is of all layers: all workers must be asked")
        digest.update(f"{name} {found}\n".encode())
    return digest.hexdigest()


def refuse_to_drift(names: Sequence[str], parts: Sequence[Digests], workers: Sequence[str] = ()) -> None:
    """Raise ``Drift`` for the first name of which workers have different digests.

    >>> refuse_to_drift(["model/w"], [{"model/w": "1"}, {"model/w": "1"}, {"model/w": "2"}], ["0.0", "0.1", "0.2"])
    Traceback (most recent call last):
    holdfast.errors.Drift: workers disagree on w: 0.2 has another value than 0.0, 0.1 (does the script change it on \
some workers only? else a machine is faulty)
    """
    for name in names:
        sides: dict[str, list[str]] = {}
        for number, part in enumerate(parts):
            if name in part:
                sides.setdefault(part[name], []).append(workers[number] if workers else str(number))
        if len(sides) > 1:
            most, *others = sorted(sides.values(), key=lambda side: -len(side))
            said = "; ".join(f"{', '.join(side)} {_has(side)} another value than {', '.join(most)}" for side in others)
            hint = "does the script change it on some workers only? else a machine is faulty"
            raise Drift(f"workers disagree on {in_words(name)}: {said}", hint=hint)


def _has(side: Sequence[str]) -> str:
    return "has" if len(side) == 1 else "have"


def in_words(name: str) -> str:
    """Return the name of a digest in words.

    >>> in_words("state/best"), in_words("model/0.weight")
    ("the script's state 'best'", '0.weight')
    """
    if name == SETTINGS:
        return "the optimizer's settings"
    for begin, words in _WORDS.items():
        if name.startswith(begin):
            rest = name.removeprefix(begin)
            return f"{words}{rest!r}" if begin == SCRIPT else words + rest
    return name
