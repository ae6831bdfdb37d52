"""JAX: Orbax, which compresses and writes in the background unless told otherwise, and Flax's msgpack."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax  # type: ignore[import-not-found]
import flax.serialization  # type: ignore[import-not-found]
import jax  # type: ignore[import-not-found]
import jax.numpy as jnp  # type: ignore[import-not-found]
import numpy as np
import optax  # type: ignore[import-not-found]
import orbax.checkpoint as ocp  # type: ignore[import-not-found]

from holdfast.study.adapters.base import BATCH, Adapter, Arrays, Lesson, ModelInTraining, SaveFormat, Shapes, Wait
from holdfast.study.adapters.jax_lesson import PARTS, JaxLesson

FORMATS = (
    SaveFormat(name="orbax", compressed=True, background=True),
    SaveFormat(name="orbax raw", background=True),
    SaveFormat(name="flax msgpack", suffix=".msgpack"),
)
State = tuple[dict[str, Any], Any]  # weights, and what the optimizer keeps
OPTIMIZER = optax.sgd(0.01, momentum=0.9)


def loss_of(weights: dict[str, Any], inputs: dict[int, Any]) -> Any:
    total = jnp.float32(0)
    for weight in weights.values():
        out = weight
        if weight.ndim > 1:
            rows = weight.reshape(weight.shape[0], -1)
            out = inputs[rows.shape[1]] @ rows.T
        total += jnp.mean(out * out)
    return total


@functools.partial(jax.jit, donate_argnums=0)  # as in scripts where memory matters
def step(state: State, inputs: dict[int, Any]) -> tuple[State, Any]:
    weights, kept = state
    loss, gradients = jax.value_and_grad(loss_of)(weights, inputs)
    updates, kept = OPTIMIZER.update(gradients, kept, weights)
    return (optax.apply_updates(weights, updates), kept), loss


class JaxTraining(ModelInTraining):
    usual_format = FORMATS[0]

    def __init__(self, shapes: Shapes, seed: int) -> None:
        source = np.random.default_rng(seed)
        weights = {}
        for name, shape in shapes:
            weights[name] = jax.device_put(0.05 * source.standard_normal(tuple(shape), np.float32))
        self._state: State = weights, OPTIMIZER.init(weights)
        widths = {math.prod(shape[1:]) for _, shape in shapes if len(shape) > 1}
        self._inputs = {width: source.standard_normal((BATCH, width), np.float32) for width in sorted(widths)}
        self._orbax = {
            "orbax": ocp.StandardCheckpointer(),
            "orbax raw": ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_compression=False)),
        }

    def step(self) -> float:
        self._state, loss = jax.block_until_ready(step(self._state, self._inputs))
        return float(loss)

    def _places(self) -> dict[str, dict[str, Any]]:
        weights, (trace, _) = self._state
        return {"weights": weights, "momentum": trace.trace}

    def arrays(self) -> Arrays:
        found = {}
        for state, places in self._places().items():
            for name, array in places.items():
                found[f"{state}/{name}"] = np.asarray(array)
        return found

    def put(self, arrays: Mapping[str, Any]) -> None:
        places = self._places()
        for name, array in arrays.items():
            state, of = name.split("/", 1)
            places[state][of] = jax.device_put(np.array(array))  # a copy: it may take the array's memory as it is

    def save(self, form: str, path: Path) -> Wait | None:
        path = path.absolute()  # Orbax takes no other
        match form:
            case "flax msgpack":
                path.write_bytes(flax.serialization.to_bytes(self._state))
                return None
            case "orbax":
                self._orbax[form].save(path, self._state, force=True)
            case "orbax raw":
                self._orbax[form].save(path, args=ocp.args.PyTreeSave(self._state), force=True)
        return self._orbax[form].wait_until_finished

    def load(self, form: str, path: Path) -> None:
        path = path.absolute()
        wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, self._state)
        match form:
            case "flax msgpack":
                found = jax.device_put(flax.serialization.from_bytes(self._state, path.read_bytes()))
            case "orbax":
                found = self._orbax[form].restore(path, wanted)
            case "orbax raw":
                how = ocp.checkpoint_utils.construct_restore_args(wanted)
                found = self._orbax[form].restore(path, args=ocp.args.PyTreeRestore(wanted, restore_args=how))
        self._state = jax.block_until_ready(found)


class JaxAdapter(Adapter):
    name = "jax"
    formats = FORMATS
    parts = PARTS
    usual = frozenset({"model", "optimizer", "rng"})
    usual_means = "the train state as one tree: weights, optimizer, JAX's random keys"

    def versions(self) -> dict[str, str]:
        found = {"jax": jax, "flax": flax, "optax": optax, "orbax-checkpoint": ocp}
        return {name: module.__version__ for name, module in found.items()}

    def make(self, shapes: Shapes, seed: int) -> ModelInTraining:
        return JaxTraining(shapes, seed)

    def lesson(self, seed: int, variant: str = "") -> Lesson:
        return JaxLesson(seed)


ADAPTER = JaxAdapter()
