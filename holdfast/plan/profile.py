"""The profile of a model: each layer's costs, and the links and memory of the machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from holdfast.errors import UsageError

VERSION = 1  # of the JSON document; another one is refused
MOST_BYTES = 10**15  # bytes of any size in a profile; more is taken for a mistake
LONGEST = 10**5  # seconds of any time in a profile; more is taken for a mistake
MOST_LAYERS = 1_000  # the time of planning grows with their square; merge small layers


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Costs of one layer, for one micro-batch on one device.

    ``output_bytes`` cross the boundary behind the layer forward, ``output_gradient_bytes`` backward. The latter may be
    fewer: integers and masks have no gradient.
    """

    name: str
    forward: float  # seconds
    backward: float  # seconds, measured: not a multiple of forward
    output_bytes: int
    output_gradient_bytes: int
    weight_bytes: int  # parameters and buffers
    trainable_bytes: int  # parameters with a gradient, which replicas sum every step
    slot_bytes: int  # state of the optimizer
    saved_bytes: int  # kept for backward, per micro-batch under way
    update: float = 0.0  # seconds of the optimizer, per step

    @property
    def state_bytes(self) -> int:
        """Bytes that a new holder of the layer has to be sent."""
        return self.weight_bytes + self.slot_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes that a holder always keeps in memory: the state and the gradient."""
        return self.state_bytes + self.trainable_bytes


@dataclass(frozen=True, kw_only=True)
class Link:
    """A network link: how long a message takes.

    >>> Link(bandwidth=1e9, latency=1e-4).seconds(10**6)
    0.0011
    """

    bandwidth: float  # bytes per second
    latency: float = 0.0  # seconds

    def seconds(self, size: float) -> float:
        """Return the seconds of a message of ``size`` bytes; none for an empty one."""
        return self.latency + size / self.bandwidth if size else 0.0


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A model's layers as measured (or made up), and the machines they were measured on.

    >>> profile = uniform(4, forward=0.01, backward=0.02)
    >>> Profile.from_json(profile.to_json()) == profile
    True
    """

    model: str  # name and fingerprint of the model
    device: str  # name of the device it was measured on
    micro_batch: int  # samples
    layers: tuple[LayerCost, ...]
    inside: Link  # between devices of a node
    between: Link  # between nodes; a node's devices share it
    memory: int | None = None  # bytes of one device; None: not a limit
    key: str = ""  # key of the cache of profiles: model, micro-batch and device
    notes: dict[str, Any] = field(default_factory=dict)  # when and how it was measured

    def to_json(self) -> dict[str, Any]:
        """Return a JSON document for ``from_json``."""
        return {"holdfast_profile": VERSION, **asdict(self), "layers": [asdict(layer) for layer in self.layers]}

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Read the file that ``holdfast profile`` has written. Raises UsageError if it is not one."""
        try:
            document = json.loads(path.read_text())
        except OSError as e:
            raise UsageError(f"cannot read the profile {path}: {e.strerror or e}") from e
        except ValueError as e:
            raise UsageError(f"the profile {path} is not JSON: {e}", hint="make one: holdfast profile train.py") from e
        return cls.from_json(document)

    @classmethod
    def from_json(cls, document: Any) -> Profile:
        """Read and check a JSON document. Raises UsageError that says what is wrong with it.

        >>> Profile.from_json({"layers": []})
        Traceback (most recent call last):
        holdfast.errors.UsageError: not a profile: it has no 'holdfast_profile' (make one: holdfast profile SCRIPT)
        """
        if not isinstance(document, dict) or "holdfast_profile" not in document:
            raise UsageError("not a profile: it has no 'holdfast_profile'", hint="make one: holdfast profile SCRIPT")
        if document["holdfast_profile"] != VERSION:
            raise UsageError(f"the profile is of version {document['holdfast_profile']}, this program reads {VERSION}")
        try:
            layers = tuple(LayerCost(**layer) for layer in document["layers"])
            links = {name: Link(**document[name]) for name in ("inside", "between")}
            known = {f.name: document[f.name] for f in fields(cls) if f.name in document}
            profile = cls(**{**known, "layers": layers, **links})
            _check(profile)
        except (KeyError, TypeError, ValueError) as e:
            raise UsageError(f"the profile cannot be read: {e}", hint="make a new one: holdfast profile") from e
        return profile


def _check(profile: Profile) -> None:
    if not 1 <= len(profile.layers) <= MOST_LAYERS:
        raise ValueError(f"{len(profile.layers)} layers; it takes 1 to {MOST_LAYERS}")
    if profile.micro_batch < 1:
        raise ValueError("the micro-batch has no samples")
    if profile.memory is not None and not 0 < profile.memory <= MOST_BYTES:
        raise ValueError(f"a device has {profile.memory} bytes of memory")
    for link in (profile.inside, profile.between):
        if not 1 <= link.bandwidth <= MOST_BYTES or not 0 <= link.latency <= LONGEST:
            raise ValueError(f"a link of {link.bandwidth} bytes/s with {link.latency} s latency")
    for number, layer in enumerate(profile.layers):
        for name, value in asdict(layer).items():
            seconds = name in ("forward", "backward", "update")
            kinds = (int, float) if seconds else int
            most = LONGEST if seconds else MOST_BYTES
            sound = isinstance(value, kinds) and not isinstance(value, bool) and 0 <= value <= most
            if name != "name" and not sound:
                raise ValueError(f"layer {number} ({layer.name}): {name} is {value!r}")
    if not sum(layer.forward + layer.backward for layer in profile.layers) > 0:
        raise ValueError("no layer takes any time")


def uniform(
    count: int,
    *,
    forward: float = 0.01,
    backward: float = 0.02,
    output_bytes: int = 1 << 20,
    weight_bytes: int = 64 << 20,
    saved_bytes: int = 8 << 20,
    bandwidth: float = 12.5e9,
    latency: float = 20e-6,
    memory: int | None = None,
) -> Profile:
    """Return the profile of a made-up model with ``count`` equal layers, trained with Adam.

    Times are in seconds, ``bandwidth`` in bytes per second between nodes (default: 100 Gbit/s; ten times that inside
    a node), ``memory`` in bytes of a device. Raises UsageError for fewer than 1 or more than ``MOST_LAYERS`` layers.

    >>> len(uniform(96).layers)
    96
    """
    if not 1 <= count <= MOST_LAYERS:
        raise UsageError(f"a model of {count} layers cannot be planned", hint=f"1 to {MOST_LAYERS}")
    layers = [
        LayerCost(
            name=f"layer {number}",
            forward=forward,
            backward=backward,
            output_bytes=output_bytes,
            output_gradient_bytes=output_bytes,
            weight_bytes=weight_bytes,
            trainable_bytes=weight_bytes,
            slot_bytes=2 * weight_bytes,
            saved_bytes=saved_bytes,
        )
        for number in range(count)
    ]
    link = Link(bandwidth=bandwidth, latency=latency)
    inside = Link(bandwidth=10 * bandwidth, latency=latency / 4)
    return Profile(
        model=f"{count} equal layers",
        device="made up",
        micro_batch=1,
        layers=tuple(layers),
        inside=inside,
        between=link,
        memory=memory,
    )


def state_bytes(layers: Sequence[LayerCost], held: range) -> int:
    """Return the bytes that a new holder of the layers ``held`` has to be sent."""
    return sum(layers[number].state_bytes for number in held)
