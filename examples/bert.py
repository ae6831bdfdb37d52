"""A BERT classifies lines of source code: padded batches, parameter groups, warm-up, clipping, and F1 at the end.

In one process: ``python examples/bert.py``. On workers that may be killed: ``holdfast run -n 3 --preload transformers
examples/bert.py``. The last line, a hash, is the same for both.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn

import holdfast

try:
    from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup
except ImportError as e:
    raise SystemExit("this example trains a model of transformers: pip install 'transformers>=5'") from e

MODULES = ("ast", "datetime", "socket", "typing")  # of the standard library; the task is to tell them apart
PAD, LONGEST, TOTAL = 0, 48, 200  # the token that pads, tokens of a line, steps of the schedule


class Lines:
    """Lines of the modules, as bytes, with the number of their module."""

    def __init__(self, *, test: bool) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        self.samples = []
        for label, name in enumerate(MODULES):
            lines = [line.strip() for line in (folder / f"{name}.py").read_bytes().splitlines()]
            long = [line[: LONGEST - 1] for line in lines if len(line) > 8]
            self.samples += [(line, label) for i, line in enumerate(long) if (i % 5 == 0) == test]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> dict[str, object]:
        line, label = self.samples[i]
        return {"input_ids": [1, *(byte + 2 for byte in line)], "label": label}


def pad(samples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """What a padding collator of transformers does: pads to the longest line of the batch."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    rows = [sample["input_ids"] + [PAD] * (longest - len(sample["input_ids"])) for sample in samples]
    ids = torch.tensor(rows)
    return {
        "input_ids": ids,
        "attention_mask": (ids != PAD).long(),
        "labels": torch.tensor([sample["label"] for sample in samples]),
    }


def optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """AdamW without decay of biases and norms."""
    plain = [p for name, p in named if name.endswith("bias") or "LayerNorm" in name]
    rest = [p for name, p in named if not (name.endswith("bias") or "LayerNorm" in name)]
    return torch.optim.AdamW([{"params": rest, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}], lr=1e-3)


def f1(predicted: Tensor, labels: Tensor) -> float:
    """The mean F1 of all classes; any library's function would do."""
    scores = []
    for label in range(len(MODULES)):
        hits = ((predicted == label) & (labels == label)).sum()
        scores.append(2 * hits / ((predicted == label).sum() + (labels == label).sum()).clamp(min=1))
    return float(torch.stack(scores).mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=TOTAL)
    parser.add_argument("--checkpoint", help="folder to resume from and to save to")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = BertConfig(vocab_size=258, max_position_embeddings=LONGEST, num_labels=len(MODULES), **sizes)
    run = holdfast.Run(
        model=BertForSequenceClassification(config),
        loss=lambda model, batch: model(**batch).loss,
        optimizer=optimizer,
        schedule=lambda made: get_linear_schedule_with_warmup(made, 10, TOTAL),
        clip_norm=1.0,
        data=holdfast.Data(Lines(test=False), collate=pad),
        global_batch=16,
        micro_batch=4,
        checkpoint=arguments.checkpoint,
    )
    for step in run.steps(arguments.steps):
        if step.is_first_worker and step.number % 20 == 0:
            print(f"step {step.number:3}  loss {step.loss:.4f}, norm of the gradient {step.grad_norm:.2f}")

    found = run.predict(Lines(test=True), lambda model, batch: (model(**batch).logits.argmax(-1), batch["labels"]))
    sha256 = run.sha256()
    if run.is_first_worker:
        print(f"F1 {f1(*found):.3f}")
        print(f"sha256 {sha256}")


if __name__ == "__main__":
    main()
