"""The layers of each worker, put together from the events of a generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.words import count, size_text


@dataclass(frozen=True, kw_only=True)
class StagePlace:
    """A worker's place: its pipeline, its stage there, and the stage's layers."""

    worker: str
    pipeline: int
    stage: int
    layers: range

    @property
    def layers_text(self) -> str:
        """The first and the last layer, as a text.

        >>> StagePlace(worker="0.0", pipeline=0, stage=0, layers=range(0, 3)).layers_text
        '0-2'
        """
        first, last = self.layers[0], self.layers[-1]
        return f"{first}" if first == last else f"{first}-{last}"


@dataclass(kw_only=True)
class Arrangement:
    """The places of one generation; complete when every worker has entered it.

    >>> two = Arrangement(workers=["0.0", "0.1"], generation=1, step=0)
    >>> for stage, worker in enumerate(two.workers):
    ...     layers = {"first": 2 * stage, "stop": 2 * stage + 2}
    ...     two.hear({"event": "layout", "worker": worker, "generation": 1, "pipeline": 0, "stage": stage, **layers})
    ...     two.hear({"event": "entered", "worker": worker, "generation": 1, "received": 500 * stage})
    >>> two.is_complete, two.text
    (True, '1 pipeline: 0.0 [0-1] → 0.1 [2-3]; 500 B sent')
    """

    workers: Sequence[str]
    generation: int
    step: int  # the step that was under way
    received: dict[str, int] = field(default_factory=dict)  # bytes, by the worker that they were sent to
    _places: dict[str, StagePlace | None] = field(default_factory=dict)

    def hear(self, event: Mapping[str, Any]) -> None:
        """Take in a ``layout`` or ``entered`` event; those of other generations do not count."""
        if event["generation"] != self.generation:
            return
        worker = event["worker"]
        if event["event"] == "entered":
            self.received[worker] = event["received"]
        elif "pipeline" not in event:
            self._places[worker] = None
        else:
            self._places[worker] = StagePlace(
                worker=worker,
                pipeline=event["pipeline"],
                stage=event["stage"],
                layers=range(event["first"], event["stop"]),
            )

    @property
    def is_complete(self) -> bool:
        return all(worker in self._places and worker in self.received for worker in self.workers)

    @property
    def pipelines(self) -> list[list[StagePlace]]:
        """The places of each pipeline, in the order of its stages."""
        places = sorted(self.places, key=lambda place: (place.pipeline, place.stage))
        numbers = sorted({place.pipeline for place in places})
        return [[place for place in places if place.pipeline == number] for number in numbers]

    @property
    def places(self) -> list[StagePlace]:
        return [place for place in self._places.values() if place is not None]

    @property
    def waiting(self) -> list[str]:
        """Workers without a place, in reserve."""
        return [worker for worker, place in self._places.items() if place is None]

    @property
    def layers(self) -> int:
        return max((place.layers.stop for place in self.places), default=0)

    @property
    def is_cut(self) -> bool:
        """Whether some workers hold only a part of the model."""
        return any(len(pipeline) > 1 for pipeline in self.pipelines)

    @property
    def survives_a_loss(self) -> bool:
        """Whether any one worker may be lost: with two pipelines, which share no worker, one stays whole."""
        return self.is_complete and len(self.pipelines) > 1

    @property
    def text(self) -> str:
        """The stages of each pipeline, and the bytes that were sent, in one line."""
        chains = [" → ".join(f"{place.worker} [{place.layers_text}]" for place in one) for one in self.pipelines]
        waits = f"; {', '.join(self.waiting)} left over" if self.waiting else ""
        sent = sum(self.received.values())
        moved = f"; {size_text(sent)} sent" if sent else ""
        return f"{count(len(chains), 'pipeline')}: {', '.join(chains)}{waits}{moved}"

    def to_json(self) -> dict[str, Any]:
        pipelines = [
            [{"worker": place.worker, "layers": [place.layers.start, place.layers.stop]} for place in pipeline]
            for pipeline in self.pipelines
        ]
        sent = sum(self.received.values())
        return {"step": self.step, "pipelines": pipelines, "left_over": self.waiting, "received_bytes": sent}
