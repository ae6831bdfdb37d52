"""A policy around anyone's training loop: hooks on the optimizer's step do what a ``Run`` does by itself."""

from __future__ import annotations

import math
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from holdfast.errors import UsageError
from holdfast.sync.exchange import Averaging, Ballots, Packed
from holdfast.sync.peers import AVERAGE_TAG, DISTANCE_TAG, Peers, TorchPeers
from holdfast.sync.policy import Context, Decision, Policy, refuse_talking_layers
from holdfast.sync.replica import Pending, Replica
from holdfast.sync.report import Report, Totals, report_of
from holdfast.sync.ssp import SSP, Pushes

CPU = torch.device("cpu")  # Gloo sends from there
NOTHING = Decision(synchronise=False, reason="nothing to decide on")


def around(
    policy: Policy,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    group: dist.ProcessGroup | None = None,
    seed: int = 0,
    steps_per_epoch: int | None = None,
) -> Loop:
    """A loop over the processes of a group of ``torch.distributed``'s (None: the default one)."""
    check(model, optimizer)
    return Loop(policy, model, optimizer, TorchPeers(group), Context(seed=seed, steps_per_epoch=steps_per_epoch))


def check(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuses what exchanges at every step by itself, and parameters that would never be averaged."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise UsageError("the model averages its gradients at every step already", hint="give what DDP wraps")
    refuse_talking_layers(model)
    known = {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"]):
        raise UsageError("the optimizer has parameters that are not the model's", hint="one model for all of them")


class Loop:
    """Inside the ``with``, ``optimizer.step()`` is one of this replica under the policy.

    ``last`` tells what became of the last step, ``totals`` of all. At the begin all replicas become what rank 0 is,
    at the end they become their mean. All must make the same number of steps: data that runs out sooner on one, or a
    ``GradScaler`` that skips a step of one, leaves the others waiting.
    """

    def __init__(
        self, policy: Policy, model: nn.Module, optimizer: torch.optim.Optimizer, peers: Peers, context: Context
    ) -> None:
        self.last = Report(synchronised=True, reason="replicas begin equal")
        self.totals = Totals()
        self.step = 0
        self._policy, self._peers, self._optimizer = policy, peers, optimizer
        self._everything = [*model.parameters(), *model.buffers()]
        self._replica = Replica(
            policy,
            parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
            buffers=list(model.buffers()),
            optimizer=optimizer,
            context=context,
            device=CPU,
        )
        self._ballots, self._distances = Ballots(peers), Ballots(peers, DISTANCE_TAG)
        self._pending: Pending | None = None
        self._pushes: Pushes | None = None
        self._prepared: Report | None = None  # what has been done before the update in hand
        self._ready = False  # whether it has
        self._equal_at = 0  # after which step replicas were equal in everything
        self._sent = 0
        self._hooks: list[Any] = []

    def __enter__(self) -> Loop:
        self._copy_from_first()
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
        if error is None and self._equal_at != self.step:
            self.average("the end")
        if error is None:
            self._ballots.drop()
            self._distances.drop()
        if isinstance(self._peers, TorchPeers):
            if error is not None:
                self._peers.give_up(f"left by {type(error).__name__}")
            self._peers.close()

    def _copy_from_first(self) -> None:
        packed = Packed(self._everything, CPU)
        buffers = packed.read()
        others = range(1, self._peers.size)
        if self._peers.rank == 0:
            self._peers.start([(rank, buffer, AVERAGE_TAG) for rank in others for buffer in buffers], [])
            return
        self._peers.finish(self._peers.start([], [(0, buffer, AVERAGE_TAG) for buffer in buffers]))
        packed.write(buffers)

    # --- a step ----------------------------------------------------------------------------------

    def clip(self, most: float) -> torch.Tensor:
        """Clips the norm of the gradients, as ``clip_grad_norm_`` does, but after the policy has seen them.

        Where gradients are averaged, their mean is clipped. Clipped ones would hide how much they change.
        """
        self._prepare()
        return nn.utils.clip_grad_norm_(self._replica.parameters, most)

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(callable(value) for value in (*args[1:], *kwargs.values())):
            raise UsageError("step(closure) makes gradients where nobody can see them", hint="backward() before step()")
        self._prepare()

    def _prepare(self) -> None:
        """With this replica's gradients, before its update."""
        if self._ready:
            return
        self._ready = True
        if self._policy.together(self.step):
            self._prepared = self._average_gradients(Decision(synchronise=True, reason="all make this step together"))
            return
        ballot = self._replica.observe(self.step)
        if self._pending is None and ballot:
            self._ballots.cast(self.step, ballot)
        if self._policy.aggregate == "gradients":
            decision = self._replica.decision(self.step, self._ballots)
            decision = decision or NOTHING
            self._prepared = self._average_gradients(decision) if decision.synchronise else report_of(decision, False)
        if isinstance(self._policy, SSP) and self._pushes is None:
            self._pushes = Pushes(self._peers, self._replica.parameters, staleness=self._policy.staleness)

    def _average_gradients(self, decision: Decision) -> Report:
        averaging = Averaging(self._peers, self._replica.gradients(), beside=False)
        self._replica.set_gradients(averaging.finish())
        self._sent += averaging.sent
        return report_of(decision, True, sent=averaging.sent)

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """This replica has made its update."""
        together = self._policy.together(self.step)
        self.step += 1
        report, self._prepared, self._ready = self._prepared, None, False
        if together:
            self._replica.begin(self.step)
            self._equal_at = self.step
        elif report is not None and report.synchronised:
            self._replica.tracker.synchronised(self.step, self._replica.parameters)
        if self._pushes is not None:
            self._pushes.exchange()
        self.last = report or self._act()
        self.totals.count(self.last, sent=self.sent)

    def _act(self) -> Report:
        """What has been decided is done."""
        if self._pending is not None:
            if self._pending.due > self.step:
                return report_of(self._pending.decision, False, "the exchange runs beside the next steps")
            return self._take_over(self._pending)
        decision = self._replica.decision(self.step - 1, self._ballots)
        decision = decision or NOTHING
        if not decision.synchronise:
            return report_of(decision, False)
        if self._policy.overlap:
            self._pending = self._begin(decision, full=False, overlap=self._policy.overlap)
            return report_of(decision, False, "the exchange runs beside the next steps")
        return self._take_over(self._begin(decision, full=False))

    # --- averages --------------------------------------------------------------------------------

    @property
    def sent(self) -> int:
        """Bytes that this replica has sent."""
        return self._sent + self._ballots.sent + self._distances.sent

    def average(self, reason: str = "asked for") -> Report:
        """Makes all replicas equal here and now, optimizer state too. All must ask for it after the same step."""
        if self._pending is not None:  # for another time: what it finds is old
            self._pending.averaging.finish()
            self._sent += self._pending.averaging.sent
            self._pending = None
        if self._pushes is not None:
            self._pushes.close()
            self._pushes.gather(self._peers.size)
            self._pushes = None
        decision = Decision(synchronise=True, reason=reason)
        self.last = self._take_over(self._begin(decision, full=True), full=True)
        self._equal_at = self.step
        self.totals.count(self.last, sent=self.sent, step=False)
        return self.last

    def _begin(self, decision: Decision, *, full: bool, overlap: int = 0) -> Pending:
        shares = None if full else self._policy.shares(self.step, self._peers.size, self._replica.context)
        snapshot = self._replica.contribution(full=full)
        averaging = Averaging(self._peers, snapshot, shares, beside=overlap > 0)
        return Pending(averaging=averaging, snapshot=snapshot, due=self.step + overlap, decision=decision)

    def _take_over(self, pending: Pending, *, full: bool = False) -> Report:
        self._ballots.drop()  # what is under way is of before
        mean = pending.averaging.finish()
        late = pending is self._pending
        self._replica.adopt(self.step, mean, full=full, since=pending.snapshot if late else None)
        self._pending = None
        self._sent += pending.averaging.sent
        self._distances.cast(self.step, [self._replica.distance(mean, pending.snapshot) / self._peers.size])
        (spread,) = self._distances.sums(self.step)
        return report_of(pending.decision, True, sent=pending.averaging.sent, distance=math.sqrt(spread))
