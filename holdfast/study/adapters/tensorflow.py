"""TensorFlow with Keras 3: ``tf.train.Checkpoint`` and the ``.keras`` file."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import keras  # type: ignore[import-not-found]
import numpy as np
import tensorflow as tf  # type: ignore[import-untyped]

from holdfast.study.adapters.base import (
    BATCH,
    STATES,
    Adapter,
    Arrays,
    Lesson,
    ModelInTraining,
    SaveFormat,
    Shapes,
    Wait,
)
from holdfast.study.adapters.tensorflow_lesson import PARTS, VARIANTS, TensorflowLesson

CHECKPOINT = SaveFormat(name="tf.train.Checkpoint")
KERAS = SaveFormat(name="keras", suffix=".keras")


@keras.saving.register_keras_serializable("holdfast")
class Weights(keras.Model):
    """Weights of given shapes. The shapes are in its configuration: with them a ``.keras`` file can make it anew."""

    def __init__(self, shapes: Shapes, **given: Any) -> None:
        super().__init__(**given)
        self.shapes = shapes
        self.tensors = [self.add_weight(shape=tuple(shape), name=name, initializer="zeros") for name, shape in shapes]
        self.built = True

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "shapes": [[name, list(shape)] for name, shape in self.shapes]}

    def call(self, x: Any) -> Any:
        """Return the loss that ``base.ModelInTraining`` describes."""
        losses = []
        for tensor in self.tensors:
            if len(tensor.shape) == 1:
                losses.append(tf.reduce_mean(tensor**2))
            else:
                matrix = tf.reshape(tensor, (tensor.shape[0], -1))
                losses.append(tf.reduce_mean(tf.matmul(x[:, : matrix.shape[1]], matrix, transpose_b=True) ** 2))
        return tf.add_n(losses)


class TensorflowTraining(ModelInTraining):
    usual_format = CHECKPOINT

    def __init__(self, shapes: Shapes, seed: int) -> None:
        widest = max(int(np.prod(shape[1:])) for _, shape in shapes)
        self._x = tf.constant(np.random.default_rng(seed).standard_normal((BATCH, widest), np.float32))
        model = Weights(shapes)
        model.compile(optimizer=keras.optimizers.SGD(0.01, momentum=0.9))
        model.optimizer.build(model.trainable_variables)
        self._model = model
        self._checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        self._variables = {}
        for state, variables in zip(STATES, (model.tensors, model.optimizer.momentums), strict=True):
            for (name, _), variable in zip(shapes, variables, strict=True):
                self._variables[state + name] = variable
        self._step = tf.function(self._update)
        self.reset(seed)

    def step(self) -> float:
        return float(self._step(self._x))

    def _update(self, x: Any) -> Any:
        variables = self._model.trainable_variables
        with tf.GradientTape() as tape:
            loss = self._model(x)
        self._model.optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    def arrays(self) -> Arrays:
        return {name: variable.numpy() for name, variable in self._variables.items()}

    def put(self, arrays: Mapping[str, Any]) -> None:
        for name, array in arrays.items():
            self._variables[name].assign(array)

    def save(self, form: str, path: Path) -> Wait | None:
        if form == KERAS.name:
            self._model.save(path)
        else:
            self._checkpoint.write(str(path))
        return None

    def load(self, form: str, path: Path) -> None:
        if form == KERAS.name:
            self._take(keras.saving.load_model(path))
        else:
            self._checkpoint.read(str(path)).assert_consumed()

    def _take(self, other: Any) -> None:
        """Take over the tensors of the model that a ``.keras`` file gives.

        Users would go on with the new model. Here each load would then compile a step anew, and that step would keep
        the model before it in memory.
        """
        for mine, theirs in zip(_state(self._model), _state(other), strict=True):
            mine.assign(theirs)


def _state(model: Any) -> list[Any]:
    return [*model.variables, *model.optimizer.variables]


class Tensorflow(Adapter):
    name = "tensorflow"
    formats = (CHECKPOINT, KERAS)
    parts = PARTS
    usual = frozenset({"model", "optimizer", "loader"})
    usual_means = "model, optimizer and the data's iterator, as in the guide to training checkpoints"
    variants = VARIANTS

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in ("tensorflow-cpu", "keras", "h5py", "numpy")}

    def make(self, shapes: Shapes, seed: int) -> ModelInTraining:
        return TensorflowTraining(shapes, seed)

    def lesson(self, seed: int, variant: str = "") -> Lesson:
        return TensorflowLesson(seed, variant)


ADAPTER = Tensorflow()
