"""Replay: lost layers are read from the last checkpoint and trained again, from the records that neighbours logged.

A lost layer needs only its inputs and the gradients of its outputs, and its neighbours have logged both. All workers
take part: each computes some micro-batches of the lost layers, and sends the others the records that they need. Layers
that survivors hold are not touched, unless they have to be computed again as well. If anything fails, the log is given
up and the run returns to the checkpoint, so a replay costs time at worst and never gives wrong weights.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Collection, Sequence
from typing import Any

import torch

from holdfast.cluster import faults, tags
from holdfast.cluster.events import Events
from holdfast.cluster.group import Group
from holdfast.cluster.texts import Texts
from holdfast.engine.again import Again
from holdfast.engine.engine import Engine
from holdfast.engine.pipe import Inbox, Outbox, read
from holdfast.engine.state import State
from holdfast.engine.update import Terms
from holdfast.errors import Broken
from holdfast.log.log import Log
from holdfast.log.spill import Damaged
from holdfast.plan.batch import shares
from holdfast.plan.log_records import HeldRecords, Key
from holdfast.plan.replay_plan import Impossible, Replay, Situation, Sources, needed, plan_replay
from holdfast.recovery.copy import pass_on
from holdfast.recovery.resume import Resumer
from holdfast.rng import undisturbed_generators

logger = logging.getLogger(__name__)


class Replayer:
    """This worker's part in computing lost layers again."""

    def __init__(self, engine: Engine, state: State, log: Log, resumer: Resumer, events: Events) -> None:
        self.log = log
        self._engine = engine
        self._state = state
        self._resumer = resumer
        self._events = events
        self._ties = [tie.layers for tie in engine.ties.described]
        self._traffic: _Traffic | None = None  # of the last replay, as long as its generation lasts

    def workers(self, size: int) -> int:
        """Return how many of ``size`` workers compute: all, unless a bench sets HOLDFAST_REPLAYERS."""
        return min(size, int(os.environ.get("HOLDFAST_REPLAYERS", size)))

    def plan(self, group: Group, lost: Collection[int]) -> tuple[Replay, list[list[HeldRecords]]]:
        """Plan the replay of these layers; return it, and the records that each rank holds.

        Raises ``Broken`` if the log cannot bring them back; then it is given up.
        """
        ranks = Texts(group, self._engine.model.device)
        step = self._state.progress.step
        checkpoints = self._resumer.steps() if group.rank == 0 else []  # others may see them later
        mine = [checkpoints, [held.to_json() for held in self.log.holdings(step)]]
        said = [json.loads(text) for text in ranks.exchange(json.dumps(mine).encode())]
        holdings = [[HeldRecords.from_json(held) for held in each] for _, each in said]
        situation = Situation(
            layers=len(self._engine.model.layers),
            lost=lost,
            step=step,
            checkpoints=said[0][0],
            micro_batches=self._engine.order.micro_batches,
            holdings=holdings,
            ties=self._ties,
        )
        found = plan_replay(situation)
        if isinstance(found, Impossible):
            raise self.useless(found.reason)
        return found, holdings

    def carry_out(self, group: Group, replay: Replay, holdings: Sequence[Sequence[HeldRecords]]) -> None:
        """Carry out a replay. Every member calls this. The first ``workers`` ranks hold the layers afterwards.

        They must have memory for the layers before. Raises ``Broken``; if a record is damaged, the log is given up.
        """
        begin, settings = time.monotonic(), self._engine.update.settings()
        if group.rank == 0:
            logger.info("nobody holds all layers any more: %s", replay.reason)
        try:
            with undisturbed_generators():
                self._load(group, replay)
                count, size = self._compute(group, replay, holdings)
        except Damaged as e:
            raise self.useless(str(e)) from e
        finally:
            self._engine.update.set_settings(settings)
        self._events.write(
            "replay",
            generation=group.generation.number,
            worker=group.generation.workers[group.rank],
            first=replay.first,
            stop=replay.stop,
            layers=[[span.start, span.stop] for span in replay.spans],
            replayers=self.workers(group.size),
            records=count,
            bytes=size,
            seconds=round(time.monotonic() - begin, 4),
            reason=replay.reason,
        )

    def close(self) -> None:
        """Stop receiving records of the last replay, whose generation is over."""
        traffic, self._traffic = self._traffic, None
        if traffic is not None:
            traffic.close()

    def useless(self, reason: str) -> Broken:
        """Give up the log; return the error to raise. It ends the generation, and the next one begins from the
        checkpoint."""
        self._events.write("log-useless", worker=self.log.name, reason=reason)
        self.log.give_up(f"{reason}; all return to the last checkpoint")
        return Broken(f"the log is of no use: {reason}")

    def _load(self, group: Group, replay: Replay) -> None:
        """Read the layers from the checkpoint, on the workers that compute."""
        model, computes = self._engine.model, group.rank < self.workers(group.size)
        units = [unit for unit in model.units_of(replay.layers) if computes]
        self._engine.update.forget([p for unit in units for p in unit.parameters])
        numbers = {unit.number for unit in units}
        ranks = Texts(group, model.device)
        failure = self._resumer.agreed(ranks, replay.first, lambda step: self._resumer.fill_units(step, numbers))
        if failure is not None:
            raise self.useless(str(failure))

    def _terms(self, group: Group, replay: Replay) -> list[Terms]:
        """Return how each step was applied. A worker that has not noted it is told by one that has."""
        known = self.log.terms(replay.first, replay.stop)
        device = self._engine.model.device
        said = Texts(group, device).exchange(b"no" if known is None else b"yes")
        tellers = [rank for rank, text in enumerate(said) if text == b"yes"]
        if not tellers:
            raise self.useless(f"nobody knows how the steps since {replay.first} were applied")
        listeners = [rank for rank in range(group.size) if rank not in tellers]
        value = None if known is None else [vars(terms) for terms in known]
        heard = pass_on(group, value, sender=tellers[0], listeners=listeners, device=device)
        return [Terms(**terms) for terms in heard]

    def _compute(self, group: Group, replay: Replay, holdings: Sequence[Sequence[HeldRecords]]) -> tuple[int, int]:
        """Train the lost layers step by step; return how many records this worker has sent, and their bytes."""
        terms = self._terms(group, replay)
        workers, order, model = self.workers(group.size), self._engine.order, self._engine.model
        idle = [range(0)] * (group.size - workers)

        def parts(step: int) -> list[range]:
            return shares(order.micro_batches(step), workers) + idle

        def wanted(step: int, rank: int) -> list[Key]:
            computed = parts(step)[rank] if rank < workers else None
            layers = len(model.layers)
            return [] if computed is None else list(needed(replay, step, computed, layers=layers, ties=self._ties))

        steps = range(replay.first, replay.stop)
        traffic = self._traffic = _Traffic(group, self.log, Sources(holdings), wanted, steps, model.device)
        again = Again(self._engine, group, replay.spans, traffic.find, workers=workers, log=self.log)
        model.train()
        try:
            for step in steps:
                faults.point("replay")
                traffic.send_ahead(step)
                again.attempt(step, parts(step))
                # After this vote all have received the step's records and gradients. The update writes into
                # gradients that were sent, so it must not come earlier.
                group.vote(torch.zeros(1, device=model.device))
                again.apply(step, terms[step - replay.first])
                traffic.arrived(step)
        finally:
            again.drop()
        return traffic.count, traffic.bytes


class _Traffic:
    """The exchange of records. Each worker sends the others what they need, one step ahead, in the order of use.

    ``wanted(step, rank)`` lists the records that a rank needs for a step; ``sources`` tells who sends each.
    """

    def __init__(
        self, group: Group, log: Log, sources: Sources, wanted: Any, steps: range, device: torch.device
    ) -> None:
        self.count = self.bytes = 0
        self._group, self._log, self._sources, self._wanted, self._steps = group, log, sources, wanted, steps
        others = [rank for rank in range(group.size) if rank != group.rank]
        self._out = {rank: Outbox(group, rank, tags.REPLAY, device) for rank in others}
        self._device = device
        self._in: dict[int, Inbox] = {}
        self._kept: dict[int, list[Any]] = {}  # by step: sends that may not have arrived yet

    def send_ahead(self, step: int) -> None:
        """Send the records of this step and of the next one, unless they were sent before."""
        for each in (step, step + 1):
            if each in self._steps and each not in self._kept:
                self._kept[each] = [work for rank in self._out for work in self._send(each, rank)]

    def _send(self, step: int, rank: int) -> list[Any]:
        works: list[Any] = []
        for key in self._wanted(step, rank):
            if self._sources.rank_of(key) == self._group.rank:
                message = self._log.read(key)
                works += self._out[rank].send(message)
                self.count += 1
                self.bytes += sum(tensor.nbytes for tensor in message[1])
        return works

    def find(self, key: Key) -> Any:
        """Return the value of a record, from this worker's log or from the worker that has it."""
        source = self._sources.rank_of(key)
        if source == self._group.rank:
            text, tensors = self._log.read(key)
            return read((text, [tensor.clone() for tensor in tensors]))  # autograd may write into it
        if source not in self._in:
            self._in[source] = Inbox(self._group, source, tags.REPLAY, self._device)
        return self._in[source].take()

    def arrived(self, step: int) -> None:
        """Free the sends of a step: a vote has shown that they have arrived."""
        del self._kept[step]

    def close(self) -> None:
        """Stop receiving."""
        for inbox in self._in.values():
            inbox.close()
