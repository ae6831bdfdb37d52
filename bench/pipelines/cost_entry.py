"""Script that measures the model's costs in every turn, so that the planner's estimate is of the same moment."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from bench.peers.common import ProgressFile
from holdfast.engine.profile.measure import measure
from holdfast.engine.profile.run_script import until_training

if TYPE_CHECKING:
    from holdfast.run.training import Training

ROUNDS = 6  # forward and backward passes that are timed in a turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", type=int, required=True)
    parser.add_argument("--progress", required=True)
    parser.add_argument("--burst", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    args, model = parser.parse_known_args()
    target = Path(f"{args.progress}.costs-{args.worker}")

    def look(run: Training) -> None:
        progress = ProgressFile(args, args.worker)
        with target.open("a", buffering=1) as file:
            for step in range(1, args.steps + 1):
                if step % args.burst == 1 or args.burst == 1:  # one measurement stands for the steps of a turn
                    layers = measure(run.engine, rounds=ROUNDS)
                    file.write(json.dumps([vars(cost) for cost in layers.costs]) + "\n")
                progress.finished(step)

    until_training(["bench.pipelines.pipeline_entry", *model], look, module=True)


if __name__ == "__main__":
    main()
