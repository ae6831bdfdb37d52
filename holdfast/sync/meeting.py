"""Operations that all replicas carry out together: a meeting, and an average of gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from holdfast.cluster import faults
from holdfast.sync.exchange import Averaging
from holdfast.sync.owner import Owner
from holdfast.sync.peers import Peers
from holdfast.sync.ssp import SSP

if TYPE_CHECKING:
    from holdfast.sync.driver import Driver


class Meeting:
    """The operation in which all replicas become their mean.

    An attempt returns this replica's part of the mean squared distance from the mean.
    """

    kind: Literal["sync"] = "sync"
    asked = ""
    shares = None

    def __init__(self, driver: Driver, owner: Owner, *, full: bool) -> None:
        self.step = driver.step
        self.sent = 0  # bytes of averages, all attempts together
        self._driver, self._owner, self._full = driver, owner, full
        self._mean: list[torch.Tensor] | None = None
        self._since: list[torch.Tensor] | None = None  # the contribution to a mean that was begun some steps ago
        self._everything = full

    def attempt(self, group: Peers) -> list[float]:
        driver = self._driver
        driver.ballots.drop()  # they are about parameters that are replaced now
        # Replicas that come from another generation must send the same as those that were in the middle of a meeting.
        full = self._everything = self._full or driver.catching_up
        self._owner.agree(group, full=full)
        pending, self._since = driver.pending, None
        if pending is not None:
            mean = self._finish(pending.averaging)
            contribution = self._since = pending.snapshot
        if pending is None or full or pending.due != self.step:  # not due: its result is too old
            contribution, self._since = driver.replica.contribution(full=full), None
            given = contribution
            if isinstance(driver.policy, SSP):  # updates are added up, so this replica gives others than its parameters
                driver.gather_pushes(group)
                given = driver.replica.contribution(full=full)
            averaging = driver.averaging(group, given, full=full)
            faults.point("average")
            mean = self._finish(averaging)
        faults.point("averaged")
        self._mean = mean
        return [driver.replica.distance(mean, contribution) / group.size]

    def _finish(self, averaging: Averaging) -> list[torch.Tensor]:
        mean = averaging.finish()
        self.sent += averaging.sent
        self._driver.sent += averaging.sent
        return mean

    def apply(self, value: float) -> None:
        assert self._mean is not None
        self._driver.adopt(self._mean, full=self._everything, since=self._since)
        self.drop()

    def drop(self) -> None:
        self._mean = self._since = None


class GradientAverage:
    """The operation in which the mean of all gradients becomes everybody's, before the update.

    If the peers have changed before it is done, it is a full meeting instead: ``meeting``.
    """

    kind: Literal["sync"] = "sync"
    asked = ""
    shares = None

    def __init__(self, driver: Driver, owner: Owner) -> None:
        self.step = driver.step
        self.sent = 0  # bytes
        self.meeting: Meeting | None = None
        self._driver, self._owner = driver, owner
        self._mean: list[torch.Tensor] | None = None

    def attempt(self, group: Peers) -> list[float]:
        self.meeting = None
        if self._driver.catching_up:
            self.meeting = Meeting(self._driver, self._owner, full=True)
            return self.meeting.attempt(group)
        averaging = Averaging(group, self._driver.replica.gradients(), beside=False)
        faults.point("average")
        self._mean = averaging.finish()
        faults.point("averaged")
        self.sent += averaging.sent
        self._driver.sent += averaging.sent
        return []

    def apply(self, value: float) -> None:
        if self.meeting is not None:
            self.meeting.apply(value)
            return
        assert self._mean is not None
        self._driver.replica.set_gradients(self._mean)
        self.drop()
        self._owner.gradients_averaged()

    def drop(self) -> None:
        self._mean = None
        if self.meeting is not None:
            self.meeting.drop()
