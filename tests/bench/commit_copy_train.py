"""The script of the fault sweeps, run by the contestant that copies its state."""

import os
from functools import partial

import holdfast
from holdfast.bench.commit_copy import CommitCopyRun
from tests.faults import train

holdfast.Run = partial(CommitCopyRun, copy_every=int(os.environ["COPY_EVERY"]))  # type: ignore[assignment,misc]
train.main()
