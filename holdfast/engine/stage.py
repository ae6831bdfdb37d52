"""One stage of a pipeline: consecutive layers on one worker, and the micro-batches under way in them.

A stage takes a micro-batch from the stage before, computes its layers, and sends the result to the stage behind. Later
it takes the gradient of that result from the stage behind, computes its backward pass, and sends the gradient of its
input to the stage before. A stage lives as long as a generation: with other neighbours there is another stage.

Sending is asynchronous, so whatever is sent must stay in memory until it has arrived. No acknowledgements are sent for
that. Arrival follows from the order of the schedule instead: when the gradient of a result comes back, the result
must have arrived. ``UnderWay.sent`` and ``Stage._returned`` hold what is not known to have arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from holdfast.cluster import tags
from holdfast.cluster.group import Group
from holdfast.engine.boundary import tensors_in, unshared
from holdfast.engine.pipe import Inbox, Outbox, describe
from holdfast.errors import Broken
from holdfast.log.record import Message, Recorder
from holdfast.plan.layout import Layout, Role

# Micro-batches that may be under way between two stages while evaluating. In training the schedule bounds them; in an
# evaluation nothing else would stop a fast stage from sending all of them to a slow one. A few, and not one, so that no
# stage has to wait for the other after each.
WINDOW = 4


@dataclass(frozen=True, kw_only=True)
class Post:
    """A worker's place in its pipeline. A worker without one (a spare) only votes, and takes over from lost ones."""

    role: Role
    stages: int  # of the pipeline
    before: int | None  # the rank of the stage before
    behind: int | None  # and of the stage behind

    @property
    def is_first(self) -> bool:
        return self.before is None

    @property
    def is_last(self) -> bool:
        return self.behind is None


def post_of(layout: Layout, rank: int) -> Post | None:
    """Return the place of a rank in its pipeline; None for a spare worker.

    >>> from holdfast.plan.layout import side_by_side
    >>> post_of(side_by_side(3, 2), 1)
    Post(role=Role(pipeline=1, stage=0, layers=range(0, 3)), stages=1, before=None, behind=None)
    """
    role = layout.role(rank)
    if role is None:
        return None
    ranks = layout.pipelines[role.pipeline].ranks
    return Post(
        role=role,
        stages=len(ranks),
        before=ranks[role.stage - 1] if role.stage else None,
        behind=ranks[role.stage + 1] if role.stage + 1 < len(ranks) else None,
    )


@dataclass(frozen=True, kw_only=True)
class UnderWay:
    """A micro-batch between its forward and its backward pass in a stage."""

    leaves: list[Tensor]  # the input's tensors; their gradients go to the stage before
    given: list[Tensor]  # the output's tensors, or the loss: the backward pass begins here
    sent: list[Any]  # kept until the output is known to have arrived


class Incoming(Protocol):
    """A neighbour that values come from, in order: an ``Inbox``, or a log when a stage is replayed."""

    def take(self) -> Any:
        """Wait for the next value. Raises ``Broken`` if the generation ends first."""

    def close(self) -> None:
        """Return when nothing is written any more into memory that was offered to the neighbour."""


class Outgoing(Protocol):
    """A neighbour that values go to."""

    def send(self, message: Message) -> list[Any]:
        """Start to send; return what must be kept until the message is known to have arrived."""


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """The connections of a stage. None: the pipeline begins or ends here."""

    inputs: Incoming | None = None  # from the stage before
    gradients: Incoming | None = None  # of our outputs, from the stage behind
    outputs: Outgoing | None = None  # to the stage behind
    back: Outgoing | None = None  # gradients of our inputs, to the stage before


def connect(group: Group, post: Post, device: torch.device) -> Neighbours:
    """Connect a stage with its neighbours, for as long as the group's generation lasts. Raises ``Broken``."""
    before, behind = post.before, post.behind
    inputs = None if before is None else Inbox(group, before, tags.FORWARD, device)
    try:
        gradients = None if behind is None else Inbox(group, behind, tags.BACKWARD, device)
    except Broken:
        if inputs is not None:
            inputs.close()  # it has begun to receive
        raise
    return Neighbours(
        inputs=inputs,
        gradients=gradients,
        outputs=None if behind is None else Outbox(group, behind, tags.FORWARD, device),
        back=None if before is None else Outbox(group, before, tags.BACKWARD, device),
    )


class Stage:
    """Computes micro-batches and passes them on. Knows nothing of schedules, data sets, or sums of gradients.

    Whoever has a stage calls ``forward`` and ``backward`` in the order of the schedule, then ``finish``; or
    ``evaluate`` for each micro-batch, then ``evaluated``; and ``close`` when the generation is over.
    """

    def __init__(self, group: Group, post: Post, neighbours: Neighbours, recorder: Recorder | None = None) -> None:
        self.post = post
        self.recorder = recorder
        self._group = group
        self._under_way: dict[int, UnderWay] = {}  # by the number of the micro-batch, as below
        self._returned: dict[int, list[Any]] = {}  # gradients sent to the stage before that may not have arrived
        self._inputs, self._gradients = neighbours.inputs, neighbours.gradients
        self._outputs, self._back = neighbours.outputs, neighbours.back

    # --- training --------------------------------------------------------------------------------

    def forward(self, number: int, inputs: Any, compute: Callable[[Any], Any]) -> Any:
        """Compute the forward pass of micro-batch ``number`` of this pipeline; return what ``compute`` gives.

        ``inputs`` are for the first stage; the others take theirs from the stage before. ``compute`` runs the layers.
        Raises ``Broken`` if the generation ends, ``UsageError`` if the output cannot be sent.
        """
        leaves: list[Tensor] = []
        if self._inputs is not None:
            arrived = self._inputs.take()
            leaves = tensors_in(arrived)
            self._forget_returned(number)
            # Copies, because a layer may write into its input, and autograd forbids that for leaves.
            inputs = _copies(arrived)
        output = compute(inputs)
        given, sent = tensors_in(output), []
        if self._outputs is not None:
            message = describe(output)
            if self.recorder is not None:
                self.recorder.forward(self.post.role.layers.stop, number, message, given)
            sent = self._outputs.send(message)
        self._under_way[number] = UnderWay(leaves=leaves, given=given, sent=sent)
        return output

    def backward(self, number: int, weight: float, *, skip: bool = False) -> None:
        """Compute the backward pass of micro-batch ``number``.

        The last stage begins with ``weight``, the gradient of the loss; the others take the gradients of their outputs
        from the stage behind. ``skip`` is a deliberate error: nothing is computed, and tests must notice. Raises
        ``Broken`` if the generation ends.
        """
        work = self._under_way.pop(number)
        if self._gradients is None:
            gradients: list[Tensor | None] = [torch.full_like(work.given[0], weight)]
        else:
            gradients = self._gradients.take()  # they also prove that the output has arrived: ``work.sent`` may go
        pairs = zip(work.given, gradients, strict=True)
        known = [(tensor, grad) for tensor, grad in pairs if tensor.requires_grad and grad is not None]
        if known and not skip:
            torch.autograd.backward([tensor for tensor, _ in known], [grad for _, grad in known])
        if self._back is not None:
            message = describe([unshared(leaf.grad) for leaf in work.leaves])
            if self.recorder is not None:
                self.recorder.backward(self.post.role.layers.start, number, message)
            self._returned[number] = self._back.send(message)

    def _forget_returned(self, number: int) -> None:
        """Forget gradients that have arrived, now that the input of micro-batch ``number`` is here.

        In the 1F1B schedule, the stage before sends that input only after it has taken the gradients of all
        micro-batches that are more than ``ahead`` earlier: it never has more of them under way.
        """
        ahead = self.post.stages - self.post.role.stage
        for known in [n for n in self._returned if n < number - ahead]:
            del self._returned[known]

    # --- evaluating ------------------------------------------------------------------------------

    def evaluate(self, number: int, inputs: Any, compute: Callable[[Any], Any]) -> Any:
        """Compute micro-batch ``number`` without a backward pass; arguments and result as in ``forward``.

        In place of gradients, an empty message goes back for each micro-batch that was taken. A stage that has
        ``WINDOW`` micro-batches under way waits for the oldest one's.
        """
        if self._inputs is not None and self._back is not None:
            inputs = self._inputs.take()
            self._returned.pop(number - WINDOW, None)  # the stage before took it before it sent this input
            self._returned[number] = self._back.send(describe(None))
        output = compute(inputs)
        if self._outputs is not None and self._gradients is not None:
            if number >= WINDOW:
                self._gradients.take()
                del self._under_way[number - WINDOW]
            sent = self._outputs.send(describe(output))
            self._under_way[number] = UnderWay(leaves=[], given=[], sent=sent)
        return output

    # --- the end ---------------------------------------------------------------------------------

    def evaluated(self) -> None:
        """End an evaluation: wait until the stage behind has taken everything.

        Else the empty messages would be taken for gradients in the next step.
        """
        if self._gradients is not None:
            for _ in range(len(self._under_way)):
                self._gradients.take()
            self._under_way.clear()
        self.finish()

    def finish(self) -> None:
        """End a step: hand what may not have arrived to the group, which keeps it until a vote proves that it has."""
        for work in self._under_way.values():
            self._group.keep(work.sent)
        for sent in self._returned.values():
            self._group.keep(sent)
        self._under_way.clear()
        self._returned.clear()

    def close(self) -> None:
        """End the stage with its generation: return when nothing is written any more into memory of its inboxes."""
        self.finish()
        for inbox in (self._inputs, self._gradients):
            if inbox is not None:
                inbox.close()


def _copies(value: Any) -> Any:
    """Return the value with each tensor cloned; one that is there twice stays one."""
    copies = {id(tensor): tensor.clone() for tensor in tensors_in(value)}
    return tree_map(lambda leaf: copies.get(id(leaf), leaf), value)
