"""How a generation is told: what has changed to those who know the one before, everything to others.

A generation of a thousand workers is a hundred kilobytes. After a loss nearly all of it is as before: the same members,
who show the same standing. So its announcement names who has gone and who has come, and the standing that most members
show once. Its size does not grow with the number of workers.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable

from holdfast.cluster.membership import Generation, Member, Message, Standing, worker_order

REST = "*"  # in place of names: all members that are not named elsewhere


def names_of(workers: Iterable[str]) -> str:
    """Return worker names as a short text, in order.

    >>> names_of(["0.0", "0.1", "0.2", "0.10", "1.4"])
    '0.0-2 0.10 1.4'
    """
    found: list[list[int]] = []  # host, first, last
    for host, ordinal in sorted({worker_order(name) for name in workers}):
        if found and found[-1][0] == host and found[-1][2] == ordinal - 1:
            found[-1][2] = ordinal
        else:
            found.append([host, ordinal, ordinal])
    return " ".join(f"{host}.{a}" if a == b else f"{host}.{a}-{b}" for host, a, b in found)


def read_names(text: str) -> list[str]:
    """Read what ``names_of`` has made. Raises ``ValueError`` on anything else.

    >>> read_names("0.0-2 1.4")
    ['0.0', '0.1', '0.2', '1.4']
    """
    found: list[str] = []
    for word in text.split():
        host, _, ordinals = word.partition(".")
        first, _, last = ordinals.partition("-")
        found += [f"{int(host)}.{n}" for n in range(int(first), int(last or first) + 1)]
    return found


def announce(generation: Generation, base: Generation | None) -> Message:
    """Return the message that tells a generation to those who know ``base``, or nothing (None)."""
    known = {} if base is None else {member.worker: facts_of(member) for member in base.members}
    new = {m.worker: facts_of(m) for m in generation.members if known.get(m.worker) != facts_of(m)}
    gone = known.keys() - {member.worker for member in generation.members}
    return {
        "type": "generation",
        "number": generation.number,
        "run": generation.run,
        "life": generation.life,
        "reason": generation.reason,
        "base": "" if base is None else base.name,
        "gone": names_of(gone),
        "come": [[worker, *facts] for worker, facts in new.items()],
        "standings": _standings(generation),
    }


def heard(message: Message, base: Generation | None) -> Generation:
    """Return the generation that ``announce`` has told. ``base``: the newest one that the reader knows.

    Raises ``ValueError``, ``KeyError`` or ``TypeError`` if the message is malformed, or builds on another generation.
    """
    if message["base"] != ("" if base is None or not message["base"] else base.name):
        raise ValueError(f"it builds on generation {message['base']}, which is not known")
    known = {m.worker: facts_of(m) for m in base.members} if base is not None and message["base"] else {}
    for worker in read_names(message["gone"]):
        del known[worker]
    known |= {str(worker): tuple(facts) for worker, *facts in message["come"]}
    shown = _read_standings(message["standings"], known)
    members = [
        Member(worker=w, address=address, port=port, host=host, incarnation=incarnation, standing=shown[w])
        for w, (address, port, host, incarnation) in sorted(known.items(), key=lambda item: worker_order(item[0]))
    ]
    facts = {name: message[name] for name in ("number", "run", "life", "reason")}
    return Generation(members=tuple(members), **facts)


Facts = tuple[str, int, str, str]  # address, port, failure domain, incarnation


def facts_of(member: Member) -> Facts:
    """Return what never changes of a member."""
    return (member.address, member.port, member.host, member.incarnation)


def _standings(generation: Generation) -> list[tuple[Message, str]]:
    """Return the different standings, each with the members that show it; the most common one last, for the rest."""
    by_text: dict[str, list[str]] = {}
    values: dict[int, str] = {}  # standings are often one object: then it is encoded once
    for member in generation.members:
        text = values.get(id(member.standing))
        if text is None:
            text = values[id(member.standing)] = json.dumps(member.standing.to_json(), sort_keys=True)
        by_text.setdefault(text, []).append(member.worker)
    groups = sorted(by_text.items(), key=lambda item: len(item[1]))
    last = len(groups) - 1
    return [(json.loads(text), REST if n == last else names_of(names)) for n, (text, names) in enumerate(groups)]


def _read_standings(groups: Iterable[tuple[Message, str]], workers: Collection[str]) -> dict[str, Standing]:
    shown: dict[str, Standing] = {}
    for value, names in groups:
        standing = Standing(**value)
        for name in workers if names == REST else read_names(names):
            shown.setdefault(name, standing)
    return shown
