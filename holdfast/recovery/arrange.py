"""Getting a generation ready: who does what, and everybody gets what it needs for it.

Every member works out the same layout from the same facts. Then each gets the layers of its place that it lacks:
from those who hold them; at the begin from the first worker, from a checkpoint, or by making them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.cluster.events import Events
from holdfast.cluster.group import Group
from holdfast.cluster.membership import Generation
from holdfast.cluster.texts import Texts
from holdfast.commit.cohort import Traffic
from holdfast.commit.settle import Account, Settlement, account_of
from holdfast.engine.engine import Engine
from holdfast.engine.profile.quick import quick_profile
from holdfast.engine.profile.round_trips import quick_link
from holdfast.engine.state import State
from holdfast.errors import TooFewWorkers
from holdfast.plan.lay_out import lay_out
from holdfast.plan.layout import Layout
from holdfast.plan.log_choice import choose_boundaries
from holdfast.plan.planner import Shortage
from holdfast.plan.profile import Link, Profile
from holdfast.recovery.copy import carry_out, moves, tell
from holdfast.recovery.replay import Replayer
from holdfast.recovery.resume import Resumer


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the user asks of layouts. ``profile`` is measured at the begin if it is not given.

    Without a word on it, one loss should be survived.
    """

    tolerate: int | None = None
    stages: int | Sequence[int] | None = None
    memory: int | None = None
    profile: Profile | None = None
    budget: int | None = None  # bytes for the log of the whole run
    votes_each_step: bool = True  # False where replicas train apart


class Arranger:
    """This worker's part in getting generations ready: the ``StateKeeper`` of a cohort."""

    def __init__(
        self,
        engine: Engine,
        state: State,
        events: Events,
        wishes: Wishes,
        resumer: Resumer | None,
        replayer: Replayer | None = None,
    ) -> None:
        self.engine = engine
        self.layout: Layout = engine.layout
        self._holdings = engine.holdings
        self._rank = 0
        self._model = engine.model
        self._state = state
        self._events = events
        self._wishes = wishes
        self._resumer = resumer
        self._replayer = replayer

    # --- what a cohort asks ----------------------------------------------------------------------

    @property
    def minimum(self) -> int:
        """How many workers it takes to hold the model."""
        return self.layout.minimum

    def account(self) -> Account:
        """Return what this worker holds, and what else counts when a generation settles."""
        undone = self._holdings.undone | (set() if self.engine.eager is None else self.engine.eager.begun)
        return Account(
            resumable=self._resumer is not None,
            units=len(self._model.units),
            held=tuple(sorted(self._holdings.held)),
            next=tuple(sorted(self._kept)),
            undone=tuple(sorted(undone)),
            logged=self._replayer is not None and self._replayer.log.usable,
            profiled=self._state.progress.profile is not None,
            step=self._state.progress.step,
        )

    def holds(self, units: Collection[int]) -> bool:
        """Whether all of these units are here."""
        return self._holdings.held.issuperset(units)

    def hold_nothing(self) -> None:
        """Note that what is here is not the run's state."""
        self._holdings.held.clear()

    def inform(self, group: Group, generation: Generation, settlement: Settlement) -> None:
        """Afterwards everybody knows where the run is, and what its layers cost."""
        if self._replayer is not None:
            self._replayer.close()
        self._measure(group, generation, settlement)
        self._tell(group, generation, settlement)

    def bring_back(self, group: Group, generation: Generation, settlement: Settlement) -> Settlement:
        """What nobody holds any more is computed again from the log; returns who holds it then.

        ``Broken`` may fly through it; ``held`` is right even then.
        """
        lost = self._lost_layers(settlement)
        if settlement.begins is not None or not lost or self._replayer is None:
            return settlement
        try:
            self._lay_out(generation, settlement)
        except TooFewWorkers as e:  # replacements would come too late for this generation
            raise self._replayer.useless(str(e)) from e
        replay, holdings = self._replayer.plan(group, lost)
        again = {unit.number for unit in self._model.units_of(replay.layers)}
        computing = generation.workers[: self._replayer.workers(group.size)]
        self._holdings.undone -= again
        self._holdings.held -= again  # what is computed again as well is not what it was until the end
        if generation.workers[group.rank] in computing:
            self._model.hold(replay.layers)
        self._replayer.carry_out(group, replay, holdings)
        held = {worker: units - again for worker, units in settlement.held.items()}
        held |= {worker: held[worker] | again for worker in computing}
        self._holdings.held |= again if generation.workers[group.rank] in computing else set()
        return dataclasses.replace(settlement, held=held)

    def _lost_layers(self, settlement: Settlement) -> set[int]:
        """Layers whose own tensors nobody holds; what layers share comes back with any of them."""
        lost = {layer for layer in range(len(self._model.layers)) if layer in settlement.lost}
        for unit in self._model.units:
            if unit.number in settlement.lost and not unit.layers & lost:
                lost.add(min(unit.layers))
        return lost

    def provide(self, group: Group, generation: Generation, settlement: Settlement) -> Traffic:
        """Gives everybody a place, and what it needs there; returns what this worker had to do with it.

        ``Broken`` may fly through it; ``held`` is right even then.
        """
        if settlement.begins is not None:
            traffic = self._begin(group, generation, settlement)
        else:
            self.layout = self._lay_out(generation, settlement)
            held = [settlement.held[worker] for worker in generation.workers]
            traffic = self._send_missing(group, held)
        self.engine.enter(self.layout, group, logged=self._boundaries(generation, settlement))
        self._report(group, generation)
        return traffic

    @property
    def _kept(self) -> set[int]:
        """The units of this worker's place, which are all that it updates."""
        return self._holdings.held & self._wanted(self._rank)

    def let_go(self) -> None:
        """After the first vote of a generation: everybody has what it needs, so what is not ours can go."""
        self._holdings.undone.clear()  # all copies that are left are alike
        role = self.layout.role(self._rank)
        mine = set() if role is None else set(role.layers)
        gone = set(range(len(self._model.layers))) - mine
        if gone:
            self._model.release(gone)
            self._holdings.held = self._kept
            for unit in self._model.units:
                if unit.number not in self._holdings.held:
                    self._state.update.forget(unit.parameters)

    # --- where the run is ------------------------------------------------------------------------

    def _tell(self, group: Group, generation: Generation, settlement: Settlement) -> None:
        listeners = [generation.rank_of(worker) for worker in settlement.newcomers]
        tell(group, self._state, teller=generation.rank_of(settlement.teller), listeners=listeners)

    def _measure(self, group: Group, generation: Generation, settlement: Settlement) -> None:
        """If nobody knows yet what the layers cost, and it matters, the one who tells the others measures it."""
        if not self._profile_is_needed(generation):
            return
        known = (
            [] if settlement.begins is not None else [m for m in generation.members if account_of(m.standing).profiled]
        )
        if known:
            return
        teller = generation.rank_of(settlement.teller)
        link = quick_link(group, _hosts(generation), clock=teller) if group.size > 1 else None
        if group.rank == teller:
            link = link or Link(bandwidth=1e9, latency=1e-4)
            self._state.progress.profile = self._make_profile(link).to_json()

    def _profile_is_needed(self, generation: Generation) -> bool:
        """Not where there is nothing to be cut, or all cuts are given and no log has to fit into a budget."""
        wishes = self._wishes
        cut = len(self._model.layers) > 1 and (
            wishes.stages is None
            or (wishes.stages != 1 and isinstance(wishes.stages, int))
            or (wishes.stages != 1 and wishes.budget is not None)
        )
        return cut and (len(generation.members) > 1 or wishes.memory is not None)

    def _make_profile(self, link: Link) -> Profile:
        given = self._wishes.profile
        if given is None:
            return quick_profile(self.engine, link, memory=self._wishes.memory)
        return given if self._wishes.memory is None else dataclasses.replace(given, memory=self._wishes.memory)

    # --- who does what ---------------------------------------------------------------------------

    def _lay_out(self, generation: Generation, settlement: Settlement) -> Layout:
        wishes, model, workers = self._wishes, self._model, generation.workers
        known = self._state.progress.profile
        needs = [{unit.number for unit in model.units_of([layer])} for layer in range(len(model.layers))]
        layers = {
            worker: [layer for layer, needed in enumerate(needs) if needed <= units]
            for worker, units in settlement.held.items()
        }
        found = lay_out(
            layers=len(model.layers),
            workers=workers,
            held={} if settlement.begins is not None else layers,
            leaving=[m.worker for m in generation.members if m.standing.leaving],
            micro_batches=self.engine.order.micro_batches(0),
            tolerate=1 if wishes.tolerate is None else wishes.tolerate,
            stages=wishes.stages,
            profile=None if known is None else Profile.from_json(known),
            hosts=dict(zip(workers, _hosts(generation), strict=True)),
            sizes=self._layer_bytes(),
        )
        if isinstance(found, Shortage):
            raise TooFewWorkers(found.reason, hint=found.hint)
        return found

    def _layer_bytes(self) -> list[int]:
        sizes = [0] * len(self._model.layers)
        for unit in self._model.units:
            sizes[min(unit.layers)] += sum(tensor.nbytes for tensor in unit.tensors)
        return sizes

    def _wanted(self, rank: int) -> set[int]:
        """The units that a rank needs for its place."""
        role = self.layout.role(rank)
        return set() if role is None else {unit.number for unit in self._model.units_of(role.layers)}

    def _report(self, group: Group, generation: Generation) -> None:
        self._rank = group.rank
        role = self.layout.role(group.rank)
        place: dict[str, Any] = {}
        if role is not None:
            place = {"pipeline": role.pipeline, "stage": role.stage}
            place |= {"first": role.layers.start, "stop": role.layers.stop}
        member = generation.members[group.rank]
        self._events.write(
            "layout",
            worker=member.worker,
            host=member.host,
            generation=generation.number,
            **place,
            reason=self.layout.reason,
        )

    def _boundaries(self, generation: Generation, settlement: Settlement) -> frozenset[int]:
        """Which boundaries are logged. What the records are of begins anew, so a checkpoint is due.

        Not before a step that somebody is in the middle of: it has passed where the checkpoint would be taken.
        """
        progress = self._state.progress
        if self._replayer is None or self._resumer is None:
            return frozenset()
        if progress.saved != progress.step:
            standings = [member.standing for member in generation.members]
            in_a_step = any(account_of(s).doing == "step" and s.operation == settlement.operation for s in standings)
            progress.due = progress.step + in_a_step
        known = progress.profile
        chosen = choose_boundaries(
            self.layout,
            profile=None if known is None else Profile.from_json(known),
            micro_batches=self.engine.order.micro_batches(0),
            interval=self._resumer.interval,
            budget=self._wishes.budget,
            ties=self.engine.ties.described,
        )
        self._resumer.limit(chosen.longest)
        facts = {"boundaries": sorted(chosen.boundaries), "bytes_per_step": chosen.bytes_per_step}
        self._events.write("logging", **facts, reason=chosen.reason)
        return chosen.boundaries

    # --- everybody gets what it needs ------------------------------------------------------------

    def _send_missing(self, group: Group, held: Sequence[frozenset[int]]) -> Traffic:
        """What somebody lacks for its place comes from those who hold it."""
        self._hold_place(group.rank)
        sizes = {unit.number: sum(tensor.nbytes for tensor in unit.tensors) for unit in self._model.units}
        planned = moves(held, [self._wanted(rank) for rank in range(group.size)], sizes)
        if not planned or group.size == 1:
            return Traffic()
        traffic = carry_out(group, self._state, planned, self._holdings.arrived)
        if (
            self.engine.eager is not None or not self._wishes.votes_each_step
        ):  # else what is sent stays as it is until the vote
            group.sum(torch.zeros(1, device=self._model.device))
        return traffic

    def _hold_place(self, rank: int) -> None:
        role = self.layout.role(rank)
        self._model.hold(() if role is None else role.layers)

    def _begin(self, group: Group, generation: Generation, settlement: Settlement) -> Traffic:
        """Nothing was committed: from the checkpoint, each its own part; if there is none, the first values."""
        known = self._state.progress.profile

        def hold() -> None:
            self._state.progress.profile = known  # what a checkpoint says of it was measured elsewhere
            self.layout = self._lay_out(generation, settlement)
            self._hold_place(group.rank)

        if self._resumer is not None and self._resumer.resume(Texts(group, self._model.device), hold=hold):
            self._holdings.held = self._wanted(group.rank)
            self._holdings.undone.clear()
            return Traffic()
        hold()
        return self._initial(group, generation, settlement)

    def _initial(self, group: Group, generation: Generation, settlement: Settlement) -> Traffic:
        """Layers that everybody can make are made; the others are the first worker's."""
        assert settlement.begins is not None
        model = self._model
        made = frozenset(unit.number for unit in model.units if model.can_make(unit))
        mine = self._wanted(group.rank) & made
        model.make(model.units[number] for number in mine)
        first, everything = generation.rank_of(settlement.begins), frozenset(range(len(model.units)))
        self._holdings.held = mine | (everything - made if group.rank == first else set())
        return self._send_missing(group, [everything if rank == first else made for rank in range(group.size)])


def _hosts(generation: Generation) -> list[str]:
    return [member.host for member in generation.members]
