"""A policy around a user's own training loop: hooks on ``optimizer.step()`` own a ``Driver``."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from holdfast.cluster import tags
from holdfast.errors import UsageError
from holdfast.sync.driver import Driver
from holdfast.sync.exchange import Ballots
from holdfast.sync.owner import SyncOperation
from holdfast.sync.peers import Peers, TorchPeers
from holdfast.sync.policy import Context, Decision, Policy, refuse_talking_layers, refuse_wrapped
from holdfast.sync.replica import Replica
from holdfast.sync.report import Report, Totals
from holdfast.sync.start import CPU, agree, copy_from_first

TOGETHER = Decision(synchronise=True, reason="all make this step together")


def around(
    policy: Policy,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    group: dist.ProcessGroup | None = None,
    seed: int = 0,
    steps_per_epoch: int | None = None,
) -> LoopTraining:
    """Return the context manager that ``Policy.around`` documents."""
    check(model, optimizer)
    return LoopTraining(
        policy, model, optimizer, TorchPeers(group), Context(seed=seed, steps_per_epoch=steps_per_epoch)
    )


def check(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise ``UsageError`` for a model that exchanges by itself, and for parameters that would never be averaged."""
    refuse_wrapped(model)
    refuse_talking_layers(model)
    known = {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"]):
        raise UsageError("the optimizer has parameters that are not the model's", hint="one model for all of them")


class LoopTraining:
    """One replica in a user's own loop. Inside the ``with`` block each ``optimizer.step()`` follows the policy.

    ``last`` is the report of the last step or average, ``totals`` counts all steps, ``step`` is their number. At the
    begin of the block the model and the optimizer's state become rank 0's everywhere (settings such as learning rates
    stay as they are). At its end all replicas become their mean, unless they are equal already.

    All replicas must make the same number of steps: if the data of one runs out sooner, or a ``GradScaler`` skips a
    step of one, the others wait for ever. ``PeerLost`` is raised when another process has gone.
    """

    def __init__(
        self, policy: Policy, model: nn.Module, optimizer: torch.optim.Optimizer, peers: Peers, context: Context
    ) -> None:
        self.last = Report(synchronised=True, reason="replicas begin equal")
        self._step = 0
        self._policy, self._peers, self._optimizer = policy, peers, optimizer
        self._model = model
        self._frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        self._replica = Replica(
            policy,
            parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
            buffers=model.buffers,
            optimizer=optimizer,
            context=context,
            device=CPU,
        )
        self._driver = Driver(policy, self._replica, self, peers)
        self._distances = Ballots(peers, tags.DISTANCE)
        self._asked = -1  # the step for which ``_decision`` was made
        self._decision: Decision | None = None  # about the gradients of this step, before its update
        self._averaged: Report | None = None  # of the average of this step's gradients, if there was one
        self._clipped: list[tuple[torch.Tensor | None, int]] | None = None  # gradients and versions after ``clip``
        self._equal_at = 0  # the step after which replicas were equal in everything
        self._hooks: list[Any] = []

    def __enter__(self) -> LoopTraining:
        everything = [*self._model.parameters(), *self._model.buffers()]
        try:
            agree(self._distances, 0, [(tuple(tensor.shape), tensor.dtype) for tensor in everything])
            copy_from_first(self._peers, everything, self._optimizer)
        except BaseException as e:
            self._leave(e)
            raise
        self._replica.begin(0)
        self._hooks = [
            self._optimizer.register_step_pre_hook(self._before),
            self._optimizer.register_step_post_hook(self._after),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        try:
            if error is None:
                self._end()
        except BaseException as e:
            error = e
            raise
        finally:
            self._leave(error)

    def _end(self) -> None:
        if self._equal_at != self.step:
            self.average("the end")
        self._driver.ballots.drop()
        self._distances.drop()

    def _leave(self, error: BaseException | None) -> None:
        if isinstance(self._peers, TorchPeers):
            if error is not None:
                self._peers.give_up(f"left by {type(error).__name__}")
            self._peers.close()

    # --- for users -------------------------------------------------------------------------------

    @property
    def totals(self) -> Totals:
        """Steps, synchronisations and bytes of this replica so far."""
        return self._driver.totals

    def average(self, reason: str = "asked for") -> Report:
        """Make all replicas equal now, optimizer state too; return the report, which has ``reason`` in it.

        All replicas must call it after the same step, as before an evaluation. Raises ``UsageError`` if they hold
        different tensors, ``PeerLost`` if one has gone.
        """
        self._asked, self._clipped = -1, None  # what the policy saw before this step's update is of other parameters
        self.last = self._driver.meet(Decision(synchronise=True, reason=reason), full=True)
        self._driver.count(self.last, step=False)
        return self.last

    def clip(self, most: float) -> torch.Tensor:
        """Clip the norm of all gradients to ``most``, and return the norm before, as ``clip_grad_norm_`` does.

        Call it between ``backward()`` and ``step()`` instead of torch's function: the policy sees the gradients
        first, because clipped ones would hide how much they change. Where gradients are averaged, the mean is clipped.
        """
        self._prepare()
        norm = nn.utils.clip_grad_norm_(self._replica.parameters, most)
        gradients = (parameter.grad for parameter in self._replica.parameters)
        self._clipped = [(gradient, 0 if gradient is None else gradient._version) for gradient in gradients]
        return norm

    # --- a step ----------------------------------------------------------------------------------

    def _are_clipped(self) -> bool:
        """Whether gradients are still those that ``clip`` left. They are not if the step was skipped after it."""
        if self._clipped is None:
            return False
        now = zip(self._clipped, self._replica.parameters, strict=True)
        return all(old is p.grad and (old is None or old._version == version) for (old, version), p in now)

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(callable(value) for value in (*args[1:], *kwargs.values())):
            raise UsageError("step(closure) makes gradients where nobody can see them", hint="backward() before step()")
        self._prepare()

    def _prepare(self) -> None:
        """Decide about this replica's gradients, once a step, and average gradients that are new."""
        if self._are_clipped():
            return
        if any(parameter.requires_grad for parameter in self._frozen):
            raise UsageError("a parameter was unfrozen inside the loop", hint="a loop of its own, from there on")
        if self._asked != self.step:
            self._asked = self.step
            self._decision = TOGETHER if self._policy.together(self.step) else self._driver.before_update()
        if self._decision is not None and self._decision.synchronise:
            self._averaged = self._driver.average_gradients(self._decision)

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Do what the policy decides after the update, and report."""
        together = self._policy.together(self.step)
        self._step += 1
        report, self._averaged, self._clipped = self._averaged, None, None
        if together:
            self._driver.made_together()
            # Statistics of forward passes, as BatchNorm's, differ even if all parameters are equal.
            self._equal_at = self._equal_at if self._replica.has_statistics else self.step
        elif report is not None:
            self._replica.tracker.synchronised(self.step, self._replica.parameters)
        self.last = report or self._driver.act(self._driver.after_update())
        self._driver.count(self.last)

    # --- the contract with the driver ------------------------------------------------------------

    @property
    def step(self) -> int:
        """Number of steps that this replica has made."""
        return self._step

    @property
    def sent(self) -> int:
        """Bytes that this replica has sent since the begin of the block."""
        return self._driver.sent + self._driver.ballots.sent + self._distances.sent

    def commit(self, operation: SyncOperation) -> float:
        """Attempt and apply an operation at once: nobody can be lost here. Return the sum of all values."""
        values, total = operation.attempt(self._peers), 0.0
        if values:
            self._distances.cast(self.step, values)
            (total,) = self._distances.sums(self.step)
        operation.apply(total)
        return total

    def agree(self, peers: Peers, *, full: bool) -> None:
        """Raise ``UsageError`` if replicas' optimizer states differ in form.

        Parameters were compared at the begin, and a pending exchange when it began.
        """
        if full or (self._policy.optimizer_state == "average" and self._driver.pending is None):
            agree(self._distances, self.step, self._replica.form(full=full))

    def adopted(self, *, full: bool, equal: bool) -> None:
        if full:
            self._equal_at = self.step

    def gradients_averaged(self) -> None:
        """Do nothing: the optimizer's step, whose hook has asked for the average, goes on."""

    def inherited(self, peers: Peers, pushed_among: Peers | None, heard: Mapping[int, int]) -> list[int]:
        raise AssertionError("a loop of a user's own does not go on after a loss")
