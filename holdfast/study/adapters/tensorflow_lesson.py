"""A run with TensorFlow and Keras as a careful user writes it: own loop, ``tf.data``, deterministic operations.

``tf.train.Checkpoint`` finds what it saves by following attributes, and a dropout's seed generator is not among what it
follows. Nothing says so: ``assert_consumed()`` passes. Here the generator's state is a part of its own.
"""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import keras  # type: ignore[import-not-found]
import numpy as np
import tensorflow as tf  # type: ignore[import-untyped]

from holdfast.study.adapters.base import BATCH, EPOCH, STEPS, Lesson, StatePart, bits, digest

PARTS = (
    StatePart(name="model", what="tf.train.Checkpoint(model=model)"),
    StatePart(
        name="optimizer", what="optimizer.variables: Adam's averages, and the step that the learning rate falls with"
    ),
    StatePart(name="average", what="the average of the weights"),
    StatePart(name="loader", what="tf.train.Checkpoint(iterator=iter(dataset))"),
    StatePart(name="dropout", what="layer.seed_generator.state, which a model's checkpoint leaves out"),
    StatePart(name="numpy rng", what="numpy.random.get_state()"),
    StatePart(name="python rng", what="random.getstate()"),
)
IN_PIPELINE = "random map in tf.data"
VARIANTS = ("", IN_PIPELINE)

SIZE, CLASSES = 8, 4  # of the images
DECAY = 0.9  # of the average
TRACKED, OTHERS = "tracked", "others.pickle"  # the files


class TensorflowLesson(Lesson):
    def __init__(self, seed: int, variant: str) -> None:
        keras.utils.set_random_seed(seed)
        tf.config.experimental.enable_op_determinism()
        self._model = _net()
        self._average = _net()
        self._average.set_weights(self._model.get_weights())
        self._optimizer = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.01, 2 * STEPS))
        self._optimizer.build(self._model.trainable_variables)
        self._batches = iter(_dataset(seed, variant))
        self._step = tf.function(self._update)

    def train(self, steps: int) -> list[str]:
        losses = []
        for _ in range(steps):
            images, labels = next(self._batches)
            losses.append(bits(self._step(_augment(images.numpy()), labels)))
        return losses

    def _update(self, images: Any, labels: Any) -> Any:
        variables = self._model.trainable_variables
        with tf.GradientTape() as tape:
            scores = self._model(images, training=True)
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(labels, scores, from_logits=True))
        self._optimizer.apply(tape.gradient(loss, variables), variables)
        for mean, variable in zip(self._average.trainable_variables, variables, strict=True):
            mean.assign(DECAY * mean + (1 - DECAY) * variable)
        return loss

    def digests(self) -> dict[str, str]:
        found = {
            "weights": self._model.trainable_variables,
            "optimizer": self._optimizer.variables,
            "average": self._average.trainable_variables,
        }
        return {name: digest(np.concatenate([np.ravel(each) for each in found[name]])) for name in found}

    def _tracked(self, parts: frozenset[str]) -> Any:
        """Return the parts that TensorFlow saves itself, as one checkpoint.

        Of the optimizer only its variables: its own checkpoint would hold the model's weights too, and a model that
        was left out would not be noticed.
        """
        found = {
            "model": self._model,
            "optimizer": self._optimizer.variables,
            "average": self._average,
            "loader": self._batches,
            "dropout": [layer.seed_generator.state for layer in self._model.layers if hasattr(layer, "seed_generator")],
        }
        return tf.train.Checkpoint(**{name: found[name] for name in found if name in parts})

    def save(self, path: Path, parts: frozenset[str]) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self._tracked(parts).write(str(path / TRACKED))
        others = {"numpy rng": np.random.get_state(), "python rng": random.getstate()}
        (path / OTHERS).write_bytes(pickle.dumps({name: others[name] for name in others if name in parts}))

    def restore(self, path: Path, parts: frozenset[str]) -> None:
        self._tracked(parts).read(str(path / TRACKED)).assert_consumed()
        others = pickle.loads((path / OTHERS).read_bytes())
        if "numpy rng" in parts:
            np.random.set_state(others["numpy rng"])
        if "python rng" in parts:
            random.setstate(others["python rng"])


def _net() -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((SIZE, SIZE, 1)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.Flatten(),
            layers.Dropout(0.25),
            layers.Dense(32, activation="relu"),
            layers.Dropout(0.25),
            layers.Dense(CLASSES),
        ]
    )


def _dataset(seed: int, variant: str) -> Any:
    """Return images in another order every epoch; the variant has a random operation, which no iterator can save."""
    source = np.random.default_rng(seed)
    rows = EPOCH * BATCH
    images = source.standard_normal((rows, SIZE, SIZE, 1), np.float32)
    data = tf.data.Dataset.from_tensor_slices((images, source.integers(CLASSES, size=rows)))
    data = data.shuffle(rows, seed=seed)
    if variant == IN_PIPELINE:
        data = data.map(lambda image, label: (image + tf.random.normal(image.shape, stddev=0.1), label))
    return data.batch(BATCH).repeat()


def _augment(images: Any) -> Any:
    """Add noise to a batch, and mirror half of all batches."""
    images = images + np.random.normal(0, 0.1, images.shape).astype(np.float32)
    return images[:, :, ::-1] if random.random() < 0.5 else images
