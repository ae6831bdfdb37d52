"""A policy around anyone's training loop: hooks on the optimizer's step do what a ``Run`` does by itself."""

from __future__ import annotations

import math
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from holdfast.errors import UsageError
from holdfast.sync.begin import CPU, agree, copy_from_first
from holdfast.sync.exchange import Averaging, Ballots
from holdfast.sync.peers import DISTANCE_TAG, Peers, TorchPeers
from holdfast.sync.policy import Context, Decision, Policy, refuse_talking_layers
from holdfast.sync.replica import Pending, Replica
from holdfast.sync.report import Report, Totals, report_of
from holdfast.sync.ssp import SSP, Pushes

TOGETHER = Decision(synchronise=True, reason="all make this step together")
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

    ``last`` tells what became of the last step, ``totals`` of all. At the begin the model and the optimizer's state
    become rank 0's everywhere (learning rates and such stay as they are), at the end all become their mean, unless
    they are equal already. All must make the same number of steps: data that runs out sooner on one, or a
    ``GradScaler`` that skips a step of one, leaves the others waiting.
    """

    def __init__(
        self, policy: Policy, model: nn.Module, optimizer: torch.optim.Optimizer, peers: Peers, context: Context
    ) -> None:
        self.last = Report(synchronised=True, reason="replicas begin equal")
        self.totals = Totals()
        self.step = 0
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
        self._ballots, self._distances = Ballots(peers), Ballots(peers, DISTANCE_TAG)
        self._pending: Pending | None = None
        self._pushes: Pushes | None = None
        self._asked = -1  # the step for which has been decided what comes before its update
        self._decision: Decision | None = None  # which is this
        self._prepared: Report | None = None  # what has been done of it
        self._clipped: list[tuple[torch.Tensor | None, int]] | None = None  # gradients as ``clip`` has left them
        self._equal_at = 0  # after which step replicas were equal in everything
        self._sent = 0
        self._hooks: list[Any] = []

    def __enter__(self) -> Loop:
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
        self._ballots.drop()
        self._distances.drop()

    def _leave(self, error: BaseException | None) -> None:
        if isinstance(self._peers, TorchPeers):
            if error is not None:
                self._peers.give_up(f"left by {type(error).__name__}")
            self._peers.close()

    # --- a step ----------------------------------------------------------------------------------

    def clip(self, most: float) -> torch.Tensor:
        """Clips the norm of the gradients, as ``clip_grad_norm_`` does, but after the policy has seen them.

        Where gradients are averaged, their mean is clipped. Clipped ones would hide how much they change.
        """
        self._prepare()
        norm = nn.utils.clip_grad_norm_(self._replica.parameters, most)
        gradients = (parameter.grad for parameter in self._replica.parameters)
        self._clipped = [(gradient, 0 if gradient is None else gradient._version) for gradient in gradients]
        return norm

    def _are_clipped(self) -> bool:
        """Whether gradients are still those that ``clip`` has left: the step may have been skipped after it."""
        if self._clipped is None:
            return False
        now = zip(self._clipped, self._replica.parameters, strict=True)
        return all(old is p.grad and (old is None or old._version == version) for (old, version), p in now)

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(callable(value) for value in (*args[1:], *kwargs.values())):
            raise UsageError("step(closure) makes gradients where nobody can see them", hint="backward() before step()")
        self._prepare()

    def _prepare(self) -> None:
        """With this replica's gradients, before its update: decides once a step, and averages whatever is new."""
        if self._are_clipped():
            return
        if any(parameter.requires_grad for parameter in self._frozen):
            raise UsageError("a parameter was unfrozen inside the loop", hint="a loop of its own, from there on")
        if self._asked != self.step:
            self._asked, self._decision = self.step, self._decide_before()
        if self._decision is not None and self._decision.synchronise:
            self._prepared = self._average_gradients(self._decision)
        elif self._decision is not None:
            self._prepared = report_of(self._decision, False)

    def _decide_before(self) -> Decision | None:
        """What is to be done with the gradients; None: whatever is to be done comes after the update."""
        if self._policy.together(self.step):
            return TOGETHER
        ballot = self._replica.observe(self.step)
        if self._pending is None and ballot:
            self._ballots.cast(self.step, ballot)
        if isinstance(self._policy, SSP) and self._pushes is None:
            self._pushes = Pushes(self._peers, self._replica.parameters, staleness=self._policy.staleness)
        if self._policy.aggregate == "gradients":
            return self._replica.decision(self.step, self._ballots) or NOTHING
        return None

    def _average_gradients(self, decision: Decision) -> Report:
        averaging = Averaging(self._peers, self._replica.gradients(), beside=False)
        self._replica.set_gradients(averaging.finish())
        self._sent += averaging.sent
        return report_of(decision, True, sent=averaging.sent)

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """This replica has made its update."""
        together = self._policy.together(self.step)
        self.step += 1
        report, self._prepared, self._clipped = self._prepared, None, None
        if together:
            self._replica.begin(self.step)
            self._equal_at = self._equal_at if self._replica.has_statistics else self.step
        elif report is not None and report.synchronised:
            self._replica.tracker.synchronised(self.step, self._replica.parameters)
        self.last = report or self._act()
        self.totals.count(self.last, sent=self.sent)

    def _act(self) -> Report:
        """What has been decided is done."""
        if self._pushes is not None:
            pushed = self._pushes.exchange()
            self._sent += pushed
            return report_of(self._replica.decision(self.step - 1, self._ballots) or NOTHING, False, sent=pushed)
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
        self._asked, self._clipped = -1, None  # what a policy has seen before an update is of other parameters
        decision = Decision(synchronise=True, reason=reason)
        self.last = self._take_over(self._begin(decision, full=True), full=True)
        self._equal_at = self.step
        self.totals.count(self.last, sent=self.sent, step=False)
        return self.last

    def _begin(self, decision: Decision, *, full: bool, overlap: int = 0) -> Pending:
        if full or self._policy.optimizer_state == "average":
            agree(self._distances, self.step, self._replica.form(full=full))
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
