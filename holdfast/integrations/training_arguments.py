"""What becomes of each field of transformers' ``TrainingArguments``: it is honoured, harmless, or refused.

A field that is refused must have its default. One that is in no table, because transformers has added it, must too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from transformers import TrainerCallback, TrainingArguments
from transformers.training_args import ParallelMode

from holdfast.errors import UsageError

# They do what they do in transformers, by its own code or by ours.
HONOURED = frozenset({
    "output_dir", "per_device_train_batch_size", "num_train_epochs", "max_steps", "learning_rate", "lr_scheduler_type",
    "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args", "weight_decay", "adam_beta1", "adam_beta2",
    "adam_epsilon", "gradient_accumulation_steps", "max_grad_norm", "label_smoothing_factor", "bf16", "tf32",
    "activation_checkpointing", "activation_checkpointing_kwargs", "gradient_checkpointing",
    "gradient_checkpointing_kwargs", "use_cache", "neftune_noise_alpha", "logging_strategy", "logging_steps",
    "logging_first_step", "disable_tqdm", "report_to", "run_name", "project", "eval_strategy", "eval_steps",
    "eval_delay", "per_device_eval_batch_size", "prediction_loss_only", "eval_on_start", "eval_do_concat_batches",
    "eval_accumulation_steps", "include_for_metrics", "batch_eval_metrics", "save_only_model", "save_strategy",
    "save_steps", "save_total_limit", "load_best_model_at_end", "metric_for_best_model", "greater_is_better",
    "full_determinism", "seed", "data_seed", "use_cpu", "dataloader_drop_last", "dataloader_num_workers",
    "dataloader_pin_memory", "dataloader_prefetch_factor", "remove_unused_columns", "label_names",
    "train_sampling_strategy", "length_column_name", "accelerator_config", "log_level",
})  # fmt: skip

# They change nothing here, for a reason.
HARMLESS: Mapping[str, str] = {
    **dict.fromkeys(("do_train", "do_eval", "do_predict", "resume_from_checkpoint"), "for the script alone"),
    **dict.fromkeys(
        ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend",
         "ddp_timeout", "local_rank"),
        "there is no DistributedDataParallel, and no process group",
    ),
    **dict.fromkeys(
        ("hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"),
        "nothing is uploaded: push_to_hub is refused",
    ),
    **dict.fromkeys(
        ("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), "for report_to='trackio' alone"
    ),
    "log_level_replica": "every worker logs as the first one, into a log of its own",
    "log_on_each_node": "the first worker alone prints",
    "logging_nan_inf_filter": "a loss that is not finite ends the training, with the samples that it is of",
    "restore_callback_states_from_checkpoint": "states of callbacks are always restored",
    "dataloader_persistent_workers": "loaders always live as long as the training",
    "eval_use_gather_object": "nothing is gathered: every worker evaluates",
    "liger_kernel_config": "use_liger_kernel is refused",
    "torch_compile_backend": "torch_compile is refused, which it sets",
    "torch_compile_mode": "torch_compile is refused, which it sets",
}  # fmt: skip

# What else than the default cannot be honoured: why, and what to do instead.
REFUSED: Mapping[str, tuple[str, str]] = {
    "fp16": ("a gradient scaler skips steps by what one worker sees", "bf16=True"),
    "fp16_full_eval": ("it turns the trained weights themselves into halves", "leave it out"),
    "bf16_full_eval": ("it turns the trained weights themselves into halves", "leave it out"),
    "torch_compile": ("each worker would compile for itself, perhaps to other bits", "leave it out"),
    "use_liger_kernel": ("its kernels were not tested for equal bits", "leave it out"),
    "auto_find_batch_size": ("workers would find different sizes", "choose per_device_train_batch_size"),
    "average_tokens_across_devices": ("the mean is always over all tokens of the step", "leave it out"),
    "include_num_input_tokens_seen": ("each worker sees its share of the tokens alone", "leave it out"),
    "skip_memory_metrics": ("each worker would log another number", "leave it out"),
    "torch_empty_cache_steps": ("it is not called", "leave it out"),
    "debug": ("it was not tested", "leave it out"),
    "optim_target_modules": ("its optimizers keep state elsewhere than in state[parameter]", "optim='adamw_torch'"),
    "push_to_hub": ("a worker that is lost in mid-upload would leave half of it", "upload output_dir afterwards"),
    "enable_jit_checkpoint": ("a worker that is asked to leave does so without it", "leave it out"),
    "save_on_each_node": ("the first worker writes, into a folder that all see", "leave it out"),
    "ignore_data_skip": ("a training goes on with the samples that come next", "leave it out"),
    "dataloader_multiprocessing_context": ("loaders are forks", "leave it out"),
    "dataloader_in_order": ("the order of batches decides the bits", "leave it out"),
    "deepspeed": ("every worker holds the whole model", "leave it out"),
    "fsdp": ("every worker holds the whole model", "leave it out"),
    "fsdp_config": ("every worker holds the whole model", "leave it out"),
    "parallelism_config": ("every worker holds the whole model", "leave it out"),
}

# Optimizers that update when ``step`` is called, and keep all that lasts in ``state[parameter]`` and their groups.
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")
SAMPLING = ("random", "sequential", "group_by_length")
OF_ACCELERATE = ("split_batches", "dispatch_batches")  # settings of ``accelerator_config`` that cut batches in parts


def check(args: TrainingArguments, *, own_optimizer: bool) -> None:
    """Raise ``UsageError`` for the first argument that cannot be honoured.

    ``own_optimizer``: the script has made the optimizer itself.
    """
    default = TrainingArguments(output_dir=args.output_dir, use_cpu=args.use_cpu)
    for each in fields(TrainingArguments):
        name = each.name
        if name in HONOURED or name in HARMLESS or getattr(args, name) == getattr(default, name):
            continue
        why, instead = REFUSED.get(name, ("this version of holdfast does not know it", "leave it out"))
        raise UsageError(f"{name}={getattr(args, name)!r} cannot be honoured: {why}", hint=instead)
    for name, is_fine, hint in _values(args, own_optimizer=own_optimizer):
        if not is_fine(getattr(args, name)):
            raise UsageError(f"{name}={_shown(getattr(args, name))!r} cannot be honoured", hint=hint)


def _values(args: TrainingArguments, *, own_optimizer: bool) -> list[tuple[str, Callable[[Any], bool], str]]:
    """Return which values of fields are fine that are honoured for some values alone, and a hint for the others."""
    ways = f"one of {', '.join(OPTIMIZERS)}; any other as Trainer(optimizers=(optimizer, None))"
    return [
        ("optim", lambda value: own_optimizer or str(_shown(value)) in OPTIMIZERS, ways),
        ("train_sampling_strategy", lambda value: value in SAMPLING, f"one of {', '.join(SAMPLING)}"),
        (
            "accelerator_config",
            lambda value: not any(getattr(value, each, None) for each in OF_ACCELERATE),
            "batches are not cut: leave split_batches and dispatch_batches out",
        ),
    ]


def _shown(value: Any) -> Any:
    """Return an enum's value, and anything else as it is."""
    return getattr(value, "value", value)


def check_place(args: TrainingArguments) -> None:
    """Raise ``UsageError`` if transformers would train with other processes, or on several GPUs, by itself."""
    if args.parallel_mode is ParallelMode.DISTRIBUTED:
        raise UsageError(
            "transformers has set up torch.distributed",
            hint="start the script by `holdfast run`, and import holdfast.integrations.transformers before "
            "TrainingArguments are made",
        )
    if args.n_gpu > 1:
        raise UsageError(f"one process would use {args.n_gpu} GPUs", hint="a worker for each: holdfast run -n …")


# Methods that ours takes the place of, and events in the middle of an optimizer's step. One that a script defines
# would never be called.
METHODS = (
    "training_step", "get_batch_samples", "_run_epoch", "_prepare_for_training", "_finalize_training",
    "_clip_grad_norm", "_get_grad_norm",
)  # fmt: skip
EVENTS = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")


def check_trainer(trainer: Any, plain: type, trial: object) -> None:
    """Raise ``UsageError`` for what a subclass or a callback defines, and nobody would call."""
    if trial is not None:
        raise UsageError("trial= cannot be honoured", hint="one script, and one output_dir, for each trial")
    for name in METHODS:
        if getattr(type(trainer), name) is not getattr(plain, name):
            raise UsageError(f"{name} of {type(trainer).__name__} would not be called", hint="override compute_loss")
    for callback in trainer.callback_handler.callbacks:
        for name in EVENTS:
            if getattr(type(callback), name, None) not in (None, getattr(TrainerCallback, name)):
                raise UsageError(
                    f"{type(callback).__name__} waits for {name}, which is in the middle of a commit",
                    hint="on_step_begin or on_step_end; gradient norms are in logs",
                )
