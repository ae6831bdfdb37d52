"""The sockets of a group: Gloo's are found and shut down, the script's are left alone, strangers do not get in."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from holdfast.cluster import gloo_sockets
from holdfast.cluster.group import Group, form
from holdfast.cluster.membership import Generation, Member
from holdfast.errors import Broken

CPU = torch.device("cpu")
STRANGERS = 1100  # idle connections, which used to be more than a worker survives


class Store:
    """What the members tell each other. ``put`` calls ``meanwhile`` first: at that moment the group is forming."""

    closed = False

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self._meanwhile = meanwhile
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def put(self, key: str, value: bytes) -> None:
        with self._changed:
            self._meanwhile()
            self._values[key] = value
            self._changed.notify_all()

    def take(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, 20)
            return self._values[key]


def formed(meanwhile: Callable[[], None] = lambda: None, address: str = "127.0.0.1") -> list[Group]:
    """Two members in threads of this process, connected by Gloo."""
    members = tuple(Member(worker=f"0.{rank}", address=address) for rank in range(2))
    generation, store = Generation(number=1, members=members), Store(meanwhile)
    groups: list[Group | None] = [None, None]

    def join(rank: int) -> None:
        groups[rank] = form(generation, f"0.{rank}", store, CPU)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    found = [group for group in groups if group is not None]
    assert len(found) == 2
    return found


def talk(groups: list[Group]) -> list[float]:
    """Has the members add up what they have; returns what each got."""
    values = [torch.tensor([1.0]), torch.tensor([2.0])]
    threads = [threading.Thread(target=group.vote, args=(value,)) for group, value in zip(groups, values, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [float(value) for value in values]


def listening() -> set[tuple[str, int]]:
    """Addresses at which sockets of this process listen."""
    found = set()
    for number in gloo_sockets.open_sockets():
        try:
            with socket.socket(fileno=os.dup(number)) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockopt(
                    socket.SOL_SOCKET, socket.SO_ACCEPTCONN
                ):
                    found.add((str(one.getsockname()[0]), int(one.getsockname()[1])))
        except OSError:
            continue
    return found


class Strangers:
    """Connections to every socket that has come to listen in this process since it was made, as far as they get."""

    def __init__(self) -> None:
        self._before = listening()
        self.held: list[socket.socket] = []

    def come(self, number: int, said: bytes = b"") -> None:
        for address in sorted(listening() - self._before):
            for _ in range(number):
                stranger = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
                stranger.setblocking(False)
                stranger.connect_ex(address)
                self.held.append(stranger)
        if said:
            for stranger in self.held:
                try:
                    stranger.send(said)
                except OSError:
                    pass  # it was not let in

    def connected(self) -> int:
        """How many were accepted by the kernel."""
        count = 0
        for stranger in self.held:
            try:
                stranger.getpeername()
                count += 1
            except OSError:
                continue
        return count

    def leave(self) -> None:
        for stranger in self.held:
            stranger.close()


@contextmanager
def strangers() -> Iterator[Strangers]:
    made = Strangers()
    try:
        yield made
    finally:
        made.leave()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """The strangers live in this process too."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 8 * STRANGERS:
        pytest.skip(f"the strangers need {8 * STRANGERS} descriptors, and the hard limit is {before[1]}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


# --- whose socket is it ----------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_group_shuts_down_its_own_sockets_and_no_other(address: str) -> None:
    """The script opens connections to a server at a member's address while the group forms."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.create_server((address, 0), family=family, backlog=64)
    mine: list[tuple[socket.socket, socket.socket]] = []

    def use_the_network() -> None:
        for _ in range(5):
            client = socket.create_connection(server.getsockname()[:2])
            mine.append((client, server.accept()[0]))
        other = socket.create_server((address, 0), family=family)  # and a server of its own at the same address
        client = socket.create_connection(other.getsockname()[:2])
        mine.append((client, other.accept()[0]))
        other.close()

    groups = formed(use_the_network, address)
    assert [len(group._sockets) for group in groups] == [1, 1]
    assert talk(groups) == [3.0, 3.0]
    groups[0].abort("the test is over")
    with pytest.raises(Broken):
        groups[1].sum(torch.zeros(1))
    assert len(mine) == 12
    for client, accepted in mine:
        client.sendall(b"ping")
        assert accepted.recv(4) == b"ping"
        accepted.sendall(b"pong")
        assert client.recv(4) == b"pong"
        client.close()
        accepted.close()
    server.close()


# --- strangers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_nobody_can_connect_once_a_group_has_formed(many_descriptors: None, address: str) -> None:
    with strangers() as crowd:
        groups = formed(address=address)
        before = descriptors()
        crowd.come(STRANGERS)
        assert len(crowd.held) == 2 * STRANGERS, "both have a socket that listens"
        time.sleep(0.2)  # time for Gloo to accept them, if it could
        assert crowd.connected() == 0
        assert descriptors() - before <= len(crowd.held), "the strangers' own"
        assert talk(groups) == [3.0, 3.0]
        for group in groups:
            group.close()


def test_idle_strangers_cost_no_descriptor_while_a_group_forms(many_descriptors: None) -> None:
    before: list[int] = []
    with strangers() as crowd:

        def flood() -> None:
            if not crowd.held:
                before.append(descriptors())
            crowd.come(STRANGERS // 2)

        groups = formed(flood)
        time.sleep(0.2)
        taken = descriptors() - before[0] - len(crowd.held)
        assert len(crowd.held) >= STRANGERS
        assert taken < STRANGERS // 10, "the connection of the two, and who came before the port was told"
        assert [len(group._sockets) for group in groups] == [1, 1]
        assert talk(groups) == [3.0, 3.0]
        for group in groups:
            group.close()


def test_strangers_that_speak_while_a_group_forms_are_shut_out_when_it_has(many_descriptors: None) -> None:
    """They are on a member's machine, and say less than Gloo waits for."""
    with strangers() as crowd:
        groups = formed(lambda: crowd.come(50, b"hi"))
        assert [len(group._sockets) for group in groups] == [1, 1]
        assert talk(groups) == [3.0, 3.0]
        crowd.come(50, b"hi")
        assert talk(groups) == [3.0, 3.0]
        for group in groups:
            group.close()


def test_only_members_machines_can_connect_while_a_group_forms() -> None:
    """127.0.0.2 is another address of this machine, and no member's."""
    outcomes: list[str] = []
    found: set[tuple[str, int]] = set()
    known = listening()

    def knock() -> None:
        for address in listening() - known - found:
            found.add(address)
            for source in ("127.0.0.1", "127.0.0.2"):
                with socket.socket() as stranger:
                    stranger.settimeout(0.3)
                    stranger.bind((source, 0))
                    try:
                        stranger.connect(address)
                        outcomes.append(f"{source} connects")
                    except TimeoutError:
                        outcomes.append(f"{source} hears nothing")

    groups = formed(knock)
    assert sorted(set(outcomes)) == ["127.0.0.1 connects", "127.0.0.2 hears nothing"]
    assert talk(groups) == [3.0, 3.0]
    for group in groups:
        group.close()
