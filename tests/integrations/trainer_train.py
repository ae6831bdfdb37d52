"""The script of the tests of the integrated Trainer: one program, under transformers' own Trainer and under ours."""

import json
import os
import time
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

from holdfast.checkpoint import index, series
from holdfast.checkpoint.places import place_of
from holdfast.integrations.alone import be_alone
from tests.integrations import programs

OURS = os.environ.get("TRAINER", "ours") == "ours"
Trainer: Any = transformers.Trainer
if OURS:
    from holdfast.integrations.transformers import Trainer  # as a user writes it
else:
    be_alone()

TOKENS, LENGTH = 40, 12
# What a plain Trainer and ours are compared with draws nothing: ours draws for each micro-batch, by its number.
STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


class Lines:
    """Lines of tokens, with labels of which different numbers count."""

    def __init__(self, size: int, seed: int) -> None:
        drawn = torch.Generator().manual_seed(seed)
        self.lines = [torch.randint(TOKENS, (LENGTH,), generator=drawn) for _ in range(size)]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        labels = self.lines[i].clone()
        labels[: i % 7] = -100
        return {"input_ids": self.lines[i], "labels": labels}


class Means(torch.nn.Module):
    """A model whose loss is a mean over samples, and takes no number of items."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = torch.nn.Embedding(TOKENS, 8), torch.nn.Linear(8, TOKENS)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.last(self.embedding(input_ids).tanh())
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Added(Means):
    """The same, but transformers takes it for a mean over ``num_items_in_batch``, and adds up: as many models of it."""

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
        return super().forward(input_ids, labels)


class Counting(TrainerCallback):
    """Waits for joiners and checkpoints, as the tests' other scripts do, and ends the script where a test wants it."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        setting = os.environ.get
        loop: Any = trainer.loop if OURS else None
        if loop is not None:
            programs.wait_if_wanted(loop, state.global_step)
        if state.global_step == int(setting("END", "0")):
            root = place_of(setting("CHECKPOINT") or os.path.join(args.output_dir, "holdfast"))
            while not index.exists(series.folder_of(root, state.global_step - 1)):
                time.sleep(0.01)
            raise SystemExit(3)


def make_model(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind in ("means", "added"):
        return Means() if kind == "means" else Added()
    sizes = {"vocab_size": TOKENS, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **STILL, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"))
    if kind != "lora":
        return model
    from peft import LoraConfig, get_peft_model

    dropout = 0.0 if os.environ.get("STILL") else 0.1
    lora = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=dropout)
    return get_peft_model(model, lora)


def accuracy(found: Any) -> dict[str, float]:
    return {"accuracy": float(np.mean(found.predictions.argmax(-1)[:, :-1] == found.label_ids[:, 1:]))}


def arguments() -> TrainingArguments:
    given = {
        "output_dir": os.environ["OUTPUT"], "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3,
        "num_train_epochs": 2, "learning_rate": 1e-2, "warmup_steps": 3, "weight_decay": 0.1, "max_grad_norm": 0.5,
        "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3,
        "seed": 1, "use_cpu": True, "disable_tqdm": True, "report_to": [],
    }  # fmt: skip
    return TrainingArguments(**{**given, **json.loads(os.environ.get("ARGUMENTS", "{}"))})


args = arguments()
more: dict[str, Any] = {"callbacks": [Counting()]}
if os.environ.get("PATIENCE"):
    more["callbacks"].append(EarlyStoppingCallback(early_stopping_patience=int(os.environ["PATIENCE"])))
if os.environ.get("METRICS"):
    more["compute_metrics"] = accuracy
if os.environ.get("CHECKPOINT"):
    more["checkpoint"] = os.environ["CHECKPOINT"]
trainer = Trainer(
    model=make_model(os.environ.get("MODEL", "gpt2")), args=args, train_dataset=Lines(34, 0), eval_dataset=Lines(8, 1),
    **more,
)  # fmt: skip


def main() -> None:
    out = trainer.train()
    found = {
        "worker": os.environ.get("HOLDFAST_WORKER"),
        "history": trainer.state.log_history,
        "loss": out.training_loss,
        "step": out.global_step,
        "best": trainer.state.best_metric,
        "best_at": trainer.state.best_global_step,
        "evaluated": trainer.evaluate(Lines(8, 1))["eval_loss"],
    }
    if OURS:
        assert trainer.loop is not None
        found["sha256"] = trainer.loop.sha256()
    trainer.save_model(os.path.join(args.output_dir, "final"))
    with open(os.environ["RESULTS"], "a") as results:
        results.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
