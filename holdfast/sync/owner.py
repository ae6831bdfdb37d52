"""The contract between a driver of replicas and its owner, the training that the replica is part of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from holdfast.sync.peers import Peers


class SyncOperation(Protocol):
    """Something that all replicas do together: an ``Operation`` that a user's own loop can carry out too."""

    @property
    def kind(self) -> Literal["sync"]:
        """Kind of operation, by which workers notice that they vote on different ones."""

    @property
    def step(self) -> int:
        """Number of steps that the replicas have made before it."""

    @property
    def asked(self) -> str:
        """Nothing more: all are asked for the same."""

    @property
    def shares(self) -> None:
        """Its values are few."""

    def attempt(self, group: Peers) -> list[float]:
        """Exchange, and change nothing that lasts. Return values that are to be added up over all replicas."""

    def apply(self, value: float) -> None:
        """Make the result of the last attempt this replica's. ``value`` is the sum of all replicas' values."""

    def drop(self) -> None:
        """Forget the result of the last attempt."""


class Owner(Protocol):
    """The training that a driver is part of, as the driver needs it."""

    @property
    def step(self) -> int:
        """Number of steps that this replica has made."""

    @property
    def sent(self) -> int:
        """Bytes that this replica has sent so far, for whatever reason: for the totals."""

    def commit(self, operation: SyncOperation) -> float:
        """Carry an operation through on all replicas; return the sum of everybody's values."""

    def agree(self, peers: Peers, *, full: bool) -> None:
        """Raise ``UsageError`` if replicas would send different tensors: Gloo ends the process if sizes differ."""

    def adopted(self, *, full: bool, equal: bool) -> None:
        """Note that this replica has adopted a mean. ``equal``: replicas have not gone on since it was begun."""

    def gradients_averaged(self) -> None:
        """Note that the mean of the gradients is in place: the update may be made."""

    def inherited(self, peers: Peers, pushed_among: Peers | None, heard: Mapping[int, int]) -> list[int]:
        """Return the lost ranks in ``pushed_among`` whose updates this replica adds to the mean, after a loss.

        ``heard``: how many updates of each rank have come here. All replicas call it at the same point.
        """
