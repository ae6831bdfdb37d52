"""The steps of a ``Loop`` as one iterable of batches, for loops over batches that someone else has written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from holdfast.checks import to_whole
from holdfast.data.fetch import to_device
from holdfast.data.source import Data
from holdfast.errors import UsageError
from holdfast.run.loop import Loop
from holdfast.run.loop_step import LoopStep
from holdfast.run.script import Step


def steps_per_epoch(data: Data, global_batch: int) -> int:
    """Return the number of steps in which a map-style data set is read once."""
    size = len(data.dataset)  # type: ignore[arg-type]
    return -(-size // to_whole("global_batch", global_batch, least=1))


class Shares:
    """Micro-batches of this worker, step by step. A step that breaks comes again, with other micro-batches.

    A worker that has no micro-batch in a step, because there are more workers, gets one that does not count: the body
    of the loop has to run on it as well. It has no backward pass, and the model is in ``eval()``.
    """

    def __init__(self, loop: Loop, data: Data) -> None:
        self._loop, self._data = loop, data
        self._per_epoch = loop.engine.order.steps_per_epoch
        self._most = 0
        self._steps: Any = None
        self._is_dry = False
        self.step: LoopStep | None = None  # the one under way
        self.is_last = False  # the batch under way is the last one of this worker's share: what follows is the commit

    # --- epochs ----------------------------------------------------------------------------------

    def epochs(self, total: int, *, steps: int | None = None) -> Iterator[int]:
        """Yield the number of each epoch, from the one that the run is in. ``steps``: the most steps of all epochs.

        Raises ``UsageError`` if an epoch is left in its middle, and what ``Loop.steps`` raises.
        """
        most = to_whole("total", total, least=0) * self._per_epoch
        self._most = most if steps is None else min(most, to_whole("steps", steps, least=0))
        self._steps = self._loop.steps(self._most)
        try:
            self.step = next(self._steps, None)
            while self.step is not None:
                epoch = self.step.number // self._per_epoch
                yield epoch
                if not self._is_through:
                    raise UsageError(
                        f"epoch {epoch} was left in its middle",
                        hint="go through the training loader once in each epoch; accelerator.epochs(3, steps=100)",
                    )
                self.step = next(self._steps, None)
        finally:
            self.step = None
            self._steps.close()

    @property
    def _is_through(self) -> bool:
        """Whether the step under way is committed, and the last one of its epoch or of all."""
        assert self.step is not None
        after = self.step.number + 1
        return self.step.made is not None and (after % self._per_epoch == 0 or after == self._most)

    # --- batches ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Yield batches to the end of the epoch. Raises ``UsageError`` if a step was not committed."""
        if self.step is None:
            raise UsageError(
                "the training loader is read outside of an epoch",
                hint="for epoch in accelerator.epochs(3): for batch in loader: …",
            )
        while not self._is_through:
            if self.step.made is not None or self.step.is_broken:
                self.step = next(self._steps)
            yield from self._share(self.step)
            if self.step.made is None and not self.step.is_broken:
                raise UsageError(f"step {self.step.number} was not committed", hint="optimizer.step() for each batch")

    def _share(self, step: LoopStep) -> Iterator[Any]:
        has_any = False
        for batch in step.micro_batches():
            has_any, self.is_last = True, step.left == 1
            yield batch
        if not has_any and not step.is_broken:
            self._is_dry = self.is_last = True
            self._loop.engine.model.module.eval()
            yield self._any_batch()
        self._is_dry = False

    def _any_batch(self) -> Any:
        engine, samples = self._loop.engine, self._data.dataset
        numbers = engine.order.samples(self._loop._progress.update, 0)
        batch = self._data.collate([samples[i] for i in numbers])  # type: ignore[index]  # it is map-style
        return to_device(batch, engine.model.device)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of the batch under way. ``loss``: the mean over it."""
        step = self._under_way("backward")
        if self._is_dry:
            self._loop.engine.model.module.train()
        else:
            step.backward(loss)

    def commit(self, *, clip_norm: float | None = None) -> Step | None:
        """Commit the step under way; return it. None: somebody was lost, or this worker has more batches of it."""
        step = self._under_way("optimizer.step()")
        if step.made is not None:
            raise UsageError(f"step {step.number} is committed already", hint="optimizer.step() once for each batch")
        return step.commit(clip_norm=clip_norm) if self.is_last else None

    def _under_way(self, what: str) -> LoopStep:
        if self.step is None:
            raise UsageError(f"{what} without a batch of the training loader", hint="for batch in loader: …")
        return self.step

    @property
    def is_computing(self) -> bool:
        """Whether the step under way is not committed."""
        return self.step is not None and self.step.made is None
