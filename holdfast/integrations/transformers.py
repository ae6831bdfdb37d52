"""transformers' ``Trainer`` on a ``holdfast.Loop``: the same script, whose workers may be killed, join and leave.

Import it before ``TrainingArguments`` are made: under ``holdfast run`` it hides from transformers that there are other
workers, which would make it set up DistributedDataParallel.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import TrainOutput, speed_metrics

from holdfast.engine.numerics import Numerics
from holdfast.errors import UsageError
from holdfast.integrations import hf_checkpoints, hf_losses, hf_reporters, trainer_state, training_arguments
from holdfast.integrations.alone import be_alone
from holdfast.integrations.sampled import SampledData
from holdfast.journal.rows import FACTS
from holdfast.run.loop import Loop
from holdfast.run.loop_step import LoopStep
from holdfast.run.script import Step

be_alone()
if not hasattr(transformers.Trainer, "_init_training_state"):
    raise ImportError("holdfast.integrations.transformers needs transformers 5.23 or later")

__all__ = ["Trainer"]
IN_THE_ROW = frozenset({*FACTS, "learning_rate"})  # what a row of the journal has already, of each step


_SIGNATURE = inspect.signature(transformers.Trainer)
_CHECKPOINT = inspect.Parameter("checkpoint", inspect.Parameter.KEYWORD_ONLY, default=None)


@dataclass(kw_only=True)
class Course:
    """The sizes of a training, and what ``train`` was called with."""

    steps: int  # until training ends
    steps_per_epoch: int
    batches_per_epoch: int  # micro-batches
    ignore_keys: list[str] | None  # of the model's output, in evaluations
    begin: float  # when this process has begun, as ``time.time`` has it


class Trainer(transformers.Trainer):
    """transformers' ``Trainer``, trained by all workers of ``holdfast run`` together.

    The constructor, and what ``args`` say, are those of transformers; an argument that cannot be honoured is refused
    by name. One thing differs: **a step has ``per_device_train_batch_size * gradient_accumulation_steps`` samples,
    however many workers there are.** They share its micro-batches. So the losses do not depend on who comes and goes.

    ``checkpoint``, by its name: another folder for what a training goes on from than ``output_dir/holdfast``, as
    ``"s3://bucket/run"``.

    ``loop`` is the ``holdfast.Loop`` of the training, once ``train`` has begun. Raises ``UsageError``.

    >>> from holdfast.integrations.transformers import Trainer  # in place of transformers.Trainer
    >>> trainer = Trainer(model=model, args=args, train_dataset=data)  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    """

    __signature__ = _SIGNATURE.replace(parameters=[*_SIGNATURE.parameters.values(), _CHECKPOINT])
    loop: Loop | None = None
    control: Any
    lr_scheduler: Any
    _created_lr_scheduler: bool
    _course: Course
    _items: hf_losses.Items
    _is_stale = True  # the state that all workers share is not in this trainer's objects yet
    _has_begun = False  # callbacks know that training has begun
    _may_log = False  # there is a committed step to log for

    def __init__(self, *given: Any, checkpoint: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        found = inspect.signature(transformers.Trainer.__init__).bind(self, *given, **settings).arguments
        args = found.get("args") or transformers.TrainingArguments(output_dir="tmp_trainer")
        self._root = hf_checkpoints.root_of(str(args.output_dir), checkpoint)
        training_arguments.check_place(args)
        training_arguments.check(args, own_optimizer=found.get("optimizers", (None, None))[0] is not None)
        super().__init__(*given, **settings)
        self._reporters: list[type] = []  # callbacks of ``report_to`` that this worker has not, unless it is the first
        if "HOLDFAST_WORKER" in os.environ:
            self._reporters = hf_reporters.take_out(self)
            if self.pop_callback(ProgressCallback) is not None:
                self.add_callback(PrinterCallback)  # the agent shows how far the training is

    # --- who this worker is ----------------------------------------------------------------------

    def is_world_process_zero(self) -> bool:
        """Return whether this worker prints and writes files: one does at any time, and the next if it is lost."""
        if self.loop is not None and self.loop.workers:
            return self.loop.is_first_worker
        return os.environ.get("HOLDFAST_WORKER", "0.0") == "0.0"

    def is_local_process_zero(self) -> bool:
        """Return the same: on other machines than that of the first worker nobody prints."""
        return self.is_world_process_zero()

    # --- training --------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train to the end, whatever is lost. A training goes on from the newest checkpoint of ``output_dir``, if any.

        ``resume_from_checkpoint``: True, or the path of a checkpoint of this ``output_dir``: there must be one.
        """
        if self.loop is not None:
            raise UsageError("a Trainer trains once", hint="for another training, a Trainer with another output_dir")
        training_arguments.check_trainer(self, transformers.Trainer, trial)
        hf_checkpoints.check_resume(resume_from_checkpoint, self.args.output_dir, self._root)
        return super().train(ignore_keys_for_eval=ignore_keys_for_eval)

    def hyperparameter_search(self, *_: Any, **__: Any) -> Any:
        """Refuse it: each trial would be a training of its own."""
        raise UsageError("hyperparameter_search cannot be honoured", hint="one script, and one output_dir, per trial")

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        self.accelerator.free_memory()
        loader = self.get_train_dataloader()
        epochs, per_epoch, _, samples, _, batches, steps = self.set_initial_training_values(self.args, loader)
        self._course = Course(
            steps=steps,
            steps_per_epoch=per_epoch,
            batches_per_epoch=batches,
            ignore_keys=ignore_keys_for_eval,
            begin=time.time(),
        )
        self._init_training_state(steps, per_epoch, epochs, None, None)
        self._prepare_objects(steps, loader)
        self.loop = self._make_loop(loader)
        trained = self._train_steps(self.loop)
        return self._finish(self.loop, samples * trained / max(steps, 1), trained)

    def _prepare_objects(self, steps: int, loader: DataLoader[Any]) -> None:
        """Make optimizer and schedule, and let accelerate give the model its autocast."""
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_optimizer()
        self.create_scheduler(num_training_steps=steps)
        self.model_wrapped = self.accelerator.prepare_model(self.model)
        self.model.train()
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = loader
        self._tr_loss = torch.zeros((), dtype=torch.float64)  # the base class logs it, and sets it to zero
        self._total_loss_scalar, self._globalstep_last_logged, self._saved_at, self._best_at = 0.0, 0, 0, 0

    def _make_loop(self, loader: DataLoader[Any]) -> Loop:
        args, micro_batch = self.args, self._train_batch_size
        micro_batch, global_batch = hf_losses.batches(loader, micro_batch, args.gradient_accumulation_steps)
        data = SampledData.of_loader(
            loader,
            micro_batch=micro_batch,
            seed=args.seed,
            num_workers=args.dataloader_num_workers,
            prefetch=args.dataloader_prefetch_factor or 2,
            pin_memory=args.dataloader_pin_memory,
        )
        self._items = hf_losses.Items(self, lambda: data.first(micro_batch))
        return Loop(
            model=self.model,
            optimizer=self.optimizer,
            data=data,
            global_batch=global_batch,
            micro_batch=micro_batch,
            weight=self._items,
            seed=args.seed,
            numerics=Numerics(device=str(args.device)),
            checkpoint=hf_checkpoints.settings_of(self, self._root, self._course.steps_per_epoch),
            state={"trainer": self._text(), "history": "", "lr_scheduler": self.lr_scheduler},
        )

    def _train_steps(self, loop: Loop) -> int:
        """Train; return the number of steps that this process has seen committed."""
        trained, clip = 0, self.args.max_grad_norm
        for step in loop.steps(self._course.steps, progress=None if not self.args.disable_tqdm else False):
            self._come_to(step)
            factor = self._items.factor(self._micro_batches_of(step.number))
            for inputs in step.micro_batches():
                step.backward(self._loss_of(inputs) * factor)
            made = step.commit(clip_norm=clip if clip and clip > 0 else None)
            if made is None:
                self._is_stale = True  # what callbacks have changed in this body is taken back
                continue
            trained += 1
            self._committed(made)
            if self.control.should_training_stop and made.number + 1 < self._course.steps:
                break
        if self._is_stale:
            self._take()
        return trained

    def _come_to(self, step: LoopStep) -> None:
        """Fire the events before a step. If it breaks, those of the step and of its epoch come again."""
        if self._is_stale:
            self._take()
        begins_here = not self._has_begun
        self._begin()
        self._note_place()
        if step.number == 0 and self.args.eval_on_start:
            self._evaluate(None, self._course.ignore_keys, skip_scheduler=True)
        if begins_here or step.number % self._course.steps_per_epoch == 0:
            self._fire("on_epoch_begin")
        self._fire("on_step_begin")

    def _begin(self) -> None:
        """Tell callbacks that training begins, once in this process, when it is known who the first worker is."""
        if not self._has_begun:
            self._note_place()
            self._has_begun = True
            self._fire("on_train_begin")

    def _note_place(self) -> None:
        """Tell callbacks whether this worker is the first, which it may become at any step."""
        first = self.is_world_process_zero()
        self.state.is_world_process_zero = self.state.is_local_process_zero = first
        if first and self._reporters:
            hf_reporters.put_in(self, self._reporters, has_begun=self._has_begun)
            self._reporters = []

    def _fire(self, event: str) -> None:
        self.control = getattr(self.callback_handler, event)(self.args, self.state, self.control)

    def _loss_of(self, inputs: Any) -> torch.Tensor:
        """Return the mean loss of a micro-batch: over its items, if it has some that are counted."""
        inputs = self._prepare_inputs(inputs)
        items = self._get_num_items_in_batch([inputs], self.args.device)
        with self.compute_loss_context_manager():
            return self.compute_loss(self.model, inputs, num_items_in_batch=items)

    def _micro_batches_of(self, step: int) -> int:
        """Return the number of a step's micro-batches: the last step of an epoch may have fewer."""
        course, accumulation = self._course, self.args.gradient_accumulation_steps
        return min(accumulation, course.batches_per_epoch - step % course.steps_per_epoch * accumulation)

    def _committed(self, made: Step) -> None:
        """Count a committed step, fire its events, and log, evaluate and save as callbacks want it."""
        course, state, scheduler = self._course, self.state, self.lr_scheduler
        self._may_log = True
        self._tr_loss += made.loss
        rate = self._get_learning_rate()
        if not hf_losses.is_stepped_by_a_metric(scheduler):
            scheduler.step()
        epoch, before = divmod(made.number, course.steps_per_epoch)
        batches = min((before + 1) * self.args.gradient_accumulation_steps, course.batches_per_epoch)
        state.global_step, state.epoch = made.number + 1, epoch + batches / course.batches_per_epoch
        self._fire_and_act("on_step_end", made, epoch, rate)
        if before + 1 == course.steps_per_epoch or self.control.should_training_stop:
            self._fire_and_act("on_epoch_end", made, epoch, rate)
        self._keep()
        self._may_log = False

    def _fire_and_act(self, event: str, made: Step, epoch: int, rate: float) -> None:
        self._fire(event)
        if self.control.should_epoch_stop:
            raise UsageError("a callback ends an epoch early, which cannot be honoured", hint="should_training_stop")
        keys, begin = self._course.ignore_keys, self._course.begin
        self._maybe_log_save_evaluate(self._tr_loss, made.grad_norm, self.model, None, epoch, keys, begin, rate)

    def _finish(self, loop: Loop, samples: float, trained: int) -> TrainOutput:
        """End the training: the last log, the best model, the last events."""
        self._begin()  # if a checkpoint had all steps
        self._may_log = loop.last is not None
        loss = (self._total_loss_scalar + self._tr_loss.item()) / max(self.state.global_step, 1)
        metrics = speed_metrics("train", self._course.begin, num_samples=samples, num_steps=trained)
        metrics |= {"total_flos": self.state.total_flos, "train_loss": loss}
        self._memory_tracker.stop_and_update_metrics(metrics)
        self.log(metrics)
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            loop._save_if_due(last=True)  # the last step's weights, before the best ones take their place
            self._load_best_model()
        self._write_once(lambda: hf_checkpoints.rotate_at_end(self))
        self._fire("on_train_end")
        if self.neftune_noise_alpha is not None:
            transformers.trainer.deactivate_neftune(self.model, self.neftune_hook_handle, self.accelerator)
        self.is_in_train = False
        return TrainOutput(self.state.global_step, loss, metrics)

    # --- what is committed with each step --------------------------------------------------------

    def _text(self) -> str:
        sums = trainer_state.Sums(
            since=self._tr_loss.item(),
            logged=self._total_loss_scalar,
            logged_at=self._globalstep_last_logged,
            saved_at=self._saved_at,
            best_at=self._best_at,
        )
        return trainer_state.to_text(self.state, self.control, self.callback_handler.callbacks, sums)

    def _keep(self) -> None:
        """Put the trainer's state where all workers, joiners and checkpoints have it."""
        assert self.loop is not None
        self.loop.state["trainer"] = self._text()
        known = self.loop.state["history"].count("\n")
        self.loop.state["history"] += trainer_state.lines_of(self.state.log_history[known:])

    def _take(self) -> None:
        """Take the state that is committed: this worker has joined or resumed, or a step has broken."""
        assert self.loop is not None
        callbacks = self.callback_handler.callbacks
        sums = trainer_state.of_text(self.loop.state["trainer"], self.state, self.control, callbacks)
        self.state.log_history = trainer_state.of_lines(self.loop.state["history"])
        self._tr_loss.fill_(sums.since)
        self._total_loss_scalar, self._globalstep_last_logged = sums.logged, sums.logged_at
        self._saved_at = sums.saved_at
        self._note_best(sums.best_at)
        self._is_stale = False

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log values as transformers does. The history leaves out what a clock has measured: workers differ in it."""
        super().log(logs, start_time)
        entry = self.state.log_history[-1] = trainer_state.timeless(self.state.log_history[-1])
        if self._may_log and self.loop is not None:
            found = {name: value for name, value in entry.items() if name not in IN_THE_ROW and name != "step"}
            self.loop.log({name: value for name, value in found.items() if isinstance(value, int | float | str)})

    # --- files -----------------------------------------------------------------------------------

    def _write_once(self, write: Callable[[], None]) -> None:
        """Let one worker write. If it is lost in the middle, the next one writes again. Every worker calls it."""
        if self.loop is not None and self.loop.workers:
            self.loop.write_files(write)
        elif self.is_world_process_zero():
            write()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as ``from_pretrained`` reads it. Every worker calls it, the first one writes."""
        self._write_once(lambda: super(Trainer, self).save_model(output_dir, _internal_call))

    def _note_best(self, step: int) -> None:
        """Note the step of the best checkpoint; 0: there is none."""
        self._best_at = step
        self.state.best_model_checkpoint = hf_checkpoints.path_of(self.args.output_dir, step) if step else None

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        state = self.state
        if state.best_global_step in (state.global_step, self._saved_at):
            self._note_best(state.best_global_step)
        self._saved_at = state.global_step
        plain = super().save_model
        self._write_once(lambda: hf_checkpoints.write(self, lambda folder: plain(folder, _internal_call=True)))
