"""The setting of a simulation, and sentences that say which of its numbers are measured and which assumed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.errors import UsageError
from holdfast.plan.profile import Profile
from holdfast.simulate.measured_tables import STATE_BYTES, ModelFacts, Tables
from holdfast.simulate.outcome import Setting
from holdfast.simulate.placements import enough
from holdfast.simulate.recovery_time import Recovery
from holdfast.simulate.synthetic import PREFIX, Synthetic
from holdfast.simulate.systems.rearranging import saving
from holdfast.simulate.trace import Trace, read_trace

GBIT = 10.0  # Gbit/s of a node's link, unless the user gives it


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A setting, and where the numbers of each system come from."""

    setting: Setting
    sources: dict[str, str]  # sentences by system; "" is for all systems


def the_trace(text: str) -> Trace:
    """Return the trace behind ``--trace``: from a file, or a synthetic one.

    >>> the_trace("synthetic:nodes=4,hours=1").counts
    (4,)
    """
    return Synthetic.parse(text).trace() if text.startswith(PREFIX) else read_trace(Path(text))


def bytes_per_second(gbit: float | None, default: float) -> float:
    """Return a link's bandwidth in bytes per second, ``default`` if it is not given. Raises UsageError for zero.

    >>> bytes_per_second(None, 1e9), bytes_per_second(10.0, 1e9)
    (1000000000.0, 1250000000.0)
    """
    if gbit is None:
        return default
    if not 0 < gbit < math.inf:
        raise UsageError(f"a link of {gbit:g} Gbit/s moves nothing")
    return gbit / 8 * 1e9


def by_tables(
    trace: Trace,
    tables: Tables,
    model: str,
    *,
    recovery: Recovery | None,
    gbit: float | None = None,
    parameters: float | None = None,
) -> Prepared:
    """Prepare a simulation with measured throughput and times.

    ``model`` is one of the tables' models, ``gbit`` a node's link, ``parameters`` the model's number of them. Raises
    UsageError if the tables do not have the model.
    """
    facts = tables.facts(model)
    if parameters is not None:
        facts = replace(facts, state_bytes=STATE_BYTES * parameters)
    bandwidth = bytes_per_second(gbit, bytes_per_second(GBIT, 0))
    setting = Setting(trace=trace, facts=facts, recovery=recovery.seconds if recovery else 0.0, bandwidth=bandwidth)
    measured = f"throughput by nodes and all times are those of the tables ({tables.source})"
    return Prepared(
        setting=setting,
        sources={
            "": f"added nodes are up after {facts.creation:g} s, except in the ideal (the tables)",
            "holdfast": f"recovery: {recovery.source if recovery else 'none'}. Assumed: Oobleck's throughput, since it "
            f"makes the same templates; {_moving(setting)}",
            "oobleck": measured,
            "varuna": measured,
            "bamboo": "the tables' throughput and times; as in the published simulation, pipelines have "
            f"{facts.depth} nodes, and the loss of a waiting one slows all steps; {_placed(trace)}" + _effective(facts),
            "recycle": f"assumed: fault-free throughput and reconfiguring as Oobleck's, restarts as Varuna's, "
            f"pipelines of {facts.stages} stages, {facts.micro_batches} micro-batches a step",
            "restart": f"assumed: Varuna's throughput, saving and restarting{_saving(facts, trace)}",
            "ideal": "at any moment the best throughput in the tables, or by ReCycle's formula; changes cost nothing",
        },
    )


def _placed(trace: Trace) -> str:
    return f"the mean over {enough(trace.losses)} placements, since a trace does not tell who stands where"


def _saving(facts: ModelFacts, trace: Trace) -> str:
    return f"; {saving(facts, trace).reason}" if facts.speeds["varuna"] is not None else ""


def _effective(facts: ModelFacts) -> str:
    if facts.effective_fraction is None:
        return ""
    return f"; of its used GPU-hours {facts.effective_fraction:.0%} are effective, the rest is redundant work"


def _moving(setting: Setting) -> str:
    facts = setting.facts
    if math.isnan(facts.state_bytes):
        return "moving layers takes no time, since the model's size is not known (--parameters)"
    return (
        f"{setting.moving:.3g} s to send a node one of {facts.stages} stages of {facts.state_bytes / 1e9:.3g} GB "
        f"({STATE_BYTES} bytes per parameter) at {8 * setting.bandwidth / 1e9:g} Gbit/s"
    )


def by_planner(
    trace: Trace,
    profile: Profile,
    *,
    recovery: Recovery | None,
    gbit: float | None = None,
    tolerate: int | None = None,
    devices: int | None = None,
    micro_batches: int | None = None,
) -> Prepared:
    """Prepare a simulation with the throughput that our cost model gives a profile; other times are assumed.

    ``gbit`` is a node's link, ``devices`` its number of them. Raises UsageError if the model does not fit.
    """
    from holdfast.simulate import planned

    link = replace(profile.between, bandwidth=bytes_per_second(gbit, profile.between.bandwidth))
    made = planned.make_model(
        replace(profile, between=link),
        trace,
        tolerate=1 if tolerate is None else tolerate,
        devices=devices or 1,
        micro_batches=micro_batches,
    )
    facts = planned.make_facts(made, trace)
    setting = Setting(
        trace=trace,
        facts=facts,
        recovery=recovery.seconds if recovery else 0.0,
        bandwidth=link.bandwidth,
        arrange=planned.planning(made, restart=facts.restart),
        devices=devices or 1,
    )
    return Prepared(setting=setting, sources=_planned_sources(facts, setting, recovery, made.micro_batches))


def _planned_sources(
    facts: ModelFacts, setting: Setting, recovery: Recovery | None, micro_batches: int
) -> dict[str, str]:
    gbit = 8 * setting.bandwidth / 1e9
    return {
        "": f"throughput is what the cost model of holdfast plan says, with {micro_batches} micro-batches a step; "
        f"links of {gbit:.3g} Gbit/s, added nodes up after {facts.creation:g} s (assumed)",
        "holdfast": f"recovery: {recovery.source if recovery else 'none'}; beside that, the layers that the plan moves",
        "oobleck": f"assumed: our plans, {facts.reconfigure:g} s and the layers they move",
        "varuna": f"assumed: the fastest equal pipelines, saves of {facts.checkpoint:.3g} s every "
        f"{facts.checkpoint_every} steps, restarts of {facts.restart:.3g} s",
        "bamboo": f"assumed: pipelines of {facts.depth}, every forward twice, rendezvous of "
        f"{facts.local_rendezvous:g} s, nothing for the loss of a waiting node; {_placed(setting.trace)}"
        if facts.speeds["bamboo"] is not None
        else "assumed: every forward twice, with twice the memory",
        "recycle": f"assumed: pipelines of {facts.stages}, the fastest for the nodes there are on average, "
        f"rerouting in {facts.reconfigure:g} s",
        "restart": f"assumed: as varuna{_saving(facts, setting.trace)}",
        "ideal": "at any moment the best throughput of all; changes cost nothing",
    }
