"""``HoldfastTrainer``: a trainer in the shape of Ray Train v2, whose workers survive each other."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.cluster.handshake import new_token
from holdfast.cluster.stuck import StepTimeout
from holdfast.errors import UsageError
from holdfast.integrations.ray import native
from holdfast.integrations.ray.agent_actor import Job
from holdfast.integrations.ray.attempt import AttemptOutcome, RayAttempt
from holdfast.integrations.ray.worker import LOGS, PROGRAM, TrainFunction, takes_config

if TYPE_CHECKING:
    from ray.train import Result, RunConfig, ScalingConfig

    from holdfast.integrations.ray.reports import Reports

FINAL = (2, 4)  # exit codes of wrong use and of bad checkpoints: another attempt would end alike
T = TypeVar("T")
logger = logging.getLogger(__name__)


class HoldfastTrainer:
    """Trains on a Ray cluster; the loss of a worker costs the others at most a step, and never a restart.

    - ``train_loop_per_worker``: the train function, which makes a ``holdfast.Run`` or ``Loop`` and goes through its
      steps. It takes the config, or nothing.
    - ``train_loop_config``: its config.
    - ``scaling_config``: Ray's ``ScalingConfig``. ``num_workers=(2, 4)``: training begins with two workers, and Ray may
      place two more at any time. One number is both.
    - ``run_config``: Ray's ``RunConfig``. ``storage_path`` has to be a folder that all nodes share. ``failure_config``
      says how often a run may begin again from its checkpoint; a lost worker is no failure.
    - ``heartbeat_timeout``: seconds of silence after which a worker counts as lost.
    - ``step_timeout``: as for ``holdfast run``: how long a worker may show no sign of progress.
    - ``patience``: seconds to wait for Ray while there are fewer workers than the minimum.

    Raises ``UsageError`` for settings that make no sense, and without Ray.

    >>> from ray.train import RunConfig, ScalingConfig  # doctest: +SKIP
    >>> trainer = HoldfastTrainer(train, scaling_config=ScalingConfig(num_workers=(2, 4)))  # doctest: +SKIP
    >>> trainer.fit().metrics["loss"]  # doctest: +SKIP
    0.0312
    """

    def __init__(
        self,
        train_loop_per_worker: TrainFunction,
        *,
        train_loop_config: dict[str, Any] | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        heartbeat_timeout: float = 5.0,
        step_timeout: str = "auto",
        patience: float = 300.0,
    ) -> None:
        native.need()
        from ray.train import RunConfig, ScalingConfig

        takes_config(train_loop_per_worker)
        StepTimeout.parse(step_timeout)
        for name, value, least in (("heartbeat_timeout", heartbeat_timeout, 0.2), ("patience", patience, 0.1)):
            if not least <= value < float("inf"):
                raise UsageError(f"{name}={value!r} is not a number of seconds from {least:g} on")
        self._train, self._config = train_loop_per_worker, train_loop_config
        self._scaling, self._run = scaling_config or ScalingConfig(), run_config or RunConfig()
        _check(self._scaling, self._run)
        self._seconds = (heartbeat_timeout, step_timeout, patience)

    def fit(self) -> Result:
        """Train to the end; return Ray's ``Result`` with metrics, checkpoint and what the train function has returned.

        A run of the same name and ``storage_path`` goes on from its last checkpoint. Raises ``UsageError`` for what
        another attempt would not change, and ``ray.train.TrainingFailedError`` for every other error of the training.
        """
        from ray.train import WorkerGroupError

        from holdfast.integrations.ray.reports import Reports  # imports torch, which no actor needs

        native.connect()
        folder = Path(self._run.storage_path).expanduser().absolute() / self._run.name
        logs = folder / LOGS
        program = self._pickled()
        try:
            logs.mkdir(parents=True, exist_ok=True)
            (logs / PROGRAM).write_bytes(program)
        except OSError as e:
            raise UsageError(f"the run's folder cannot be written: {e}", hint="RunConfig(storage_path=...)") from e
        context = native.run_context(self._run, self._config, self._scaling)
        reports = Reports(folder, list(self._run.callbacks), context)
        outcome = _in_a_loop(lambda: self._attempts(folder, reports))
        if outcome.code == 0:
            return reports.result(None)
        if outcome.code in FINAL:
            raise UsageError(outcome.text.removeprefix("holdfast: "))
        raise WorkerGroupError(outcome.text, {})

    def _pickled(self) -> bytes:
        """Return the train function and its config, as workers read them."""
        import cloudpickle

        try:
            program: bytes = cloudpickle.dumps((self._train, self._config or {}))
        except Exception as e:  # whatever their own parts raise
            hint = "make it in the train function: it runs in processes of other machines"
            raise UsageError(f"the train function or its config cannot be sent to workers: {e}", hint=hint) from e
        return program

    async def _attempts(self, folder: Path, reports: Reports) -> AttemptOutcome:
        """Try until the training is over, or as often as the ``FailureConfig`` allows."""
        limits = {False: self._run.failure_config.max_failures, True: self._run.failure_config.max_preemption_failures}
        while True:
            reports.clear()
            attempt = RayAttempt(self._job(folder), self._scaling, self._run, look=reports.look)
            outcome = await attempt.run()
            reports.look()
            if outcome.code == 0:
                return outcome
            reports.failed(RuntimeError(outcome.text))
            if outcome.code in FINAL or limits[outcome.preempted] == 0:
                return outcome
            limits[outcome.preempted] -= 1  # -1: without a limit
            logger.warning("the run begins again, from its checkpoint if it has one: %s", outcome.text)

    def _job(self, folder: Path) -> Job:
        heartbeat, step, patience = self._seconds
        return Job(
            name=str(self._run.name),
            folder=str(folder),
            endpoint="",
            token=new_token(),
            minimum=self._scaling.min_workers,
            heartbeat_timeout=heartbeat,
            step_timeout=step,
            patience=patience,
        )


def _check(scaling: ScalingConfig, run: RunConfig) -> None:
    """Raise ``UsageError`` for what Ray Train knows and this trainer does not do."""
    if scaling.min_workers < 1:
        raise UsageError("num_workers has to be 1 at least", hint="for no worker, call the train function by yourself")
    if scaling.use_tpu:
        raise UsageError("TPUs are not supported", hint="use_tpu=False")
    if scaling.placement_strategy not in ("PACK", "SPREAD"):
        text = f"placement_strategy={scaling.placement_strategy!r} cannot be kept while workers come and go"
        raise UsageError(text, hint="PACK or SPREAD")
    if isinstance(scaling.label_selector, list):
        raise UsageError("a label_selector for each worker cannot be kept", hint="one dictionary for all of them")
    if run.storage_filesystem is not None or "://" in str(run.storage_path):
        raise UsageError(f"storage_path={run.storage_path} is no folder", hint="a folder that all nodes share")
    if run.checkpoint_config.num_to_keep is not None or run.checkpoint_config.checkpoint_score_attribute is not None:
        text = "CheckpointConfig is not used: what is kept is a setting of the run"
        raise UsageError(text, hint="holdfast.Checkpoints(folder=checkpoint_folder(), keep=3)")


def _in_a_loop(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine in a thread of its own: a notebook's has a loop already. Ctrl-C cancels it."""
    found: list[T] = []
    errors: list[BaseException] = []
    started = threading.Event()
    handles: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = []

    async def job() -> None:
        task = asyncio.ensure_future(make())
        handles.append((asyncio.get_running_loop(), task))
        started.set()
        found.append(await task)

    def work() -> None:
        try:
            asyncio.run(job())
        except BaseException as e:
            errors.append(e)
        finally:
            started.set()

    thread = threading.Thread(target=work, name="holdfast-fit")
    thread.start()
    try:
        thread.join()
    except BaseException:
        started.wait()
        for loop, task in handles:
            loop.call_soon_threadsafe(task.cancel)
        thread.join()
        raise
    if errors:
        raise errors[0]
    return found[0]
