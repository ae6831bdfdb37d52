"""Decisions of the roster: pure functions that return a decision and its reason."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.cluster.membership import Judge, Standing, machine_of, newest_of, worker_order
from holdfast.words import some_of


@dataclass(frozen=True, kw_only=True)
class Composition:
    """The members of the next generation, the workers that may leave, and why. No members: the run is over."""

    members: tuple[str, ...]
    dismissed: tuple[str, ...] = ()  # workers that were asked to leave and are not needed any more
    reason: str


def compose(*, standings: Mapping[str, Standing], waiting: Collection[str], target: int, judge: Judge) -> Composition:
    """Choose the next generation from the survivors' standings and the workers that wait to join.

    ``target``: the number of workers that the run should have. ``judge`` tells whether the workers that stay hold all
    of the state without those that leave.

    Joiners are taken in only when every survivor is at the same boundary between two steps. Elsewhere a survivor may
    be inside user code that a joiner will never run.

    >>> from holdfast.cluster.membership import Judgement
    >>> fine = Judgement(whole=True, recoverable=False, resumable=False, reason="")
    >>> standings = {"0.0": Standing(operation=4, boundary=True)}
    >>> compose(standings=standings, waiting=["0.2", "0.3"], target=2, judge=lambda *_, **__: fine).members
    ('0.0', '0.2')
    """
    # A leaver that is not at a boundary stays for one more operation: if all leave, they may have to save first.
    stay = {w: s for w, s in standings.items() if not (s.leaving and s.boundary)}
    room = max(0, target - len(stay)) if _all_at_one_boundary(standings) else 0
    joiners = sorted(waiting, key=worker_order)[:room]
    if standings and not stay and not joiners:
        return Composition(members=(), dismissed=tuple(standings), reason="everybody was asked to leave")
    knows_all = newest_of(stay.values()) == newest_of(standings.values())
    if not knows_all or not judge(stay, trained=False).whole:
        stay = dict(standings)  # leavers first hand over what only they hold, and leave at the next boundary
    dismissed = tuple(sorted(standings.keys() - stay.keys(), key=worker_order))
    members = tuple(sorted([*stay, *joiners], key=worker_order))
    return Composition(members=members, dismissed=dismissed, reason=_reason(dismissed, joiners))


def _all_at_one_boundary(standings: Mapping[str, Standing]) -> bool:
    return (
        all(s.boundary for s in standings.values())
        and len({s.operation for s in standings.values() if s.operation is not None}) <= 1
    )


def _reason(dismissed: Sequence[str], joiners: Sequence[str]) -> str:
    parts = []
    if joiners:
        parts.append(f"{some_of(joiners)} joined")
    if dismissed:
        parts.append(f"{some_of(dismissed)} left as asked")
    return "; ".join(parts) or "regrouped over the survivors"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The number of an agent, or None if it is refused, and why."""

    number: int | None
    reason: str


def enter_host(*, number: int | None, agent: str, known: Mapping[str, int], next_number: int, most: int) -> Entry:
    """Decide which number an agent gets.

    ``number``: the one it says it has. ``agent``: its incarnation. ``known``: the numbers of connected agents, by
    incarnation. ``next_number``: for a new one. ``most``: agents that may take part.

    >>> enter_host(number=None, agent="b", known={"a": 0}, next_number=1, most=2).number
    1
    >>> enter_host(number=0, agent="b", known={"a": 0}, next_number=1, most=2).reason
    'host 0 is another agent by now: this one belongs to an earlier start of the run'
    """
    if agent in known:  # a new connection; the answer on its old one may be lost
        return Entry(number=known[agent], reason="it is known")
    if number is not None and number in known.values():
        reason = f"host {number} is another agent by now: this one belongs to an earlier start of the run"
        return Entry(number=None, reason=reason)
    if number is None and len(known) >= most:
        return Entry(number=None, reason=f"the run has all of its {most} hosts")
    return Entry(number=next_number if number is None else number, reason="it is new here")


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """Whether the first generation can begin, and if not what it waits for."""

    ready: bool
    reason: str


def first_generation(*, slots: Mapping[int, int], minimum_hosts: int, waiting: Mapping[int, int]) -> Readiness:
    """Decide whether the first generation begins: enough hosts are there, and all their slots are filled.

    ``slots``: workers that each host will have. ``waiting``: workers of each host that are ready.

    >>> first_generation(slots={0: 2}, minimum_hosts=1, waiting={0: 1}).reason
    'host 0 has 1 of 2 workers ready'
    """
    if len(slots) < minimum_hosts:
        return Readiness(ready=False, reason=f"{len(slots)} of at least {minimum_hosts} hosts are here")
    for host, wanted in slots.items():
        if waiting.get(host, 0) < wanted:
            reason = f"host {host} has {waiting.get(host, 0)} of {wanted} workers ready"
            return Readiness(ready=False, reason=reason)
    return Readiness(ready=True, reason=f"{len(slots)} hosts with {sum(slots.values())} workers are ready")


def first_members(*, waiting: Iterable[str], slots: Mapping[int, int]) -> list[str]:
    """Return the members of a first generation, by rank: of each host as many of its workers as it has slots.

    A host that was asked to leave has none, although its workers may still be connected.

    >>> first_members(waiting=["0.0", "1.0", "1.1", "1.2"], slots={1: 2})
    ['1.0', '1.1']
    """
    chosen: list[str] = []
    left = dict(slots)
    for name in sorted(waiting, key=worker_order):
        machine = machine_of(name)
        if left.get(machine, 0) > 0:
            left[machine] -= 1
            chosen.append(name)
    return chosen


@dataclass(frozen=True, kw_only=True)
class ErrorVerdict:
    """The decision whether a worker's error stops the run, and why."""

    stop: bool
    reason: str


def judge_error(*, error: str, earlier: Collection[str], alive: int) -> ErrorVerdict:
    """Decide whether an exception in the user's code ends the run.

    ``error``: its last line. ``earlier``: those of earlier errors. ``alive``: how many workers are left. An error that
    comes a second time would come on every worker, and one that leaves nobody alive has come on all of them: both end
    the run. A first, single one may be the machine's fault: the others go on.

    >>> judge_error(error="KeyError: 'x'", earlier=["KeyError: 'x'"], alive=3).stop
    True
    """
    if error in earlier:
        return ErrorVerdict(stop=True, reason="the same error again on another worker")
    if alive == 0:
        return ErrorVerdict(stop=True, reason="the error ended every worker")
    return ErrorVerdict(stop=False, reason="a single worker's error; the others go on")


def _named(kind: str) -> str:
    return "the end" if kind == "end" else f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


CALL_ON_EVERY_WORKER = (
    "call run.steps, step.commit, evaluate, predict, save_model and sha256 on every worker alike, not only on the first"
)


def hint_of_joiners(joiners: Collection[str]) -> str:
    """Return what to do if workers disagree on what comes next, and some of them have joined later.

    >>> hint_of_joiners(["0.3"]).partition(":")[0]
    '0.3 joined later, so its script has not seen what the others computed before'
    """
    names = ", ".join(sorted(joiners, key=worker_order))
    their = "its script has" if len(joiners) == 1 else "their scripts have"
    return (
        f"{names} joined later, so {their} not seen what the others computed before: keep what the script decides by "
        "in Run(state={…}) and run.state, not in variables of its own; and make each call on every worker"
    )


def disagreement(doings: Mapping[str, tuple[int, str]], joiners: Collection[str] = ()) -> str | None:
    """Return an error message if two workers are at different kinds of the same operation, else None.

    ``doings``: each worker's (number of the operation, kind). Such workers would wait for each other for ever.
    ``joiners``: those of them that came after the begin.

    >>> print(disagreement({"0.0": (7, "evaluation"), "0.1": (7, "step")}).partition(" (")[0])
    workers disagree on what comes next: for 0.0 it is an evaluation, for 0.1 a step
    """
    seen: dict[int, tuple[str, str]] = {}
    for worker, (operation, kind) in doings.items():
        other, meant = seen.setdefault(operation, (worker, kind))
        if meant != kind:
            hint = hint_of_joiners(joiners) if joiners else CALL_ON_EVERY_WORKER
            said = f"for {other} it is {_named(meant)}, for {worker} {_named(kind)}"
            return f"workers disagree on what comes next: {said} ({hint})"
    return None
