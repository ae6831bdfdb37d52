"""A BERT is fine-tuned by transformers' Trainer: one import differs, and any worker may be killed.

In one process: ``python examples/hf_trainer.py``. On workers that may be killed: ``holdfast run -n 3 --preload
transformers examples/hf_trainer.py``. The last line, a hash, is the same for both.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

try:
    from transformers import BertConfig, BertForSequenceClassification, EarlyStoppingCallback, TrainingArguments

    from holdfast.integrations.transformers import Trainer  # instead of: from transformers import Trainer
except ImportError as e:
    raise SystemExit("this example trains by transformers' Trainer: pip install 'holdfast[transformers]'") from e

MODULES = ("ast", "datetime", "socket", "typing")  # of the standard library; the task is to tell them apart
PAD, LONGEST = 0, 48  # the token that pads, tokens of a line


class Lines:
    """Lines of the modules, as bytes, with the number of their module."""

    def __init__(self, *, test: bool, most: int | None = None) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        self.samples: list[tuple[bytes, int]] = []
        for label, name in enumerate(MODULES):
            lines = [line.strip() for line in (folder / f"{name}.py").read_bytes().splitlines()]
            long = [line[: LONGEST - 1] for line in lines if len(line) > 8]
            self.samples += [(line, label) for i, line in enumerate(long) if (i % 5 == 0) == test][:most]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> dict[str, Any]:
        line, label = self.samples[i]
        return {"input_ids": [1, *(byte + 2 for byte in line)], "labels": label}


def pad(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """What a padding collator of transformers does: pads to the longest line of the batch."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    rows = [sample["input_ids"] + [PAD] * (longest - len(sample["input_ids"])) for sample in samples]
    ids = torch.tensor(rows)
    return {
        "input_ids": ids,
        "attention_mask": (ids != PAD).long(),
        "labels": torch.tensor([sample["labels"] for sample in samples]),
    }


def accuracy(found: Any) -> dict[str, float]:
    return {"accuracy": float(np.mean(found.predictions.argmax(-1) == found.label_ids))}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=50, help="steps from one evaluation to the next")
    parser.add_argument("--checkpoint", default="hf-trainer", help="folder to resume from and to save to")
    given = parser.parse_args()

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    model = BertForSequenceClassification(
        BertConfig(vocab_size=258, max_position_embeddings=LONGEST, num_labels=len(MODULES), **sizes)
    )
    arguments = TrainingArguments(
        output_dir=given.checkpoint,
        per_device_train_batch_size=4,  # samples of a micro-batch
        gradient_accumulation_steps=4,  # micro-batches of a step, over all workers together
        max_steps=given.steps,
        learning_rate=1e-3,
        warmup_steps=10,
        weight_decay=0.01,
        logging_steps=20,
        eval_strategy="steps",
        eval_steps=given.every,
        save_steps=given.every,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        save_total_limit=2,
        report_to="none",
        use_cpu=True,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        data_collator=pad,
        train_dataset=Lines(test=False),
        eval_dataset=Lines(test=True, most=100),
        compute_metrics=accuracy,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
    )
    trainer.train()
    assert trainer.loop is not None
    sha256 = trainer.loop.sha256()
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"best accuracy {trainer.state.best_metric:.3f}, at step {trainer.state.best_global_step}")
        print(f"sha256 {sha256}")


if __name__ == "__main__":
    main()
