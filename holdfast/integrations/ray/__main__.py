"""The program of each worker process: ``python -m holdfast.integrations.ray PROGRAM``, as an agent starts it."""

import sys
from pathlib import Path

from holdfast.integrations.ray.worker import main

if __name__ == "__main__":
    main(Path(sys.argv[1]))
