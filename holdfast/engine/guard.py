"""The model's tensors that a forward pass must not change, or only under control: how a change of them is found.

An operation that writes into a tensor is counted by torch, so a change is found in the step that makes it. A write
through ``.data`` is not counted, so bytes are compared too. All bytes are compared in the first step, and whenever a
tensor has got new values. After that each step looks at a part of them, in turn, because large frozen weights would
cost more than a step may: at ``LOOK`` bytes or at one of ``ROUND`` parts, whichever is more. So a buffer of ordinary
size is compared in every step, and every byte in ``ROUND`` steps. ``look_at_all`` compares everything at once, before
it is saved or sent. What the run itself writes must be counted by torch (``State`` sees to it for checkpoints).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from holdfast.engine.fingerprint import PIECE, checksum, checksums, is_plain, mark
from holdfast.engine.model import LayeredModel, Unit
from holdfast.errors import UsageError
from holdfast.words import a_kind

LOOK = 1 << 20  # bytes compared in each step at least: 0.05 ms
ROUND = 32  # steps until every byte was compared: less than 1% of a step, even if that only reads each weight once

Kind = Literal["buffer", "frozen parameter", "parameter", "buffer of the loss"]


@dataclass(kw_only=True, eq=False)
class Guarded:
    """A tensor of the model, and what is known of it."""

    name: str
    kind: Kind
    tensor: Tensor
    unit: Unit | None  # that it moves with; None: it belongs to no layer, and every worker has it
    is_alias: bool = False  # another weight's memory: its bytes are compared there
    places: list[tuple[dict[str, Any], str]] = field(default_factory=list)  # where modules keep it
    mark: tuple[int, int] | None = None  # when it was last looked at; None: not yet
    sums: list[int] = field(default_factory=list)  # checksums of its pieces; empty: its bytes are not compared
    fresh: bool = True  # it has got new values: all its bytes are compared after the next pass

    def __post_init__(self) -> None:
        self.is_plain = is_plain(self.tensor)

    def now(self) -> tuple[int, int]:
        """Return the tensor's present mark. Called for each tensor in each step, so it is short."""
        return (self.tensor.data_ptr(), self.tensor._version) if self.is_plain else mark(self.tensor)

    @property
    def is_replaced(self) -> bool:
        """Whether a module has got another tensor in its place."""
        return any(place.get(key) is not self.tensor for place, key in self.places)


class Guard:
    """All tensors of a model that this worker holds, guarded from ``begin`` to ``changed``.

    ``trained``: whether parameters that are trained are guarded too. Their bytes are compared in the first step
    only: each update changes them. ``loss``: a module whose buffers are guarded too; nobody else gets these.

    >>> import torch
    >>> layer = nn.Linear(1, 1); layer.register_buffer("count", torch.zeros(()))
    >>> guard = Guard(LayeredModel(layer, seed=0, device=torch.device("cpu")), trained=True)
    >>> _ = guard.begin()
    >>> _ = layer.count.data.add_(1)
    >>> [each.name for each in guard.changed()]
    ['count']
    """

    def __init__(self, model: LayeredModel, *, trained: bool, loss: object = None) -> None:
        self._model = model
        self._trained = trained
        modules = list(_modules(model))
        of_loss = list(loss.named_modules()) if isinstance(loss, nn.Module) else []
        self._all = [*_tensors(model, modules, "parameter"), *_tensors(model, modules, "buffer")]
        self._all += _tensors(model, of_loss, "buffer of the loss")
        self._there = [(module, _there(module)) for _, module in [*modules, *of_loss]]
        self._held: list[Guarded] = []
        self._pieces: list[tuple[Guarded, int]] = []  # of tensors that no update trains
        self._next = 0  # the piece that is looked at next
        self._is_first = True  # no pass was guarded yet

    @property
    def buffers(self) -> list[Guarded]:
        """All buffers of the model, held or not, in an order that is the same on every worker."""
        return [each for each in self._all if each.kind == "buffer"]

    def is_held(self, each: Guarded) -> bool:
        """Return whether a tensor has memory here."""
        return each.unit is None or self._model.is_held(each.unit)

    def begin(self) -> list[Guarded]:
        """Note how things are before a pass; return the tensors that have got new values since the last one."""
        held = [each for each in self._all if self.is_held(each) and (self._trained or each.kind != "parameter")]
        moved = held != self._held
        self._held = held
        found = []
        for each in held:
            now = each.now()
            if each.mark == now:
                continue
            each.mark, each.fresh = now, True
            compared = each.is_plain and not each.is_alias and (each.kind != "parameter" or self._is_first)
            each.sums = checksums(each.tensor) if compared else []
            found.append(each)
        if moved:
            untrained = [each for each in held if each.kind != "parameter"]
            self._pieces = [(each, piece) for each in untrained for piece in range(len(each.sums))]
            self._next = 0
        return found

    def changed(self) -> list[Guarded]:
        """Return the tensors that were changed since ``begin``, as far as this step looks at their bytes.

        Raises ``UsageError`` if a pass has made or removed a buffer.
        """
        for module, there in self._there:
            if (now := _there(module)) != there:
                raise UsageError(
                    f"the forward pass makes or removes buffer '{min(now ^ there)}' of {a_kind(module)}",
                    hint="register all buffers, with their values, when the layer is made",
                )
        found = {id(each): each for each in self._held if each.is_replaced or each.now() != each.mark}
        for each in self._held:
            if each.fresh and id(each) not in found and each.sums and checksums(each.tensor) != each.sums:
                found[id(each)] = each
            each.fresh = False
        for each, piece in self._window():
            if id(each) not in found and checksum(each.tensor, piece) != each.sums[piece]:
                found[id(each)] = each
        self._is_first = False
        return [each for each in self._held if id(each) in found]

    def accept(self, changed: Iterable[Guarded]) -> None:
        """Take the present values of changed tensors as theirs at the next ``begin``."""
        for each in changed:
            each.mark = None

    def look_at_all(self, unit: Unit | None = None, *, buffers: bool) -> None:
        """Raise ``UsageError`` for a frozen parameter of which some byte is not as it was; ``buffers``: for these too.

        ``unit``: look at this one only. Writes that torch counts are passed over: those were made between steps, by
        the run or its script.
        """
        for each in self._held:
            if unit is not None and each.unit is not unit:
                continue
            kind = each.kind == "frozen parameter" or (buffers and each.kind == "buffer")
            same = self.is_held(each) and each.now() == each.mark
            if kind and same and each.sums and checksums(each.tensor) != each.sums:
                raise refusal(each)

    def _window(self) -> list[tuple[Guarded, int]]:
        """Return the pieces that this step looks at, and move on."""
        if not self._pieces:
            return []
        least = max(-(-LOOK // PIECE), -(-len(self._pieces) // ROUND))
        size, count = 0, 0
        while count < len(self._pieces) and (count < least or size < LOOK):
            each, piece = self._pieces[(self._next + count) % len(self._pieces)]
            size += min(PIECE, each.tensor.nbytes - piece * PIECE)
            count += 1
        turn = [self._pieces[(self._next + number) % len(self._pieces)] for number in range(count)]
        self._next = (self._next + count) % len(self._pieces)
        return turn


def refusal(each: Guarded, *, during: str = "the forward pass") -> UsageError:
    """Return the error of a change that no other worker would know of."""
    if each.kind == "buffer of the loss":
        hint = "keep no state in the loss: it is in no checkpoint, and no other worker gets it"
    elif each.kind == "buffer":
        hint = "leave buffers alone while training, declare combine_statistics (docs/exactness.md), or numerics='fast'"
    elif each.kind == "frozen parameter":
        hint = "leave parameters alone in forward; what a forward pass changes is a buffer"
    else:
        hint = "leave parameters alone in forward (an Embedding without max_norm): the optimizer updates them"
    return UsageError(
        f"{during} changes {each.kind} '{each.name}', so its value depends on who computes what", hint=hint
    )


def _modules(model: LayeredModel) -> Iterator[tuple[str, nn.Module]]:
    """Return all modules of a model by name. A layer may have copies of modules that it shares with another one."""
    seen: set[int] = set()
    named = [("", model.module), *((f"{number}", layer) for number, layer in enumerate(model.layers))]
    for prefix, whole in named:
        for name, module in whole.named_modules(prefix=prefix):
            if id(module) not in seen:
                seen.add(id(module))
                yield name, module


def _there(module: nn.Module) -> set[str]:
    """Return the names of a module's own buffers that have values."""
    return {key for key, buffer in module._buffers.items() if buffer is not None}


def _tensors(model: LayeredModel, modules: Sequence[tuple[str, nn.Module]], kind: Kind) -> Iterable[Guarded]:
    """Return the parameters, or for another ``kind`` the buffers, of some modules: each once, by its first name."""
    primaries = {id(alias): primary for alias, primary in model.aliases}
    units = {id(tensor): unit for unit in model.units for tensor in unit.tensors}
    found: dict[int, Guarded] = {}
    for path, module in modules:
        place: dict[str, Any] = module._parameters if kind == "parameter" else module._buffers
        for key, tensor in place.items():
            if tensor is None:
                continue
            if id(tensor) not in found:
                found[id(tensor)] = Guarded(
                    name=f"{path}.{key}" if path else key,
                    kind="frozen parameter" if kind == "parameter" and not tensor.requires_grad else kind,
                    tensor=tensor,
                    unit=units.get(id(primaries.get(id(tensor), tensor))),
                    is_alias=id(tensor) in primaries,
                )
            found[id(tensor)].places.append((place, key))
    return found.values()
