"""The training of gpt2.py as people write it without holdfast: ``python examples/plain_gpt2.py``."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from holdfast.demo.corpus import standard_library


def main(steps: int = 50) -> None:
    torch.manual_seed(0)
    sizes = {"n_layer": 4, "n_head": 4, "n_embd": 64, "n_positions": 64}
    config = GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **sizes)
    training, _ = standard_library(window=config.n_positions)

    # --- before
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    for step, (x, y) in zip(range(steps), DataLoader(training, batch_size=32, shuffle=True), strict=False):
        loss = torch.nn.functional.cross_entropy(model(x).logits.flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step:4}  loss {loss.item():.4f}")
    # --- end


if __name__ == "__main__":
    main()
