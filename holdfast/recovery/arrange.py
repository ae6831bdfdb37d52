"""Arranging a generation: the layout, and the state that each worker needs for its place in it.

Every member computes the same layout from the same facts, so nobody has to announce it. Then each worker gets the
layers of its place that it lacks, from workers that hold them. Before the first commit they come from a checkpoint,
are made in place, or come from the first worker.
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
from holdfast.cluster.texts import Everybody
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
from holdfast.recovery.fence import claim_of
from holdfast.recovery.replay import Replayer
from holdfast.recovery.resume import Resumer


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """The user's settings for layouts."""

    tolerate: int | None = None  # losses at once that should leave a copy of every layer; None: one
    stages: int | Sequence[int] | None = None  # stages of a pipeline, or the layers of each; None: chosen
    memory: int | None = None  # bytes that a worker has for its layers; None: no limit
    profile: Profile | None = None  # costs of the layers; None: measured at the begin
    budget: int | None = None  # bytes for the log of the whole run
    votes_each_step: bool = True  # False where replicas train apart


class Arranger:
    """This worker's part in arranging generations: the ``StateKeeper`` of a cohort.

    ``resumer`` reads checkpoints, and ``replayer`` computes lost layers again; each may be None, if the run has no
    checkpoints or no log. ``layout`` is the one of the current generation.
    """

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

    # --- the methods that a cohort calls ---------------------------------------------------------

    @property
    def minimum(self) -> int:
        """The smallest number of workers that can hold the model."""
        return self.layout.minimum

    def account(self) -> Account:
        """Return a description of this worker's state, for ``settle``."""
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
        """Note that the values in this worker's memory are not the run's state."""
        self._holdings.held.clear()

    def inform(self, group: Group, generation: Generation, settlement: Settlement) -> None:
        """Tell newcomers where the run is, and make sure that all know the costs of the layers."""
        if self._replayer is not None:
            self._replayer.close()
        self._measure(group, generation, settlement)
        self._tell(group, generation, settlement)

    def bring_back(self, group: Group, generation: Generation, settlement: Settlement) -> Settlement:
        """Compute lost layers again from the log; return the settlement with their new holders.

        May raise ``Broken``. The holdings are right even then: a layer counts only when its replay has ended.
        """
        lost = self._lost_layers(settlement)
        if settlement.begins is not None or not lost or self._replayer is None:
            return settlement
        try:
            self._lay_out(generation, settlement)
        except TooFewWorkers as e:  # the replay would be in vain: these workers cannot hold the model
            raise self._replayer.useless(str(e)) from e
        replay, holdings = self._replayer.plan(group, lost)
        again = {unit.number for unit in self._model.units_of(replay.layers)}
        computing = generation.workers[: self._replayer.workers(group.size)]
        self._holdings.undone -= again
        self._holdings.held -= again  # a layer that is computed again goes back to the checkpoint's values first
        if generation.workers[group.rank] in computing:
            self._model.hold(replay.layers)
        self._replayer.carry_out(group, replay, holdings)
        held = {worker: units - again for worker, units in settlement.held.items()}
        held |= {worker: held[worker] | again for worker in computing}
        self._holdings.held |= again if generation.workers[group.rank] in computing else set()
        return dataclasses.replace(settlement, held=held)

    def _lost_layers(self, settlement: Settlement) -> set[int]:
        """Return the layers to compute again. A lost shared weight comes back with any layer that uses it."""
        lost = {layer for layer in range(len(self._model.layers)) if layer in settlement.lost}
        for unit in self._model.units:
            if unit.number in settlement.lost and not unit.layers & lost:
                lost.add(min(unit.layers))
        return lost

    def provide(self, group: Group, generation: Generation, settlement: Settlement) -> Traffic:
        """Give every worker a place, and the state that it lacks there; return this worker's traffic.

        May raise ``Broken``. The holdings are right even then: a unit counts as soon as it has arrived whole.
        Raises ``TooFewWorkers`` if these workers cannot hold the model.
        """
        if settlement.begins is not None:
            traffic = self._begin(group, generation, settlement)
            self._state.progress.start = generation.name
        else:
            self.layout = self._lay_out(generation, settlement)
            held = [settlement.held[worker] for worker in generation.workers]
            traffic = self._send_missing(group, held, settlement)
        self.engine.enter(self.layout, group, logged=self._boundaries(generation, settlement))
        self._report(group, generation)
        return traffic

    @property
    def _kept(self) -> set[int]:
        """The held units of this worker's place. A step updates these and no others."""
        return self._holdings.held & self._wanted(self._rank)

    def let_go(self) -> None:
        """Free the layers that are not of this worker's place.

        Not before the first vote of a generation: until then somebody may still need a copy of them.
        """
        self._state.script.nobody_waits()
        self._holdings.undone.clear()  # inexact copies were replaced by one worker's: all copies are alike now
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
        teller = generation.rank_of(settlement.teller)
        tell(group, self._state, teller=teller, listeners=listeners)
        if self._resumer is not None and settlement.begins is None:
            self._resumer.welcome(group, worker=generation.workers[group.rank], teller=teller, listeners=listeners)

    def _measure(self, group: Group, generation: Generation, settlement: Settlement) -> None:
        """Measure the costs of the layers if nobody knows them and the layout depends on them.

        The worker that tells newcomers where the run is measures: all others get the profile from it.
        """
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
        """Whether costs matter: not with one layer, nor with all cuts given and no log that has to fit a budget."""
        wishes = self._wishes
        cut = len(self._model.layers) > 1 and (
            wishes.stages is None
            or (wishes.stages != 1 and isinstance(wishes.stages, int))
            or (wishes.stages != 1 and wishes.budget is not None)
        )
        return cut and (len(generation.members) > 1 or wishes.memory is not None)

    def _make_profile(self, link: Link) -> Profile:
        """Return the user's profile, or a measured one, with the user's limit of memory."""
        given = self._wishes.profile
        if given is None:
            return quick_profile(self.engine, link, memory=self._wishes.memory)
        return given if self._wishes.memory is None else dataclasses.replace(given, memory=self._wishes.memory)

    # --- the layout ------------------------------------------------------------------------------

    def _lay_out(self, generation: Generation, settlement: Settlement) -> Layout:
        """Return the layout of a generation, the same on every member. Raises ``TooFewWorkers``."""
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
            # A replica that trains apart needs its place until all have met, also if it leaves then.
            leaving=[m.worker for m in generation.members if m.standing.leaving and wishes.votes_each_step],
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
        """Return the bytes of each layer's tensors. A shared weight counts for its first layer."""
        sizes = [0] * len(self._model.layers)
        for unit in self._model.units:
            sizes[min(unit.layers)] += sum(tensor.nbytes for tensor in unit.tensors)
        return sizes

    def _wanted(self, rank: int) -> set[int]:
        """Return the units that a rank needs for its place."""
        role = self.layout.role(rank)
        return set() if role is None else {unit.number for unit in self._model.units_of(role.layers)}

    def _report(self, group: Group, generation: Generation) -> None:
        """Note this worker's rank, and write its place into the events."""
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
        """Choose the boundaries that are logged, and make a checkpoint due.

        The old records do not fit the new layout, so the log begins again, with a checkpoint. If somebody is in the
        middle of a step, it has passed the place where a checkpoint is taken: then it is due after that step.
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

    # --- the state that each place needs ---------------------------------------------------------

    def _send_missing(self, group: Group, held: Sequence[frozenset[int]], settlement: Settlement) -> Traffic:
        """Copy to each worker the units that it lacks for its place. ``held``: by rank, the units it holds."""

        def arrived(unit: int) -> None:
            self._holdings.arrived(unit, exact=unit not in settlement.inexact)

        self._hold_place(group.rank)
        sizes = {unit.number: sum(tensor.nbytes for tensor in unit.tensors) for unit in self._model.units}
        planned = moves(held, [self._wanted(rank) for rank in range(group.size)], sizes)
        if not planned or group.size == 1:
            return Traffic()
        traffic = carry_out(group, self._state, planned, arrived)
        # Tensors that are being sent must not change until they have arrived. A vote proves that. Where the next vote
        # comes only after an update (eager, or replicas that train apart), wait for everybody here.
        if self.engine.eager is not None or not self._wishes.votes_each_step:
            group.sum(torch.zeros(1, device=self._model.device))
        return traffic

    def _hold_place(self, rank: int) -> None:
        """Give the layers of this worker's place memory."""
        role = self.layout.role(rank)
        self._model.hold(() if role is None else role.layers)

    def _begin(self, group: Group, generation: Generation, settlement: Settlement) -> Traffic:
        """Begin a run: each worker reads its part of the newest checkpoint, or gets the initial values."""
        known = self._state.progress.profile

        def hold() -> None:
            self._state.progress.profile = known  # the checkpoint's profile was measured on other machines
            self.layout = self._lay_out(generation, settlement)
            self._hold_place(group.rank)

        ranks, claim = Everybody(group, self._model.device), claim_of(generation, generation.workers[group.rank])
        if self._resumer is not None and self._resumer.resume(ranks, claim=claim, hold=hold):
            self._holdings.held = self._wanted(group.rank)
            self._holdings.undone.clear()
            return Traffic()
        hold()
        return self._initial(group, generation, settlement)

    def _initial(self, group: Group, generation: Generation, settlement: Settlement) -> Traffic:
        """Make the initial layers in place where that is possible, and copy the others from the first worker."""
        assert settlement.begins is not None
        model = self._model
        made = frozenset(unit.number for unit in model.units if model.can_make(unit))
        mine = self._wanted(group.rank) & made
        model.make(model.units[number] for number in mine)
        first, everything = generation.rank_of(settlement.begins), frozenset(range(len(model.units)))
        self._holdings.held = mine | (everything - made if group.rank == first else set())
        held = [everything if rank == first else made for rank in range(group.size)]
        return self._send_missing(group, held, settlement)


def _hosts(generation: Generation) -> list[str]:
    return [member.host for member in generation.members]
