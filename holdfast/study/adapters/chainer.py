"""Chainer: npz and HDF5, both deflated unless they are told otherwise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import chainer  # type: ignore[import-not-found]
import chainer.functions as F  # type: ignore[import-not-found]  # noqa: N812
import h5py  # type: ignore[import-not-found]
import numpy as np
from chainer import serializers

from holdfast.study.adapters.base import BATCH, Adapter, Arrays, Lesson, ModelInTraining, SaveFormat, Shapes
from holdfast.study.adapters.chainer_lesson import PARTS, ChainerLesson

FORMATS = (
    SaveFormat(name="npz", suffix=".npz", compressed=True),
    SaveFormat(name="npz raw", suffix=".npz"),
    SaveFormat(name="hdf5", suffix=".h5", compressed=True),
    SaveFormat(name="hdf5 raw", suffix=".h5"),
)


class ChainerTraining(ModelInTraining):
    usual_format = FORMATS[1]  # ranks would wait for the compressor, not for each other

    def __init__(self, shapes: Shapes, seed: int) -> None:
        source = np.random.default_rng(seed)
        self._model = chainer.Chain()
        with self._model.init_scope():
            for name, shape in shapes:
                weight = (0.05 * source.standard_normal(tuple(shape), np.float32)).astype(np.float32)
                setattr(self._model, name, chainer.Parameter(weight))
        self._weights = {name: getattr(self._model, name) for name, _ in shapes}
        self._optimizer = chainer.optimizers.MomentumSGD(lr=0.01, momentum=0.9).setup(self._model)
        widths = {math.prod(shape[1:]) for _, shape in shapes if len(shape) > 1}
        self._inputs = {width: source.standard_normal((BATCH, width), np.float32) for width in sorted(widths)}
        self.step()  # Chainer makes the momentum in the first one

    def step(self) -> float:
        self._optimizer.update(self._loss)
        return float(self._last.array)

    def _loss(self) -> Any:
        terms = []
        for weight in self._weights.values():
            out = weight
            if weight.ndim > 1:
                rows = F.reshape(weight, (weight.shape[0], -1))
                out = F.matmul(self._inputs[rows.shape[1]], rows, transb=True)
            terms.append(F.mean(out * out))
        self._last = sum(terms)
        return self._last

    def _places(self) -> Arrays:
        found = {}
        for name, weight in self._weights.items():
            found[f"weights/{name}"] = weight.array
            found[f"momentum/{name}"] = weight.update_rule.state["v"]
        return found

    def arrays(self) -> Arrays:
        return self._places()

    def put(self, arrays: Mapping[str, Any]) -> None:
        places = self._places()
        for name, array in arrays.items():
            places[name][...] = array

    def serialize(self, serializer: Any) -> None:
        """Save or load by Chainer's protocol, with the names of a trainer's snapshot."""
        self._optimizer.serialize(serializer["optimizer:main"])
        self._model.serialize(serializer["model:main"])

    def save(self, form: str, path: Path) -> None:
        match form:
            case "npz":
                serializers.save_npz(str(path), self)
            case "npz raw":
                serializers.save_npz(str(path), self, compression=False)
            case "hdf5":
                serializers.save_hdf5(str(path), self)
            case "hdf5 raw":
                serializers.save_hdf5(str(path), self, compression=None)

    def load(self, form: str, path: Path) -> None:
        load = serializers.load_npz if form.startswith("npz") else serializers.load_hdf5
        load(str(path), self)


class ChainerAdapter(Adapter):
    name = "chainer"
    formats = FORMATS
    parts = PARTS
    usual = frozenset(part.name for part in PARTS) - {"numpy rng", "python rng"}
    usual_means = "all that the trainer's snapshot extension covers"

    def versions(self) -> dict[str, str]:
        return {"chainer": chainer.__version__, "numpy": np.__version__, "h5py": h5py.__version__}

    def make(self, shapes: Shapes, seed: int) -> ModelInTraining:
        return ChainerTraining(shapes, seed)

    def lesson(self, seed: int, variant: str = "") -> Lesson:
        return ChainerLesson(seed)


ADAPTER = ChainerAdapter()
