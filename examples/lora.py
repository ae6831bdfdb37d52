"""LoRA by PEFT: adapters of a frozen GPT-2 are trained, and checkpoints hold the adapters alone.

In one process: ``python examples/lora.py``. On workers that may be killed: ``holdfast run -n 3 --preload peft
examples/lora.py``. The last line, a hash, is the same for both.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import holdfast
from holdfast.demo.corpus import standard_library

try:
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel
except ImportError as e:
    raise SystemExit("this example needs: pip install 'transformers>=5' peft") from e

WINDOW = 32


def collate(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    ids = torch.stack([bytes_ for bytes_, _ in samples])
    return {"input_ids": ids, "labels": ids}  # GPT-2 shifts the labels itself


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--checkpoint", help="folder to resume from and to save to")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_layer=2, n_head=2, n_embd=64, n_positions=WINDOW, bos_token_id=0, eos_token_id=0
    )
    base = GPT2LMHeadModel(config)  # elsewhere: from_pretrained
    lora = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.05, target_modules=["c_attn"], fan_in_fan_out=True)
    model = get_peft_model(base, lora)

    training, held_out = standard_library(window=WINDOW)
    folder = arguments.checkpoint
    run = holdfast.Run(
        model=model,
        loss=lambda model, batch: model(**batch).loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        data=holdfast.Data(training, collate=collate),
        global_batch=16,
        micro_batch=4,
        checkpoint=folder and holdfast.Checkpoints(folder=folder, trainable_only=True),
    )
    for step in run.steps(arguments.steps):
        if step.is_first_worker and step.number % 10 == 0:
            print(f"step {step.number:3}  loss {step.loss:.4f}")

    loss = run.evaluate([held_out[i] for i in range(64)])
    sha256 = run.sha256()
    if run.is_first_worker:
        print(f"held-out loss {loss:.4f}")
        print(f"sha256 {sha256}")


if __name__ == "__main__":
    main()
