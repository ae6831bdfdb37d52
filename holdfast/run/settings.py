"""``Settings``: the arguments of a ``Run``, checked against each other before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import nn

from holdfast.checks import function, near, takes, to_norm, to_whole
from holdfast.data.lanes import StreamOrder
from holdfast.data.order import Order
from holdfast.data.source import Data
from holdfast.data.stream import Stream
from holdfast.engine.engine import Loss, Weight
from holdfast.engine.layers_of import CutModel
from holdfast.engine.model import Layers
from holdfast.engine.numerics import Numerics
from holdfast.engine.update import MakeOptimizer, Schedule
from holdfast.errors import UsageError
from holdfast.log.log import LogSettings
from holdfast.plan.placement import Placement
from holdfast.recovery.resume import Checkpoints
from holdfast.sync.policy import Policy

GROUPS = {  # what a field is given by
    "data=holdfast.Data(dataset, {}=…)": Data,
    "numerics=holdfast.Numerics({}=…)": Numerics,
    "placement=holdfast.Placement({}=…)": Placement,
    "checkpoint=holdfast.Checkpoints(folder=…, {}=…)": Checkpoints,
}
IN_LOOP = {  # what a ``Loop`` has in its body
    "loss": "step.backward(loss) in the body of the loop",
    "clip_norm": "step.commit(clip_norm=…)",
    "layers": "model=…, or a Run, which cuts layers into stages",
    "placement": "a Run, which cuts layers into stages",
}
SEEDS = 2**64  # a seed is below this number, as one for torch.manual_seed is


@dataclass(frozen=True, kw_only=True, eq=False)
class Settings:
    """The arguments of a ``Run``, with short forms written out. ``Run`` says what each is.

    A group of settings checks its own fields; what they demand of each other is checked here. Raises ``UsageError``.
    """

    model: nn.Module | None
    layers: Layers | None
    loss: Loss | None  # None: the script computes it, in a ``Loop``
    weight: Weight | None
    optimizer: MakeOptimizer
    data: Data
    global_batch: int
    micro_batch: int
    seed: int
    schedule: Schedule | None
    clip_norm: float | None
    numerics: Numerics
    placement: Placement
    checkpoint: Checkpoints | None
    state: Mapping[str, Any]
    sync: Literal["every-step"] | Policy

    def __post_init__(self) -> None:
        self._check_functions()
        self._check_numbers()
        if self.sync != "every-step" and not isinstance(self.sync, Policy):
            raise UsageError(
                f"sync={self.sync!r} is not known", hint="'every-step', or a policy: SelSync(target=0.1), LocalSGD …"
            )
        self._check_batches()
        self._check_policy()
        if (
            self.checkpoint is not None
            and self.checkpoint.trainable_only
            and (self.stages != 1 or self.log is not None)
        ):
            raise UsageError(
                "trainable_only=True is for workers that hold the whole model: the script makes its frozen weights",
                hint="leave out stages=, memory= and log=, or trainable_only",
            )
        if self.numerics.is_eager and self.clip_norm is not None:
            raise UsageError(
                "clip_norm needs all gradients before the first update", hint="leave it out, or update='commit'"
            )
        if self.numerics.is_eager and self.weight is not None:
            raise UsageError(
                "weight= needs all weights before the first update", hint="leave it out, or update='commit'"
            )

    @property
    def policy(self) -> Policy | None:
        """The rule of when replicas talk; None: at every step."""
        return self.sync if isinstance(self.sync, Policy) else None

    @property
    def check_every(self) -> int | Literal["auto"] | None:
        """Steps between two comparisons of what workers hold. Replicas that train apart are not compared."""
        return self.numerics.check_every if self.policy is None else None

    @property
    def stages(self) -> int | Sequence[int] | None:
        """How pipelines are cut. Under a policy every worker holds the whole model."""
        return self.placement.cut if self.policy is None else 1

    @property
    def log(self) -> LogSettings | None:
        """The log's settings; None: no log."""
        return None if self.checkpoint is None else LogSettings.of(self.checkpoint.log)

    @property
    def order(self) -> Order | StreamOrder:
        """The order of the run's samples."""
        return self.data.order(global_batch=self.global_batch, micro_batch=self.micro_batch, seed=self.seed)

    def _check_functions(self) -> None:
        self._check_model()
        if self.loss is not None:
            function("loss", self.loss, hint="as in nn.functional.mse_loss")
            takes("loss", self.loss, *(("model", "batch") if self.model is not None else ("output", "target")))
            self._check_parameters_of_loss()
        function("optimizer", self.optimizer, hint="as in lambda params: torch.optim.AdamW(params, lr=3e-4)")
        takes("optimizer", self.optimizer, "params")
        if self.weight is not None:
            function("weight", self.weight, hint="as in lambda batch: (batch['labels'] != -100).sum()")
            takes("weight", self.weight, "batch")
        if self.schedule is not None:
            function("schedule", self.schedule, hint="None, or as in lambda step: 0.1 * 0.9**step")

    def _check_model(self) -> None:
        if (self.model is None) == (self.layers is None):
            raise UsageError(
                "a run has a model= or layers=, and not both",
                hint="model= with loss(model, batch), layers= with loss(output, target)",
            )
        if self.model is None:
            if not isinstance(self.layers, nn.Module | Iterable | CutModel):
                raise UsageError("layers must be torch modules", hint="a module, nn.Sequential or a list of modules")
            return
        if not isinstance(self.model, nn.Module):
            raise UsageError("model must be a torch module", hint="a list of modules is layers=")
        if isinstance(self.loss, nn.Module) or getattr(self.loss, "__module__", "") == "torch.nn.functional":
            raise UsageError(
                "with model= the loss is called with the model and a batch",
                hint="loss=lambda model, batch: …, or layers= with loss(output, target)",
            )
        if self.placement.cut != 1:
            raise UsageError(
                "a model that its loss calls cannot be cut into stages", hint="layers= with loss(output, target)"
            )

    def _check_parameters_of_loss(self) -> None:
        """Refuse a loss that is a module with weights of its own: nothing would train them."""
        if not isinstance(self.loss, nn.Module):
            return
        given = [self.layers] if isinstance(self.layers, nn.Module) else self.layers
        layers = [layer for layer in given if isinstance(layer, nn.Module)] if isinstance(given, list | tuple) else []
        trained = {id(parameter) for layer in layers for parameter in layer.parameters()}
        for name, parameter in self.loss.named_parameters():
            if parameter.requires_grad and id(parameter) not in trained:
                raise UsageError(
                    f"'{name}' is a parameter of the loss, which a run does not train",
                    hint="model= with a module that has both, and loss(model, batch); or loss.requires_grad_(False)",
                )

    def _check_numbers(self) -> None:
        for name, least in {"global_batch": 1, "micro_batch": 1, "seed": 0}.items():
            # As ints: random numbers depend on the text of the seed, and that of a NumPy number is another.
            object.__setattr__(self, name, to_whole(name, getattr(self, name), least=least))
        if self.seed >= SEEDS:
            raise UsageError(f"seed={self.seed} is too large", hint="below 2**64")
        to_norm("clip_norm", self.clip_norm)

    def _check_batches(self) -> None:
        batch, micro = self.global_batch, self.micro_batch
        if batch % micro:
            nearest = max(1, round(batch / micro)) * micro
            raise UsageError(
                f"global_batch={batch} is not a multiple of micro_batch={micro}",
                hint=f"global_batch={nearest} would be",
            )
        if isinstance(self.data.dataset, Stream):
            self._check_stream()
            return
        samples = len(self.data.dataset)
        if not samples:
            raise UsageError("the data set is empty", hint="check the path or the filter that it is made with")
        if samples < batch:
            possible = f"global_batch={samples // micro * micro}" if samples >= micro else f"micro_batch={samples}"
            raise UsageError(
                f"the data set has {samples} samples, fewer than global_batch={batch}", hint=f"{possible} or less"
            )

    def _check_stream(self) -> None:
        """Refuse what a stream, whose samples have no numbers, cannot do."""
        if self.policy is not None:
            raise UsageError(
                f"{type(self.policy).__name__} trains replicas apart, and a stream is read by all together",
                hint="a map-style data set, or sync='every-step'",
            )
        if self.log:
            raise UsageError(
                "a log computes past steps again, and a stream cannot be read backwards",
                hint="leave out log=, or a map-style data set",
            )

    def _check_policy(self) -> None:
        """Refuse what a policy's replicas, which hold the whole model and train apart, cannot do."""
        policy, placement = self.policy, self.placement
        if policy is None:
            if self.data.partition is not None:
                raise UsageError(
                    "a partition says what each replica reads, and with sync='every-step' all read one batch",
                    hint="give a policy: sync=SelSync(target=0.1), or SelSync(delta=0) for every step",
                )
            return
        if placement.cut != 1:
            raise UsageError(
                f"{type(policy).__name__} is a policy for workers that hold the whole model",
                hint="leave out placement=, or sync='every-step'",
            )
        if isinstance(self.numerics.check_every, int):
            raise UsageError(
                f"check_every={self.numerics.check_every}: under {type(policy).__name__} replicas differ",
                hint="leave it out, or sync='every-step'",
            )
        if self.numerics.is_eager or self.log:
            raise UsageError(
                f"{type(policy).__name__} cannot serve update='eager' or a log: replicas update themselves",
                hint="leave them out, or sync='every-step'",
            )


def place_in_loop(name: str, known: Sequence[str]) -> str:
    """Return a hint for a name that a ``Loop`` does not know, as ``place_of`` does for a ``Run``.

    >>> place_in_loop("clip_norm", ["model"])
    'step.commit(clip_norm=…)'
    """
    return IN_LOOP.get(name) or place_of(name, known)


def place_of(name: str, known: Sequence[str]) -> str:
    """Return a hint for a name that a ``Run`` does not know: where it belongs, or what it may be meant for.

    >>> place_of("collate", ["loss"])
    'data=holdfast.Data(dataset, collate=…)'
    """
    places = [where.format(name) for where, group in GROUPS.items() if name in {each.name for each in fields(group)}]
    return places[0] if places else near(name, known)
