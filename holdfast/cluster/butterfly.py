"""The butterfly: who talks to whom, round by round, so that everybody has something of everybody after few rounds.

Workers have places, 0 to n - 1. In round k each of them has what the workers of one *block* of 2^k places have, and
swaps it with a worker of the neighbouring block. After log2(n) rounds everybody has all of it, for n a power of two.
Where n is none, some places at the begin go in pairs: the second of a pair gives what it has to the first, before the
rounds, and gets the result from it after them. A worker sends at most log2(n) + 1 messages, where telling everybody
takes n - 1.

Blocks are always of consecutive places. So what a block has together may be summed along a tree, or laid side by side.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Meet:
    """One round of one worker: it sends to its partner, receives from it, or both.

    ``mine`` and ``theirs``: the places whose values the two have before it.
    """

    partner: int
    mine: range
    theirs: range
    sends: bool = True
    receives: bool = True
    is_result: bool = False  # what travels is the result, which replaces what the receiver has

    @property
    def is_swap(self) -> bool:
        """Whether both send, and both receive."""
        return self.sends and self.receives


def meetings(place: int, size: int) -> list[Meet]:
    """Return the rounds of the worker at a place, of ``size`` workers.

    >>> [(meet.partner, meet.mine, meet.theirs) for meet in meetings(1, 4)]
    [(0, range(1, 2), range(0, 1)), (3, range(0, 2), range(2, 4))]
    >>> [(meet.partner, meet.sends, meet.receives) for meet in meetings(1, 5)]
    [(0, True, False), (0, False, True)]
    """
    core = 1 << (size.bit_length() - 1)  # the largest power of two that is no larger
    pairs = size - core  # pairs at the begin: one of each takes part in the rounds

    def begin(number: int) -> int:
        """Return the first place of the workers that count as one in the rounds, by number."""
        return number + min(number, pairs)

    def block(number: int, bit: int) -> range:
        """Return the places of the block that one of them is in before the round of a bit."""
        first = number >> bit << bit
        return range(begin(first), begin(first + (1 << bit)))

    if place < 2 * pairs and place % 2 == 1:
        host = place - 1
        given = Meet(partner=host, receives=False, mine=range(place, place + 1), theirs=range(host, place))
        return [given, Meet(partner=host, sends=False, is_result=True, mine=range(size), theirs=range(size))]
    number = place // 2 if place < 2 * pairs else place - pairs
    rounds = []
    for bit in range(core.bit_length() - 1):
        other = number ^ (1 << bit)
        rounds.append(Meet(partner=begin(other), mine=block(number, bit), theirs=block(other, bit)))
    if number < pairs:
        guest = place + 1
        taken = Meet(partner=guest, sends=False, mine=range(place, guest), theirs=range(guest, guest + 1))
        told = Meet(partner=guest, receives=False, is_result=True, mine=range(size), theirs=range(size))
        return [taken, *rounds, told]
    return rounds
