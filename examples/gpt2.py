"""transformers' own GPT-2, small and from scratch, on the source of Python's standard library.

In one process: ``python examples/gpt2.py``. As two pipelines of two stages, any worker of which may be killed:
``holdfast run -n 4 examples/gpt2.py --stages 2 --tolerate 1``. The last line, a hash, is the same for both.
"""

from __future__ import annotations

import argparse

import torch

import holdfast
from holdfast.demo.corpus import standard_library
from holdfast.demo.gpt import next_byte_loss

try:
    from transformers import GPT2Config, GPT2LMHeadModel
except ImportError as e:
    raise SystemExit("this example trains a model of transformers: pip install 'transformers>=5'") from e


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--stages", type=int, help="stages of each pipeline; every worker has all layers if not given")
    parser.add_argument("--tolerate", type=int, default=0, help="losses at the same time that must not matter")
    parser.add_argument("--checkpoint", help="folder to resume from and to save to")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    sizes = {"n_layer": 4, "n_head": 4, "n_embd": 64, "n_positions": 64}
    config = GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **sizes)  # its words are bytes
    training, held_out = standard_library(window=config.n_positions)
    run = holdfast.Run(
        layers=holdfast.layers_of(GPT2LMHeadModel(config)),  # embedding, four blocks, and the head with tied weights
        loss=next_byte_loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        schedule=lambda step: 3e-3 * min(1.0, (step + 1) / 10),  # warm up over ten steps
        clip_norm=1.0,
        data=training,
        global_batch=32,
        micro_batch=4,
        placement=holdfast.Placement(stages=arguments.stages, tolerate=arguments.tolerate),
        checkpoint=arguments.checkpoint,
    )
    for step in run.steps(arguments.steps):
        if step.is_first_worker and (step.number % 10 == 0 or step.number == arguments.steps - 1):
            print(f"step {step.number:4}  loss {step.loss:.4f}  {step.workers} workers")

    loss = run.evaluate(held_out)  # shared among the workers, so all of them call it,
    run.save_model("gpt2.safetensors")
    sha256 = run.sha256()  # and these two as well: no worker has all of the model
    if run.is_first_worker:
        print(f"held-out loss {loss:.4f}, model in gpt2.safetensors")
        print(f"sha256 of weights and optimizer state: {sha256}")


if __name__ == "__main__":
    main()
