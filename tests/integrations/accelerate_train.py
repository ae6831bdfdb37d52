"""The script of the tests of Accelerate: one program as a ``Loop``, and as a loop for Accelerate."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from tests.integrations import programs
from tests.integrations.programs import CLIP, EPOCHS, GLOBAL_BATCH, MICRO_BATCH, RATE


class Count:
    """Something that the script has registered for checkpoints."""

    def __init__(self) -> None:
        self.number = 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def as_accelerate() -> tuple[Any, dict[str, Any]]:
    from holdfast.integrations.accelerate import Accelerator

    accelerator = Accelerator(global_batch=GLOBAL_BATCH, checkpoint=programs.kept(), cpu=True)
    model = programs.made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    loader = DataLoader(programs.samples(), batch_size=MICRO_BATCH, shuffle=True)
    test = DataLoader(programs.samples(10), batch_size=4)
    model, optimizer, loader, test, scheduler = accelerator.prepare(
        model, optimizer, loader, test, programs.falling(optimizer)
    )
    steps, values = Count(), list[float]()
    accelerator.register_for_checkpointing(steps)
    for _epoch in accelerator.epochs(EPOCHS, steps=int(os.environ.get("STEPS", "1000"))):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                assert float(norm) == accelerator.last.grad_norm
                steps.number += 1
                accelerator.log({"count": steps.number})
                programs.wait_if_wanted(accelerator.loop, accelerator.last.number)
        values.append(evaluated(accelerator, model, test))  # a plain list: whoever joins has a shorter one
    return accelerator.loop, {"count": steps.number, "value": evaluated(accelerator, model, test).hex()}


def evaluated(accelerator: Any, model: Any, test: Any) -> float:
    model.eval()
    with torch.no_grad():
        found = [accelerator.gather_for_metrics(mse_loss(model(x), y)) for x, y in test]
    model.train()
    return float(sum(found))


def as_documented() -> None:
    model = programs.made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    known = {
        "model": model, "optimizer": optimizer, "scheduler": programs.falling(optimizer),
        "loader": DataLoader(programs.samples(128), batch_size=MICRO_BATCH),
        "loss_of": lambda model, batch: mse_loss(model(batch[0]), batch[1]),
    }  # fmt: skip
    exec(programs.documented("accelerate.md"), known)
    programs.report(known["accelerator"].loop)


def main() -> None:
    if os.environ.get("FORM") == "loop":
        programs.report(programs.as_loop())
    elif os.environ.get("FORM") == "documented":
        as_documented()
    else:
        loop, found = as_accelerate()
        programs.report(loop, **found)


if __name__ == "__main__":
    main()
