"""What a run keeps in etcd: four kinds of keys, all under ``/holdfast/<name of the run>/``.

| key | value | goes with |
|---|---|---|
| ``coordinator`` | ``Holder``: which agent holds the role, and where it listens | the agent's lease |
| ``hosts/<agent>`` | the number of that agent's host | the agent's lease |
| ``generation`` | the newest generation: number, members, incarnations, claim to the folder | the end of the run |
| ``term`` | how many coordinators there were | nothing |

The revision at which ``coordinator`` was created is the *epoch*. Every decision is a transaction that demands it, so a
coordinator that another has replaced can decide nothing.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.cluster.membership import Generation, Member

Address = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class Keys:
    """The names of a run's keys.

    >>> Keys(run="gpt").host("5e1f")
    '/holdfast/gpt/hosts/5e1f'
    """

    run: str  # --rdzv-id

    @property
    def coordinator(self) -> str:
        return f"/holdfast/{self.run}/coordinator"

    @property
    def generation(self) -> str:
        return f"/holdfast/{self.run}/generation"

    @property
    def term(self) -> str:
        return f"/holdfast/{self.run}/term"

    @property
    def hosts(self) -> str:
        """The prefix of all hosts' keys."""
        return f"/holdfast/{self.run}/hosts/"

    def host(self, agent: str) -> str:
        return self.hosts + agent


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The agent that holds the role of the coordinator."""

    agent: str  # its incarnation
    lease: int
    address: Address  # where its coordinator listens
    epoch: int = 0  # the revision at which it got the role; not in the text

    def to_text(self) -> str:
        """Return the value of the key ``coordinator``."""
        return json.dumps({name: value for name, value in asdict(self).items() if name != "epoch"})

    @staticmethod
    def of_text(text: str, epoch: int) -> Holder:
        """Read the value of the key ``coordinator``.

        >>> held = Holder(agent="5e1f", lease=7, address=("10.0.0.1", 29700), epoch=3)
        >>> Holder.of_text(held.to_text(), 3) == held
        True
        """
        found = json.loads(text)
        return Holder(
            agent=found["agent"],
            lease=int(found["lease"]),
            address=(str(found["address"][0]), int(found["address"][1])),
            epoch=epoch,
        )


@dataclass(frozen=True, kw_only=True)
class Decided:
    """A generation that was decided on, and whether its run has a folder of checkpoints to begin again from."""

    generation: Generation
    resumable: bool


def decided_text(decided: Decided) -> str:
    """Return the value of the key ``generation``: without standings, which would be large and are soon outdated.

    ``lease`` is the claim in whose name the lease of the run's folder may be held (``recovery.fence.claim_of``): the
    first worker's. So who may commit checkpoints is decided in the same transaction as the generation. Null: the run
    has no folder.
    """
    generation = decided.generation
    lease: dict[str, Any] = {"run": generation.run, "epoch": generation.number, "life": generation.life}
    lease["worker"] = generation.workers[0]
    members = [
        {"worker": m.worker, "address": m.address, "port": m.port, "host": m.host, "incarnation": m.incarnation}
        for m in generation.members
    ]
    facts: dict[str, Any] = {"number": generation.number, "run": generation.run, "life": generation.life}
    facts |= {"resumable": decided.resumable, "lease": lease if decided.resumable else None, "members": members}
    return json.dumps(facts, separators=(",", ":"))


def decided_of(text: str) -> Decided:
    """Read the value of the key ``generation``.

    >>> made = Generation(number=3, members=(Member(worker="0.0", address="::1", host="0"),), run="a", life="b")
    >>> decided_of(decided_text(Decided(generation=made, resumable=True))).generation == made
    True
    """
    found = json.loads(text)
    members = tuple(Member(**member) for member in found["members"])
    made = Generation(number=found["number"], members=members, run=found["run"], life=found["life"])
    return Decided(generation=made, resumable=found["resumable"])
