"""The script of the pipeline tests: ten unequal layers that pass tuples, dicts, masks and numbers to each other.

The first and the last layer share a weight; lengths change from micro-batch to micro-batch; the last batch and its
last micro-batch are ragged. Settings come from the environment, as in ``train.py``.
"""

import json
import os
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import holdfast
from holdfast import LogSettings
from tests.faults.log_hooks import meddle_with_log
from tests.faults.meddling import meddle
from tests.faults.train import checkpoints_of, clip_of, numerics_of, placement_of

SIZE, GLOBAL_BATCH, MICRO_BATCH = 69, 16, 2  # 4 full batches and one of 5: two micro-batches of 2 and one of 1
WORDS, LENGTH, WIDTH = 24, 7, 32


class Sentences:
    """Numbers to be said again in reverse; padded with zeros, with a little noise from the step's random numbers."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, i: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        generator = torch.Generator().manual_seed(i)
        length = 3 + i % (LENGTH - 2)
        words = torch.randint(1, WORDS, (LENGTH,), generator=generator)
        there = torch.arange(LENGTH) < length
        target = torch.where(there, words.flip(0).roll(length - LENGTH), -100)
        noisy = torch.where(torch.rand(LENGTH) < 0.05, 1, words)
        return (noisy * there, there), target


class Embed(nn.Module):
    """Numbers become vectors; what is padding for all samples is cut off, so that shapes change."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, given: Any) -> Any:
        words, there = given
        longest = int(there.sum(1).max())
        words, there = words[:, :longest], there[:, :longest]
        return self.drop(self.words(words)), there, words


class Places(nn.Module):
    """A buffer, a frozen weight, and a number that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.linspace(-1, 1, LENGTH))
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)
        self.shift = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Any) -> Any:
        x, there, words = given
        places = self.places[: x.shape[1], None] * self.scale
        return x + self.shift(x + places), {"there": there, "words": words}, x.shape[1]


class Mix(nn.Module):
    """Every word hears of all words of its sentence; takes and gives (x, notes, length)."""

    def __init__(self, hidden: int, drop: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.inside = nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Dropout(drop), nn.Linear(hidden, WIDTH))

    def forward(self, given: Any) -> Any:
        x, notes, length = given
        weights = (notes["there"][:, None, :] / notes["there"].sum(1)[:, None, None]).expand(-1, length, -1)
        x = x + weights @ self.mix(self.norm(x))
        return x + self.inside(x), notes, length


class Drop(nn.Module):
    """A layer without parameters, that works in place."""

    def forward(self, given: Any) -> Any:
        x, notes, length = given
        return nn.functional.dropout(x, 0.1, self.training, inplace=True), notes, length


class Split(nn.Module):
    """Several float tensors go on, one of them used much later."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, given: Any) -> Any:
        x, notes, _ = given
        gate, kept = self.gate(x).chunk(2, dim=-1)
        return {"x": x * gate.sigmoid(), "kept": kept, "notes": notes}


class Turn(nn.Module):
    """Stands alone on the dict; an integer tensor chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, given: Any) -> Any:
        odd = (given["notes"]["words"] % 2)[..., None]
        x = torch.where(odd == 1, self.turn(self.norm(given["x"])), given["x"])
        return {**given, "x": nn.functional.dropout(x, 0.1, self.training)}


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, given: Any) -> Any:
        return self.norm(given["x"] + given["kept"].tanh()), given["notes"]["there"]


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, given: Any) -> Tensor:
        x, there = given
        return torch.as_tensor(self.head(x).masked_fill(~there[..., None], 0.0))


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target[:, : output.shape[1]].flatten())


def make_layers(*, hidden: int = 96) -> list[nn.Module]:
    embed = Embed()
    head = holdfast.tied(Head(), **{"head.weight": embed.words.weight})
    mixing = [Mix(48, 0.1), Drop(), Mix(hidden, 0.2), Mix(16, 0.0)]
    return [embed, Places(), *mixing, Split(), Turn(), Join(), head]


def make_later(*, hidden: int = 96) -> list[Any]:
    """The same layers as functions: each worker makes those that it holds."""
    first = [Embed, Places, partial(Mix, 48, 0.1), Drop, partial(Mix, hidden, 0.2), partial(Mix, 16, 0.0)]
    return [*first, Split, Turn, Join, holdfast.tied(Head, **{"head.weight": "0.words.weight"})]


def log_of(log: str | None, memory: str | None) -> bool | int | LogSettings:
    """``LOG=1``: without limit; another number is a budget. ``LOG_MEMORY``: bytes that may stay in memory."""
    budget = None if log in (None, "", "0", "1") else int(log)
    if memory is not None and log not in (None, "", "0"):
        return LogSettings(budget=budget, memory=int(memory))
    return log == "1" if budget is None else budget


def main() -> None:
    setting = os.environ.get
    torch.manual_seed(int(setting("MODEL_SEED", "0")))
    meddle(setting("MEDDLE", ""))
    meddle_with_log(setting("LOG_MEDDLE", ""))
    run = holdfast.Run(
        layers=(make_later if setting("LATER") else make_layers)(hidden=int(setting("HIDDEN", "96"))),
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
        schedule=lambda step: 1e-2 / (1 + 0.1 * step),
        data=Sentences(),
        global_batch=GLOBAL_BATCH,
        micro_batch=MICRO_BATCH,
        clip_norm=clip_of(setting("CLIP", "0.5")),
        numerics=numerics_of(setting),
        placement=placement_of(setting),
        checkpoint=checkpoints_of(setting, log=log_of(setting("LOG"), setting("LOG_MEMORY"))),
    )
    if setting("FIRST_LOOP"):
        for _ in run.steps(int(setting("FIRST_LOOP", "0"))):
            pass
        run.sha256()
    wanted, patient = int(setting("WANTED", "0")), int(setting("PATIENT", "0"))
    values = {}
    for step in run.steps(int(setting("STEPS", "10"))):
        if step.number >= patient and step.workers != wanted and wanted and not os.path.exists(setting("HURRY", "")):
            time.sleep(float(setting("PAUSE", "0.02")))  # slow down until so many workers train, or that file exists
        if step.number % 4 == 3:
            values[step.number] = run.evaluate(Sentences())
    if setting("MODEL"):
        run.save_model(setting("MODEL", ""))
    found = {"sha256": run.sha256(), "weights": run.sha256(weights_only=True), "values": values}
    found["model"] = setting("MODEL")
    line = json.dumps({"worker": setting("HOLDFAST_WORKER"), "pid": os.getpid(), **found})
    with open(os.environ["RESULTS"], "a") as results:
        results.write(line + "\n")


if __name__ == "__main__":
    main()
