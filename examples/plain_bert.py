"""The training of bert.py as people write it without holdfast: ``python examples/plain_bert.py``."""

from __future__ import annotations

import torch
from bert import LONGEST, MODULES, TOTAL, Lines, f1, pad
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup


def main(steps: int = TOTAL) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = BertConfig(vocab_size=258, max_position_embeddings=LONGEST, num_labels=len(MODULES), **sizes)

    # --- before
    model = BertForSequenceClassification(config)
    plain = [p for name, p in model.named_parameters() if name.endswith("bias") or "LayerNorm" in name]
    rest = [p for name, p in model.named_parameters() if not (name.endswith("bias") or "LayerNorm" in name)]
    optimizer = torch.optim.AdamW(
        [{"params": rest, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}], lr=1e-3
    )
    schedule = get_linear_schedule_with_warmup(optimizer, 10, TOTAL)
    loader = DataLoader(Lines(test=False), batch_size=16, shuffle=True, collate_fn=pad)
    step = 0
    while step < steps:
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if step % 20 == 0:
                print(f"step {step:3}  loss {loss.item():.4f}, norm of the gradient {norm:.2f}")
            step += 1
            if step == steps:
                break
    model.eval()
    predicted, labels = [], []
    with torch.no_grad():
        for batch in DataLoader(Lines(test=True), batch_size=16, collate_fn=pad):
            predicted.append(model(**batch).logits.argmax(-1))
            labels.append(batch["labels"])
    print(f"F1 {f1(torch.cat(predicted), torch.cat(labels)):.3f}")
    # --- end


if __name__ == "__main__":
    main()
