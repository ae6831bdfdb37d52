"""Links between members over real sockets: made when needed, closed at once, and nobody else's business."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast.cluster import handshake, wire
from holdfast.cluster.group import Group
from holdfast.cluster.links import call
from holdfast.cluster.links.call import CARD_BYTES, card
from holdfast.cluster.links.hub import key_of
from holdfast.cluster.membership import Generation, Member
from holdfast.errors import Broken
from tests.certificates import Certificates, standard
from tests.cluster.links.hubs import TOKEN, enter, generation_of, hubs, linked, talk, together

STRANGERS = 600  # connections at once


def test_members_talk(request: pytest.FixtureRequest) -> None:
    for address in ("127.0.0.1", "::1"):
        with linked(3, address) as groups:
            assert talk(groups) == [7.0] * 3
            assert talk(groups) == [7.0] * 3


@pytest.mark.parametrize("size", [0, 4, 70_000, 3_000_000])
def test_tensors_of_any_size_go_both_ways_at_once(size: int) -> None:
    with linked() as groups:
        mine = [torch.arange(size, dtype=torch.int16) + rank for rank in range(2)]
        heard = [torch.zeros(size, dtype=torch.int16) for _ in range(2)]

        def swap(rank: int) -> None:
            groups[rank].finish(groups[rank].start([(1 - rank, mine[rank], 5)], [(1 - rank, heard[rank], 5)]))

        together(lambda: swap(0), lambda: swap(1))
        assert torch.equal(heard[0], mine[1])
        assert torch.equal(heard[1], mine[0])


def test_connections_are_made_when_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 members each talks to log2 of them: no more are connected."""
    with linked(16) as groups:
        talk(groups)
        assert {group._backend.connected for group in groups} == {4}
        one = torch.ones(1)
        groups[0].start([(15, one, 3)], [])
        groups[15].finish(groups[15].start([], [(0, torch.zeros(1), 3)]))
        assert groups[0]._backend.connected == 5


def test_who_comes_late_finds_the_calls_that_were_made_before() -> None:
    with hubs(2) as made:
        generation = generation_of(made)
        first = enter(made[1], generation, 1)
        waiting = first.start([(0, torch.ones(1), 3)], [(0, torch.zeros(1), 3)])
        deadline = time.monotonic() + 20
        while not made[0]._parked:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        second = enter(made[0], generation, 0)
        second.finish(second.start([(1, torch.ones(1), 3)], [(1, torch.zeros(1), 3)]))
        first.finish(waiting)


def test_a_process_that_is_about_to_exit_has_closed_its_connections_before() -> None:
    """Its memory may take the kernel a while, and the others would wait for that long."""
    with hubs(2) as made:
        generation = generation_of(made)
        leaving, staying = (enter(hub, generation, rank) for rank, hub in enumerate(made))
        together(leaving.gather, staying.gather)
        carriers = [end._carrier for end in leaving._backend._ends.values() if end._carrier is not None]
        made[0].close_before_exit()
        assert [carrier.fileno() for carrier in carriers] == [-1]
        with pytest.raises(Broken):
            staying.vote(torch.ones(1))


def test_who_calls_for_a_generation_that_is_over_is_told_at_once() -> None:
    with hubs(2) as made:
        old, new = generation_of(made, number=1), generation_of(made, number=2)
        enter(made[0], old, 0).close()
        late = enter(made[1], old, 1)
        with pytest.raises(Broken, match=r"lost touch with 0\.0"):
            late.finish(late.start([], [(0, torch.zeros(1), 3)]))
        there = enter(made[0], new, 0)
        later = enter(made[1], old, 1)
        with pytest.raises(Broken, match=r"lost touch with 0\.0"):
            later.finish(later.start([], [(0, torch.zeros(1), 3)]))
        there.close()


# --- the end of a group ------------------------------------------------------------------------------------


@pytest.mark.parametrize("big", [1, 5_000_000])
def test_an_abort_frees_both_sides_at_once(big: int) -> None:
    """This thread waits, a peer waits for this one; a large message is under way."""
    with linked(3) as groups:
        groups[2].start([(0, torch.ones(big), 9)], [])
        broken: list[str] = []

        def wait(group: Group, peer: int) -> None:
            with pytest.raises(Broken) as error:
                group.finish(group.start([], [(peer, torch.zeros(1), 3)]))
            broken.append(str(error.value))

        threads = [threading.Thread(target=wait, args=args) for args in ((groups[0], 1), (groups[1], 0))]
        for thread in threads:
            thread.start()
        begin = time.monotonic()
        groups[0].abort("the coordinator ended the generation")
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)
        assert time.monotonic() - begin < 10
        assert "the coordinator ended the generation" in broken
        with pytest.raises(Broken, match="ended the generation"):
            groups[0].start([], [(1, torch.zeros(1), 3)])


def test_nothing_is_written_into_a_tensor_after_its_receive_was_given_up() -> None:
    with linked() as groups:
        room = torch.zeros(30_000_000, dtype=torch.uint8)
        works = groups[0].start([], [(1, room, 3)])
        groups[1].start([(0, torch.ones_like(room), 3)], [])
        while not room[0]:
            time.sleep(0.0002)
        groups[0].abort("enough")
        groups[0].drain(works)
        room.zero_()
        time.sleep(0.05)
        assert not room.any()


SENDER = """
import sys, time, torch
from holdfast.cluster.group import Group
from holdfast.cluster.links.hub import Hub
from holdfast.cluster.links.member_links import LinkSettings
from holdfast.cluster.membership import Generation, Member
hub = Hub("127.0.0.1", LinkSettings(token=sys.argv[2], heartbeat=5.0))
print(hub.port, flush=True)
ports = [int(sys.argv[1]), hub.port]
members = tuple(Member(worker=f"0.{n}", address="127.0.0.1", port=port) for n, port in enumerate(ports))
generation = Generation(number=1, members=members, run="run", life="life")
group = Group(generation, 1, hub.links(generation, "0.1"))
group.start([(0, torch.ones(100 << 20, dtype=torch.uint8), 3)], [])
time.sleep(100)
"""


def test_a_peer_that_is_killed_in_the_middle_of_a_message() -> None:
    with hubs(1) as (hub,):
        sender = subprocess.Popen(
            [sys.executable, "-c", SENDER, str(hub.port), TOKEN], stdout=subprocess.PIPE, text=True
        )
        assert sender.stdout is not None
        try:
            ports = [hub.port, int(sender.stdout.readline())]
            members = tuple(Member(worker=f"0.{n}", address="127.0.0.1", port=port) for n, port in enumerate(ports))
            group = enter(hub, Generation(number=1, members=members, run="run", life="life"), 0)
            room = torch.zeros(100 << 20, dtype=torch.uint8)
            works = group.start([], [(1, room, 3)])
            while not room[0]:
                time.sleep(0.0005)
            os.kill(sender.pid, signal.SIGKILL)
            with pytest.raises(Broken, match=r"lost touch with 0\.1"):
                group.finish(works)
            assert not room[-1], "it was quicker than the signal"
        finally:
            sender.kill()
            sender.wait()
            sender.stdout.close()


def test_a_lost_peer_does_not_break_what_others_send() -> None:
    """Its own connection only: a worker that is done may leave while others still talk."""
    with linked(3) as groups:
        groups[1].start([(0, torch.ones(1), 3)], [])
        groups[1].close()
        room = torch.zeros(1)
        works = groups[0].start([], [(2, room, 3)])
        time.sleep(0.05)
        groups[2].start([(0, torch.ones(1), 3)], [])
        groups[0].finish(works)
        groups[0].finish(groups[0].start([], [(1, torch.zeros(1), 3)]))  # it came before the end
        with pytest.raises(Broken, match=r"lost touch with 0\.1"):
            groups[0].finish(groups[0].start([], [(1, torch.zeros(1), 3)]))


# --- machines that cannot be reached -----------------------------------------------------------------------


def test_a_machine_that_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens there: the worker is dead, or a firewall refuses."""
    monkeypatch.setattr(call, "REFUSED_SECONDS", 0.2)
    with hubs(1) as (hub,):
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        members = (
            Member(worker="0.0", address="127.0.0.1", port=port),
            Member(worker="0.1", address="127.0.0.1", port=hub.port),
        )
        group = enter(hub, Generation(number=1, members=members), 1)
        with pytest.raises(Broken) as error:
            group.gather()
        assert error.value.refused == ("0.0",)
        assert error.value.unreached == ()


def test_a_machine_that_does_not_answer_is_named() -> None:
    """A full backlog: the kernel drops calls, as a cable that is cut does."""
    with hubs(1, heartbeat=0.5) as (hub,), socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(deaf.getsockname())
        members = (
            Member(worker="0.0", address="127.0.0.1", port=deaf.getsockname()[1]),
            Member(worker="0.1", address="127.0.0.1", port=hub.port),
        )
        group = enter(hub, Generation(number=1, members=members), 1)
        with pytest.raises(Broken) as error:
            group.gather()
        assert error.value.unreached == ("0.0",)
        for filler in fillers:
            filler.close()


def test_a_member_that_takes_long_to_come_is_waited_for() -> None:
    with hubs(2, heartbeat=0.3) as made:
        generation = generation_of(made)
        first = enter(made[1], generation, 1)

        def come_late() -> None:
            time.sleep(1.0)
            enter(made[0], generation, 0).gather()

        together(first.gather, come_late)


def test_with_tls_a_member_that_takes_long_to_come_is_waited_for_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes longer than a handshake may."""
    settings = standard(tmp_path / "certificates").settings("head", "ca")
    monkeypatch.setattr(wire, "HANDSHAKE_SECONDS", 0.3)
    with hubs(2, tls=settings) as made:
        generation = generation_of(made)
        first = enter(made[1], generation, 1)

        def come_late() -> None:
            deadline = time.monotonic() + 20
            while not made[0]._parked:
                assert time.monotonic() < deadline
                time.sleep(0.005)
            time.sleep(1.0)
            enter(made[0], generation, 0).gather()

        together(first.gather, come_late)


def test_a_call_is_made_later_if_there_is_no_descriptor_left() -> None:
    with hubs(2) as made:
        generation = generation_of(made)
        first, second = enter(made[0], generation, 0), enter(made[1], generation, 1)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))  # those that are open stay
        try:
            waiting = second.start([(0, torch.ones(1), 3)], [(0, torch.zeros(1), 3)])
            time.sleep(0.2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert second._backend.connected == 0
        together(
            lambda: first.finish(first.start([(1, torch.ones(1), 3)], [(1, torch.zeros(1), 3)])),
            lambda: second.finish(waiting),
        )


# --- strangers ---------------------------------------------------------------------------------------------


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """The strangers live in this process too."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 8 * STRANGERS:
        pytest.skip(f"the strangers need {8 * STRANGERS} descriptors, and the hard limit is {before[1]}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("said", [b"", b"hi", handshake.hello(handshake.PLAIN, bytes(32)), bytes(1000)])
@pytest.mark.usefixtures("many_descriptors")
def test_strangers_disturb_nobody(said: bytes) -> None:
    """Before the members meet, while they meet, and afterwards."""
    with hubs(3) as made:
        strangers = []

        def come(number: int) -> None:
            for hub in made:
                for _ in range(number):
                    stranger = socket.create_connection(("127.0.0.1", hub.port))
                    try:
                        stranger.send(said)
                    except OSError:
                        pass
                    strangers.append(stranger)

        come(STRANGERS // 6)
        generation = generation_of(made)
        groups = [enter(hub, generation, rank) for rank, hub in enumerate(made)]
        together(*(group.gather for group in groups), lambda: come(STRANGERS // 6))
        assert talk(groups) == [7.0] * 3
        come(STRANGERS // 6)
        assert talk(groups) == [7.0] * 3
        for stranger in strangers:
            stranger.close()


def test_who_does_not_know_the_token_gets_nowhere() -> None:
    with hubs(1) as made, hubs(1, token="another token of sixteen characters") as others:
        generation = generation_of([*made, *others])
        inside, outside = enter(made[0], generation, 0), enter(others[0], generation, 1)
        with pytest.raises(Broken, match="does not know the token"):
            outside.gather()
        assert inside._backend.connected == 0
        inside.close()


def test_a_caller_that_says_nonsense_after_its_proof_is_dropped() -> None:
    """It knows the token; what it says names no rank, or is no card."""
    with linked() as groups:
        hub_port = groups[0].generation.members[0].port
        key = key_of(groups[0].generation)
        for words in (card(key, 77), b"x" * CARD_BYTES, b"short"):
            stranger = socket.create_connection(("127.0.0.1", hub_port))
            nonce = handshake.new_nonce()
            stranger.sendall(handshake.hello(handshake.PLAIN, nonce))
            answer = b""
            while len(answer) < handshake.HEADER_BYTES + handshake.ANSWER_BYTES:
                answer += stranger.recv(200)
            shown = handshake.prove(TOKEN, handshake.PLAIN, nonce, answer[handshake.HEADER_BYTES :])
            stranger.sendall(shown + words)
            if words != b"x" * CARD_BYTES:  # that one may be for a generation to come
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(1) == b""
            stranger.close()
        assert talk(groups) == [3.0, 3.0]


def test_the_hub_takes_calls_again_after_it_ran_out_of_descriptors() -> None:
    """Nobody can be accepted meanwhile; nothing is lost."""
    with hubs(2) as made:
        generation = generation_of(made)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        first = enter(made[0], generation, 0)
        second = enter(made[1], generation, 1)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 1, hard))
        try:
            threading.Timer(0.3, resource.setrlimit, (resource.RLIMIT_NOFILE, (soft, hard))).start()
            together(first.gather, second.gather)
        finally:
            time.sleep(0.35)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_time_for_a_handshake_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody accepts at a member's address, and never answers: it is called again, and again."""
    monkeypatch.setattr(wire, "HANDSHAKE_SECONDS", 0.2)
    with hubs(1) as (hub,), socket.create_server(("127.0.0.1", 0)) as silent:
        members = (
            Member(worker="0.0", address="127.0.0.1", port=silent.getsockname()[1]),
            Member(worker="0.1", address="127.0.0.1", port=hub.port),
        )
        group = enter(hub, Generation(number=1, members=members), 1)
        group.start([], [(0, torch.zeros(1), 3)])
        callers = [silent.accept()[0] for _ in range(3)]
        assert len(callers) == 3
        group.close()
        for caller in callers:
            caller.close()


# --- TLS ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return standard(tmp_path_factory.mktemp("certificates"))


@pytest.mark.parametrize("size", [1, 200, 70_000, 3_000_000])
def test_links_with_tls(certificates: Certificates, size: int) -> None:
    with linked(3, tls=certificates.settings("head", "ca")) as groups:
        assert talk(groups) == [7.0] * 3
        mine = [torch.arange(size) + rank for rank in range(2)]
        heard = [torch.zeros_like(mine[0]) for _ in range(2)]

        def swap(rank: int) -> None:
            for _ in range(3):
                groups[rank].finish(groups[rank].start([(1 - rank, mine[rank], 5)], [(1 - rank, heard[rank], 5)]))

        together(lambda: swap(0), lambda: swap(1))
        assert torch.equal(heard[0], mine[1])
        assert torch.equal(heard[1], mine[0])


def test_who_has_no_certificate_of_the_ca_gets_nowhere(certificates: Certificates) -> None:
    with (
        hubs(1, tls=certificates.settings("head", "ca")) as made,
        hubs(1, tls=certificates.settings("stranger", "ca")) as others,
    ):
        generation = generation_of([*made, *others])
        inside, outside = enter(made[0], generation, 0), enter(others[0], generation, 1)
        waiting = inside.start([], [(1, torch.zeros(1), 3)])
        with pytest.raises(Broken):
            outside.gather()
        with pytest.raises(Broken, match=r"no TLS with 0\.1|lost touch"):
            inside.finish(waiting)


def test_one_side_with_tls_and_one_without_do_not_fit(certificates: Certificates) -> None:
    with hubs(1, tls=certificates.settings("head", "ca")) as made, hubs(1) as others:
        generation = generation_of([*made, *others])
        outside = enter(others[0], generation, 1)
        with pytest.raises(Broken, match="it wants TLS, and this side has none"):
            outside.gather()
