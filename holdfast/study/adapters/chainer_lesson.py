"""A small run with Chainer, written around its updater, iterator and extensions."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import chainer  # type: ignore[import-not-found]
import chainer.functions as F  # type: ignore[import-not-found]  # noqa: N812
import chainer.links as L  # type: ignore[import-not-found]  # noqa: N812
import numpy as np
from chainer import serializers, training

from holdfast.study.adapters.base import EPOCH, Lesson, StatePart, bits, digest

BATCH, INPUTS, HIDDEN, DROPPED = 8, 16, 32, 0.3

PARTS = (
    StatePart(name="model", what="the model's weights (Chain.serialize)"),
    StatePart(
        name="optimizer",
        what="Adam's moments and counters; saved before the first update, it loads only with strict=False",
    ),
    StatePart(
        name="scheduler", what="the learning rate's ExponentialShift extension; the optimizer does not save its rate"
    ),
    StatePart(name="loader", what="SerialIterator: the epoch's order and the position in it"),
    StatePart(name="average", what="the average of the weights, an extension"),
    StatePart(name="numpy rng", what="numpy.random.get_state(): dropout, the next epoch's order, augmentation"),
    StatePart(name="python rng", what="random.getstate(): augmentation"),
)


class ChainerNet(chainer.Chain):
    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.first = L.Linear(INPUTS, HIDDEN)
            self.last = L.Linear(HIDDEN, 1)

    def forward(self, rows: Any) -> Any:
        return self.last(F.dropout(F.relu(self.first(rows)), DROPPED))


class Average(training.Extension):
    """Running average of the weights, as an extension of the trainer."""

    def __init__(self, model: ChainerNet) -> None:
        self.model = model.copy(mode="copy")

    def __call__(self, trainer: Any) -> None:
        now = dict(trainer.updater.get_optimizer("main").target.namedparams())
        for name, mean in self.model.namedparams():
            mean.array[...] += np.float32(0.1) * (now[name].array - mean.array)

    def serialize(self, serializer: Any) -> None:
        self.model.serialize(serializer["model"])


def augment(example: tuple[Any, Any]) -> tuple[Any, Any]:
    """Add noise from numpy's generator, and flip by Python's, as scripts do that use both."""
    row, target = example
    row = row + 0.1 * np.random.standard_normal(row.shape).astype(np.float32)
    return (row[::-1] if random.random() < 0.5 else row), target


class ChainerLesson(Lesson):
    def __init__(self, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed)
        source = np.random.RandomState(seed)
        rows = source.standard_normal((BATCH * EPOCH, INPUTS)).astype(np.float32)
        data = chainer.datasets.TupleDataset(rows, rows.sum(axis=1, keepdims=True))
        self._model = ChainerNet()
        optimizer = chainer.optimizers.Adam(alpha=0.01).setup(self._model)
        loader = chainer.iterators.SerialIterator(chainer.datasets.TransformDataset(data, augment), BATCH, shuffle=True)
        self._updater = training.StandardUpdater(loader, optimizer, loss_func=self._loss)
        self._trainer = training.Trainer(self._updater)
        schedule = training.extensions.ExponentialShift("alpha", 0.9)
        self._average = Average(self._model)
        self._extensions = (schedule, self._average)
        for each in self._extensions:
            each.initialize(self._trainer)
        self._serialisable = {
            "model": self._model,
            "optimizer": optimizer,
            "scheduler": schedule,
            "loader": loader,
            "average": self._average,
        }

    def _loss(self, rows: Any, targets: Any) -> Any:
        self._last = F.mean_squared_error(self._model(rows), targets)
        return self._last

    def train(self, steps: int) -> list[str]:
        """Train as ``Trainer.run`` does, which cannot be called twice."""
        losses = []
        for _ in range(steps):
            self._updater.update()
            for each in self._extensions:
                each(self._trainer)
            losses.append(bits(self._last.array))
        return losses

    def digests(self) -> dict[str, str]:
        weights = list(self._model.params())
        found = {
            "weights": [weight.array for weight in weights],
            "optimizer": [moment for weight in weights for moment in weight.update_rule.state.values()],
            "average": [mean.array for mean in self._average.model.params()],
        }
        return {name: digest(np.concatenate([array.ravel() for array in found[name]])) for name in found}

    def save(self, path: Path, parts: frozenset[str]) -> None:
        path.mkdir(parents=True, exist_ok=True)
        for name in parts & self._serialisable.keys():
            serializers.save_npz(str(path / f"{name}.npz"), self._serialisable[name])
        if "numpy rng" in parts:
            (path / "numpy rng").write_bytes(pickle.dumps(np.random.get_state()))
        if "python rng" in parts:
            (path / "python rng").write_bytes(pickle.dumps(random.getstate()))

    def restore(self, path: Path, parts: frozenset[str]) -> None:
        """Restore the generators last: to load the other parts may draw from them."""
        for name in parts & self._serialisable.keys():
            # An optimizer has no moments before its first step, and a strict load of one saved then raises KeyError.
            strict = name != "optimizer"
            serializers.load_npz(str(path / f"{name}.npz"), self._serialisable[name], strict=strict)
        for each in self._extensions:
            each.initialize(self._trainer)  # as Trainer.run does: it sets the rate that was loaded
        if "numpy rng" in parts:
            np.random.set_state(pickle.loads((path / "numpy rng").read_bytes()))
        if "python rng" in parts:
            random.setstate(pickle.loads((path / "python rng").read_bytes()))
