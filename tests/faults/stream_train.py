"""The script of the tests of streams: packed text from shards of unequal length, filtered, with words that are kept."""

import json
import os
import random
import time
from collections.abc import Iterator

import torch
from torch import nn

import holdfast
from tests.faults.train import checkpoints_of

SHARDS, WINDOW = [23, 9, 12, 31, 0], 8


def packed(shard: str, epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Documents of a shard in an order of this epoch's, without the short ones, cut into windows of equal length."""
    number = int(shard)
    documents = [[(7 * number + d + w) % 50 for w in range(3 + d % 9)] for d in range(SHARDS[number])]
    random.shuffle(documents)  # drawn from the seed of this shard and epoch
    rest: list[int] = []
    for document in documents:
        if len(document) < 5:
            continue
        rest += document
        while len(rest) > WINDOW:
            yield torch.tensor(rest[:WINDOW]), torch.tensor(rest[1 : WINDOW + 1])
            rest = rest[WINDOW:]


def main() -> None:
    setting = os.environ.get
    torch.manual_seed(0)
    names = [str(number) for number in range(len(SHARDS))]
    if setting("ORDER") == "random" and setting("HOLDFAST_WORKER") == "0.1":
        names.reverse()
    stream = holdfast.Stream(
        packed,
        shards=names,
        epochs=int(setting("EPOCHS", "0")) or None,
        shuffle=True,
    )
    run = holdfast.Run(
        layers=[nn.Embedding(50, 16), nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 50)],
        loss=lambda output, target: nn.functional.cross_entropy(output.flatten(0, 1), target.flatten()),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        data=stream,
        global_batch=8,
        micro_batch=2,
        checkpoint=checkpoints_of(setting),
    )
    wanted = int(setting("WANTED", "0"))  # slow down until so many workers train, or that file exists
    for step in run.steps(int(setting("STEPS", "0")) or None):
        if step.workers != wanted and wanted and step.number >= 4 and not os.path.exists(setting("HURRY", "")):
            time.sleep(float(setting("PAUSE", "0.02")))
        if step.number == int(setting("BREAK", "-1")):
            break
    with open(os.environ["RESULTS"], "a") as results:
        results.write(json.dumps({"worker": setting("HOLDFAST_WORKER"), "sha256": run.sha256()}) + "\n")


if __name__ == "__main__":
    main()
