"""The training of lora.py as people write it without holdfast: ``python examples/plain_lora.py``."""

from __future__ import annotations

import torch
from lora import WINDOW, collate
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from holdfast.demo.corpus import standard_library


def main(steps: int = 40) -> None:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": WINDOW}
    base = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **sizes))
    training, _ = standard_library(window=WINDOW)

    # --- before
    lora = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.05, target_modules=["c_attn"], fan_in_fan_out=True)
    model = get_peft_model(base, lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    loader = DataLoader(training, batch_size=16, shuffle=True, collate_fn=collate)
    for step, batch in zip(range(steps), loader, strict=False):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step:3}  loss {loss.item():.4f}")
            model.save_pretrained("adapters")
    # --- end


if __name__ == "__main__":
    main()
