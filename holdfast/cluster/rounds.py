"""Rounds: scripts without a ``Run`` start together, and after a loss they all start again, as under torchrun.

Such a script talks by groups of its own, which a loss breaks for all of its workers. A worker that makes a ``Run`` says
so to its agent, and connects to the coordinator, which tells the other agents: from then on losses are survived, and
there are no more rounds. Before that nothing is trained, so a start of all takes no longer than one of the lost worker.

A round ends with its first failure. All agents then *clear* it: they kill what is left of it. When all have, the next
one begins everywhere, or the run ends. So a worker of an old round never meets one of the next.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.cluster.membership import Message
from holdfast.words import count


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A worker that failed, or a machine that is gone."""

    who: str  # "worker 0.1"
    cause: str  # as in "killed by SIGKILL"
    error: Message | None = None  # the exception that ended it; None: it was lost

    @property
    def line(self) -> str:
        """The last line of its error."""
        return "" if self.error is None else (self.error["text"].strip() or "no error text").splitlines()[-1]

    @property
    def text(self) -> str:
        """The failure in words."""
        return f"{self.who} failed ({self.line})" if self.error is not None else f"{self.who} was lost ({self.cause})"


@dataclass(frozen=True, kw_only=True)
class RoundVerdict:
    """Whether the run ends with a round that has failed, with which code, and what is said."""

    stop: bool
    text: str
    code: int = 0


def judge_round(failures: Sequence[Failure], *, before: Collection[str], number: int, left: int) -> RoundVerdict:
    """Decide what follows a round that has failed.

    ``failures``: in the order in which they were noticed. ``before``: last lines of the errors that ended the round
    before. ``number``: restarts so far. ``left``: restarts that are left.

    A loss breaks the groups of the others, so their errors count for nothing beside it. An error that comes on two
    workers, or in two rounds, would come again: it ends the run.

    >>> lost = Failure(who="worker 0.1", cause="killed by SIGKILL")
    >>> judge_round([lost], before=[], number=0, left=3).text
    'worker 0.1 was lost (killed by SIGKILL); no worker has made a Run, so all start again (restart 1 of 3)'
    >>> judge_round([lost], before=[], number=3, left=0).text
    'worker 0.1 was lost (killed by SIGKILL), and all workers have started again 3 times already (see --max-restarts)'
    """
    lost = next((failure for failure in failures if failure.error is None), None)
    if lost is None:
        first = failures[0]
        assert first.error is not None
        if first.line in before or first.line in [other.line for other in failures[1:]]:
            text = f"{first.error['text'].rstrip()}\nstopped: the same error again"
            return RoundVerdict(stop=True, code=first.error["code"] or 1, text=text)
        if left < 1:
            return RoundVerdict(stop=True, code=1, text=f"{first.error['text'].rstrip()}\nstopped: {_used_up(number)}")
    cause = lost or failures[0]
    if left < 1:
        return RoundVerdict(stop=True, code=1, text=f"{cause.text}, and {_used_up(number)}")
    again = f"all start again (restart {number + 1} of {number + left})"
    return RoundVerdict(stop=False, text=f"{cause.text}; no worker has made a Run, so {again}")


def _used_up(number: int) -> str:
    if not number:
        return "--max-restarts 0 does not let all start again"
    return f"all workers have started again {count(number, 'time')} already (see --max-restarts)"


class Rounds:
    """The coordinator's side: reports of agents go in, and ``settled`` tells when there is something to decide.

    >>> rounds = Rounds()
    >>> rounds.failed(0, Failure(who="worker 0.1", cause="killed by SIGKILL")), rounds.settled({0})
    (True, False)
    >>> rounds.cleared(0, {"round": 0, "left": 3, "address": "127.0.0.1", "master_port": 29500})
    False
    >>> rounds.settled({0}), rounds.verdict().stop, rounds.begin({0})["round"]
    (True, False, 1)
    """

    def __init__(self) -> None:
        self.number = 0  # of the present round; also how often all workers were started again
        self.clearing = False  # it has failed, and agents are killing what is left of it
        self._failures: list[Failure] = []
        self._cleared: dict[int, Message] = {}  # what each agent has said that has cleared it
        self._done: set[int] = set()  # agents whose workers have all ended well
        self._before: set[str] = set()  # last lines of the errors that ended the round before

    def _is_present(self, number: int) -> bool:
        """Whether a message is about the present round. After a restart of the coordinator, agents know the number."""
        if number > self.number:
            self.number = number
            self._forget()
        return number == self.number

    def _forget(self) -> None:
        self.clearing = False
        self._failures, self._cleared, self._done = [], {}, set()

    def failed(self, number: int, failure: Failure) -> bool:
        """Take in a failure; return whether the agents have to be told to clear the round."""
        if not self._is_present(number):
            return False
        self._failures.append(failure)
        return self._to_be_cleared()

    def _to_be_cleared(self) -> bool:
        first, self.clearing = not self.clearing, True
        return first

    def cleared(self, host: int, message: Message) -> bool:
        """Take in that an agent has cleared its round; return whether the others have to be told to.

        One that is about an earlier round has missed the present one, which goes on without it: all start again.
        """
        self._is_present(message["round"])
        if not self.clearing and message["left"] < 1:
            return False  # it has come too late: the others go on without it
        self._cleared[host] = message
        return self._to_be_cleared()

    def done(self, host: int, number: int) -> None:
        """Take in that all workers of an agent have ended well."""
        if self._is_present(number):
            self._done.add(host)

    def is_over(self, hosts: Collection[int]) -> bool:
        """Whether the workers of all these agents have ended well."""
        return bool(hosts) and not self.clearing and self._done.issuperset(hosts)

    def settled(self, hosts: Collection[int]) -> bool:
        """Whether the present round has failed, and all these agents have cleared it."""
        return self.clearing and bool(hosts) and self._cleared.keys() >= set(hosts)

    def verdict(self) -> RoundVerdict:
        """Decide what follows the present round."""
        if not self._failures:
            return RoundVerdict(stop=False, text="a machine has come; no worker has made a Run, so all start again")
        left = min(message["left"] for message in self._cleared.values())
        return judge_round(self._failures, before=self._before, number=self.number, left=left)

    def begin(self, hosts: Collection[int]) -> Message:
        """Begin the next round with these agents; return the message to them.

        The first of them has rank 0 of the script's own group, and so its address.
        """
        members = sorted(hosts)
        first = self._cleared[members[0]]
        message: dict[str, Any] = {"type": "again", "round": self.number + 1, "hosts": members}
        message |= {"address": first["address"], "master_port": first["master_port"]}
        lost = any(failure.error is None for failure in self._failures)
        self._before = set() if lost else {failure.line for failure in self._failures}
        self.number += 1
        self._forget()
        return message
