"""The training of resnet.py as people write it without holdfast: ``python examples/plain_resnet.py``."""

from __future__ import annotations

import torch
from resnet import Shapes, accuracy, mixup, resnet
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader


def main(steps: int = 120) -> None:
    torch.manual_seed(0)

    # --- before
    model = resnet()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=200)
    loader = DataLoader(Shapes(range(3000), augment=True), batch_size=32, shuffle=True, num_workers=1)
    test = DataLoader(Shapes(range(3000, 3400), augment=False), batch_size=40)
    step = 0
    while step < steps:
        for batch in loader:
            mixup(model, batch).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            step += 1
            if step % 40 == 0:
                for name, each in (("model", model), ("average", average)):
                    each.eval()
                    with torch.no_grad():
                        right = torch.stack([accuracy(each, batch) for batch in test]).mean()
                    each.train()
                    print(f"step {step:3}  accuracy of the {name} {right:.1%}")
            if step == steps:
                break
    # --- end


if __name__ == "__main__":
    main()
