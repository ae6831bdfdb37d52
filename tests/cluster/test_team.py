"""What the ranks of a team agree on: where to leave, what they show, and who was the cause of their end."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from holdfast.cluster.desk import Desk
from holdfast.cluster.lines import Lines
from holdfast.cluster.local import LocalWorker, end_of_team
from holdfast.cluster.membership import Generation, Member, Standing
from holdfast.cluster.team import Team, column_of, merge
from holdfast.errors import Broken, UsageError


class Table:
    """Mates in threads."""

    def __init__(self, size: int) -> None:
        self._said: list[bytes] = [b""] * size
        self._barrier = threading.Barrier(size, timeout=20)

    def exchange(self, rank: int, text: bytes) -> list[bytes]:
        self._said[rank] = text
        self._barrier.wait()
        heard = [*self._said]
        self._barrier.wait()
        return heard


class Mate:
    def __init__(self, table: Table, rank: int, size: int) -> None:
        self._table, self.rank, self.size = table, rank, size

    def exchange(self, text: bytes) -> list[bytes]:
        return self._table.exchange(self.rank, text)


def with_team(work: Callable[[Team], Any], size: int = 2) -> list[Any]:
    """What each rank has got from ``work``, or the exception that it raised."""
    table, found = Table(size), [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = work(Team(Mate(table, rank, size)))
        except Exception as e:
            found[rank] = cast(Any, e)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_what_breaks_on_one_rank_breaks_on_all_wherever_they_are() -> None:
    """Rank 1 breaks early, and goes to the outer meeting. Rank 0 is at an inner one, and does not meet twice."""

    def work(team: Team) -> None:
        with team.together("outer"):
            if team.rank == 1:
                raise Broken("a peer is gone", unreached=("0.3",))
            with team.together("inner"):
                pass

    first, second = with_team(work)
    assert isinstance(first, Broken)
    assert isinstance(second, Broken)
    assert str(first) == "a peer is gone"
    assert second.unreached == ("0.3",)


def test_the_leaders_word_is_everybodys() -> None:
    assert with_team(lambda team: team.led(lambda: [team.rank, 0.1])) == [[0, 0.1], [0, 0.1]]

    def breaks(team: Team) -> None:
        def vote() -> None:
            raise Broken("no vote")

        team.led(vote)

    assert all(isinstance(each, Broken) for each in with_team(breaks))


def test_ranks_that_do_different_things_are_told() -> None:
    found = with_team(lambda team: team.exchange("an evaluation" if team.rank else "a step"))
    assert all(isinstance(each, UsageError) for each in found)


def test_a_team_shows_one_standing_with_the_ports_of_all() -> None:
    ranks = [Standing(operation=2, ports=(7,)), Standing(operation=2, unreached=("0.4",), broken=True, ports=(8,))]
    shown = merge(ranks)
    assert (shown.operation, shown.broken, shown.unreached, shown.ports) == (2, True, ("0.4",), (7, 8))
    again = Standing(**json.loads(json.dumps(shown.to_json())))
    member = Member(worker="0.0", address="a", port=7, standing=again)
    assert column_of(Generation(number=1, members=(member,)), 1).members[0].port == 8
    other = Member(worker="0.1", address="a", port=7, standing=Standing())
    with pytest.raises(UsageError, match=r"0\.1 has 0"):
        column_of(Generation(number=1, members=(member, other)), 1)
    with pytest.raises(UsageError):
        merge([Standing(operation=2), Standing(operation=3)])


def team_of(*ends: tuple[int, bool, dict[str, Any] | None]) -> list[LocalWorker]:
    """Ranks with exit code, whether the agent has killed them, and the error that they have reported, in this order."""
    team: list[LocalWorker] = []
    for rank, (code, unwanted, error) in enumerate(ends):
        worker = LocalWorker(
            name="0.0", incarnation="", slot=0, host="", lifeline=cast(Lines, None), log=Path(), rank=rank, team=team
        )
        worker.end, worker.unwanted, worker.error = (code, f"code {code}"), unwanted, error
        worker.failed = rank if error else worker.failed
        team.append(worker)
    return team


def test_the_rank_that_was_killed_is_the_cause_and_not_those_that_missed_it() -> None:
    lost = {"text": "Connection closed by peer", "final": False}
    team = team_of((1, False, lost), (-9, False, None), (-9, True, None))
    assert end_of_team(team)[0] == -9
    assert team[0].error is None


def test_the_error_of_one_rank_is_the_teams() -> None:
    own = {"text": "KeyError: 'x'", "final": False}
    after = {"text": "Connection closed by peer", "final": False}
    team = team_of((-9, True, None), (1, False, own), (1, False, after))
    assert end_of_team(team)[0] == 1
    assert team[0].error is own
    final = {"text": "holdfast: a sentence", "final": True}
    team = team_of((1, False, after), (2, False, final))
    assert end_of_team(team)[0] == 2
    assert team[0].error is final


def test_a_team_whose_ranks_end_well_ends_well() -> None:
    assert end_of_team(team_of((0, False, None), (0, False, None)))[0] == 0


def test_a_rank_that_falls_silent_is_the_silence_of_its_team() -> None:
    desk = Desk(beat=100.0)
    desk.hear("0.0", {"type": "came", "worker": "0.0", "port": 7, "label": {}}, now=0.0)
    desk.mate("0.0", 1, now=0.0)
    desk.hear("0.0", {"type": "beat", "doing": None}, now=5.0)
    assert desk.beat(now=6.0)["0.0"]["silent"] == 6.0
    desk.mate("0.0", 1, now=5.5)
    assert desk.beat(now=6.0)["0.0"]["silent"] == 1.0
