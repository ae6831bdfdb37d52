"""The train function of the tests in one process, without Ray."""

from __future__ import annotations

import json
import os

from tests.integrations.ray.training import train

if __name__ == "__main__":
    sha256 = train({"steps": int(os.environ["STEPS"]), "hurry": os.environ["HURRY"]})
    with open(os.environ["RESULTS"], "a") as results:
        results.write(json.dumps({"sha256": sha256}) + "\n")
