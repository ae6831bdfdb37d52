"""Detection of machines that cannot be reached while a group forms: calls that nobody answers.

A firewall or a broken switch may separate two machines that both reach the coordinator. Gloo would call for a minute
and say nothing of whom. But the kernel lists each call that is not answered yet, in ``/proc/self/net/tcp``. The kernel
of a machine that is up answers at once, even if the called process is stopped.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

_CALLING = "02"  # TCP_SYN_SENT in linux/tcp_states.h: a connection that was asked for and not answered
_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")


@dataclass(kw_only=True)
class Calls:
    """The calls of this process, and for how long each address has not answered.

    >>> calls = Calls(seconds=5.0)
    >>> calls.look({"10.0.0.2"}, now=1.0), calls.look({"10.0.0.2"}, now=6.5)
    (set(), {'10.0.0.2'})
    """

    seconds: float  # after which an address that does not answer cannot be reached
    _since: dict[str, float] = field(default_factory=dict)  # when each was first found without an answer

    def look(self, calling: Collection[str], now: float) -> set[str]:
        """Take in the addresses that are being called; return those that have not answered for too long.

        An address that is not called any more has answered, if only to refuse.
        """
        self._since = {address: self._since.get(address, now) for address in calling}
        return {address for address, since in self._since.items() if now - since >= self.seconds}


def calling(inodes: Collection[str]) -> set[tuple[str, int]]:
    """Return the addresses and ports that these sockets ("socket:[inode]") call and that have not answered yet."""
    wanted = {inode.removeprefix("socket:[").removesuffix("]") for inode in inodes}
    found = set()
    for table in _TABLES:
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:  # a kernel without IPv6
            continue
        found |= {called for called, inode in map(_unanswered, lines) if called is not None and inode in wanted}
    return found


def _unanswered(line: str) -> tuple[tuple[str, int] | None, str]:
    """Return (address and port called, inode) of a line of the kernel's table; None if it is no open call.

    >>> _unanswered("   1: 0100007F:9C40 02000A0A:7404 02 00000001:00000000 01:00000064 00000002     0        0 4711 2")
    (('10.10.0.2', 29700), '4711')
    """
    words = line.split()
    remote, state, inode = words[2], words[3], words[9]
    address, _, port = remote.partition(":")
    return ((_address(address), int(port, 16)) if state == _CALLING else None), inode


def _address(text: str) -> str:
    """Read an address in the kernel's form: 32-bit words in hexadecimal, each in the machine's byte order."""
    packed = b"".join(struct.pack("=I", int(text[n : n + 8], 16)) for n in range(0, len(text), 8))
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, packed).removeprefix("::ffff:")
