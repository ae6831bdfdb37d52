"""The model as a list of layers. A layer is what state is moved by, and what random numbers are seeded for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from holdfast.engine.boundary import settled
from holdfast.engine.layers_of import CutModel
from holdfast.engine.shards import is_split
from holdfast.engine.tied_weights import alias_shared, share, shared_names
from holdfast.errors import UsageError
from holdfast.rng import seed_everything, seed_of, seed_torch, undisturbed_generators
from holdfast.words import a_kind

Layers = nn.Module | Iterable[nn.Module | Callable[[], nn.Module]] | CutModel


@dataclass(frozen=True, kw_only=True, eq=False)
class Unit:
    """Tensors that move from worker to worker together: a layer's own, or those that several layers share."""

    number: int  # of a layer's own tensors: the layer's number
    layers: frozenset[int]  # that need these tensors
    parameters: tuple[nn.Parameter, ...]
    buffers: tuple[Tensor, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.parameters, *self.buffers)


class LayeredModel:
    """A model as layers that are run one after the other, each with random numbers of its own.

    A ``nn.Sequential`` or a list is cut at its items; any other module is one layer. Names of parameters are those of
    the module that was given. A layer may also be a function that makes it: then it takes memory only on workers that
    hold it. Raises ``UsageError`` for anything else, and if there is no parameter to train.

    A layer that this worker does not *hold* keeps its tensors' shapes, but has no memory.

    >>> model = LayeredModel([nn.Linear(2, 2), nn.ReLU()], seed=0, device=torch.device("cpu"))
    >>> len(model.layers), list(model.module.state_dict())
    (2, ['0.weight', '0.bias'])
    >>> model.release([0]); model.layers[0].weight
    Parameter containing:
    tensor([[nan, nan],
            [nan, nan]], requires_grad=True)
    """

    def __init__(self, layers: Layers, *, seed: int, device: torch.device) -> None:
        self.seed = seed
        self.device = device
        self.at = 0  # the layer that runs, or has run last
        self._makers: dict[int, Callable[[], nn.Module]] = {}  # layer → the function that makes it
        self._strides: dict[int, tuple[int, ...]] = {}  # id of a tensor → its strides when it has memory
        self.module, self.layers = self._read(layers)
        _refuse_lazy(self.module)
        self.trainable = [p for p in self.module.parameters() if p.requires_grad]
        self.aliases = alias_shared(self.module, self.layers)
        self.units = _units(self.layers, self.aliases)
        tensors = [tensor for unit in self.units for tensor in unit.tensors]
        self._strides = {id(tensor): self._strides.get(id(tensor), tensor.stride()) for tensor in tensors}
        # The numbers of the units whose tensors have memory. Units of layers that are made get it when they are held.
        self._real = {unit.number for unit in self.units if not self.can_make(unit)}
        self.held = {n for n in range(len(self.layers)) if all(map(self.is_held, self.units_of([n])))}
        if not self.trainable:
            raise UsageError("the model has no parameter to train", hint="check requires_grad")

    def _read(self, layers: Layers) -> tuple[nn.Module, list[nn.Module]]:
        """Return the whole module and its layers, with weights tied that are marked so."""
        if isinstance(layers, CutModel):
            module = layers.module if is_split(layers.module) else layers.module.to(self.device)
            return module, list(layers.layers)
        given: Sequence[nn.Module | Callable[[], nn.Module]]
        if isinstance(layers, nn.Module):
            module = layers.to(self.device)
            given = list(module) if _is_plain_list(module) else [module]
        else:
            given = list(layers)
            module = self._made(given).to(self.device)
        found = list(module) if _is_plain_list(module) else [module]
        for number, each in enumerate(given):
            for name, other in shared_names(each).items():
                share(found[number], name, _parameter(module, other, number))
        return module, found

    def _made(self, listed: Sequence[nn.Module | Callable[[], nn.Module]]) -> nn.Module:
        """Put layers into a module. Functions are called one by one; each result loses its memory before the next."""
        made: list[nn.Module] = []
        for number, given in enumerate(listed):
            if isinstance(given, nn.Module):
                made.append(given)
                continue
            if not callable(given):
                raise _no_layers()
            self._makers[number] = given
            made.append(self._make(number))
            for tensor in [*made[-1].parameters(), *made[-1].buffers()]:
                self._strides[id(tensor)] = tensor.stride()
                tensor.data = _filler(tensor)
        if not made:
            raise _no_layers()
        return nn.Sequential(*made)

    def _make(self, number: int) -> nn.Module:
        """Call a layer's function with the random numbers of this layer: every worker makes the same weights."""
        with undisturbed_generators():
            seed_everything(seed_of(self.seed, "make", number), self.device)
            layer = self._makers[number]()
        if not isinstance(layer, nn.Module):
            raise UsageError(f"layer {number}: the function gave {a_kind(layer)}", hint="a torch module")
        if any(id(tensor) in self._strides for tensor in [*layer.parameters(), *layer.buffers()]):
            raise UsageError(
                f"layer {number}: the function gave what it or another had given before",
                hint="a function must make a new layer each time; or pass the layer itself",
            )
        return layer.to(self.device)

    # --- computing -------------------------------------------------------------------------------

    def forward(
        self, x: Any, layers: range, *, step: int | str, index: int, between: Callable[[], None], exact: bool = True
    ) -> Any:
        """Run ``layers`` on ``x``, with the random numbers of micro-batch ``index`` of ``step``.

        ``between`` is called before each layer, and may raise to end the pass. With ``exact``, tensors between layers
        are laid out as if they had been sent (``boundary.settled``).
        """
        for number in layers:
            between()
            self.seed_layer(number, step=step, index=index)
            x = self.layers[number](x)
            if exact and number + 1 < len(self.layers):
                x = settled(x)
        return x

    def seed_layer(self, number: int, *, step: int | str, index: int) -> None:
        """Seed the random numbers that a layer draws in micro-batch ``index`` of ``step``: it is about to run."""
        self.at = number
        seed_torch(seed_of(self.seed, step, index, number), self.device)

    def __call__(self, x: Any) -> Any:
        """Return the whole model's output for ``x``, without seeding random numbers."""
        for layer in self.layers:
            x = layer(x)
        return x

    def train(self, mode: bool = True) -> None:
        """Set the mode, as ``nn.Module.train`` does."""
        self.module.train(mode)
        if self.aliases:  # a layer may have copies of modules that it shares with another one
            for layer in self.layers:
                layer.train(mode)

    # --- what is held ----------------------------------------------------------------------------

    def units_of(self, layers: Iterable[int]) -> list[Unit]:
        """Return the units that these layers need, in order."""
        wanted = set(layers)
        return [unit for unit in self.units if unit.layers & wanted]

    def is_held(self, unit: Unit) -> bool:
        """Return whether a unit's tensors have memory on this worker."""
        return unit.number in self._real

    def can_make(self, unit: Unit) -> bool:
        """Return whether every worker can make the unit's first values by itself, with its layer's function."""
        return min(unit.layers) in self._makers

    def hold(self, layers: Iterable[int]) -> None:
        """Give these layers memory. Its values are undefined: the caller has to write them, or call ``make``."""
        layers = set(layers)
        for unit in self.units_of(layers):
            if unit.number not in self._real:
                for tensor in unit.tensors:
                    tensor.data = torch.empty_strided(
                        tensor.shape, self._strides[id(tensor)], dtype=tensor.dtype, device=self.device
                    )
                self._real.add(unit.number)
        self.held |= layers
        self._follow()

    def release(self, layers: Iterable[int]) -> None:
        """Take the memory of units that only these layers need. Shapes stay; values are NaN, so that a use is seen."""
        gone = set(layers)
        self.held -= gone
        for unit in self.units_of(gone):
            if unit.number in self._real and not unit.layers & self.held:
                for tensor in unit.tensors:
                    tensor.data = _filler(tensor)
                self._real.remove(unit.number)
        self._follow()

    @torch.no_grad()
    def make(self, units: Iterable[Unit]) -> None:
        """Give held units their first values, those that the functions of their layers make."""
        by_home: dict[int, list[Unit]] = {}
        for unit in units:
            by_home.setdefault(min(unit.layers), []).append(unit)
        for home, wanted in by_home.items():
            fresh = dict(_named_tensors(self._make(home)))
            names = {id(tensor): name for name, tensor in _named_tensors(self.layers[home])}
            for unit in wanted:
                for tensor in unit.tensors:
                    tensor.copy_(fresh[names[id(tensor)]])

    def make_whole(self) -> None:
        """Hold all layers, and make those that had no memory."""
        missing = [unit for unit in self.units if not self.is_held(unit)]
        self.hold(range(len(self.layers)))
        self.make(missing)

    def _follow(self) -> None:
        """Let each alias of a shared weight use the weight's present memory."""
        for alias, primary in self.aliases:
            alias.data = primary.data

    @contextmanager
    def weights(self, values: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
        """Compute with other weights for a while. The model's own are not written to: they may be on their way."""
        before = {p: p.data for p in values}
        try:
            for p, value in values.items():
                p.data = value
            self._follow()
            yield
        finally:
            for p, value in before.items():
                p.data = value
            self._follow()

    # --- views -----------------------------------------------------------------------------------

    def parts(self) -> list[tuple[list[nn.Parameter], list[Tensor]]]:
        """Return parameters and buffers of each layer. Those that several layers share belong to the first one."""
        found: list[tuple[list[nn.Parameter], list[Tensor]]] = [([], []) for _ in self.layers]
        for unit in self.units:
            parameters, buffers = found[min(unit.layers)]
            parameters += unit.parameters
            buffers += unit.buffers
        return found


def _no_layers() -> UsageError:
    return UsageError("layers must be torch modules", hint="pass a module, nn.Sequential or a list")


def _refuse_lazy(module: nn.Module) -> None:
    """Raise ``UsageError`` for layers whose shapes only a first batch tells: workers must agree on them before."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            raise UsageError(
                f"'{name}' has no shape yet",
                hint="give lazy layers their sizes, or call the model with a batch before the Run",
            )


def _units(layers: Sequence[nn.Module], aliases: Sequence[tuple[nn.Parameter, nn.Parameter]]) -> tuple[Unit, ...]:
    """Make a unit for each layer's own tensors, and one for each set of layers that share some."""
    primaries = {id(alias): primary for alias, primary in aliases}
    users: dict[int, set[int]] = {}
    tensors: dict[int, Tensor] = {}
    for number, layer in enumerate(layers):
        for tensor in [*layer.parameters(), *layer.buffers()]:
            tensor = primaries.get(id(tensor), tensor)
            users.setdefault(id(tensor), set()).add(number)
            tensors[id(tensor)] = tensor
    sets = [frozenset([number]) for number in range(len(layers))]
    sets += dict.fromkeys(frozenset(used) for used in users.values() if len(used) > 1)
    grouped: Mapping[frozenset[int], list[Tensor]] = {each: [] for each in sets}
    for key, used in users.items():
        grouped[frozenset(used)].append(tensors[key])
    return tuple(
        Unit(
            number=number,
            layers=each,
            parameters=tuple(t for t in grouped[each] if isinstance(t, nn.Parameter)),
            buffers=tuple(t for t in grouped[each] if not isinstance(t, nn.Parameter)),
        )
        for number, each in enumerate(sets)
    )


def _filler(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape with one value for all elements: nearly no memory, and NaN if it can be."""
    value = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    return torch.full((), value, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def in_eval(module: nn.Module) -> list[str]:
    """Return the names of modules that somebody has put into ``eval()`` within a module that is in ``train()``.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1).eval()); in_eval(model)
    ['1']
    >>> in_eval(model.eval())
    []
    """
    return [name for name, each in module.named_modules() if not each.training] if module.training else []


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def _parameter(whole: nn.Module, name: str, user: int) -> nn.Parameter:
    try:
        return whole.get_parameter(name)
    except AttributeError as e:
        raise UsageError(
            f"layer {user} is tied to '{name}', which is no parameter of the model",
            hint="layer number and name, as in '0.weight'",
        ) from e


def _is_plain_list(module: nn.Module) -> TypeGuard[nn.Sequential | nn.ModuleList]:
    """Return whether a module only runs its items in order. One with a ``forward`` of its own may do anything."""
    return isinstance(module, nn.ModuleList) or type(module).forward is nn.Sequential.forward
