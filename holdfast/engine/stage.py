"""One stage of a pipeline, as long as a generation lasts: its neighbours, and the micro-batches under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from holdfast.cluster import tags
from holdfast.cluster.group import Group
from holdfast.engine.boundary import unshared
from holdfast.engine.pipe import Inbox, Outbox, describe
from holdfast.errors import Broken
from holdfast.log.record import Message, Recorder
from holdfast.plan.layout import Layout, Role

WINDOW = 4  # micro-batches that may be under way between two stages while evaluating


@dataclass(frozen=True, kw_only=True)
class Post:
    """A worker's place in its pipeline. Without one it is there for the votes, and to take over."""

    role: Role
    stages: int
    before: int | None  # the rank of the stage before
    behind: int | None  # and of the stage behind

    @property
    def is_first(self) -> bool:
        return self.before is None

    @property
    def is_last(self) -> bool:
        return self.behind is None


def post_of(layout: Layout, rank: int) -> Post | None:
    """Where a rank stands.

    >>> from holdfast.plan.layout import side_by_side
    >>> post_of(side_by_side(3, 2), 1)
    Post(role=Role(pipeline=1, stage=0, layers=range(0, 3)), stages=1, before=None, behind=None)
    """
    role = layout.role(rank)
    if role is None:
        return None
    ranks = layout.lines[role.pipeline].ranks
    return Post(
        role=role,
        stages=len(ranks),
        before=ranks[role.stage - 1] if role.stage else None,
        behind=ranks[role.stage + 1] if role.stage + 1 < len(ranks) else None,
    )


@dataclass(frozen=True, kw_only=True)
class UnderWay:
    """What a stage keeps of a micro-batch between its forward and its backward pass."""

    leaves: list[Tensor]  # what came in, cut off from the stage before
    given: list[Tensor]  # what went out, or the loss
    sent: list[Any]


class Incoming(Protocol):
    """Where values come from, in order."""

    def take(self) -> Any: ...

    def close(self) -> None: ...


class Outgoing(Protocol):
    """Where values go. Returns what must be kept until they are known to have arrived."""

    def send(self, message: Message) -> list[Any]: ...


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """What a stage has to do with others: None where the pipeline begins or ends."""

    inputs: Incoming | None = None
    gradients: Incoming | None = None
    outputs: Outgoing | None = None
    back: Outgoing | None = None


def connect(group: Group, post: Post, device: torch.device) -> Neighbours:
    """The stages before and behind, as long as a generation lasts."""
    before, behind = post.before, post.behind
    inputs = None if before is None else Inbox(group, before, tags.FORWARD, device)
    try:
        gradients = None if behind is None else Inbox(group, behind, tags.BACKWARD, device)
    except Broken:
        if inputs is not None:
            inputs.close()
        raise
    return Neighbours(
        inputs=inputs,
        gradients=gradients,
        outputs=None if behind is None else Outbox(group, behind, tags.FORWARD, device),
        back=None if before is None else Outbox(group, before, tags.BACKWARD, device),
    )


class Stage:
    """Passes micro-batches on. Knows nothing of schedules, data, or gradients' sums."""

    def __init__(self, group: Group, post: Post, neighbours: Neighbours, recorder: Recorder | None = None) -> None:
        self.post = post
        self.recorder = recorder
        self._group = group
        self._under_way: dict[int, UnderWay] = {}
        self._returned: dict[int, list[Any]] = {}  # gradients sent to the stage before that may not be there yet
        self._inputs, self._gradients = neighbours.inputs, neighbours.gradients
        self._outputs, self._back = neighbours.outputs, neighbours.back

    # --- training --------------------------------------------------------------------------------

    def forward(self, number: int, inputs: Any, compute: Callable[[Any], Any]) -> Any:
        """Micro-batch ``number`` of this pipeline: ``inputs`` are the first stage's, the others get theirs."""
        leaves: list[Tensor] = []
        if self._inputs is not None:
            arrived = self._inputs.take()
            leaves = _tensors(arrived)
            self._forget_returned(number)
            inputs = _copies(arrived)  # because a layer may write into its input
        output = compute(inputs)
        given, sent = _tensors(output), []
        if self._outputs is not None:
            message = describe(output)
            if self.recorder is not None:
                self.recorder.forward(self.post.role.layers.stop, number, message, given)
            sent = self._outputs.send(message)
        self._under_way[number] = UnderWay(leaves=leaves, given=given, sent=sent)
        return output

    def backward(self, number: int, weight: float, *, skip: bool = False) -> None:
        """``weight`` is the gradient of the loss; a stage that is not the last gets what came out of the next."""
        work = self._under_way.pop(number)
        if self._gradients is None:
            gradients: list[Tensor | None] = [torch.full_like(work.given[0], weight)]
        else:
            gradients = self._gradients.take()  # which also proves that what was sent has arrived
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
        """The stage before gave this only after it had taken the gradients that come earlier in its schedule."""
        ahead = self.post.stages - self.post.role.stage
        for known in [n for n in self._returned if n < number - ahead]:
            del self._returned[known]

    # --- evaluating ------------------------------------------------------------------------------

    def evaluate(self, number: int, inputs: Any, compute: Callable[[Any], Any]) -> Any:
        """As ``forward``, with nothing to come back but the word that it was taken."""
        if self._inputs is not None and self._back is not None:
            inputs = self._inputs.take()
            self._returned.pop(number - WINDOW, None)  # taken before this was sent
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
        """After the last micro-batch: all that was given is taken, so nothing is left for the next to stumble over."""
        if self._gradients is not None:
            for _ in range(len(self._under_way)):
                self._gradients.take()
            self._under_way.clear()
        self.finish()

    def finish(self) -> None:
        """All is done: what was sent and may not have arrived is kept until a vote proves it."""
        for work in self._under_way.values():
            self._group.keep(work.sent)
        for sent in self._returned.values():
            self._group.keep(sent)
        self._under_way.clear()
        self._returned.clear()

    def close(self) -> None:
        """The generation is over: returns when nobody writes any more into what was to be received."""
        self.finish()
        for inbox in (self._inputs, self._gradients):
            if inbox is not None:
                inbox.close()


def _tensors(value: Any) -> list[Tensor]:
    """The distinct tensors in a value, in the order in which ``describe`` sends them."""
    return list({id(leaf): leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)}.values())


def _copies(value: Any) -> Any:
    known: dict[int, Tensor] = {}

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in known:
            known[id(leaf)] = leaf.clone()
        return known[id(leaf)]

    return tree_map(copy, value)
