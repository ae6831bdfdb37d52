"""Metrics of runs for Prometheus. Names and labels are documented in docs/watch.md, and do not change."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from holdfast.watch.reader import Reader
from holdfast.watch.view import View

CONTENT_TYPE = CONTENT_TYPE_LATEST
PHASES = ("nothing", "starting", "recovering", "training", "finished", "stopped")
RUN = ["run"]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What metrics need of a run. ``recoveries``: their number by the least edge in seconds that they are within."""

    view: View
    recoveries: dict[float, int]
    recovery_seconds: float  # of all of them


def facts_of(reader: Reader) -> Facts:
    """Return the facts of a run that is being read."""
    fold = reader.fold
    recoveries, seconds = dict(fold.recovery_counts), fold.recovery_seconds
    return Facts(view=fold.view(), recoveries=recoveries, recovery_seconds=seconds)


def text_of(runs: Mapping[str, Facts]) -> bytes:
    """Return the metrics of runs as Prometheus reads them."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(runs))
    return generate_latest(registry)


class _Collector:
    def __init__(self, runs: Mapping[str, Facts]) -> None:
        self._runs = runs

    def collect(self) -> Iterable[Metric]:
        for name, help_text, value_of in GAUGES:
            gauge = GaugeMetricFamily(name, help_text, labels=RUN)
            for run, facts in self._runs.items():
                if (value := value_of(facts.view)) is not None:
                    gauge.add_metric([run], value)
            yield gauge
        for name, help_text, kind in COUNTERS:
            counter = CounterMetricFamily(name, help_text, labels=RUN)
            for run, facts in self._runs.items():
                counter.add_metric([run], facts.view.counts.get(kind, 0))
            yield counter
        yield from self._phases()
        yield from self._recoveries()
        yield from self._of_workers()

    def _phases(self) -> Iterable[Metric]:
        gauge = GaugeMetricFamily("holdfast_phase", "1 for the phase that the run is in", labels=[*RUN, "phase"])
        for run, facts in self._runs.items():
            for phase in PHASES:
                gauge.add_metric([run, phase], float(facts.view.phase == phase))
        yield gauge

    def _recoveries(self) -> Iterable[Metric]:
        text = "From the notice of a loss to the survivors' next commit"
        found = HistogramMetricFamily("holdfast_recovery_seconds", text, labels=RUN)
        for run, facts in self._runs.items():
            sums = accumulate(facts.recoveries.values())
            edges = ["+Inf" if edge == math.inf else str(edge) for edge in facts.recoveries]
            found.add_metric([run], [*zip(edges, sums, strict=True)], facts.recovery_seconds)
        yield found

    def _of_workers(self) -> Iterable[Metric]:
        for name, help_text, field in WORKERS:
            gauge = GaugeMetricFamily(name, help_text, labels=[*RUN, "worker", "host"])
            for run, facts in self._runs.items():
                for worker in facts.view.workers:
                    if (value := getattr(worker, field)) is not None:
                        gauge.add_metric([run, worker.name, worker.host], float(value))
            yield gauge


def _training(view: View) -> float:
    return float(sum(worker.state == "training" for worker in view.workers))


GAUGES = (
    ("holdfast_step", "Committed steps", lambda view: float(view.step)),
    ("holdfast_loss", "Loss of the last committed step", lambda view: view.loss),
    ("holdfast_learning_rate", "Learning rate of the last committed step", lambda view: view.lr),
    ("holdfast_gradient_norm", "Norm of the whole gradient, before clipping", lambda view: view.grad_norm),
    ("holdfast_steps_per_second", "Recent committed steps a second, recoveries included", lambda view: view.rate),
    ("holdfast_samples_per_second", "Samples (or weights) a second of the last step", lambda view: view.samples_rate),
    ("holdfast_generation", "Number of the present generation", lambda view: float(view.generation)),
    ("holdfast_workers", "Workers that live", lambda view: float(len(view.workers))),
    ("holdfast_workers_training", "Workers that train", _training),
    ("holdfast_machines", "Agents that are there", lambda view: float(len(view.agents))),
    (
        "holdfast_survivable_worker_losses",
        "Workers that may be lost at once, whichever they are, without a replay or a return to a checkpoint",
        lambda view: float(view.survival.workers),
    ),
    (
        "holdfast_survivable_host_losses",
        "Hosts that may be lost at once, whichever they are, without a replay or a return to a checkpoint",
        lambda view: float(view.survival.hosts),
    ),
    (
        "holdfast_checkpoint_step",
        "Step of the last checkpoint",
        lambda view: float(view.saved[-1].step) if view.saved else None,
    ),
    (
        "holdfast_checkpoint_bytes",
        "Size of the last checkpoint",
        lambda view: float(view.saved[-1].bytes) if view.saved else None,
    ),
    (
        "holdfast_checkpoint_timestamp_seconds",
        "When the last checkpoint was committed",
        lambda view: view.saved[-1].t if view.saved else None,
    ),
    ("holdfast_last_event_timestamp_seconds", "When the run has last written an event", lambda view: view.now),
    ("holdfast_local_steps_share", "Share of steps without an exchange (LSSR)", lambda view: view.lssr),
)
COUNTERS = (
    ("holdfast_losses", "Workers and machines that were lost, hung or were kept out", "loss"),
    ("holdfast_recoveries", "Recoveries from losses", "recovery"),
    ("holdfast_joins", "Generations with newcomers", "join"),
    ("holdfast_checkpoint_events", "Checkpoints that were committed, copied or failed", "checkpoint"),
    ("holdfast_syncs", "Synchronisations of replicas that train apart", "sync"),
    ("holdfast_replays", "Replays of lost layers from the log", "replay"),
)
WORKERS = (
    ("holdfast_worker_steps", "Steps that the worker has committed", "step"),
    ("holdfast_worker_step_seconds", "Recent seconds of a step", "seconds"),
    ("holdfast_worker_computing_seconds", "Of these, in its own code", "computing"),
    ("holdfast_worker_waiting_seconds", "Of these, waiting for other workers and for transfers", "waiting"),
    ("holdfast_worker_sent_bytes", "Bytes that it sends in a step", "sent"),
    ("holdfast_worker_slow", "1 if it computes much longer than its peers", "slow"),
)
