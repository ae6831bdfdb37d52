"""Gloo's sockets: which of this process's they are, and who may connect to the one that listens.

Gloo tells nobody which descriptors it has opened. They are known by their exact addresses: a pair's socket was either
accepted at Gloo's own listening address, or connected to that of another member. Members tell each other these
addresses in the values that Gloo puts into the store (``Doorkeeper.tell`` and ``hear``). So a socket of the script is
never taken for one of Gloo's.

Gloo accepts whoever connects and keeps the connection for ever; when no descriptor is left, it ends the process. Its
listening socket cannot be closed or shut down, which would end the process too. But a filter in the kernel can drop
the packets that reach it. Until the group is formed, only those of the members' machines pass, and a connection that
sends nothing is not accepted at all; after that no packet passes. Connections that were accepted before do not mind.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from holdfast.cluster import reach

Address = tuple[str, int]  # IP address, port
Sockets = dict[int, str]  # descriptor → inode

FORMING_SECONDS = 60  # in which silent connections are not accepted: as long as Gloo tries to connect
MOST_ADDRESSES = 400  # of machines in a filter: the kernel takes 4,096 instructions, nine for an IPv6 address
_SO_ATTACH_FILTER = 26  # asm-generic/socket.h
_LOAD, _STORE, _RECALL = 0x20, 0x02, 0x60  # linux/filter.h: load a word of the packet, store it, load a stored one
_EQUAL, _RETURN = 0x15, 0x06  # jump if equal, return how many bytes pass
_NETWORK = 0xFFF00000  # SKF_NET_OFF: offsets count from the IP header
_PASS = (_RETURN, 0, 0, 0xFFFFFFFF)
_DROP = (_RETURN, 0, 0, 0)
_SOURCE = {socket.AF_INET: (12, 1), socket.AF_INET6: (8, 4)}  # in the IP header: offset of the source, its words

logger = logging.getLogger(__name__)


def open_sockets() -> Sockets:
    """Return this process's sockets."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:"):
            found[int(name)] = target
    return found


def shut_down(number: int, inode: str) -> None:
    """Shut a socket down, unless its descriptor belongs to another file by now: the inode tells."""
    try:
        with socket.socket(fileno=os.dup(number)) as mine:
            if os.readlink(f"/proc/self/fd/{mine.fileno()}") == inode:
                mine.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


def peer_address(number: int) -> str:
    """Return the IP address that a socket is connected to; "" if it is connected to none."""
    seen = _look(number)
    return "" if seen is None else seen.peer[0]


class Doorkeeper:
    """Watches over the listening socket of one group while it forms, and knows the members' sockets by address.

    Make it before Gloo opens its device. ``members``: the addresses of the members' machines.
    """

    def __init__(self, members: Iterable[str]) -> None:
        self._before = set(open_sockets().values())
        self._admitted = set(members)
        self._sources = _sources(self._admitted)
        self._listener: socket.socket | None = None  # a duplicate of Gloo's descriptor
        self._address: Address | None = None  # where it listens
        self._listeners: set[Address] = set()  # of the other members

    def tell(self, value: bytes) -> bytes:
        """Return the value that Gloo puts into the store, with this member's addresses before it.

        Nobody knows Gloo's port before the value is out. So this is the moment to close the door to strangers.
        """
        if self._listener is None:
            self._find_listener(value)
        card = {"listener": self._address, "sources": sorted(self._sources)}
        return json.dumps(card).encode() + b"\n" + value

    def hear(self, value: bytes) -> bytes:
        """Note the addresses of another member; return the value as Gloo has put it."""
        card, _, rest = value.partition(b"\n")
        told = json.loads(card)
        if told["listener"] is not None and tuple(told["listener"]) != self._address:
            self._listeners.add((told["listener"][0], told["listener"][1]))
        if not self._admitted.issuperset(told["sources"]):
            self._admitted.update(told["sources"])
            self._admit()
        return rest

    def unanswered(self) -> set[str]:
        """Return the IP addresses of members whom Gloo calls at the moment, and who have not answered yet."""
        mine = set(open_sockets().values()) - self._before
        return {address for address, _ in reach.calling(mine) & self._listeners}

    def named_in(self, text: str) -> set[str]:
        """Return the IP addresses of other machines that an error of Gloo names, as "[10.0.0.2]:4711".

        Ports are not compared: Gloo prints them in the wrong byte order.
        """
        own = None if self._address is None else self._address[0]
        return {address for address, _ in self._listeners if address != own and f"[{address}]:" in text}

    def formed(self) -> Sockets:
        """Close the door for good; return the sockets of the members' connections. Strangers' are shut down."""
        self._filter([_DROP])
        pairs: Sockets = {}
        for number, inode in open_sockets().items():
            seen = None if inode in self._before else _look(number)
            if seen is None:
                continue
            if seen.timed and (seen.local == self._address or seen.peer in self._listeners):
                pairs[number] = inode
            elif seen.local == self._address:
                shut_down(number, inode)
        return pairs

    def close(self) -> None:
        """Let go of the listening socket. Gloo has its own descriptor, and the filter stays."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _find_listener(self, value: bytes) -> None:
        """Find the new listening socket whose address is in Gloo's value, and admit the members to it alone."""
        numbers = [number for number, inode in open_sockets().items() if inode not in self._before]
        found = next((number for number in numbers if _listens_as_told(number, value)), None)
        if found is None:
            logger.warning("the listening socket of Gloo is not found; strangers can connect to it")
            return
        self._listener = socket.socket(fileno=os.dup(found))
        self._address = _short(self._listener.getsockname())
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, FORMING_SECONDS)
        self._admit()

    def _admit(self) -> None:
        if self._listener is not None:
            self._filter(_only_from(self._admitted, self._listener.family))

    def _filter(self, program: list[tuple[int, int, int, int]]) -> None:
        """Let the kernel drop packets to the listening socket, as this classic BPF program says."""
        if self._listener is None:
            return
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
        try:
            given = struct.pack("HL", len(program), ctypes.addressof(code))
            self._listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, given)
        except OSError as e:
            logger.warning("strangers can connect to Gloo's port: the kernel takes no filter (%s)", e)


def _only_from(addresses: set[str], family: int) -> list[tuple[int, int, int, int]]:
    """Return a program that passes packets from these IP addresses; from everywhere if they cannot be listed.

    >>> len(_only_from({"10.0.0.1", "10.0.0.2"}, socket.AF_INET))
    9
    """
    offset, words = _SOURCE[socket.AddressFamily(family)]
    program: list[tuple[int, int, int, int]] = []
    try:
        packed = [socket.inet_pton(family, address.partition("%")[0]) for address in sorted(addresses)]
    except OSError:  # a name, or an address of the other family
        return [_PASS]
    if len(packed) > MOST_ADDRESSES:
        return [_PASS]
    for word in range(words):
        program += [(_LOAD, 0, 0, _NETWORK + offset + 4 * word), (_STORE, 0, 0, word)]
    for source in packed:
        for word in range(words):
            otherwise = 2 * (words - word) - 1  # instructions to skip to the next address
            wanted = int.from_bytes(source[4 * word : 4 * word + 4], "big")
            program += [(_RECALL, 0, 0, word), (_EQUAL, 0, otherwise, wanted)]
        program.append(_PASS)
    return [*program, _DROP]


def _sources(members: Iterable[str]) -> set[str]:
    """Return the addresses of this machine from which its packets to the members come: it may have several."""
    found = set()
    for address in members:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((address, 9))  # sends nothing: the kernel only looks up the route
                found.add(str(probe.getsockname()[0]))
        except OSError:
            continue
    return found


@contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """Give a socket object for somebody else's descriptor, and leave the descriptor open.

    It is not a duplicate, which another thread would see among this process's sockets.
    """
    borrowed = socket.socket(fileno=number)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def _listens_as_told(number: int, value: bytes) -> bool:
    """Whether a socket listens at an address that is in Gloo's value, as the begin of a ``struct sockaddr``."""
    try:
        with _borrowed(number) as candidate:
            if candidate.family not in _SOURCE or not candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False
            address, port = candidate.getsockname()[:2]
            flow = bytes(4) if candidate.family == socket.AF_INET6 else b""
            packed = socket.inet_pton(candidate.family, address.partition("%")[0])
            return struct.pack("=H", candidate.family) + struct.pack("!H", port) + flow + packed in value
    except OSError:  # closed meanwhile
        return False


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """What the kernel knows of a connection."""

    local: Address
    peer: Address
    timed: bool  # it has a timeout for receives: Gloo sets one on each pair's socket, and none on a stranger's


def _look(number: int) -> _Seen | None:
    """Return what is known of a descriptor; None if it is no TCP connection."""
    try:
        with _borrowed(number) as mine:
            if mine.family not in _SOURCE or mine.type != socket.SOCK_STREAM:
                return None
            timed = any(mine.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16))
            return _Seen(local=_short(mine.getsockname()), peer=_short(mine.getpeername()), timed=timed)
    except OSError:  # closed meanwhile, or not connected
        return None


def _short(address: tuple[Any, ...]) -> Address:
    return str(address[0]), int(address[1])
