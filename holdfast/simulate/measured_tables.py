"""Measured facts about models on each system: throughput by the number of nodes, and times.

A tables file holds measurements of several models. ``planned.py`` makes the same facts from a profile and assumptions.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from holdfast.errors import UsageError

MEASURED = ("oobleck", "bamboo", "varuna")  # systems that a tables file has
# Parameters of the models in Oobleck's tables, as their names and papers give them: for the size of the state only.
PARAMETERS = {
    "BERT-large": 340e6,
    "GPT-2": 345e6,
    "GPT-3-medium": 350e6,
    "GPT-3-2.7b": 2.7e9,
    "GPT-3-6.7b": 6.7e9,
}
STATE_BYTES = 12  # per parameter: the weight and both of Adam's moments in single precision


@dataclass(frozen=True)
class Speeds:
    """Throughput of a system: samples per second by the number of nodes, as far as it was measured.

    Of more nodes than were ever measured, the surplus waits. With fewer, nothing is trained. ``used`` has how many
    nodes train, where not all do.

    >>> speeds = Speeds({2: 10.0, 4: 19.0, 7: 25.0}, used={7: 6})
    >>> speeds.at(9), speeds.at(5), speeds.at(3), speeds.at(1)
    ((25.0, 6), (19.0, 4), (10.0, 2), (0.0, 0))
    """

    by_nodes: Mapping[int, float]
    used: Mapping[int, int] = field(default_factory=dict)

    def at(self, nodes: int) -> tuple[float, int]:
        """Return the samples per second with so many nodes, and how many of them train."""
        place = bisect_right(self._counts, nodes)
        known = self._counts[place - 1] if place else 0
        if not self.by_nodes.get(known):
            return 0.0, 0
        return self.by_nodes[known], self.used.get(known, known)

    @cached_property
    def _counts(self) -> list[int]:
        return sorted(self.by_nodes)

    @cached_property
    def fewest(self) -> int:
        """Fewest nodes that train at all; 0 if none do."""
        return min((count for count, speed in self.by_nodes.items() if speed), default=0)

    @cached_property
    def most(self) -> int:
        """Most nodes that were measured."""
        return max(self.by_nodes)


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts about one model, for the rules of all systems. Times are in seconds."""

    model: str
    samples_per_step: float
    speeds: Mapping[str, Speeds | None]  # of oobleck, bamboo, varuna and recycle; None: out of memory
    reconfigure: float  # of Oobleck, after a loss or a join
    local_rendezvous: float  # of Bamboo, at the end of a step
    global_rendezvous: float  # of Bamboo, after a fatal loss
    effective_fraction: float | None  # share of Bamboo's work that is not redundant
    checkpoint_every: int  # steps between Varuna's checkpoints
    checkpoint: float  # of Varuna, one save
    restart: float  # of Varuna
    creation: float  # until an added node is up
    state_bytes: float  # of the whole model with the optimizer's state; nan: not known
    depth: int = 12  # nodes of Bamboo's pipelines, as in its published simulation (the tables step at multiples of 6)
    waiting_slows: bool = True  # Bamboo slows down when a waiting node is lost, as in its published simulation
    stages: int = 6  # of a pipeline, for holdfast's moved bytes and ReCycle's grid: assumed
    micro_batches: int = 120  # of a step, for ReCycle: assumed, 4 for each of 30 nodes

    def best(self, *more: Speeds) -> Speeds:
        """Return the best throughput of all systems, and of ``more``, with so many nodes or fewer.

        >>> from holdfast.simulate.measured_tables import example
        >>> example().best()
        Speeds(by_nodes={2: 8.0, 3: 8.0, 4: 20.0}, used={2: 2, 3: 2, 4: 4})
        """
        known = [*more, *(speeds for speeds in self.speeds.values() if speeds is not None)]
        counts = sorted({count for speeds in known for count in speeds.by_nodes})
        found: dict[int, tuple[float, int]] = {}
        most, train = 0.0, 0
        for count in counts:
            # Of equally fast systems, the one that uses the fewest nodes.
            speed, nodes = max((speeds.at(count) for speeds in known), key=lambda at: (at[0], -at[1]))
            if speed > most:
                most, train = speed, nodes
            found[count] = most, train
        return Speeds(
            {count: speed for count, (speed, _) in found.items()}, {count: nodes for count, (_, nodes) in found.items()}
        )


def example() -> ModelFacts:
    """Return the facts of a small made-up model, for examples and tests.

    >>> example().speeds["bamboo"] is None
    True
    """
    return ModelFacts(
        model="example",
        samples_per_step=100,
        speeds={
            "oobleck": Speeds({2: 8.0, 3: 6.0, 4: 20.0}),
            "recycle": Speeds({2: 8.0, 4: 20.0}),
            "varuna": Speeds({2: 7.0, 4: 18.0}),
            "bamboo": None,
        },
        reconfigure=5.0,
        local_rendezvous=20.0,
        global_rendezvous=30.0,
        effective_fraction=None,
        checkpoint_every=10,
        checkpoint=10.0,
        restart=60.0,
        creation=45.0,
        state_bytes=12e9,
        depth=2,
        stages=2,
    )


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Contents of a tables file."""

    source: str
    models: Mapping[str, ModelFacts]
    published: Mapping[str, Mapping[str, Mapping[str, float]]]  # system, model, trace: average samples per second

    def facts(self, model: str) -> ModelFacts:
        """Return the facts of a model. Raises UsageError if the tables do not have it."""
        if model not in self.models:
            raise UsageError(f"the tables have no model {model!r}", hint=f"they have {', '.join(self.models)}")
        return self.models[model]


def read_tables(path: Path) -> Tables:
    """Read and check a tables file. Raises UsageError that says what is wrong with it."""
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError as e:
        raise UsageError(f"there is no tables file {path}") from e
    except (OSError, ValueError) as e:
        raise UsageError(f"the tables file {path} cannot be read: {e}") from e
    try:
        return parse_tables(document, source=str(path))
    except KeyError as e:
        raise UsageError(f"the tables file {path} has no {e.args[0]!r} where one belongs") from e
    except (AttributeError, TypeError, ValueError) as e:
        raise UsageError(f"the tables file {path} has not the shape of tables: {e}") from e


def parse_tables(document: Any, *, source: str = "") -> Tables:
    """Check the JSON document of a tables file. Raises KeyError, TypeError or ValueError if it is not one."""
    by_system = document["samples_per_s_by_nodes"]
    models = list(document["samples_per_step"])
    if not models:
        raise ValueError("there is no model in it")
    speeds = {
        model: {name: _speeds(by_system[name][model], f"{name}, {model}") for name in MEASURED} for model in models
    }
    table = document.get("table2_samples_per_s", {})
    columns = table.get("columns", [])
    published = {
        name: {model: dict(zip(columns, row, strict=True)) for model, row in rows.items()}
        for name, rows in table.items()
        if name in MEASURED
    }
    return Tables(
        source=str(document.get("source", source)),
        models={model: _facts(document, model, speeds[model]) for model in models},
        published=published,
    )


def _facts(document: Any, model: str, speeds: dict[str, Speeds | None]) -> ModelFacts:
    bamboo, varuna = document["bamboo"], document["varuna"]
    every = varuna["checkpoint_every_steps"]
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"checkpoint_every_steps is {every!r}")
    return ModelFacts(
        model=model,
        samples_per_step=_positive(document["samples_per_step"][model], f"samples_per_step of {model}"),
        speeds={**speeds, "recycle": speeds["oobleck"]},  # fault-free throughput: the tables have none of ReCycle
        reconfigure=_time(document["oobleck"]["reconfigure_s"][model], "reconfigure_s"),
        local_rendezvous=_time(bamboo["local_rendezvous_s"][model], "local_rendezvous_s"),
        global_rendezvous=_time(bamboo["global_rendezvous_s"], "global_rendezvous_s"),
        effective_fraction=bamboo.get("effective_fraction"),
        checkpoint_every=every,
        checkpoint=_time(varuna["checkpoint_s"][model], "checkpoint_s"),
        restart=_time(varuna["restart_s"][model], "restart_s"),
        creation=_time(document["instance_creation_s"], "instance_creation_s"),
        state_bytes=STATE_BYTES * PARAMETERS.get(model, math.nan),
    )


def _speeds(row: Any, where: str) -> Speeds | None:
    if row is None:
        return None
    by_nodes = {int(count): _time(speed, f"samples/s of {where}") for count, speed in row.items()}
    if not by_nodes or min(by_nodes) < 1:
        raise ValueError(f"{where}: no throughput, or one for {min(by_nodes, default=0)} nodes")
    return Speeds(dict(sorted(by_nodes.items())))


def _time(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{where} is {value!r}")
    return float(value)


def _positive(value: Any, where: str) -> float:
    if not _time(value, where):
        raise ValueError(f"{where} is zero")
    return float(value)
