"""Learns to read digits drawn with noise, without any download: python digits.py, or holdfast run -n 4 digits.py"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import holdfast

FONT = """
.###. ..#.. .###. ##### ...#. ##### ..##. ##### .###. .###.
#...# .##.. #...# ...#. ..##. #.... .#... ....# #...# #...#
#..## ..#.. ....# ..#.. .#.#. ####. #.... ...#. #...# #...#
#.#.# ..#.. ...#. ...#. #..#. ....# ####. ..#.. .###. .####
##..# ..#.. ..#.. ....# ##### ....# #...# .#... #...# ....#
#...# ..#.. .#... #...# ...#. #...# #...# .#... #...# ...#.
.###. .###. ##### .###. ...#. .###. .###. .#... .###. .##..
"""
GLYPHS = torch.tensor([[c == "#" for c in row.replace(" ", "")] for row in FONT.split("\n")[1:-1]])
GLYPHS = GLYPHS.view(7, 10, 5).transpose(0, 1).float()  # ten digits of 7x5 pixels


class Digits:
    """Sample i: a digit somewhere on a 10x8 image, in noise; a pure function of i."""

    def __init__(self, numbers: range) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        dice = torch.Generator().manual_seed(self.numbers[i])
        digit, y, x = (int(torch.randint(n, (), generator=dice)) for n in (10, 4, 4))
        image = 0.3 * torch.randn(10, 8, generator=dice)
        image[y : y + 7, x : x + 5] += GLYPHS[digit] * (0.7 + 0.6 * torch.rand((), generator=dice))
        return image.unsqueeze(0), digit


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).float().mean()


def main() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.GELU(), nn.Conv2d(16, 32, 3, padding=1), nn.GELU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Dropout(0.1), nn.Linear(32 * 5 * 4, 64), nn.GELU(), nn.Linear(64, 10)]
    train, test = Digits(range(4000)), Digits(range(4000, 5000))
    run = holdfast.Run(
        layers=layers,
        loss=cross_entropy,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        data=train,
        global_batch=64,
        micro_batch=16,
    )
    epoch = -(-len(train) // 64)  # steps; the last batch of each has 32 samples
    for step in run.steps(5 * epoch):
        if (step.number + 1) % epoch == 0:
            right = run.evaluate(test, measure=accuracy)  # all workers share the work
            if step.is_first_worker:
                print(f"epoch {step.epoch + 1}: loss {step.loss:.3f}, {right:.1%} of the test digits right")
    sha256 = run.sha256()  # every worker calls it: a worker may hold only some of the layers
    if run.is_first_worker:
        print(f"sha256 of weights and optimizer state: {sha256}")


if __name__ == "__main__":
    main()
