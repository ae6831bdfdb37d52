"""A small run with JAX, Flax (nnx) and Optax, saved by Orbax's CheckpointManager, one item for each part."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax  # type: ignore[import-not-found]
import jax.numpy as jnp  # type: ignore[import-not-found]
import numpy as np
import optax  # type: ignore[import-not-found]
import orbax.checkpoint as ocp  # type: ignore[import-not-found]
from flax import nnx  # type: ignore[import-not-found]

from holdfast.study.adapters.base import EPOCH, Lesson, StatePart, bits, digest

BATCH, INPUTS, HIDDEN, DROPPED = 8, 16, 32, 0.3

PARTS = (
    StatePart(name="model", what="the weights (nnx.Param)"),
    StatePart(name="optimizer", what="Adam's moments, and the counters that its schedule goes by"),
    StatePart(name="rng", what="JAX's random keys and counters (nnx.RngState): dropout"),
    StatePart(name="loader", what="the loader's own state: the epoch's order, the position in it, its generator"),
    StatePart(name="average", what="the average of the weights"),
    StatePart(name="numpy rng", what="numpy.random.get_state(): augmentation"),
    StatePart(name="python rng", what="random.getstate(): augmentation"),
)
ADAM = optax.adam(optax.exponential_decay(0.01, transition_steps=1, decay_rate=0.9))


class JaxNet(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.first = nnx.Linear(INPUTS, HIDDEN, rngs=rngs)
        self.dropout = nnx.Dropout(DROPPED, rngs=rngs)
        self.last = nnx.Linear(HIDDEN, 1, rngs=rngs)

    def __call__(self, rows: Any) -> Any:
        return self.last(self.dropout(nnx.relu(self.first(rows))))


@nnx.jit(static_argnums=0)  # type: ignore[untyped-decorator]
def make(seed: int) -> JaxNet:
    """Make the net in one compiled function: to compile each of its operations would take longer."""
    return JaxNet(nnx.Rngs(seed))


@nnx.jit  # type: ignore[untyped-decorator]
def step(model: JaxNet, optimizer: Any, average: Any, rows: Any, targets: Any) -> tuple[Any, Any]:
    def loss_of(model: JaxNet) -> Any:
        return jnp.mean((model(rows) - targets) ** 2)

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss, optax.incremental_update(nnx.state(model, nnx.Param), average, 0.1)


class Loader:
    """Loader that shuffles in every epoch and augments with numpy's and Python's generators."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)
        self._rows = self._generator.standard_normal((BATCH * EPOCH, INPUTS), np.float32)
        self._order, self._position = self._generator.permutation(len(self._rows)), 0

    def __next__(self) -> tuple[Any, Any]:
        if self._position == len(self._rows):
            self._order, self._position = self._generator.permutation(len(self._rows)), 0
        rows = self._rows[self._order[self._position : self._position + BATCH]]
        self._position += BATCH
        noisy = rows + 0.1 * np.random.standard_normal(rows.shape).astype(np.float32)
        flipped = [row[::-1] if random.random() < 0.5 else row for row in noisy]
        return np.stack(flipped), rows.sum(axis=1, keepdims=True)

    def state(self) -> dict[str, Any]:
        order = self._order.tolist()
        return {"order": order, "position": self._position, "generator": self._generator.bit_generator.state}

    def put(self, state: dict[str, Any]) -> None:
        self._order, self._position = np.array(state["order"]), state["position"]
        self._generator.bit_generator.state = state["generator"]


class JaxLesson(Lesson):
    def __init__(self, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed)
        self._model = make(seed)
        self._optimizer = nnx.Optimizer(self._model, ADAM, wrt=nnx.Param)
        self._average = jax.tree.map(jnp.copy, nnx.state(self._model, nnx.Param))
        self._loader = Loader(seed)

    def train(self, steps: int) -> list[str]:
        losses = []
        for _ in range(steps):
            rows, targets = next(self._loader)
            loss, self._average = step(self._model, self._optimizer, self._average, rows, targets)
            losses.append(bits(loss))
        return losses

    def _trees(self) -> dict[str, Any]:
        return {
            "model": nnx.state(self._model, nnx.Param),
            "optimizer": nnx.state(self._optimizer),
            "rng": nnx.state(self._model, nnx.RngState),
            "average": self._average,
        }

    def _plain(self) -> dict[str, Any]:
        """Return loader and generators in values that JSON can hold."""
        numpy_state: Any = np.random.get_state()
        name, keys, *rest = numpy_state
        return {
            "loader": self._loader.state(),
            "numpy rng": [name, keys.tolist(), *rest],
            "python rng": random.getstate(),
        }

    def digests(self) -> dict[str, str]:
        trees = self._trees()
        found = {"weights": trees["model"], "optimizer": trees["optimizer"], "average": trees["average"]}
        return {name: digest(np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(found[name])])) for name in found}

    def save(self, path: Path, parts: frozenset[str]) -> None:
        items = {name: ocp.args.StandardSave(tree) for name, tree in self._trees().items()}
        items |= {name: ocp.args.JsonSave(plain) for name, plain in self._plain().items()}
        with ocp.CheckpointManager(path.absolute()) as manager:
            manager.save(0, args=ocp.args.Composite(**{name: items[name] for name in parts}))

    def restore(self, path: Path, parts: frozenset[str]) -> None:
        items = {name: ocp.args.StandardRestore(tree) for name, tree in self._trees().items()}
        items |= dict.fromkeys(self._plain(), ocp.args.JsonRestore())
        with ocp.CheckpointManager(path.absolute()) as manager:
            found = manager.restore(0, args=ocp.args.Composite(**{name: items[name] for name in parts}))
        put: dict[str, Callable[[Any], object]] = {
            "model": lambda tree: nnx.update(self._model, tree),
            "optimizer": lambda tree: nnx.update(self._optimizer, tree),
            "rng": lambda tree: nnx.update(self._model, tree),
            "average": lambda tree: setattr(self, "_average", tree),
            "loader": self._loader.put,
            "numpy rng": lambda state: np.random.set_state(tuple(state)),
            "python rng": lambda state: random.setstate((state[0], tuple(state[1]), state[2])),
        }
        for name in parts:
            put[name](found[name])
