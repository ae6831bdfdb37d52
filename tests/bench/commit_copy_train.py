"""The script of the fault sweeps, run by the contestant that copies its state."""

import os
from functools import partial

import holdfast
from bench.pipelines.commit_copy import CommitCopyRun
from tests.faults import train

if __name__ == "__main__":
    holdfast.Run = partial(CommitCopyRun, copy_every=int(os.environ["COPY_EVERY"]))  # type: ignore[assignment,misc]
    train.main()
